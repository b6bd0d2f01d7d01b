"""S3 store: adds resumable reads, retries by time, hedging and a node-wide budget to botocore.

botocore retries failed requests but not bodies that break while they are read. It limits attempts
instead of time and does not know the other processes of a node. Here it sends each request once;
`S3Store` and its base class `S3Requests` do the rest:

1. Requests with transient errors are sent again with full jitter, until `patience` seconds pass
   without progress (`retry`, `s3_answers`).
2. A broken body is resumed after the last received byte, with `If-Match` on the ETag seen first, so
   a resumed body never mixes two versions of an object (`s3_read`).
3. A late read is sent a second time (`hedge`).
4. Every request, including retries, hedges and parts, waits for the node's budget (`budget`).
5. If the server reports expired credentials, they are fetched once more.
6. A malformed response is ignored (`s3_form`), and so is a refusal without an error code from a
   server that has responded correctly before; the request is sent again. A HEAD response has no
   body with the reason of a refusal, so a GET of one byte requests it. A changed ETag is accepted
   only after a HEAD confirms it.
7. The store works without features that some servers lack (conditions, checksums, bulk deletion,
   listing of uploads), and logs each missing feature once.

The client is made in `store.open`, the only module that imports boto3.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from data_pipeline.store.multipart import crc32_of, md5_of, part_size, put_parts, put_pieces
from data_pipeline.store.objects import (
    AccessDenied,
    CheckedPieces,
    MissingKey,
    NotSupported,
    ObjectChanged,
    ObjectInfo,
    StoreError,
    Unfinished,
    Written,
    check_range,
    in_threads,
    object_changed,
    same_version,
    short_object,
)
from data_pipeline.store.retry import Tries
from data_pipeline.store.s3_answers import TRANSIENT, meaning_of
from data_pipeline.store.s3_form import check_deleted
from data_pipeline.store.s3_read import PROGRESS, BodyRead
from data_pipeline.store.s3_requests import S3Requests

_MULTIPART = 16 << 20  # files of at least this size are uploaded in parts
_MOST_HEDGED = 32 << 20  # hedging a larger read would cost more than it saves
_MOST_AT_ONCE = 1000  # maximum number of objects per DeleteObjects
_LISTING = {"ContinuationToken": "NextContinuationToken"}
_DELETE_THREADS = 8  # used if each object needs a separate request


class S3Store(S3Requests):
    """Store in a bucket, or in a prefix of a bucket; made by `open_store`."""

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`. A read of 0 bytes sends no request."""
        check_range(offset, length)
        if length == 0:
            return b""
        with self._tries(key) as tries:
            return self._get(key, offset, length, etag, tries)

    def _get(
        self, key: str, offset: int, length: int | None, etag: str | None, tries: Tries
    ) -> bytes:
        name = self._key(key)
        # Some servers ignore If-Match.
        check = partial(self._check_version, key, etag)
        pieces: list[bytes] = []
        done = fresh = 0  # bytes read in total, and since the last progress
        while True:
            rest = None if length is None else length - done
            client = self._client
            ask = partial(self._ask_for, client, name)
            read = self._run(
                partial(
                    *(BodyRead, f"{self.uri}/{key}", ask, check, self.count),
                    # A third of the patience leaves time for other connections.
                    *(offset + done, rest, etag, self._patience / 3),
                ),
                rest,
            )
            etag = etag or read.etag
            pieces += read.pieces
            done, fresh = done + read.got, fresh + read.got
            if read.error is None:
                self._answers = True
                break
            if fresh >= PROGRESS:
                tries.progress()
                fresh = 0
            self._again(key, read.error, tries, client, read, etag)
            self.count(resumes=int(read.opened))
        if length is not None and done != length:
            raise short_object(f"{self.uri}/{key}", offset, length, done)
        return b"".join(pieces)  # does not copy a single piece

    def _check_version(self, key: str, wanted: str | None, etag: str) -> None:
        if wanted is None:
            self._versions.check(self.uri, key, etag)
        elif not same_version(wanted, etag):
            raise object_changed(f"{self.uri}/{key}", wanted)

    def _run(self, make: Callable[[], BodyRead], size: int | None) -> BodyRead:
        """Run one read, with a second one in parallel if it is late."""
        first, hedger = make(), self._hedger
        if hedger is None or size is None or size > _MOST_HEDGED:
            first.run()
            return first
        read, late = first, False
        if (delay := hedger.delay(size)) is None:
            first.run()
        else:
            read, late = hedger.race(first, make, delay, self._may_hedge)
        if late:
            self.count(hedges=1, hedges_won=int(read is not first))
        if read.error is None and first.sent is not None:
            hedger.note(size, time.monotonic() - first.sent)
        return read

    def _may_hedge(self) -> bool:
        calm = time.monotonic() >= self._calm_at
        return calm and (self._budget is None or self._budget.spare())

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        reply = self._call("head_object", key)
        return ObjectInfo(reply["ContentLength"], reply["ETag"])

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`."""
        reply = self._call("put_object", key, Body=data, ContentMD5=md5_of(data))
        self.count(written=len(data))
        self._versions.wrote(key, reply["ETag"])
        return ObjectInfo(len(data), reply["ETag"])

    def put_new(self, key: str, data: bytes) -> bool:
        """See `Store.put_new`."""
        put = partial(self._call, "put_object", key, Body=data, ContentMD5=md5_of(data))

        def unless_there() -> Any:
            with suppress(MissingKey):
                self.head(key)
                return None
            return put()

        try:
            condition = partial(put, IfNoneMatch="*")
            reply = self._optional("If-None-Match in PUT", condition, unless_there)
        except ObjectChanged:  # HTTP 412: the object exists
            return False
        if reply is None:
            return False
        self.count(written=len(data))
        self._versions.wrote(key, reply["ETag"])
        return True

    def put_file(
        self,
        key: str,
        path: str | os.PathLike[str],
        sent: Callable[[int], None] | None = None,
    ) -> ObjectInfo:
        """See `Store.put_file`. Large files are uploaded in parts and appear at the end."""
        size = os.stat(path).st_size
        if size < _MULTIPART:
            with open(path, "rb") as file:
                info = self.put(key, file.read())
            if sent is not None:
                sent(info.size)
            return info
        put_parts(self._call, key, path, size, sent)
        self.count(written=size)
        info = self.head(key)
        if info.size != size:
            raise StoreError(
                f"{self.uri}/{key}: {size} bytes were sent, the object has {info.size}; another "
                "writer uses this key"
            )
        self._versions.wrote(key, info.etag)
        return info

    def put_verified(
        self, key: str, size: int, sha256: str | None, read: Callable[[int, int], bytes]
    ) -> Written:
        """See `Store.put_verified`. Large objects are uploaded in parts and appear at the end."""
        pieces = CheckedPieces(f"{self.uri}/{key}", size, sha256, read, part_size(size))
        whole = None if size >= _MULTIPART else b"".join(pieces)

        def put(sums: bool) -> tuple[str, bool]:
            if whole is None:
                return put_pieces(self._call, key, pieces, sums=sums)
            mine = crc32_of(whole) if sums else ""
            check: dict[str, Any] = (
                {"ChecksumCRC32": mine} if mine else {"ContentMD5": md5_of(whole)}
            )
            reply = self._call("put_object", key, Body=whole, **check)
            return reply["ETag"], bool(mine) and reply.get("ChecksumCRC32") == mine

        feature = "checksums by CRC-32"
        etag, confirmed = self._optional(feature, partial(put, True), partial(put, False))
        self.count(written=size)
        self._versions.wrote(key, etag)
        return Written(ObjectInfo(size, etag), pieces.sha256, confirmed)

    def remove_uploads(self, prefix: str, but: Callable[[str], bool]) -> int:
        """Abort multipart uploads that were never completed, and return their number.

        A killed writer leaves such uploads; they are in no object listing but use storage.

        Args:
            prefix: prefix of the keys.
            but: returns whether to keep the upload of a key because it is still being written;
                called after the listing.
        """
        found = [one for one in self.unfinished(prefix) if not but(one.key)]
        for one in found:
            self.drop_unfinished(one)
        return len(found)

    def unfinished(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.unfinished`; `mark` is the upload's id."""
        marks = {"KeyMarker": "NextKeyMarker", "UploadIdMarker": "NextUploadIdMarker"}
        pages = partial(self._pages, "list_multipart_uploads", prefix, marks)
        found = self._optional("a list of unfinished uploads", lambda: [*pages()], list)
        return sorted(
            Unfinished(upload["Key"][len(self._base) :], upload["UploadId"])
            for page in found
            for upload in page.get("Uploads", ())
            if not _is_marker(upload["Key"])
        )

    def drop_unfinished(self, one: Unfinished) -> None:
        """See `Store.drop_unfinished`."""
        with suppress(MissingKey):  # the upload has just ended
            self._call("abort_multipart_upload", one.key, UploadId=one.mark)

    def delete(self, key: str) -> None:
        """See `Store.delete`."""
        self._call("delete_object", key)

    def _all_versions(self, prefix: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield ("Versions" or "DeleteMarkers", entry) of all versions under a prefix."""
        marks = {"KeyMarker": "NextKeyMarker", "VersionIdMarker": "NextVersionIdMarker"}
        try:
            for page in self._pages("list_object_versions", prefix, marks):
                for kind in ("Versions", "DeleteMarkers"):
                    for one in page.get(kind, ()):
                        if not _is_marker(one["Key"]):
                            yield kind, one
        except NotSupported:  # this server keeps no versions
            return

    def _versions_of(self, prefix: str) -> dict[str, list[str]]:
        """Return key -> ids of all versions and delete markers under a prefix."""
        found: dict[str, list[str]] = {}
        for _, one in self._all_versions(prefix):
            found.setdefault(one["Key"][len(self._base) :], []).append(one["VersionId"])
        return found

    def discard(self, keys: Sequence[str]) -> list[tuple[str, str]]:
        """See `Store.discard`."""
        known = {
            folder: self._versions_of(f"{folder}/" if folder else "")
            for folder in {key.rpartition("/")[0] for key in keys}
        }
        wanted: list[dict[str, str]] = []
        for key in keys:
            versions = known[key.rpartition("/")[0]].get(key)
            one = {"Key": self._key(key)}
            wanted += [one | {"VersionId": v} for v in versions] if versions else [one]
        return self._delete_many(wanted)

    def _delete_many(self, wanted: Sequence[dict[str, str]]) -> list[tuple[str, str]]:
        """Remove objects or versions; return (key, reason) of those that stay."""
        kept: dict[str, str] = {}
        for first in range(0, len(wanted), _MOST_AT_ONCE):
            batch = wanted[first : first + _MOST_AT_ONCE]
            many = partial(self._delete_batch, batch)
            kept |= self._optional("DeleteObjects", many, partial(self._delete_each, batch))
        return list(kept.items())

    def _delete_batch(self, batch: Sequence[dict[str, str]]) -> dict[str, str]:
        """Send DeleteObjects; its response with status 200 may contain errors per key.

        Objects whose removal may succeed later are removed with separate requests.
        """
        which = {"Delete": {"Objects": batch, "Quiet": True}}
        check = partial(check_deleted, asked={one["Key"] for one in batch})
        first = batch[0]["Key"][len(self._base) :]
        reply = self._request("delete_objects", first, which, check=check)
        kept: dict[str, str] = {}
        later: set[str] = set()
        for error in reply.get("Errors", ()):
            code = error.get("Code", "")
            if meaning_of(0, code) in TRANSIENT:
                later.add(error["Key"])
            elif code not in ("NoSuchKey", "NoSuchVersion"):
                told = f"{code}: {error.get('Message', '')}".strip(": ")
                kept[error["Key"][len(self._base) :]] = told
        return kept | self._delete_each([one for one in batch if one["Key"] in later])

    def _delete_each(self, batch: Sequence[dict[str, str]]) -> dict[str, str]:
        """Remove each object with a separate request, for servers without DeleteObjects."""

        def remove(one: dict[str, str]) -> str:
            try:
                self._request("delete_object", one["Key"][len(self._base) :], one)
            except (MissingKey, AccessDenied) as error:
                return "" if isinstance(error, MissingKey) else str(error)
            return ""

        told = zip(batch, in_threads(remove, batch, _DELETE_THREADS))
        return {one["Key"][len(self._base) :]: reason for one, reason in told if reason}

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.bygone`: versions of keys whose newest one is a delete marker.

        The server must say so: one that marks no version as the newest tells of no deletion.
        """
        found: dict[str, list[Unfinished]] = {}
        newest: dict[str, set[str]] = {}
        for kind, one in self._all_versions(prefix):
            key = one["Key"][len(self._base) :]
            if kind == "Versions":
                size = one.get("Size", 0)
                found.setdefault(key, []).append(Unfinished(key, one["VersionId"], size))
            if one.get("IsLatest"):
                newest.setdefault(key, set()).add(kind)
        gone = [ones for key, ones in found.items() if newest.get(key) == {"DeleteMarkers"}]
        return sorted(one for ones in gone for one in ones)

    def drop_bygone(self, ones: Sequence[Unfinished]) -> list[tuple[str, str]]:
        """See `Store.drop_bygone`. Delete markers stay, because they hide older versions."""
        return self._delete_many(
            [{"Key": self._key(one.key), "VersionId": one.mark} for one in ones]
        )

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`. Versions are removed one by one to raise each refusal."""
        found = self._versions_of(key).get(key, [])
        for version in found:
            self._call("delete_object", key, VersionId=version)
        with suppress(MissingKey):
            self.head(key)
            self.delete(key)
            return max(1, len(found))
        return len(found)

    def set_hold(self, key: str, *, on: bool) -> None:
        """Set or clear the legal hold of an object's newest version.

        Raises:
            StoreError: the bucket has no object lock, or this user lacks the right.
        """
        self._call("put_object_legal_hold", key, LegalHold={"Status": "ON" if on else "OFF"})

    def list_folders(self, prefix: str = "") -> list[str]:
        """See `Store.list_folders`; one request returns up to 1,000 folders."""
        pages = self._pages("list_objects_v2", prefix, _LISTING, Delimiter="/")
        found = (folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ()))
        return sorted({name.removesuffix("/")[len(self._base) :] for name in found})

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        pages = self._pages("list_objects_v2", prefix, _LISTING)
        found = (item["Key"] for page in pages for item in page.get("Contents", ()))
        return sorted(key[len(self._base) :] for key in found if not _is_marker(key))


def _is_marker(name: str) -> bool:
    """Return whether a key is an empty folder marker, as created by some S3 consoles."""
    return name.endswith("/")
