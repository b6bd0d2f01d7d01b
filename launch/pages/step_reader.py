"""Reads the rows of a step as a run of one process reads them: what the page of rows shows.

Nothing is read but what stands in the rows that are asked for. The steps before are planned, not
read; what was planned once is not planned again.
"""

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_pipeline.access import check_tokenizer
from data_pipeline.fetch import Fetcher, Needs, StepRequest, resolve
from data_pipeline.index.reads import read_checked
from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import GlobalPlan, Planner, State
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from launch.pages.rows_page import Step

_KEPT = 256  # states of steps


class StepReader:
    """Plans and reads steps of a run, from any thread, one at a time; `close` it.

    Args:
        planner: of the run.
        store: rooted where its sources lie.
        tokenizer: of the sources.
        threads: for requests and decoding, each.
        begin: state before the run's first step; None for a run that begins with nothing.

    Raises:
        IndexMismatch: a source was made with another tokenizer.
    """

    def __init__(
        self,
        planner: Planner,
        store: Store,
        tokenizer: Tokenizer,
        threads: int,
        begin: State | None = None,
    ) -> None:
        for index in planner.indices:
            check_tokenizer(index, tokenizer)
        self.planner = planner
        self._store, self._tokenizer = store, tokenizer
        self._fetcher = Fetcher(store, tokenizer, threads)
        self._lock = threading.Lock()
        state = planner.state_dict() if begin is None else begin
        self.first: int = state["step"]
        self._states: dict[int, State] = {self.first: state}

    def close(self) -> None:
        """End its threads."""
        self._fetcher.close()

    def before(self, step: int) -> State:
        """Return the state before step `step`, from 0.

        Packs every window between the nearest step before that was asked for, and this one.

        Raises:
            ValueError: the run began later.
        """
        with self._lock:
            return self._before(step)

    def _before(self, step: int) -> State:
        if step < self.first:
            raise ValueError(f"step {step + 1}: this run began with step {self.first + 1}")
        state = self._states[max(known for known in self._states if known <= step)]
        while state["step"] < step:
            _, state = self.planner.plan(state)
        self._keep(state)
        return state

    def _keep(self, state: State) -> None:
        if len(self._states) >= _KEPT:  # the first one stays: no step lies before it
            del self._states[max(self._states, key=lambda step: step != self.first)]
        self._states[state["step"]] = state

    def plans(self, first: int, count: int) -> list[GlobalPlan]:
        """Return the plans of steps first, first + 1, ..., from 0.

        Raises:
            ValueError: as `before`; DataUsedUp: the data end before.
        """
        with self._lock:
            state, found = self._before(first), list[GlobalPlan]()
            for _ in range(count):
                plan, state = self.planner.plan(state)
                found.append(plan)
            self._keep(state)
        return found

    def read(self, state: Mapping[str, Any], rows: Sequence[int]) -> Step:
        """Read rows of the step of a state.

        Args:
            state: before the step.
            rows: their numbers in the step.

        Raises:
            IndexMismatch, StoreError, ValueError: as the loader.
        """
        with self._lock:
            plan, _ = self.planner.plan(state)
            needs = Needs(np.array(rows), np.flatnonzero(np.isin(plan.items.row, rows)))
            request = resolve(self.planner, plan, needs)
            found = self._fetcher(request)
        batch = StepBatch(plan, found.rows, request.row_ids, found.media, found.bad)
        documents = self._documents(batch, request)
        return Step(batch, request, documents, self.planner.indices, self._tokenizer)

    def _documents(self, batch: StepBatch, request: StepRequest) -> dict[int, dict[str, Any]]:
        """Return {sample: document} of the samples that are not damaged."""
        damaged = {entry.sample for entry in batch.bad if entry.item is None}
        reads = [read for read in request.texts if read.sample not in damaged]
        bodies = read_checked(self._store, reads)
        return {read.sample: json.loads(body) for read, body in zip(reads, bodies, strict=True)}
