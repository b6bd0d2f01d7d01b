"""Fetches the bytes of a stretch's parts from files in a folder, whole shards, or byte ranges.

`prepare` starts the requests without waiting. The parts' `read` waits for the bytes it needs, may
be called from any thread, and raises a StoreError that names the shard. So one stretch is fetched
while another is in use.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.index.columns import ShardInfo
from data_pipeline.store.objects import check_key
from data_pipeline.store.open import FolderStore, Store, StoreError
from data_pipeline.stream.stretch import Stretch, by_first_use

# A request costs about as much as reading this many bytes, so closer neighbours share one read.
MAX_GAP = 256 << 10
# Larger reads are split into pieces that are fetched in parallel.
MAX_PIECE = 32 << 20
# Longer than the sum of the store's timeouts and retries; reached only if something hangs.
PATIENCE_S = 1800.0
_KEPT_FILES = 256
# The tar header with the member's name directly precedes the bytes of every part.
HEADER = 512


def open_extents(
    store: Store, whole: bool, memory_bytes: int, threads: int
) -> "FileExtents | StoreExtents":
    """Return the reader for this kind of store.

    Args:
        store: store with the shards.
        whole: True to read whole shards and keep them while there is memory; False to read only
            the needed ranges.
        memory_bytes: memory limit for whole shards.
        threads: number of concurrent requests.
    """
    if isinstance(store, FolderStore):
        return FileExtents(store)
    return StoreExtents(store, whole, memory_bytes, threads)


class FileExtents:
    """Reader of parts from files on demand, without buffers or threads; the kernel caches pages.

    It uses `pread`, because a shard that is truncated under a memory map causes a SIGBUS. Reading
    whole shards from a folder took up to twice as long, and the first batch took at least 20 ms
    instead of 2 ms.
    """

    def __init__(self, store: FolderStore) -> None:
        self._store = store
        self._files: OrderedDict[str, _File] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(self, stretch: Stretch) -> "FileParts":
        """Return the parts of a stretch; nothing is read yet."""
        return FileParts(self, stretch)

    def close(self) -> None:
        """Release the files."""
        self._files.clear()

    def open(self, info: ShardInfo) -> "_File":
        """Return the shard's file, which stays open for the next stretch."""
        with self._lock:
            file = self._files.get(info.key)
            if file is None:
                try:
                    file = _File(self._store.root / check_key(info.key))
                except OSError:
                    self._store.get(info.key, 0, 1)  # raises the store's own error
                    raise
                self._files[info.key] = file
                if len(self._files) > _KEPT_FILES:
                    self._files.popitem(last=False)
            return file


class _File:
    """File descriptor that is closed when no stretch uses it any longer."""

    __slots__ = ("handle",)

    def __init__(self, path: os.PathLike[str]) -> None:
        self.handle = -1
        self.handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def __del__(self) -> None:
        if self.handle >= 0:
            os.close(self.handle)


class FileParts:
    """Parts of one stretch in files."""

    def __init__(self, extents: FileExtents, stretch: Stretch) -> None:
        self._extents = extents
        self._shards = stretch.shards
        self._slot = stretch.slot.tolist()
        self._offset = stretch.offset.tolist()
        self._length = stretch.length.tolist()
        self._files: list[_File | None] = [None] * len(stretch.shards)
        self._handles = [-1] * len(stretch.shards)

    def read(self, first: int, end: int) -> list[bytes]:
        """Return the bytes of parts first ... end - 1."""
        slots, lengths = self._slot[first:end], self._length[first:end]
        for slot in set(slots):
            if self._files[slot] is None:
                file = self._files[slot] = self._extents.open(self._shards[slot])
                self._handles[slot] = file.handle
        handles = map(self._handles.__getitem__, slots)
        bodies = list(map(os.pread, handles, lengths, self._offset[first:end]))
        if list(map(len, bodies)) != lengths:
            bodies = [self._whole(first + at, body) for at, body in enumerate(bodies)]
        return bodies

    def headers(self, first: int, end: int) -> list[bytes]:
        """Return the tar headers, 512 bytes each, of parts that have been read."""
        handles = [self._handles[slot] for slot in self._slot[first:end]]
        offsets = [offset - HEADER for offset in self._offset[first:end]]
        return list(map(os.pread, handles, [HEADER] * len(handles), offsets))

    def _whole(self, part: int, body: bytes) -> bytes:
        """Complete a short read, which file systems may return; 0 bytes mean the end of file."""
        offset, length = self._offset[part], self._length[part]
        slot = self._slot[part]
        while len(body) < length:
            rest = os.pread(self._handles[slot], length - len(body), offset + len(body))
            if not rest:
                raise StoreError(
                    f"{self._extents._store.uri}/{self._shards[slot].key}: expected {length} bytes "
                    f"from offset {offset}, the file holds only {len(body)} of them; restore the "
                    "shard or ingest the source again"
                )
            body += rest
        return body


