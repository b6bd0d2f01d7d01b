"""Trains on real data to show the effect of QK-Clip and to compare Muon with AdamW.

The demo's small Kimi is trained on the demo's corpus, in one process with one thread, through the
regular training loop (settings: benchmarks/muonclip/settings.py).

1. clip: the same runs with and without QK-Clip, for several seeds, at a learning rate at which the
   attention logits of plain Muon grow without bound.
2. rates: the same sweep of learning rates for AdamW, Muon and MuonClip, then several seeds at the
   best rate of each; equal tokens, the same batches.

    python benchmarks/bench_muonclip.py               # the committed results, half an hour
    python benchmarks/bench_muonclip.py --quick       # seconds; figures not to quote
    python benchmarks/bench_muonclip.py --only clip model.language.num_layers=2    # other values

The last two write to runs/bench_muonclip, so that the committed results stay.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.muonclip import picture, report
from benchmarks.muonclip.settings import (
    CLIP,
    CONTROL,
    MUON,
    PARTS,
    PRESET,
    RATES,
    Plan,
    Run,
    clip_runs,
    control_runs,
    overrides_of,
    quick_plan,
    sweep_runs,
)
from benchmarks.muonclip.summary import (
    Curve,
    best_rate,
    clip_summary,
    rates_summary,
    unclipped,
)
from benchmarks.muonclip.targets import targets
from benchmarks.muonclip.training import make_corpus, seen_before, train_run
from benchmarks.result import cores, versions
from kimi_pretrain.config import ConfigError, load_config
from launch.local.quiet import quiet_libraries

ROOT = Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks" / "results" / "muonclip_cpu.json"
ASIDE = ROOT / "runs" / "bench_muonclip"  # for partial runs
PICTURES = ROOT / "docs" / "pictures"


def main() -> None:
    arguments = parse()
    plan = plan_of(arguments)
    quiet_libraries()
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            setup, curves = run(plan, work.resolve())
        except ConfigError as error:
            sys.exit(f"error: {error}")
    found = results(setup, curves, plan)
    write(found, curves, plan, arguments.out, arguments.pictures)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work",
        type=Path,
        help="a folder for data and runs; default: a temporary one. Of an earlier "
        "try it is gone on with: finished runs of the same settings are not run again",
    )
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--out", type=Path, help=f"JSON; default: {RESULT.relative_to(ROOT)}")
    parser.add_argument(
        "--pictures", type=Path, help=f"a folder; default: {PICTURES.relative_to(ROOT)}"
    )
    parser.add_argument("overrides", nargs="*", help="section.key=value, of every run's config")
    arguments = parser.parse_args()
    whole = not (arguments.quick or arguments.only or arguments.overrides)
    arguments.out = arguments.out or (RESULT if whole else ASIDE / RESULT.name)
    arguments.pictures = arguments.pictures or (PICTURES if whole else ASIDE)
    return arguments


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments select."""
    plan = quick_plan() if arguments.quick else Plan()
    parts = (arguments.only,) if arguments.only else PARTS
    return replace(plan, parts=parts, overrides=(*plan.overrides, *arguments.overrides))


def run(plan: Plan, work: Path) -> tuple[dict[str, Any], list[Curve]]:
    """Make the corpus and train all runs; return their common setup and their curves."""
    root = work / "corpus"
    firsts = {CLIP: clip_runs(plan)[0], RATES: sweep_runs(plan)[0]}
    configs = [load_config(PRESET, overrides_of(firsts[p], plan, str(root))) for p in plan.parts]
    config = max(configs, key=lambda config: config.train.steps)  # fail before the slow work
    corpus = corpus_in(root, plan)
    curves: list[Curve] = []
    if CLIP in plan.parts:
        curves += [trained(one, plan, work) for one in clip_runs(plan)]
    if RATES in plan.parts:
        curves += sweep(plan, work)
    data = config.data
    setup = {
        "preset": PRESET,
        "overrides": list(plan.overrides),
        "rows_per_step": data.rows_per_step,
        "seq_len": data.seq_len,
        "tokens_per_step": data.rows_per_step * data.seq_len,
        "tail_steps": plan.tail_steps,
        "clip_steps": plan.clip_steps,
        "rates_steps": plan.rates_steps,
        "clip_seeds": list(plan.clip_seeds),
        "rates_seeds": list(plan.rates_seeds),
        "seen_before": seen_before(config),
        "corpus": corpus,
    }
    return setup, curves


