"""One process of the benchmark: torchrun --module benchmarks.bubbles.job SETUP.json OUT.json."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.bubbles.emulate import BACKWARD, Device
from benchmarks.dep.variants import fetch
from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config, load_config
from kimi_pretrain.dep.bubble_step import BubbleStep
from kimi_pretrain.dep.bubble_times import Learned
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import Model
from kimi_pretrain.step import StepReport, TrainStep
from kimi_pretrain.update import Update

TEXT, DEP, BUBBLES, KEPT = "text only", "DEP", "bubbles", "bubbles, activations kept"
HALF, LEARNED = "bubbles, costs believed half", "bubbles, costs learned"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    TEXT: {"bubbles": "none"},
    DEP: {"bubbles": "none"},
    BUBBLES: {},
    KEPT: {"keep_activations": "auto", "memory_limit_gib": 16.0},
    HALF: {},
    LEARNED: {},
}


@dataclass(frozen=True)
class Variant:
    """One way to run a step; `seen` receives its report."""

    run: Callable[[StepBatch], StepReport]
    plan: Callable[[StepBatch], Any]
    seen: Callable[[StepBatch, StepReport], None]


def main(setup: dict[str, Any], out: Path) -> None:
    """Run the variants in turns on the same rows, and let rank 0 write the results."""
    config = load_config(setup["config"], setup["overrides"])
    torch.set_num_threads(1)
    mesh = engine_mesh.start(config.layout, config.train.timeout_seconds)
    if setup["pinned"]:
        os.sched_setaffinity(0, {mesh.rank % (os.cpu_count() or 1)})
    model = Model.build(config, mesh)
    update = Update(config, mesh, model.encoder, model.backbone)
    device = Device(**setup["device"]) if setup["device"] else None
    if device is not None:
        device.emulate(model.backbone)
    variants = {
        name: _variant(name, config, mesh, model, update, device) for name in setup["variants"]
    }
    rounds: list[dict[str, Any]] = []
    for batch in fetch(config, setup["warm_up"] + setup["rounds"]):
        found: dict[str, Any] = {}
        names = list(variants) if batch.plan.step % 2 else list(variants)[::-1]
        for name in names:
            variants[name].plan(batch)  # before the timing starts, as in the loader
            mesh.barrier()
            began = time.perf_counter()
            report = variants[name].run(batch)
            mesh.barrier()
            seconds = mesh.max([time.perf_counter() - began])[0]
            variants[name].seen(batch, report)
            spent = mesh.all_gather_object(report.bubble_seconds)
            load = report.vision.predicted_seconds()
            found[name] = {"seconds": seconds, "bubbles": spent, "load": load.tolist()}
        rounds.append(found)
    if mesh.rank == 0:
        out.write_text(json.dumps(rounds[setup["warm_up"] :]) + "\n")
    mesh.barrier()
    engine_mesh.stop()


def _variant(
    name: str, config: Config, mesh: Mesh, model: Model, update: Update, device: Device | None
) -> Variant:
    dep = {**vars(config.dep), **VARIANTS[name]}
    if device is not None:
        half = 0.5 if name in (HALF, LEARNED) else 1.0
        seconds = half * FORWARDS_PER_STEP * device.patch
        dep["cost"] = {"per_patch": seconds, "per_patch_squared": 0.0, "per_item": 0.0}
    config = config.replace(dep=config.dep.replace(**dep))
    planner = VisionPlanner(config)
    if planner.bubbles is None:
        step = TrainStep(config, mesh, model, update, planner)
        run = partial(step.run, text_only=name == TEXT)
        return Variant(run, lambda batch: planner.plan(batch.plan), lambda batch, report: None)
    if device is not None:
        passes = np.full(config.layout.pp * config.layout.vpp, device.forward)
        planner.bubbles.configured = Learned(passes, BACKWARD * passes)
    step = BubbleStep(config, mesh, model, update, planner)

    def seen(batch: StepBatch, report: StepReport) -> None:
        # Known costs leave nothing to learn, and the halved costs of `HALF` must stay halved.
        if device is None or name == LEARNED:
            times = mesh.all_gather_object(report.bubble_times)
            planner.learning.add(batch.plan.step, times)

    return Variant(step.run, lambda batch: planner.plan(batch.plan), seen)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
