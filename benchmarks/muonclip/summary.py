"""Reduces the curves of the runs to the figures of the page. Pure."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from benchmarks.muonclip.settings import ADAMW, CLIP, CONTROL, MUON, MUONCLIP, RATES, Plan, Run

Curve = Mapping[str, Any]
Found = Mapping[str, Any]


def final_loss(losses: Sequence[float | None], tail: int) -> float | None:
    """Return the mean of the last `tail` losses; None if one of them is not finite."""
    last = losses[-tail:]
    values = [loss for loss in last if loss is not None]
    return fmean(values) if values and len(values) == len(last) else None


def running_mean(losses: Sequence[float | None], window: int) -> list[float]:
    """Return means of each loss with up to `window - 1` before it; NaN if one is not finite."""
    known = [math.nan if loss is None else loss for loss in losses]
    return [fmean(known[max(0, end - window) : end]) for end in range(1, len(known) + 1)]


def find(curves: Sequence[Curve], **wanted: Any) -> list[Curve]:
    """Return the curves of the runs with these values, in order."""
    return [one for one in curves if all(one[key] == value for key, value in wanted.items())]


def unclipped(run: Run, curves: Sequence[Curve], plan: Plan) -> dict[str, Any] | None:
    """Return Muon's curve as MuonClip's if no logit exceeded the threshold, otherwise None.

    Such a run would be bit-identical to Muon's, because the clip changes nothing else. None means
    that MuonClip has to be run.
    """
    if run.optimizer != MUONCLIP:
        return None
    wanted = {"part": run.part, "optimizer": MUON, "lr": run.lr, "seed": run.seed}
    for curve in find(curves, **wanted):
        if all(logit is not None and logit <= plan.threshold for logit in curve["max_logit"]):
            nothing = {"seconds": 0.0, "processor_seconds": 0.0}
            return {**curve, "optimizer": MUONCLIP, **nothing, "same_as": MUON}
    return None


def clip_summary(curves: Sequence[Curve], plan: Plan) -> dict[str, Any]:
    """Return the figures of logits and loss of each run of the first part, by seed."""
    rows = []
    for seed in plan.clip_seeds:
        (muon,) = find(curves, part=CLIP, optimizer=MUON, seed=seed)
        (clipped,) = find(curves, part=CLIP, optimizer=MUONCLIP, seed=seed)
        rows.append(
            {
                "seed": seed,
                MUON: _logits(muon, plan),
                MUONCLIP: _logits(clipped, plan),
                "worst_lead": _worst_lead(clipped, muon, plan.tail_steps),
            }
        )
    return {"threshold": plan.threshold, "lr": plan.clip_lr, "seeds": rows}


def _worst_lead(one: Curve, other: Curve, window: int) -> float:
    """Return the largest excess of the smoothed loss of `one` over that of `other`."""
    smooth = (running_mean(curve["loss"], window) for curve in (one, other))
    return max(a - b for a, b in zip(*smooth, strict=True) if math.isfinite(a - b))


def largest(curve: Curve) -> float:
    """Return the largest finite logit of a run."""
    return max(logit for logit in curve["max_logit"] if logit is not None)


def _logits(curve: Curve, plan: Plan) -> dict[str, Any]:
    """Return the figures of one run; `first_over` counts steps from 1."""
    maxima = [math.inf if logit is None else logit for logit in curve["max_logit"]]
    over = [logit > plan.threshold for logit in maxima]
    first = over.index(True) if any(over) else None
    after = maxima[first:] if first is not None else []
    return {
        "first_over": None if first is None else first + 1,
        "largest": largest(curve),
        "last": curve["max_logit"][-1],
        "median_after": _finite(median(after)) if after else None,
        "share_over_after": fmean(x > plan.threshold for x in after) if after else None,
        "heads_a_step": fmean(curve["clipped_heads"]),
        "final_loss": final_loss(curve["loss"], plan.tail_steps),
        "not_applied": curve["not_applied"],
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def best_rate(curves: Sequence[Curve], optimizer: str, plan: Plan) -> float:
    """Return the rate of the sweep with the lowest final loss.

    Raises:
        ValueError: no run of the optimizer ended with a finite loss.
    """
    found: list[tuple[float, float]] = []
    for curve in find(curves, part=RATES, optimizer=optimizer, seed=plan.rates_seeds[0]):
        loss = final_loss(curve["loss"], plan.tail_steps)
        if loss is not None:
            found.append((loss, curve["lr"]))
    if not found:
        raise ValueError(f"{optimizer}: no run of the sweep over {plan.rates} stayed finite")
    return min(found)[1]


def rates_summary(curves: Sequence[Curve], plan: Plan) -> dict[str, Any]:
    """Return the sweep, the chosen rates, the results of all seeds, and the saved tokens."""
    found: dict[str, Any] = {}
    for optimizer in (ADAMW, MUON, MUONCLIP, CONTROL):
        if optimizer == CONTROL and not find(curves, part=RATES, optimizer=optimizer):
            continue
        best = best_rate(curves, optimizer, plan)
        rates = sorted(plan.control_rates if optimizer == CONTROL else plan.rates)
        of = [
            find(curves, part=RATES, optimizer=optimizer, lr=best, seed=seed)[0]
            for seed in plan.rates_seeds
        ]
        found[optimizer] = {
            "lr": best,
            "at_edge": best in (rates[0], rates[-1]),
            **_ends([final_loss(curve["loss"], plan.tail_steps) for curve in of]),
            "largest_logit": max(largest(curve) for curve in of),
            "sweep": _sweep(curves, optimizer, plan),
        }
    if CONTROL in found:
        found[CONTROL]["ends_lr"] = found[MUON]["lr"]
    for name in (MUON, MUONCLIP):
        for other, key in ((ADAMW, "ahead_of_adamw"), (CONTROL, "ahead_of_control")):
            if other in found:
                found[name][key] = _ahead(found[name], found[other])
        found[name]["tokens_to_adamw"] = _tokens_to_adamw(curves, name, found, plan)
    return found


def _ahead(one: Found, other: Found) -> list[float | None]:
    """Return the margin by which the final losses of `one` are below those of `other`, by seed."""
    both = zip(other["final_losses"], one["final_losses"], strict=True)
    return [None if a is None or b is None else a - b for a, b in both]


def _ends(losses: Sequence[float | None]) -> dict[str, Any]:
    finite = [loss for loss in losses if loss is not None]
    mean = fmean(finite) if len(finite) == len(losses) else None
    return {"final_losses": list(losses), "mean": mean}


def _sweep(curves: Sequence[Curve], optimizer: str, plan: Plan) -> list[dict[str, Any]]:
    rows = []
    for lr in plan.control_rates if optimizer == CONTROL else plan.rates:
        first = plan.rates_seeds[0]
        ran = find(curves, part=RATES, optimizer=optimizer, lr=lr, seed=first)
        if not ran:
            continue
        (curve,) = ran
        loss = final_loss(curve["loss"], plan.tail_steps)
        rows.append(
            {
                "lr": lr,
                "final_loss": loss,
                "largest_logit": largest(curve),
                "heads_a_step": fmean(curve["clipped_heads"]),
                "not_applied": curve["not_applied"],
                "same_as": curve.get("same_as"),
            }
        )
    return rows


def _tokens_to_adamw(
    curves: Sequence[Curve], optimizer: str, found: Found, plan: Plan
) -> list[float | None]:
    """Return the share of the run after which AdamW's final loss is reached, for each seed.

    Losses are running means over the tail. The learning rate is still high at that point; a run
    planned for so few tokens would reach a lower loss.
    """
    shares: list[float | None] = []
    for seed, goal in zip(plan.rates_seeds, found[ADAMW]["final_losses"], strict=True):
        lr = found[optimizer]["lr"]
        (curve,) = find(curves, part=RATES, optimizer=optimizer, lr=lr, seed=seed)
        smooth = running_mean(curve["loss"], plan.tail_steps)
        reached = [goal is not None and loss <= goal for loss in smooth]
        shares.append((reached.index(True) + 1) / len(smooth) if any(reached) else None)
    return shares
