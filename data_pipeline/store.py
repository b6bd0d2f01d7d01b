"""Objects by key, in an S3 bucket or a folder, with the failures of real networks handled here.

boto3 retries a request that fails, but not a body that breaks while it is read: a reset or a
truncated body surfaces as an exception whatever its retry mode. `S3Store.get` therefore resumes
with a Range from the last byte it has and `If-Match` on the ETag it saw first, so that a resumed
body can never mix two versions of an object.

Credentials come only from boto3's own chain (environment, profile, instance role); none is an
argument, kept in an attribute or written into a message.
"""

import os
import time
from typing import Any, NoReturn
from urllib.parse import urlsplit

import boto3.exceptions
import boto3.session
from boto3.s3.transfer import TransferConfig
from botocore import exceptions as aws
from botocore.config import Config

from data_pipeline.objects import (
    AccessDenied,
    Counter,
    FolderStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    ObjectInfo,
    Span,
    Store,
    StoreError,
    StoreStats,
    StoreUnavailable,
    access_denied,
    check_key,
    check_range,
    get_many,
    object_changed,
    short_object,
)

__all__ = [
    "AccessDenied",
    "FolderStore",
    "MissingBucket",
    "MissingKey",
    "ObjectChanged",
    "ObjectInfo",
    "S3Store",
    "Span",
    "Store",
    "StoreError",
    "StoreStats",
    "StoreUnavailable",
    "get_many",
    "open_store",
]

# A body is read in pieces of this size. A piece that breaks is lost as a whole, so it is small.
_PIECE = 64 << 10
# A body that broke after at least this much progress starts a fresh count of attempts: a large
# object on a poor line is slow, not hopeless.
_PROGRESS = 1 << 20
_BROKEN_BODY = (aws.ReadTimeoutError, aws.ResponseStreamingError, aws.IncompleteReadError)


