"""An in-memory S3 server that replaces botocore's connection; tests may override its answers."""

import io
import re
from collections.abc import Callable
from hashlib import md5
from typing import Any, NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit

import urllib3
from botocore.awsrequest import AWSResponse, HeadersDict

from data_pipeline.store.open import S3Store, open_store
from tests.silent import KEYS

Answer = tuple[int, dict[str, str], bytes]
MODIFIED = "Sun, 29 Nov 2026 07:13:44 GMT"


class Asked(NamedTuple):
    """A request; `query` includes the empty parameters."""

    method: str
    url: str
    key: str
    query: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes


class ImitatedS3:
    """Objects of a bucket "b". `odd` sees each request first and may answer it."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.asked: list[Asked] = []
        self.odd: Callable[[Asked], Answer | None] = lambda _: None

    def once(self, *answers: Answer, method: str = "") -> None:
        """Answer the next requests of a method with these answers, each used once."""
        left = list(answers)
        self.odd = lambda asked: left.pop(0) if left and method in ("", asked.method) else None

    def __call__(self, request: Any, **_: object) -> AWSResponse:
        address = urlsplit(request.url)
        query = parse_qs(address.query, keep_blank_values=True)
        headers = {
            name.lower(): value.decode() if isinstance(value, bytes) else value
            for name, value in request.headers.items()
        }
        body = request.body.read() if hasattr(request.body, "read") else request.body or b""
        key = unquote(address.path).removeprefix("/").removeprefix("b").removeprefix("/")
        asked = Asked(request.method, request.url, key, query, headers, body)
        self.asked.append(asked)
        status, given, content = self.odd(asked) or self._answer(asked)
        if request.method == "HEAD":
            given, content = {"Content-Length": str(len(content)), **given}, b""
        elif "Content-Length" not in given:
            given = {"Content-Length": str(len(content)), **given}
        given = {name: value for name, value in given.items() if value}
        raw = urllib3.HTTPResponse(
            io.BytesIO(content),
            given,
            status,
            preload_content=False,
            decode_content=False,
            request_method=request.method,
        )
        return AWSResponse(request.url, status, HeadersDict(given), raw)

    def _answer(self, asked: Asked) -> Answer:
        if asked.method == "PUT":
            self.objects[asked.key] = asked.body
            return 200, {"ETag": etag_of(asked.body)}, b""
        if asked.method == "DELETE":
            self.objects.pop(asked.key, None)
            return 204, {}, b""
        if not asked.key:
            return listing(sorted(self.objects), asked.query.get("prefix", [""])[0])
        if asked.key not in self.objects:
            return error(404, "NoSuchKey")
        data = self.objects[asked.key]
        headers = {"ETag": etag_of(data), "Last-Modified": MODIFIED}
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", asked.headers.get("range", "")):
            return ranged(data, int(match[1]), match[2], headers)
        return 200, headers, data


def ranged(data: bytes, first: int, last: str, headers: dict[str, str]) -> Answer:
    """Answer a request for a range."""
    if first >= len(data):
        return error(416, "InvalidRange")
    end = min(int(last or len(data)), len(data) - 1)
    return (
        206,
        headers | {"Content-Range": f"bytes {first}-{end}/{len(data)}"},
        data[first : end + 1],
    )


def etag_of(data: bytes) -> str:
    return f'"{md5(data, usedforsecurity=False).hexdigest()}"'


def error(status: int, code: str, message: str = "", more: str = "", **headers: str) -> Answer:
    """Return an error document; header names have underscores for hyphens."""
    text = f"<Error><Code>{code}</Code><Message>{message}</Message>{more}</Error>"
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, text.encode()


def listing(keys: list[str], prefix: str = "", token: str = "") -> Answer:
    """Return a page of ListObjectsV2; a token marks it as truncated."""
    entries = "".join(
        f"<Contents><Key>{key}</Key><Size>1</Size></Contents>"
        for key in keys
        if key.startswith(prefix)
    )
    more = f"<NextContinuationToken>{token}</NextContinuationToken>" if token else ""
    text = (
        f"<?xml version='1.0'?><ListBucketResult><Name>b</Name>{entries}{more}"
        f"<IsTruncated>{'true' if token else 'false'}</IsTruncated></ListBucketResult>"
    )
    return 200, {}, text.encode()


def imitated(monkeypatch: Any, uri: str = "s3://b", **options: Any) -> tuple[S3Store, ImitatedS3]:
    """Return a store, and the imitated server that answers all its requests."""
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("data_pipeline.store.retry.BASE_S", 0.0)  # no delays between retries
    options = {"endpoint": "http://127.0.0.1:9", "hedge": False, "attempts": 6} | options
    store = open_store(uri, **options)
    assert isinstance(store, S3Store)
    server, connect = ImitatedS3(), store._connect

    def connected() -> Any:  # with newly fetched credentials
        client = connect()
        client.meta.events.register("before-send.s3", server)
        return client

    monkeypatch.setattr(store, "_connect", connected)
    store._client.meta.events.register("before-send.s3", server)
    return store, server
