"""Is a resumed run the run that was never stopped? Every number of every step, and every tensor.

A run leaves a `Trace` behind: the lines of its metrics, the hash of each step's plan, hashes of
everything it remembered when it went on, and at its end. Two traces are compared exactly, in the
order in which a fault would spread: what was restored, the steps before the stop, the numbers of
the steps after it, the tensors at the end. What differs first says where to look (`suggestion`).
Pure: reading is `kimi_pretrain.verify.trace`'s.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

# Of a line: how long things took, how much memory and how many requests. They never come out equal.
MEASURED = (
    "exposed_encoder_share", "imbalance.measured", "peak_gib", "peak_gib_step", "mfu",
    "model_tflops_per_gpu", "peak_tflops_per_gpu", "peak_source", "store", "checkpoint",
)  # fmt: skip
# What a step reads; if these differ, all that follows must.
READ = (
    "samples", "tokens", "loss_tokens", "text_tokens", "vision_tokens", "items", "skipped_samples",
)  # fmt: skip
_FIRST = (*READ, "loss", "grad_norm", "lr", "applied", "skipped_steps")
_PIECE = 1 << 24  # elements compared at a time


@dataclass(frozen=True)
class Moment:
    """Everything a run remembers between two steps.

    Attributes:
        tensors: name -> SHA-256, model and optimizer.
        state: the rest, as plain values: step, optimizer_steps, loader, losses.
    """

    tensors: Mapping[str, str] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Trace:
    """What a run left behind.

    Attributes:
        lines: step -> its line of metrics.
        samples: step -> hash of its plan; empty where nobody watched.
        resumed: before the first step after the stop; None where nobody watched.
        end: after the last step.
    """

    lines: Mapping[int, Mapping[str, Any]]
    samples: Mapping[int, str] = field(default_factory=dict)
    resumed: Moment | None = None
    end: Moment = field(default_factory=Moment)


@dataclass(frozen=True)
class NumberDifference:
    """A number of a step, or a value of the state, that is not the same; None: it is not there."""

    step: int
    name: str
    found: Any
    wanted: Any


@dataclass(frozen=True)
class TensorDifference:
    """A tensor that is not the same.

    Attributes:
        elements: of the tensor; 0 where the shapes or types differ.
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
        tensors: compared at the end.
        restored: what was not the same when the run went on: values of the state.
        restored_tensors: likewise, tensors; None where nobody watched.
        before: the numbers that differ in the first step that differs before the stop.
        numbers: those of the first step that differs after it.
        end: values of the state that differ at the end.
        end_tensors: tensors that differ at the end.
        first: how far the first of them is off, where it could be read.
    """

    stop: int
    steps: int
    tensors: int
    restored: tuple[NumberDifference, ...] = ()
    restored_tensors: tuple[str, ...] | None = None
    before: tuple[NumberDifference, ...] = ()
    numbers: tuple[NumberDifference, ...] = ()
    end: tuple[NumberDifference, ...] = ()
    end_tensors: tuple[str, ...] = ()
    first: TensorDifference | None = None

    @property
    def passed(self) -> bool:
        """Whether the two runs are one, bit for bit. Nothing compared is no pass."""
        found = (self.restored, self.restored_tensors, self.before, self.numbers, self.end)
        return self.steps > 0 and self.tensors > 0 and not any(found) and not self.end_tensors

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, with the sentences that a person reads."""
        return {
            "passed": self.passed,
            **asdict(self),
            "differences": sentences(self),
            "suggestion": None if self.passed else suggestion(self),
        }


def compare(
    found: Trace,
    wanted: Trace,
    stop: int,
    read: Callable[[str], tuple[Tensor, Tensor]] | None = None,
) -> Comparison:
    """Compare a run that was stopped with one that was not.

    Args:
        found: of the stopped and resumed run; its lines may begin after the stop.
        wanted: of the run that was never stopped.
        stop: last step before the stop.
        read: name -> the tensor at the end of both, to say how far the first difference goes.
    """
    resumed, watched = Moment(), None
    if found.resumed is not None and wanted.resumed is not None:
        resumed, watched = found.resumed, wanted.resumed
    end_tensors = unequal(found.end.tensors, wanted.end.tensors)
    both = read is not None and end_tensors and end_tensors[0] in found.end.tensors
    first = None
    if both and end_tensors[0] in wanted.end.tensors:
        assert read is not None
        first = tensor_difference(end_tensors[0], *read(end_tensors[0]))
    steps = sorted(set(found.lines) | {step for step in wanted.lines if step > stop})
    parts = [step for step in steps if (found.lines.get(step), wanted.lines.get(step)) and True]
    del parts
    return Comparison(
        stop=stop,
        steps=sum(step > stop and step in wanted.lines for step in found.lines),
        tensors=len(wanted.end.tensors),
        restored=state_differences(stop, resumed.state, watched.state) if watched else (),
        restored_tensors=unequal(resumed.tensors, watched.tensors) if watched else None,
        before=_first_step(found, wanted, [step for step in steps if step <= stop]),
        numbers=_first_step(found, wanted, [step for step in steps if step > stop]),
        end=state_differences(max(steps, default=0), found.end.state, wanted.end.state),
        end_tensors=end_tensors,
        first=first,
    )
