"""One read of S3 and the names of its failures, without a server. With one: tests/fault."""

import pytest
import urllib3.exceptions
from botocore import exceptions as aws
from botocore.parsers import ResponseParserError

from data_pipeline.store.objects import ObjectChanged, StoreError
from data_pipeline.store.open import _meaning
from data_pipeline.store.s3_read import BodyRead, BrokenBody


class Body:
    """What botocore hands out: a context manager around a stream."""

    def __init__(self, pieces):
        self._pieces, self.closed = list(pieces), False

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def read1(self, _):
        piece = self._pieces.pop(0) if self._pieces else b""
        if isinstance(piece, Exception):
            raise piece
        return piece


def _read(pieces, size=10, status=206, check=lambda _: None, **reply):
    seen, arrived = [], []
    body = Body(pieces)
    answer = {"ResponseMetadata": {"HTTPStatusCode": status}, "ContentLength": size, "ETag": "e"}
    answer = {k: v for k, v in ({"Body": body} | answer | reply).items() if v is not None}

    def ask(_, request):
        seen.append(request)
        return answer

    read = BodyRead("s3://b/k", ask, check, lambda bytes: arrived.append(bytes), 5, 10, "v", 60.0)
    read.run()
    assert seen == [{"Range": "bytes=5-14", "IfMatch": "v"}]
    assert body.closed
    assert arrived == [read.got] == [sum(map(len, read.pieces))]
    return read


def test_a_whole_body():
    read = _read([b"01234", b"56789"])
    assert (read.pieces, read.error, read.etag) == ([b"01234", b"56789"], None, "e")


def test_what_came_before_a_break_is_kept():
    reset = ConnectionResetError("gone")
    read = _read([b"0123", reset])
    assert (read.got, read.error, read.opened) == (4, reset, True)
    assert isinstance(_read([b"0123"]).error, BrokenBody)


def test_a_break_after_the_last_byte_is_none():
    assert _read([b"0123456789", ConnectionResetError("gone")]).error is None


def test_answers_that_cannot_be_trusted_are_refused():
    whole = _read([b"0" * 10], status=200).error
    assert isinstance(whole, StoreError)
    assert "s3://b/k: asked for a byte range" in str(whole)
    unknown = _read([b"0" * 10], ContentLength=None).error
    assert isinstance(unknown, StoreError)
    assert "does not say how long" in str(unknown)

    def other(_):
        raise ObjectChanged("other")

    assert isinstance(_read([b"0" * 10], check=other).error, ObjectChanged)


def test_one_that_is_abandoned_reads_no_further():
    class Leaving(Body):
        def read1(self, size):
            read.abandon()
            return super().read1(size)

        def shutdown(self):
            raise RuntimeError("released already")

    body = Leaving([b"0", b"1", b"2"])
    reply = {"ResponseMetadata": {"HTTPStatusCode": 206}, "ContentLength": 3, "ETag": "e"}
    ask = lambda *_: {"Body": body, **reply}  # noqa: E731
    read = BodyRead("s3://b/k", ask, lambda _: None, lambda **_: None, 0, 3, None, 60.0)
    read.run()
    assert read.pieces == [b"0"]
    assert isinstance(read.error, BrokenBody)


def _client_error(status, code):
    return aws.ClientError(
        {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}, "GetObject"
    )


@pytest.mark.parametrize(
    ("error", "meaning", "reason"),
    [
        (_client_error(503, "SlowDown"), "throttled", "HTTP 503 SlowDown"),
        (aws.NoCredentialsError(), "denied", "no complete credentials"),
        (aws.CredentialRetrievalError(provider="p", error_msg="hunter2"), "expired", "fetched"),
        (aws.ReadTimeoutError(endpoint_url="u"), "again", "ReadTimeoutError"),
        (aws.ConnectTimeoutError(endpoint_url="u"), "again", "ConnectTimeoutError"),
        (aws.EndpointConnectionError(endpoint_url="u"), "again", "EndpointConnectionError"),
        (aws.ConnectionClosedError(endpoint_url="u"), "again", "ConnectionClosedError"),
        (aws.SSLError(endpoint_url="u", error="EOF"), "again", "SSLError"),
        (
            aws.SSLError(endpoint_url="u", error="CERTIFICATE_VERIFY_FAILED"),
            "refused",
            "not trusted",
        ),
        (ResponseParserError("half"), "again", "ResponseParserError"),
        (urllib3.exceptions.ProtocolError("reset"), "again", "the body broke off: reset"),
        (BrokenBody("3 of 4"), "again", "the body broke off: 3 of 4"),
        (TimeoutError("slow"), "again", "the body broke off"),
        (aws.ParamValidationError(report="bad"), "refused", "bad"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_a_failure_means(error, meaning, reason):
    found = _meaning(error)
    assert found is not None
    assert found[0] == meaning
    assert reason in found[1]
    assert "hunter2" not in found[1]


def test_an_answer_without_a_body_does_not_say_its_status_twice():
    # An answer to HEAD: botocore takes the status for the code, other servers leave it out.
    assert _meaning(_client_error(403, "403")) == ("denied", "HTTP 403")
    assert _meaning(_client_error(404, "")) == ("missing", "HTTP 404")


def test_a_defect_of_ours_is_no_failure_of_the_network():
    for error in (KeyError("x"), TypeError("x"), ValueError("x")):
        assert _meaning(error) is None
