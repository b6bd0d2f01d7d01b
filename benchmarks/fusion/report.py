"""Means, intervals and differences over seeds for the fusion benchmark."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import device as where
from benchmarks.fusion.corpus import CHOICES, HELDOUT, MEDIA, TEXT
from benchmarks.fusion.training import ARMS, LR, MIN_LR, RATES, Size
from benchmarks.result import table, verdicts

# The held-out loss of several sources is the mean of their losses.
MEASURES = {
    "text": TEXT, "prose": ("prose",), "code": ("code",), "photos": ("photos",), "walls": ("walls",)
}  # fmt: skip
LATER = ("mid", "late")
# Student's t for a two-sided 95% interval, by number of seeds.
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
COLORS = {"early": "#1f4e9c", "mid": "#b8562f", "late": "#3f7d3a"}

Found = Mapping[str, Any]
Run = Mapping[str, Any]  # as returned by training.measured


def results(about: Found, size: Size, runs: Sequence[Run]) -> dict[str, Any]:
    """Return all results for JSON."""
    return {
        "about": about,
        "size": asdict(size),
        "seeds": sorted({run["seed"] for run in runs}),
        "tokens": {arm: _tokens(runs, arm) for arm in ARMS},
        "guess": {name: _guess(runs[0], name) for name in MEDIA},
        "ends": {rate: {arm: _ends(runs, rate, arm) for arm in ARMS} for rate in RATES},
        "differences": {rate: {arm: _more(runs, rate, arm) for arm in LATER} for rate in RATES},
        "dips": {rate: {arm: _dip(runs, rate, arm) for arm in LATER} for rate in RATES},
        "targets": targets(runs),
        "processor_seconds": round(sum(run["processor_seconds"] for run in runs)),
        "runs": runs,
    }


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Return the mean and the half width of its 95% interval, which is None for a single value."""
    if len(values) < 2:
        return {"mean": mean(values), "half": None}
    half = T95[len(values)] * stdev(values) / math.sqrt(len(values))
    return {"mean": mean(values), "half": half}


def _chosen(runs: Sequence[Run], rate: str, arm: str) -> list[Run]:
    found = [run for run in runs if (run["rate"], run["arm"]) == (rate, arm)]
    return sorted(found, key=lambda run: run["seed"])


def _losses(run: Run, measure: str) -> list[float]:
    """Return a measure at every validation of a run."""
    names = [f"{name}_heldout" for name in MEASURES[measure]]
    return [mean(by_source[name] for name in names) for _, _, by_source in run["curve"]]


def _tokens(runs: Sequence[Run], arm: str) -> dict[str, list[float]]:
    """Return the minimum and maximum of token counts, steps and media share over an arm's runs."""
    keys = ("text", "vision", "steps", "start", "share")
    values = {key: [run[key] for run in runs if run["arm"] == arm] for key in keys}
    return {key: [min(of), max(of)] for key, of in values.items()}


def _guess(run: Run, name: str) -> float:
    """Return the loss of guessing among all answers without seeing the picture, nats a token."""
    return math.log(CHOICES[name]) * HELDOUT[name] / run["loss_tokens"][f"{name}_heldout"]


def _ends(runs: Sequence[Run], rate: str, arm: str) -> dict[str, Any]:
    chosen = _chosen(runs, rate, arm)
    return {measure: interval([_losses(r, measure)[-1] for r in chosen]) for measure in MEASURES}


def _more(runs: Sequence[Run], rate: str, arm: str) -> dict[str, Any]:
    """Return the extra final loss of an arm over early, within a seed."""
    found: dict[str, Any] = {}
    pairs = list(zip(_chosen(runs, rate, arm), _chosen(runs, rate, "early"), strict=True))
    for measure in MEASURES:
        ends = [(_losses(one, measure)[-1], _losses(two, measure)[-1]) for one, two in pairs]
        found[measure] = interval([one - two for one, two in ends])
    return found


def _dip(runs: Sequence[Run], rate: str, arm: str) -> dict[str, Any]:
    """Return the change of the held-out text loss after media start.

    Counting starts at the last validation before the media. `rise` is the largest increase over an
    earlier value. `at_end` is the last value minus the lowest. `early` is the rise of the early arm
    from the same validation on.
    """
    found: dict[str, list[float]] = {"rise": [], "at_end": [], "early": []}
    for run, other in zip(_chosen(runs, rate, arm), _chosen(runs, rate, "early"), strict=True):
        before = max(i for i, point in enumerate(run["curve"]) if point[0] <= run["start"])
        losses, others = _losses(run, "text")[before:], _losses(other, "text")[before:]
        found["rise"].append(rise(losses))
        found["at_end"].append(losses[-1] - min(losses))
        found["early"].append(rise(others))
    return {name: interval(values) for name, values in found.items()}


def rise(losses: Sequence[float]) -> float:
    """Return the largest increase of a loss over an earlier one."""
    return max(a - b for a, b in zip(losses, accumulate(losses, min), strict=True))