class StoreExtents:
    """Reader that fetches parts in the background with a few large requests."""

    def __init__(self, store: Store, whole: bool, memory_bytes: int, threads: int) -> None:
        self._store, self._keeps_whole = store, whole
        self._room = memory_bytes
        self._kept: OrderedDict[str, tuple[Future[bytes], int]] = OrderedDict()
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="shard")
        # This pool sends all requests, so there are at most `threads` at once. Waiting for pieces
        # happens in the other pool; in one pool, all threads could wait and none would fetch.
        self._pieces = ThreadPoolExecutor(threads, thread_name_prefix="piece")

    def prepare(self, stretch: Stretch) -> "BufferParts":
        """Start fetching the parts of a stretch and return them."""
        if self._keeps_whole:
            futures = [self._whole(info) for info in stretch.shards]
            return BufferParts(futures, stretch.slot, stretch.offset, stretch.length)
        shard, offset, length, owner = ranges(
            stretch.slot, stretch.offset - HEADER, stretch.length + HEADER, MAX_GAP
        )
        futures = [
            self._pool.submit(self._fetch, stretch.shards[number].key, begin, count)
            for number, begin, count in zip(shard.tolist(), offset.tolist(), length.tolist())
        ]
        return BufferParts(futures, owner, stretch.offset - offset[owner], stretch.length)

    def close(self) -> None:
        """End all threads and free the shards in memory."""
        self._kept.clear()
        self._pool.shutdown(cancel_futures=True)
        self._pieces.shutdown(cancel_futures=True)

    def _whole(self, info: ShardInfo) -> "Future[bytes]":
        kept = self._kept.pop(info.key, None)
        if kept is None or (kept[0].done() and kept[0].exception()):  # retry after a failure
            kept = (self._pool.submit(self._fetch, info.key, 0, info.size), info.size)
        self._kept[info.key] = kept
        while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > self._room:
            self._kept.popitem(last=False)
        return kept[0]

    def _fetch(self, key: str, offset: int, length: int) -> bytes:
        count = max(1, -(-length // MAX_PIECE))
        cuts = [offset + length * i // count for i in range(count + 1)]
        pieces = [
            self._pieces.submit(self._store.get, key, begin, end - begin)
            for begin, end in zip(cuts, cuts[1:])
        ]
        try:
            return b"".join([piece.result(PATIENCE_S) for piece in pieces])
        finally:  # after an error, the other pieces are not needed
            for piece in pieces:
                piece.cancel()


class BufferParts:
    """Parts of one stretch in buffers that are being fetched."""

    def __init__(
        self,
        futures: Sequence["Future[bytes]"],
        buffer: NDArray[np.int64],
        start: NDArray[np.int64],
        length: NDArray[np.int64],
    ) -> None:
        self._futures = futures
        self._bodies: list[Any] = [None] * len(futures)
        self._buffer, self._start = buffer.tolist(), start.tolist()
        self._end = (start + length).tolist()

    def read(self, first: int, end: int) -> list[bytes]:
        """Return the bytes of parts first ... end - 1; waits for them."""
        buffers, bodies = self._buffer[first:end], self._bodies
        for number in set(buffers):
            if bodies[number] is None:
                bodies[number] = self._futures[number].result(PATIENCE_S)
        bounds = zip(buffers, self._start[first:end], self._end[first:end])
        return [bodies[number][begin:stop] for number, begin, stop in bounds]

    def headers(self, first: int, end: int) -> list[bytes]:
        """Return the tar headers, 512 bytes each, of parts that have been read."""
        bounds = zip(self._buffer[first:end], self._start[first:end])
        return [self._bodies[number][start - HEADER : start] for number, start in bounds]


def ranges(
    shard: NDArray[np.int64], offset: NDArray[np.int64], length: NDArray[np.int64], max_gap: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Merge spans [p] of shards that overlap or lie at most `max_gap` apart.

    Returns:
        Shard, offset and length of the ranges in order of first use, int64 [r] each; and for each
        span, the range that contains it, int64 [p].
    """
    order = np.lexsort((offset, shard))
    shard_, begin = shard[order], offset[order]
    # Place shards in one address space, so far apart that no span reaches into the next shard.
    base = shard_ * (1 << 44)
    reach = np.maximum.accumulate(base + begin + length[order])
    fresh = np.ones(order.size, np.bool_)
    fresh[1:] = base[1:] + begin[1:] > reach[:-1] + max_gap
    number = np.cumsum(fresh) - 1
    heads = np.flatnonzero(fresh)
    tails = np.append(heads, order.size)[1:] - 1
    owner = np.empty(order.size, np.int64)
    owner[order] = number
    length_ = reach[tails] - base[heads] - begin[heads]
    # Order by first use, so that requests are sent in the order of need.
    owner, used = by_first_use(owner)
    return shard_[heads][used], begin[heads][used], length_[used], owner
