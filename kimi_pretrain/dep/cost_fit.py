"""Fits a cost model to measured seconds of encoder work by non-negative least squares. Pure.

Seconds of a pack = per_patch * patches + per_patch_squared * squares of its items' patches +
per_item * items + per_chunk. The last term is the constant cost of starting a pack. A rank with
items pays it about once, so it is not part of an item's cost. Without this term, the fit would
derive the cost per item from packs of one and overestimate it by far. Patches are the ones that
kernels process: on CPU a pack is padded to whole blocks.

Weights are relative: an error of 10% counts the same for an icon and for a page.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.dep.cost import CostModel
from moonvit3d.config import MoonViTConfig

Floats = NDArray[np.float64]
Grid = tuple[int, int, int]

MIN_SIZES = 3  # distinct item sizes; fewer cannot separate a line from a parabola
DIGITS = 4  # significant digits of a coefficient, more than a measurement has


@dataclass(frozen=True)
class Pack:
    """Items encoded together in one pack; all have the same (frames, height, width)."""

    grids: tuple[Grid, ...]

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Patches of each item, int64 [items]."""
        return np.array([t * h * w for t, h, w in self.grids], dtype=np.int64)

    @property
    def patches(self) -> int:
        """Patches of all items."""
        return int(self.sizes.sum())

    @property
    def name(self) -> str:
        """Readable name: "512 x 4x4" is a pack of 512 items of 4 by 4 patches."""
        t, h, w = self.grids[0]
        frames = f"{t} frames of " if t > 1 else ""
        count = f"{len(self.grids)} x " if len(self.grids) > 1 else ""
        return f"{count}{frames}{h}x{w}"


@dataclass(frozen=True)
class Timing:
    """Median seconds of a pack.

    Attributes:
        forward: seconds of a forward pass without graph.
        total: seconds of a training step: that forward pass, then one with graph and its backward.
        filled: empty patches that the encoder added as padding (CPU only).
    """

    pack: Pack
    forward: float
    total: float
    filled: int = 0


@dataclass(frozen=True)
class Fit:
    """A cost model and its agreement with the timings it was fitted to.

    Attributes:
        cost: seconds of an item's work in a training step.
        per_chunk: constant seconds of each pack on top.
        predicted: seconds of each timing by the fit, float64 [timings].
        errors: predicted over measured, minus 1, float64 [timings].
    """

    cost: CostModel
    per_chunk: float
    predicted: Floats
    errors: Floats

    @property
    def median_error(self) -> float:
        """Median absolute error."""
        return float(np.median(np.abs(self.errors)))

    @property
    def worst_error(self) -> float:
        """Largest absolute error."""
        return float(np.abs(self.errors).max())


def fit(timings: Sequence[Timing]) -> Fit:
    """Fit the cost model to timings of single items and of packs.

    Raises:
        ValueError: the timings do not determine the model: too few sizes, or no packs of several
            items.
    """
    check_enough(timings)
    measured = np.array([timing.total for timing in timings])
    terms = _terms(timings)
    coefficients = non_negative(terms / measured[:, None], np.ones(len(measured)))
    per_patch, squared, per_item, per_chunk = (
        float(f"{value:.{DIGITS}g}") for value in coefficients
    )
    predicted = terms @ np.array([per_patch, squared, per_item, per_chunk])
    errors = predicted / measured - 1
    return Fit(CostModel(per_patch, squared, per_item), per_chunk, predicted, errors)


def check_enough(timings: Sequence[Timing]) -> None:
    """Refuse timings that cannot separate the terms.

    Raises:
        ValueError: the message says what is missing and what to do.
    """
    sizes = {int(timing.pack.sizes[0]) for timing in timings}
    packs = sum(len(timing.pack.grids) > 1 for timing in timings)
    if len(sizes) < MIN_SIZES or not packs or len(timings) - packs < 2:
        raise ValueError(
            f"a cost model cannot be fitted to {len(timings)} timings ({packs} of them packs of "
            f"several items) of {len(sizes)} sizes: it needs single items of 2 or more sizes, at "
            f"least 1 pack, and {MIN_SIZES} sizes in all; give --max-seconds more, or raise "
            "data.limits and dep.max_patches_per_chunk"
        )


def flops_shape(timings: Sequence[Timing], config: MoonViTConfig) -> tuple[float, Floats]:
    """Compare the default model, with cost proportional to FLOPs, to timings at the best rate.

    Returns:
        (rate, predicted): the FLOP/s with the smallest relative error over all timings, and the
        seconds of each timing at that rate, float64 [timings].
    """
    default = CostModel.from_flops(config, 1.0)
    work = np.array([float(default.seconds(timing.pack.sizes).sum()) for timing in timings])
    share = work / np.array([timing.total for timing in timings])
    seconds_per_flop = float(share.sum() / (share * share).sum())  # least squares of share*s = 1
    return 1 / seconds_per_flop, work * seconds_per_flop


def non_negative(matrix: Floats, target: Floats) -> Floats:
    """Return the x >= 0 that minimises |matrix x - target|, float64 [columns].

    The optimum has some columns at zero and is the plain least-squares solution in the others. With
    a handful of columns, all subsets are tried.

    Args:
        matrix: [rows, columns], of rank at least one.
        target: [rows].
    """
    scale = np.maximum(np.linalg.norm(matrix, axis=0), np.finfo(float).tiny)
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.linalg.norm(target))
    for size in range(1, columns + 1):
        for subset in combinations(range(columns), size):
            chosen = list(subset)
            found, *_ = np.linalg.lstsq(matrix[:, chosen] / scale[chosen], target, rcond=None)
            answer = np.zeros(columns)
            answer[chosen] = found / scale[chosen]
            residual = float(np.linalg.norm(matrix @ answer - target))
            if (found >= 0).all() and residual < least:
                best, least = answer, residual
    return best


def _terms(timings: Sequence[Timing]) -> Floats:
    """Return (patches, squared patches, items, 1) of each timing's pack, float64 [timings, 4]."""
    rows: list[list[float]] = []
    for timing in timings:
        sizes = timing.pack.sizes.astype(np.float64)
        patches, squares = float(sizes.sum()) + timing.filled, float((sizes * sizes).sum())
        rows.append([patches, squares, float(len(sizes)), 1.0])
    return np.array(rows)
