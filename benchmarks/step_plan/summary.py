"""Errors of the predictions, the ranking of configurations, and the targets. Pure."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import median
from typing import Any

MEDIAN_MOST, WORST_MOST, RANKED_LEAST = 0.10, 0.25, 0.9
APART = 0.05  # pairs with a smaller relative difference are not ranked


def summarise(cases: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of each case and of all cases together."""
    rows = [_row(case) for case in cases]
    errors = [abs(row["error"]) for row in rows]
    pairs = ranked(rows)
    return {
        "cases": rows,
        "median_error": median(errors),
        "worst_error": max(errors),
        "pairs": len(pairs),
        "ranked_right": sum(pairs),
        "no_core_share": median(row["no_core_share"] for row in rows),
    }


def _row(case: Mapping[str, Any]) -> dict[str, Any]:
    seconds = [max(rank["seconds"] for rank in run) for run in case["runs"]]
    waits = [max(rank["no_core"] for rank in run) for run in case["runs"]]
    steps = case["predicted"]["steps"]
    measured, predicted = median(seconds), median(step["total"] for step in steps)
    parts = {name: median(step[name] for step in steps) for name in steps[0] if name != "tokens"}
    return {
        "name": case["name"],
        "measured": {"median": measured, "min": min(seconds), "max": max(seconds)},
        "predicted": predicted,
        "error": predicted / measured - 1,
        "parts": parts,
        "phases": phases_of(case["runs"]),
        "no_core_share": sum(waits) / sum(seconds),
        "expert_imbalance": case["expert_imbalance"],
        "network": case["network"],
    }


def phases_of(runs: Sequence[Sequence[Mapping[str, Any]]]) -> dict[str, float]:
    """Return the median seconds of each phase on the rank that computes most in it."""
    names = dict.fromkeys(name for run in runs for rank in run for name in rank["phases"])
    return {name: median(_busiest(run, name) for run in runs) for name in names}


def _busiest(run: Sequence[Mapping[str, Any]], name: str) -> float:
    rank = max(run, key=lambda one: one["busy"].get(name, 0.0))
    return rank["phases"].get(name, 0.0)


def ranked(rows: Sequence[Mapping[str, Any]]) -> list[bool]:
    """Return for each pair with distinct measured times True if the prediction orders it right."""
    found = []
    for one, other in combinations(rows, 2):
        faster, slower = sorted((one, other), key=lambda row: row["measured"]["median"])
        if slower["measured"]["median"] > (1 + APART) * faster["measured"]["median"]:
            found.append(slower["predicted"] > faster["predicted"])
    return found


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return each target with the measured value and whether it is met."""
    pairs, right = found["pairs"], found["ranked_right"]
    return [
        {
            "target": f"median error of the predicted steps at most {MEDIAN_MOST:.0%}",
            "found": f"{found['median_error']:.1%}",
            "met": found["median_error"] <= MEDIAN_MOST,
        },
        {
            "target": f"worst error at most {WORST_MOST:.0%}",
            "found": f"{found['worst_error']:.1%}",
            "met": found["worst_error"] <= WORST_MOST,
        },
        {
            "target": f"{RANKED_LEAST:.0%} of the pairs of configurations ranked right, of those "
            f"whose measured times are more than {APART:.0%} apart",
            "found": f"{right} of {pairs}",
            "met": right >= RANKED_LEAST * pairs if pairs else None,
        },
    ]
