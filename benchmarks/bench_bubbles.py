"""Compares vision work inside pipeline bubbles with plain DEP, on emulated devices and real cores.

Emulated: two or four processes run the real schedule, plan and messages, but passes and vision work
are sleeps of fixed length, independent of the processor (`benchmarks/bubbles/emulate.py`). Text
only, DEP and work in bubbles run in turns on the same rows. Work in bubbles also runs with
activations kept, with all cost estimates halved, and with halved estimates while the slots adapt to
measured times. Real: two processes run real arithmetic, each pinned to a core, so that a bubble
frees no core for the other process. A run takes half an hour and needs a quiet machine.

    python benchmarks/bench_bubbles.py             # the committed results
    python benchmarks/bench_bubbles.py --quick     # a minute; figures not to quote
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from benchmarks.bubbles.emulate import Device
from benchmarks.bubbles.job import BUBBLES, DEP, HALF, KEPT, LEARNED, TEXT
from benchmarks.dep import data, launch
from benchmarks.result import RESULTS, cores, named, table, verdicts, versions
from benchmarks.result import write as write_result
from kimi_pretrain.config import load_config

CONFIG = launch.ROOT / "benchmarks" / "dep" / "config.yaml"
RESULT = RESULTS / "bubbles_cpu.json"

# As little arithmetic as possible, because sleeps replace it.
SMALL = (
    "model.vision.width=32", "model.vision.depth=2", "model.vision.mlp_width=32",
    "model.vision.out_width=32", "model.vision.heads=2", "model.language.num_layers=4",
    "model.language.hidden_size=32", "model.language.num_heads=2",
    "model.language.dense_ffn_size=32", "model.language.expert_ffn_size=32",
    "model.language.q_lora_rank=16", "model.language.kv_lora_rank=16",
    "model.language.qk_nope_dim=12", "model.language.qk_rope_dim=4", "model.language.v_dim=12",
    "train.rows_per_microbatch=4", "data.limits={image: 256, frame: 64}",
)  # fmt: skip
EIGHT = ("data.rows_per_step=32",)  # microbatches of `SMALL`
IN_BUBBLES = ("dep.bubbles=all", "data.order_rows=light_ends", "data.prefetch_steps=0")


@dataclass(frozen=True)
class Case:
    """One job and the variants that it compares.

    Attributes:
        title: description in words.
        settings: config overrides: layout and rows.
        processes: number of processes in the layout.
        device: emulated device; None means real arithmetic, with each process pinned to a core.
        variants: names from `benchmarks.bubbles.job`.
        rounds: rounds that count, after `warm_up`.
    """

    title: str
    settings: tuple[str, ...]
    processes: int
    device: Device | None
    variants: tuple[str, ...]
    rounds: int = 10
    warm_up: int = 4


ALL = (TEXT, DEP, BUBBLES, KEPT, HALF, LEARNED)
CASES = {
    "PP4": Case(
        "4 stages, 8 microbatches",
        (*SMALL, *IN_BUBBLES, "layout.pp=4", *EIGHT), 4, Device(0.200, 0.000095), ALL,
    ),
    "PP2": Case(
        "2 stages, 8 microbatches",
        (*SMALL, *IN_BUBBLES, "layout.pp=2", *EIGHT), 2, Device(0.200, 0.000048), ALL,
    ),
    "PP2 x VPP2": Case(
        "2 stages of 2 chunks, 8 microbatches",
        (*SMALL, *IN_BUBBLES, "layout.pp=2", "layout.vpp=2", *EIGHT), 2, Device(0.100, 0.000048),
        ALL,
    ),
    "real": Case(
        "2 stages, 8 microbatches, real arithmetic",
        (*IN_BUBBLES, "layout.pp=2"), 2, None, (TEXT, DEP, BUBBLES), 20,
    ),
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CASES, help="one case; written to runs/")
    parser.add_argument("--quick", action="store_true", help="one round of the smallest case")
    parser.add_argument("--rounds", type=int, help="that count, of each case; default: 10, real 20")
    parser.add_argument(
        "--out", type=Path, help=f"JSON; default: {RESULT.relative_to(launch.ROOT)}"
    )
    arguments = parser.parse_args()
    cases = {arguments.only: CASES[arguments.only]} if arguments.only else CASES
    if arguments.quick:
        few = {"rounds": 1, "warm_up": 1, "device": Device(0.01, 0.00001), "variants": ALL[:4]}
        cases = {"PP2": Case(**{**vars(CASES["PP2"]), **few})}
    if arguments.rounds:
        cases = {name: replace(case, rounds=arguments.rounds) for name, case in cases.items()}
    partial = arguments.quick or arguments.only
    aside = launch.ROOT / "runs" / "bench_bubbles" / RESULT.name
    out = arguments.out or (aside if partial else RESULT)
    load, began = [round(x, 2) for x in os.getloadavg()], time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = {name: measure(case, Path(folder) / name) for name, case in cases.items()}
    about = {
        "date": date.today().isoformat(),
        "machine": cores(),
        "load_before": load,
        "seconds": round(time.monotonic() - began),
        "quick": arguments.quick,
        "rounds": {name: case.rounds for name, case in cases.items()},
        "versions": versions("torch", "megatron-core", "numpy"),
    }
    result = {"about": about, "cases": found, "targets": targets(found)}
    write_result(result, out, page(result))


def measure(case: Case, work: Path) -> dict[str, Any]:
    """Run one case and return its figures."""
    print(case.title, flush=True)
    root = work / "mix"
    root.mkdir(parents=True)
    overrides = [*case.settings, f"data.root={root}"]
    data.build_mix(root, load_config(CONFIG, overrides).data, 1)
    setup = {
        "config": str(CONFIG), "overrides": overrides, "pinned": case.device is None,
        "device": asdict(case.device) if case.device else None, "variants": case.variants,
        "rounds": case.rounds, "warm_up": case.warm_up,
    }  # fmt: skip
    given, out = work / "setup.json", work / "found.json"
    given.write_text(json.dumps(setup))
    launch.run("benchmarks.bubbles.job", [str(given), str(out)], {}, case.processes)
    return summary(case, json.loads(out.read_text()))


def summary(case: Case, rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return median and spread of each variant's efficiency, and the use of its bubbles."""
    found: dict[str, Any] = {}
    for name in case.variants:
        text = np.array([one[TEXT]["seconds"] for one in rounds])
        mine = np.array([one[name]["seconds"] for one in rounds])
        spent = [one[name]["bubbles"] for one in rounds if one[name]["bubbles"][0]]
        found[name] = {
            "seconds": float(np.median(mine)),
            "load": float(np.mean([one[name]["load"] for one in rounds])),
            "largest_load": float(np.mean([max(one[name]["load"]) for one in rounds])),
            "efficiency": _spread(text / mine),
            "bubble_seconds": {
                kind: float(np.mean([[rank[kind] for rank in ranks] for ranks in spent]))
                for kind in (spent[0][0] if spent else ())
            },
        }
    dep = np.array([one[DEP]["seconds"] for one in rounds])
    over = {
        name: _spread(np.array([one[name]["seconds"] for one in rounds]) / dep)
        for name in case.variants
        if name not in (TEXT, DEP)
    }
    return {"title": case.title, "variants": found, "over_dep": over}


