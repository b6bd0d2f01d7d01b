"""Renders the results as a Markdown page. Pure."""

from collections.abc import Mapping
from typing import Any

from benchmarks.muonclip.settings import ADAMW, CONTROL, MUON, MUONCLIP
from benchmarks.result import named, table, verdicts

Found = Mapping[str, Any]
PICTURES = "../../docs/pictures"


def page(found: Found) -> str:
    """Return the whole page."""
    about = found["about"]
    lines = [
        "# MuonClip: what the clip does, and Muon beside AdamW",
        "",
        f"{about['date']}, {about['machine']}; {named(about['versions'])}. "
        "Made by `benchmarks/bench_muonclip.py`, one thread, one run at a time: "
        f"{about['processor_seconds']:,} s of one core ({about['seconds']:,} s of the clock; "
        "no other figure depends on what else the machine did).",
        "",
        *(["**Quick form: no figure here means anything.**", ""] if about["quick"] else []),
        *verdicts(found["targets"], {"target": "target", "found": "found", "met": "met"}),
        *_what_ran(found),
    ]
    if "clip" in found:
        lines += _clip(found["clip"])
    if "rates" in found:
        lines += _rates(found["rates"], found["setup"])
    return "\n".join(lines) + "\n"


def _what_ran(found: Found) -> list[str]:
    setup, seen = found["setup"], found["setup"]["seen_before"]
    repeated = ", ".join(
        f"{name} {share:.0%}" for name, share in seen["sources"].items() if share >= 0.005
    )
    return [
        "## What ran",
        "",
        f"The demo's model (`configs/{setup['preset']}.yaml`), smaller as said below, on the "
        "demo's corpus, in one process through `kimi_pretrain.train`: "
        f"{setup['rows_per_step']} rows of {setup['seq_len']} tokens, "
        f"{setup['tokens_per_step']:,} tokens a step, fp32. A seed is an order of the data "
        "and initial weights; runs of one seed see the same batches. A loss is taken before the "
        f"update that trains on its rows, and {1 - seen['all']:.1%} of the tokens belong to "
        "samples that the run had not drawn before, so it is a loss on unseen data"
        f"{' but for ' + repeated + ' (pictures drawn again)' if repeated else ''}. The final loss "
        f"of a run is the mean of its last {setup['tail_steps']} steps. Weight decay 0.1, momentum "
        "0.95 with Nesterov, betas 0.9 and 0.95, gradient norm clipped at 1; AdamW differs from "
        "Muon in nothing but which tensors Muon trains.",
        "",
        f"Other than in the demo: `{' '.join(setup['overrides'])}`.",
        "",
    ]


def _clip(clip: Found) -> list[str]:
    head = ["seed", "", "first over", "largest", "median after", "last", "steps over after",
            "heads clipped a step", "final loss"]  # fmt: skip
    rows = [
        [row["seed"], name, *_logits(row[name])]
        for row in clip["seeds"]
        for name in (MUON, MUONCLIP)
    ]
    leads = ", ".join(f"{row['worst_lead']:+.3f}" for row in clip["seeds"])
    return [
        f"## The clip, at learning rate {clip['lr']:g} and threshold {clip['threshold']:g}",
        "",
        f"![largest logit and loss]({PICTURES}/muonclip_clip.png)",
        "",
        *table(head, rows),
        "",
        "The largest logit is that of a step's own forward passes, before its update and clip: "
        "with the weights that the clip has left behind on the step before it, but on other rows "
        "and after one more update. What is over the threshold is what these two add.",
        "",
        "The largest amount by which MuonClip's smoothed loss was above Muon's at any time, seed "
        f"by seed: {leads}.",
        "",
    ]


def _logits(one: Found) -> list[str]:
    return [
        _number(one["first_over"], "d", "never"),
        _number(one["largest"], ".1f"),
        _number(one["median_after"], ".1f"),
        _number(one["last"], ".1f"),
        _number(one["share_over_after"], ".0%"),
        _number(one["heads_a_step"], ".2f"),
        _number(one["final_loss"], ".3f", "not finite"),
    ]


