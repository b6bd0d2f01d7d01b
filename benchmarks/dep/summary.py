"""Reduces the rounds to medians, predictions and targets. Pure.

Ratios and differences are computed within a round, in which all variants run on the same rows.
Their medians are then taken over the rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

from benchmarks.dep.predict import Backbone, Encoder, added, inside, undisturbed
from benchmarks.dep.settings import ALONE, BACKBONE, COLOCATED, DEP, SETTINGS, TEXT_ONLY
from kimi_pretrain.dep.cost import CostModel
from kimi_pretrain.telemetry.metrics import ENCODING

Round = Mapping[str, Any]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the median, the minimum and the maximum."""
    return {"median": median(values), "min": min(values), "max": max(values)}


def over_rounds(rounds: Sequence[Round], what: Callable[[Round], float]) -> dict[str, float]:
    """Return the spread of a figure over the rounds."""
    return spread([what(one) for one in rounds])


def seconds(one: Round, name: str) -> float:
    """Return the step time of a variant in a round."""
    return float(one["runs"][name]["seconds"])


def summarise(timing: Mapping[str, Any]) -> dict[str, Any]:
    """Return all figures of the timed part that the page shows."""
    rounds, model = timing["rounds"], timing["model"]
    encoder, backbone = machine(timing)
    guesses = [added(one["work"], encoder, backbone, COLOCATED) for one in rounds]
    walls = [{name: seconds(one, name) for name in SETTINGS} for one in rounds]
    quiet = [{name: _quiet(one, name, encoder, model) for name in SETTINGS} for one in rounds]
    variants = {name: variant(rounds, guesses, name) for name in SETTINGS}
    for name, found in variants.items():
        found["undisturbed_seconds"] = spread([one[name] for one in quiet])
    phase = [max(r["phases"][BACKBONE] for r in _ranks(one, TEXT_ONLY)) for one in rounds]
    return {
        "variants": variants,
        "ratio": {**ratio(walls, guesses), "undisturbed": ratio(quiet, guesses)},
        "encoder": {
            "forward_and_backward": over_rounds(rounds, forward_backward),
            "over_text_only": over_rounds(
                rounds, lambda one: forward_backward(one) / seconds(one, TEXT_ONLY)
            ),
            "measured_over_calibrated": over_rounds(
                rounds, lambda one: forward_backward(one) / _calibrated(one, encoder)
            ),
        },
        "overhead": {**overhead(rounds), "undisturbed": _quiet_overhead(rounds, quiet)},
        "schedule": {
            "stage_seconds": list(backbone.stage_seconds),
            "predicted": backbone.seconds(),
            "measured": median(phase),
        },
        "losses_apart": max(losses_apart(one) for one in rounds),
        "no_core_share": no_core_share(rounds),
    }


def ratio(
    steps: Sequence[Mapping[str, float]], guesses: Sequence[Mapping[str, float]]
) -> dict[str, Any]:
    """Return co-located over DEP: measured, predicted from the text-only step, and their ratio.

    Args:
        steps: seconds of each variant's step, in each round.
        guesses: predicted extra seconds of each variant over text only.
    """
    measured = [one[COLOCATED] / one[DEP] for one in steps]
    predicted = [
        (one[TEXT_ONLY] + guess[COLOCATED]) / (one[TEXT_ONLY] + guess[DEP])
        for one, guess in zip(steps, guesses, strict=True)
    ]
    off = [m / p for m, p in zip(measured, predicted, strict=True)]
    return {
        "measured": spread(measured),
        "predicted": spread(predicted),
        "measured_over_predicted": spread(off),
    }


def machine(timing: Mapping[str, Any]) -> tuple[Encoder, Backbone]:
    """Return the inputs of predictions: rank 0's calibration, and the text-only steps."""
    first, model = timing["calibration"][0], timing["model"]
    encoder = Encoder(
        CostModel(**first["cost"]), first["per_chunk"], first["forward_share"],
        model["max_patches_per_chunk"],
    )  # fmt: skip
    ranks = range(len(timing["calibration"]))
    stages = [
        median(_ranks(one, TEXT_ONLY)[rank]["busy_phases"][BACKBONE] for one in timing["rounds"])
        for rank in ranks
    ]
    return encoder, Backbone(stages, model["microbatches"])


def variant(
    rounds: Sequence[Round], guesses: Sequence[Mapping[str, float]], name: str
) -> dict[str, Any]:
    """Return the figures of one variant. Phases and computing are medians for each rank."""
    guessed = [
        seconds(one, TEXT_ONLY) + (guess[name] if name != TEXT_ONLY else 0.0)
        for one, guess in zip(rounds, guesses, strict=True)
    ]
    off = [seconds(one, name) / guess for one, guess in zip(rounds, guessed, strict=True)]
    phases = dict.fromkeys(p for one in rounds for r in _ranks(one, name) for p in r["phases"])
    return {
        "seconds": over_rounds(rounds, lambda one: seconds(one, name)),
        "efficiency": over_rounds(rounds, lambda one: seconds(one, TEXT_ONLY) / seconds(one, name)),
        "predicted_seconds": spread(guessed),
        "measured_over_predicted": spread(off),
        "phases": {
            p: _by_rank(rounds, name, lambda r, p=p: r["phases"].get(p, 0.0)) for p in phases
        },
        "busy": _by_rank(rounds, name, lambda r: r["busy"]),
        "imbalance": _imbalances(rounds, name),
        "sent_bytes": median(sum(r["sent"] for r in _ranks(one, name)) for one in rounds),
    }


