"""Store with a cache in front: looks in memory, then on local disk, then in the inner store.

    register(key, size, version)          once per object, from the manifest, so no HEAD is sent
    get / get_many
      -> blocks open in this process       a look-up and a read
      -> block files in shared memory      checked when a process opens them
      -> block files on the local disk     checked the same way
      -> one ranged GET per run of blocks  by one process of the node; the others wait for it

Objects are divided into aligned blocks of `block_bytes`. A block is identified by (root URI and
key, version, size), so the endpoint does not matter and versions never mix. The caller gives the
version of an object, which it knows from the manifest (the SHA-256 of the shard). Reads of
unregistered objects, and reads with an ETag, go directly to the inner store.

The cache trusts the inner store: a block that arrived with wrong bytes gets a matching checksum. A
reader whose own check fails calls `forget` for that range and reads again.
"""

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from data_pipeline.cache import node as cache_node
from data_pipeline.cache.blocks import (
    Blocks,
    CachedObject,
    CacheStats,
    Place,
    Read,
    neighbours,
)
from data_pipeline.cache.node import NodeFolder
from data_pipeline.cache.tier import Tier
from data_pipeline.store import objects
from data_pipeline.store.addresses import check_local
from data_pipeline.store.objects import ObjectInfo, Span, Store, StoreError, Unfinished, Written
from data_pipeline.store.stats import StoreStats
from typed_config.section import Section

log = logging.getLogger("data_pipeline.cache.cached_store")

# Maximum size of one request, because each fetching thread holds it in memory.
RUN_BYTES = 64 << 20


