"""Targets of the DEP benchmark with predicted and measured values. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dep.settings import COLOCATED, DEP

FIRST = 0  # rank of the first stage
MIB = 1 << 20
RATIO_WITHIN, OVERHEAD_MOST, GROWTH_MOST = 0.10, 0.03, 0.05
ENCODER_PHASES = ("2 vision forward", "3 hand-over", "5 hand-back", "6 vision backward")


def step_peak(phases: Mapping[str, int]) -> float:
    """Return the peak memory of a step, in MiB."""
    return max(phases.values()) / MIB


def encoder_peak(phases: Mapping[str, int]) -> float:
    """Return the peak memory of the phases that DEP adds, in MiB; 0 if there are none."""
    return max(phases.get(name, 0) for name in ENCODER_PHASES) / MIB


def growth(curve: Sequence[Mapping[str, Any]], name: str) -> float:
    """Return the growth of the first stage's peak from the fewest images to the most, in MiB."""
    first, last = (step_peak(point["peaks"][name][FIRST]) for point in (curve[0], curve[-1]))
    return last - first


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each target with the predicted and measured values, and whether it is met."""
    rows: list[dict[str, Any]] = []
    if timed := found.get("timing"):
        rows += [_ratio(timed["ratio"]), _overhead(timed["overhead"])]
    if memory := found.get("memory"):
        rows.append(_growth(memory["curve"]))
    return rows


def _ratio(ratio: Mapping[str, Any]) -> dict[str, Any]:
    faster, off = ratio["measured"]["median"], ratio["measured_over_predicted"]["median"] - 1
    quiet = ratio["undisturbed"]
    return {
        "target": "DEP faster than co-located by the ratio predicted, within 10%",
        "predicted": f"{ratio['predicted']['median']:.3f} x",
        "found": f"{faster:.3f} x ({off:+.1%})",
        "undisturbed": f"{quiet['measured']['median']:.3f} x; predicted "
        f"{quiet['predicted']['median']:.3f} x",
        "met": faster > 1 and abs(off) <= RATIO_WITHIN,
    }


def _overhead(overhead: Mapping[str, Any]) -> dict[str, Any]:
    share = overhead["share"]["median"]
    return {
        "target": "DEP's overhead beyond the encoder's arithmetic at most 3% of the step",
        "predicted": "0%",
        "found": f"{share:.1%}",
        "undisturbed": f"{overhead['undisturbed']['median']:.1%}",
        "met": share <= OVERHEAD_MOST,
    }


def _growth(curve: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    dep, colocated = growth(curve, DEP), growth(curve, COLOCATED)
    first, last = curve[0], curve[-1]
    embeddings = (last["embedding_bytes"] - first["embedding_bytes"]) / MIB
    return {
        "target": "peak memory of the first stage does not grow with the images of a microbatch "
        f"({first['images']} to {last['images']}): by no more than 5% of what co-located grows",
        "predicted": f"+{embeddings:.1f} MiB, the embeddings of all microbatches",
        "found": f"+{dep:.1f} MiB; co-located +{colocated:.1f} MiB",
        "undisturbed": "",
        "met": dep <= GROWTH_MOST * colocated,
    }
