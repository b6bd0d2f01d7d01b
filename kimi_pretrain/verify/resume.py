"""Is a resumed run the run that was never stopped? Every number of every step, and every tensor.

A run leaves a `Trace`: the lines of its metrics, the hash of each step's plan, and hashes of all it
remembered when it went on and at its end. Two traces are compared exactly, in the order in which a
fault would spread: the steps before the stop, what was restored, the numbers of the steps after it,
the tensors at the end. `kimi_pretrain.verify.findings` tells a person what differs first, and what
that suggests. Pure: `kimi_pretrain.verify.trace` reads and writes.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kimi_pretrain.verify.order import in_model_order

# Of a line: how long it took, and how much memory and how many requests. Never the same twice.
MEASURED = (
    "exposed_encoder_share", "exposed_encoder_parts", "imbalance.measured", "peak_gib",
    "peak_gib_step", "mfu", "model_tflops_per_gpu", "peak_tflops_per_gpu", "peak_source", "store",
    "checkpoint",
)  # fmt: skip
# What a step reads, whatever the layout; where these differ, all that follows must.
READ = (
    "samples", "tokens", "loss_tokens", "text_tokens", "vision_tokens", "items", "skipped_samples",
)  # fmt: skip
_FIRST = (*READ, "loss", "grad_norm", "lr", "applied", "skipped_steps")
_PIECE = 1 << 24  # elements compared at a time


@dataclass(frozen=True)
class Moment:
    """Everything a run remembers between two steps.

    Attributes:
        tensors: name -> SHA-256, of the model and of the optimizer.
        state: the rest, in plain values: step, optimizer_steps, loader, losses.
    """

    tensors: Mapping[str, str] = field(default_factory=dict[str, str])
    state: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class Trace:
    """What a run left behind.

    Attributes:
        lines: step -> its line of metrics.
        samples: step -> hash of its plan; empty where nobody watched.
        began: step that the last of its processes went on from; None where nobody watched.
        resumed: before the first step after the stop; None where nobody watched.
        end: after the last step.
    """

    lines: Mapping[int, Mapping[str, Any]]
    samples: Mapping[int, str] = field(default_factory=dict[int, str])
    began: int | None = None
    resumed: Moment | None = None
    end: Moment = field(default_factory=Moment)


@dataclass(frozen=True)
class Difference:
    """A number of a step, or a value of the state; None: it is not there."""

    step: int
    name: str
    found: Any
    wanted: Any


@dataclass(frozen=True)
class TensorDifference:
    """How far a tensor is off.

    Attributes:
        elements: of the tensor; 0 where shapes or types differ, so that none can be compared.
        differing: elements that are not equal bit for bit.
        largest: absolute difference; None where one is not finite.
    """

    name: str
    elements: int
    differing: int
    largest: float | None


@dataclass(frozen=True)
class Comparison:
    """The verdict; tensors are in the order of the model.

    Attributes:
        stop: step after which the run was stopped.
        steps: compared after it.
        numbers: compared in them.
        tensors: compared at the end.
        before: what differs in the first step that differs before the stop.
        restored: values of the state that were not the same when the run went on.
        restored_tensors: likewise, tensors; None where nobody watched.
        after: what differs in the first step that differs after the stop.
        end: values of the state that differ at the end.
        end_tensors: tensors that differ at the end.
        first: how far the first of them is off, where it could be read.
    """

    stop: int
    steps: int
    numbers: int
    tensors: int
    before: tuple[Difference, ...] = ()
    restored: tuple[Difference, ...] = ()
    restored_tensors: tuple[str, ...] | None = None
    after: tuple[Difference, ...] = ()
    end: tuple[Difference, ...] = ()
    end_tensors: tuple[str, ...] = ()
    first: TensorDifference | None = None

    @property
    def passed(self) -> bool:
        """Whether the two runs are one, bit for bit. Nothing compared is no pass."""
        differing = (self.before, self.restored, self.restored_tensors, self.after, self.end)
        compared = self.steps > 0 and self.numbers > 0 and self.tensors > 0
        return compared and not any(differing) and not self.end_tensors

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {"passed": self.passed, **asdict(self)}


ReadBoth = Callable[[str], tuple[Tensor, Tensor]]


def compare(found: Trace, wanted: Trace, stop: int, read: ReadBoth | None = None) -> Comparison:
    """Compare a run that was stopped with one that was not.

    Args:
        found: of the stopped and resumed run; its lines may begin after the stop.
        wanted: of the run that was never stopped.
        stop: last step before the stop.
        read: name -> the tensor at the end of both runs; not asked for what only one of them has.
    """
    after = sorted(step for step in {*found.lines, *wanted.lines} if step > stop)
    before = sorted(step for step in found.lines if step <= stop)
    both = [step for step in after if step in found.lines and step in wanted.lines]
    end_tensors = unequal(found.end.tensors, wanted.end.tensors)
    first = next(iter(end_tensors), None)
    held = first in found.end.tensors and first in wanted.end.tensors
    end = max(after, default=stop)
    comparison = Comparison(
        stop=stop,
        steps=len(both),
        numbers=sum(len(numbers_of(wanted.lines[step])) for step in both),
        tensors=len(wanted.end.tensors),
        before=_first_step(found, wanted, before),
        after=_first_step(found, wanted, after),
        end=state_differences(end, found.end.state, wanted.end.state),
        end_tensors=end_tensors,
        first=tensor_difference(first, *read(first)) if read and first and held else None,
    )
    if found.resumed is None or wanted.resumed is None:
        return comparison
    return replace(
        comparison,
        restored=state_differences(stop, found.resumed.state, wanted.resumed.state),
        restored_tensors=unequal(found.resumed.tensors, wanted.resumed.tensors),
    )


def line_differences(step: int, found: Trace, wanted: Trace) -> tuple[Difference, ...]:
    """Return the numbers of a step that are not the same, in the order in which they come to be."""
    if step not in found.lines or step not in wanted.lines:
        return (Difference(step, "line", step in found.lines, step in wanted.lines),)
    mine, others = numbers_of(found.lines[step]), numbers_of(wanted.lines[step])
    if found.samples and wanted.samples:  # both were watched
        mine["samples"], others["samples"] = found.samples.get(step), wanted.samples.get(step)
    names = [name for name in {**others, **mine} if not _same(mine, others, name)]
    order = {name: place for place, name in enumerate(_FIRST)}
    names.sort(key=lambda name: order.get(name, len(order)))  # stable: then as in the line
    return tuple(Difference(step, name, mine.get(name), others.get(name)) for name in names)


def numbers_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a line must come out the same: "name", "name.inner", "name.3" -> value.

    Without what was measured: seconds, memory, requests, and what is made of those.
    """
    return {name: value for name, value in _leaves(line) if not _measured(name)}