class CacheConfig(Section):
    """Cache of a node. Processes with the same values share one cache."""

    folder: str | None = None
    """Folder on the local disk for blocks, which outlive the run. null disables the disk tier.
    [-; data_pipeline/cache/cached_store.py]"""
    disk_bytes: int = Field(default=64 << 30, le=1 << 60)
    """Size limit of that folder; a tier must hold at least 4 blocks.
    [bytes; data_pipeline/cache/cached_store.py]"""
    memory_bytes: int = Field(default=0, ge=0, le=1 << 60)
    """Size limit for blocks in the node's shared memory (/dev/shm), over all processes. The last
    process removes them. 0 disables the memory tier.
    [bytes; data_pipeline/cache/cached_store.py]"""
    block_bytes: int = Field(default=4 << 20, ge=1 << 10, le=1 << 30)
    """Unit of fetching and caching. Larger blocks need fewer requests; use smaller blocks if each
    node reads only few samples per shard (many nodes).
    [bytes; data_pipeline/cache/cached_store.py]"""
    wait_s: float = Field(default=600.0, gt=0, le=86400)
    """Maximum time to wait for another process that fetches the same blocks.
    [s; data_pipeline/cache/cached_store.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.folder is None and not self.memory_bytes:
            raise ValueError(
                "cache: neither folder nor memory_bytes is given; name a folder, give "
                "memory_bytes, or leave the cache out"
            )
        if self.folder is not None and not self.folder.strip():
            raise ValueError("cache: folder is empty; name a folder, or null for no disk tier")
        if self.folder is not None:
            check_local("cache: folder", self.folder)
        # Several processes may write blocks at the same time, and each needs space.
        least = 4 * (self.block_bytes + 4096)
        for name, note in (("disk_bytes", ""), ("memory_bytes", ", or 0 (no memory tier)")):
            value = getattr(self, name)
            if value < least and (value or not note):
                raise ValueError(
                    f"cache: {name} is {value}; allowed: at least {least}{note}; a tier holds at "
                    "least 4 blocks"
                )
        return self


class CachedStore:
    """A `Store` that caches reads of `inner`. Close it, or use it in a `with` statement.

    Any thread may use it; every process opens its own. It owns `inner` and closes it too.

    Args:
        inner: store with the objects.
        config: see `CacheConfig`.
        versions: key -> (size, version) of objects to register.

    Raises:
        StoreError: no folder for the locks of this node's processes can be created.
    """

    def __init__(
        self,
        inner: Store,
        config: CacheConfig,
        versions: Mapping[str, tuple[int, str]] | None = None,
    ) -> None:
        self.uri, self.config = inner.uri, config
        self._inner, self._block_bytes = inner, config.block_bytes
        self._objects: dict[str, CachedObject] = {}
        self._node, self._blocks = _join(config)
        for key, (size, version) in (versions or {}).items():
            self.register(key, size, version)

    def __repr__(self) -> str:
        return f"CachedStore({self._inner!r}, {self.config!r})"

    def __enter__(self) -> "CachedStore":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Leave the node's folder, which the last process removes, and close the inner store.

        All objects are unregistered.
        """
        self._objects.clear()
        self._blocks.close()
        self._node.close()
        self._inner.close()

    def register(self, key: str, size: int, version: str) -> None:
        """Enable caching for reads of an object.

        Args:
            key: key of the object.
            size: size of the object in bytes.
            version: identifies the content, preferably a hash; an ETag also works.
        """
        objects.check_key(key)
        if isinstance(size, bool) or not isinstance(size, int) or size < 0 or not version:
            raise ValueError(
                f"object {key!r}: cannot be cached as size {size!r}, version {version!r}; give "
                "its size in bytes (>= 0) and a version that is not empty, as in the manifest"
            )
        known = self._objects.get(key)
        if known is None or (known.size, known.version) != (size, version):
            where = f"{self.uri}/{key}"
            self._objects[key] = CachedObject(where, key, size, version, self._block_bytes)

    def forget(self, key: str, offset: int = 0, length: int | None = None) -> None:
        """Drop the blocks of a range for the whole node, because their bytes are wrong.

        Other processes that have them open notice it when their own check fails.
        """
        objects.check_range(offset, length)
        known = self._objects.get(key)
        if known is not None:
            stop = known.size if length is None else min(known.size, offset + length)
            for index in self._indices(offset, stop):
                self._blocks.forget((known, index))

    def _indices(self, start: int, stop: int) -> range:
        """Return the numbers of the blocks that hold [start, stop)."""
        return range(start // self._block_bytes, -(-stop // self._block_bytes))

    # Reads

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`. Reads with an ETag or of unregistered objects bypass the cache."""
        known = self._objects.get(key)
        if known is None or etag is not None:
            return self._inner.get(key, offset, length, etag=etag)
        objects.check_range(offset, length)
        rest = max(0, known.size - offset)
        length = rest if length is None else length
        index, start = divmod(offset, self._block_bytes)
        if 0 < length <= min(rest, self._block_bytes - start):  # in one block, which may be open
            found: list[bytes] = []

            def take(_: Place, read: Read) -> int:
                found.append(read(start, start + length))
                return length

            if self._blocks.serve((known, index), take):
                return found[-1]
        return self.get_many([Span(key, offset, length)])[0]

    def get_many(
        self, requests: Sequence[Span], max_gap: int = objects.MAX_GAP, threads: int = 8
    ) -> list[bytes]:
        """Read many spans with the same result as `objects.get_many`.

        It first finds the missing blocks of all spans. Each run of neighbouring blocks, up to
        `RUN_BYTES`, is one request; up to `threads` requests run at once.

        Raises:
            CacheTimeout: another process has been fetching a block for longer than `wait_s`.
            StoreError: an error of the inner store.
        """
        known = self._check(requests)
        cut = _Cut(requests, known, self._block_bytes)
        straight = [i for i, span in enumerate(requests) if span.key not in known]
        # While no tier is writable, missing spans are read directly: fetching whole blocks without
        # keeping them would multiply the bytes.
        keep = self._blocks.writable
        places = sorted(cut.uses, key=lambda place: (place[0].key, place[1]))
        missing = [p for p in places if not self._blocks.serve(p, cut.deliver, anywhere=not keep)]
        if keep:
            runs = neighbours(missing, max(1, RUN_BYTES // self._block_bytes))
            objects.in_threads(
                lambda run: self._blocks.fetch(run, self._read, cut.deliver), runs, threads
            )
        else:
            straight += sorted({use[0] for place in missing for use in cut.uses[place]})
        answers = [b"".join(cut.pieces.get(i, ())) for i in range(len(requests))]
        if straight:
            spans = [requests[i] for i in straight]
            read = objects.get_many(self._inner, spans, max_gap, threads)
            for i, data in zip(straight, read, strict=True):
                answers[i] = data
        return answers

    def _check(self, requests: Sequence[Span]) -> dict[str, CachedObject]:
        """Refuse bad ranges and return the registered objects among the requests."""
        known = dict[str, CachedObject]()
        for key, offset, length in requests:
            objects.check_range(offset, length)
            if key in self._objects:
                known[key] = self._objects[key]
                if length and offset + length > known[key].size:
                    held = max(0, known[key].size - offset)
                    raise objects.short_object(known[key].where, offset, length, held)
        return known

    def _read(self, known: CachedObject, first: int, end: int) -> bytes:
        start = first * self._block_bytes
        stop = min(end * self._block_bytes, known.size)
        return self._inner.get(known.key, start, stop - start)

    # The rest of a store

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`; calls the inner store."""
        return self._inner.head(key)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`. It unregisters the object."""
        self._objects.pop(key, None)
        return self._inner.put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store.put_new`. It unregisters the object."""
        self._objects.pop(key, None)
        return self._inner.put_new(key, data)

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """See `Store.put_file`. It unregisters the object."""
        self._objects.pop(key, None)
        return self._inner.put_file(key, path, sent)

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """See `Store.put_verified`. It unregisters the object."""
        self._objects.pop(key, None)
        return self._inner.put_verified(key, size, sha256, read)

    def delete(self, key: str) -> None:
        """See `Store.delete`. It unregisters the object."""
        self._objects.pop(key, None)
        self._inner.delete(key)

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`. It unregisters the object."""
        self._objects.pop(key, None)
        return self._inner.delete_versions(key)

    def discard(self, keys: Sequence[str]) -> "list[tuple[str, str]]":
        """See `Store.discard`. It unregisters the objects."""
        for key in keys:
            self._objects.pop(key, None)
        return self._inner.discard(keys)

    def unfinished(self, prefix: str = "") -> "list[Unfinished]":
        """See `Store.unfinished`; calls the inner store."""
        return self._inner.unfinished(prefix)

    def drop_unfinished(self, one: Unfinished) -> None:
        """See `Store.drop_unfinished`."""
        self._inner.drop_unfinished(one)

    def bygone(self, prefix: str = "") -> "list[Unfinished]":
        """See `Store.bygone`; calls the inner store."""
        return self._inner.bygone(prefix)

    def drop_bygone(self, ones: Sequence[Unfinished]) -> "list[tuple[str, str]]":
        """See `Store.drop_bygone`."""
        return self._inner.drop_bygone(ones)

    def list_folders(self, prefix: str = "") -> "list[str]":
        """See `Store.list_folders`; calls the inner store."""
        return self._inner.list_folders(prefix)

    def list(self, prefix: str = "") -> "list[str]":
        """See `Store.list`; calls the inner store."""
        return self._inner.list(prefix)

    @property
    def stats(self) -> StoreStats:
        """Counts of this process's requests to the inner store."""
        return self._inner.stats

    @property
    def cache_stats(self) -> CacheStats:
        """Counts of this process's cache hits, misses and failures."""
        return self._blocks.stats


class _Cut:
    """Requests divided at block boundaries.

    Attributes:
        pieces: request -> bytes of its pieces, one per block, empty until delivered.
        uses: block -> (request, number of the piece, start, stop) of the pieces in it.
    """

    def __init__(
        self, requests: Sequence[Span], known: Mapping[str, CachedObject], size: int
    ) -> None:
        self.pieces: dict[int, list[bytes]] = {}
        self.uses: dict[Place, list[tuple[int, int, int, int]]] = {}
        for i, (key, offset, length) in enumerate(requests):
            if key not in known or not length:
                continue
            stop = offset + length
            indices = range(offset // size, -(-stop // size))
            self.pieces[i] = [b""] * len(indices)
            for k, index in enumerate(indices):
                begin = index * size
                use = (i, k, max(offset - begin, 0), min(stop - begin, size))
                self.uses.setdefault((known[key], index), []).append(use)

    def deliver(self, place: Place, read: Read) -> int:
        """Copy the pieces in this block and return their number of bytes."""
        for i, k, start, stop in self.uses[place]:
            self.pieces[i][k] = read(start, stop)
        return sum(stop - start for _, _, start, stop in self.uses[place])


def _join(config: CacheConfig) -> tuple[NodeFolder, Blocks]:
    """Join the node's folder and open the tiers."""
    folder = os.path.abspath(os.path.expanduser(config.folder)) if config.folder else None
    text = repr((folder, config.disk_bytes, config.memory_bytes, config.block_bytes))
    name = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    node, in_memory = _enter(name, config.wait_s)
    tiers: list[Tier] = []
    if config.memory_bytes and in_memory:
        tiers.append(
            Tier("memory", node.path / "blocks", config.memory_bytes, wait_s=config.wait_s)
        )
    if folder is not None:
        tiers.append(Tier("disk", Path(folder), config.disk_bytes, wait_s=config.wait_s))
    if config.memory_bytes and not in_memory:
        log.warning(
            "the cache has no memory tier: no folder can be made in %s. Mount a tmpfs there, or "
            "set memory_bytes to 0.",
            cache_node.SHARED_MEMORY,
        )
    return node, Blocks(tiers, node, config.wait_s)


def _enter(name: str, wait_s: float) -> tuple[NodeFolder, bool]:
    """Return the node's folder, and whether it is in shared memory, not only for locks."""
    problems: list[str] = []
    for parent in (cache_node.SHARED_MEMORY, Path(tempfile.gettempdir())):
        try:
            return NodeFolder(parent, name, wait_s), parent == cache_node.SHARED_MEMORY
        except OSError as error:
            problems.append(str(error))
    raise StoreError(
        f"the cache has no place for its locks ({'; '.join(problems)}); make /dev/shm or the "
        "folder for temporary files writable, or run without the cache"
    )