class S3Store:
    """A bucket, or a prefix of one, behind the S3 protocol."""

    def __init__(
        self,
        bucket: str,
        prefix: str = "",
        *,
        endpoint: str | None = None,
        connect_timeout: float = 5.0,
        read_timeout: float = 30.0,
        attempts: int = 6,
        pool: int = 32,
    ) -> None:
        """See `open_store` for the arguments."""
        self.bucket, self._prefix = bucket, prefix.strip("/")
        self.uri = f"s3://{bucket}/{self._prefix}".rstrip("/")
        self._counter = Counter()
        self._attempts = attempts
        session = boto3.session.Session()
        self._client = session.client(
            "s3",
            endpoint_url=endpoint,
            # Servers other than Amazon's rarely care, but a signature needs some region.
            region_name=session.region_name or "us-east-1",
            config=Config(
                connect_timeout=connect_timeout,
                read_timeout=read_timeout,
                max_pool_connections=pool,
                retries={"mode": "standard", "total_max_attempts": attempts},
                signature_version="s3v4",
                # A bucket as a host name does not resolve on a private endpoint.
                s3={"addressing_style": "path" if endpoint else "auto"},
                # Every read is checked against the index by its reader; a second sum costs CPU.
                request_checksum_calculation="when_required",
                response_checksum_validation="when_required",
            ),
        )
        self._client.meta.events.register("before-send.s3", self._count)

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r})"

    @property
    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._counter.stats

    def _count(self, **_: object) -> None:
        self._counter.add(requests=1)

    def _key(self, key: str) -> str:
        check_key(key)
        return f"{self._prefix}/{key}" if self._prefix else key

    def get(
        self, key: str, offset: int = 0, length: int | None = None, *, etag: str | None = None
    ) -> bytes:
        """See `Store.get`. A request for 0 bytes is answered without asking the server."""
        check_range(offset, length)
        if length == 0:
            return b""
        data, failures, resumed_at = bytearray(), 0, 0
        while True:
            body, etag, whole = self._open(key, offset, len(data), length, etag)
            try:
                for piece in body.iter_chunks(_PIECE):
                    data += piece
                    self._counter.add(received=len(piece))
                break
            except _BROKEN_BODY as error:
                if len(data) == whole:
                    break  # every byte had arrived before the connection went
                progress = len(data) - resumed_at
                failures = 1 if progress >= _PROGRESS else failures + 1
                if failures >= self._attempts:
                    raise self._unavailable(key, f"the body broke off {failures} times") from error
            finally:
                body.close()
            resumed_at = len(data)
            self._counter.add(resumes=1)
            time.sleep(min(0.05 * 2**failures, 2.0))
        if length is not None and len(data) != length:
            raise short_object(f"{self.uri}/{key}", offset, length, len(data))
        return bytes(data)

    def _open(
        self, key: str, offset: int, done: int, length: int | None, etag: str | None
    ) -> tuple[Any, str, int]:
        """Start (or resume after `done` bytes) a read: body, ETag, and bytes to have in the end."""
        request: dict[str, Any] = {}
        start = offset + done
        if start or length is not None:
            request["Range"] = f"bytes={start}-{'' if length is None else offset + length - 1}"
        if etag is not None:
            request["IfMatch"] = etag
        reply = self._call("get_object", key, etag=etag, **request)
        if "Range" in request and reply["ResponseMetadata"]["HTTPStatusCode"] != 206:
            reply["Body"].close()
            raise StoreError(
                f"{self.uri}/{key}: asked for a byte range, the server sent the whole object; "
                "use a server or proxy that honours Range"
            )
        return reply["Body"], reply["ETag"], done + reply["ContentLength"]

    def head(self, key: str) -> ObjectInfo:
        """See `Store.head`."""
        reply = self._call("head_object", key)
        return ObjectInfo(reply["ContentLength"], reply["ETag"])

    def put(self, key: str, data: bytes) -> ObjectInfo:
        """See `Store.put`."""
        reply = self._call("put_object", key, Body=data)
        self._counter.add(written=len(data))
        return ObjectInfo(len(data), reply["ETag"])

    def put_file(self, key: str, path: str | os.PathLike[str]) -> ObjectInfo:
        """See `Store.put_file`. Large files go up in parts; the object appears with the last."""
        name, size = self._key(key), os.stat(path).st_size
        try:
            self._client.upload_file(
                os.fspath(path), self.bucket, name, Config=TransferConfig(max_concurrency=4)
            )
        except (aws.BotoCoreError, aws.ClientError, boto3.exceptions.Boto3Error) as error:
            self._fail(key, error.__cause__ or error.__context__ or error)
        self._counter.add(written=size)
        return self.head(key)

    def list(self, prefix: str = "") -> list[str]:
        """See `Store.list`."""
        base = f"{self._prefix}/" if self._prefix else ""
        pages = self._client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=base + prefix
        )
        try:
            return sorted(
                item["Key"][len(base) :] for page in pages for item in page.get("Contents", ())
            )
        except (aws.BotoCoreError, aws.ClientError) as error:
            self._fail(prefix, error)

    def _call(self, operation: str, key: str, *, etag: str | None = None, **request: Any) -> Any:
        call = getattr(self._client, operation)
        try:
            return call(Bucket=self.bucket, Key=self._key(key), **request)
        except (aws.BotoCoreError, aws.ClientError) as error:
            self._fail(key, error, etag)

    def _unavailable(self, key: str, reason: str) -> StoreUnavailable:
        return StoreUnavailable(
            f"{self.uri}/{key}: gave up after {self._attempts} attempts ({reason}); check that "
            "the endpoint answers and is not throttling, then run again"
        )

    def _fail(self, key: str, error: BaseException, etag: str | None = None) -> NoReturn:
        """Turn a botocore error into one clear sentence; the original stays as its cause."""
        where = f"{self.uri}/{key}"
        if not isinstance(error, aws.ClientError):
            if isinstance(error, aws.NoCredentialsError | aws.PartialCredentialsError):
                raise access_denied(where, "no complete credentials found") from error
            if isinstance(error, aws.HTTPClientError | aws.ConnectionError):
                raise self._unavailable(key, type(error).__name__) from error
            raise StoreError(f"{where}: {error}; correct the name or the configuration") from error
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        if code == "NoSuchBucket" or (status == 404 and not self._bucket_exists()):
            raise MissingBucket(
                f"{where}: there is no bucket {self.bucket!r}; create it or correct the root"
            ) from error
        if status == 404:
            raise MissingKey(
                f"{where}: no such object; check the name, or ingest it first"
            ) from error
        if status in (401, 403):
            raise access_denied(where, code) from error
        if status in (409, 412):
            raise object_changed(where, etag or "unknown") from error
        if status == 416:
            raise StoreError(
                f"{where}: the byte range lies past the end of the object; the index does not "
                "belong to it, ingest the source again"
            ) from error
        if status >= 500 or status == 429:
            raise self._unavailable(key, f"HTTP {status} {code}") from error
        raise StoreError(f"{where}: the server refused: HTTP {status} {code}") from error

    def _bucket_exists(self) -> bool:
        """A HEAD has no body to say which of the two is missing; ask once more, on failure only."""
        try:
            self._client.head_bucket(Bucket=self.bucket)
        except aws.ClientError as error:
            return error.response.get("ResponseMetadata", {}).get("HTTPStatusCode") != 404
        except aws.BotoCoreError:
            return True
        return True


def open_store(
    uri: str | os.PathLike[str],
    *,
    endpoint: str | None = None,
    connect_timeout: float = 5.0,
    read_timeout: float = 30.0,
    attempts: int = 6,
    threads: int = 32,
) -> Store:
    """The store rooted at `uri`: "s3://bucket/prefix", or a folder as a path or "file://...".

    Args:
        uri: the root; all keys are relative to it.
        endpoint: S3 endpoint; None reads AWS_ENDPOINT_URL, and without that means Amazon's own.
        connect_timeout: seconds to reach the server, per attempt.
        read_timeout: seconds without a single byte before an attempt counts as broken.
        attempts: per request, and per body without progress.
        threads: how many threads will read at once; sets the connection pool.

    Raises:
        ValueError: unknown scheme, no bucket, or an endpoint with credentials in it.
    """
    text = os.fspath(uri)
    scheme, rest = text.split("://", 1) if "://" in text else ("", text)
    if scheme in ("", "file"):
        return FolderStore(rest)
    bucket, _, prefix = rest.partition("/")
    if scheme != "s3" or not bucket:
        raise ValueError(f"root {text!r}: use s3://bucket/prefix, file:///folder or a path")
    endpoint = endpoint or os.environ.get("AWS_ENDPOINT_URL") or None
    if endpoint and "@" in urlsplit(endpoint).netloc:
        raise ValueError(
            "the S3 endpoint holds a user name or password; give the bare address and put the "
            "keys into AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )
    return S3Store(
        bucket,
        prefix,
        endpoint=endpoint,
        connect_timeout=connect_timeout,
        read_timeout=read_timeout,
        attempts=attempts,
        pool=threads,
    )
