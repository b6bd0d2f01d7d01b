"""One training step: phases 2 to 7 of docs/ARCHITECTURE.md (K2.5 report, section 4.5.1).

    0 plan, 1 fetch       ahead of time in the loader; `needs` returns what this rank reads
    2 vision forward      every rank encodes its media in chunks, normally under `no_grad`
    3 hand-over           embeddings to the first pipeline stages, where they become leaves
    4 backbone            forward and backward of all microbatches in the pipeline schedule
    5 hand-back           the leaves' gradients back to the ranks that encoded
    6 vision backward     the same chunks again with graph; gradients summed over all ranks
    7 update              one divisor, one norm, MuonClip
    8 record, save        after the step, in `kimi_pretrain.train`

Losses and gradients are sums over tokens. Phase 7 divides both once, for encoder and backbone, by
the global number of loss tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from data_pipeline.loader import BadSample, Needs, StepBatch
from data_pipeline.plan.planner import GlobalPlan
from kimi_pretrain.config import GIB, Config
from kimi_pretrain.dep.bubble_times import RankTimes
from kimi_pretrain.dep.encoder import EncoderPass, Pixels
from kimi_pretrain.dep.leaves import attach_leaves, leaf_gradients
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.row_order import microbatch_order
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of, runs
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch, build_microbatches, replica_rows
from kimi_pretrain.engine.text_only import replace_media_tokens
from kimi_pretrain.model import Model
from kimi_pretrain.telemetry.losses import LossSums, summed
from kimi_pretrain.telemetry.phases import BACKBONE, PhaseClock
from kimi_pretrain.update import Update, UpdateReport

# Directions of the exchange as the metrics name them, with the phase that uses each.
DIRECTIONS = (("over", "3 hand-over"), ("back", "5 hand-back"))

# Result of `_encode`: the pass, rows of `received` in each leaf, `received.shape`.
Encoded = tuple[EncoderPass, list[Tensor | None], torch.Size]


def needs(mesh: Mesh, planner: VisionPlanner) -> Callable[[GlobalPlan], Needs]:
    """Return a function from a plan to this rank's reads: rows of its replica, media to encode."""
    reads_text = mesh.is_first_stage or mesh.is_last_stage

    def of(plan: GlobalPlan) -> Needs:
        rows = replica_rows(plan, mesh) if reads_text else range(0)
        items = planner.plan(plan).fetched_by(mesh.rank)
        return Needs(rows=np.array(rows, dtype=np.int64), items=items)

    return of


@dataclass
class StepReport:
    """Results of one step; equal on every rank except for `bad` and the measurements.

    Attributes:
        loss: mean over the global batch's loss tokens.
        loss_tokens, text_tokens, vision_tokens, items: counts over the global batch.
        skipped: samples of the plan whose loss did not count because they were unusable, int64.
        bad: samples that this rank found unusable, with the reasons.
        spans: phase -> (start, end) in seconds of the wall clock, on this rank.
        peak_bytes: phase -> peak memory in use, on this rank.
        exchange_bytes: bytes this rank sent to other ranks: embeddings "over", gradients "back";
            a key is absent if its phase was skipped.
        kept_patches: patches whose activations this rank kept instead of encoding them again.
        losses: sums over the tokens whose loss this rank counts, by source and document position.
        siglip: mean loss, number and patches of the batch's pairs; None: `train.siglip` is off.
        bubble_seconds, bubble_times: of this rank; None if no vision work ran in bubbles.
        bubble_sections: vision work and waits inside phase 4; only in `train.trace_step`.
    """

    loss: float
    loss_tokens: int
    text_tokens: int
    vision_tokens: int
    items: int
    skipped: np.ndarray
    bad: Sequence[BadSample]
    update: UpdateReport
    vision: VisionPlan
    spans: dict[str, tuple[float, float]] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)
    exchange_bytes: dict[str, int] = field(default_factory=dict)
    kept_patches: int = 0
    losses: LossSums = field(default_factory=LossSums)
    siglip: tuple[float | None, int, int] | None = None
    bubble_seconds: dict[str, float] | None = None
    bubble_times: RankTimes | None = None
    bubble_sections: Sequence[tuple[str, float, float]] = ()


@dataclass(frozen=True)
class BatchLoss:
    """Result of phase 4: the mean loss of the global batch, and this rank's sums by source."""

    mean: float
    own: LossSums


