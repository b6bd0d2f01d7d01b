"""One training step, in the numbered phases of docs/ARCHITECTURE.md (K2.5 report, section 4.5.1).

Phases 0 (plan) and 1 (fetch) run ahead of time in the loader; `needs` tells it what this rank
reads. The rest is `TrainStep.run`. Losses and gradients are sums over tokens everywhere; the one
divisor, the global number of loss tokens, is applied in phase 7 to encoder and backbone alike.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from data_pipeline.loader import BadSample, Needs, StepBatch
from data_pipeline.plan.planner import GlobalPlan
from kimi_pretrain.config import Config
from kimi_pretrain.dep.assign import VisionPlan, plan_vision
from kimi_pretrain.dep.cost import item_costs
from kimi_pretrain.dep.encoder import DecoupledEncoder, Grid
from kimi_pretrain.dep.exchange import hand_back, hand_over
from kimi_pretrain.engine.backbone import Backbone, Microbatch
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.microbatches import (
    attach_leaves,
    build_microbatches,
    leaf_gradients,
    replica_rows,
)
from kimi_pretrain.update import Update, UpdateReport


@dataclass
class StepReport:
    """What one step did; the same on every rank but for `bad` and `spans`.

    Attributes:
        loss: mean over the global batch's loss tokens.
        loss_tokens, text_tokens, vision_tokens, items: of the global batch.
        skipped: samples of the plan whose loss did not count because they were unusable, int64.
        bad: what this rank found unusable, and why.
        update: of the optimizer; see `UpdateReport`.
        vision: who encoded which item.
        spans: phase -> (start, end) in seconds of the wall clock, on this rank.
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


def grids_of(plan: GlobalPlan) -> np.ndarray:
    """Return the patch grids (frames, height, width) of a plan's items, int64 [items, 3]."""
    items = plan.items
    return np.stack([items.frames, items.grid_h, items.grid_w], axis=1).astype(np.int64)


