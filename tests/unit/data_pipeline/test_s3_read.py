"""One S3 read and the names of its failures, without a server; tests/fault uses a server."""

import pytest
import urllib3.exceptions
from botocore import exceptions as aws
from botocore.parsers import ResponseParserError

from data_pipeline.store.objects import ObjectChanged
from data_pipeline.store.open import _judge
from data_pipeline.store.s3_form import BrokenBody, WrongAnswer
from data_pipeline.store.s3_read import BodyRead


class Body:
    """The body object of botocore: a context manager around a stream."""

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
    answer["ContentRange"] = "bytes 5-14/20"
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


@pytest.mark.parametrize(
    ("told", "reply"),
    [
        ("sent the whole object", {"status": 200}),
        ("Content-Range is '', expected bytes 5-", {"ContentRange": None}),
        ("Content-Range is 'bytes */20'", {"ContentRange": "bytes */20"}),
        ("bytes 0-9/20 came", {"ContentRange": "bytes 0-9/20"}),
        ("bytes 5-12/20 came", {"ContentRange": "bytes 5-12/20", "size": 8}),  # short
        ("bytes 5-17/20 came", {"ContentRange": "bytes 5-17/20", "size": 13}),  # long
        ("with Content-Length 4", {"size": 4}),  # perhaps compressed
    ],
)
def test_an_answer_to_another_request_is_asked_for_again(told, reply):
    error = _read([b"0" * 10], **reply).error
    assert isinstance(error, WrongAnswer)
    assert told in str(error)


def test_another_version_is_no_answer():
    def other(_):
        raise ObjectChanged("other")

    assert isinstance(_read([b"0" * 10], check=other).error, ObjectChanged)


def test_a_range_past_the_end_and_one_without_a_length_are_answers():
    assert _read([b"567"], ContentRange="bytes 5-7/8", size=3).pieces == [b"567"]
    assert _read([b"0123456789"], ContentLength=None).error is None  # the range gives the length


def _whole(**reply):
    body = Body([b"01234"])
    answer = {"ResponseMetadata": {"HTTPStatusCode": 200}, "ContentLength": 5, "ETag": "e"} | reply
    answer = {k: v for k, v in (answer | {"Body": body}).items() if v is not None}
    read = BodyRead(
        "s3://b/k", lambda *_: answer, lambda _: None, lambda **_: None, 0, None, None, 60.0
    )
    read.run()
    return read.error


def test_a_whole_object_has_a_length_and_is_not_packed():
    assert _whole() is None
    assert _whole(ContentEncoding="aws-chunked") is None
    for told, reply in (
        ("no Content-Length", {"ContentLength": None}),
        ("packed on its way (gzip)", {"ContentEncoding": "gzip"}),
        ("HTTP 206 for a whole", {"ResponseMetadata": {"HTTPStatusCode": 206}}),
    ):
        error = _whole(**reply)
        assert isinstance(error, WrongAnswer)
        assert told in str(error)


def test_one_that_is_abandoned_reads_no_further():
    class Leaving(Body):
        def read1(self, size):
            read.abandon()
            return super().read1(size)

        def shutdown(self):
            raise RuntimeError("released already")

    body = Leaving([b"0", b"1", b"2"])
    reply = {"ResponseMetadata": {"HTTPStatusCode": 206}, "ContentLength": 3, "ETag": "e"}
    reply["ContentRange"] = "bytes 0-2/3"
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
        (WrongAnswer("a page"), "again", "a wrong answer: a page"),
        (aws.ParamValidationError(report="bad"), "no_bucket", "bad"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_a_failure_means(error, meaning, reason):
    found = _judge(error)
    assert found is not None
    assert found[0] == meaning
    assert reason in found[1]
    assert "hunter2" not in found[1]


def test_an_answer_without_a_body_does_not_say_its_status_twice():
    # For HEAD answers, botocore uses the status as the code; other servers omit the code.
    assert _judge(_client_error(403, "403")) == ("denied", "HTTP 403", False)
    assert _judge(_client_error(404, "")) == ("missing", "HTTP 404", False)


def test_a_defect_of_ours_is_no_failure_of_the_network():
    for error in (KeyError("x"), TypeError("x"), ValueError("x")):
        assert _judge(error) is None
