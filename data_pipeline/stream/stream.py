"""The source of a webdataset pipeline: blended samples in an exact order, with exact resume.

    stream = SampleStream("s3://bucket/corpus", ["pairs", "web"], StreamConfig(batch_size=256))
    pipeline = wds.DataPipeline(stream, wds.decode("pil"), wds.to_tuple("0.jpg;0.png", "json"))
    for images, documents in stream.follow(DataLoader(pipeline, batch_size=256, num_workers=4)):
        ...
        state = stream.state_dict()

Iterating yields what webdataset's own tar reader makes of the shards. The order is that of
`plan.blend` and `plan.order`: a function of the seed and the position and of nothing else. A step
is the next `batch_size` positions; each rank holds a contiguous piece of it, and worker w of W of a
torch DataLoader takes every W-th step from step w on, which is the order in which the DataLoader
takes their batches. So the samples of all ranks, in rank order, are the same for any number of
ranks and workers. The state is a few numbers, the same on all ranks; resuming costs the same at any
position.

Samples are located thousands at a time (`stream.stretch`), and their bytes fetched by whole shards
or large ranges one stretch ahead (`stream.extents`).
"""

import hashlib
import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import pyarrow as pa

from data_pipeline.access import register, shard_versions
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import read_index
from data_pipeline.names import listed
from data_pipeline.plan.blend import UNITS, Segment, append_segment, apportion
from data_pipeline.plan.order import ShardOrder
from data_pipeline.store.open import FolderStore, Store, open_store
from data_pipeline.stream.batches import Assembly, Batch
from data_pipeline.stream.extents import (
    MAX_GAP,
    PATIENCE_S,
    FileExtents,
    StoreExtents,
    open_extents,
)
from data_pipeline.stream.stretch import keys_of, locate, piece, positions_of

__all__ = ["Batch", "SampleStream", "StreamConfig"]

SCHEMA = 1
# Samples located at a time. The first stretch is one step, so that it comes soon; each later one is
# GROWTH times larger, up to this.
MOST_SAMPLES = 16384
GROWTH = 4
OUTDATED = "the stream was moved or iterated anew; this iterator has ended"
# Raw samples read by one task of a worker thread: a task costs as much as several of them.
TASK_SAMPLES = 512

State = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class StreamConfig:
    """What is streamed, and how.

    Attributes:
        batch_size: samples of a step, over all ranks; may change at a resume. With DataLoader
            workers, its batches are the rank's piece: `batch_size / world_size` samples.
        shares: source -> share of the draws, relative; None takes the sizes of the sources, so
            that all finish an epoch at the same time.
        seed: of the order.
        shard_window: shards whose samples are mixed. More mix better and need more memory.
        num_samples: where the stream ends, counted from its beginning; None never ends.
        check: compare every document and media file with its CRC-32. Costs about as much as
            copying it; without, damage at rest goes unnoticed.
        workers: threads that read, and call `transform`, ahead of the consumer; 0 does it when
            asked. Worth it for a heavy `transform`, not for raw samples.
        threads: concurrent requests to the store, in each process.
        memory_bytes: about how much of shards each process may hold. A window of shards that does
            not fit is read by ranges instead: more requests, and smaller.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    batch_size: int
    shares: Mapping[str, float] | None = None
    seed: int = 0
    shard_window: int = 8
    num_samples: int | None = None
    check: bool = True
    workers: int = 0
    threads: int = 8
    memory_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        for name, least in (
            ("batch_size", 1),
            ("seed", 0),
            ("shard_window", 1),
            ("num_samples", 0),
            ("workers", 0),
            ("threads", 1),
            ("memory_bytes", 1),
        ):
            value = getattr(self, name)
            if value is None and name == "num_samples":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} is {value!r}; allowed: an integer from {least}")


class SampleStream:
    """Samples in an exact order; `close` it, or use it in a `with`.

    Each process opens its own files and connections at the first use, so a stream may be forked, or
    pickled if it was made with the root's URI.

    Args:
        store: where the sources lie: the root as `open_store` takes it, or an open store. One that
            is no folder is only for the process that opened it.
        sources: names of the sources, or their indices, in any order.
        config: what is streamed.
        rank, world_size: which piece of every step this process takes.
        transform: applied by `batches` to every `Batch`, in a worker thread if there are any. It
            must depend on nothing but the batch.

    Raises:
        ValueError: sources without samples, of one name, or not those that the shares name.
    """

    def __init__(
        self,
        store: Store | str,
        sources: Sequence[SourceIndex | str],
        config: StreamConfig,
        rank: int = 0,
        world_size: int = 1,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} in a world of {world_size}")
        opened = open_store(store) if isinstance(store, str) else store
        indices = [read_index(opened, one) if isinstance(one, str) else one for one in sources]
        self.indices = tuple(sorted(indices, key=lambda index: index.name))
        self.names = tuple(index.name for index in self.indices)
        if not self.names or len(set(self.names)) != len(self.names):
            raise ValueError(f"sources are {listed(self.names)}; give one or more, each name once")
        self.config, self._rank, self._world_size = config, rank, world_size
        self._transform = transform
        self._orders = [
            ShardOrder(
                [shard.samples for shard in i.shards], config.shard_window, config.seed, i.name
            )
            for i in self.indices
        ]
        self._keys = [_key_column(index) for index in self.indices]
        self._manifest = _manifest(self.indices)
        self._segments = append_segment((), 0, self._weights(config.shares))
        self._position = 0
        mean, self._window_bytes = _sizes(self.indices, config.shard_window)
        self._mean_bytes = mean
        self._most = max(1, min(MOST_SAMPLES, int(config.memory_bytes / 8 / mean)))
        register(opened, shard_versions(self.indices))
        # How another process opens the store, None where it cannot.
        self._root = opened.uri if isinstance(opened, FolderStore) else None
        self._opens = isinstance(store, str)
        self._root = store if isinstance(store, str) else self._root
        self._pid = os.getpid()
        self._store: Store | None = opened
        self._extents: FileExtents | StoreExtents | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._run: Generator[tuple[int, Any], None, None] | None = None
        self._unfinished = False  # an iteration, in this process
        self._moves = 0  # how often a state or other shares came

    def __getstate__(self) -> dict[str, Any]:
        opened = {"_pid": -1, "_store": None, "_extents": None, "_pool": None, "_run": None}
        return self.__dict__ | opened

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Iterate: what `wds.DataPipeline` does with its first stage."""
        return iter(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over samples from the stream's position on, as webdataset's tar reader has them.

        Yields:
            `__key__`, `__url__` of the shard, and the bytes of each member by its extension:
            "json", then "0.jpg", "1.png", ...

        The position moves with the last sample of a step. An iterator ends with RuntimeError when
        another one is begun, or a state is loaded.

        Raises:
            StoreError: naming the shard; the store's own retries are used up.
            IndexMismatch: bytes that stay damaged when read again; names source, sample and shard.
            ValueError: fewer samples in a step than ranks, or a worker that cannot iterate.

        After an error the position has not moved: iterating again tries the same step again.
        """
        if self.config.batch_size < self._world_size:
            raise ValueError(
                f"batch_size is {self.config.batch_size} for {self._world_size} ranks; give at "
                "least one sample for each"
            )
        for end, samples in self._steps(Assembly.samples):
            yield from samples[:-1]
            self._position = end
            yield from samples[-1:]

    def batches(self) -> Iterator[Any]:
        """Iterate over steps as `Batch` columns, or what `transform` makes of them.

        This is the fastest way. Position and errors are as of iterating over samples, and whatever
        `transform` raises.
        """
        transform = self._transform

        def make(assembly: Assembly, step: int) -> Any:
            batch = assembly.batch(step)
            return batch if transform is None else transform(batch)

        for end, batch in self._steps(make, group=transform is None):
            self._position = end
            yield batch

    def follow(self, loader: Iterable[T]) -> Iterator[T]:
        """Hand on the batches of a DataLoader over this stream, each counted as a step.

        Its workers read ahead in processes of their own; this stream's state is then the one after
        the last batch handed out. The stages of the pipeline must hand on one sample for each that
        they are given, in order (decoding, mapping, batching; neither shuffling nor selecting), and
        a batch must be the rank's piece of a step.

        Raises:
            ValueError: the loader's `batch_size` is not the rank's piece.
        """
        config, first, moves = self.config, self._position, self._moves
        begin, end = piece(config.batch_size, self._rank, self._world_size)
        size = getattr(loader, "batch_size", None)
        if size is not None and size != end - begin:
            raise ValueError(
                f"the loader's batch_size is {size}; rank {self._rank} of {self._world_size} has "
                f"{end - begin} of the {config.batch_size} samples of a step: give that"
            )
        for number, batch in enumerate(loader, 1):
            after = first + number * config.batch_size
            self._position = min(after, config.num_samples or after)
            yield batch
            if self._moves != moves:
                raise RuntimeError(OUTDATED)
        # Of a last step with fewer samples than ranks, some ranks get no batch: it is over for all.
        left = (config.num_samples or 0) - self._position
        if (
            0 < left < config.batch_size
            and len(set(piece(left, self._rank, self._world_size))) == 1
        ):
            self._position += left

    def state_dict(self) -> State:
        """Return the state after the last step handed out: JSON, below 1 KB, equal on all ranks."""
        parts = [{"start": s.start, "weights": list(s.weights)} for s in self._segments]
        return self._identity() | {"position": self._position, "segments": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state of any number of ranks and workers, and any batch size.

        The blend is the state's; `reweigh` changes it from here on.

        Raises:
            ValueError: naming the field that does not belong to this stream.
        """
        for field, expected in self._identity().items():
            if state.get(field) != expected:
                raise ValueError(
                    f"state field {field!r} is {state.get(field)!r}, this stream has {expected!r}: "
                    "the state belongs to another stream and its order would not be continued"
                )
        position = state.get("position")
        if isinstance(position, bool) or not isinstance(position, int) or position < 0:
            raise ValueError(f"state field 'position' is {position!r}; expected an integer >= 0")
        segments: tuple[Segment, ...] = ()
        for part in state["segments"]:
            segments = append_segment(segments, part["start"], part["weights"])
        self._forget()
        self._segments, self._position = segments, position
        self._moves += 1

    def reweigh(self, shares: Mapping[str, float]) -> None:
        """Draw in other shares from the next step on; what was handed out stays as it was.

        Iterate anew afterwards; DataLoader workers learn of it with the next `iter(loader)`.
        """
        weights = self._weights(shares)
        kept: tuple[Segment, ...] = ()
        for segment in self._segments:
            if segment.start < self._position:
                kept = append_segment(kept, segment.start, segment.weights)
        self._forget()
        self._segments = append_segment(kept, self._position, weights)
        self._moves += 1

    def close(self) -> None:
        """End all threads, and close the store if the stream opened it. Waits for requests."""
        self._forget()
        if self._pid != os.getpid():  # a forked copy: the parent's locks may be held for ever
            self._pool = self._extents = None
            return
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        if self._extents:
            self._extents.close()
        self._pool = self._extents = None
        if self._opens and self._store is not None:
            self._store.close()
            self._store, self._pid = None, -1  # iterating again opens it again

    def __enter__(self) -> "SampleStream":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _identity(self) -> State:
        window, seed = self.config.shard_window, self.config.seed
        return {
            "schema": SCHEMA, "manifest": self._manifest, "seed": seed, "shard_window": window,
        }  # fmt: skip

    def _weights(self, shares: Mapping[str, float] | None) -> tuple[int, ...]:
        if shares is None:
            shares = {index.name: index.num_samples for index in self.indices}
        told = ", ".join(f"{name} {share:g}" for name, share in shares.items())
        if tuple(sorted(shares)) != self.names or min(shares.values()) < 0:
            raise ValueError(
                f"shares are {told}; give one above 0 for each of {listed(self.names)}"
            )
        weights = apportion([Fraction(shares[name]) for name in self.names], UNITS)
        if 0 in weights:
            raise ValueError(
                f"shares are {told}: source {self.names[weights.index(0)]!r} would be "
                f"drawn less than once in {UNITS} draws; raise its share or leave it out"
            )
        return weights

    def _forget(self) -> None:
        """Drop what was located and fetched ahead."""
        run, self._run = self._run, None
        if run is not None and self._pid == os.getpid():
            run.close()

    def _steps(
        self, make: Callable[[Assembly, int], T], group: bool = True
    ) -> Generator[tuple[int, T], None, None]:
        """(position after it, what `make` makes of it) of every step that follows.

        Args:
            make: called with the assembly of a stretch and a step of it.
            group: whether a worker thread does many steps in one task.
        """
        worker, num_workers = data_loader_worker()
        if self._unfinished and num_workers and self._pid == os.getpid():  # not one of a parent's
            # Where to go on only the main process knows, which has received all workers' batches.
            raise ValueError(
                "a DataLoader worker cannot begin again in the middle of the stream; give "
                "persistent_workers=False"
            )
        num_workers = max(1, num_workers)
        self._forget()
        self._open(num_workers)
        tasks = self._tasks(worker, num_workers, group)
        run = self._made(tasks, make) if self._pool is None else self._made_ahead(tasks, make)
        self._run = run
        self._unfinished = True
        yield from run
        if self._run is not run:
            raise RuntimeError(OUTDATED)
        self._unfinished = False
        self._position = max(self._position, self.config.num_samples or 0)

    def _open(self, num_workers: int) -> None:
        """Open what this process reads with; connections and threads do not survive a fork."""
        config = self.config
        if self._pid != os.getpid():
            if self._root is None:
                raise ValueError(
                    "a stream over an open store cannot be used in another process; make it with "
                    "the root's URI instead"
                )
            self._pid, self._store = os.getpid(), open_store(self._root)
            self._extents = self._pool = None
        if self._extents is None:
            assert self._store is not None
            spread = self._mean_bytes * self._world_size * num_workers
            whole = self._window_bytes <= config.memory_bytes // 2 and spread <= MAX_GAP
            self._extents = open_extents(
                self._store, whole, config.memory_bytes // 2, config.threads
            )
            self._pool = ThreadPoolExecutor(config.workers, "sample") if config.workers else None

    def _made(
        self, tasks: Iterator[tuple[Assembly, range]], make: Callable[[Assembly, int], T]
    ) -> Generator[tuple[int, T], None, None]:
        """Make every step when it is asked for."""
        for assembly, steps in tasks:
            for step in steps:
                yield assembly.end(step), make(assembly, step)

    def _made_ahead(
        self, tasks: Iterator[tuple[Assembly, range]], make: Callable[[Assembly, int], T]
    ) -> Generator[tuple[int, T], None, None]:
        """The same, made ahead by the worker threads."""
        assert self._pool is not None
        futures: deque[Future[list[tuple[int, T]]]] = deque()
        room = 0  # at first, so that the first batch does not wait until others are located
        try:
            for assembly, steps in tasks:
                futures.append(self._pool.submit(_make_all, assembly, steps, make))
                if len(futures) > room:
                    yield from futures.popleft().result(PATIENCE_S)
                    room = min(2 * self.config.workers, room + 2)
            while futures:
                yield from futures.popleft().result(PATIENCE_S)
        finally:
            if self._pid == os.getpid():  # in a forked copy their locks may be held for ever
                for future in futures:
                    future.cancel()

    def _tasks(
        self, worker: int, num_workers: int, group: bool
    ) -> Iterator[tuple[Assembly, range]]:
        """All steps of this worker, in groups worth a task; stretches begin one ahead."""
        stride = num_workers * self.config.batch_size
        size = max(1, TASK_SAMPLES * self._world_size // self.config.batch_size) if group else 1
        ahead = self._prepare(self._position + worker * self.config.batch_size, 1, stride)
        while ahead is not None:
            assembly, ahead = ahead, None
            for begin in range(0, assembly.num_steps, size):
                yield assembly, range(begin, min(begin + size, assembly.num_steps))
                if begin == 0:  # not before: the first batch waits for nothing but its own bytes
                    after = assembly.first + assembly.num_steps * stride
                    ahead = self._prepare(after, GROWTH * assembly.num_steps, stride)

    def _prepare(self, first: int, num_steps: int, stride: int) -> Assembly | None:
        """Locate a stretch and start to fetch it; None at the end of the stream."""
        config, batch_size = self.config, self.config.batch_size
        num_steps = min(num_steps, max(1, self._most * self._world_size // batch_size))
        if config.num_samples is not None:
            left = config.num_samples - first
            if left <= 0:
                return None
            batch_size = min(batch_size, left)  # the last step may be a short one
            num_steps = min(num_steps, 1 + (left - batch_size) // stride)
        positions = positions_of(first, num_steps, stride, batch_size, self._rank, self._world_size)
        stretch = locate(positions.ravel(), self.indices, self._orders, self._segments)
        assert self._store is not None
        assert self._extents is not None
        return Assembly(
            stretch,
            self._extents.prepare(stretch),
            keys_of(stretch, self._keys),
            self.names,
            self._store,
            first=first,
            num_steps=num_steps,
            stride=stride,
            batch_size=batch_size,
            check=config.check,
        )


def data_loader_worker() -> tuple[int, int]:
    """Return this torch DataLoader worker's number and their count; (0, 0) in any other process."""
    # Looked up and not imported: planning and reading need no torch, and a worker has imported it.
    module = sys.modules.get("torch.utils.data")
    info = module.get_worker_info() if module else None
    return (info.id, info.num_workers) if info else (0, 0)


def _make_all(
    assembly: Assembly, steps: range, make: Callable[[Assembly, int], T]
) -> list[tuple[int, T]]:
    return [(assembly.end(step), make(assembly, step)) for step in steps]


def _key_column(index: SourceIndex) -> pa.Array:
    return index.key if isinstance(index.key, pa.Array) else pa.array(index.key, pa.string())


def _manifest(indices: Sequence[SourceIndex]) -> str:
    """What the order depends on besides seed and window: SHA-256 (hex) over names and contents."""
    contents = "\n".join(f"{index.name} {index.identity}" for index in indices)
    return hashlib.sha256(contents.encode()).hexdigest()


def _sizes(indices: Sequence[SourceIndex], shard_window: int) -> tuple[float, int]:
    """Mean bytes of a sample, and bytes of the shards in one window of every source."""
    shards = [shard for index in indices for shard in index.shards]
    mean = sum(shard.size for shard in shards) / sum(shard.samples for shard in shards)
    window = sum(
        min(shard_window, len(index.shards)) * max(shard.size for shard in index.shards)
        for index in indices
    )
    return max(mean, 1.0), window
