"""Computes the metrics line of a step from the measurements of all ranks.

The ranks' `RankMetrics` are gathered once per step; the rest is arithmetic, the same on every rank.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from data_pipeline.loader import LoaderStats
from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import GIB, Config
from kimi_pretrain.dep.assign import load_per_rank, max_over_mean, round_robin
from kimi_pretrain.dep.bubble_times import RankTimes
from kimi_pretrain.dep.step_bubbles import FILLED, KINDS, MEASURED
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of
from kimi_pretrain.optim.step_stats import UpdateFigures, merge_figures
from kimi_pretrain.parallel.ranks import scopes
from kimi_pretrain.siglip.counts import pair_flops
from kimi_pretrain.telemetry.exposed import exposed
from kimi_pretrain.telemetry.losses import LossSums, merged
from kimi_pretrain.telemetry.mfu import Peak, peak_flops, step_flops, utilisation
from kimi_pretrain.telemetry.phases import seconds_of_phases
from kimi_pretrain.telemetry.stopwatch import Section

if TYPE_CHECKING:  # the step imports the engine, which readers of a line do not need
    from kimi_pretrain.step import StepReport
    from kimi_pretrain.update import UpdateReport

ENCODING = ("2 vision forward", "6 vision backward")


@dataclass(frozen=True)
class RankMetrics:
    """Measurements of one rank in a step; part of its `RankReport`.

    Attributes:
        spans, peak_bytes, exchange_bytes, kept_patches, losses, bubble_seconds, bubble_times,
            bubble_sections: as in `StepReport`.
        first_stage: True if the rank receives embeddings.
        seconds: of the whole step, including the wait for data.
        requests, bytes: of the store, since the run began.
        update: figures of the tensors that this rank updated.
        save: "stall" -> seconds that training waited for checkpoints since the last line;
            "background" -> duration of a background save that completed since then.
    """

    spans: dict[str, tuple[float, float]]
    peak_bytes: dict[str, int]
    exchange_bytes: dict[str, int]
    kept_patches: int
    first_stage: bool
    seconds: float
    requests: int
    bytes: int
    update: UpdateFigures = field(default_factory=UpdateFigures)
    save: Mapping[str, float] = field(default_factory=dict)
    losses: LossSums = field(default_factory=LossSums)
    bubble_seconds: Mapping[str, float] | None = None
    bubble_times: RankTimes | None = None
    bubble_sections: Sequence[Section] = ()


def rank_metrics(
    report: "StepReport",
    seconds: float,
    stats: LoaderStats,
    *,
    first_stage: bool,
    save: Mapping[str, float] | None = None,
) -> RankMetrics:
    """Return this rank's measurements of a step that took `seconds`."""
    return RankMetrics(
        spans=dict(sorted(report.spans.items(), key=lambda span: span[1])),
        peak_bytes=dict(report.peak_bytes),
        exchange_bytes=dict(report.exchange_bytes),
        kept_patches=report.kept_patches,
        first_stage=first_stage,
        seconds=seconds,
        requests=stats.requests,
        bytes=stats.bytes,
        update=report.update.own,
        save=dict(save or {}),
        losses=report.losses,
        bubble_seconds=report.bubble_seconds,
        bubble_times=report.bubble_times,
        bubble_sections=report.bubble_sections,
    )


