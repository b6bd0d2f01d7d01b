"""Where a block is found: open in this process, in a tier, or in the store, fetched once per node.

open blocks      a dict: no file is opened or checked again
first tier       shared memory if there is one; no lock
lock of the run  the one thread of the node that gets it looks again, in all tiers,
                 and fetches what is missing with one request per run of neighbours
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

# Every open block costs a descriptor; the process needs others.
_MOST_OPEN = 1024
# Open blocks that were read are marked as used this often, and those evicted meanwhile let go.
_UPKEEP_S = 5.0


class CachedObject:
    """One version of an object. Compared by identity, so that a new version is another one.

    Args:
        where: root URI and key, for people and for the blocks' identity.
        key: as the store knows it.
        size: in bytes.
        version: what stands for its content.
        block_bytes: size of its blocks, the last one excepted.
    """

    __slots__ = ("_block_bytes", "_digest", "key", "locks", "size", "version", "where")

    def __init__(self, where: str, key: str, size: int, version: str, block_bytes: int) -> None:
        self.where, self.key, self.size, self.version = where, key, size, version
        self._block_bytes = block_bytes
        text = "\0".join((where, version, str(size), str(block_bytes)))
        self._digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
        # Where its blocks' locks begin: room for 2^24 blocks, all below 2^62. Two objects that
        # fall together wait for each other now and then, no more.
        self.locks = int.from_bytes(self._digest[:8], "little") >> 2 & ~0xFFFFFF

    def block(self, index: int) -> BlockId:
        """The block that begins at `index * block_bytes`."""
        left = self.size - index * self._block_bytes
        return BlockId(self._digest, index, min(self._block_bytes, left))


Place = tuple[CachedObject, int]  # a block of an object
Read = Callable[[int, int], bytes]  # (start, stop) in a block -> a copy of those bytes
Deliver = Callable[[Place, Read], int]  # takes what it needs of a block; how many bytes that was


@dataclass(frozen=True)
class CacheStats:
    """Counts of this process since it opened the cache. A read counts once per block it touches.

    Attributes:
        memory_hits, disk_hits, misses: where the blocks that answered reads came from.
        memory_bytes, disk_bytes: bytes handed out from the tiers.
        fetched_bytes: bytes read from the inner store as blocks.
        waits: how often this process waited until another had fetched what it needed.
        corrupt: blocks dropped because their checksum, length or identity was wrong.
        evicted: blocks removed by this process to make room.
        failures: operations that the file system refused.
        off: names of the tiers that are not written to at the moment.
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
    """Finds blocks in tiers and fetches the missing ones, one process at a time.

    Args:
        tiers: fastest first; may be none.
        node: the folder that the node's processes share.
        wait_s: patience with another process that fetches.
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
        """Whether any tier takes blocks at the moment."""
        return any(tier.writable for tier in self._tiers)

    @property
    def stats(self) -> CacheStats:
        """The counts at this moment."""
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
        """Let go of the open blocks; what readers still hold of them stays valid."""
        with self._lock:
            self._open.clear()

    def serve(self, place: Place, deliver: Deliver, *, anywhere: bool = False) -> bool:
        """Deliver the block if it is open here, in the first tier, or (`anywhere`) in any."""
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
        """Deliver neighbouring blocks of one object that the first tier did not have.

        Args:
            run: the blocks, ascending without a gap.
            read: (object, first block, end block) -> the bytes of these blocks.
            deliver: called once per block.

        Raises:
            CacheTimeout: another process has been at one of these blocks for too long.
            Whatever `read` raises.
        """
        self._look_after()  # before others are evicted for these
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
        """As `serve`, from any tier; a block found further down is copied to the first."""
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
        """Now and then: mark open blocks that were read as used, let go of those evicted."""
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
        """Hold the lock of a run, or go on without where locks cannot be; whether it waited."""
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
    """Cut places, sorted by object and index, into runs of neighbours, each at most `most` long."""
    runs: list[list[Place]] = []
    for place in places:
        last = runs[-1] if runs else []
        if last and len(last) < most and last[-1] == (place[0], place[1] - 1):
            last.append(place)
        else:
            runs.append([place])
    return runs
