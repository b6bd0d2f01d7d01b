"""A store with a cache in front of it: memory, then local disk, then the store itself.

    register(key, size, version)          once per object, from the manifest: no HEAD is ever sent
    get / get_many
      -> blocks open in this process       a look-up and a read
      -> block files in shared memory      checked when a process opens them
      -> block files on the local disk     checked the same way
      -> one ranged GET per run of blocks  by one process of the node; the others wait for it

Objects are cut into aligned blocks of `block_bytes`. A block belongs to (root URI and key, version,
size): the endpoint does not matter, and versions never mix. Which version an object has is said by
the caller, who knows it from the manifest (the SHA-256 of the shard). Objects that were not
registered, and reads that name an ETag, go to the inner store as they are.

The cache believes the inner store: a block that was wrong when it came has a right checksum. A
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

# One request fetches at most this much: it is held in memory, once per thread that fetches.
RUN_BYTES = 64 << 20


class CacheConfig(Section):
    """The cache of a node. Processes that give the same values share one."""

    folder: str | None = None
    """Where blocks lie on the local disk; they outlive the run. null: no disk tier.
    [-; data_pipeline/cache/cached_store.py]"""
    disk_bytes: int = Field(default=64 << 30, le=1 << 60)
    """Limit of that folder; a tier holds at least 4 blocks.
    [bytes; data_pipeline/cache/cached_store.py]"""
    memory_bytes: int = Field(default=0, ge=0, le=1 << 60)
    """Limit of the node's shared memory (/dev/shm) for blocks, for all processes together; removed
    when the last of them ends. 0: no memory tier.
    [bytes; data_pipeline/cache/cached_store.py]"""
    block_bytes: int = Field(default=4 << 20, ge=1 << 10, le=1 << 30)
    """What is fetched and kept at once. Larger makes fewer requests; a node that reads only few
    samples of each shard (many nodes) wants smaller ones.
    [bytes; data_pipeline/cache/cached_store.py]"""
    wait_s: float = Field(default=600.0, gt=0, le=86400)
    """How long to wait for another process that fetches the same blocks.
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
        # Several may write a block at the same time, and each needs room.
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
    """`inner` behind a cache; a `Store` itself. Close it, or use it in a `with`.

    Any thread may use it; every process opens its own. It owns `inner` and closes that too.

    Args:
        inner: where the objects are.
        config: see `CacheConfig`.
        versions: key -> (size, version) of objects to register.

    Raises:
        StoreError: there is no folder at all for the locks of this node's processes.
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
        """Leave the node's folder, which goes with its last process, and close the inner store.

        Objects are no longer registered.
        """
        self._objects.clear()
        self._blocks.close()
        self._node.close()
        self._inner.close()

    def register(self, key: str, size: int, version: str) -> None:
        """From now on, cache reads of `key`, an object of `size` bytes.

        Args:
            version: stands for the content: the same for the same bytes, another for others. A
                hash is best; an ETag will do.
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
        """Drop the blocks that hold this range, for the whole node: their bytes proved wrong.

        Other processes that have them open notice when their own check fails.
        """
        objects.check_range(offset, length)
        known = self._objects.get(key)
        if known is not None:
            stop = known.size if length is None else min(known.size, offset + length)
            for index in self._indices(offset, stop):
                self._blocks.forget((known, index))

    def _indices(self, start: int, stop: int) -> range:
        """The blocks that hold [start, stop)."""
        return range(start // self._block_bytes, -(-stop // self._block_bytes))

    # Reads

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`. With an ETag, or for an object not registered: straight through."""
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
        """Read many spans, as `objects.get_many` does, and with the same result.

        The missing blocks of all spans are found first. Each run of neighbours, up to `RUN_BYTES`,
        is one request; up to `threads` are under way at once.

        Raises:
            CacheTimeout: another process has been fetching a block for longer than `wait_s`.
            StoreError: as the inner store does.
        """
        known = self._check(requests)
        cut = _Cut(requests, known, self._block_bytes)
        straight = [i for i, span in enumerate(requests) if span.key not in known]
        # While no tier takes any, what is missing is read without the cache: to fetch whole blocks
        # for small reads and keep none would multiply the bytes.
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
        """Refuse bad ranges; the registered objects among those asked for."""
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
        """See `Store.head`; asks the inner store."""
        return self._inner.head(key)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`. The object is not registered any more."""
        self._objects.pop(key, None)
        return self._inner.put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store.put_new`. The object is not registered any more."""
        self._objects.pop(key, None)
        return self._inner.put_new(key, data)

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """See `Store.put_file`. The object is not registered any more."""
        self._objects.pop(key, None)
        return self._inner.put_file(key, path, sent)

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """See `Store.put_verified`. The object is not registered any more."""
        self._objects.pop(key, None)
        return self._inner.put_verified(key, size, sha256, read)

    def delete(self, key: str) -> None:
        """See `Store.delete`. The object is not registered any more."""
        self._objects.pop(key, None)
        self._inner.delete(key)

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`. The object is not registered any more."""
        self._objects.pop(key, None)
        return self._inner.delete_versions(key)

    def discard(self, keys: Sequence[str]) -> "list[tuple[str, str]]":
        """See `Store.discard`. The objects are not registered any more."""
        for key in keys:
            self._objects.pop(key, None)
        return self._inner.discard(keys)

    def unfinished(self, prefix: str = "") -> "list[Unfinished]":
        """See `Store.unfinished`; asks the inner store."""
        return self._inner.unfinished(prefix)

    def drop_unfinished(self, one: Unfinished) -> None:
        """See `Store.drop_unfinished`."""
        self._inner.drop_unfinished(one)

    def bygone(self, prefix: str = "") -> "list[Unfinished]":
        """See `Store.bygone`; asks the inner store."""
        return self._inner.bygone(prefix)

    def drop_bygone(self, ones: Sequence[Unfinished]) -> "list[tuple[str, str]]":
        """See `Store.drop_bygone`."""
        return self._inner.drop_bygone(ones)

    def list_folders(self, prefix: str = "") -> "list[str]":
        """See `Store.list_folders`; asks the inner store."""
        return self._inner.list_folders(prefix)

    def list(self, prefix: str = "") -> "list[str]":
        """See `Store.list`; asks the inner store."""
        return self._inner.list(prefix)

    @property
    def stats(self) -> StoreStats:
        """What this process asked of the inner store."""
        return self._inner.stats

    @property
    def cache_stats(self) -> CacheStats:
        """What the cache did for this process."""
        return self._blocks.stats


class _Cut:
    """Requests cut at block borders.

    Attributes:
        pieces: request -> the bytes of its pieces, one per block, empty until delivered.
        uses: block -> (request, number of the piece, start, stop) of the pieces that lie in it.
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
        """Take the pieces that lie in this block; how many bytes that was."""
        for i, k, start, stop in self.uses[place]:
            self.pieces[i][k] = read(start, stop)
        return sum(stop - start for _, _, start, stop in self.uses[place])


def _join(config: CacheConfig) -> tuple[NodeFolder, Blocks]:
    """Enter the node's folder and open the tiers."""
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
    """The node's folder, and whether it lies in shared memory; else it only serves for locks."""
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
