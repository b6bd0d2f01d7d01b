"""Renders the results as a Markdown page. Pure."""

from collections.abc import Mapping
from typing import Any

from benchmarks.dep.report import disturbed
from benchmarks.result import named, spread, table, verdicts

Found = Mapping[str, Any]


def page(found: Found) -> str:
    """Return the whole page."""
    about, summary = found["about"], found["summary"]
    lines = [
        "# Predicted steps against measured ones, on CPU processes",
        "",
        f"{about['date']}, {about['machine']}; {named(about['versions'])}. "
        f"Made by `benchmarks/bench_step_plan.py` in {about['seconds']:.0f} s.",
        "",
    ]
    if about["quick"]:
        lines += ["**Quick form: no figure here means anything.**", ""]
    if warning := disturbed({"about": about, "timing": summary}):
        lines += [f"**{warning}**", ""]
    lines += verdicts(found["targets"], {"target": "target", "found": "found", "met": "met"})
    lines += ["## Steps", "", *_steps(summary), "", *_how(about), ""]
    lines += ["## Parts", "", *_parts(summary), ""]
    return "\n".join(lines)


def _steps(summary: Found) -> list[str]:
    head = ["", "predicted, s", "measured, s", "error", "without a core"]
    rows = [
        [
            row["name"], f"{row['predicted']:.3f}", spread(row["measured"], ".3f"),
            f"{row['error']:+.1%}", f"{row['no_core_share']:.0%}",
        ]
        for row in summary["cases"]
    ]  # fmt: skip
    return table(head, rows)


def _how(about: Found) -> list[str]:
    return [
        "Two processes of one thread, each on a core of its own. For each configuration new "
        "processes calibrate with the code of `kimi-pretrain plan --calibrate`, both at the same "
        "time, time the network between them, and run "
        f"{about['steps']} steps after a warm-up; `kimi-pretrain plan --step`'s code predicts the "
        "same steps. Costs are the mean of both processes, --network is the rate of a gradient sum "
        "with the updated weights back, --latency an all-to-all of a few bytes, and "
        "--expert-imbalance what came to the experts in the warm-up. Nothing is fitted to the "
        "steps. Medians; in brackets the least and the most. Without a core: share of the time in "
        "which a process could have gone on but other work had its core.",
    ]


def _parts(summary: Found) -> list[str]:
    """Return the table of predicted parts next to the measured phases."""
    head = ["", "pipeline", "4 backbone", "vision and exchange", "2, 3, 5, 6", "update and sums",
            "7 update", "expert imbalance", "network, MB/s", "latency, ms"]  # fmt: skip
    rows = []
    for row in summary["cases"]:
        parts, phases = row["parts"], row["phases"]
        vision = sum(seconds for name, seconds in phases.items() if name[0] in "2356")
        rows.append([
            row["name"],
            f"{parts['passes'] + parts['imbalance'] + parts['bubble']:.3f}",
            f"{phases['4 backbone']:.3f}",
            f"{parts['vision'] + parts['exchange']:.3f}",
            f"{vision:.3f}",
            f"{parts['update'] + parts['gradient_sum']:.3f}",
            f"{phases['7 update']:.3f}",
            f"{row['expert_imbalance']:.2f}" if row["expert_imbalance"] > 1 else "",
            f"{row['network']['sum'] / 1e6:.0f}",
            f"{row['network']['latency'] * 1e3:.2f}",
        ])  # fmt: skip
    return [
        *table(head, rows),
        "",
        "Seconds: predicted beside those of the step's phases, of the rank that computes most in "
        "each. Gradient sums of the backbone run inside phase 4 and are predicted with the update, "
        "the encoder's in phase 6.",
    ]
