"""The bytes of a step: what this process needs of it, fetched ahead, in order.

    state -> plan -> needs -> ranged reads -> rows of tokens, patches of media

The plan is global, `needs` says which rows and which media items this process has to hold, and only
those are read. One background thread works up to `prefetch_steps` steps ahead; it hands the reads
of a step to the store's threads and the decoding to a pool. The state of the loader is the state
after the last step it handed out: what was fetched ahead and not used is forgotten, and fetched
again after a resume.
"""

import json
import queue
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.collate import Document, RowBatch, rows_batch
from data_pipeline.config import DataConfig
from data_pipeline.decode import decode_items
from data_pipeline.index import SourceIndex
from data_pipeline.manifest import IndexMismatch, check_crc, sample_span
from data_pipeline.plan import GlobalPlan, Planner, State
from data_pipeline.store import Span, Store, get_many
from data_pipeline.text import Tokenizer
from moonvit3d.media import MediaError

# Longer than any sum of the store's own timeouts and retries; reached only if something hangs.
PATIENCE_S = 1800.0


@dataclass(frozen=True, eq=False)
class Needs:
    """What one process holds of a step: row numbers and item numbers of the plan, int [k] each."""

    rows: NDArray[np.integer]
    items: NDArray[np.integer]


def everything(plan: GlobalPlan) -> Needs:
    """Need all rows and all items: a world of one process."""
    return Needs(np.arange(plan.num_rows), np.arange(plan.items.item.size))


@dataclass(frozen=True)
class BadItem:
    """A media item whose bytes cannot be used, and why."""

    item: int
    reason: str


@dataclass(frozen=True, eq=False)
class StepBatch:
    """One step as this process needs it.

    Attributes:
        plan: the global plan.
        rows: tokens of the needed rows; None when none are needed.
        row_ids: their numbers in the plan, int64 [R].
        media: item number in the plan -> uint8 patches [L, 3, 14, 14].
        bad: needed items that are not in `media`, with the reason; ascending.
    """

    plan: GlobalPlan
    rows: RowBatch | None
    row_ids: NDArray[np.int64]
    media: Mapping[int, NDArray[np.uint8]]
    bad: Sequence[BadItem]


@dataclass(frozen=True)
class LoaderStats:
    """Running totals: steps handed out, seconds `next` waited, bytes read, unusable items."""

    steps: int = 0
    wait_s: float = 0.0
    bytes: int = 0
    bad: int = 0


class LoaderError(RuntimeError):
    """A step could not be fetched; `step` is its number, `__cause__` what happened."""

    def __init__(self, step: int, cause: BaseException):
        super().__init__(f"step {step}: {type(cause).__name__}: {cause}")
        self.step = step


