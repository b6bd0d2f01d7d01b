"""Raw samples of blended sources in an exact order: for who wants the data and no model.

    with SampleStream(store, [read_index(store, "pairs")], StreamConfig(batch_size=256)) as stream:
        for batch in stream:
            for source, key, document, media in batch:
                ...

The order is that of `plan.blend` and `plan.order`: a function of the seed and the
position and of nothing else. A step is the next `batch_size` positions; each rank holds a piece of
it, and the pieces in rank order are the same for any number of ranks and workers. The state is a
few numbers, the same on all ranks, and going on from it costs the same at any position.

Samples are found thousands at a time (`stream.stretch`), and their bytes fetched by whole
shards or large ranges one stretch ahead (`stream.extents`).
"""

import hashlib
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pyarrow as pa

from data_pipeline.access import register, shard_versions
from data_pipeline.index.columns import SourceIndex
from data_pipeline.names import listed
from data_pipeline.plan.blend import UNITS, Segment, append_segment, apportion
from data_pipeline.plan.order import ShardOrder
from data_pipeline.store.open import Store
from data_pipeline.stream.batches import Assembly, Batch, Sample
from data_pipeline.stream.extents import MAX_GAP, PATIENCE_S, open_extents
from data_pipeline.stream.stretch import keys_of, locate, positions_of

__all__ = ["Batch", "Sample", "SampleStream", "StreamConfig"]

SCHEMA = 1
# Samples found at a time. The first stretch is one step, so that it comes soon; each later one is
# larger by GROWTH, up to this.
MOST_SAMPLES = 16384
GROWTH = 4
# Raw samples that one task of a worker puts together: a task costs as much as several of them.
TASK_SAMPLES = 512

State = dict[str, Any]