def vision_plan(plan: GlobalPlan, config: Config, mesh: Mesh) -> VisionPlan:
    """Assign the items of the whole global batch to ranks (phase 0; pure, the same everywhere)."""
    rows_per_replica = plan.num_rows // mesh.num_replicas
    owner = np.array(mesh.first_rank_of, dtype=np.int64)[plan.items.row // rows_per_replica]
    return plan_vision(
        item_costs(grids_of(plan), config.model.vision),
        owner,
        plan.items.tokens.astype(np.int64),
        plan.items.patches.astype(np.int64),
        mesh.world_size,
    )


def needs(config: Config, mesh: Mesh) -> Callable[[GlobalPlan], Needs]:
    """Return what this rank reads for a step: its replica's rows, and the media it encodes."""
    reads_text = mesh.is_first_stage or mesh.is_last_stage

    def of(plan: GlobalPlan) -> Needs:
        rows = replica_rows(plan, mesh) if reads_text else range(0)
        items = vision_plan(plan, config, mesh).encoded_by(mesh.rank)
        return Needs(rows=np.array(rows, dtype=np.int64), items=items)

    return of


class TrainStep:
    """Runs steps over one encoder, backbone and optimizer."""

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        encoder: DecoupledEncoder,
        backbone: Backbone,
        update: Update,
    ):
        self.config, self.mesh = config, mesh
        self.encoder, self.backbone, self.update = encoder, backbone, update
        self._spans: dict[str, tuple[float, float]] = {}

    def run(self, batch: StepBatch, *, text_only: bool = False) -> StepReport:
        """Run phases 2 to 7 on a fetched step.

        Args:
            batch: from the loader; holds what `needs` asked for.
            text_only: replace every media token by a text token and skip the vision phases. Only
                for measuring efficiency: it trains on nonsense.
        """
        self._spans = {}
        self.encoder.zero_grads()
        with self._phase("prepare"):
            vision = vision_plan(batch.plan, self.config, self.mesh)
            skipped = self._skipped_samples(batch)
            rows = self.config.train.rows_per_microbatch
            restart = self.config.data.restart_positions
            microbatches = build_microbatches(batch, self.mesh, rows, skipped, restart)
            loss_tokens = self._count_loss_tokens(microbatches)
        if text_only:
            self._replace_media_tokens(batch.plan, microbatches)
            loss = self._backbone(batch.plan, microbatches, loss_tokens)
        else:
            loss = self._multimodal(batch, vision, microbatches, loss_tokens)
        with self._phase("7 update"):
            report = self.update.run(loss_tokens)
        return StepReport(
            loss=loss,
            loss_tokens=loss_tokens,
            text_tokens=int(batch.plan.text_tokens),
            vision_tokens=int(batch.plan.vision_tokens),
            items=len(batch.plan.items.row),
            skipped=skipped,
            bad=batch.bad,
            update=report,
            vision=vision,
            spans=self._spans,
        )

    def _multimodal(
        self,
        batch: StepBatch,
        vision: VisionPlan,
        microbatches: list[Microbatch],
        loss_tokens: int,
    ) -> float:
        patches, grids = self._my_media(batch, vision)
        with self._phase("2 vision forward"):
            encoded = self.encoder.forward(patches, grids)
        with self._phase("3 hand-over"):
            received = hand_over(encoded, vision, self.mesh.rank)
            taken: list[Tensor | None] = [None] * len(microbatches)
            if self.mesh.is_first_stage:
                taken = attach_leaves(microbatches, received, batch.plan, vision, self.mesh)
        loss = self._backbone(batch.plan, microbatches, loss_tokens)
        with self._phase("5 hand-back"):
            gradients = leaf_gradients(microbatches, taken, received)
            gradients = hand_back(gradients, vision, self.mesh.rank)
        with self._phase("6 vision backward"):
            self.encoder.backward(patches, grids, gradients)
            self.encoder.reduce_grads()
        return loss

    def _backbone(
        self, plan: GlobalPlan, microbatches: list[Microbatch], loss_tokens: int
    ) -> float:
        with self._phase("4 backbone"):
            aux_scale = loss_tokens / max(1, plan.num_tokens)
            result = self.backbone.train_step(microbatches, aux_scale)
            (loss_sum,) = self.mesh.sum([float(result.loss_sum)])
        return loss_sum / max(1, loss_tokens)

    def _my_media(
        self, batch: StepBatch, vision: VisionPlan
    ) -> tuple[list[np.ndarray], list[Grid]]:
        """Return patches and grids of the items this rank encodes, in sending order.

        An unusable item becomes black patches of its planned size: shapes and collectives stay as
        planned, and its sample counts for no loss.
        """
        mine = vision.encoded_by(self.mesh.rank).tolist()
        table = grids_of(batch.plan)
        grids: list[Grid] = [(int(t), int(h), int(w)) for t, h, w in table[mine]]
        blank = [(t * h * w, 3, 14, 14) for t, h, w in grids]
        patches = [
            batch.media[item] if item in batch.media else np.zeros(shape, dtype=np.uint8)
            for item, shape in zip(mine, blank, strict=True)
        ]
        return patches, grids

    def _skipped_samples(self, batch: StepBatch) -> np.ndarray:
        """Return the samples that some rank found unusable, the same array on every rank."""
        if not self.mesh.max([float(len(batch.bad))])[0]:  # one number, as a rule
            return np.zeros(0, np.int64)
        unusable = np.zeros(len(batch.plan.samples.row))
        unusable[[bad.sample for bad in batch.bad]] = 1.0
        return np.flatnonzero(np.array(self.mesh.max(unusable.tolist())) > 0)

    def _count_loss_tokens(self, microbatches: list[Microbatch]) -> int:
        mine = 0
        if self.mesh.is_last_stage:
            mine = sum(int(m.loss_mask.sum()) for m in microbatches if m.loss_mask is not None)
        (total,) = self.mesh.sum([float(mine)])
        return int(total)

    def _replace_media_tokens(self, plan: GlobalPlan, microbatches: list[Microbatch]) -> None:
        vocabulary = self.config.model.language.vocab_size
        rows = replica_rows(plan, self.mesh)
        per_microbatch = len(rows) // len(microbatches)
        items = plan.items
        for microbatch in microbatches:  # the loader's own rows stay as they are
            if microbatch.tokens is not None:
                microbatch.tokens = microbatch.tokens.clone()
        for item in np.flatnonzero((items.row >= rows.start) & (items.row < rows.stop)):
            number, row = divmod(int(items.row[item]) - rows.start, per_microbatch)
            tokens = microbatches[number].tokens
            if tokens is not None:
                start = row * plan.seq_len + int(items.start[item])
                end = start + int(items.tokens[item])
                text = torch.arange(start, end, device=tokens.device) * 7919 % (vocabulary // 2)
                tokens[0, start:end] = text

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start = time.time()
        yield
        if self.mesh.device.type == "cuda":
            torch.cuda.synchronize()
        self._spans[name] = (start, time.time())
