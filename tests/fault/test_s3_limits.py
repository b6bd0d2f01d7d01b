"""Expiring credentials, late answers, the request budget, multipart files, closing a store."""

import logging
import random
import stat
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_pipeline.store.budget import Budget
from data_pipeline.store.hedge import Hedger
from data_pipeline.store.open import AccessDenied, MissingKey, StoreUnavailable, open_store
from tests.fault.fault_proxy import Fault

pytestmark = pytest.mark.fault
DATA = random.Random(9).randbytes(2_000_000)
PART = 16 << 20


@pytest.fixture
def uri(s3_environment, request):
    """A prefix whose object "x" holds DATA."""
    uri = f"s3://{s3_environment.bucket}/{request.node.name.split('[')[0]}"
    open_store(uri).put("x", DATA)
    return uri


@pytest.fixture
def store(uri, proxy):
    store = open_store(uri, endpoint=proxy.endpoint, read_timeout=20, patience=100)
    yield store
    store.close()


def _settled(name, seconds=50):
    end = time.monotonic() + seconds
    while any(t.name == name for t in threading.enumerate()) and time.monotonic() < end:
        time.sleep(0.01)
    return not any(t.name == name for t in threading.enumerate())


@pytest.fixture
def expiring(s3_environment, monkeypatch, tmp_path):
    """Credentials from a process that first returns old ones, then the server's own.

    Each line of the returned file is one run of the process.
    """
    keys = s3_environment.environment()
    runs, program = tmp_path / "runs", tmp_path / "process"
    program.write_text(
        f"#!{sys.executable}\n"
        "import json\n"
        f"with open({str(runs)!r}, 'a+') as file:\n"
        "    file.write('run\\n'); file.seek(0); first = len(file.readlines()) == 1\n"
        f"old, good = 'OLDKEY', {keys['AWS_ACCESS_KEY_ID']!r}\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': old if first else good,\n"
        f"    'SecretAccessKey': {keys['AWS_SECRET_ACCESS_KEY']!r}}}))\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    (tmp_path / "config").write_text(f"[profile rotating]\ncredential_process = {program}\n")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_PROFILE", "rotating")
    return runs


def test_expired_credentials_are_fetched_anew_once_for_all_threads(uri, expiring, proxy):
    proxy.faults.append(
        Fault("expired", method="", times=None, only=lambda r: r.access_key == "OLDKEY")
    )
    store = open_store(uri, endpoint=proxy.endpoint)
    with ThreadPoolExecutor(6) as pool:
        bodies = list(pool.map(lambda i: store.get("x", i, 1000), range(12)))
    assert bodies == [DATA[i : i + 1000] for i in range(12)]
    assert 1 <= proxy.count("expired") <= 6
    assert expiring.read_text().count("run") == 2
    assert store.stats.retries == 0  # the server had no fault
    assert store.head("x").size == len(DATA)


@pytest.mark.parametrize(
    "fault",
    [
        Fault("expired", method="", times=None),
        Fault("error", method="", times=None, status=403, code="ExpiredTokenException"),
    ],
    ids=["400", "403"],
)
def test_credentials_that_stay_expired_are_one_clear_error(store, proxy, caplog, fault):
    caplog.set_level(logging.DEBUG)
    proxy.faults.append(fault)
    for call in (store.get, lambda key: store.put(key, b""), store.list):
        before = len(proxy.requests)
        with pytest.raises(AccessDenied, match="Expired.*, and again with credentials .* anew"):
            call("x")
        assert len(proxy.requests) == before + 2
    assert store._client._request_signer._credentials.secret_key not in caplog.text


def test_the_reason_of_a_refused_head_is_asked_for(store, proxy):
    """A HEAD answer has no body for an error code, so a GET of one byte asks for the reason."""
    proxy.faults.append(Fault("expired", method="HEAD"))
    assert store.head("x").size == len(DATA)
    asked = [(r.method, r.fault) for r in proxy.requests]
    assert asked == [("HEAD", "expired"), ("GET", ""), ("HEAD", "")]
    assert proxy.requests[1].range == "bytes=0-0"


def test_a_credential_process_that_fails_is_said_at_the_start(s3_environment, expiring, tmp_path):
    (tmp_path / "process").write_text("#!/bin/sh\necho no ticket >&2\nexit 1\n")
    with pytest.raises(AccessDenied, match="credentials could not be fetched: CredentialRetrieval"):
        open_store("s3://bucket/a")


@pytest.mark.parametrize("kind", ["late", "stall"])
def test_a_second_request_wins_over_a_hanging_first(store, proxy, kind):
    store._hedger = Hedger(threads=4, share=1.0, floor=0.02, samples=8)
    for i in range(10):
        assert store.get("x", i, 70_000) == DATA[i : i + 70_000]
    # Count only this range, because a hedge of an earlier read may still be in flight.
    this = "bytes=100-70099"
    proxy.faults.append(Fault(kind, after=10_000, delay=60, only=lambda r: r.range == this))
    assert store.get("x", 100, 70_000) == DATA[100:70_100]
    stats = store.stats
    assert stats.hedges >= stats.hedges_won >= 1
    assert stats.retries == stats.resumes == 0
    twins = [r for r in proxy.requests if r.range == this]
    assert [r.fault for r in twins] == [kind, ""]
    store.close()
    if kind == "stall":  # the losing request was interrupted inside its body
        assert _settled("hedged-read", 15)  # and not by its timeout of 20 s