class ForwardStep:
    """Phases 2 to 4 without a graph, for validation; `TrainStep` adds the backward phases."""

    def __init__(self, config: Config, mesh: Mesh, model: Model, planner: VisionPlanner):
        self.config, self.mesh, self.planner = config, mesh, planner
        self.encoder, self.backbone, self.exchange = model.encoder, model.backbone, model.exchange
        self.clock = PhaseClock(mesh.device)

    def forward(self, batch: StepBatch) -> tuple[LossSums, np.ndarray]:
        """Run phases 2 to 4 forward only, without changing any state of training or checkpoints.

        Returns:
            the losses of the tokens that this rank counts, and the unusable samples of all ranks.
        """
        vision = self.planner.plan(batch.plan)
        microbatches, skipped = self._prepare(batch)
        if len(vision.tokens):
            with torch.no_grad():
                self._encode(batch, vision, microbatches, trained=False)
        losses = self.backbone.losses(microbatches)
        return self._own_losses(microbatches, losses), skipped

    def _prepare(self, batch: StepBatch) -> tuple[list[Microbatch], np.ndarray]:
        """Return this rank's parts of the rows, and the samples whose loss does not count."""
        skipped = self._skipped_samples(batch)
        rows, restart = self.config.train.rows_per_microbatch, self.config.data.restart_positions
        order = microbatch_order(batch.plan, self.config)[self.mesh.replica].tolist()
        return build_microbatches(batch, self.mesh, rows, skipped, restart, order), skipped

    def _encode(
        self,
        batch: StepBatch,
        vision: VisionPlan,
        microbatches: list[Microbatch],
        *,
        trained: bool,
        room: int = 0,
    ) -> Encoded:
        """Run phases 2 and 3.

        `encoded` is [tokens this rank encoded, out_width]; `received` is [tokens this first-stage
        rank holds, out_width], (0, out_width) on ranks of other stages.
        """
        rank = self.mesh.rank
        with self.clock.phase("2 vision forward"):
            media = self._pixels(batch, vision)
            shares, grids = vision.encoded_by(rank), grids_of(batch.plan)
            work = self.encoder.begin(shares, grids, media, room)
            encoded = work.forward()
        with self.clock.phase("3 hand-over"):
            received = self.exchange.hand_over(encoded, vision, rank)
            leaf_rows = attach_leaves(
                microbatches if self.mesh.is_first_stage else (),
                received,
                vision.received_by(rank),
                requires_grad=trained,
                offload=self.config.dep.offload_outputs,
            )
        return work, leaf_rows, received.shape  # the leaves now hold the embeddings

    def _own_losses(self, microbatches: list[Microbatch], losses: list[Tensor]) -> LossSums:
        """Return the sums by source of the tokens whose loss this rank counts."""
        if not self.mesh.counts_loss:
            return LossSums()
        cells = [one.cells for one in microbatches if one.cells is not None]
        values = torch.cat([one.flatten() for one in losses]).double().cpu()
        return summed(values.numpy(), np.concatenate(cells))

    def _pixels(self, batch: StepBatch, vision: VisionPlan) -> Pixels:
        """Return the patches of the items that this rank fetched.

        Black patches of the planned size replace an unusable item, so that shapes and collectives
        stay as planned; the loss of its sample is masked.
        """
        sizes = batch.plan.items.patches
        missing = set(vision.fetched_by(self.mesh.rank).tolist()) - batch.media.keys()
        # A missing item without a report would be trained on as a black image.
        assert missing <= {bad.item for bad in batch.bad}, (missing, batch.bad)
        blank = {item: np.zeros((int(sizes[item]), 3, 14, 14), np.uint8) for item in missing}
        return {**batch.media, **blank}

    def _skipped_samples(self, batch: StepBatch) -> np.ndarray:
        """Return the samples that some rank found unusable, the same array on every rank."""
        if not self.mesh.max([float(len(batch.bad))])[0]:  # usually a single scalar is enough
            return np.zeros(0, np.int64)
        unusable = np.zeros(len(batch.plan.samples.row))
        unusable[[bad.sample for bad in batch.bad]] = 1.0
        return np.flatnonzero(np.array(self.mesh.max(unusable.tolist())) > 0)


