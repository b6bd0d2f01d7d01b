"""Source stage of a webdataset pipeline: blended samples in an exact order, with exact resume.

    stream = SampleStream("s3://bucket/corpus", ["pairs", "web"], StreamConfig(batch_size=256))
    pipeline = wds.DataPipeline(stream, wds.decode("pil"), wds.to_tuple("0.jpg;0.png", "json"))
    for images, documents in stream.follow(DataLoader(pipeline, batch_size=256, num_workers=4)):
        ...
        state = stream.state_dict()

Iteration yields samples in the form of webdataset's tar reader. The order comes from `plan.blend`
and `plan.order` and depends only on the seed, the blend, the shard window and the position. A step
is the next `batch_size` positions, and each rank holds a contiguous piece of it. Worker w of W of a
torch DataLoader reads every W-th step from step w on, which matches the order in which the
DataLoader collects batches. So the samples of all ranks, in rank order, are the same for any number
of ranks and workers. The state is a few numbers, the same on all ranks, and a resume costs the same
at any position.

Samples are located in thousands at a time (`stream.stretch`). Their bytes are fetched one stretch
ahead, as whole shards or large ranges (`stream.extents`).
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
# Maximum number of samples in a stretch. The first stretch is one step, so that it is ready soon;
# each later stretch is GROWTH times larger.
MOST_SAMPLES = 16384
GROWTH = 4
OUTDATED = "the stream was moved or iterated anew; this iterator has ended"
# Raw samples per task of a worker thread, because a task costs as much as several samples.
TASK_SAMPLES = 512

State = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True)
class StreamConfig:
    """Settings of a sample stream.

    Attributes:
        batch_size: samples in a step, over all ranks; may change at a resume. With a DataLoader,
            its batches are the rank's piece: `batch_size / world_size` samples.
        shares: source -> relative share of the draws; None uses the sizes of the sources, so that
            all finish an epoch at the same time.
        seed: seed of the order.
        shard_window: shards whose samples are shuffled together. A larger window shuffles better
            but needs more memory.
        num_samples: number of samples after which the stream ends; None never ends.
        check: compare every document and media file with its CRC-32. This costs about as much as
            copying it; without it, damage at rest stays undetected.
        workers: threads that read and call `transform` ahead of the consumer; 0 does both on
            demand. Threads pay off for a heavy `transform`, not for raw samples.
        threads: concurrent requests to the store in each process.
        memory_bytes: approximate memory for shards in each process. If a window of shards does not
            fit, ranges are read instead, with more and smaller requests.

    Raises:
        ValueError: a value is not allowed; the message names field, value and allowed values.
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
    """Stream of samples in an exact order; `close` it, or use it in a `with` statement.

    Each process opens its own files and connections on first use, so a stream may be forked, or
    pickled if it was made with the root's URI.

    Args:
        store: root of the sources as accepted by `open_store`, or an open store. An open store
            other than a folder works only in the process that opened it.
        sources: names or indices of the sources, in any order.
        config: settings of the stream.
        rank, world_size: select this process's piece of every step.
        transform: applied by `batches` to every `Batch`, in a worker thread if there are any. Its
            result must depend only on the batch.

    Raises:
        ValueError: a source has no samples, two sources have the same name, or the shares name
            other sources.
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
        # Root for opening the store in another process; None if that is impossible.
        self._root = opened.uri if isinstance(opened, FolderStore) else None
        self._opens = isinstance(store, str)
        self._root = store if isinstance(store, str) else self._root
        self._pid = os.getpid()
        self._store: Store | None = opened
        self._extents: FileExtents | StoreExtents | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._run: Generator[tuple[int, Any], None, None] | None = None
        self._unfinished = False  # True while an iteration of this process has not reached the end
        self._moves = 0  # number of loaded states and changes of shares

    def __getstate__(self) -> dict[str, Any]:
        opened = {"_pid": -1, "_store": None, "_extents": None, "_pool": None, "_run": None}
        return self.__dict__ | opened

    def __call__(self) -> Iterator[dict[str, Any]]:
        """Return an iterator; `wds.DataPipeline` calls its first stage this way."""
        return iter(self)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Iterate over samples from the stream's position on, in the form of webdataset's reader.

        Yields:
            `__key__`, `__url__` of the shard, and the bytes of each member by its extension:
            "json", then "0.jpg", "1.png", ...

        The position advances with the last sample of a step. An iterator ends with RuntimeError
        when another one starts or a state is loaded.

        Raises:
            StoreError: a read failed after the store's retries; the message names the shard.
            IndexMismatch: bytes stay damaged after a second read; names source, sample and shard.
            ValueError: a step has fewer samples than ranks, or this worker cannot iterate.

        After an error the position is unchanged, so a new iteration tries the same step again.
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
        """Iterate over steps as `Batch` columns, or over the results of `transform`.

        This is the fastest way to read. Position and errors are as in iteration over samples, plus
        the errors of `transform`.
        """
        transform = self._transform

        def make(assembly: Assembly, step: int) -> Any:
            batch = assembly.batch(step)
            return batch if transform is None else transform(batch)

        for end, batch in self._steps(make, group=transform is None):
            self._position = end
            yield batch

    def follow(self, loader: Iterable[T]) -> Iterator[T]:
        """Yield the batches of a DataLoader over this stream and count each as a step.

        The loader's workers read ahead in other processes; this stream's state is the state after
        the last yielded batch. The stages of the pipeline must return one sample per input sample,
        in order (decoding, mapping and batching are allowed, shuffling and filtering are not), and
        a batch must be the rank's piece of a step.

        Raises:
            ValueError: the loader's `batch_size` differs from the size of the rank's piece.
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
        # If the last step has fewer samples than ranks, ranks without a batch must still pass it.
        left = (config.num_samples or 0) - self._position
        if (
            0 < left < config.batch_size
            and len(set(piece(left, self._rank, self._world_size))) == 1
        ):
            self._position += left

    def state_dict(self) -> State:
        """Return the state after the last returned step: JSON below 1 KB, equal on all ranks."""
        parts = [{"start": s.start, "weights": list(s.weights)} for s in self._segments]
        return self._identity() | {"position": self._position, "segments": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, possibly of a run with other ranks, workers and batch size.

        The blend comes from the state; `reweigh` changes it from here on.

        Raises:
            ValueError: a field does not belong to this stream; the message names it.
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
        """Change the shares from the next step on; earlier steps stay the same.

        Start a new iteration afterwards; DataLoader workers use the shares from the next
        `iter(loader)` on.
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
        """End all threads, and close the store if the stream opened it. It waits for requests."""
        self._forget()
        if self._pid != os.getpid():  # in a forked copy, the parent's locks may never be released
            self._pool = self._extents = None
            return
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        if self._extents:
            self._extents.close()
        self._pool = self._extents = None
        if self._opens and self._store is not None:
            self._store.close()
            self._store, self._pid = None, -1  # the next iteration opens it again

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
        """Drop stretches that were located and fetched ahead."""
        run, self._run = self._run, None
        if run is not None and self._pid == os.getpid():
            run.close()

    def _steps(
        self, make: Callable[[Assembly, int], T], group: bool = True
    ) -> Generator[tuple[int, T], None, None]:
        """Yield (position after the step, result of `make`) for every following step.

        Args:
            make: called with the assembly of a stretch and a step of it.
            group: True if a worker thread processes many steps per task.
        """
        worker, num_workers = data_loader_worker()
        if self._unfinished and num_workers and self._pid == os.getpid():  # not from the parent
            # Only the main process, which receives all batches, knows the position.
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
        """Open store, reader and threads for this process; they do not survive a fork."""
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
        """Yield every step, made on demand."""
        for assembly, steps in tasks:
            for step in steps:
                yield assembly.end(step), make(assembly, step)

    def _made_ahead(
        self, tasks: Iterator[tuple[Assembly, range]], make: Callable[[Assembly, int], T]
    ) -> Generator[tuple[int, T], None, None]:
        """Yield every step, made ahead by the worker threads."""
        assert self._pool is not None
        futures: deque[Future[list[tuple[int, T]]]] = deque()
        room = 0  # the first batch must not wait until other steps are located
        try:
            for assembly, steps in tasks:
                futures.append(self._pool.submit(_make_all, assembly, steps, make))
                if len(futures) > room:
                    yield from futures.popleft().result(PATIENCE_S)
                    room = min(2 * self.config.workers, room + 2)
            while futures:
                yield from futures.popleft().result(PATIENCE_S)
        finally:
            if self._pid == os.getpid():  # in a forked copy, their locks may never be released
                for future in futures:
                    future.cancel()

    def _tasks(
        self, worker: int, num_workers: int, group: bool
    ) -> Iterator[tuple[Assembly, range]]:
        """Yield all steps of this worker, grouped into tasks; start each stretch one ahead."""
        stride = num_workers * self.config.batch_size
        size = max(1, TASK_SAMPLES * self._world_size // self.config.batch_size) if group else 1
        ahead = self._prepare(self._position + worker * self.config.batch_size, 1, stride)
        while ahead is not None:
            assembly, ahead = ahead, None
            for begin in range(0, assembly.num_steps, size):
                yield assembly, range(begin, min(begin + size, assembly.num_steps))
                if begin == 0:  # not earlier, so that the first batch waits only for its own bytes
                    after = assembly.first + assembly.num_steps * stride
                    ahead = self._prepare(after, GROWTH * assembly.num_steps, stride)

    def _prepare(self, first: int, num_steps: int, stride: int) -> Assembly | None:
        """Locate a stretch and start fetching it; return None at the end of the stream."""
        config, batch_size = self.config, self.config.batch_size
        num_steps = min(num_steps, max(1, self._most * self._world_size // batch_size))
        if config.num_samples is not None:
            left = config.num_samples - first
            if left <= 0:
                return None
            batch_size = min(batch_size, left)  # the last step may be shorter
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
    """Return this DataLoader worker's number and the worker count; (0, 0) in other processes."""
    # Not imported, because planning and reading do not need torch; a worker has imported it.
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
    """Return a SHA-256 (hex) over the sources' names and contents, which the order depends on."""
    contents = "\n".join(f"{index.name} {index.identity}" for index in indices)
    return hashlib.sha256(contents.encode()).hexdigest()


def _sizes(indices: Sequence[SourceIndex], shard_window: int) -> tuple[float, int]:
    """Return mean bytes of a sample, and bytes of the shards in one window of every source."""
    shards = [shard for index in indices for shard in index.shards]
    mean = sum(shard.size for shard in shards) / sum(shard.samples for shard in shards)
    window = sum(
        min(shard_window, len(index.shards)) * max(shard.size for shard in index.shards)
        for index in indices
    )
    return max(mean, 1.0), window