class Loader:
    """Iterates over steps without end; `close` it, or use it in a `with`.

    Args:
        config: the data config.
        store: rooted at config.root.
        indices: one per source of the config, in any order.
        tokenizer: the one the indices were made with.
        needs: rows and items of a plan that this process holds. It is called from the background
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
            if index.tokenizer_hash != tokenizer.hash:
                raise IndexMismatch(
                    f"source {index.name!r} was made with tokenizer {index.tokenizer_name!r} "
                    f"({index.tokenizer_hash[:12]}), this run has {tokenizer.name!r} "
                    f"({tokenizer.hash[:12]}); give that tokenizer or ingest the source again"
                )
        self.stats = LoaderStats()
        self._config = config
        self._store = store
        self._tokenizer = tokenizer
        self._needs = needs
        self._state = self.planner.state_dict()
        self._ahead: _Ahead | None = None
        self._pool = ThreadPoolExecutor(config.fetch_threads, thread_name_prefix="decode")
        self._stats_lock = threading.Lock()

    def __iter__(self) -> Iterator[StepBatch]:
        return self

    def __next__(self) -> StepBatch:
        """Return the next step.

        Raises:
            LoaderError: the step could not be fetched. The state has not moved: asking again tries
                the same step again.
        """
        begin = time.monotonic()
        step = self._state["step"]
        try:
            if self._config.prefetch_steps == 0:
                batch, state = self._produce(self._state)
            else:
                if self._ahead is None:
                    self._ahead = _Ahead(self._produce, self._state, self._config.prefetch_steps)
                batch, state = self._ahead.take(step)
        except Exception as error:
            self._forget(wait=False)
            raise LoaderError(step, error) from error
        except BaseException:  # an interrupt may fall between taking a step and noting it
            self._forget(wait=False)
            raise
        assert batch.plan.step == step
        self._state = state
        self._count(steps=1, wait_s=time.monotonic() - begin)
        return batch

    def fetch(self, plan: GlobalPlan) -> StepBatch:
        """Fetch what this process needs of a plan, now, in the calling thread.

        Raises:
            StoreError: naming the key; the store's own retries are used up.
            IndexMismatch: damaged text; names source and sample key.
            ValueError: text with other tokens than the index says; names source and sample key.
        """
        needs = self._needs(plan)
        rows = np.asarray(needs.rows, np.int64)
        items = np.asarray(needs.items, np.int64).tolist()
        for what, wanted, total in (
            ("row", rows.tolist(), plan.num_rows),
            ("item", items, plan.items.item.size),
        ):
            if wanted and not 0 <= min(wanted) <= max(wanted) < total:
                raise ValueError(f"needs name {what}s {wanted}, step {plan.step} has {total}")
        samples = _samples_of(plan, rows)
        texts = {sample: self._text_span(plan, sample) for sample in samples}
        files = {item: self._file_span(plan, item) for item in items}
        spans = list(dict.fromkeys([*texts.values(), *files.values()]))
        bodies = get_many(self._store, spans, threads=self._config.fetch_threads)
        data = dict(zip(spans, bodies))

        groups: dict[Span, list[int]] = {}
        for item in sorted(files):
            groups.setdefault(files[item], []).append(item)
        decoding = [
            self._pool.submit(self._decode_file, plan, group, data[span])
            for span, group in groups.items()
        ]
        documents = {s: self._document(plan, s, data[span]) for s, span in texts.items()}
        batch = None
        if rows.size:
            batch = rows_batch(plan, rows, documents, self._tokenizer, self.indices)
        results = dict(sorted(pair for future in decoding for pair in future.result()))
        bad = [BadItem(item, found) for item, found in results.items() if isinstance(found, str)]
        media = {item: found for item, found in results.items() if not isinstance(found, str)}
        self._count(bytes=sum(len(body) for body in bodies), bad=len(bad))
        return StepBatch(plan, batch, rows, media, tuple(bad))

    def state_dict(self) -> State:
        """Return the state after the last step that `next` returned. JSON, below 1 KB."""
        return json.loads(json.dumps(self._state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a state; what was fetched ahead is dropped.

        Raises:
            ValueError: naming the field that does not belong to this run.
        """
        self.planner.load_state_dict(state)
        self._forget()
        self._state = self.planner.state_dict()

    def close(self) -> None:
        """End all threads. A step being fetched is waited for."""
        self._forget()
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> "Loader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _produce(self, state: State) -> tuple[StepBatch, State]:
        plan, after = self.planner.plan(state)
        return self.fetch(plan), after

    def _forget(self, wait: bool = True) -> None:
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.stop(wait)

    def _text_span(self, plan: GlobalPlan, sample: int) -> Span:
        return sample_span(*self._line(plan, sample))

    def _file_span(self, plan: GlobalPlan, item: int) -> Span:
        # Chunks of one video name the same bytes and share one read. (`item_span` of the index
        # would search for the sample, which is known here.)
        index, at = self._line(plan, int(plan.items.sample[item]))
        line = plan.items.item[item]
        key = index.shards[index.shard[at]].key
        return Span(key, int(index.item_offset[line]), int(index.item_length[line]))

    def _document(self, plan: GlobalPlan, sample: int, data: bytes) -> Document:
        index, at = self._line(plan, sample)
        shard = index.shards[index.shard[at]].key
        where = f"source {index.name!r}, sample {index.key_of(at)!r} in {shard!r}"
        check_crc(data, int(index.json_crc[at]), where)
        return json.loads(data)["segments"]

    def _decode_file(
        self, plan: GlobalPlan, group: list[int], data: bytes
    ) -> list[tuple[int, NDArray[np.uint8] | str]]:
        """Decode the items of one file: (item, patches, or the reason why there are none)."""
        items = plan.items
        index, at = self._line(plan, int(items.sample[group[0]]))
        name = f"source {index.name!r}, sample {index.key_of(at)!r}, file {items.media[group[0]]}"
        expected = int(index.item_crc[items.item[group[0]]])
        if (crc := zlib.crc32(data)) != expected:
            reason = f"{name}: CRC-32 is {crc:08x}, expected {expected:08x}"
            return [(item, reason) for item in group]
        kind, chunks = int(items.kind[group[0]]), items.chunk[group].tolist()
        shapes = np.stack([items.frames, items.grid_h, items.grid_w], axis=1)[group].tolist()
        try:
            found = decode_items(data, kind, chunks, self._config.limits, shapes)
        except MediaError as error:
            if len(group) == 1:
                return [(group[0], f"{name}: {error}")]
            # One chunk may be bad and the others good: ask for each alone.
            return [pair for item in group for pair in self._decode_file(plan, [item], data)]
        return list(zip(group, found))

    def _line(self, plan: GlobalPlan, sample: int) -> tuple[SourceIndex, int]:
        return self.indices[plan.samples.source[sample]], int(plan.samples.index[sample])

    def _count(self, **more: float) -> None:
        with self._stats_lock:
            now = self.stats
            self.stats = replace(now, **{k: getattr(now, k) + v for k, v in more.items()})


