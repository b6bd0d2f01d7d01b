"""Renders the results as a Markdown page. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.dep.settings import ALONE, COLOCATED, DEP, TEXT_ONLY
from benchmarks.dep.targets import FIRST, MIB, encoder_peak, step_peak
from benchmarks.result import named, spread, table, verdicts

QUIET_LOAD, QUIET_SHARE = 0.5, 0.02

Found = Mapping[str, Any]


def page(found: Found) -> str:
    """Return the whole page."""
    about = found["about"]
    lines = [
        "# DEP against the encoder on the first stage: measured on CPU processes",
        "",
        f"{about['date']}, {about['machine']}; {named(about['versions'])}. "
        f"Made by `benchmarks/bench_dep.py` in {about['seconds']:.0f} s.",
        "",
        *_warnings(found),
        *_targets(found["targets"]),
    ]
    if found.get("timing"):
        lines += _timing(found)
    if found.get("memory"):
        lines += _memory(found["memory"])
    return "\n".join(lines) + "\n"


def disturbed(found: Found) -> str | None:
    """Return a warning if other work disturbed the run, or None if the machine was quiet."""
    load = found["about"]["load_before"][0]
    share = found["timing"]["no_core_share"] if found.get("timing") else 0.0
    if load <= QUIET_LOAD and share <= QUIET_SHARE:
        return None
    return (
        f"Read with care: the machine was not quiet. Its load was {load:g} before the start, and "
        f"in {share:.0%} of the timed seconds a process could have gone on but had no core. "
        "Memory, plans and counts do not depend on that; seconds do."
    )


def _warnings(found: Found) -> list[str]:
    lines = []
    if found["about"]["quick"]:
        lines += ["**Quick form: no figure here means anything.**", ""]
    if warning := disturbed(found):
        lines += [f"**{warning}**", ""]
    return lines


def _targets(rows: Sequence[Found]) -> list[str]:
    columns = {"target": "target", "predicted": "predicted", "found": "measured", "met": "met"}
    return [
        *verdicts(rows, columns | {"undisturbed": "undisturbed"}),
        "Met or not goes by what was measured. Undisturbed is made from seconds of computing, see "
        "below, and is there to tell other work on the machine from DEP's own.",
        "",
    ]


def _timing(found: Found) -> list[str]:
    timed, model = found["timing"], found["raw"]["timing"]["model"]
    return [
        "## What ran",
        "",
        *_what_ran(found, timed, model),
        "",
        "## Step time",
        "",
        *_steps(timed),
        "",
        *_prediction(found, timed),
        "",
        "## Where DEP's time goes",
        "",
        *_overhead(timed),
        "",
        "## Seconds of each phase",
        "",
        *_phases(timed),
        "",
    ]


def _what_ran(found: Found, timed: Found, model: Found) -> list[str]:
    rounds, work = found["raw"]["timing"]["rounds"], found["raw"]["timing"]["rounds"]
    language = sum(model["language_parameters_by_stage"]) / 1e6
    encoder = model["encoder_parameters"] / 1e6
    share, both = timed["encoder"]["over_text_only"], timed["encoder"]["forward_and_backward"]
    items = [one["work"]["items"] for one in work]
    tokens = [one["work"]["vision_tokens"] / one["work"]["tokens"] for one in work]
    return [
        f"Two pipeline stages in two processes of one thread each, {model['dtype']}: a language "
        f"model of {language:.1f}M parameters, an encoder of {encoder:.1f}M. "
        f"A step is {model['microbatches']} microbatches of {model['rows_per_microbatch']} rows of "
        f"{model['seq_len']} tokens. Pictures and clips have the sizes of the mix of "
        "`benchmarks/sim/mix.csv`, each side a quarter as long, and hold noise: "
        f"{min(items)} to {max(items)} items a step, {min(tokens):.0%} to {max(tokens):.0%} of the "
        f"tokens. The encoder's forward and backward over all items take {both['median']:.2f} s of "
        f"one core, {share['median']:.0%} of a text-only step ({_range(share, '.0%')}).",
        "",
        f"All variants ran in one job on one model, in turns, {len(rounds)} rounds after a "
        "warm-up, each round on other rows; medians over the rounds (least - most). Ratios are "
        "taken inside a round. Rows and pictures were in memory before, and plans made before, as "
        "the loader does both ahead of a step. The losses of all steps with media agreed to "
        f"{timed['losses_apart']:.1e}. Efficiency: step time with every vision token replaced by a "
        "text token, over step time with the vision tokens; same rows, layout and run.",
    ]


def _steps(timed: Found) -> list[str]:
    head = ["", "step, s", "efficiency", "predicted step, s", "measured / predicted",
            "imbalance planned", "measured", "computing, s, each rank", "undisturbed, s",
            "sent"]  # fmt: skip
    rows = []
    for name, one in timed["variants"].items():
        balance = one["imbalance"]
        off = one["measured_over_predicted"]
        rows.append([
            name, spread(one["seconds"], ".2f"), spread(one["efficiency"], ".1%"),
            f"{one['predicted_seconds']['median']:.2f}" if name != TEXT_ONLY else "",
            f"{off['median']:.3f}" if name != TEXT_ONLY else "",
            f"{balance['predicted']['median']:.3f}" if balance else "",
            f"{balance['measured']['median']:.3f}" if balance else "",
            " / ".join(f"{busy:.2f}" for busy in one["busy"]),
            spread(one["undisturbed_seconds"], ".2f"),
            f"{one['sent_bytes'] / MIB:.2f} MiB" if one["sent_bytes"] else "",
        ])  # fmt: skip
    return [
        *table(head, rows),
        "",
        "Imbalance: the slower rank's seconds of encoding over the mean, of phases 2 and 6. "
        "Computing: seconds with a core; the rest of a step is waiting. Undisturbed: what these "
        "seconds come to when every rank has a core whenever it could go on (phases one after the "
        "other, the backbone as 1F1B has it); on a quiet machine that is about the step.",
    ]


def _prediction(found: Found, timed: Found) -> list[str]:
    first, schedule = found["raw"]["timing"]["calibration"][0], timed["schedule"]
    cost, ratio = first["cost"], timed["ratio"]
    stages = " and ".join(f"{seconds:.2f} s" for seconds in schedule["stage_seconds"])
    return [
        "How the prediction is made. Before the rounds both ranks calibrated at the same time, "
        "with the code of `kimi-pretrain plan --calibrate`: an item of P patches costs "
        f"{cost['per_patch']:.3g} P + {cost['per_patch_squared']:.3g} P^2 + {cost['per_item']:.3g} "
        f"s for two forwards and a backward, a chunk {first['per_chunk']:.3g} s more "
        f"({first['loads']} loads, {first['repeats']} repeats, median error "
        f"{first['median_error']:.1%}, forward {first['forward_share']:.0%}). Co-located: the "
        "first stage takes longer for each microbatch by a forward and a backward of its items, "
        "and the second waits as 1F1B has it, with the computing seconds of the stages in the "
        "text-only "
        f"step ({stages}; the schedule then takes {schedule['predicted']:.2f} s, phase 4 took "
        f"{schedule['measured']:.2f} s). DEP: text only + the slower rank's two forwards and a "
        "backward. Nothing is allowed for exchanges, sums and the rest.",
        "",
        f"Co-located over DEP: predicted {spread(ratio['predicted'], '.3f')}, measured "
        f"{spread(ratio['measured'], '.3f')}. As ratios of whole steps are all near 1, the harder "
        f"question is the time that media add: co-located {_added(timed, COLOCATED)}, DEP "
        f"{_added(timed, DEP)}. The encoder alone took "
        f"{timed['encoder']['measured_over_calibrated']['median']:.2f} of what the calibration "
        "says.",
    ]


def _added(timed: Found, name: str) -> str:
    text = timed["variants"][TEXT_ONLY]["seconds"]["median"]
    one = timed["variants"][name]
    measured, predicted = (one[k]["median"] - text for k in ("seconds", "predicted_seconds"))
    return f"{measured:.2f} s, predicted {predicted:.2f} s"


def _overhead(timed: Found) -> list[str]:
    overhead = timed["overhead"]
    parts = overhead["parts"]
    names = {
        "arithmetic": "the encoder's arithmetic: 4/3 of forward and backward (timed as "
        f'"{ALONE}" in the same rounds), over the ranks',
        "imbalance": "slower rank over the mean, phases 2 and 6",
        "exchange": "phases 3 and 5, of the rank that waits least",
        "gradient sum": "what is left of it after the backward, of the rank that waits least",
    }
    rows = [[names[name], spread(part, ".1%")] for name, part in parts.items()]
    rows.append(["**beyond arithmetic, all together**", spread(overhead["share"], ".1%")])
    return [
        *table(["share of DEP's step", ""], rows),
        "",
        "All together is the step minus the text-only step minus the arithmetic; the three lines "
        "between are measured by themselves and need not add up to it.",
    ]


def _phases(timed: Found) -> list[str]:
    phases = list(dict.fromkeys(p for one in timed["variants"].values() for p in one["phases"]))
    rows = [
        [name, *(_ranks_of(one["phases"].get(phase)) for phase in sorted(phases, key=_place))]
        for name, one in timed["variants"].items()
    ]
    return [
        *table(["", *sorted(phases, key=_place)], rows),
        "",
        "First stage / last stage. Waiting for the other rank is part of a phase.",
    ]


def _place(phase: str) -> tuple[bool, str]:
    return phase != "prepare", phase if phase != "6 gradient sum" else "6z"


def _ranks_of(seconds: Sequence[float] | None) -> str:
    return " / ".join(f"{one:.3f}" for one in seconds) if seconds else ""


def _memory(memory: Found) -> list[str]:
    return [
        "## Memory",
        "",
        "Resident memory of a process above what was resident before the step (weights, gradient "
        "buffers, optimizer state and the step's pixels are there before), at its highest, in MiB; "
        "the kernel's high-water mark, started anew for each phase. For these steps the C library "
        "gave every block of 16 KiB and more a mapping of its own, so that memory that is freed is "
        "gone at once.",
        "",
        "On the mix, one step, each rank (first stage / last stage):",
        "",
        *_mix(memory["mix"]),
        "",
        *_curve(memory["curve"]),
    ]


def _mix(mix: Found) -> list[str]:
    phases = sorted(dict.fromkeys(p for one in mix.values() for r in one for p in r), key=_place)
    rows = []
    for name, ranks in mix.items():
        cells = [" / ".join(f"{step_peak(rank):.0f}" for rank in ranks)]
        for phase in phases:
            inside = any(phase in rank for rank in ranks)
            cells.append(
                " / ".join(f"{r.get(phase, 0) / MIB:.0f}" for r in ranks) if inside else ""
            )
        rows.append([name, *cells])
    return table(["", "step", *phases], rows)


def _curve(curve: Sequence[Found]) -> list[str]:
    point, last = curve[0], curve[-1]
    names = (COLOCATED, DEP)
    head = ["images", "patches", *(f"{name}, step" for name in names),
            "DEP's phases 2, 3, 5, 6", "embeddings of the step"]  # fmt: skip

    def peak(of: Found, name: str) -> str:
        return f"{step_peak(of['peaks'][name][FIRST]):.1f}"

    rows = [
        [p["images"], p["patches"], *(peak(p, name) for name in names),
         f"{encoder_peak(p['peaks'][DEP][FIRST]):.1f}", f"{p['embedding_bytes'] / MIB:.2f}"]
        for p in curve
    ]  # fmt: skip
    return [
        f"Peak of the first stage, {point['microbatches']} microbatches of one row with N images "
        f"of {point['patches'] // point['images']} patches each; the rest of the row is text, so "
        f"that rows are equally long. Chunks of at most {point['chunk']:,} patches. Co-located, "
        "the graph of every microbatch in flight holds its encoder's activations; DEP holds one "
        f"chunk's, and the embeddings of all microbatches ({last['embedding_bytes'] / MIB:.1f} MiB "
        "at most, in phases 3 and 5 some copies of them). With text in place of the images the "
        f"peak is {peak(point, TEXT_ONLY)} MiB.",
        "",
        *table(head, rows),
        "",
        "![peak memory of the first stage](../../docs/pictures/dep_memory.png)",
    ]


def _range(value: Mapping[str, float], form: str) -> str:
    return f"{value['min']:{form}} - {value['max']:{form}}"
