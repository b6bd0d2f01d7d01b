"""Finds blocks among open blocks, in tiers or in the store, and fetches each once per node.

open blocks      a dict, so no file is opened or verified again
first tier       shared memory if there is one; without a lock
lock of the run  its holder, one thread of the node, looks again in all tiers
                 and fetches missing blocks with one request per run of neighbours
"""

import hashlib
import logging
import resource
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from data_pipeline.cache.node import NodeFolder, RangeLocks
from data_pipeline.cache.tier import BlockId, OpenBlock, Tier

log = logging.getLogger("data_pipeline.cache.cached_store")

# Every open block costs a descriptor, and the process needs others.
_MOST_OPEN = 1024
# Interval at which used blocks get a new time of use and evicted blocks are closed.
_UPKEEP_S = 5.0


class CachedObject:
    """One version of an object, compared by identity.

    Args:
        where: root URI and key, for messages and for the blocks' identity.
        key: key in the store.
        size: size in bytes.
        version: identifies the content.
        block_bytes: size of its blocks, except the last.
    """

    __slots__ = ("_block_bytes", "_digest", "key", "locks", "size", "version", "where")

    def __init__(self, where: str, key: str, size: int, version: str, block_bytes: int) -> None:
        self.where, self.key, self.size, self.version = where, key, size, version
        self._block_bytes = block_bytes
        text = "\0".join((where, version, str(size), str(block_bytes)))
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        # First lock number of its blocks, with room for 2^24 blocks below 2^62. If two objects
        # collide, they only wait for each other sometimes.
        self.locks = int.from_bytes(self._digest[:8], "little") >> 2 & ~0xFFFFFF

    def block(self, index: int) -> BlockId:
        """Return the block that begins at `index * block_bytes`."""
        left = self.size - index * self._block_bytes
        return BlockId(self._digest, index, min(self._block_bytes, left))


Place = tuple[CachedObject, int]  # a block of an object
Read = Callable[[int, int], bytes]  # (start, stop) in a block -> a copy of those bytes
Deliver = Callable[[Place, Read], int]  # copies what it needs of a block; returns the bytes copied


@dataclass(frozen=True)
class CacheStats:
    """Counts of this process since it opened the cache. A read counts once per block it touches.

    Attributes:
        memory_hits, disk_hits, misses: blocks read from memory, from disk and from the store.
        memory_bytes, disk_bytes: bytes read from the tiers.
        fetched_bytes: bytes read from the inner store as blocks.
        waits: number of times this process waited for the lock of a run of blocks.
        corrupt: blocks dropped because of a wrong checksum, length or identity.
        evicted: blocks removed by this process to free space.
        failures: operations that the file system refused.
        off: names of the tiers that are not writable now.
    """

    memory_hits: int = 0
    disk_hits: int = 0
    misses: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    fetched_bytes: int = 0
    waits: int = 0
    corrupt: int = 0
    evicted: int = 0
    failures: int = 0
    off: tuple[str, ...] = ()


