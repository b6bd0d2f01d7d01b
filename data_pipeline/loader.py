"""The steps of a training, in order: planned, fetched ahead, and resumed from a few numbers.

    state -> plan -> needs -> request -> worker -> rows of tokens, patches of media

The plan is global, `needs` says which rows and which media items this process has to hold, and only
those are read. Workers (processes, or a thread of this one) carry out requests up to
`prefetch_steps` steps and `prefetch_bytes` ahead. The state of the loader is the state after the
last step it handed out: what was fetched ahead and not used is forgotten, and fetched again after a
resume.
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

# Longer than any sum of the store's own timeouts and retries; reached only if something hangs.
PATIENCE_S = 1800.0


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One step as this process needs it.

    Attributes:
        plan: the global plan.
        rows: tokens of the needed rows; None when none are needed.
        row_ids: their numbers in the plan, int64 [R].
        media: item number in the plan -> uint8 patches [L, 3, 14, 14].
        bad: samples that cannot be used as far as this process can tell, with the reason. A sample
            whose text is damaged is padding in `rows`; a damaged medium is missing in `media`.
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
        steps: handed out.
        wait_s: seconds that `next` waited.
        bytes: read from the store (or its cache), those of worker processes included.
        requests: sent to the store, likewise.
        bad: unusable samples and media.
        reread: reads that were repeated because of a wrong checksum.
    """

    steps: int = 0
    wait_s: float = 0.0
    bytes: int = 0
    requests: int = 0
    bad: int = 0
    reread: int = 0


class LoaderError(RuntimeError):
    """A step could not be fetched; `step` is its number, from 1, `__cause__` what happened."""

    def __init__(self, step: int, cause: BaseException):
        super().__init__(f"step {step}: {type(cause).__name__}: {cause}")
        self.step = step


@dataclass(frozen=True)
class Quarantined:
    """A sample whose place will be filled by another, and the step that showed it unusable."""

    source: str
    key: str
    step: int


class Loader:
    """Iterates over steps, without end unless the config limits the epochs; `close` it after use.

    Args:
        config: the data config. With `workers` above 0, they open `config.root` themselves.
        store: rooted at config.root.
        indices: one per source of the config, in any order.
        tokenizer: the one the indices were made with.
        needs: rows and items of a plan that this process holds. It is called from a background
            thread: it must be a pure function and must not communicate.

    Raises:
        ValueError: from the planner: sources, sizes or the vision ratio do not fit.
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
            LoaderError: the step could not be fetched. The state has not moved: asking again tries
                the same step again.
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
        except BaseException:  # an interrupt may fall between taking a step and noting it
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
        """Fill the places of samples of a step by others, in windows opened later on.

        To be called on every rank with the same samples, before the next step is asked for.

        Returns:
            Those that were not in quarantine yet.
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

        JSON: 0.5 KB, 40 bytes for each source, 20 for each sample in quarantine.
        """
        return self.planner.with_quarantine(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a state; what was fetched ahead is dropped.

        Raises:
            ValueError: naming the field that does not belong to this run.
        """
        self._forget()
        self.planner.load_state_dict(state)
        self._state = self.planner.state_dict()

    @property
    def used_up(self) -> str | None:
        """Which tokens of `data.budget` the steps handed out have used up; None: there are some.

        The loader itself goes on: to end is the consumer's.
        """
        return used_up(self._config.budget, self._state)

    def close(self) -> None:
        """End all workers and threads."""
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
        """Begin to fetch from the present state: ahead, or each step when it is asked for."""
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
        """Plan step after step; noted in `planned`, for the consumer to take with the results."""
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
