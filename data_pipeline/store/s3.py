"""S3 as a store: what botocore leaves to its users.

botocore retries a request that fails but not a body that breaks while it is read, counts attempts
and not time, and knows nothing of the other processes of a node. Here it sends each request once,
and `S3Store` does the rest:

1. What may succeed later is sent again with full jitter, until `patience` seconds passed without
   progress (`retry`, `s3_answers`).
2. A body that breaks goes on from the last byte it has, with `If-Match` on the ETag it saw first:
   a resumed body never mixes two versions of an object (`s3_read`).
3. A read that is late is sent a second time (`hedge`).
4. Every request, with retries, hedges and parts, asks the node's budget first (`budget`).
5. When the server calls the credentials expired, they are fetched once more.

The client itself is made in `store`, the only file that imports boto3.
"""

import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from data_pipeline.store.budget import Budget
from data_pipeline.store.hedge import Hedger
from data_pipeline.store.multipart import crc32_of, md5_of, part_size, put_parts, put_pieces
from data_pipeline.store.objects import (
    CheckedPieces,
    MissingKey,
    ObjectChanged,
    ObjectInfo,
    StoreError,
    StoreUnavailable,
    Unfinished,
    Versions,
    Written,
    check_key,
    check_range,
    short_object,
)
from data_pipeline.store.retry import Tries
from data_pipeline.store.s3_answers import NOT_IMPLEMENTED, Meaning, failure, status_of
from data_pipeline.store.s3_read import PROGRESS, BodyRead, Sent
from data_pipeline.store.stats import Counted

log = logging.getLogger(__name__)

_MULTIPART = 16 << 20  # files of this size and more go up in parts
_MOST_HEDGED = 32 << 20  # a second read of more would cost more than it saves
_MOST_AT_ONCE = 1000  # objects of one DeleteObjects
_CALM_S = 5.0  # no hedges for so long after the server asked for fewer requests
_LISTING = {"ContinuationToken": "NextContinuationToken"}
_REMARK_S = 10.0  # a failing server is worth a line in the log this often


