"""Tables and efficiency picture of the simulation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.result import named, table
from benchmarks.sim.bubbles import WAYS
from benchmarks.sim.study import SCHEMES

BOUNDS = {
    "perfect": "perfect balance, nothing lost on the way",
    "once": "the same, nothing encoded twice",
}
TITLES = {name: scheme.title for name, scheme in SCHEMES.items()} | BOUNDS

# Schemes in the picture, with colours that colour-blind readers can tell apart.
LINES = {
    "round_robin": ("dealt out by count", "#b8562f", "s"),
    "replica": ("balanced inside each replica", "#e0a93b", "^"),
    "world": ("balanced over the global batch", "#1f4e9c", "o"),
    "split": ("the same, large items split", "#2f8f7f", "D"),
}
MUTED = "#6b7280"
DPI = 140
PARTS = ("text", "encoder", "imbalance", "exchange", "overhead", "total")  # fields of `StepTime`


def page(report: Mapping[str, Any]) -> str:
    """Return the results as a Markdown page."""
    quick = ["", "**Quick form: too few steps for figures to quote.**"] if report["quick"] else []
    lines = [
        "# What DEP can reach: the simulation's figures",
        "",
        f"{report['date']}, work in bubbles {report['bubbles_date']}, "
        f"{named(report['versions'])}; {report['processor_seconds']:.0f} s of one core without "
        "the bubbles. Made by "
        "`benchmarks/sim_dep.py`, explained in `docs/dep_simulation.md`. Efficiency: step time "
        "with every media token replaced by a text token over step time with the media, in per "
        "cent. Nothing here was timed on a GPU.",
        *quick,
        "",
        "## Efficiency",
        "",
        *main_table(report),
        "",
        *_error_note(report),
        "",
        "## Where the time goes",
        "",
        *parts_table(report),
        "",
        "## Work inside the pipeline's bubbles",
        "",
        *bubbles_table(report),
        "",
        "## One thing changed at a time",
        "",
        *variations_tables(report),
        "## Layouts",
        "",
        *_layouts(report),
        "",
        "## Assumptions",
        "",
        *_assumptions(report),
    ]
    return "\n".join(lines) + "\n"


def main_table(report: Mapping[str, Any]) -> list[str]:
    """Return the main results: a table per vision share, with a column for each number of ranks."""
    lines: list[str] = []
    for share in dict.fromkeys(case["vision"] for case in report["grid"]):
        cases = [case for case in report["grid"] if case["vision"] == share]
        head = [f"{share:.0%} vision tokens", *(f"{case['ranks']:,}" for case in cases)]
        rows = [
            [title, *(_percent(case["found"][name]["efficiency"]) for case in cases)]
            for name, title in TITLES.items()
        ]
        lines += [*table(head, rows), ""]
    return lines[:-1]


def _error_note(report: Mapping[str, Any]) -> list[str]:
    worst = max(
        (found["error"], case["ranks"], case["vision"])
        for case in report["grid"]
        for name, found in case["found"].items()
        if name not in ("colocated", "owner")
    )
    steps = {case["ranks"]: case["steps"] for case in report["grid"]}
    counted = ", ".join(f"{count} steps at {ranks:,}" for ranks, count in steps.items())
    return [
        "Columns: ranks. Means over steps: "
        f"{counted}. Standard error at most {100 * worst[0]:.1f} points "
        f"({worst[1]:,} ranks, {worst[2]:.0%}), the first two rows left out."
    ]


def parts_table(report: Mapping[str, Any]) -> list[str]:
    """Return the seconds of each part of a step at the largest number of ranks."""
    ranks = max(case["ranks"] for case in report["grid"])
    head = ["", "text alone", "encoder", "imbalance", "exchange", "sum, waits", "step"]
    rows = []
    for case in report["grid"]:
        if case["ranks"] != ranks:
            continue
        for name in ("round_robin", "replica", "world", "split"):
            parts = case["found"][name]["parts"]
            seconds = [f"{parts[key]:.3f}" for key in PARTS]
            rows.append([f"{case['vision']:.0%}, {TITLES[name]}", *seconds])
    return [f"Mean seconds of a step at {ranks:,} ranks.", "", *table(head, rows)]


def bubbles_table(report: Mapping[str, Any]) -> list[str]:
    """Return the efficiency of each way to fill bubbles, one table for each pipeline."""
    lines: list[str] = []
    for chunks in dict.fromkeys(case["chunks"] for case in report["bubbles"]):
        cases = [case for case in report["bubbles"] if case["chunks"] == chunks]
        titles = {"split": "no bubbles: DEP, large items split"}
        titles |= {name: way.title for name, way in WAYS.items()}
        names = [name for name in titles if any(name in case["found"] for case in cases)]
        columns = sorted({(case["ranks"], case["vision"]) for case in cases})
        found = {(case["ranks"], case["vision"]): case["found"] for case in cases}
        rows = [
            [titles[name]]
            + [_percent(found[c][name]["efficiency"]) if name in found[c] else "" for c in columns]
            for name in names
        ]
        head = [f"{chunks} virtual stages", *(f"{r:,}, {vision:.0%}" for r, vision in columns)]
        lines += [*table(head, rows), ""]
    steps = {case["ranks"]: case["steps"] for case in report["bubbles"]}
    counted = ", ".join(f"{count} at {ranks:,} ranks" for ranks, count in steps.items())
    lines.append(f"Columns: ranks, vision tokens. Steps: {counted}.")
    planned = [
        f"{way['parts']['planning']:.1f} s at {case['ranks']:,} ranks and {case['vision']:.0%} "
        f"({WAYS[name].title})"
        for case in report["bubbles"]
        for name, way in case["found"].items()
        if "planning" in way.get("parts", {})
    ]
    told = f"Planning a step, seconds of one core: {', '.join(planned)}."
    return [*lines, *(["", told] if planned else [])]


def variations_tables(report: Mapping[str, Any]) -> list[str]:
    """Return one small table for each varied quantity."""
    lines: list[str] = []
    varied = report["variations"]
    for group in dict.fromkeys(entry["group"] for entry in varied):
        mine = [entry for entry in varied if entry["group"] == group]
        shares = list(dict.fromkeys(entry["vision"] for entry in mine))
        names = [name for name in TITLES if any(name in entry["found"] for entry in mine)]
        columns = [(share, name) for share in shares for name in names]
        rows = []
        for label in dict.fromkeys(entry["label"] for entry in mine):
            found = {e["vision"]: e["found"] for e in mine if e["label"] == label}
            cells = [found.get(share, {}).get(name) for share, name in columns]
            rows.append([label, *(_percent(c["efficiency"]) if c else "" for c in cells)])
        head = [group, *(f"{share:.0%}, {SHORT[name]}" for share, name in columns)]
        lines += [*table(head, rows), ""]
    where = f"At {varied[0]['ranks']:,} ranks; the last table at {varied[-1]['ranks']:,}."
    return [where, "", *lines]


SHORT = {
    "colocated": "co-located", "owner": "owner", "round_robin": "by count", "replica": "replica",
    "copy": "copy", "world": "balanced", "split": "split", "perfect": "perfect", "once": "once",
}  # fmt: skip


def sensitivity_table(report: Mapping[str, Any]) -> list[str]:
    """Return all variations in one table: the best simulated scheme at 10% and 30%."""
    varied = [entry for entry in report["variations"] if entry["group"] != "modelling"]
    rows = []
    for group in dict.fromkeys(entry["group"] for entry in varied):
        cells = []
        for share in (0.1, 0.3):
            mine = [e for e in varied if e["group"] == group and e["vision"] == share]
            cells.append("; ".join(f"{e['label']}: {_best(e['found'])}" for e in mine))
        rows.append([group, *cells])
    return table(["varied", "10% vision tokens", "30%"], rows)


def _best(found: Mapping[str, Any]) -> str:
    return _percent(found["split" if "split" in found else "world"]["efficiency"])


# Results of an earlier, separate simulation, in per cent at 10, 30 and 50% vision tokens.
EARLIER = {
    "round_robin": (80.6, 71.2, 65.5),
    "copy": (92.1, 87.4, 82.1),
    "world": (92.1, 88.9, 83.2),
    "split": (94.7, 88.9, 83.2),
    "perfect": (96.4, 90.0, 84.4),
    "once": (97.2, 92.1, 87.6),
}


def earlier_table(report: Mapping[str, Any]) -> list[str]:
    """Return the comparison with an earlier simulation."""
    found = {
        (entry["label"], entry["vision"], name): _percent(one["efficiency"])
        for entry in report["variations"]
        if entry["group"] == "modelling"
        for name, one in entry["found"].items()
    }
    rows = []
    for name, earlier in EARLIER.items():
        row = [TITLES[name]]
        for share, then in zip((0.1, 0.3, 0.5), earlier):
            alike = found.get(("both, dealt out inside a replica", share, name))
            alike = alike if name == "round_robin" else found.get(("both", share, name))
            now = found.get(("as everywhere here", share, name))
            row.append(f"{then} / {alike} / {now}")
        rows.append(row)
    return table(["earlier / with its choices / here", "10%", "30%", "50%"], rows)


def filled(document: str, report: Mapping[str, Any]) -> str:
    """Return the document with the tables between its markers replaced.

    Raises:
        ValueError: a marker is missing.
    """
    for name, lines in (
        ("efficiency", main_table(report)),
        ("parts", parts_table(report)),
        ("bubbles", bubbles_table(report)),
        ("sensitivity", sensitivity_table(report)),
        ("earlier", earlier_table(report)),
    ):
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(f"the document needs {begin!r} and {end!r}, once each")
        before, rest = document.split(begin)
        document = "\n".join([before + begin, "", *lines, "", end]) + rest.split(end)[1]
    return document


def _layouts(report: Mapping[str, Any]) -> list[str]:
    head = ["ranks", "pp x v", "replicas", "experts over", "microbatches", "rows", "text step, s"]
    rows = [
        [f"{ranks:,}" if isinstance(ranks, int) else f"{int(ranks):,}",
         f"{one['pp']} x {one['vpp']}", one["dp"], one["ep"], one["microbatches"],
         f"{one['rows']:,}", f"{one['text_seconds']:.2f}"]
        for ranks, one in report["layouts"].items()
    ]  # fmt: skip
    return table(head, rows)


# Meaning of each assumption, for the page. The other rows are facts of the mix with clear names.
MEANING = {
    "peak_flops": "operations a second of a rank, bfloat16, dense (H800)",
    "backbone_efficiency": "of it, by the language model inside a pass, expert exchange included",
    "encoder_efficiency": "of it, by the encoder",
    "network": "bytes a second of a rank between nodes, each way (80% of 400 Gb/s)",
    "node_network": "bytes a second of a rank inside a node, each way (80% of 200 GB/s)",
    "ranks_per_node": "",
    "phase_seconds": "launches and waiting at each of the two vision phases, s",
    "gradient_overlap": "part of the encoder's gradient sum that is hidden",
    "attention_backward": "backward of the encoder's attention, in forwards",
    "equal_chunks": "chunks of equal cost instead of those of `layout.stages`",
    "split_efficiency": "true one; None: as planned",
    "cost_scatter": "standard deviation of the logarithm of true over planned cost",
    "gradient_sum_seconds": "follows, at 4,096 ranks: sum of the encoder's gradients, float32, s",
    "encoder_parameters": "of the published sizes, biases left out",
    "active_parameters": "of the published sizes, without the input table",
    "language_backward": "backward of the language model, in forwards; nothing of it is recomputed",
    "bubble_filling": "vision work inside the pipeline's bubbles, but in the table of it",
    "seq_len": "tokens of a row",
    "rows_per_rank": "rows of a step over ranks: 64 microbatches of one row at PP16",
    "limits": "patches of an image, and of each of up to 4 frames of a video chunk, before padding",
    "max_patches_per_chunk": "of `dep`; 17,408 where activations are kept",
    "planned_split_efficiency": "of `dep`",
    "bytes_of_a_number": "exchanged embeddings, gradients and activations: bfloat16",
    "document_text": "text tokens of a document with media",
    "text_median": "tokens of texts on their own, log-normal with spread 1",
    "seed": "of the order of samples and of all draws",
}


def _assumptions(report: Mapping[str, Any]) -> list[str]:
    rows = [[name, _value(value), MEANING.get(name, "")]
            for name, value in report["assumptions"].items()]  # fmt: skip
    return table(["", "value", ""], rows)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_value(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(_value(one) for one in value)
    if isinstance(value, float) and value >= 1e6:
        return f"{value:.4g}"
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 10:
        return f"{value:,.0f}"
    return str(value)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def picture(report: Mapping[str, Any], path: Path) -> None:
    """Draw efficiency against ranks, one panel for each vision share."""
    shares = list(dict.fromkeys(case["vision"] for case in report["grid"]))
    figure = Figure(figsize=(3.6 * len(shares), 4.2), dpi=DPI, layout="constrained")
    panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
    for axes, share in zip(panels, shares):
        _panel(axes, [case for case in report["grid"] if case["vision"] == share])
        axes.set_title(f"{share:.0%} vision tokens", fontsize=11)
    panels[0].set_ylabel("step time, text only / with media (%)")
    panels[0].set_ylim(60, 100.5)
    figure.supxlabel("ranks (GPUs), 4 rows of 4,096 tokens on each", fontsize=10)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=len(labels), frameon=False,
                  fontsize=9)  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def _panel(axes: Axes, cases: Sequence[Mapping[str, Any]]) -> None:
    ranks = [case["ranks"] for case in cases]
    ends = {}
    for name, (label, color, marker) in LINES.items():
        values = [100 * case["found"][name]["efficiency"] for case in cases]
        size = 8 if name == "world" else 5  # visible behind "split" where both are equal
        axes.plot(ranks, values, color=color, marker=marker, markersize=size, label=label)
        ends[name] = values[-1]
    heights = apart(list(ends.values()), 1.5)
    for (name, value), height in zip(ends.items(), heights):
        axes.text(ranks[-1] * 1.4, height, f"{value:.1f}", fontsize=8, color=LINES[name][1],
                  verticalalignment="center")  # fmt: skip
    bound = [100 * case["found"]["perfect"]["efficiency"] for case in cases]
    axes.plot(ranks, bound, color=MUTED, linestyle="--", linewidth=1, label="perfect balance")
    axes.set_xscale("log", base=4)
    axes.set_xticks(ranks, [f"{rank:,}" for rank in ranks])
    axes.set_xlim(ranks[0] * 0.7, ranks[-1] * 3.2)
    axes.minorticks_off()
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)


def apart(values: Sequence[float], gap: float) -> list[float]:
    """Return heights near the values, in the same order and at least `gap` apart."""
    heights, last = [0.0] * len(values), float("inf")
    for place in sorted(range(len(values)), key=lambda place: (-values[place], -place)):
        heights[place] = last = min(values[place], last - gap)
    return heights