@dataclass(frozen=True)
class StreamConfig:
    """What is streamed, and how.

    Attributes:
        batch_size: samples of a step, over all ranks. May change at a resume.
        shares: source -> share of the draws, relative; None takes them as the sources' sizes are,
            so that all come round at the same time.
        seed: of the order.
        shard_window: shards whose samples are mixed. More mix better and need more memory.
        num_samples: where the stream ends, counted from its beginning; None never ends.
        check: compare every document and media file with its CRC-32. Costs about as much as
            copying it; without, damage at rest goes unnoticed.
        parse: hand out documents as parsed JSON.
        decode: hand out media as pixels.
        workers: threads that put batches together, ahead of the consumer; 0 does it when asked.
            Worth it for decoding and a heavy `transform`, which raw samples are not.
        threads: requests to the store at the same time.
        memory_bytes: about how much of shards may be held. A window of shards that does not fit
            is read by ranges instead: more requests, and smaller.

    Raises:
        ValueError: naming the field, its value and what is allowed.
    """

    batch_size: int
    shares: Mapping[str, float] | None = None
    seed: int = 0
    shard_window: int = 8
    num_samples: int | None = None
    check: bool = True
    parse: bool = False
    decode: bool = False
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
    """Iterates over batches; `close` it, or use it in a `with`.

    Args:
        store: where the sources lie.
        indices: one per source, in any order.
        config: what is streamed.
        rank, world_size: which piece of every step this process takes.
        transform: called with every `Batch`, by a worker if there are any; its result is handed
            out instead. It must depend on nothing but the batch.

    Raises:
        ValueError: sources without samples, of one name, or not those that the shares name.
    """

    def __init__(
        self,
        store: Store,
        indices: Sequence[SourceIndex],
        config: StreamConfig,
        rank: int = 0,
        world_size: int = 1,
        transform: Callable[[Batch], Any] | None = None,
    ) -> None:
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank} in a world of {world_size}")
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
        mean, window = _sizes(self.indices, config.shard_window)
        self._most = max(1, min(MOST_SAMPLES, int(config.memory_bytes / 8 / mean)))
        register(store, shard_versions(self.indices))
        whole = window <= config.memory_bytes // 2 and mean * world_size <= MAX_GAP
        self._extents = open_extents(store, whole, config.memory_bytes // 2, config.threads)
        self._pool = ThreadPoolExecutor(config.workers, "sample") if config.workers else None
        self._batches: Generator[tuple[int, Any], None, None] | None = None

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        """Return the next batch (or what `transform` makes of it).

        Raises:
            StopIteration: at `num_samples`.
            StoreError: naming the shard; the store's own retries are used up.
            IndexMismatch: damaged bytes; names source, sample and shard.
            MediaError: an intact file that does not decode; names source and sample.

        After an error the position has not moved: asking again tries the same step again.
        """
        if self._batches is None:
            self._batches = self._made_ahead(self._pool) if self._pool else self._made()
        try:
            self._position, batch = next(self._batches)
        except BaseException:  # an interrupt too: what was on its way is asked for again
            self._forget()
            raise
        return batch

    def state_dict(self) -> State:
        """Return the state after the last step handed out. JSON, below 1 KB, equal on all ranks."""
        parts = [{"start": s.start, "weights": list(s.weights)} for s in self._segments]
        return self._identity() | {"position": self._position, "segments": parts}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, of any number of ranks, workers and any batch size.

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

    def reweigh(self, shares: Mapping[str, float]) -> None:
        """Draw in other shares from the next step on; what was handed out stays as it was."""
        weights = self._weights(shares)
        kept: tuple[Segment, ...] = ()
        for segment in self._segments:
            if segment.start < self._position:
                kept = append_segment(kept, segment.start, segment.weights)
        self._forget()
        self._segments = append_segment(kept, self._position, weights)

    def close(self) -> None:
        """End all threads. Requests under way are waited for."""
        self._forget()
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self._extents.close()

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
        """Drop what was found and fetched ahead."""
        batches, self._batches = self._batches, None
        if batches is not None:
            batches.close()

    def _made(self) -> Generator[tuple[int, Any], None, None]:
        """(position after it, batch) of every step that follows, made when asked for."""
        for assembly, steps in self._tasks():
            for step in steps:
                yield assembly.end(step), self._finished(assembly.batch(step))

    def _made_ahead(self, pool: ThreadPoolExecutor) -> Generator[tuple[int, Any], None, None]:
        """The same, made by the workers' threads."""
        tasks: deque[Future[list[tuple[int, Any]]]] = deque()
        room = 0  # so the first batch is not kept waiting while others are being found
        try:
            for assembly, steps in self._tasks():
                tasks.append(pool.submit(self._make, assembly, steps))
                if len(tasks) > room:
                    yield from tasks.popleft().result(PATIENCE_S)
                    room = min(2 * self.config.workers, room + 2)
            while tasks:
                yield from tasks.popleft().result(PATIENCE_S)
        finally:
            for task in tasks:
                task.cancel()

    def _make(self, assembly: Assembly, steps: range) -> list[tuple[int, Any]]:
        return [(assembly.end(step), self._finished(assembly.batch(step))) for step in steps]

    def _finished(self, batch: Batch) -> Any:
        return batch if self._transform is None else self._transform(batch)

    def _tasks(self) -> Iterator[tuple[Assembly, range]]:
        """All steps that follow, in groups worth a task; a stretch is begun one stretch ahead."""
        light = self._transform is None and not self.config.decode
        group = max(1, TASK_SAMPLES * self._world_size // self.config.batch_size) if light else 1
        ahead = self._prepare(self._position, 1)
        while ahead is not None:
            assembly, ahead = ahead, None
            for begin in range(0, assembly.num_steps, group):
                yield assembly, range(begin, min(begin + group, assembly.num_steps))
                if begin == 0:  # not before: the first batch waits for nothing but its own bytes
                    last = assembly.num_steps - 1
                    ahead = self._prepare(assembly.end(last), GROWTH * assembly.num_steps)

    def _prepare(self, first: int, num_steps: int) -> Assembly | None:
        """Find a stretch and begin to fetch it; None at the end of the stream."""
        config, batch_size = self.config, self.config.batch_size
        num_steps = min(num_steps, max(1, self._most * self._world_size // batch_size))
        if config.num_samples is not None:
            left = config.num_samples - first
            if left <= 0:
                return None
            batch_size = min(batch_size, left)  # the last step may be a short one
            num_steps = min(num_steps, left // batch_size)
        positions = positions_of(first, num_steps, batch_size, self._rank, self._world_size)
        stretch = locate(positions.ravel(), self.indices, self._orders, self._segments)
        return Assembly(
            stretch,
            self._extents.prepare(stretch),
            keys_of(stretch, self._keys),
            self.names,
            first=first,
            num_steps=num_steps,
            batch_size=batch_size,
            check=config.check,
            parse=config.parse,
            decode=config.decode,
        )


def _key_column(index: SourceIndex) -> pa.Array:
    return index.key if isinstance(index.key, pa.Array) else pa.array(index.key, pa.string())


def _manifest(indices: Sequence[SourceIndex]) -> str:
    """What the order depends on besides seed and window: SHA-256 (hex) over names and contents."""
    contents = "\n".join(f"{index.name} {index.content_hash}" for index in indices)
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
