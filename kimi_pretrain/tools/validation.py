"""Held-out loss: runs the forward pass of steps over samples that training never draws.

The samples of `data.heldout` are planned as separate steps (`data_pipeline.plan.once`). They run
through phases 1 to 4 in the run's layout, with their media in DEP. The run's state is not touched:
reads, plans and caches are separate, and without a graph no gradient, routing bias or token count
changes. The attention maxima cover training only (`engine.packed_attention`). The losses are the
same in every layout up to rounding.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from data_pipeline.access import register, shard_versions
from data_pipeline.fetch import Fetcher, resolve
from data_pipeline.index.columns import SourceIndex
from data_pipeline.loader import StepBatch
from data_pipeline.plan.once import once
from data_pipeline.plan.planner import GlobalPlan, Planner
from data_pipeline.plan.tombstones import tombstones_of
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from kimi_pretrain.config import Config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import Model
from kimi_pretrain.step import ForwardStep, needs
from kimi_pretrain.telemetry.losses import LossSums, LossTable, merged

log = logging.getLogger("kimi_pretrain.tools.validation")


@dataclass(frozen=True)
class HeldOutLoss:
    """Result of a validation; all ranks have the same, except for `seconds`.

    Attributes:
        text_tokens, vision_tokens: of all samples, including unusable ones.
        skipped: samples whose loss did not count because they were unusable.
        seconds: on this rank.
    """

    table: LossTable
    text_tokens: int
    vision_tokens: int
    skipped: int
    seconds: float

    def line(self, step: int) -> dict[str, Any]:
        """Return the line of heldout.jsonl after `step` steps; docs/METRICS.md lists its names."""
        tokens = int(self.table.tokens.sum())
        return {
            "step": step,
            "kind": "heldout",
            "loss": float(self.table.loss.sum()) / tokens if tokens else None,
            "loss_tokens": tokens,
            **self.table.as_line(),
            "loss_by_source_and_position": self.table.by_both(),
            "text_tokens": self.text_tokens,
            "vision_tokens": self.vision_tokens,
            "skipped_samples": self.skipped,
            "seconds": self.seconds,
        }


class Validation:
    """The held-out samples of a run and the forward pass over them.

    Args:
        config: of the run.
        model: of the run; only read.
        indices: of the sources of `data.heldout`.
    """

    def __init__(
        self,
        config: Config,
        mesh: Mesh,
        model: Model,
        store: Store,
        tokenizer: Tokenizer,
        indices: Sequence[SourceIndex],
    ):
        data = config.data.of_heldout()
        self.mesh, self._store, self._tokenizer = mesh, store, tokenizer
        find = partial(tombstones_of, config.data, sorted(indices, key=lambda one: one.name))
        self._planner = Planner(indices, data, mesh.broadcast_from_rank0(find))
        self.plans = once(self._planner, config.data.heldout_tokens, config.row_group())
        config = config.model_copy(update={"data": data})
        vision = VisionPlanner(config, training=False)
        self._needs, self._threads = needs(mesh, vision), data.fetch_threads
        self._step = ForwardStep(config, mesh, model, vision)
        register(store, shard_versions(self._planner.indices))
        counts = {name: 0 for name in data.source_names}
        for plan in self.plans:
            for name, number in zip(counts, _samples_of(plan, len(counts)), strict=True):
                counts[name] += number
        log.info("held out: %d samples or parts of texts in %d batches: %s",
                 sum(counts.values()), len(self.plans), counts)  # fmt: skip

    def run(
        self,
        watch: Callable[[object], None] = lambda done: None,
        stop: Callable[[], str | None] = lambda: None,
    ) -> HeldOutLoss | None:
        """Evaluate all held-out samples once; return None if a rank has to stop. Collective.

        Args:
            watch: called with the number of finished batches.
            stop: returns this rank's reason to stop, or None; called before each batch.

        Raises:
            StoreError, IndexMismatch: a sample cannot be read.
        """
        start, skipped = time.perf_counter(), 0
        mine = list[LossSums]()
        for number, batch in enumerate(self._batches()):
            watch(number)
            if any(self.mesh.all_gather_object(stop())):
                return None
            sums, bad = self._step.forward(batch)
            for one in batch.bad:
                log.warning("held out: skipped a sample: %s", one.reason)
            mine.append(sums)
            skipped += len(bad)
        everyone: list[Any] = self.mesh.all_gather_object(mine)
        data = self._planner.config
        table = merged(itertools.chain(*everyone), data.source_names, data.seq_len)
        text, vision = (
            sum(int(getattr(plan, kind)) for plan in self.plans)
            for kind in ("text_tokens", "vision_tokens")
        )
        return HeldOutLoss(table, text, vision, skipped, time.perf_counter() - start)

    def _batches(self) -> Iterator[StepBatch]:
        """Yield this rank's part of each step, and read the next step in the background."""
        fetcher = Fetcher(self._store, self._tokenizer, self._threads)
        with ThreadPoolExecutor(1, "held out") as reader:
            try:
                ahead = reader.submit(self._fetch, fetcher, self.plans[0])
                for following in (*self.plans[1:], None):
                    batch = ahead.result()
                    if following is not None:
                        ahead = reader.submit(self._fetch, fetcher, following)
                    yield batch
            finally:
                reader.shutdown(cancel_futures=True)
                fetcher.close()

    def _fetch(self, fetcher: Fetcher, plan: GlobalPlan) -> StepBatch:
        request = resolve(self._planner, plan, self._needs(plan))
        found = fetcher(request)
        return StepBatch(plan, found.rows, request.row_ids, found.media, found.bad)


def _samples_of(plan: GlobalPlan, sources: int) -> list[int]:
    return [int((plan.samples.source == number).sum()) for number in range(sources)]