def corpus_in(root: Path, plan: Plan) -> dict[str, Any]:
    """Return the description of the corpus, which is made if it is missing."""
    told = root.with_suffix(".json")
    if not told.is_file():  # written last, so that an interrupted corpus is rebuilt
        print("making the corpus", flush=True)
        shutil.rmtree(root, ignore_errors=True)
        told.write_text(json.dumps(make_corpus(root, small=plan.quick)))
    return json.loads(told.read_text())


def sweep(plan: Plan, work: Path) -> list[Curve]:
    """Train every optimizer and the control at all rates, then all seeds at their best rates."""
    curves: list[Curve] = []
    for one in sweep_runs(plan):
        curves.append(unclipped(one, curves, plan) or trained(one, plan, work))
    muon = best_rate(curves, MUON, plan)
    curves += [trained(one, plan, work) for one in control_runs(plan, muon)]
    for name in dict.fromkeys(curve["optimizer"] for curve in curves):
        best = best_rate(curves, name, plan)
        for seed in plan.rates_seeds[1:]:
            one = Run(RATES, name, best, seed, muon / best if name == CONTROL else 1.0)
            curves.append(unclipped(one, curves, plan) or trained(one, plan, work))
    return curves


def trained(one: Run, plan: Plan, work: Path) -> Curve:
    """Train and print one run, or return the curve of an earlier try with the same settings."""
    root, kept = work / "corpus", work / "curves" / f"{one.name}.json"
    settings = list(overrides_of(one, plan, str(root)))
    earlier = json.loads(kept.read_text()) if kept.is_file() else {}
    if earlier.get("settings") == settings:
        return earlier["curve"]
    curve = train_run(one, plan, root, work / "runs" / one.name)
    kept.parent.mkdir(exist_ok=True)
    kept.write_text(json.dumps({"settings": settings, "curve": curve}))
    print(
        f"{one.part}: {one.optimizer}, rate {one.lr:g}, seed {one.seed}: {len(curve['loss'])} "
        f"steps in {curve['seconds']:.0f} s, loss {curve['loss'][-1]}, logit "
        f"{curve['max_logit'][-1]}, {sum(curve['clipped_heads'])} heads clipped",
        flush=True,
    )
    return curve


def results(setup: Mapping[str, Any], curves: Sequence[Curve], plan: Plan) -> dict[str, Any]:
    """Return the results for JSON without the curves: metadata, setup, summaries and targets."""
    found: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(),
            "machine": cores(),
            "seconds": round(sum(curve["seconds"] for curve in curves)),
            "processor_seconds": round(sum(curve["processor_seconds"] for curve in curves)),
            "quick": plan.quick,
            "versions": versions("torch", "megatron-core", "numpy"),
        },
        "setup": dict(setup),
    }
    if CLIP in plan.parts:
        found["clip"] = clip_summary(curves, plan)
    if RATES in plan.parts:
        found["rates"] = rates_summary(curves, plan)
    found["targets"] = targets(found)
    return found


def write(
    found: Mapping[str, Any], curves: Sequence[Curve], plan: Plan, out: Path, pictures: Path
) -> None:
    """Write the JSON file (one line per run), the page next to it, and the pictures."""
    out.parent.mkdir(parents=True, exist_ok=True)
    told = json.dumps(found, indent=1).removesuffix("\n}")
    lines = ",\n".join("  " + json.dumps(curve) for curve in curves)
    out.write_text(f'{told},\n "runs": [\n{lines}\n ]\n}}\n')
    page = report.page(found)
    out.with_suffix(".md").write_text(page)
    tokens = found["setup"]["tokens_per_step"]
    if "clip" in found:
        picture.draw_clip(curves, plan, tokens, pictures / "muonclip_clip.png")
    if "rates" in found:
        drawing = pictures / "muonclip_rates.png"
        picture.draw_rates(curves, found["rates"], plan, tokens, drawing)
    print(page)
    print(f"written: {out.name}, {out.with_suffix('.md').name}")


if __name__ == "__main__":
    main()