class Telemetry:
    """Builds a run's metrics lines from model FLOPs, the device's peak and the media scopes."""

    def __init__(self, config: Config, peak: Peak):
        self.config, self.peak = config, peak
        self.scopes = scopes(config)

    @classmethod
    def on(cls, config: Config, device: torch.device) -> "Telemetry":
        """Return a Telemetry for ranks on this device; measures the peak of a CPU in 0.1 s."""
        dtype: torch.dtype = getattr(torch, config.train.dtype)
        return cls(config, peak_flops(device, dtype, config.train.peak_tflops))

    def line(
        self, step: int, plan: GlobalPlan, report: "StepReport", everyone: Sequence[RankMetrics]
    ) -> dict[str, Any]:
        """Return the line of a step, counted from 1; docs/METRICS.md explains each name."""
        seconds = max(record.seconds for record in everyone)
        data = self.config.data
        table = merged((one.losses for one in everyone), data.source_names, data.seq_len)
        return {
            "step": step,
            "loss": report.loss,
            **table.as_line(),
            **_siglip(report),
            "grad_norm": report.update.grad_norm,
            "lr": report.update.lr,
            "applied": report.update.applied,
            "anomaly": report.update.verdict.kind,
            "tokens": int(plan.num_rows * plan.seq_len),
            "loss_tokens": report.loss_tokens,
            "text_tokens": report.text_tokens,
            "vision_tokens": report.vision_tokens,
            "items": report.items,
            "seconds": seconds,
            "phase_seconds": _phase_seconds(everyone),
            **_bubbles(everyone),
            **self._exposed(report.items, seconds, everyone),
            "imbalance": _imbalance(report.vision, everyone),
            **_balance(report.vision, everyone),
            "largest_tenth_of_items": share_of_largest(report.vision.patches, 0.1),
            "split_items": int((report.vision.parts > 1).sum()),
            "kept_patches": sum(record.kept_patches for record in everyone),
            "exchange_bytes": _exchange(everyone),
            **_memory(everyone),
            **self._speed(plan, report.siglip, seconds, len(everyone)),
            **_optimizer(report.update, everyone),
            "store": {
                "requests": sum(record.requests for record in everyone),
                "bytes": sum(record.bytes for record in everyone),
            },
            "skipped_samples": len(report.skipped),
            "checkpoint": _save(everyone),
        }

    def _exposed(
        self, items: int, seconds: float, everyone: Sequence[RankMetrics]
    ) -> dict[str, Any]:
        found = exposed([record.spans for record in everyone], self.scopes)
        # Co-located or in bubbles, the encoder runs inside the backbone phase, so its time cannot
        # be measured separately.
        inside = any(record.bubble_seconds is not None for record in everyone)
        unknown = bool(items) and (inside or found.forward is None)
        total = None if unknown else sum(found.seconds.values())
        return {
            "exposed_encoder_seconds": total,
            "exposed_encoder_share": None if total is None else total / seconds,
            "exposed_encoder_parts": None if unknown else found.seconds,
        }

    def _speed(
        self, plan: GlobalPlan, siglip: Any, seconds: float, world_size: int
    ) -> dict[str, Any]:
        config, pairs = self.config, 0.0
        if config.train.siglip is not None and siglip is not None:
            _, number, patches = siglip
            pairs = pair_flops(config.train.siglip, config.model.vision.width, number, patches)
        useful = step_flops(
            grids_of(plan),
            plan.samples.length.astype(np.int64),
            config.model,
            config.train.frozen,
            pairs,
        )
        return {
            "model_tflops": {"encoder": useful.encoder / 1e12, "backbone": useful.backbone / 1e12},
            "model_tflops_per_gpu": useful.total / seconds / world_size / 1e12,
            "mfu": utilisation(useful.total, seconds, world_size, self.peak),
            "peak_tflops_per_gpu": self.peak.flops_per_second / 1e12,
            "peak_source": self.peak.source,
        }


def _siglip(report: "StepReport") -> dict[str, Any]:
    """Return the loss of the pairs and their number; empty if `train.siglip` is off."""
    if report.siglip is None:
        return {}
    loss, pairs, _ = report.siglip
    return {"siglip_loss": loss, "pairs": pairs}


def _bubbles(everyone: Sequence[RankMetrics]) -> dict[str, Any]:
    """Return the bubble seconds by kind; empty if no vision work ran in bubbles."""
    found = [record.bubble_seconds for record in everyone]
    ranks = [seconds for seconds in found if seconds is not None]
    if not ranks:
        return {}
    each = {kind: [one.get(kind, 0.0) for one in ranks] for kind in MEASURED}
    pieces = np.array([one.bubble_times.pieces for one in everyone if one.bubble_times is not None])
    took, modelled = pieces.sum(axis=0).T if len(pieces) else np.zeros((2, len(KINDS)))
    return {
        "bubble_cost_ratio": {
            kind: float(spent / cost)
            for kind, spent, cost in zip(KINDS, took, modelled, strict=True)
            if cost
        },
        "bubble_seconds": {
            kind: _largest(seconds) | {"mean": float(np.mean(seconds))}
            for kind, seconds in each.items()
        },
        "bubble_seconds_per_rank": each,
    }


def _optimizer(update: "UpdateReport", everyone: Sequence[RankMetrics]) -> dict[str, Any]:
    """Return the attention maxima and the optimizer's figures, merged over all ranks.

    A maximum is None if no document was seen.
    """
    model = merge_figures(record.update for record in everyone)
    return {
        "max_logit": _seen(update.max_logit),
        "max_logits": [_seen(logit) for logit in update.max_logits.tolist()],
        "clipped_heads": update.clipped_heads,
        "update_rms": model.update_rms,
        "newton_schulz_seconds": model.newton_schulz_seconds,
        "orthogonality_error": model.orthogonality_error,
        "skipped_steps": update.skipped_steps,
    }


def _seen(logit: float) -> float | None:
    return None if logit == -math.inf else logit


def share_of_largest(sizes: NDArray[np.int64], part: float) -> float | None:
    """Return the patch share of the largest fraction `part` of the items; None without items."""
    if not len(sizes):
        return None
    largest = np.sort(sizes)[::-1][: max(1, round(part * len(sizes)))]
    return float(largest.sum() / sizes.sum())


