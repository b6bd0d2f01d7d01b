"""Measures what encoding costs on this machine: times a config's encoder and fits `dep.cost`.

The cost model is part of the configuration, so every rank reads the same numbers and computes the
same plan. It is measured once, on one device of the kind that the run will use, and pasted into
the config.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from statistics import mean
from typing import Any

import numpy as np
import torch

from kimi_pretrain.config import Config
from kimi_pretrain.dep.cost_fit import DIGITS, Fit, Floats, fit, flops_shape
from kimi_pretrain.dep.measure import SMALLEST, EncoderRun, Measured, Progress, measure, packs_of
from moonvit3d.rows import BLOCK
from typed_config.yaml_text import one_line


@dataclass(frozen=True)
class Calibration:
    """A fitted cost model and the measurements behind it.

    Attributes:
        fit: the model and its errors, in the order of `measured.timings`.
        measured: seconds of every pack.
        device, dtype, threads: of the measurement; number of CPU threads, None on an accelerator.
        flops_per_second: the rate at which the default model, cost by FLOPs, fits best.
        by_flops: seconds that the default model predicts at this rate, float64 [timings].
        filled: mean number of empty patches that pad a pack.
    """

    fit: Fit
    measured: Measured
    device: str
    dtype: str
    threads: int | None
    flops_per_second: float
    by_flops: Floats
    filled: float

    @property
    def cost(self) -> dict[str, float]:
        """`dep.cost`: the fit, with the padding patches of a chunk counted in its fixed cost."""
        per_chunk = self.fit.per_chunk + self.filled * self.fit.cost.per_patch
        return {**asdict(self.fit.cost), "per_chunk": float(f"{per_chunk:.{DIGITS}g}")}

    @property
    def forward_share(self) -> float:
        """Median share of the forward pass in a step's work; by FLOPs alone it would be 1/4."""
        return float(np.median([each.forward / each.total for each in self.measured.timings]))

    @property
    def flops_errors(self) -> Floats:
        """Relative errors of the default model, predicted / measured - 1, float64 [timings]."""
        return self.by_flops / np.array([each.total for each in self.measured.timings]) - 1


def calibrate(
    config: Config,
    max_seconds: float,
    progress: Progress = lambda share, what: None,
    device: torch.device | None = None,
) -> Calibration:
    """Time the config's encoder on one device and fit the cost model to it.

    Args:
        config: gives the encoder, its dtype, its frozen parts and the possible item sizes.
        max_seconds: bound on the timing; packs that would exceed it are left out.
        progress: called with the finished share and the name of the current measurement.
        device: by default the first GPU, or the CPU on a machine without one.

    Raises:
        ValueError: too few packs fit into the time or into the limits of the config.
    """
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    limits, vision, train = config.data.limits, config.model.vision, config.train
    budget = config.dep.max_patches_per_chunk
    packs = packs_of(limits.image, limits.frame, limits.side, budget)
    with _threads(train.threads):
        progress(0.0, "building the encoder")
        run = EncoderRun(vision, getattr(torch, train.dtype), device, train.frozen)
        found = measure(packs, run, vision, max_seconds, progress=progress, filled=run.filled)
        threads = torch.get_num_threads() if device.type == "cpu" else None
        sizes = range(SMALLEST, BLOCK * (threads or 1) + SMALLEST, SMALLEST)
        filled = mean(run.filled(patches) for patches in sizes)
    fitted = _fit(found)
    rate, by_flops = flops_shape(found.timings, vision)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return Calibration(fitted, found, name, train.dtype, threads, rate, by_flops, filled)


def _fit(found: Measured) -> Fit:
    try:
        return fit(found.timings)
    except ValueError as error:
        if not found.left_out:
            raise
        pack, reason = found.left_out[0]
        raise ValueError(
            f"{error}; {len(found.left_out)} were left out, as the first {pack.name}: {reason}"
        ) from None


@contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """Set the number of CPU threads to that of the training run."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def yaml_block(result: Calibration) -> str:
    """Return the cost model as lines for a config file."""
    lines = [f"    {name}: {one_line(value)}" for name, value in result.cost.items()]
    return "\n".join(["dep:", "  cost:", *lines])


def lines(result: Calibration) -> Iterator[str]:
    """Yield the result as text, for the terminal."""
    threads = f", {result.threads} threads" if result.threads else ""
    yield (
        f"{result.device}{threads}, {result.dtype}: {len(result.measured.timings)} loads, medians "
        f"of {result.measured.repeats}, {result.measured.seconds:.0f} s"
    )
    yield "                          items   patches     measured  forward       fit   by FLOPs"
    predictions = zip(result.fit.predicted, result.by_flops, strict=True)
    for timing, (fitted, by_flops) in zip(result.measured.timings, predictions, strict=True):
        pack, seconds = timing.pack, timing.total
        yield (
            f"{pack.name:24s} {len(pack.grids):6d} {pack.patches:9,d} {seconds * 1e3:9.2f} ms "
            f"{timing.forward / seconds:7.0%} {fitted / seconds:9.2f} {by_flops / seconds:10.2f}"
        )
    for pack, reason in result.measured.left_out:
        yield f"{pack.name:24s} {len(pack.grids):6d} {pack.patches:9,d}  left out: {reason}"
    flops = np.abs(result.flops_errors)
    yield "fit and by FLOPs: predicted over measured"
    yield (
        f"error of the fit: median {result.fit.median_error:.1%}, worst "
        f"{result.fit.worst_error:.1%}; starting a chunk costs {result.fit.per_chunk * 1e3:.3g} ms "
        "more, whatever is in it"
    )
    yield (
        f"error by FLOPs at their best rate, dep.flops_per_second={result.flops_per_second:.3g}: "
        f"median {np.median(flops):.1%}, worst {flops.max():.1%}"
    )
    yield f"share of the forward: {result.forward_share:.0%}"
    if result.measured.repeats < 3:
        yield f"medians of {result.measured.repeats} are rough: raise --max-seconds"


def as_json(result: Calibration) -> dict[str, Any]:
    """Return the result as plain values; errors are relative: predicted / measured - 1."""
    rows = zip(result.measured.timings, result.fit.predicted, result.by_flops, strict=True)
    return {
        "cost": result.cost,
        "per_chunk": result.fit.per_chunk,
        "median_error": result.fit.median_error,
        "worst_error": result.fit.worst_error,
        "forward_share": result.forward_share,
        "by_flops": {
            "flops_per_second": result.flops_per_second,
            "median_error": float(np.median(np.abs(result.flops_errors))),
            "worst_error": float(np.abs(result.flops_errors).max()),
        },
        "device": result.device,
        "dtype": result.dtype,
        "threads": result.threads,
        "repeats": result.measured.repeats,
        "seconds": result.measured.seconds,
        "sizes": [
            {
                "name": timing.pack.name,
                "items": len(timing.pack.grids),
                "patches": timing.pack.patches,
                "forward": timing.forward,
                "total": timing.total,
                "fit": float(fitted),
                "by_flops": float(by_flops),
            }
            for timing, fitted, by_flops in rows
        ],
        "left_out": [
            {"name": pack.name, "patches": pack.patches, "reason": reason}
            for pack, reason in result.measured.left_out
        ],
    }