class TrainStep(ForwardStep):
    """Runs steps over one encoder, backbone and optimizer."""

    def __init__(
        self, config: Config, mesh: Mesh, model: Model, update: Update, planner: VisionPlanner
    ):
        super().__init__(config, mesh, model, planner)
        self.update = update

    def run(self, batch: StepBatch, *, text_only: bool = False) -> StepReport:
        """Run phases 2 to 7 on a fetched step.

        Args:
            batch: batch from the loader, with everything that `needs` returned.
            text_only: replace every media token by a text token and skip the vision phases. Use it
                only to measure efficiency: the model trains on nonsense.
        """
        self.clock.restart()
        self.encoder.sums.zero()
        with self.clock.phase("prepare"):
            vision = self.planner.plan(batch.plan)
            microbatches, skipped = self._prepare(batch)
            loss_tokens = self._count_loss_tokens(microbatches)
            if text_only:
                vocab_size = self.config.model.language.vocab_size
                parts = self.planner.parts
                replace_media_tokens(batch.plan, self.mesh, parts, vocab_size, microbatches)
        kept_patches = 0
        if text_only or not len(vision.tokens):  # the same on all ranks, because the plan is global
            loss = self._backbone(batch.plan, microbatches, loss_tokens)
        elif self.config.dep.placement == "colocated":
            loss = self._colocated(batch, vision, microbatches, loss_tokens)
        else:
            loss, kept_patches = self._decoupled(batch, vision, microbatches, loss_tokens)
        with self.clock.phase("7 update"):
            update = self.update.run(loss_tokens, loss.mean)
        return self._report(batch, vision, skipped, loss_tokens, loss, update, kept_patches)

    def _decoupled(
        self, batch: StepBatch, vision: VisionPlan, microbatches: list[Microbatch], loss_tokens: int
    ) -> tuple[BatchLoss, int]:
        """Run phases 2 to 6; return the loss and the patches that were not encoded twice."""
        trained = self.encoder.trainable
        room = self._room_for_activations(vision)
        encoded = self._encode(batch, vision, microbatches, trained=trained, room=room)
        loss = self._backbone(batch.plan, microbatches, loss_tokens)
        if not trained:
            return loss, 0
        kept_patches = encoded[0].kept_patches
        self._go_back(encoded, vision, microbatches)
        with self.clock.phase("6 gradient sum"):
            self.encoder.sums.finish()
        return loss, kept_patches

    def _go_back(
        self, encoded: Encoded, vision: VisionPlan, microbatches: list[Microbatch]
    ) -> None:
        """Run phases 5 and 6 on the result of `_encode`, except for the sum over ranks."""
        work, leaf_rows, shape = encoded
        with self.clock.phase("5 hand-back"):
            gradients = torch.zeros(shape, dtype=self.encoder.dtype, device=self.mesh.device)
            gradients = leaf_gradients(microbatches, leaf_rows, gradients)
            gradients = self.exchange.hand_back(gradients, vision, self.mesh.rank)
        with self.clock.phase("6 vision backward"):
            work.backward(gradients)

    def _backbone(
        self, plan: GlobalPlan, microbatches: list[Microbatch], loss_tokens: int
    ) -> BatchLoss:
        """Run phase 4; the sums by source stay local and go into the rank's report."""
        with self.clock.phase(BACKBONE):
            aux_scale = loss_tokens / max(1, plan.num_tokens)
            result = self.backbone.train_step(microbatches, aux_scale)
            mine = float(result.loss_sum) if self.mesh.counts_loss else 0.0
            (loss_sum,) = self.mesh.sum([mine])
            own = self._own_losses(microbatches, result.losses)
        return BatchLoss(loss_sum / max(1, loss_tokens), own)

    def _colocated(
        self, batch: StepBatch, vision: VisionPlan, microbatches: list[Microbatch], loss_tokens: int
    ) -> BatchLoss:
        """Run the baseline: the first stage encodes inside the graph of each microbatch."""
        media, grids = self._pixels(batch, vision), grids_of(batch.plan)
        received = vision.received_by(self.mesh.rank)
        for place, microbatch in enumerate(microbatches if self.mesh.is_first_stage else ()):
            spans = received[received.microbatch == place]
            if len(spans):
                items = spans.item.tolist()
                pixels = [media[item] for item in items]
                shapes = [(int(t), int(h), int(w)) for t, h, w in grids[items]]
                microbatch.media = partial(self.encoder.encode, pixels, shapes)
                positions = torch.from_numpy(runs(spans.position, spans.count))
                microbatch.leaf_positions = positions.to(self.mesh.device)
        loss = self._backbone(batch.plan, microbatches, loss_tokens)
        with self.clock.phase("6 gradient sum"):
            self.encoder.sums.finish()
        return loss

    def _report(
        self,
        batch: StepBatch,
        vision: VisionPlan,
        skipped: np.ndarray,
        loss_tokens: int,
        loss: BatchLoss,
        update: UpdateReport,
        kept_patches: int,
    ) -> StepReport:
        width, size = self.config.model.vision.out_width, self.encoder.dtype.itemsize
        planned = self.exchange.bytes_sent(vision, self.mesh.rank, width, size)
        ran = self.clock.spans
        return StepReport(
            loss=loss.mean,
            losses=loss.own,
            loss_tokens=loss_tokens,
            text_tokens=int(batch.plan.text_tokens),
            vision_tokens=int(batch.plan.vision_tokens),
            items=len(batch.plan.items),
            skipped=skipped,
            bad=batch.bad,
            update=update,
            vision=vision,
            spans=dict(ran),
            peak_bytes=dict(self.clock.peak_bytes),
            exchange_bytes={way: planned[way] for way, phase in DIRECTIONS if phase in ran},
            kept_patches=kept_patches,
        )

    def _room_for_activations(self, vision: VisionPlan) -> int:
        """Return the byte limit for all kept activations; 0 to keep none."""
        dep = self.config.dep
        if dep.keep_activations == "none":
            return 0
        assert dep.memory_limit_gib is not None  # checked with the configuration
        tokens = vision.tokens_held()
        embedding = self.config.model.vision.out_width * self.encoder.dtype.itemsize
        return int(dep.memory_limit_gib * GIB) - int(tokens[self.mesh.rank]) * embedding

    def _count_loss_tokens(self, microbatches: list[Microbatch]) -> int:
        """Return the number of loss tokens in the global batch, the divisor of phase 7."""
        mine = 0
        if self.mesh.counts_loss:
            mine = sum(int(m.loss_mask.sum()) for m in microbatches if m.loss_mask is not None)
        (total,) = self.mesh.sum([float(mine)])
        return int(total)
