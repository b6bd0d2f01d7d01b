"""Targets of the runs, and whether they are met. Pure."""

from collections.abc import Mapping
from typing import Any

from benchmarks.muonclip.settings import MUON, MUONCLIP

GROWS = 2.0  # minimum of plain Muon's largest logit, in thresholds
OVERSHOOT = 1.5  # maximum of MuonClip's; a step adds this before the clip
HARM = 0.01  # maximum relative increase of the final loss

Found = Mapping[str, Any]


def targets(found: Found) -> list[dict[str, Any]]:
    """Return a row (target, measured value, met) for each target of the parts that were run."""
    rows = _clip(found["clip"]) if "clip" in found else []
    return rows + (_rates(found["rates"]) if "rates" in found else [])


def _clip(clip: Found) -> list[dict[str, Any]]:
    tau, seeds = clip["threshold"], clip["seeds"]
    grown = [row[MUON]["largest"] / tau for row in seeds]
    held = [row[MUONCLIP]["largest"] / tau for row in seeds]
    losses = [(row[MUON]["final_loss"], row[MUONCLIP]["final_loss"]) for row in seeds]
    harm = [None if b is None else -1.0 if a is None else b / a - 1 for a, b in losses]
    return [
        _row(
            f"plain Muon's largest logit grows past {GROWS:g} thresholds, every seed",
            ", ".join(f"{x:.1f}" for x in grown),
            all(x >= GROWS for x in grown),
        ),
        _row(
            f"MuonClip's stays below {OVERSHOOT:g} thresholds, every seed",
            ", ".join(f"{x:.2f}" for x in held),
            all(x <= OVERSHOOT for x in held),
        ),
        _row(
            f"MuonClip's final loss is at most {HARM:.0%} above Muon's, every seed",
            ", ".join("not finite" if x is None else f"{x:+.1%}" for x in harm),
            all(x is not None and x <= HARM for x in harm),
        ),
    ]


def _rates(rates: Found) -> list[dict[str, Any]]:
    names = {
        "ahead_of_adamw": "AdamW at tuned rates",
        "ahead_of_control": "AdamW at tuned rates with embedding and head at Muon's",
    }
    return [
        _row(
            f"{name} ends below {other}, equal tokens, every seed",
            ", ".join("not finite" if x is None else f"by {x:.3f}" for x in ahead),
            all(x is not None and x > 0 for x in ahead),
        )
        for key, other in names.items()
        for name in (MUON, MUONCLIP)
        if (ahead := rates[name].get(key)) is not None
    ]


def _row(target: str, found: str, met: bool) -> dict[str, Any]:
    return {"target": target, "found": found, "met": met}
