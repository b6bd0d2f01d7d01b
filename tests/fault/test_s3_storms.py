"""Faults that hit many requests at once or last a while: identical bytes or one clear error."""

import logging
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_pipeline.store.open import (
    MissingKey,
    ObjectChanged,
    Span,
    StoreUnavailable,
    open_store,
)
from launch.local.s3_server import S3Server, is_free
from tests.fault.fault_proxy import ODD, Fault

pytestmark = pytest.mark.fault
DATA = random.Random(7).randbytes(2_000_000)


@pytest.fixture
def store(s3_environment, proxy, request):
    """A patient store behind the proxy, whose object "x" holds DATA."""
    uri = f"s3://{s3_environment.bucket}/{request.node.name.split('[')[0]}"
    with_x = open_store(uri)
    with_x.put("x", DATA)
    with_x.close()
    store = open_store(uri, endpoint=proxy.endpoint, patience=100)
    yield store
    store.close()


@pytest.fixture
def quick(store, proxy):
    """The same store with a short read timeout, which detects stalls early."""
    quick = open_store(store.uri, endpoint=proxy.endpoint, read_timeout=5, patience=100)
    yield quick
    quick.close()


def _spans(count, longest=50_000):
    rng = random.Random(1)
    return [Span("x", rng.randrange(1_900_000), rng.randrange(1, longest)) for _ in range(count)]


def _read_all(store, spans, threads=8):
    """Read each span by a separate request."""
    with ThreadPoolExecutor(threads) as pool:
        bodies = list(pool.map(lambda span: store.get(*span), spans))
    assert bodies == [DATA[s.offset : s.offset + s.length] for s in spans]


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_a_part_of_all_requests_is_throttled(store, proxy, p):
    storm = Fault("slowdown", method="", times=None, p=p)
    proxy.faults.append(storm)
    _read_all(store, _spans(60))
    store.put("y", DATA[:100])
    assert store.head("y").size == 100
    assert store.list() == ["x", "y"]
    assert store.stats.throttled == store.stats.retries == storm.taken > 5
    assert store.stats.requests == len(proxy.requests)


def test_a_part_of_all_answers_is_none_of_s3(store, proxy):
    """Pages and redirects of a proxy, empty and skewed answers hit every kind of request."""
    assert store.get("x", 0, 1) == DATA[:1]  # proves that the server speaks S3
    proxy.faults += [Fault("odd", method="", times=None, p=0.06, code=code) for code in ODD]
    storm = list(proxy.faults)
    _read_all(store, _spans(60))
    for number in range(10):
        assert store.put(f"y{number}", DATA[:number]).size == number
        assert store.head(f"y{number}").size == number
        assert store.get(f"y{number}") == DATA[:number]
        with pytest.raises(MissingKey):
            store.head("none")
    assert store.list() == ["x", *(f"y{number}" for number in range(10))]
    assert not store.discard([f"y{number}" for number in range(10)])
    assert store.list() == ["x"]
    assert all(fault.taken for fault in storm), [(one.code, one.taken) for one in storm]


def test_everyone_is_throttled_for_a_while(store, proxy):
    storm = Fault("slowdown", method="", times=40)
    proxy.faults.append(storm)
    _read_all(store, _spans(40))
    assert storm.taken == store.stats.throttled == 40
    assert not proxy.faults


def test_all_weather_at_once(quick, proxy):
    proxy.faults += [
        Fault("slowdown", times=None, p=0.1),
        Fault("refuse", times=None, p=0.1),
        Fault("reset", times=None, p=0.1, after=0),
        Fault("reset", times=None, p=0.1, after=700),
        Fault("truncate", times=None, p=0.1, after=5000),
        Fault("error", times=None, p=0.1, status=500, code="InternalError"),
        Fault("late", times=None, p=0.1, delay=0.1),
        Fault("slow", times=None, p=0.1, rate=200_000),
        Fault("stall", times=2, p=0.1, after=300, delay=30),
    ]
    faults = list(proxy.faults)
    _read_all(quick, _spans(90), threads=12)
    assert all(fault.taken for fault in faults)
    assert quick.stats.resumes >= 5


def test_a_storm_that_does_not_end_is_one_clear_error(s3_environment, proxy, caplog, monkeypatch):
    monkeypatch.setattr("data_pipeline.store.s3_requests._REMARK_S", 0.0)
    store = open_store(f"s3://{s3_environment.bucket}", endpoint=proxy.endpoint, patience=3.0)
    proxy.faults.append(Fault("slowdown", method="", times=None))
    begin = time.monotonic()
    with (
        pytest.raises(
            StoreUnavailable,
            match=r"/x: gave up after \d+ attempts \(HTTP 503 SlowDown; no progress for \d+ s; ",
        ),
        caplog.at_level(logging.WARNING),
    ):
        store.get("x")
    assert time.monotonic() - begin >= 3.0
    assert 2 <= len(proxy.requests) < 60
    assert "x: no progress for" in caplog.text  # the log gives the reason of a long wait


