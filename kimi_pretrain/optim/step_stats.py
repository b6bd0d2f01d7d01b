"""Statistics of an optimizer step: RMS and orthogonality of updates, time in Newton-Schulz.

`StepStats` collects them on the device for the tensors that a rank owns. `StepStats.figures` reads
all of them in one transfer as plain numbers for the per-rank report, and `merge_figures` combines
the figures of all ranks.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kimi_pretrain.telemetry.stopwatch import Stopwatch


@dataclass(frozen=True)
class UpdateFigures:
    """Figures of a step, of one rank or of the whole model (`merge_figures`).

    Attributes:
        squares: parameter group -> sum of squares of its updates, before the learning rate.
        elements: parameter group -> number of elements updated.
        newton_schulz_seconds: seconds of orthogonalisation.
        orthogonality_error: the largest error; None if not measured.
    """

    squares: dict[str, float] = field(default_factory=dict)
    elements: dict[str, int] = field(default_factory=dict)
    newton_schulz_seconds: float = 0.0
    orthogonality_error: float | None = None

    @property
    def update_rms(self) -> dict[str, float]:
        """Root mean square of each group's updates before the learning rate; see METRICS.md."""
        return {
            group: (square / self.elements[group]) ** 0.5
            for group, square in self.squares.items()
            if self.elements[group]
        }


def merge_figures(ranks: Iterable[UpdateFigures]) -> UpdateFigures:
    """Return the figures of the model from the figures of all ranks, in rank order.

    Sums of squares and counts are added, so a group's RMS covers all its elements for any
    assignment of owners, and does not change if every rank updates everything. Seconds are from the
    slowest rank, and the error is the largest; a NaN of any rank is kept.
    """
    squares: dict[str, float] = {}
    elements: dict[str, int] = {}
    seconds, errors = 0.0, []
    for one in ranks:
        for group, square in one.squares.items():
            squares[group] = squares.get(group, 0.0) + square
            elements[group] = elements.get(group, 0) + one.elements[group]
        seconds = max(seconds, one.newton_schulz_seconds)
        if one.orthogonality_error is not None:
            errors.append(one.orthogonality_error)
    return UpdateFigures(
        {group: squares[group] for group in sorted(squares)},
        {group: elements[group] for group in sorted(elements)},
        seconds,
        _largest(errors),
    )


@dataclass
class StepStats:
    """Statistics of one step on this rank, for the tensors it owns."""

    device: torch.device
    _squares: dict[str, list[Tensor]] = field(default_factory=dict)
    _elements: dict[str, int] = field(default_factory=dict)
    _errors: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._newton_schulz = Stopwatch(self.device)

    def count(self, group: str, updates: Sequence[Tensor]) -> None:
        """Add updates to the sums of a parameter group (`Rule.group`).

        Args:
            group: the parameter group.
            updates: updates of any shape, before the learning rate; read now, not kept.
        """
        squares = self._squares.setdefault(group, [])
        for update in updates:
            squares.append(torch.linalg.vector_norm(update).double().square())
            self._elements[group] = self._elements.get(group, 0) + update.numel()

    def orthogonality(self, error: Tensor) -> None:
        """Add orthogonality errors (`newton_schulz.orthogonality_error`), of any shape."""
        self._errors.append(error.detach().double().amax())

    def clock(self) -> AbstractContextManager[None]:
        """Return a context whose duration is added to the Newton-Schulz time."""
        return self._newton_schulz.running()

    def figures(self) -> UpdateFigures:
        """Return all statistics as plain numbers; one transfer, which synchronises the device."""
        groups = sorted(group for group, squares in self._squares.items() if squares)
        sums = [torch.stack(self._squares[group]).sum() for group in groups]
        scalars = sums + self._errors
        values: list[float] = torch.stack(scalars).tolist() if scalars else []
        return UpdateFigures(
            dict(zip(groups, values)),
            {group: self._elements[group] for group in groups},
            self._newton_schulz.seconds(),
            _largest(values[len(groups) :]),
        )


def _largest(errors: Sequence[float]) -> float | None:
    """Return the largest error; NaN if any is NaN, which `max` drops or keeps by its position."""
    if not errors:
        return None
    return max(errors) if all(error == error for error in errors) else float("nan")
