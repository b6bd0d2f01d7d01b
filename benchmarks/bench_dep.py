"""Benchmarks DEP against an encoder on the first stage: step time, balance and memory on CPUs.

Two processes of one thread each form the two pipeline stages of a small Kimi
(benchmarks/dep/config.yaml). Picture sizes have the heavy tail of a real mix. Text only,
co-located, DEP without balance (by owner, by count) and DEP run in turns on the same rows. Each is
compared with the prediction of the cost model, which is calibrated in the same run. Then peak
memory is measured, also for 1 to 64 images in one microbatch. A run takes minutes and needs a quiet
machine.

    python benchmarks/bench_dep.py               # the committed results
    python benchmarks/bench_dep.py --quick       # seconds; figures not to quote
    python benchmarks/bench_dep.py --only timing data.vision_token_ratio=0.1    # other values

The last two write to runs/bench_dep, so that the committed results stay.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.dep import data, launch, picture, report, summary, targets
from benchmarks.dep.launch import PROCESSES, ROOT
from benchmarks.dep.settings import GIVING_BACK, QUICK
from benchmarks.result import RESULTS, cores, versions
from benchmarks.result import write as write_result
from kimi_pretrain.config import Config, ConfigError, load_config

CONFIG = ROOT / "benchmarks" / "dep" / "config.yaml"
RESULT = RESULTS / "dep_cpu.json"
ASIDE = ROOT / "runs" / "bench_dep"  # for partial runs
PICTURE = ROOT / "docs" / "pictures" / "dep_memory.png"
PARTS = ("timing", "memory")
IMAGES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Plan:
    """Scope of the measurement.

    Attributes:
        parts: parts to run, from `PARTS`.
        rounds: rounds of the timing part.
        calibrate_seconds: time limit of the calibration.
        images: images per microbatch, for the memory curve.
        every: use every n-th document of the mix.
        quick: True for a smoke run, whose figures mean nothing.
    """

    parts: Sequence[str] = PARTS
    rounds: int = 10
    calibrate_seconds: float = 20.0
    images: Sequence[int] = IMAGES
    every: int = 1
    quick: bool = False


def main() -> None:
    arguments = parse()
    plan = plan_of(arguments)
    overrides = [*(QUICK if plan.quick else ()), *arguments.overrides]
    try:
        config = load_config(CONFIG, overrides)
        check(config)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    load, begin = [round(x, 2) for x in os.getloadavg()], time.monotonic()
    with ExitStack() as stack:
        work = arguments.work or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        raw = measure(work.resolve(), config, overrides, plan)
    found = results(raw, plan, overrides, load, time.monotonic() - begin)
    write(found, arguments.out, arguments.picture)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--work", type=Path, help="an empty folder for data; default: a temporary one"
    )
    parser.add_argument("--rounds", type=int, default=Plan.rounds)
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--quick", action="store_true", help="a tiny model and few steps")
    parser.add_argument("--out", type=Path, help=f"JSON; default: {RESULT.relative_to(ROOT)}")
    parser.add_argument("--picture", type=Path, help=f"PNG; default: {PICTURE.relative_to(ROOT)}")
    parser.add_argument("overrides", nargs="*", help="section.key=value, of the config")
    arguments = parser.parse_args()
    if arguments.rounds < 1:
        parser.error(f"--rounds {arguments.rounds}: expected 1 or more")
    whole = not (arguments.quick or arguments.only or arguments.overrides)
    arguments.out = arguments.out or (RESULT if whole else ASIDE / RESULT.name)
    arguments.picture = arguments.picture or (PICTURE if whole else ASIDE / PICTURE.name)
    return arguments


def plan_of(arguments: argparse.Namespace) -> Plan:
    """Return the plan that the arguments select."""
    parts = (arguments.only,) if arguments.only else PARTS
    if arguments.quick:
        return Plan(parts, 1, Plan.calibrate_seconds, (1, 4), 10, quick=True)
    return Plan(parts, arguments.rounds)


def check(config: Config) -> None:
    """Refuse layouts that the prediction does not support.

    Raises:
        ConfigError: the layout is unsupported; the message names it.
    """
    layout = config.layout
    if (layout.pp, layout.vpp, layout.world_size()) != (PROCESSES, 1, PROCESSES):
        raise ConfigError(
            f"layout.pp={layout.pp}, layout.vpp={layout.vpp}, {layout.world_size()} processes: the "
            f"benchmark and its prediction are for {PROCESSES} stages in {PROCESSES} processes"
        )


def measure(work: Path, config: Config, overrides: Sequence[str], plan: Plan) -> dict[str, Any]:
    """Make the data, run the parts and return the results of each."""
    mix, pages = work / "mix", work / "pages"
    if work.exists() and any(work.iterdir()):
        sys.exit(f"error: --work {work} is not empty; give a folder of its own")
    for folder in (mix, pages):
        folder.mkdir(parents=True)
    setup: dict[str, Any] = {
        "config": str(CONFIG),
        "overrides": [*overrides, f"data.root={mix}"],
        "rounds": plan.rounds,
        "calibrate_seconds": plan.calibrate_seconds,
        "counts": list(plan.images),
    }
    print("making data", flush=True)
    data.build_mix(mix, config.data, plan.every)
    if "memory" in plan.parts:
        length = data.build_pages(pages, list(plan.images))
        setup["pages"] = {
            "root": str(pages), "sources": {f"pages_{plan.images[0]}": 1.0}, "seq_len": length,
            "rows_per_step": PROCESSES, "vision_token_ratio": None, "pack_window": data.PAGES,
        }  # fmt: skip
    # Returning freed memory to the system slows a process down, so timing and memory run in
    # separate processes.
    jobs = [plan.parts] if plan.quick else [[part] for part in plan.parts]
    return {name: one for parts in jobs for name, one in run_job(parts, setup, work).items()}


def run_job(parts: Sequence[str], setup: Mapping[str, Any], work: Path) -> dict[str, Any]:
    """Run parts in new processes.

    Raises:
        SystemExit: a process failed; its output has already been printed.
    """
    name = ",".join(parts)
    given, found = work / f"{name}_setup.json", work / f"{name}.json"
    given.write_text(json.dumps(setup))
    memory = GIVING_BACK if "memory" in parts else {}
    launch.run("benchmarks.dep.job", [name, str(given), str(found)], memory)
    return json.loads(found.read_text())


def results(
    raw: Mapping[str, Any], plan: Plan, overrides: Sequence[str], load: list[float], seconds: float
) -> dict[str, Any]:
    """Return all results for JSON: metadata, figures, targets and raw data."""
    found: dict[str, Any] = {
        "about": {
            "date": date.today().isoformat(),
            "machine": cores(),
            "load_before": load,
            "seconds": round(seconds),
            "quick": plan.quick,
            "overrides": list(overrides),
            "versions": versions("torch", "megatron-core", "numpy"),
        }
    }
    if "timing" in raw:
        found["timing"] = summary.summarise(raw["timing"])
    if "memory" in raw:
        found["memory"] = raw["memory"]
    found["targets"] = targets.targets(found)
    found["raw"] = {"timing": raw["timing"]} if "timing" in raw else {}
    return found


def write(found: Mapping[str, Any], out: Path, drawing: Path) -> None:
    """Write the JSON file, the page next to it, and the picture."""
    write_result(found, out, report.page(found))
    if "memory" in found:
        picture.draw(found["memory"]["curve"], drawing)


if __name__ == "__main__":
    main()
