"""Trains the demo with and without FP8 storage and compares the final losses.

Each of three weight seeds trains for 200 steps with FP8 storage and for 200 without, in one process
with one thread. All runs see the same batches. The end of a run is the mean loss of its last steps,
and noise is the spread of the ends over seeds without FP8. The target is that FP8 moves the mean
end by no more than the noise.

    python benchmarks/bench_fp8.py                 # the committed results, an hour of one core
    python benchmarks/bench_fp8.py --quick         # a few steps of one seed; figures not to quote

Finished runs stay in the --work folder, and a restarted benchmark reuses them.
"""

import argparse
import json
import shutil
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.result import RESULTS, cores, named, table, verdicts, versions, write
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import Config, load_config
from launch.demo.corpus import build_corpus
from launch.local.quiet import quiet_libraries

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh

PRESET = "tiny_cpu"
WORK = RESULTS.parent.parent / "runs" / "bench_fp8"
FORMS = {"none": False, "fp8": True}

Found = Mapping[str, Any]


@dataclass(frozen=True)
class Plan:
    """Scope of the training.

    Attributes:
        steps: steps of each run.
        seeds: seeds of the weights; the batches are the same.
        last: number of last steps whose mean loss is the end of a run.
        quick: True for a smoke run, whose figures mean nothing.
    """

    steps: int = 200
    seeds: tuple[int, ...] = (0, 1, 2)
    last: int = 20
    quick: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="few steps of one seed")
    parser.add_argument("--out", type=Path, help=f"JSON; default {RESULTS.name}/fp8_cpu.json")
    parser.add_argument("--work", type=Path, default=WORK, help="for the corpus and finished runs")
    arguments = parser.parse_args()
    plan = Plan(4, (0,), 2, quick=True) if arguments.quick else Plan()
    out = arguments.out or (WORK if plan.quick else RESULTS) / "fp8_cpu.json"
    quiet_libraries()
    torch.set_num_threads(1)
    runs = train_all(plan, arguments.work.resolve())
    found = results(plan, runs)
    write(found, out, page(found))


def train_all(plan: Plan, work: Path) -> dict[str, list[dict[str, Any]]]:
    """Return a run of every seed for each form, after training the runs that are missing."""
    from kimi_pretrain.engine import mesh as engine_mesh

    corpus = work / "corpus"
    if not (work / "corpus_built").exists():  # written last, so it marks a complete corpus
        shutil.rmtree(corpus, ignore_errors=True)
        corpus.mkdir(parents=True)
        build_corpus(FolderStore(corpus))
        (work / "corpus_built").touch()
    runs: dict[str, list[dict[str, Any]]] = {form: [] for form in FORMS}
    mesh = engine_mesh.start(config_of(corpus, plan.steps, 0, False).layout, 600.0)
    try:
        for seed in plan.seeds:
            for form, fp8 in FORMS.items():
                config = config_of(corpus, plan.steps, seed, fp8)
                kept = work / "done" / f"{form}_{plan.steps}_steps_seed_{seed}.json"
                one = finished(kept, config) or trained(config, mesh, kept)
                end = statistics.mean(one["losses"][-plan.last :])
                runs[form].append({"seed": seed, "end": end, **one})
                print(f"{form}, seed {seed}: {end:.4f} in {one['seconds']:.0f} s", flush=True)
    finally:
        engine_mesh.stop()
    return runs


def config_of(corpus: Path, steps: int, seed: int, fp8: bool) -> Config:
    """Return the demo's configuration for one process."""
    layout = [f"layout.{axis}=1" for axis in ("pp", "vpp", "dp", "ep")]
    settings = [
        f"data.root={corpus}", "data.cache=null", "data.requests_per_second=null",
        f"train.steps={steps}", f"train.seed={seed}", f"train.fp8_storage={str(fp8).lower()}",
        "train.trace_step=null", "train.efficiency_pairs=0", "checkpoint.every=null",
    ]  # fmt: skip
    return load_config(PRESET, [*layout, *settings])


