"""Data loader: plans the steps of a training run, prefetches them and resumes from a small state.

    state -> plan -> needs -> request -> worker -> rows of tokens, patches of media

The plan is global. `needs` selects the rows and media items of this process, and the loader reads
only these. Workers (processes, or a thread of this process) run up to `prefetch_steps` steps and
`prefetch_bytes` ahead. The loader's state is the state after the last step it returned. Prefetched
steps that were not used are dropped and fetched again after a resume.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.access import check_tokenizer, open_fetcher, register, shard_versions
from data_pipeline.collate import RowBatch
from data_pipeline.config import DataConfig
from data_pipeline.fetch import BadSample, Fetched, Fetcher, Needs, StepRequest, everything, resolve
from data_pipeline.index.columns import SourceIndex
from data_pipeline.plan.budget import used_up
from data_pipeline.plan.planner import GlobalPlan, Planner, State
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer
from data_pipeline.workers.workers import OrderedResults, Workers

__all__ = ["BadSample", "Loader", "LoaderError", "LoaderStats", "Needs", "StepBatch", "everything"]

# Longer than the sum of the store's timeouts and retries; reached only if something hangs.
PATIENCE_S = 1800.0


@dataclass(frozen=True, eq=False)
class StepBatch:
    """Data of one step that this process needs.

    Attributes:
        plan: the global plan.
        rows: tokens of the needed rows; None if no rows are needed.
        row_ids: row numbers in the plan, int64 [R].
        media: item number in the plan -> uint8 patches [L, 3, 14, 14].
        bad: samples that this process found unusable, with the reason. A sample with damaged text
            is padding in `rows`; a damaged item is missing in `media`.
    """

    plan: GlobalPlan
    rows: RowBatch | None
    row_ids: NDArray[np.int64]
    media: Mapping[int, NDArray[np.uint8]]
    bad: Sequence[BadSample]


@dataclass(frozen=True)
class LoaderStats:
    """Running totals.

    Attributes:
        steps: steps returned.
        wait_s: seconds that `next` waited.
        bytes: bytes read from the store or its cache, worker processes included.
        requests: requests sent to the store, worker processes included.
        bad: unusable samples and items.
        reread: reads repeated because of a wrong checksum.
    """

    steps: int = 0
    wait_s: float = 0.0
    bytes: int = 0
    requests: int = 0
    bad: int = 0
    reread: int = 0


class LoaderError(RuntimeError):
    """Failure to fetch step `step` (counted from 1); `__cause__` holds the original error."""

    def __init__(self, step: int, cause: BaseException):
        super().__init__(f"step {step}: {type(cause).__name__}: {cause}")
        self.step = step


@dataclass(frozen=True)
class Quarantined:
    """A sample that later windows replace, and the step that found it unusable."""

    source: str
    key: str
    step: int


class Loader:
    """Endless iterator over steps, unless the config limits the epochs; `close` it after use.

    Args:
        config: the data config. With `workers` above 0, each worker opens `config.root` itself.
        store: store rooted at config.root.
        indices: one index per source of the config, in any order.
        tokenizer: the tokenizer that the indices were made with.
        needs: returns the rows and items of a plan that this process holds. A background thread
            calls it, so it must be a pure function and must not communicate.

    Raises:
        ValueError: the planner refuses the sources, sizes or the vision ratio.
        IndexMismatch: an index was made with another tokenizer.
    """

    def __init__(
        self,
        config: DataConfig,
        store: Store,
        indices: Sequence[SourceIndex],
        tokenizer: Tokenizer,
        needs: Callable[[GlobalPlan], Needs] = everything,
    ):
        self.planner = Planner(indices, config)
        self.indices = self.planner.indices
        for index in self.indices:
            check_tokenizer(index, tokenizer)
        self.stats = LoaderStats()
        self._config, self._needs = config, needs
        self._state = self.planner.state_dict()
        versions = shard_versions(self.indices)
        register(store, versions)
        self._fetcher: Fetcher | None = None
        if config.workers:
            setup = partial(open_fetcher, config, versions, tokenizer.hash)
        else:
            self._fetcher = Fetcher(store, tokenizer, config.fetch_threads)
            setup = partial(_same, self._fetcher)
        self._workers: Workers[StepRequest, Fetched] = Workers(
            setup, config.workers, timeout_s=PATIENCE_S, name="loader"
        )
        self._closed = False
        self._run: Iterator[Fetched] | None = None
        self._planned: deque[tuple[GlobalPlan, State, NDArray[np.int64]]] = deque()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """Return the next step.

        Raises:
            LoaderError: the step could not be fetched. The state is unchanged, so the next call
                tries the same step again.
        """
        if self._closed:
            raise ValueError("the loader is closed")
        begin = time.monotonic()
        done = self._state["step"]
        try:
            if self._run is None:
                self._run = self._start()
            fetched = next(self._run)
            plan, state, rows = self._planned.popleft()
        except Exception as error:
            self._forget()
            raise LoaderError(done + 1, error) from error
        except BaseException:  # an interrupt may come after a step is fetched but before it counts
            self._forget()
            raise
        assert plan.step == done
        self._state = state
        self._count(
            steps=1,
            wait_s=time.monotonic() - begin,
            bytes=fetched.bytes,
            requests=fetched.requests,
            bad=len(fetched.bad),
            reread=fetched.reread,
        )
        return StepBatch(plan, fetched.rows, rows, fetched.media, fetched.bad)

    def quarantine(self, plan: GlobalPlan, samples: Sequence[int]) -> list[Quarantined]:
        """Quarantine samples of a step; windows opened later replace them by other samples.

        Call this on every rank with the same samples, before the next step is requested.

        Returns:
            The samples that were not yet in quarantine.
        """
        new: list[Quarantined] = []
        for sample in samples:
            source, at = int(plan.samples.source[sample]), int(plan.samples.index[sample])
            if self.planner.quarantine(source, at, plan.step):
                index = self.indices[source]
                new.append(Quarantined(index.name, index.key_of(at), plan.step))
        return new

    def state_dict(self) -> State:
        """Return the state after the last step that `next` returned.

        As JSON it takes 0.5 KB plus 40 bytes per source and 20 bytes per quarantined sample.
        """
        return self.planner.with_quarantine(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state and drop prefetched steps.

        Raises:
            ValueError: a field does not belong to this run; the message names it.
        """
        self._forget()
        self.planner.load_state_dict(state)
        self._state = self.planner.state_dict()

    @property
    def used_up(self) -> str | None:
        """Message naming the used-up tokens of `data.budget`; None if tokens are left.

        The loader itself continues; the consumer decides to stop.
        """
        return used_up(self._config.budget, self._state)

    def close(self) -> None:
        """Stop all workers and threads."""
        self._closed = True
        self._forget()
        self._workers.close()
        if self._fetcher is not None:
            self._fetcher.close()

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> Iterator[Fetched]:
        """Start fetching from the current state, either ahead or on demand."""
        config = self._config
        planned = self._planned = deque()
        requests = self._requests(self._state, planned)
        if not config.prefetch_steps:
            assert self._fetcher is not None  # the config refuses workers that cannot fetch ahead
            return map(self._fetcher, (request for request, _ in requests))
        return self._workers.run(
            requests, max_bytes=config.prefetch_bytes, max_jobs=config.prefetch_steps
        )

    def _requests(
        self, state: State, planned: deque[tuple[GlobalPlan, State, NDArray[np.int64]]]
    ) -> Iterator[tuple[StepRequest, int]]:
        """Plan steps and append them to `planned`, where the consumer pairs them with results."""
        while True:
            plan, state = self.planner.plan(state)
            request = resolve(self.planner, plan, self._needs(plan))
            planned.append((plan, state, request.row_ids))
            yield request, request.num_bytes

    def _forget(self) -> None:
        run, self._run = self._run, None
        if isinstance(run, OrderedResults):
            run.close()

    def _count(self, **more: float) -> None:
        now = self.stats
        self.stats = replace(now, **{k: getattr(now, k) + v for k, v in more.items()})


def _same(fetcher: Fetcher) -> Fetcher:
    return fetcher
