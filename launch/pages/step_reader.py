"""Reads the rows of a step for the page of rows, like a single-process run reads them.

It reads only the data of the requested rows. It plans earlier steps without reading them, and keeps
the planned states, even if the caller gave up waiting.
"""

import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from data_pipeline.access import check_tokenizer
from data_pipeline.decode import Decode, decode_items
from data_pipeline.fetch import Fetcher, Needs, StepRequest, resolve
from data_pipeline.index.reads import read_checked
from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import GlobalPlan, Planner, State
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from launch.pages.html import num_bytes
from launch.pages.rows_page import Step
from launch.pages.turns import ComeAgain, turn

_KEPT = 256  # number of states kept
_OTHERS = "other steps are being planned or read"


class StepReader:
    """Plans and reads steps of a run, one at a time; thread-safe; call `close` at the end.

    Args:
        planner: data planner of the run.
        store: store with the root of the sources.
        tokenizer: tokenizer of the sources.
        threads: number of threads for requests, and the same number for decoding.
        begin: state before the run's first step; None for a run that starts from scratch.

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
        """Stop the threads of the fetcher."""
        self._fetcher.close()

    def before(self, step: int, until: float = math.inf) -> State:
        """Return the state before step `step`, from 0.

        Packs every window from the nearest earlier step with a known state to this step.

        Args:
            until: time.monotonic() at which planning stops; each call plans at least one step, so
                repeated calls reach the step.

        Raises:
            ValueError: the run began later. DataUsedUp: the data end before the step. ComeAgain:
                the time is over.
        """
        with turn(self._lock, until, _OTHERS):
            return self._before(step, until)

    def _before(self, step: int, until: float) -> State:
        if step < self.first:
            raise ValueError(f"step {step + 1}: this run began with step {self.first + 1}")
        state = self._states[max(known for known in self._states if known <= step)]
        begin = state["step"]
        try:
            while state["step"] < step:
                if state["step"] > begin and time.monotonic() > until:
                    raise ComeAgain(
                        f"step {step + 1:,} comes after windows that have to be packed first: done "
                        f"up to step {state['step']:,}"
                    )
                _, state = self.planner.plan(state)
        finally:
            self._keep(state)
        return state

    def _keep(self, state: State) -> None:
        if len(self._states) >= _KEPT:  # keeps the first state, which all others need
            del self._states[max(self._states, key=lambda step: step != self.first)]
        self._states[state["step"]] = state

    def plan(self, step: int, until: float = math.inf) -> GlobalPlan:
        """Return the plan of step `step`, from 0.

        Raises:
            ValueError, DataUsedUp, ComeAgain: as for `before`.
        """
        with turn(self._lock, until, _OTHERS):
            plan, after = self.planner.plan(self._before(step, until))
            self._keep(after)
        return plan

    def read(
        self,
        state: Mapping[str, Any],
        rows: Sequence[int],
        until: float = math.inf,
        most: float = math.inf,
        decode: Decode = decode_items,
    ) -> Step:
        """Read rows of the step that follows a state.

        Args:
            state: state before the step.
            rows: numbers of the rows in the step.
            until: time.monotonic() until which to wait for other callers; a read that has begun
                is finished.
            most: most bytes of memory for the rows and their media files.
            decode: decodes a media file, possibly in another process.

        Raises:
            IndexMismatch, StoreError, ValueError: as for the loader. ValueError also if a sample
                in the rows was redacted, or if the rows need more than `most` bytes.
            ComeAgain: other callers were still reading at `until`.
        """
        with turn(self._lock, until, _OTHERS):
            plan, _ = self.planner.plan(state)
            self._refuse_redacted(plan, rows)
            needs = Needs(np.array(rows), np.flatnonzero(np.isin(plan.items.row, rows)))
            request = resolve(self.planner, plan, needs)
            if request.num_bytes > most:
                raise ValueError(
                    f"{len(rows)} rows of step {plan.step + 1} take {num_bytes(request.num_bytes)} "
                    f"with their media files; {num_bytes(most)} may be read at once: ask for fewer"
                )
            found = self._fetcher(request, decode)
        batch = StepBatch(plan, found.rows, request.row_ids, found.media, found.bad)
        documents = self._documents(batch, request)
        return Step(batch, request, documents, self.planner.indices, self._tokenizer)

    def _refuse_redacted(self, plan: GlobalPlan, rows: Sequence[int]) -> None:
        """Raise a ValueError for rows with redacted samples; the run's rows cannot be rebuilt."""
        table = plan.samples
        for at in np.flatnonzero(np.isin(table.row, rows)).tolist():
            index, number = self.planner.indices[table.source[at]], int(table.index[at])
            if number in index.redacted:
                raise ValueError(
                    f"row {table.row[at]} of step {plan.step + 1} had sample "
                    f"{index.key_of(number)!r} of source {index.name!r}, which was redacted: the "
                    "row cannot be shown any more; choose others"
                )

    def _documents(self, batch: StepBatch, request: StepRequest) -> dict[int, dict[str, Any]]:
        """Return {sample: document} of the undamaged samples."""
        damaged = {entry.sample for entry in batch.bad if entry.item is None}
        reads = [read for read in request.texts if read.sample not in damaged]
        bodies = read_checked(self._store, reads)
        return {
            read.sample: parse_json(body, f"sample {read.sample}")
            for read, body in zip(reads, bodies, strict=True)
        }