class _Ahead:
    """One thread that produces steps from a state on, at most `depth` ahead of the consumer."""

    def __init__(
        self,
        produce: Callable[[State], tuple[StepBatch, State]],
        state: State,
        depth: int,
    ):
        self._ready: queue.SimpleQueue[tuple[StepBatch, State] | Exception] = queue.SimpleQueue()
        self._room = threading.Semaphore(depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(produce, state), name="loader", daemon=True
        )
        self._thread.start()

    def take(self, step: int) -> tuple[StepBatch, State]:
        try:
            result = self._ready.get(timeout=PATIENCE_S)
        except queue.Empty:
            raise TimeoutError(f"step {step} was not fetched within {PATIENCE_S:.0f} s") from None
        if isinstance(result, Exception):
            raise result
        self._room.release()
        return result

    def stop(self, wait: bool) -> None:
        self._stopping.set()
        self._room.release()  # wakes a thread that waits for room
        if wait:
            self._thread.join(PATIENCE_S)
        if wait and self._thread.is_alive():
            raise TimeoutError(f"the loader's thread did not end within {PATIENCE_S:.0f} s")

    def _run(self, produce: Callable[[State], tuple[StepBatch, State]], state: State) -> None:
        while True:
            self._room.acquire()
            if self._stopping.is_set():
                return
            try:
                batch, state = produce(state)
            except Exception as error:  # surfaces in `take`, on the consumer's side
                self._ready.put(error)
                return
            self._ready.put((batch, state))


def _samples_of(plan: GlobalPlan, rows: NDArray[np.int64]) -> list[int]:
    """Return the samples of some rows, in the order of `rows`."""
    first = np.searchsorted(plan.samples.row, rows)
    end = np.searchsorted(plan.samples.row, rows, side="right")
    return [sample for a, b in zip(first.tolist(), end.tolist()) for sample in range(a, b)]
