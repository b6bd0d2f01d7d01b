"""Store in the memory of this process, shared by name, for tests and small uses."""

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from data_pipeline.store.objects import (
    CheckedPieces,
    MissingKey,
    ObjectInfo,
    Unfinished,
    Versions,
    Written,
    check_key,
    check_range,
    object_changed,
    short_object,
)
from data_pipeline.store.stats import Counted


class _Objects:
    """Objects of one store name: key -> (bytes, ETag)."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.held: dict[str, tuple[bytes, str]] = {}


_NAMES: dict[str, _Objects] = {}
_NAMES_LOCK = threading.Lock()


class MemoryStore(Counted):
    """Store in memory. All stores with the same name in one process share their objects.

    The objects stay until the process ends or `clear` is called; other processes do not see them.

    Args:
        name: name of the set of objects; its first use creates it.
        prefix: keys are relative to it, as in S3.
    """

    def __init__(self, name: str, prefix: str = "") -> None:
        super().__init__()
        self._prefix = f"{prefix.strip('/')}/" if prefix.strip("/") else ""
        self.uri = f"memory://{name}/{self._prefix}".rstrip("/")
        with _NAMES_LOCK:
            self._objects = _NAMES.setdefault(name, _Objects())
        self._versions = Versions()

    def close(self) -> None:
        """See `Store.close`. The objects stay, because another store may use the name."""

    def clear(self) -> None:
        """Remove all objects under this prefix, for every store with this name."""
        with self._objects.lock:
            for name in [key for key in self._objects.held if key.startswith(self._prefix)]:
                del self._objects.held[name]

    def _find(self, key: str) -> tuple[bytes, str]:
        self.count(requests=1)
        with self._objects.lock:
            found = self._objects.held.get(self._prefix + check_key(key))
        if found is None:
            raise MissingKey(f"{self.uri}/{key}: no such object; check the name, or ingest it")
        return found

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`."""
        check_range(offset, length)
        data, found = self._find(key)
        if etag is not None and etag != found:
            raise object_changed(f"{self.uri}/{key}", etag)
        if etag is None:
            self._versions.check(self.uri, key, found)
        part = data[offset : None if length is None else offset + length]
        self.count(bytes=len(part))
        if length is not None and len(part) != length:
            raise short_object(f"{self.uri}/{key}", offset, length, len(part))
        return part

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        data, etag = self._find(key)
        return ObjectInfo(len(data), etag)

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`."""
        with self._objects.lock:
            return self._put(key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store.put_new`."""
        with self._objects.lock:
            if self._prefix + check_key(key) in self._objects.held:
                return False
            self._put(key, data)
            return True

    def _put(self, key: str, data: bytes) -> ObjectInfo:
        data = bytes(data)  # the object must not change with a caller's bytearray
        etag = f'"{hashlib.blake2b(data, digest_size=16).hexdigest()}"'
        self._objects.held[self._prefix + check_key(key)] = (data, etag)
        self._versions.wrote(key, etag)
        self.count(requests=1, written=len(data))
        return ObjectInfo(len(data), etag)

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """See `Store.put_file`; here the object is held in memory."""
        info = self.put(key, Path(path).read_bytes())
        if sent is not None:
            sent(info.size)
        return info

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """See `Store.put_verified`."""
        pieces = CheckedPieces(f"{self.uri}/{key}", size, sha256, read, 1 << 20)
        return Written(self.put(key, b"".join(pieces)), pieces.sha256, confirmed=True)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self.count(requests=1)
        with self._objects.lock:
            self._objects.held.pop(f"{self._prefix}{check_key(key)}", None)

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`; there is only one version."""
        self.count(requests=1)
        with self._objects.lock:
            gone = self._objects.held.pop(f"{self._prefix}{check_key(key)}", None)
        return int(gone is not None)

    def discard(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """See `Store.discard`."""
        for key in keys:
            self.delete_versions(key)
        return []

    def unfinished(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.unfinished`; writes are atomic here, so nothing is left over."""
        return []

    def drop_unfinished(self, one: Unfinished) -> None:
        """See `Store.drop_unfinished`."""

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.bygone`; only one version is kept."""
        return []

    def drop_bygone(self, ones: Sequence[Unfinished]) -> list[tuple[str, str]]:
        """See `Store.drop_bygone`."""
        return []

    def list_folders(self, prefix: str = "") -> list[str]:
        """See `Store.list_folders`."""
        self.count(requests=1)
        start, base = self._prefix + prefix, len(self._prefix)
        with self._objects.lock:
            keys = [key for key in self._objects.held if key.startswith(start)]
        return sorted({key[base:end] for key in keys if (end := key.find("/", len(start))) >= 0})

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        self.count(requests=1)
        base = self._prefix
        with self._objects.lock:
            return sorted(
                key[len(base) :] for key in self._objects.held if key.startswith(base + prefix)
            )