def test_wrong_bytes_pass_and_the_next_read_is_a_fresh_one(store, proxy):
    """Only a reader that knows a checksum can detect them, and its retry gets the right bytes."""
    proxy.faults.append(Fault("corrupt", after=50))
    wrong = store.get("x", 1000, 100)
    assert wrong == DATA[1000:1050] + bytes([DATA[1050] ^ 1]) + DATA[1051:1100]
    assert store.get("x", 1000, 100) == DATA[1000:1100]


@pytest.mark.parametrize("after", [0, 100_000])
def test_a_stalled_body_is_left_and_taken_up(quick, proxy, after):
    proxy.faults.append(Fault("stall", after=after, delay=60))
    assert quick.get("x", 10, 1_500_000) == DATA[10:1_500_010]
    assert [r.range for r in proxy.requests] == [
        "bytes=10-1500009",
        f"bytes={10 + after}-1500009",
    ]
    assert quick.stats.resumes == 1


def test_a_slow_body_is_waited_for(store, proxy):
    proxy.faults.append(Fault("slow", rate=400_000, times=None))
    assert store.get("x", 0, 300_000) == DATA[:300_000]
    assert len(proxy.requests) == 1


def test_a_body_that_drips_is_given_up(s3_environment, store, proxy):
    """No socket read times out, but the request still ends."""
    proxy.faults.append(Fault("slow", rate=2_000, times=None))
    hasty = open_store(store.uri, endpoint=proxy.endpoint, patience=6)
    with pytest.raises(StoreUnavailable, match=r"x: gave up .*only \d+ bytes came in \d+ s"):
        hasty.get("x")
    assert len(proxy.requests) > 1  # the store tried another connection


def test_an_answer_that_is_cut_off_is_not_taken_for_an_empty_one(store, proxy):
    proxy.faults += [Fault("truncate", path="list-type", after=n) for n in (0, 100)]
    assert store.list() == ["x"]
    assert proxy.count("truncate") == 2


def test_an_object_that_goes_or_changes_between_two_reads(store, s3_environment):
    direct = open_store(store.uri)
    direct.put("y", DATA[:1000])
    for key in ("x", "y"):
        assert store.get(key, 0, 10) == DATA[:10]
    direct.put("x", DATA[::-1])
    direct._client.delete_object(Bucket=s3_environment.bucket, Key=direct._key("y"))
    with pytest.raises(ObjectChanged, match="/x: expected the version with ETag .*overwritten"):
        store.get("x", 10, 10)
    with pytest.raises(MissingKey, match="/y: no such object"):
        store.get("y", 10, 10)
    assert store.stats.retries == 0
    direct.put("x", DATA)  # restored
    assert store.get("x", 10, 10) == DATA[10:20]


def test_the_server_is_killed_and_comes_back(tmp_path, monkeypatch):
    """Readers and a writer are active and only lose time."""
    keys = {"access_key": "restarted", "secret_key": "its-secret-for-this-test"}
    with S3Server(tmp_path, "bucket", **keys) as server:
        for name, value in server.environment().items():
            monkeypatch.setenv(name, value)
        port = int(server.endpoint.rsplit(":", 1)[1])
        store = open_store("s3://bucket/a", patience=100, read_timeout=5)
        store.put("x", DATA)
        back = threading.Event()
        reads = []

        def read(number):
            spans = iter(_spans(10_000)[number * 1000 :])
            while not back.is_set() or len(reads) < 50:
                span = next(spans)
                assert store.get(*span) == DATA[span.offset : span.offset + span.length]
                reads.append(span)

        def write():
            for number in range(10_000):
                store.put(f"y{number}", DATA[:number])
                if back.is_set():
                    return number
            raise AssertionError("too fast")

        with ThreadPoolExecutor(4) as pool:
            readers = [pool.submit(read, number) for number in range(3)]
            writer = pool.submit(write)
            while len(reads) < 20:
                time.sleep(0.01)
            server.stop(timeout=0)  # kills the server
            time.sleep(0.7)
            while not is_free(port):  # the system frees the port after a moment
                time.sleep(0.05)
            with S3Server(tmp_path, "bucket", port=port, **keys) as again:
                back.set()
                for reader in readers:
                    reader.result(100)
                last = writer.result(100)
                assert store.get(f"y{last}") == DATA[:last]
                assert store.stats.retries >= 4
                again.stop(timeout=0)
        store.close()