def _by_rank(rounds: Sequence[Round], name: str, what: Callable[[Any], float]) -> list[float]:
    ranks = range(len(_ranks(rounds[0], name)))
    return [median(what(_ranks(one, name)[rank]) for one in rounds) for rank in ranks]


def _imbalances(rounds: Sequence[Round], name: str) -> dict[str, Any] | None:
    """Return max over mean, planned and measured; None if only the pipeline encodes."""
    measured = [[_encoding(r) for r in _ranks(one, name)] for one in rounds]
    if not any(sum(ranks) for ranks in measured):
        return None
    return {
        "predicted": spread([max_over_mean(one["work"]["loads"][name]) for one in rounds]),
        "measured": spread([max_over_mean(ranks) for ranks in measured]),
    }


def _quiet(one: Round, name: str, encoder: Encoder, model: Mapping[str, Any]) -> float:
    """Return the undisturbed step time of a variant; see `undisturbed`."""
    busy = [r["busy_phases"] for r in _ranks(one, name)]
    if name != COLOCATED:
        return undisturbed(busy, model["microbatches"], BACKBONE)
    text = _ranks(one, TEXT_ONLY)[0]["busy_phases"][BACKBONE]
    return undisturbed(busy, model["microbatches"], BACKBONE, inside(one["work"], encoder), text)


def max_over_mean(loads: Sequence[float]) -> float:
    """Return the slowest rank over the mean, or 1.0 without any load."""
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0


def forward_backward(one: Round, clock: str = "own") -> float:
    """Return the summed seconds of the encoder's forward and backward over all items.

    Args:
        clock: "own" for wall-clock seconds, "busy" for seconds with a core.
    """
    return sum(r[clock] for r in _ranks(one, ALONE))


def overhead(rounds: Sequence[Round]) -> dict[str, Any]:
    """Return the cost of DEP beyond the encoder's arithmetic, as shares of its step.

    The arithmetic is 4/3 of a forward and backward over all items, spread evenly over the ranks.
    The parts are measured separately and need not add up to the whole.
    """

    def of(one: Round, what: Callable[[Round], float]) -> float:
        return what(one) / seconds(one, DEP)

    parts = {"arithmetic": arithmetic, "imbalance": _imbalance, "exchange": _exchange,
             "gradient sum": _gradient_sum}  # fmt: skip
    return {
        "share": over_rounds(rounds, lambda one: of(one, beyond)),
        "seconds": over_rounds(rounds, beyond),
        "parts": {
            name: over_rounds(rounds, lambda o, w=what: of(o, w)) for name, what in parts.items()
        },
    }


def _quiet_overhead(
    rounds: Sequence[Round], quiet: Sequence[Mapping[str, float]]
) -> dict[str, float]:
    """Return the share of DEP's step beyond text only and arithmetic, from computing seconds."""
    pairs = zip(rounds, quiet, strict=True)
    return spread([1 - (one[TEXT_ONLY] + arithmetic(of, "busy")) / one[DEP] for of, one in pairs])


def arithmetic(one: Round, clock: str = "own") -> float:
    """Return 4/3 of the encoder's forward and backward, spread over the ranks."""
    return 4 / 3 * forward_backward(one, clock) / len(_ranks(one, ALONE))


def beyond(one: Round) -> float:
    """Return the seconds of a DEP step beyond text only and arithmetic."""
    return seconds(one, DEP) - seconds(one, TEXT_ONLY) - arithmetic(one)


def _imbalance(one: Round) -> float:
    loads = [_encoding(r) for r in _ranks(one, DEP)]
    return max(loads) - sum(loads) / len(loads)


def _exchange(one: Round) -> float:
    """Return phases 3 and 5 of the rank that waits least in them."""
    return min(r["phases"]["3 hand-over"] + r["phases"]["5 hand-back"] for r in _ranks(one, DEP))


def _gradient_sum(one: Round) -> float:
    return min(r["phases"]["6 gradient sum"] for r in _ranks(one, DEP))


def _encoding(rank: Mapping[str, Any]) -> float:
    return sum(rank["phases"].get(phase, 0.0) for phase in ENCODING)


def _calibrated(one: Round, encoder: Encoder) -> float:
    """Return the calibrated seconds for `forward_backward`."""
    whole = sum(encoder.seconds(patches) for patches in one["work"]["encoded"][DEP])
    return whole * (1 - encoder.forward_share)


def losses_apart(one: Round) -> float:
    """Return the range of the losses of steps with media, over the smallest of them."""
    losses = [run["loss"] for name, run in one["runs"].items() if name not in (TEXT_ONLY, ALONE)]
    return (max(losses) - min(losses)) / min(losses)


def no_core_share(rounds: Sequence[Round]) -> float:
    """Return the share of all timed seconds in which a rank was ready but had no core."""
    runs = [run for one in rounds for run in one["runs"].values()]
    waited = sum(rank["no_core"] for run in runs for rank in run["ranks"])
    return float(waited / sum(run["seconds"] * len(run["ranks"]) for run in runs))


def _ranks(one: Round, name: str) -> Sequence[Mapping[str, Any]]:
    return one["runs"][name]["ranks"]
