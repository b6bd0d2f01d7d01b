"""Compares a resumed run with a run that was never stopped, in every number and tensor. Pure.

Two traces are compared exactly, in the order in which a fault would spread: the steps before the
stop, the restored state, the numbers of the steps after it, the tensors at the end. In another
layout the steps must read the same samples, and losses may differ by rounding.

The suggested causes follow the order within a step: it reads data, computes a loss and gradients,
and updates the weights from them and from the optimizer's state. The first difference is the cause
or its immediate effect.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kimi_pretrain.verify.result import Comparison, relative_error
from kimi_pretrain.verify.traces import (
    HELDOUT,
    READ,
    ReadBoth,
    TensorDifference,
    Trace,
    ValueDifference,
    line_differences,
    numbers_of,
    tensor_difference,
    unequal,
    value_differences,
)

_STATES = {
    "momentum": "Muon's momentum",
    "exp_avg": "AdamW's mean of gradients",
    "exp_avg_sq": "AdamW's mean of squares",
    "master": "the fp32 masters of the weights",
}
# Keyed by train.dtype: bounds for the first step after the stop, and for later steps. If rounding
# routes one token to another expert, the loss of a small batch moves by 2e-5 in float32.
ROUNDING = {"float64": (1e-10, 1e-8), "float32": (1e-5, 1e-3), "bfloat16": (2e-2, 5e-2)}


@dataclass(frozen=True)
class ResumeComparison(Comparison):
    """Comparison of a resumed run with a run that was never stopped; tensors in model order."""

    stop: int  # step after which the run was stopped
    steps: int  # steps compared after the stop
    numbers: int  # numbers compared in these steps
    tensors: int  # tensors compared at the end
    before: tuple[ValueDifference, ...] = ()  # in the first different step before the stop
    restored: tuple[ValueDifference, ...] = ()  # in the state at the resume
    restored_tensors: tuple[str, ...] | None = None  # at the resume; None without observation
    after: tuple[ValueDifference, ...] = ()  # in the first different step after the stop
    end: tuple[ValueDifference, ...] = ()  # in the state at the end
    end_tensors: tuple[str, ...] = ()
    first: TensorDifference | None = None  # for the first of `end_tensors`, if both runs have it

    @property
    def passed(self) -> bool:
        """True if the runs are bitwise equal; an empty comparison does not pass."""
        differing = (self.before, self.restored, self.restored_tensors, self.after, self.end)
        compared = self.steps > 0 and self.numbers > 0 and self.tensors > 0
        return compared and not any(differing) and not self.end_tensors

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON: the fields, with `differences` and `suggestion`."""
        cause = None if self.passed else suggestion(self)
        return super().as_dict() | {"differences": differences(self), "suggestion": cause}


def compare(
    found: Trace, wanted: Trace, stop: int, read: ReadBoth | None = None
) -> ResumeComparison:
    """Compare a run that was stopped with a run that was not.

    Args:
        found: trace of the stopped and resumed run; its lines may begin after the stop.
        wanted: trace of the run that was never stopped.
        stop: last step before the stop.
        read: returns a tensor by name, at the end of both runs; called only if both runs have it.
    """

    def first_step(steps: Iterable[int]) -> tuple[ValueDifference, ...]:
        """Return the differences of the first step that has any."""
        return next(filter(None, (line_differences(s, found, wanted) for s in steps)), ())

    after = sorted(step for step in {*found.lines, *wanted.lines} if step > stop)
    before = sorted(step for step in found.lines if step <= stop)
    both = [step for step in after if step in found.lines and step in wanted.lines]
    end_tensors = unequal(found.end.tensors, wanted.end.tensors)
    first = next(iter(end_tensors), None)
    held = first in found.end.tensors and first in wanted.end.tensors
    end = max(after, default=stop)
    comparison = ResumeComparison(
        stop=stop,
        steps=len(both),
        numbers=sum(len(numbers_of(wanted.lines[step])) for step in both),
        tensors=len(wanted.end.tensors),
        before=first_step(before),
        after=first_step(after),
        end=value_differences(end, found.end.state, wanted.end.state),
        end_tensors=end_tensors,
        first=tensor_difference(first, *read(first)) if read and first and held else None,
    )
    if found.resumed and wanted.resumed:  # both runs were observed
        mine, other = found.resumed, wanted.resumed
        comparison = replace(
            comparison,
            restored=value_differences(stop, mine.state, other.state),
            restored_tensors=unequal(mine.tensors, other.tensors),
        )
    return comparison


