"""Training step that adds SigLIP's loss to the caption loss."""

from dataclasses import replace
from typing import Protocol, cast

import numpy as np
import torch

from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import GlobalPlan
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import Config
from kimi_pretrain.dep.bubble_step import dep_step
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.vision_plan import VisionPlan, grids_of
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import Microbatch, replica_rows
from kimi_pretrain.model import Model
from kimi_pretrain.siglip.pair_encoder import PairEncoder
from kimi_pretrain.siglip.pairs import Pairs, captions
from kimi_pretrain.siglip.tokenizer import TextTokenizer
from kimi_pretrain.step import BatchLoss, StepReport, TrainStep
from kimi_pretrain.update import Update


class RunParts(Protocol):
    """The parts that a step needs; implemented by `kimi_pretrain.run.Run`."""

    config: Config
    mesh: Mesh
    model: Model
    update: Update
    planner: VisionPlanner
    tokenizer: Tokenizer
    store: Store


def train_step_of(run: RunParts) -> TrainStep:
    """Return the step of a run, with SigLIP's objective if `train.siglip` is set."""
    parts = run.config, run.mesh, run.model, run.update, run.planner
    if (siglip := run.config.train.siglip) is None:
        return dep_step(*parts)
    texts = TextTokenizer.open(siglip, run.config.data, run.store)
    return PairStep(*parts, run.tokenizer, texts)


class PairStep(TrainStep):
    """`TrainStep` whose encoder, a `PairEncoder`, also learns from pairs."""

    encoder: PairEncoder

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: Model,
        update: Update,
        planner: VisionPlanner,
        tokenizer: Tokenizer,
        texts: TextTokenizer,
    ):
        super().__init__(config, mesh, model, update, planner)
        self._tokenizer, self._texts = tokenizer, texts

    def run(self, batch: StepBatch, *, text_only: bool = False) -> StepReport:
        """Run a step as in `TrainStep`; the report has the pairs' loss, number and patches."""
        report = super().run(batch, text_only=text_only)
        pairs, self.encoder.pairs = self.encoder.pairs, None
        if pairs is None or pairs.loss is None:  # the same on all ranks
            return replace(report, siglip=(None, 0, 0))
        (total,) = self.mesh.sum([float(pairs.loss)])
        number, patches = len(pairs.items), grids_of(batch.plan)[pairs.items].prod(1).sum()
        return replace(report, siglip=(total / number, number, int(patches)))

    def _decoupled(
        self,
        batch: StepBatch,
        vision: VisionPlan,
        microbatches: list[Microbatch],
        loss_tokens: int,
    ) -> tuple[BatchLoss, int]:
        with self.clock.phase("prepare"):
            self.encoder.pairs = self._pairs(batch.plan, microbatches, loss_tokens)
        return super()._decoupled(batch, vision, microbatches, loss_tokens)

    def captions(self, plan: GlobalPlan, microbatches: list[Microbatch]) -> dict[int, str]:
        """Return this rank's captions by item number, in rising order; see `pairs.captions`.

        Only ranks of the first stage have captions, because they hold the rows.
        """
        if not self.mesh.is_first_stage:
            return {}
        rows = replica_rows(plan, self.mesh)
        by_rows = sorted(microbatches, key=lambda one: one.number)  # execution order may differ
        tokens, counts = (
            torch.cat([getattr(one, what).flatten() for one in by_rows]).cpu().numpy()
            for what in ("tokens", "loss_mask")
        )
        shape = len(rows), plan.seq_len
        return captions(plan, rows, tokens.reshape(shape), counts.reshape(shape), self._tokenizer)

    def _pairs(self, plan: GlobalPlan, microbatches: list[Microbatch], loss_tokens: int) -> Pairs:
        """Share the pairs of the step with every rank. Collective.

        Replicas hold rows in rising order, so the ranks' captions are in the order of the items.
        """
        found = self.captions(plan, microbatches)
        everyone = cast(list[list[int]], self.mesh.all_gather_object(list(found)))
        items = np.array([item for part in everyone for item in part], np.int64)
        assert (np.diff(items) > 0).all(), "the order of replicas is that of their rows"
        ids = torch.from_numpy(self._texts(list(found.values()))).to(self.mesh.device)
        factor = max(1, loss_tokens) / max(1, len(items))
        return Pairs(items, [len(part) for part in everyone], ids, factor)
