"""The S3 store against a real server with broken answers."""

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback

import pytest

from data_pipeline.index.manifest import read_index
from data_pipeline.index.reads import check_shards
from data_pipeline.ingest.ingest import CrudeSample, TextSegment, ingest
from data_pipeline.store.open import (
    AccessDenied,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    Span,
    StoreError,
    StoreUnavailable,
    get_many,
    open_store,
)
from data_pipeline.text import Tokenizer, train_ranks
from launch.local.s3_server import S3Server
from tests.fault.fault_proxy import Fault

pytestmark = pytest.mark.fault
DATA = random.Random(0).randbytes(3_000_000)


def test_objects_come_back_whole_and_in_ranges(store, proxy, tmp_path):
    info = store.put("a/b", DATA)
    assert store.head("a/b") == info
    assert store.get("a/b") == DATA
    assert store.get("a/b", 5, 100_000) == DATA[5:100_005]
    assert store.get("a/b", 2_999_000) == DATA[2_999_000:]
    assert store.get("a/b", 3, 0) == b""
    assert store.get("a/b", 0, 9, etag=info.etag) == DATA[:9]
    (tmp_path / "file").write_bytes(DATA * 6)  # uploaded in parts
    assert store.put_file("a/c", tmp_path / "file").size == 18_000_000
    assert store.get("a/c") == DATA * 6
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.list() == ["a/b", "a/c", "empty"]
    assert store.list("a/") == ["a/b", "a/c"]