def test_hedges_are_few_and_change_no_byte(store, proxy, uri):
    hedger = Hedger(threads=8, floor=0.0, samples=16)
    store._hedger = hedger
    proxy.faults.append(Fault("late", times=None, p=0.03, delay=0.5))
    offsets = [random.Random(2).randrange(1_900_000) for _ in range(200)]
    with ThreadPoolExecutor(4) as pool:
        bodies = list(pool.map(lambda at: store.get("x", at, 20_000), offsets))
    assert bodies == [DATA[at : at + 20_000] for at in offsets]
    assert 1 <= store.stats.hedges <= 10  # 5% of 200
    assert store.stats.requests <= 210
    store.close()
    assert _settled("hedged-read")
    assert open_store(uri, endpoint=proxy.endpoint, hedge=False).get("x", 0, 9) == DATA[:9]


def test_no_hedges_while_the_server_asks_for_less(store, proxy):
    store._hedger = None  # a hedge of the throttled read could win and hide the server's answer
    proxy.faults.append(Fault("slowdown"))
    store.get("x", 1, 10)
    assert store.stats.throttled == 1
    store._hedger = Hedger(threads=4, share=1.0, floor=0.0, samples=1)
    store._hedger.note(10, 0.0)  # makes every later request count as late
    store._calm_at += 60
    assert store.get("x", 2, 10) == DATA[2:12]
    assert store.stats.hedges == 0
    store._calm_at = 0.0
    proxy.faults.append(Fault("late", delay=9))
    assert store.get("x", 3, 10) == DATA[3:13]
    assert store.stats.hedges == 1


def test_every_request_asks_the_budget_first(uri, proxy, tmp_path):
    with Budget(tmp_path / "budget", 10_000) as budget:
        store = open_store(uri, endpoint=proxy.endpoint, budget=budget)
        proxy.faults += [
            Fault("refuse"),
            Fault("truncate", after=10),
            Fault("slowdown", method="HEAD"),
        ]
        assert store.get("x") == DATA
        assert store.head("x").size == len(DATA)
        store.list()
        (tmp_path / "file").write_bytes(bytes(2 * PART))
        store.put_file("big", tmp_path / "file")
        store._hedger = Hedger(threads=4, share=1.0, floor=0.02, samples=1)
        store._may_hedge = lambda: True  # despite the recent throttling
        store.get("x", 0, 10)
        proxy.faults.append(Fault("late", delay=9))
        store.get("x", 0, 10)
        assert store.stats.hedges == 1
        assert budget.bucket.drawn == store.stats.requests == len(proxy.requests) == 14
        assert budget.bucket.rate < 10_000  # because of the 503 answer to HEAD
        store.close()


def test_a_spent_budget_is_waited_for_and_named(uri, proxy, tmp_path):
    with Budget(tmp_path, 2, 1) as budget:
        store = open_store(uri, endpoint=proxy.endpoint, budget=budget, patience=3.0)
        for _ in range(3):
            budget._ticket(float("inf"), "others", time.monotonic() + 50)
        for i in range(3):
            assert store.get("x", i, 5) == DATA[i : i + 5]
        assert store.stats.budget_wait_s > 0.5
        for _ in range(40):
            budget._ticket(float("inf"), "others", time.monotonic() + 50)
        with pytest.raises(
            StoreUnavailable, match="waited for the node's request budget in .*2 of"
        ):
            store.get("x")
        assert len(proxy.requests) == 3


def test_a_file_goes_up_in_parts_through_faults(store, proxy, tmp_path):
    data = DATA * (-(-2 * PART // len(DATA)) + 1)
    (tmp_path / "file").write_bytes(data)
    proxy.faults += [
        Fault("slowdown", method="POST", path="uploads"),
        Fault("slowdown", method="PUT", path="partNumber=2"),
        Fault("refuse", method="PUT", path="partNumber=3"),
        # The upload completes but its answer is lost; the retry finds no upload.
        Fault("truncate", method="POST", path="uploadId"),
        Fault("error", method="POST", path="uploadId", status=404, code="NoSuchUpload"),
    ]
    assert store.put_file("big", tmp_path / "file").size == len(data)
    assert not proxy.faults
    assert store.get("big") == data
    assert store.stats.written == len(data)
    assert not [r for r in proxy.requests if r.method == "DELETE"]


def test_an_upload_that_somebody_took_back_is_not_taken_for_done(store, proxy, tmp_path):
    (tmp_path / "file").write_bytes(bytes(2 * PART))
    store.put_file("big", tmp_path / "file")  # an older object of the same size
    proxy.faults.append(
        Fault("error", method="POST", path="uploadId", status=404, code="NoSuchUpload")
    )
    with pytest.raises(MissingKey, match="/big: no such object"):
        store.put_file("big", tmp_path / "file")


def test_parts_of_a_file_that_fails_are_taken_back(store, proxy, tmp_path):
    (tmp_path / "file").write_bytes(bytes(3 * PART))
    proxy.faults.append(
        Fault("error", method="PUT", path="partNumber=2", status=403, code="AccessDenied")
    )
    with pytest.raises(AccessDenied, match="/big: access denied"):
        store.put_file("big", tmp_path / "file")
    assert [r.path.split("?")[1].startswith("uploadId") for r in proxy.requests[-1:]] == [True]
    assert proxy.requests[-1].method == "DELETE"
    assert store.list() == ["x"]


def test_a_store_that_is_closed_lets_go_of_who_waits(uri, proxy):
    store = open_store(uri, endpoint=proxy.endpoint, patience=50)
    proxy.faults.append(Fault("slowdown", method="", times=None))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(store.get, "x")
        while len(proxy.requests) < 6:
            time.sleep(0.01)
        store.close()
        with pytest.raises(StoreUnavailable, match="x: the store was closed while"):
            waiting.result(100)
