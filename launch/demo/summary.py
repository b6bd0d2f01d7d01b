"""Builds summary.json from the files in a demo's run folders. Pure functions."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from kimi_pretrain.checkpoint.storage_read import Checkpoint, open_place
from kimi_pretrain.config import Config
from kimi_pretrain.dep.step_bubbles import MEASURED
from kimi_pretrain.verify.resume_compare import compare
from kimi_pretrain.verify.traces import read_trace, reader


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file."""
    return json.loads(file.read_text())


def compare_runs(first: Path, resumed: Path) -> dict[str, Any]:
    """Compare a resumed run with the run it continues, as `kimi-pretrain verify resume` does.

    Returns:
        {"bitwise": bool, "steps": number of steps compared, "tensors": number of tensors compared,
        "differences": sentences, the last of which may suggest a cause}. Bitwise requires at least
        one step; exactly equal floats, except times and memory; and equal hashes of parameters,
        optimizer and loader state.
    """
    last = [last_checkpoint(folder) for folder in (resumed, first)]
    found, wanted = (
        read_trace(folder, at) for folder, at in zip((resumed, first), last, strict=True)
    )
    stop = min(found.lines, default=max(wanted.lines, default=0) + 1) - 1
    both = [at for at in last if at is not None]
    read = reader(*both) if len(both) == 2 else None
    comparison = compare(found, wanted, stop, read).as_dict()
    suggested = comparison["suggestion"] and [f"this suggests: {comparison['suggestion']}"]
    return {
        "bitwise": comparison["passed"],
        "steps": comparison["steps"],
        "tensors": comparison["tensors"],
        "differences": [*comparison["differences"], *(suggested or ())],
    }


def last_checkpoint(run_dir: Path) -> Checkpoint | None:
    """Return the checkpoint that a run wrote after its last step, or None."""
    place = open_place(run_dir / "checkpoints")
    step = read_json(run_dir / "state_hashes.json")["step"]
    return place.checkpoint(step) if step in place.steps() else None


def verified_gradients(result: dict[str, Any]) -> dict[str, Any]:
    """Return the result of `kimi-pretrain verify dep` in four values.

    Returns:
        {"passed", "error": largest relative error of any parameter, "planted": faults tested,
        "found": faults detected}. The error is None if a gradient is not finite, because JSON has
        no such number.
    """
    errors = [group["error"] for group in result["comparison"]["groups"]]
    told = [fault for fault in result["faults"].values() if "obstacle" not in fault]
    return {
        "passed": result["passed"],
        "error": None if None in errors else max(errors),
        "planted": len(told),
        "found": sum(fault["found"] for fault in told),
    }


def summarise(
    config: Config,
    metrics: Sequence[dict[str, Any]],
    efficiency: dict[str, list[float]] | None,
    comparison: dict[str, Any],
    evaluation: dict[str, Any],
    seconds: dict[str, float],
) -> dict[str, Any]:
    """Return summary.json of a demo run.

    Args:
        config: of the run.
        metrics: its lines of metrics.jsonl.
        efficiency: seconds of steps with media and of the same rows as text, or None.
        comparison: from `compare_runs`.
        evaluation: with "accuracy" and "accuracy_swapped" on held-out digits.
        seconds: duration of each part of the demo.
    """
    with_media = [m["balance"] for m in metrics if m["items"]]
    timed = [m for m in metrics if m["items"] and "predicted_seconds_per_rank" in m]
    step_seconds = {name: median(times) for name, times in (efficiency or {}).items()}
    layout = config.layout
    return {
        "steps": len(metrics),
        "loss_first": metrics[0]["loss"],
        "loss_last": metrics[-1]["loss"],
        "heldout_digit_accuracy": evaluation["accuracy"],
        "heldout_digit_accuracy_swapped": evaluation["accuracy_swapped"],
        "resumed_bitwise": comparison["bitwise"],
        "resumed_steps": comparison["steps"],
        "resumed_differences": comparison["differences"][:5],
        "world": {"pp": layout.pp, "vpp": layout.vpp, "ep": layout.ep, "dp": layout.dp},
        "media_items": sum(m["items"] for m in metrics),
        "text_tokens": sum(m["text_tokens"] for m in metrics),
        "vision_tokens": sum(m["vision_tokens"] for m in metrics),
        "skipped_samples": sum(m["skipped_samples"] for m in metrics),
        # Load of the most loaded rank over the mean of the ranks, averaged over the steps with
        # media.
        "balance_max_over_mean": {
            name: fmean(balance[name] for balance in with_media)
            for name in ("naive", "naive_among_owners", "round_robin", "dep")
        }
        if with_media
        else None,
        # The same ratio for predicted seconds, which the assignment balances.
        "predicted_seconds_max_over_mean": {
            name: fmean(_over_mean(m["predicted_seconds_per_rank"][name]) for m in timed)
            for name in ("naive", "round_robin", "dep")
        }
        if timed
        else None,
        # Share of patches in the largest tenth of the items, averaged over the same steps.
        "patches_in_largest_tenth_of_items": fmean(
            m["largest_tenth_of_items"] for m in metrics if m["items"]
        )
        if with_media
        else None,
        "encoder": _encoder([m for m in metrics if m["items"]]),
        "peak_gib": _peak_memory(metrics),
        "speed": {
            **{name: median(m[name] for m in metrics) for name in ("mfu", "model_tflops_per_gpu")},
            **{name: metrics[-1][name] for name in ("peak_tflops_per_gpu", "peak_source")},
        },
        "step_seconds_median": step_seconds or None,
        "efficiency_vs_text_only": step_seconds["text_only"] / step_seconds["multimodal"]
        if step_seconds
        else None,
        "s3": {name: metrics[-1]["store"][name] for name in ("requests", "bytes")},
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
    }


def _over_mean(loads: Sequence[float]) -> float:
    return max(loads) / fmean(loads)


def _encoder(with_media: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return medians of the encoder's cost over the steps with media; None without such steps.

    Values that the run could not measure (the time of the co-located encoder) are None.
    """
    if not with_media:
        return None
    names = ("exposed_encoder_seconds", "exposed_encoder_share")
    return {
        **{name: _median(m[name] for m in with_media) for name in names},
        "imbalance": {
            name: _median(m["imbalance"][name] for m in with_media)
            for name in ("predicted", "measured")
        },
        # Bytes that all ranks together, and the busiest rank, send to other ranks in a step.
        "exchange_bytes": {
            way: {name: _median(m["exchange_bytes"][way][name] for m in with_media)
                  for name in ("sum", "max")}
            for way in ("over", "back")
        },
        # Of the mean rank; None if media are encoded before and after the pipeline.
        "bubble_seconds": {
            kind: median(m["bubble_seconds"][kind]["mean"] for m in inside) for kind in MEASURED
        }
        if (inside := [m for m in with_media if "bubble_seconds" in m])
        else None,
        "split_items": sum(m["split_items"] for m in with_media),
        "kept_patches": sum(m["kept_patches"] for m in with_media),
    }  # fmt: skip


def _peak_memory(metrics: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the peak memory of any rank and of the first stage, over all steps and phases."""
    measured = [m["peak_gib_step"] for m in metrics if m["peak_gib_step"]]
    if not measured:
        return None
    worst = max(measured, key=lambda peak: peak["max"])
    first = max(peak["first_stage"] for peak in measured)
    return {"worst_rank": worst["max"], "rank": worst["rank"], "first_stage": first}


def _median(values: Iterable[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return median(found) if found else None
