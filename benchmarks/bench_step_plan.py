"""Compares the step times that `plan --step` predicts with measured ones, on CPU processes.

Two processes of one thread, each pinned to a core, run small Kimi models in twelve configurations
of sizes, layouts and media shares. The same run calibrates each configuration, predicts its steps
and measures them. A run takes minutes and needs a quiet machine.

    python benchmarks/bench_step_plan.py               # the committed results
    python benchmarks/bench_step_plan.py --quick       # seconds; figures not to quote
    python benchmarks/bench_step_plan.py --only dp2    # configurations with dp2 in their names

The last two write to runs/bench_step_plan, so that the committed results stay.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dep import data, launch
from benchmarks.dep.launch import ROOT
from benchmarks.dep.settings import QUICK
from benchmarks.result import RESULTS, cores, versions, write
from benchmarks.step_plan import report, summary
from benchmarks.step_plan.cases import CASES, EP, PP, Case
from kimi_pretrain.config import load_config

CONFIG = ROOT / "benchmarks" / "dep" / "config.yaml"
RESULT = RESULTS / "step_plan_cpu.json"
ASIDE = ROOT / "runs" / "bench_step_plan"  # for partial runs


@dataclass(frozen=True)
class Plan:
    """Scope of the measurement.

    Attributes:
        cases: configurations.
        overrides: config overrides of all configurations.
        steps: timed steps of each configuration.
        calibrate_seconds: time limit of each half of the calibration: passes, and the encoder.
        every: use every n-th document of the mix.
        quick: True for a smoke run, whose figures mean nothing.
    """

    cases: Sequence[Case] = CASES
    overrides: Sequence[str] = ()
    steps: int = 9
    calibrate_seconds: float = 8.0
    every: int = 1
    quick: bool = False


def main() -> None:
    arguments = parse()
    plan = plan_of(arguments)
    load, begin = [round(x, 2) for x in os.getloadavg()], time.monotonic()
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        raw = measure(work.resolve(), plan)
    found = results(raw, plan, load, time.monotonic() - begin)
    write(found, arguments.out, report.page(found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, help="an empty folder for data; default: a temporary one"
    )
    parser.add_argument("--steps", type=int, default=Plan.steps)
    parser.add_argument("--only", default="", help="part of the names of configurations")
    parser.add_argument("--quick", action="store_true", help="two tiny models and few steps")
    parser.add_argument("--out", type=Path, help=f"JSON; default: {RESULT.relative_to(ROOT)}")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps {arguments.steps}: expected 1 or more")
    whole = not (arguments.quick or arguments.only)
    arguments.out = arguments.out or (RESULT if whole else ASIDE / RESULT.name)
    return arguments


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments select."""
    if arguments.quick:
        tiny = [Case(layout, "64", 2, rows=4, media=0.15) for layout in (PP, EP)]
        return Plan(tiny, QUICK, 2, 4.0, 10, quick=True)
    cases = [case for case in CASES if arguments.only in case.name]
    if not cases:
        sys.exit(f"error: --only {arguments.only}: no configuration has it in its name")
    return Plan(cases, steps=arguments.steps)


def measure(work: Path, plan: Plan) -> list[dict[str, Any]]:
    """Make the data, run each case in new processes and return the results of each."""
    mix = work / "mix"
    if work.exists() and any(work.iterdir()):
        sys.exit(f"error: --work {work} is not empty; give a folder of its own")
    mix.mkdir(parents=True)
    print("making data", flush=True)
    data.build_mix(mix, load_config(CONFIG, plan.overrides).data, plan.every)
    found = []
    for number, case in enumerate(plan.cases, start=1):
        given, out = work / f"case_{number}_setup.json", work / f"case_{number}.json"
        setup = {
            "config": str(CONFIG),
            "overrides": [*case.overrides, *plan.overrides, f"data.root={mix}"],
            "steps": plan.steps,
            "calibrate_seconds": plan.calibrate_seconds,
        }
        given.write_text(json.dumps(setup))
        launch.run("benchmarks.step_plan.job", [str(given), str(out)], {})
        found.append({"name": case.name, **json.loads(out.read_text())})
        (row,) = summary.summarise(found[-1:])["cases"]
        print(
            f"{number} of {len(plan.cases)}: {row['name']}: predicted {row['predicted']:.3f} s, "
            f"measured {row['measured']['median']:.3f} s ({row['error']:+.1%})",
            flush=True,
        )
    return found


def results(
    raw: list[dict[str, Any]], plan: Plan, load: list[float], seconds: float
) -> dict[str, Any]:
    """Return all results for JSON: metadata, targets, figures and raw data."""
    found = summary.summarise(raw)
    return {
        "about": {
            "date": date.today().isoformat(),
            "machine": cores(),
            "load_before": load,
            "seconds": round(seconds),
            "steps": plan.steps,
            "quick": plan.quick,
            "versions": versions("torch", "megatron-core", "numpy"),
        },
        "targets": summary.targets(found),
        "summary": found,
        "raw": raw,
    }


if __name__ == "__main__":
    main()