def loads_per_rank(vision: VisionPlan) -> dict[str, dict[str, list[float]]]:
    """Return each rank's encoder load under three assignments, in patches and predicted seconds.

    "naive" encodes each item on the first-stage rank that owns its row, as systems without DEP do;
    "round_robin" assigns items in turn; "dep" is the assignment of the run. DEP balances seconds.
    """
    world, sizes = vision.num_ranks, vision.patches.astype(np.float64)
    dealt = round_robin(sizes, world)

    def loads(work: NDArray[np.float64], dep: NDArray[np.float64]) -> dict[str, list[float]]:
        return {
            "naive": load_per_rank(work, vision.home, world).tolist(),
            "round_robin": load_per_rank(work, dealt, world).tolist(),
            "dep": dep.tolist(),
        }

    return {
        "patches_per_rank": loads(sizes, vision.patches_per_rank()),
        "predicted_seconds_per_rank": loads(vision.costs, vision.predicted_seconds()),
    }


def _phase_seconds(everyone: Sequence[RankMetrics]) -> dict[str, dict[str, float]]:
    """Return, for each phase, the maximum and the mean over the ranks that ran it."""
    found: dict[str, list[float]] = {}
    for record in everyone:
        for phase, seconds in seconds_of_phases(record.spans).items():
            found.setdefault(phase, []).append(seconds)
    return {phase: {"max": max(s), "mean": float(np.mean(s))} for phase, s in found.items()}


def _imbalance(vision: VisionPlan, everyone: Sequence[RankMetrics]) -> dict[str, float | None]:
    """Return the encoder time of the slowest rank over the mean, as predicted and as measured.

    It is 1.0 without media. The measured value includes waits between ranks that share an item; it
    is None if the encoder runs in the backbone's graph.
    """
    phases = [seconds_of_phases(record.spans) for record in everyone]
    measured = np.array([sum(one.get(name, 0.0) for name in ENCODING) for one in phases])
    measured += [(record.bubble_seconds or {}).get(FILLED, 0.0) for record in everyone]
    inside = len(vision.patches) > 0 and not measured.any()
    return {
        "predicted": max_over_mean(vision.predicted_seconds()),
        "measured": None if inside else max_over_mean(measured),
    }


def _balance(vision: VisionPlan, everyone: Sequence[RankMetrics]) -> dict[str, Any]:
    loads = loads_per_rank(vision)
    patches = loads["patches_per_rank"]
    owners = [patches["naive"][rank] for rank, one in enumerate(everyone) if one.first_stage]
    balance = {name: max_over_mean(np.array(load)) for name, load in patches.items()}
    # The imbalance of "naive" among first-stage ranks only, without the idle other stages.
    balance["naive_among_owners"] = max_over_mean(np.array(owners))
    return {"balance": balance, **loads}


def _memory(everyone: Sequence[RankMetrics]) -> dict[str, Any]:
    """Return the peak memory of each phase and of the step; empty if it is not measured."""
    phases = dict.fromkeys(phase for record in everyone for phase in record.peak_bytes)
    by_phase = {
        phase: _peak([record.peak_bytes.get(phase, 0) for record in everyone], everyone)
        for phase in phases
    }
    worst = [max(record.peak_bytes.values(), default=0) for record in everyone]
    return {"peak_gib": by_phase, "peak_gib_step": _peak(worst, everyone) if phases else {}}


def _peak(peaks: Sequence[int], everyone: Sequence[RankMetrics]) -> dict[str, Any]:
    """Return the largest peak in GiB, its rank, and the largest peak on the first stage."""
    first = [peak for peak, record in zip(peaks, everyone, strict=True) if record.first_stage]
    found = _largest([peak / GIB for peak in peaks])
    return found | {"first_stage": max(first, default=0) / GIB}


def _save(everyone: Sequence[RankMetrics]) -> dict[str, float]:
    """Return the slowest rank's seconds; empty if nothing was saved."""
    found: dict[str, float] = {}
    for record in everyone:
        for what, seconds in record.save.items():
            name = f"{what}_seconds"
            found[name] = max(seconds, found.get(name, 0.0))
    return found


def _exchange(everyone: Sequence[RankMetrics]) -> dict[str, dict[str, Any]]:
    """Return the bytes that ranks sent to others, each way: largest rank and sum."""
    found: dict[str, dict[str, Any]] = {}
    for way in ("over", "back"):
        sent = [record.exchange_bytes.get(way, 0) for record in everyone]
        found[way] = _largest(sent) | {"sum": sum(sent)}
    return found


def _largest(values: Sequence[float]) -> dict[str, Any]:
    """Return the largest of the ranks' values and its rank, the first among equals."""
    rank = int(np.argmax(values))
    return {"max": values[rank], "rank": rank}
