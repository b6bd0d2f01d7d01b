"""Training step whose vision work runs inside the pipeline (`dep.bubbles`).

Phases 2, 3, 5 and 6 of `kimi_pretrain.step` remain only for items that several ranks encode
together, because these ranks communicate in every layer, which is impossible inside a schedule. All
other items are encoded, sent and run backward in phase 4, while their rank waits for its pipeline.
"""

import logging
from contextlib import nullcontext
from dataclasses import replace

import numpy as np

from data_pipeline.loader import StepBatch
from kimi_pretrain.config import Config
from kimi_pretrain.dep.bubble_links import WAYS, Links
from kimi_pretrain.dep.bubble_run import BubbleRun
from kimi_pretrain.dep.bubble_times import RankTimes
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch
from kimi_pretrain.engine.slots import SlotSchedule
from kimi_pretrain.model import Model
from kimi_pretrain.step import BatchLoss, StepReport, TrainStep
from kimi_pretrain.telemetry.phases import BACKBONE
from kimi_pretrain.telemetry.stopwatch import Section, Sections
from kimi_pretrain.update import Update

log = logging.getLogger("kimi_pretrain.train")


def dep_step(
    config: Config, mesh: Mesh, model: Model, update: Update, planner: VisionPlanner
) -> TrainStep:
    """Return the step of a run: a `BubbleStep` if configured and if the run has a pipeline."""
    if config.in_bubbles():
        return BubbleStep(config, mesh, model, update, planner)
    if config.dep.bubbles != "none" and mesh.rank == 0:
        log.warning(
            "dep.bubbles=%s with layout.pp=1: without a pipeline there are no bubbles; media are "
            "encoded before and after the backbone", config.dep.bubbles,
        )  # fmt: skip
    return TrainStep(config, mesh, model, update, planner)


class BubbleStep(TrainStep):
    """`TrainStep` with vision work inside pipeline bubbles."""

    def __init__(
        self, config: Config, mesh: Mesh, model: Model, update: Update, planner: VisionPlanner
    ):
        super().__init__(config, mesh, model, update, planner)
        self.links = Links(
            planner.scopes, planner.ranks.first_stage, config.train.timeout_seconds, mesh.device
        )
        self.schedule = self.backbone.schedule = SlotSchedule(self.backbone.schedule)
        self._seconds: dict[str, float] = {}
        self._times: RankTimes | None = None
        self._moved: dict[str, int] = {}
        self._sections: list[Section] = []

    def run(self, batch: StepBatch, *, text_only: bool = False) -> StepReport:
        """Run a step as in `TrainStep`; the report has the seconds of this rank's bubbles."""
        self._seconds, self._times, self._moved, self._sections = {}, None, {}, []
        report = super().run(batch, text_only=text_only)
        return replace(
            report,
            bubble_seconds=self._seconds,
            bubble_times=self._times,
            bubble_sections=self._sections,
            exchange_bytes=self._moved,
        )

    def _decoupled(
        self,
        batch: StepBatch,
        vision: VisionPlan,
        microbatches: list[Microbatch],
        loss_tokens: int,
    ) -> tuple[BatchLoss, int]:
        """Run phases 2 to 6; return the loss and the patches that were not encoded twice."""
        assert vision.bubbles is not None
        rank, trained, plan = self.mesh.rank, self.encoder.trainable, vision.bubbles.plan
        shared = vision.together()
        media, grids = self._pixels(batch, vision), grids_of(batch.plan)
        outside = None
        if len(shared.spans):  # the same on all ranks, because the plan is global
            outside = self._encode(batch, shared, microbatches, trained=trained)
        # The phase clock waits for the device, which would prevent all overlap. The sections are
        # recorded in a single step, because there are hundreds.
        traced = batch.plan.step + 1 == self.config.train.trace_step
        sections = Sections(self.mesh.device) if traced else None
        phase = sections.running if sections else _unnamed
        with self.clock.phase("prepare"):
            run = BubbleRun(
                vision, self.mesh.stage, self.encoder, self.links, grids, media,
                self.config.dep.bubble_ahead, self.exchange.dtype, outside is None, phase,
            )  # fmt: skip
        self.schedule.slots = run
        with self.clock.phase(BACKBONE):
            run.begin(microbatches)
        try:
            loss = self._backbone(batch.plan, microbatches, loss_tokens)
        finally:
            self.schedule.slots = None
        if trained and outside is not None:
            self._go_back(outside, shared, microbatches)
        if trained:
            with self.clock.phase("6 gradient sum"):
                self.encoder.sums.finish()
        self._seconds, self._times = run.seconds(), run.times()
        self._sections = sections.all() if sections else []
        width, size = self.config.model.vision.out_width, self.encoder.dtype.itemsize
        planned = self.exchange.bytes_sent(vision, rank, width, size)
        self._moved = {way: planned[way] for way in WAYS if trained or way == "over"}
        (items,) = np.nonzero(vision.bubbles.unit >= 0)
        units = vision.bubbles.unit[items]
        kept = (vision.patches[items] * plan.kept[units])[plan.rank[units] == rank]
        return loss, int(kept.sum()) // plan.pieces if trained else 0


def _unnamed(phase: str) -> nullcontext[None]:
    return nullcontext()
