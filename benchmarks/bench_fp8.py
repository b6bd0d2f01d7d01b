"""FP8 storage in training: the demo's configuration, the same seeds with it and without.

    python benchmarks/bench_fp8.py                 (one process; about 200 x 6 steps)
    python benchmarks/bench_fp8.py --quick         (a few steps of one seed)

The end of a run is the mean loss of its last steps. Noise is the spread of these ends over seeds
without FP8: with FP8 the mean over seeds should be no farther from the mean without than that.
"""

import argparse
import statistics
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch

from benchmarks.result import RESULTS, cores, processor, versions, write
from data_pipeline.store.open import open_store
from kimi_pretrain.config import load_config
from kimi_pretrain.engine import mesh as engine_mesh
from launch.demo.corpus import build_corpus
from launch.local.quiet import quiet_libraries

ASIDE = Path(__file__).resolve().parent.parent / "runs" / "bench_fp8"
FORMS = {"none": False, "fp8": True}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps of one seed")
    parser.add_argument("--out", type=Path, default=RESULTS / "fp8_cpu.json")
    parser.add_argument("--work", type=Path, default=ASIDE, help="the corpus is built here")
    arguments = parser.parse_args()
    steps, seeds, last = (4, [0], 2) if arguments.quick else (200, [0, 1, 2], 20)
    quiet_libraries()
    torch.set_num_threads(1)
    corpus = arguments.work / "corpus"
    if not (corpus / "built").exists():
        build_corpus(open_store(str(corpus)))
        (corpus / "built").touch()
    runs: dict[str, dict[str, Any]] = {name: {} for name in FORMS}
    try:
        mesh = engine_mesh.start(config_of(corpus, steps, 0, False).layout, 600.0)
        for seed in seeds:
            for name, fp8 in FORMS.items():
                runs[name][str(seed)] = trained(config_of(corpus, steps, seed, fp8), mesh)
                end = statistics.mean(runs[name][str(seed)]["losses"][-last:])
                runs[name][str(seed)]["end"] = end
                print(f"{name}, seed {seed}: {end:.4f}", flush=True)
    finally:
        engine_mesh.stop()
    found = {
        "what": "loss with FP8 storage and without", "date": date.today().isoformat(),
        "processor": processor(), "cores": cores(), "versions": versions("torch", "megatron-core"),
        "steps": steps, "seeds": seeds, "last": last,
        **compared({n: [one["end"] for one in of.values()] for n, of in runs.items()}),
        "runs": runs,
    }  # fmt: skip
    write(found, arguments.out)


def config_of(corpus: Path, steps: int, seed: int, fp8: bool):
    layout = [f"layout.{axis}=1" for axis in ("pp", "vpp", "dp", "ep")]
    settings = [
        f"data.root={corpus}", "data.cache=null", "data.requests_per_second=null",
        f"train.steps={steps}", f"train.seed={seed}", f"train.fp8_storage={str(fp8).lower()}",
        "train.trace_step=null", "train.efficiency_pairs=0", "checkpoint.every=null",
    ]  # fmt: skip
    return load_config("tiny_cpu", [*layout, *settings])


def trained(config, mesh) -> dict[str, Any]:
    """Train; return the loss of every step, and seconds."""
    from kimi_pretrain.run import Run

    start, run = time.perf_counter(), Run(config, mesh)
    try:
        losses = [run.train_step.run(next(run.loader)).loss for _ in range(config.train.steps)]
    finally:
        run.close()
    return {"losses": losses, "seconds": time.perf_counter() - start}


def compared(ends: dict[str, list[float]]) -> dict[str, Any]:
    """Return the ends, how far FP8 moves them, and the noise that it is compared with."""
    none, fp8 = ends["none"], ends["fp8"]
    noise = max(none) - min(none)
    moved = statistics.mean(fp8) - statistics.mean(none)
    return {
        "ends": ends,
        "noise": noise,
        "mean_moved": moved,
        "each_moved": [one - other for one, other in zip(fp8, none, strict=True)],
        "within_noise": abs(moved) <= noise if len(none) > 1 else None,
    }


if __name__ == "__main__":
    from launch.local.worker import leave

    main()
    leave(0)
