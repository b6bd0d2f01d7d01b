"""S3 as a store: what botocore leaves to its users.

botocore retries a request that fails but not a body that breaks while it is read, counts attempts
and not time, and knows nothing of the other processes of a node. Here it sends each request once;
`S3Store` and its base class `S3Requests` do the rest:

1. What may succeed later is sent again with full jitter, until `patience` seconds passed without
   progress (`retry`, `s3_answers`).
2. A body that breaks goes on from the last byte it has, with `If-Match` on the ETag it saw first:
   a resumed body never mixes two versions of an object (`s3_read`).
3. A read that is late is sent a second time (`hedge`).
4. Every request, with retries, hedges and parts, asks the node's budget first (`budget`).
5. When the server calls the credentials expired, they are fetched once more.
6. An answer in a wrong form is not believed (`s3_form`), nor is a refusal without an error code
   from a server that has answered well before: the request is sent again. A HEAD has no body to
   name the reason of a refusal, so a GET of one byte asks for it. A changed ETag counts once a HEAD
   confirms it.
7. The store does without features that not every server has (conditions, checksums, deleting many,
   listing uploads), and logs that once.

The client itself is made in `store`, the only file that imports boto3.
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

_MULTIPART = 16 << 20  # files of this size and more go up in parts
_MOST_HEDGED = 32 << 20  # a second read of more would cost more than it saves
_MOST_AT_ONCE = 1000  # objects of one DeleteObjects
_LISTING = {"ContinuationToken": "NextContinuationToken"}
_DELETE_THREADS = 8  # where each object takes a request of its own


class S3Store(S3Requests):
    """A bucket, or a prefix of one, behind the S3 protocol. `store.open_store` makes it."""

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`. A request for 0 bytes is answered without asking the server."""
        check_range(offset, length)
        if length == 0:
            return b""
        with self._tries(key) as tries:
            return self._get(key, offset, length, etag, tries)

    def _get(
        self, key: str, offset: int, length: int | None, etag: str | None, tries: Tries
    ) -> bytes:
        name = self._key(key)
        # Not every server heeds If-Match.
        check = partial(self._check_version, key, etag)
        pieces: list[bytes] = []
        done = fresh = 0  # bytes read, and those of them that are no progress yet
        while True:
            rest = None if length is None else length - done
            client = self._client
            ask = partial(self._ask_for, client, name)
            read = self._run(
                partial(
                    *(BodyRead, f"{self.uri}/{key}", ask, check, self.count),
                    *(offset + done, rest, etag, self._patience / 3),  # other connections follow
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
        return b"".join(pieces)  # of one piece: that piece, without a copy

    def _check_version(self, key: str, wanted: str | None, etag: str) -> None:
        if wanted is None:
            self._versions.check(self.uri, key, etag)
        elif not same_version(wanted, etag):
            raise object_changed(f"{self.uri}/{key}", wanted)

    def _run(self, make: Callable[[], BodyRead], size: int | None) -> BodyRead:
        """Do one read, with a second one beside it if it is late."""
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
        except ObjectChanged:  # HTTP 412: the condition does not hold
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
        """See `Store.put_file`. Large files go up in parts; the object appears with the last."""
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
        """See `Store.put_verified`. Large objects go up in parts, and appear with the last."""
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
        """Take back uploads in parts that were never completed; returns how many there were.

        A writer that was killed leaves them: they are listed nowhere and cost what they hold.

        Args:
            prefix: of the keys.
            but: tells of a key whether to leave it alone, because it is being written; asked
                after the listing.
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
        with suppress(MissingKey):  # it has just ended by itself
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
        except NotSupported:  # of a server that keeps none
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
        """Remove objects or versions; returns (key, reason) of those that stay."""
        kept: dict[str, str] = {}
        for first in range(0, len(wanted), _MOST_AT_ONCE):
            batch = wanted[first : first + _MOST_AT_ONCE]
            many = partial(self._delete_batch, batch)
            kept |= self._optional("DeleteObjects", many, partial(self._delete_each, batch))
        return list(kept.items())

    def _delete_batch(self, batch: Sequence[dict[str, str]]) -> dict[str, str]:
        """Send DeleteObjects, whose answer 200 may hold an error for each key.

        Objects whose removal may succeed later are removed by requests of their own.
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
        """Remove each by a request of its own, for a server without DeleteObjects."""

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
        """See `Store.drop_bygone`. A marker stays: without it an older version would come back."""
        return self._delete_many(
            [{"Key": self._key(one.key), "VersionId": one.mark} for one in ones]
        )

    def delete_versions(self, key: str) -> int:
        """See `Store.delete_versions`. One by one: what is refused comes as an error of its own."""
        found = self._versions_of(key).get(key, [])
        for version in found:
            self._call("delete_object", key, VersionId=version)
        with suppress(MissingKey):
            self.head(key)
            self.delete(key)
            return max(1, len(found))
        return len(found)

    def set_hold(self, key: str, *, on: bool) -> None:
        """Set or end the legal hold of an object's newest version.

        Raises:
            StoreError: the bucket has no object lock, or this user may not.
        """
        self._call("put_object_legal_hold", key, LegalHold={"Status": "ON" if on else "OFF"})

    def list_folders(self, prefix: str = "") -> list[str]:
        """See `Store.list_folders`; up to 1,000 in a request."""
        pages = self._pages("list_objects_v2", prefix, _LISTING, Delimiter="/")
        found = (folder["Prefix"] for page in pages for folder in page.get("CommonPrefixes", ()))
        return sorted({name.removesuffix("/")[len(self._base) :] for name in found})

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        pages = self._pages("list_objects_v2", prefix, _LISTING)
        found = (item["Key"] for page in pages for item in page.get("Contents", ()))
        return sorted(key[len(self._base) :] for key in found if not _is_marker(key))


def _is_marker(name: str) -> bool:
    """Whether a key stands for a folder: consoles of other programs make such, without bytes."""
    return name.endswith("/")