@dataclass(frozen=True)
class LayoutComparison(Comparison):
    """Comparison of a run that resumed in another layout with a run that was never stopped."""

    stop: int  # step after which the layout changed
    steps: int  # steps compared after the stop
    after: tuple[ValueDifference, ...]  # differences in what the steps read
    loss_errors: tuple[float, ...]  # relative error of each step's loss
    norm_errors: tuple[float, ...]  # relative error of each step's gradient norm
    # Bounds for the first step, whose weights are equal, and for later steps, whose weights carry
    # the rounding of earlier updates.
    allowed: tuple[float, float]
    layout: Mapping[str, Any]  # the other layout, as plain values
    heldout_errors: tuple[float, ...] = ()  # relative error of each validation loss

    @property
    def passed(self) -> bool:
        """True if the run read the same samples, and losses and norms agree up to rounding."""
        errors = zip(self.loss_errors, self.norm_errors, strict=True)
        within = [error <= self.allowed[at > 0] for at, pair in enumerate(errors) for error in pair]
        within += [error <= self.allowed[1] for error in self.heldout_errors]
        return self.steps > 0 and not self.after and all(within)


def compare_layouts(
    found: Trace, wanted: Trace, stop: int, dtype: str, layout: Mapping[str, Any]
) -> LayoutComparison:
    """Compare a run that resumed in another layout with a run that was never stopped.

    Args:
        found, wanted, stop: as in `compare`.
        dtype: `train.dtype`.
        layout: layout of `found`.
    """
    steps = sorted(step for step in {*found.lines, *wanted.lines} if step > stop)
    both = [step for step in steps if step in found.lines and step in wanted.lines]
    differing = (line_differences(step, found, wanted) for step in steps)
    names = {"line", *READ, *(f"{HELDOUT}.{name}" for name in READ)}
    read = [one for step in differing for one in step if one.name in names]

    def error(mine: float | None, other: float | None) -> float:
        if mine is None or other is None:  # infinite if only one of them is a number
            return 0.0 if mine is other else math.inf
        return relative_error(mine, other)

    def errors(name: str) -> tuple[float, ...]:
        return tuple(error(found.lines[s][name], wanted.lines[s][name]) for s in both)

    validated = [s for s in both if HELDOUT in found.lines[s] and HELDOUT in wanted.lines[s]]

    return LayoutComparison(
        stop=stop,
        steps=len(both),
        after=tuple(read),
        loss_errors=errors("loss"),
        norm_errors=errors("grad_norm"),
        allowed=ROUNDING[dtype],
        layout=layout,
        heldout_errors=tuple(
            error(*(one.lines[step][HELDOUT]["loss"] for one in (found, wanted)))
            for step in validated
        ),
    )


def differences(c: ResumeComparison) -> list[str]:
    """Return a sentence for each difference, in the order in which a fault spreads."""
    resumed = f"as the run went on after step {c.stop}, "
    sentences = [
        c.before and f"before the stop, {_step(c.before)}",
        c.restored and resumed + _numbers(c.restored),
        c.restored_tensors and resumed + _tensors(c.restored_tensors),
        c.after and _step(c.after),
        c.end and f"at the end, {_numbers(c.end)}",
        c.end_tensors and f"at the end, {_tensors(c.end_tensors, c.tensors)}{_apart(c)}",
    ]
    found = [sentence for sentence in sentences if isinstance(sentence, str)]
    return found if found or c.passed else ["nothing was compared"]