def _spread(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, [10, 50, 90]).tolist()
    return {"median": middle, "p10": low, "p90": high}


def targets(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the targets with the measured values."""
    if "PP4" not in found:
        return []
    variants = found["PP4"]["variants"]
    rows = [
        ("PP4, bubbles at least 93% of text only, where DEP comes to about 84%", BUBBLES, 0.93),
        ("PP4, costs believed half: at least 90%", HALF, 0.90),
    ]
    return [
        {
            "target": title,
            "found": f"{variants[name]['efficiency']['median']:.1%} "
            f"(DEP {variants[DEP]['efficiency']['median']:.1%})",
            "met": variants[name]["efficiency"]["median"] >= least,
        }
        for title, name, least in rows
        if name in variants
    ]


def page(result: Mapping[str, Any]) -> str:
    """Return the results as a Markdown page."""
    about = result["about"]
    told = ", ".join(f"{name} {count}" for name, count in about["rounds"].items())
    lines = [
        "# Vision work in the pipeline's bubbles, emulated and run", "",
        f"{about['date']}, {about['machine']}, {named(about['versions'])}; load before the run "
        f"{about['load_before']}, {about['seconds']} s. Made by "
        f"`python benchmarks/bench_bubbles.py`; rounds: {told}.", "",
        "Efficiency is the time of the same rows with text alone over the variant's: median and "
        "10th to 90th percentile of the rounds. Emulated devices sleep; the schedule, the plan and "
        "the messages are the real ones.", "",
        *verdicts(result["targets"], {"target": "target", "found": "found", "met": "met"}),
    ]  # fmt: skip
    head = ("", "s a step", "efficiency", "time over DEP's", "filled s", "wasted s", "overrun s")
    for name, case in result["cases"].items():
        rows = []
        for variant, one in case["variants"].items():
            spent, over = one["bubble_seconds"], case["over_dep"].get(variant)
            rows.append([
                variant, f"{one['seconds']:.2f}", _told(one["efficiency"], ".1%"),
                _told(over, ".3f") if over else "",
                *([f"{spent[kind]:.2f}" for kind in spent] or ["", "", ""]),
            ])  # fmt: skip
        dep = case["variants"][DEP]
        load = (
            f"Vision work of DEP by its cost model: {dep['load']:.2f} s a rank, "
            f"{dep['largest_load']:.2f} s on the busiest."
        )
        lines += [f"## {name}: {case['title']}", "", load, "", *table(head, rows), ""]
    return "\n".join(lines)


def _told(value: Mapping[str, float], form: str) -> str:
    return f"{value['median']:{form}} ({value['p10']:{form}} - {value['p90']:{form}})"


if __name__ == "__main__":
    main()