def _rates(rates: Found, setup: Found) -> list[str]:
    names = [name for name in (ADAMW, CONTROL, MUON, MUONCLIP) if name in rates]
    swept = sorted({row["lr"] for name in names for row in rates[name]["sweep"]})
    sweep = [[f"{lr:g}", *(_swept(rates[name], lr) for name in names)] for lr in swept]
    chosen = [_chosen(name, rates[name]) for name in names]
    seeds = [f"seed {seed}" for seed in setup["rates_seeds"]]
    return [
        "## AdamW, Muon and MuonClip at tuned rates",
        "",
        f"![losses and sweep]({PICTURES}/muonclip_rates.png)",
        "",
        f"The sweep, all of it: final loss of {setup['rates_steps']} steps with seed "
        f"{setup['rates_seeds'][0]} (largest logit); the same rates for each, chosen in bold.",
        "",
        *table(["learning rate", *names], sweep),
        "",
        *_same(rates),
        *table(
            ["", "rate", *seeds, "mean", "below AdamW", f"below {CONTROL}", "AdamW's loss after"],
            chosen,
        ),
        "",
        "The last column is the share of the tokens after which the smoothed loss came to "
        "AdamW's final one, a seed each. The learning rate was still high then: a run planned for "
        "so few tokens would have come lower.",
        *_control(rates),
        *_edges(rates),
    ]


def _same(rates: Found) -> list[str]:
    count = sum(row["same_as"] is not None for row in rates[MUONCLIP]["sweep"])
    if not count:
        return []
    return [
        f"At {count} of the {len(rates[MUONCLIP]['sweep'])} rates Muon's largest logit stayed "
        "under the threshold; MuonClip's run is then Muon's bit for bit and was not run again.",
        "",
    ]


def _swept(found: Found, lr: float) -> str:
    ran = [row for row in found["sweep"] if row["lr"] == lr]
    if not ran:
        return ""
    (row,) = ran
    loss = _number(row["final_loss"], ".3f", "not finite")
    cell = f"{loss} ({_number(row['largest_logit'], '.1f')})"
    return f"**{cell}**" if lr == found["lr"] else cell


def _chosen(name: str, found: Found) -> list[str]:
    compared = (found.get("ahead_of_adamw"), found.get("ahead_of_control"))
    early = found.get("tokens_to_adamw")
    return [
        name,
        f"{found['lr']:g}",
        *(_number(loss, ".3f", "not finite") for loss in found["final_losses"]),
        _number(found["mean"], ".3f", "not finite"),
        *(
            ", ".join(_number(x, ".3f", "not finite") for x in ahead) if ahead else ""
            for ahead in compared
        ),
        ", ".join(_number(x, ".0%", "never") for x in early) if early else "",
    ]


def _control(rates: Found) -> list[str]:
    if CONTROL not in rates:
        return []
    return [
        "",
        f"{CONTROL}: AdamW with embedding and head at {rates[CONTROL]['ends_lr']:g}, Muon's rate; "
        "the rate in the table is that of all other tensors. AdamW trains embedding, head and "
        "norms in Muon's runs too, and they like a higher rate than AdamW's matrices bear: with "
        "one rate for all tensors, as in Moonlight, that is a part of Muon's lead. What is left "
        "of it against this control is that of the matrices and the norms.",
    ]


def _edges(rates: Found) -> list[str]:
    edge = [
        name
        for name in (ADAMW, CONTROL, MUON, MUONCLIP)
        if name in rates and rates[name]["at_edge"]
    ]
    if not edge:
        return []
    return ["", f"Read with care: the best rate of {', '.join(edge)} is at the sweep's edge."]


def _number(value: float | None, form: str, none: str = "") -> str:
    return none if value is None else f"{value:{form}}"