def suggestion(c: ResumeComparison) -> str:
    """Return the likely cause of the differences; the most reliable evidence decides."""
    names = {one.name for one in c.after}
    state = {one.name for one in (c.restored or c.end)}
    restored = c.restored_tensors or ()
    first = bool(c.after) and c.after[0].step == c.stop + 1
    watched = c.restored_tensors is not None
    known = "weights, optimizer and loader were restored as they were, so "
    if c.before:
        return (
            "the two runs part before the stop, so this configuration does not come out the same "
            "twice on this machine, and nothing can be said of its resume: look for operations "
            "that are not deterministic"
        )
    if any(name.startswith("loader.") for name in state) or names & {*READ}:
        return (
            "the steps after the stop read other samples: the loader's state was not saved, or "
            "not restored as it was"
        )
    if "lr" in names or "optimizer_steps" in state or "optim.step" in restored:
        return (
            "the count of updates was not restored: the learning rate and AdamW's correction "
            "follow it"
        )
    if any(name.endswith("e_score_correction_bias") for name in restored):
        return (
            "the routing biases were not saved, or not restored as they were: they are no "
            "parameters, and are easily forgotten"
        )
    if any(not name.startswith("optim.") for name in restored):
        return "weights were not saved, or not restored as they were"
    if restored:
        parts = sorted({name.split(".")[1] for name in restored})
        states = " and ".join(_STATES.get(part, part) for part in parts)
        return f"the optimizer's state was not saved, or not restored as it was: {states}"
    if first and "loss" in names:
        return (
            f"{known if watched else ''}the first loss after the stop differs for another reason: "
            "a random number whose generator nothing restores, or a value that no checkpoint holds"
        )
    if first and "grad_norm" in names:
        return (
            "the first loss after the stop is the same and its gradient is not: something in the "
            "backward pass is random, or remembers what no checkpoint holds"
        )
    if names and all(name.startswith(f"{HELDOUT}.") for name in names):
        return (
            "training came out the same and the held-out loss did not: the validation read other "
            "samples, or depends on something that no checkpoint holds"
        )
    if c.after or c.end_tensors:
        return (
            (known if watched else "the optimizer's state was not restored as it was, or ")
            + "an update came out differently from the same gradient: a random number, or a value "
            "that no checkpoint holds, in the optimizer"
        )
    if c.end or c.restored:
        return "what the run counts besides tensors was not restored"
    return "neither run got beyond the stop; see the logs of both"


def _step(found: Sequence[ValueDifference]) -> str:
    return f"step {found[0].step} is the first that differs: {_numbers(found)}"


def _numbers(found: Sequence[ValueDifference]) -> str:
    first = found[0]
    if first.name == "line":
        missing = "resumed" if not first.found else "uninterrupted"
        return f"the {missing} run never did it"
    text = f"{first.name} is {_short(first.found)}, was {_short(first.wanted)}"
    others = [one.name for one in found[1:]]
    if len(others) < 2:
        return text + "".join(f" (so does {name})" for name in others)
    more = f" and {len(others) - 4} more" if len(others) > 4 else ""
    return f"{text} (so do {', '.join(others[:4])}{more})"


def _tensors(names: Sequence[str], of: int | None = None) -> str:
    count = f"{len(names)} of {of}" if of else f"{len(names)}"
    verb = "tensor is" if len(names) == 1 and not of else "tensors are"
    return f"{count} {verb} not the same, first {names[0]}"


def _apart(c: ResumeComparison) -> str:
    if c.first is None:
        return ""
    if not c.first.elements:
        return " (another shape or type)"
    largest = "not finite" if c.first.largest is None else f"{c.first.largest:.2g}"
    count = f"{c.first.differing:,} of its {c.first.elements:,} numbers"
    return f" ({count}, the largest difference is {largest})"


def _short(value: Any) -> str:
    """Return the repr of a value, which gives a float all its digits; hashes are shortened."""
    if value is None:
        return "missing"
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= 24 else f"{text[:12]}..."
