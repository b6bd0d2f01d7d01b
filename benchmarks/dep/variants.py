"""Variants of the DEP benchmark: one model, and steps over it that differ only in `dep`."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from benchmarks.dep.settings import SETTINGS, TEXT_ONLY
from data_pipeline.access import open_data
from data_pipeline.index.manifest import read_index
from data_pipeline.loader import Loader, StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import Model
from kimi_pretrain.reliability.preflight import load_tokenizer
from kimi_pretrain.step import StepReport, TrainStep
from kimi_pretrain.telemetry.phases import PhaseClock
from kimi_pretrain.update import Update
from moonvit3d.packing import chunks


class BusyClock(PhaseClock):
    """Phase clock that also measures how long this rank computes in each phase.

    Attributes:
        busy: seconds by phase in which the main thread had a core; the rest of a phase is waiting.
            On a CPU the backward pass runs in the main thread too.
    """

    def restart(self) -> None:
        """Start a new step."""
        super().restart()
        self.busy: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Measure the enclosed code under `name`."""
        start = time.thread_time()
        with super().phase(name):
            yield
        self.busy[name] = self.busy.get(name, 0.0) + time.thread_time() - start


@dataclass(frozen=True)
class Variant:
    """One way to run a step.

    Attributes:
        step: train step.
        clock: clock of the step.
        text_only: True if text replaces media.
    """

    step: TrainStep
    clock: BusyClock
    text_only: bool

    def plan(self, batch: StepBatch) -> VisionPlan:
        """Return the vision plan of a batch; repeated calls return the stored plan."""
        return self.step.planner.plan(batch.plan)

    def run(self, batch: StepBatch) -> StepReport:
        """Run a step whose plan already exists, as in training."""
        return self.step.run(batch, text_only=self.text_only)


class Bench:
    """One model, one optimizer, and the variants over them.

    Args:
        config: configuration of the benchmark; variants override keys of its `dep`.
    """

    def __init__(self, config: Config, mesh: Mesh):
        self.config, self.mesh = config, mesh
        self.model = Model.build(config, mesh)
        self.update = Update(config, mesh, self.model.encoder, self.model.backbone)

    def variant(self, name: str, config: Config | None = None) -> Variant:
        """Return one of `SETTINGS`.

        Args:
            config: configuration for rows of another source or length; default: the benchmark's.
        """
        config = config or self.config
        dep = config.dep.model_copy(update=SETTINGS[name])
        config = config.model_copy(update={"dep": dep})
        step = TrainStep(config, self.mesh, self.model, self.update, VisionPlanner(config))
        clock = step.clock = BusyClock(self.mesh.device)
        return Variant(step, clock, name == TEXT_ONLY)

    def encode_alone(self, vision: VisionPlan, batch: StepBatch) -> None:
        """Run one encoder forward and backward over this rank's items, and nothing else."""
        encoder, items = self.model.encoder, vision.encoded_by(self.mesh.rank).item
        grids = [(int(t), int(h), int(w)) for t, h, w in grids_of(batch.plan)[items]]
        pixels = [batch.media[item] for item in items.tolist()]
        budget = self.config.dep.max_patches_per_chunk
        for run in chunks((t * h * w for t, h, w in grids), budget):
            output = encoder.module(encoder.tensor(pixels[run]), grids[run])
            torch.autograd.backward(output, torch.ones_like(output))


def fetch(config: Config, count: int) -> list[StepBatch]:
    """Return the first steps of a run with all their rows and media.

    Variants then have all inputs in memory, and nothing is read or decoded while steps are timed.
    """
    store = open_data(config.data)
    tokenizer = load_tokenizer(config, store)
    indices = [read_index(store, name) for name in config.data.source_names]
    loader = Loader(config.data, store, indices, tokenizer)
    try:
        return [next(loader) for _ in range(count)]
    finally:
        loader.close()