def finished(kept: Path, config: Config) -> dict[str, Any] | None:
    """Return an earlier finished run if its configuration is identical, otherwise None."""
    earlier = json.loads(kept.read_text()) if kept.is_file() else {}
    same = earlier.get("config") == config.model_dump(mode="json")
    return earlier["run"] if same else None


def trained(config: Config, mesh: "Mesh", kept: Path) -> dict[str, Any]:
    """Train a run, then store and return the loss of every step and the seconds."""
    from kimi_pretrain.run import Run

    begin = time.perf_counter(), time.process_time()
    run = Run(config, mesh)
    try:
        losses = [run.train_step.run(next(run.loader)).loss for _ in range(config.train.steps)]
    finally:
        run.close()
    found = {
        "losses": losses,
        "seconds": time.perf_counter() - begin[0],
        "processor_seconds": time.process_time() - begin[1],
    }
    kept.parent.mkdir(exist_ok=True)
    part = kept.with_suffix(".part")
    part.write_text(json.dumps({"config": config.model_dump(mode="json"), "run": found}))
    part.rename(kept)
    return found


# Results ------------------------------------------------------------------------------------------


def results(plan: Plan, runs: Mapping[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return all results for the JSON file."""
    found = compared({form: [one["end"] for one in of] for form, of in runs.items()})
    every = [one for of in runs.values() for one in of]
    return {
        "about": {
            "date": date.today().isoformat(),
            "machine": cores(),
            "processor_seconds": round(sum(one["processor_seconds"] for one in every)),
            "quick": plan.quick,
            "versions": versions("torch", "megatron-core", "numpy"),
        },
        "preset": PRESET,
        "steps": plan.steps,
        "seeds": plan.seeds,
        "last": plan.last,
        "found": found,
        "targets": targets(found),
        "runs": runs,
    }


def compared(ends: Mapping[str, list[float]]) -> dict[str, Any]:
    """Return the ends, how far FP8 moves them, and the noise to compare this with."""
    none, fp8 = ends["none"], ends["fp8"]
    return {
        "ends": ends,
        "noise": max(none) - min(none) if len(none) > 1 else None,
        "mean_moved": statistics.mean(fp8) - statistics.mean(none),
        "each_moved": [one - other for one, other in zip(fp8, none, strict=True)],
    }


def targets(found: Found) -> list[dict[str, Any]]:
    """Return the targets with the measured values."""
    noise, moved = found["noise"], found["mean_moved"]
    return [
        {
            "target": "the mean end with FP8 is within the noise of the mean end without",
            "found": f"{moved:+.4f}, noise {'none' if noise is None else f'{noise:.4f}'}",
            "met": None if noise is None else abs(moved) <= noise,
        }
    ]


def page(found: Found) -> str:
    """Return the results as a Markdown page."""
    about, ends = found["about"], found["found"]["ends"]
    rows = zip(found["seeds"], ends["none"], ends["fp8"], found["found"]["each_moved"])
    lines = [
        "# FP8 storage in training",
        "",
        f"{about['date']}, {about['machine']}, one thread; {named(about['versions'])}. Made by "
        f"`benchmarks/bench_fp8.py`: {about['processor_seconds']:,} s of one core.",
        "",
        *(["**Tiny sizes: no figure here is to be quoted.**", ""] if about["quick"] else []),
        *verdicts(found["targets"], {"target": "target", "found": "found", "met": "met"}),
        f"The demo's model and corpus (`configs/{found['preset']}.yaml`) in one process, "
        f"{found['steps']} steps; an end is the mean loss of the last {found['last']}. Noise is "
        "the spread of the ends without FP8 over seeds of the weights. All runs see the same "
        "batches in the same order.",
        "",
        *table(
            ["seed", "end without", "end with FP8", "moved by"],
            [[seed, f"{a:.4f}", f"{b:.4f}", f"{moved:+.4f}"] for seed, a, b, moved in rows],
        ),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    from launch.local.worker import leave

    main()
    leave(0)