def test_a_list_longer_than_a_page(store, s3_environment):
    direct = open_store(f"{store.uri}/many", threads=8)
    keys = [f"k{i:04d}" for i in range(1005)]
    threads = [
        threading.Thread(target=lambda part=keys[i::8]: [direct.put(key, b"") for key in part])
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert direct.list() == keys


@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_a_broken_body_goes_on_from_the_last_good_byte(store, proxy, kind):
    etag = store.put("x", DATA).etag
    proxy.faults = [Fault(kind, after=after) for after in (1_000_000, 500_000, 0)]
    assert store.get("x", 1000, 2_900_000) == DATA[1000:2_901_000]
    gets = [r for r in proxy.requests if r.method == "GET"]
    assert [r.fault for r in gets] == [kind] * 3 + [""]
    starts = [int(r.range.removeprefix("bytes=").split("-")[0]) for r in gets]
    # Received bytes are kept, and nothing is read twice.
    for i, arrived in enumerate((1_000_000, 500_000, 0)):
        assert starts[i + 1] == starts[i] + arrived
    assert {r.range.split("-")[1] for r in gets} == {"2900999"}
    assert [r.if_match for r in gets] == ["", etag, etag, etag]
    assert store.stats.resumes == 3
    assert store.stats.bytes == 2_900_000


@pytest.mark.parametrize("length", [None, 3_000_000])
def test_a_whole_object_is_resumed_too(store, proxy, length):
    store.put("x", DATA)
    proxy.faults = [Fault("truncate", after=2_000_000)]
    assert store.get("x", 0, length) == DATA


def test_a_body_that_never_gets_on_is_given_up(store, proxy):
    store.put("x", DATA)
    proxy.faults = [Fault("truncate", after=10) for _ in range(4)]
    with pytest.raises(StoreUnavailable, match=r"/x: gave up after 4 attempts \(the body broke"):
        store.get("x")
    assert len([r for r in proxy.requests if r.method == "GET"]) == 4


def test_a_long_body_may_break_more_often_if_it_gets_on(store, proxy):
    data = bytes(8_000_000)
    store.put("x", data)
    proxy.faults = [Fault("truncate", after=1_200_000) for _ in range(6)]
    assert store.get("x") == data


def test_slow_down_is_retried(store, proxy):
    store.put("x", DATA)
    proxy.faults = [Fault("slowdown"), Fault("slowdown")]
    assert store.get("x", 7, 7) == DATA[7:14]
    assert [r.fault for r in proxy.requests[-3:]] == ["slowdown", "slowdown", ""]
    assert store.stats.requests == len(proxy.requests)
    assert (store.stats.throttled, store.stats.retries, store.stats.resumes) == (2, 2, 0)
    proxy.faults = [Fault("slowdown", method="PUT")]
    store.put("y", b"written")
    assert store.get("y") == b"written"


def test_slow_down_without_end_is_an_error_that_says_so(s3_environment, proxy):
    store = open_store(f"s3://{s3_environment.bucket}/x", endpoint=proxy.endpoint, attempts=2)
    proxy.faults = [Fault("slowdown"), Fault("slowdown")]
    with pytest.raises(StoreUnavailable, match="after 2 attempts .HTTP 503 SlowDown.*throttling"):
        store.get("x")


def test_a_late_first_byte_is_cut_off_and_asked_for_again(store, proxy):
    store.put("x", DATA)
    hasty = open_store(store.uri, endpoint=proxy.endpoint, read_timeout=1.5)
    proxy.faults = [Fault("late", delay=30)]
    assert hasty.get("x", 0, 10) == DATA[:10]
    gets = [r.fault for r in proxy.requests if r.method == "GET"]
    assert gets[:2] == ["late", ""]  # the store did not wait for the late one


def test_an_object_overwritten_between_attempts_is_never_mixed(store, proxy, s3_environment):
    direct = open_store(store.uri)
    old, new = b"o" * 400_000, b"n" * 400_000
    direct.put("x", old)
    proxy.faults = [Fault("truncate", after=200_000, then=lambda: direct.put("x", new))]
    for _ in range(2):  # a retry gives the same error
        with pytest.raises(ObjectChanged, match="/x: expected the version with ETag .*overwritten"):
            store.get("x")
    assert open_store(store.uri).get("x") == new


def test_an_etag_that_is_gone_is_refused(store):
    etag = store.put("x", b"one").etag
    store.put("x", b"two")
    with pytest.raises(ObjectChanged, match="overwritten"):
        store.get("x", etag=etag)


def test_missing_object_and_missing_bucket_are_told_apart(store, proxy):
    for call in (store.get, store.head):
        with pytest.raises(MissingKey, match="no/such: no such object"):
            call("no/such")
    nowhere = open_store("s3://no-such-bucket/a", endpoint=proxy.endpoint)
    for call in (nowhere.get, nowhere.head, nowhere.list):  # SeaweedFS creates a bucket on a put
        with pytest.raises(MissingBucket, match="no bucket 'no-such-bucket'"):
            call("b")


def test_reading_past_the_end_is_an_error(store):
    store.put("x", b"12345")
    with pytest.raises(StoreError, match="expected 4 bytes from offset 3, .* only 2"):
        store.get("x", 3, 4)
    with pytest.raises(StoreError, match="past the end"):
        store.get("x", 50, 4)


def _everything_shown(error, caplog) -> str:
    """Return everything a user or a log file could see of a failure."""
    shown = "".join(traceback.format_exception(error)) + repr(error) + caplog.text
    while error:
        shown += str(error) + repr(vars(error))
        error = error.__cause__ or error.__context__
    return shown


def test_a_wrong_secret_is_refused_and_shown_nowhere(s3_environment, monkeypatch, caplog):
    secret = "this-is-the-WRONG-secret-0123456789"  # unknown to any server
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    caplog.set_level(logging.DEBUG)
    store = open_store(f"s3://{s3_environment.bucket}")
    for call in (store.get, store.head, lambda key: store.put(key, b""), store.list):
        with pytest.raises(AccessDenied, match="AWS_SECRET_ACCESS_KEY") as caught:
            call("x")
        assert secret not in _everything_shown(caught.value, caplog)
    assert caplog.text  # botocore did write its debug log
    assert secret not in repr(store) + repr(vars(store))


def test_no_credentials_at_all(s3_environment, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(AccessDenied, match="no complete credentials"):
        open_store(f"s3://{s3_environment.bucket}").get("x")


def test_nobody_at_the_endpoint(s3_environment):
    store = open_store("s3://bucket", endpoint="http://127.0.0.1:9", attempts=2)
    with pytest.raises(StoreUnavailable, match="s3://bucket/x: gave up after 2 attempts"):
        store.get("x")


def test_many_spans_under_faults_by_many_threads(store, proxy):
    store.put("x", DATA)
    rng = random.Random(1)
    spans = [Span("x", rng.randrange(2_900_000), rng.randrange(1, 90_000)) for _ in range(60)]
    kinds = ["truncate", "reset", "slowdown", "truncate"]
    proxy.faults = [Fault(kind, after=200) for kind in kinds]
    found = get_many(store, spans, max_gap=0, threads=8)
    assert found == [DATA[s.offset : s.offset + s.length] for s in spans]
    assert not proxy.faults


def test_a_source_is_ingested_and_read_through_faults(store, proxy):
    words = [f"a sample of text number {i}" for i in range(50)]
    tokenizer = Tokenizer(train_ranks(words, 280), "tiny")
    samples = [CrudeSample(f"s{i}", [TextSegment(text)]) for i, text in enumerate(words)]
    proxy.faults = [
        Fault("slowdown", method="PUT", path="tar"),
        Fault("truncate", path="index.parquet", after=1000),
        Fault("reset", path="tar", after=100),
    ]
    index = ingest(samples, store, "src", tokenizer, 16_384)
    found = read_index(store, "src")
    assert found.content_hash == index.content_hash
    assert check_shards(store, found) == len(index.shards) > 2
    assert not proxy.faults


def _alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # it ended between open and read
        return False


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks for processes in /proc")
def test_the_server_does_not_outlive_its_owner(tmp_path):
    """The owner is killed without cleanup, and the server must end soon after."""
    script = (
        "import sys, time\n"
        "from launch.local.s3_server import S3Server\n"
        "with S3Server(sys.argv[1], 'bucket') as server:\n"
        "    print(server._process.pid, flush=True)\n"
        "    time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    server = int(owner.stdout.readline())
    assert _alive(server)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    end = time.monotonic() + 50
    while _alive(server) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _alive(server)
    owner.stdout.close()


def test_a_killed_servers_data_is_found_by_the_next_one_with_new_keys(tmp_path, monkeypatch):
    for turn in range(2):
        with S3Server(tmp_path, "bucket") as server:
            for name, value in server.environment().items():
                monkeypatch.setenv(name, value)
            store = open_store("s3://bucket")
            if turn == 0:
                store.put("kept", DATA)
            assert store.get("kept") == DATA
            port = int(server.endpoint.rsplit(":", 1)[1])
            with pytest.raises(RuntimeError, match=f"port {port} .* in use"):
                S3Server(tmp_path / "2", "bucket", port=port).__enter__()
            server.stop(timeout=0)  # kills the server
    secret = server.environment()["AWS_SECRET_ACCESS_KEY"].encode()
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not [path for path in files if secret in path.read_bytes()]


def test_a_server_that_cannot_start_names_its_log(tmp_path, monkeypatch):
    program = tmp_path / "weed"
    program.write_text("#!/bin/sh\necho no disk left\nexit 3\n")
    program.chmod(0o755)
    monkeypatch.setattr("launch.local.s3_server._weed", lambda: str(program))
    with pytest.raises(RuntimeError, match="ended at its start; see .*server.log"):
        S3Server(tmp_path / "data", "bucket").__enter__()
    assert "no disk left" in (tmp_path / "data" / "server.log").read_text()