def state_differences(
    step: int, found: Mapping[str, Any], wanted: Mapping[str, Any]
) -> tuple[Difference, ...]:
    """Return the values of the state ("loader.step") that are not the same."""
    mine, others = dict(_leaves(found)), dict(_leaves(wanted))
    names = [name for name in {**others, **mine} if not _same(mine, others, name)]
    return tuple(Difference(step, name, mine.get(name), others.get(name)) for name in names)


def unequal(found: Mapping[str, str], wanted: Mapping[str, str]) -> tuple[str, ...]:
    """Return the tensors that are not the same, or are in one run alone, in the model's order."""
    return tuple(
        in_model_order(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
    )


def tensor_difference(name: str, found: Tensor, wanted: Tensor) -> TensorDifference:
    """Return how far two tensors are apart: in bits, so that equal NaNs are equal."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return TensorDifference(name, 0, 0, None)
    differing, largest = 0, 0.0
    pieces = (tensor.detach().cpu().reshape(-1).split(_PIECE) for tensor in (found, wanted))
    for mine, other in zip(*pieces, strict=True):
        bits = (_bits(mine) != _bits(other)).any(1)
        differing += int(bits.sum())
        if bits.any():
            apart = (mine[bits].double() - other[bits].double()).abs()
            largest = max(largest, float(apart.nan_to_num(nan=math.inf, posinf=math.inf).max()))
    return TensorDifference(name, found.numel(), differing, largest if largest < math.inf else None)


def _first_step(found: Trace, wanted: Trace, steps: Iterable[int]) -> tuple[Difference, ...]:
    """Return what differs in the first of the steps in which anything does."""
    for step in steps:
        if differing := line_differences(step, found, wanted):
            return differing
    return ()


def _leaves(values: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield "outer.inner" and what is there; lists of plain values are opened by their places."""
    if isinstance(values, Mapping):
        pairs: Iterable[tuple[Any, Any]] = values.items()
    elif isinstance(values, list | tuple):
        pairs = enumerate(values)
    else:
        yield name, values
        return
    for key, value in pairs:
        yield from _leaves(value, f"{name}.{key}" if name else str(key))


def _measured(name: str) -> bool:
    return "seconds" in name or any(name == one or name.startswith(f"{one}.") for one in MEASURED)


def _same(found: Mapping[str, Any], wanted: Mapping[str, Any], name: str) -> bool:
    if name not in found or name not in wanted:
        return False
    mine, other = found[name], wanted[name]
    return mine == other or (mine != mine and other != other)  # NaN is the same as NaN


def _bits(x: Tensor) -> Tensor:
    """Return [elements, bytes] uint8."""
    return x.contiguous().view(torch.uint8).reshape(len(x), -1)
