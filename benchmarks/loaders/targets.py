"""Targets of the loader benchmark with the measured values."""

from collections.abc import Mapping
from typing import Any

FASTER_FROM_S3 = 1.5
LATER_BY_MS = 5.0
STATE_BYTES = 1024


def targets(report: Mapping[str, Any], peers: list[str]) -> list[dict[str, Any]]:
    """Return each target with its figure and whether it is met; None if nothing was measured."""
    found: list[dict[str, Any]] = []
    for cell in report["about"]["cells"]:
        if cell.startswith("disk"):
            over = _over(report, cell, "litdata")
            found.append(_target(f"{cell}: ahead of litdata at an equal window", over, 1))
        else:
            over = _over(report, cell, "best peer")
            what = f"{cell}: {FASTER_FROM_S3} x the best peer"
            found.append(_target(what, over, FASTER_FROM_S3))
    found += [*_requests(report, peers), *_resume(report["resume"]), *_elastic(report["elastic"])]
    return found


def _over(report: Mapping[str, Any], cell: str, peer: str) -> float | None:
    ratio = report["ratios"].get(cell, {}).get(peer)
    return ratio["median"] if ratio else None


def _target(what: str, found: float | None, least: float) -> dict[str, Any]:
    if found is None:
        return {"target": what, "found": "-", "met": None}
    return {"target": what, "found": f"{found:.2f} x", "met": found >= least}


def _requests(report: Mapping[str, Any], peers: list[str]) -> list[dict[str, Any]]:
    if not report["requests"]:
        return []
    counts = {
        name: found for name, found in report["requests"].items()
        if not any(each["error"] for each in found.values())
    }  # fmt: skip
    rows = []
    for what, epochs, kinds in (
        ("requests for shards, one epoch", "epochs_1", ("shards",)),
        ("all requests, one cold epoch", "epochs_1", ("shards", "other")),
        ("all requests, two epochs", "epochs_2", ("shards", "other")),
    ):
        sums = {name: sum(found[epochs][k] for k in kinds) for name, found in counts.items()}
        others = {name: number for name, number in sums.items() if name in peers}
        row: dict[str, Any] = {"target": f"no more than the best peer: {what}"}
        if "ours" in sums and others:
            best = min(others, key=lambda name: others[name])
            row["found"] = f"{sums['ours']} against {others[best]} ({best})"
            rows.append(row | {"met": sums["ours"] <= others[best]})
        else:
            rows.append(row | {"found": "-", "met": None})
    return rows


def _resume(resume: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = resume.get("ours", [])
    if not rows:
        return []
    later = max(row["later_by_ms"] for row in rows)
    exact = all(row["same_samples"] and row["same_bytes"] for row in rows)
    state = max(row["state_bytes"] or 0 for row in rows)
    return [
        {
            "target": f"first batch after a resume within {LATER_BY_MS:g} ms of a fresh start",
            "found": f"{later:+.1f} ms", "met": later <= LATER_BY_MS,
        },
        {"target": "the same sequence after a resume", "found": "", "met": exact},
        {
            "target": f"state below {STATE_BYTES} bytes", "found": f"{state} B",
            "met": 0 < state < STATE_BYTES,
        },
    ]  # fmt: skip


def _elastic(elastic: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [
        {
            "target": f"ordered global steps, another number of ranks: {name}",
            "found": f"{r['other_world_ordered']}/{r['steps']}, after a resume "
            f"{r['resumed_ordered']}/{r['resumed_steps']}",
            "met": r["other_world_ordered"] == r["steps"]
            and r["resumed_ordered"] == r["resumed_steps"],
        }
        for name, r in elastic.items()
        if name.startswith("ours")
    ]