def targets(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return the conditions that make the arms comparable, with the measured values."""
    rows = []
    for kind in ("vision", "text"):
        apart = max(_apart([run[kind] for run in runs if run["seed"] == r["seed"]]) for r in runs)
        told = f"{kind} tokens of all runs of a seed are equal to 1%"
        rows.append({"target": told, "found": f"{apart:.2%}", "met": apart <= 0.01})
    for arm, (_, share) in ARMS.items():
        found = [run["share"] for run in runs if run["arm"] == arm]
        told = f"{arm}: {share:.0%} of the tokens are media once they come, to 0.02"
        met = all(abs(one - share) <= 0.02 for one in found)
        rows.append({"target": told, "found": f"{min(found):.3f} - {max(found):.3f}", "met": met})
    return rows


def _apart(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / min(values)


# The page -----------------------------------------------------------------------------------------


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    seeds, guess = found["seeds"], found["guess"]
    lines = [
        *where.heading("When media come, in toy form", found),
        *verdicts(found["targets"], {"target": "target", "found": "measured", "met": "met"}),
        f"Seeds of weights and data: {', '.join(map(str, seeds))}. Learning rate {LR:g}, constant "
        f"or down to {MIN_LR:g} (cosine, to the last step). Tokens are those of samples; text "
        "inside media documents is text.",
        "",
        *table(
            ["arm", "media from", "their share", "steps", "vision tokens", "text tokens"],
            [_tokens_row(arm, found["tokens"][arm]) for arm in ARMS],
        ),
        "",
        "## Held-out loss at the end",
        "",
        "Nats a token, mean over seeds with the half width of its 95% interval. `text` is the mean "
        "of prose and code. Who knows all answers but not which picture has which loses "
        f"{guess['photos']:.3f} a token of photos and {guess['walls']:.3f} of walls.",
        "",
        *table(
            ["rate", "arm", *MEASURES],
            [
                [rate, arm, *(told(found["ends"][rate][arm][m]) for m in MEASURES)]
                for rate in RATES
                for arm in ARMS
            ],
        ),
        "",
        "## More loss than early, inside a seed",
        "",
        "In brackets: the interval holds 0, no difference is shown. Intervals are not corrected "
        "for their number.",
        "",
        *table(
            ["rate", "arm", *MEASURES],
            [
                [rate, arm, *(compared(found["differences"][rate][arm][m]) for m in MEASURES)]
                for rate in RATES
                for arm in LATER
            ],
        ),
        "",
        "## The dip of text where media come",
        "",
        "Loss of text from the last validation before the first media on: the most that it is "
        "above an earlier value; the last value above the lowest; early's rise from there on.",
        "",
        *table(
            ["rate", "arm", "rise", "at the end", "early's rise"],
            [
                [rate, arm, *map(told, found["dips"][rate][arm].values())]
                for rate in RATES
                for arm in LATER
            ],
        ),
        "",
        "![held-out loss along the runs](../../docs/pictures/fusion.png)",
        "",
        f"{found['processor_seconds']:,} s of one core.",
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def _tokens_row(arm: str, tokens: Found) -> list[str]:
    begin = _range([start + 1 for start in tokens["start"]], ",")
    counts = [_range(tokens[key], ",") for key in ("steps", "vision", "text")]
    return [arm, f"step {begin}", _range(tokens["share"], ".1%"), *counts]


def _range(values: Sequence[float], form: str) -> str:
    """Return the range of values as text, or one value if both ends print the same."""
    return " - ".join(dict.fromkeys(f"{value:{form}}" for value in values))


def told(value: Found) -> str:
    """Return a mean with its interval as text."""
    half = value["half"]
    return f"{value['mean']:.3f}" + ("" if half is None else f" ± {half:.3f}")


def compared(value: Found) -> str:
    """Return a difference with its interval as text, in brackets if the interval contains 0."""
    half = value["half"]
    text = f"{value['mean']:+.3f}" + ("" if half is None else f" ± {half:.3f}")
    return f"({text})" if half is None or abs(value["mean"]) <= half else text


def draw(found: Found, path: Path) -> None:
    """Write a PNG of mean and interval of the held-out loss along the runs, one column per rate."""
    from matplotlib.figure import Figure

    shown = {"text": "text (prose and code)", "photos": "photographs", "walls": "walls of digits"}
    figure = Figure(figsize=(9.6, 8.4), dpi=130, layout="constrained")
    grid = figure.subplots(len(shown), len(RATES), sharex=True, sharey="row", squeeze=False)
    for column, rate in enumerate(RATES):
        for row, (measure, title) in enumerate(shown.items()):
            axes = grid[row][column]
            for arm in ARMS:
                _draw_arm(axes, _chosen(found["runs"], rate, arm), measure, arm)
            if measure in found["guess"]:
                axes.axhline(found["guess"][measure], color="#6b7280", linestyle=":", linewidth=1)
            axes.set_title(f"{title}, {rate} learning rate", fontsize=10)
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
            axes.spines[["top", "right"]].set_visible(False)
            if measure == "text":
                axes.set_ylim(top=6.5)  # hides the start, which is the same in all arms
            if column == 0:
                axes.set_ylabel("nats a token")
    for axes in grid[-1]:
        axes.set_xlabel("tokens, thousands")
    grid[0][0].legend(frameon=False, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _draw_arm(axes: Any, runs: Sequence[Run], measure: str, arm: str) -> None:
    """Draw mean and interval of the validations that all seeds have, and of the last one."""
    curves = [(run["curve"], _losses(run, measure)) for run in runs]
    common = min(len(losses) for _, losses in curves) - 1
    points = []
    for place in [*range(common), -1]:
        values = interval([losses[place] for _, losses in curves])
        points.append((mean(curve[place][1] for curve, _ in curves) / 1000, values))
    x, y = [place for place, _ in points], [one["mean"] for _, one in points]
    start, share = ARMS[arm]
    label = f"{arm}: {share:.0%} media" + (f" from {start:.0%} on" if start else "")
    axes.plot(x, y, color=COLORS[arm], linewidth=1.5, label=label)
    low, high = ([one["mean"] + s * (one["half"] or 0) for _, one in points] for s in (-1, 1))
    axes.fill_between(x, low, high, color=COLORS[arm], alpha=0.2, linewidth=0)
    if start:
        first = mean(curve[-1][1] for curve, _ in curves) * start / 1000
        axes.axvline(first, color=COLORS[arm], linewidth=0.8, linestyle="--")