class Blocks:
    """Blocks in tiers; missing blocks are fetched by one process at a time.

    Args:
        tiers: tiers with the fastest first; may be empty.
        node: folder shared by the node's processes.
        wait_s: seconds to wait for another process that fetches.
    """

    def __init__(self, tiers: Sequence[Tier], node: NodeFolder, wait_s: float) -> None:
        self._tiers, self._node = tuple(tiers), node
        self._locks = RangeLocks(node.path / "locks", wait_s)
        self._lock = threading.Lock()
        self._open: OrderedDict[Place, OpenBlock] = OrderedDict()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._most_open = _MOST_OPEN if limit < 0 else max(8, min(_MOST_OPEN, limit // 4))
        self._upkeep_at = 0.0
        self._said_unlocked = False
        self._hits, self._bytes = {t.name: 0 for t in tiers}, {t.name: 0 for t in tiers}
        self._misses = self._fetched = self._waits = 0
        if node.first:
            for tier in tiers:
                tier.sweep()

    @property
    def writable(self) -> bool:
        """True if any tier accepts blocks now."""
        return any(tier.writable for tier in self._tiers)

    @property
    def stats(self) -> CacheStats:
        """Current counts."""
        with self._lock:
            return CacheStats(
                memory_hits=self._hits.get("memory", 0),
                disk_hits=self._hits.get("disk", 0),
                misses=self._misses,
                memory_bytes=self._bytes.get("memory", 0),
                disk_bytes=self._bytes.get("disk", 0),
                fetched_bytes=self._fetched,
                waits=self._waits,
                corrupt=sum(tier.corrupt for tier in self._tiers),
                evicted=sum(tier.evicted for tier in self._tiers),
                failures=sum(tier.failures for tier in self._tiers),
                off=tuple(tier.name for tier in self._tiers if not tier.writable),
            )

    def close(self) -> None:
        """Release the open blocks; blocks that readers still use stay valid."""
        with self._lock:
            self._open.clear()

    def serve(self, place: Place, deliver: Deliver, *, anywhere: bool = False) -> bool:
        """Deliver the block if it is open or in the first tier (with `anywhere`, in any tier)."""
        with self._lock:
            block = self._open.get(place)
            if block is not None:
                self._open.move_to_end(place)
                block.used = True
        for tier in self._tiers if anywhere else self._tiers[:1]:
            if block is None and (block := tier.open(place[0].block(place[1]))):
                self._keep_open(place, block)
        return block is not None and self._deliver(place, block, deliver)

    def fetch(
        self,
        run: Sequence[Place],
        read: Callable[[CachedObject, int, int], bytes],
        deliver: Deliver,
    ) -> None:
        """Deliver neighbouring blocks of one object that are missing in the first tier.

        Args:
            run: the blocks, ascending without gaps.
            read: (object, first block, end block) -> bytes of these blocks.
            deliver: called once per block.

        Raises:
            CacheTimeout: another process has been fetching one of these blocks for too long.
            Exception: any error of `read`.
        """
        self._look_after()  # update the times of use before these blocks evict others
        known, first = run[0]
        what = f"{known.where}, blocks {first} to {run[-1][1]}"
        with self._hold(known.locks + first, len(run), what) as waited:
            with self._lock:
                self._waits += waited
            missing = [place for place in run if not self._serve_lower(place, deliver)]
            for part in neighbours(missing, len(run)):
                self._fetch(part, read, deliver)

    def forget(self, place: Place) -> None:
        """Drop the block from all tiers."""
        with self._lock:
            self._open.pop(place, None)
        for tier in self._tiers:
            tier.drop(place[0].block(place[1]))

    def _fetch(
        self,
        run: Sequence[Place],
        read: Callable[[CachedObject, int, int], bytes],
        deliver: Deliver,
    ) -> None:
        known, first = run[0]
        data = memoryview(read(known, first, first + len(run)))
        with self._lock:
            self._misses += len(run)
            self._fetched += len(data)
        done = 0
        for place in run:
            block = known.block(place[1])
            payload = data[done : done + block.length]
            done += block.length
            for tier in self._tiers:
                tier.put(block, payload)
            deliver(place, lambda start, stop, payload=payload: bytes(payload[start:stop]))

    def _serve_lower(self, place: Place, deliver: Deliver) -> bool:
        """Deliver a block from any tier; a block from a lower tier is copied to the first."""
        if self.serve(place, deliver):
            return True
        for tier in self._tiers[1:]:
            block = tier.open(place[0].block(place[1]))
            if block is not None:
                return self._deliver(place, block, deliver) and self._promote(place, block)
        return False

    def _promote(self, place: Place, block: OpenBlock) -> bool:
        try:
            kept = self._tiers[0].put(
                place[0].block(place[1]), memoryview(block.read(0, block.length))
            )
        except OSError:
            self.forget(place)
        else:
            if not kept:
                self._keep_open(place, block)
        return True

    def _deliver(self, place: Place, block: OpenBlock, deliver: Deliver) -> bool:
        try:
            length = deliver(place, block.read)
        except OSError:
            self.forget(place)
            return False
        with self._lock:
            self._hits[block.tier] += 1
            self._bytes[block.tier] += length
        return True

    def _keep_open(self, place: Place, block: OpenBlock) -> None:
        with self._lock:
            self._open[place] = block
            while len(self._open) > self._most_open:
                self._open.popitem(last=False)
        self._look_after()

    def _look_after(self) -> None:
        """Update times of use of open blocks and close evicted blocks, once per interval."""
        now = time.monotonic()
        with self._lock:
            if now < self._upkeep_at:
                return
            self._upkeep_at = now + _UPKEEP_S
            watched = list(self._open.items())
        for place, block in watched:
            if not block.look_after():
                with self._lock:
                    self._open.pop(place, None)

    @contextmanager
    def _hold(self, first: int, count: int, what: str) -> Iterator[bool]:
        """Hold the lock of a run, or continue without one if locking fails; yield if it waited."""
        with ExitStack() as stack:
            waited = False
            try:
                waited = stack.enter_context(self._locks.hold(first, count, what))
            except OSError as error:  # some systems empty /dev/shm when a user logs out
                with self._lock:
                    said, self._said_unlocked = self._said_unlocked, True
                if not said:
                    log.warning(
                        "the cache has lost its locks (%s): every process now fetches for itself. "
                        "Let nothing clean up in %s, and start again to share. This is said once.",
                        *(error, self._node.path),
                    )
            yield waited


def neighbours(places: Sequence[Place], most: int) -> list[list[Place]]:
    """Divide sorted blocks into runs of neighbours, each with at most `most` blocks."""
    runs: list[list[Place]] = []
    for place in places:
        last = runs[-1] if runs else []
        if last and len(last) < most and last[-1] == (place[0], place[1] - 1):
            last.append(place)
        else:
            runs.append([place])
    return runs