class S3Store(Counted):
    """A bucket, or a prefix of one, behind the S3 protocol. `store.open_store` makes it.

    Args:
        bucket, prefix: the root.
        connect: makes a boto3 client that sends each request once and calls the function it is
            given before each; reads the credentials anew.
        meaning: what an exception of the client or of a body means, and in few words why; None
            if it is not one of those.
        attempts, pool (threads), patience, hedge, budget: see `open_store`.
        asked: how the endpoint came to be, for messages.
    """

    def __init__(
        self,
        bucket: str,
        prefix: str,
        connect: Callable[[Callable[..., None]], Any],
        meaning: Callable[[Exception], tuple[Meaning, str] | None],
        *,
        attempts: int | None,
        pool: int,
        patience: float,
        hedge: bool,
        budget: Budget | None,
        asked: str,
    ) -> None:
        super().__init__()
        self.bucket, self._prefix = bucket, prefix.strip("/")
        self.uri = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self._meaning, self._patience, self._attempts = meaning, patience, attempts
        self._versions = Versions()
        self._hedger = Hedger(pool) if hedge else None
        self._budget = budget
        self._draw = random.Random()  # of jitter only: seeded by the system, apart from any other
        self._here = threading.local()
        self._renewing = threading.Lock()
        self._closing = threading.Event()
        self._calm_at = self._remark_at = 0.0
        self._no_conditions = False  # whether the server refuses If-None-Match
        self._no_sums = False  # ... and checksums by CRC-32
        self._connect = partial(connect, self._before_send)
        self._client = self._connect()
        self.endpoint: str = self._client.meta.endpoint_url
        self._asked = f"asked {self.endpoint}, {asked}"

    def close(self) -> None:
        """See `Store.close`. Reads under way are left to end; the budget is not closed."""
        self._closing.set()
        if self._hedger:
            self._hedger.close()
        self._client.close()

    def _before_send(self, **_: object) -> None:
        waited = 0.0
        if self._budget is not None:
            waited = self._budget.take(self.uri, self._patience, self._closing)
        self.count(requests=1, budget_wait_s=waited)
        mark: Sent = self._here.mark
        mark.waited, mark.sent = mark.waited + waited, time.monotonic()

    def _key(self, key: str) -> str:
        return self._base + check_key(key)

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
        # With an ETag, If-Match does it.
        check = (lambda _: None) if etag else partial(self._versions.check, self.uri, key)
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
                break
            if fresh >= PROGRESS:
                tries.progress()
                fresh = 0
            self._again(key, read.error, tries, client, read.waited, etag)
            self.count(resumes=int(read.opened))
        if length is not None and done != length:
            raise short_object(f"{self.uri}/{key}", offset, length, done)
        return b"".join(pieces)  # of one piece: that piece, without a copy

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
        unless: dict[str, Any] = {} if self._no_conditions else {"IfNoneMatch": "*"}
        try:
            if self._no_conditions:
                with suppress(MissingKey):
                    self.head(key)
                    return False
            reply = self._call("put_object", key, Body=data, ContentMD5=md5_of(data), **unless)
        except ObjectChanged:  # HTTP 412: the condition does not hold
            return False
        except StoreError as error:
            if self._no_conditions or status_of(error.__cause__) != NOT_IMPLEMENTED:
                raise
            self._no_conditions = True
            return self.put_new(key, data)
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

        def put() -> tuple[str, bool]:
            if whole is None:
                return put_pieces(self._call, key, pieces, sums=not self._no_sums)
            mine = "" if self._no_sums else crc32_of(whole)
            check: dict[str, Any] = (
                {"ChecksumCRC32": mine} if mine else {"ContentMD5": md5_of(whole)}
            )
            reply = self._call("put_object", key, Body=whole, **check)
            return reply["ETag"], bool(mine) and reply.get("ChecksumCRC32") == mine

        try:
            etag, confirmed = put()
        except StoreError as error:
            if self._no_sums or status_of(error.__cause__) != NOT_IMPLEMENTED:
                raise
            self._no_sums = True
            etag, confirmed = put()
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
        return sorted(
            Unfinished(upload["Key"][len(self._base) :], upload["UploadId"])
            for page in self._pages("list_multipart_uploads", prefix, marks)
            for upload in page.get("Uploads", ())
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
                        yield kind, one
        except StoreError as error:  # not of a server that keeps none
            if status_of(error.__cause__) != NOT_IMPLEMENTED:
                raise

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
        """Send DeleteObjects, whose answer 200 may hold an error for each key; returns those."""
        kept: dict[str, str] = {}
        for first in range(0, len(wanted), _MOST_AT_ONCE):
            batch = wanted[first : first + _MOST_AT_ONCE]
            which = {"Delete": {"Objects": batch, "Quiet": True}}
            reply = self._request("delete_objects", batch[0]["Key"][len(self._base) :], which)
            for error in reply.get("Errors", ()):
                if error.get("Code") not in ("NoSuchKey", "NoSuchVersion"):
                    told = f"{error.get('Code')}: {error.get('Message', '')}".strip(": ")
                    kept[error["Key"][len(self._base) :]] = told
        return list(kept.items())

    def bygone(self, prefix: str = "") -> list[Unfinished]:
        """See `Store.bygone`: versions of keys whose newest one is a delete marker."""
        found: dict[str, list[Unfinished]] = {}
        there: set[str] = set()
        for kind, one in self._all_versions(prefix):
            key = one["Key"][len(self._base) :]
            if kind == "Versions":
                size = one.get("Size", 0)
                found.setdefault(key, []).append(Unfinished(key, one["VersionId"], size))
                if one.get("IsLatest"):
                    there.add(key)
        return sorted(one for key, ones in found.items() if key not in there for one in ones)

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
        return sorted(key[len(self._base) :] for key in found)

    def _pages(
        self, operation: str, prefix: str, marks: dict[str, str], **more: str
    ) -> Iterator[Any]:
        """Ask for all pages of a listing; `marks`: parameter -> its next value's name in a page."""
        wanted = {"Prefix": self._base + prefix, **more}
        while True:
            reply = self._request(operation, prefix, wanted)
            yield reply
            if not reply.get("IsTruncated"):
                return
            wanted |= {name: reply[mark] for name, mark in marks.items()}

    @property
    def _base(self) -> str:
        return f"{self._prefix}/" if self._prefix else ""

    def _call(self, operation: str, key: str, *, patience: float | None = None, **more: Any) -> Any:
        return self._request(operation, key, {"Key": self._key(key), **more}, patience)

    def _request(
        self,
        operation: str,
        key: str,
        parameters: dict[str, Any],
        patience: float | None = None,
    ) -> Any:
        """Send a request without a streamed answer until it succeeds or is given up."""
        with self._tries(key, patience) as tries:
            while True:
                client, mark = self._client, Sent()
                try:
                    return self._ask(client, operation, parameters, mark)
                except Exception as error:
                    self._again(key, error, tries, client, mark.waited)

    def _ask(self, client: Any, operation: str, parameters: dict[str, Any], mark: Sent) -> Any:
        """Send one request, once."""
        self._here.mark = mark
        return getattr(client, operation)(Bucket=self.bucket, **parameters)

    def _ask_for(self, client: Any, name: str, mark: Sent, more: dict[str, Any]) -> Any:
        return self._ask(client, "get_object", {"Key": name, **more}, mark)

    def _tries(self, key: str, patience: float | None = None) -> Tries:
        patience = self._patience if patience is None else patience
        what = f"{self.uri}/{key} ({self._asked})"
        return Tries(what, patience, self._attempts, self._draw)

    def _again(
        self,
        key: str,
        error: Exception,
        tries: Tries,
        client: Any,
        waited: float,
        etag: str | None = None,
    ) -> None:
        """Wait until a failed request may be sent again, or raise what the failure means."""
        if isinstance(error, StoreError) or (found := self._meaning(error)) is None:
            raise error
        meaning, reason = found
        if meaning == "expired" and not tries.renewed:
            tries.renewed = True
            self._renew(client)
            return
        if meaning == "throttled":
            self._throttled()
        if meaning not in ("again", "throttled"):
            if meaning == "missing" and not self._bucket_exists():
                meaning = "no_bucket"
            if meaning not in ("missing", "changed", "range"):  # by these it is the right server
                reason = f"{reason}; {self._asked}"
            raise failure(meaning, f"{self.uri}/{key}", self.bucket, reason, etag) from error
        tries.excuse(waited)
        delay = tries.failed()
        if delay is None:
            raise StoreUnavailable(
                f"{self.uri}/{key}: gave up after {tries.failures} attempts ({reason}; no progress "
                f"for {tries.seconds:.0f} s; {self._asked}); check that the endpoint answers "
                "and is not throttling, then run again"
            ) from error
        self._remark(key, tries, reason)
        if self._closing.wait(delay):
            raise StoreUnavailable(
                f"{self.uri}/{key}: the store was closed while this waited to be tried again "
                f"({reason})"
            ) from error
        self.count(retries=1)

    def _throttled(self) -> None:
        self.count(throttled=1)
        self._calm_at = time.monotonic() + _CALM_S
        if self._budget is not None:
            self._budget.throttled()

    def _renew(self, client: Any) -> None:
        """Take the credentials from boto3's chain anew, once for all threads that use `client`."""
        with self._renewing:
            if self._client is client:
                self._client = self._connect()

    def _remark(self, key: str, tries: Tries, reason: str) -> None:
        now = time.monotonic()
        if min(tries.seconds, now - self._remark_at) > _REMARK_S:
            self._remark_at = now
            log.warning(
                "%s/%s: no progress for %.0f s (%s), trying on; giving up after %.0f s",
                *(self.uri, key, tries.seconds, reason, self._patience),
            )

    def _bucket_exists(self) -> bool:
        """A HEAD has no body to say which of the two is missing; ask once more, on failure only."""
        try:
            self._ask(self._client, "head_bucket", {}, Sent())
        except Exception as error:
            found = self._meaning(error)
            return found is None or found[0] not in ("missing", "no_bucket")
        return True
