"""Exclusive write claims on a source, in a folder and in S3, also after a kill."""

import json
import os
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from data_pipeline.ingest import claim
from data_pipeline.ingest.ingest import ingest
from data_pipeline.store.open import FolderStore, MemoryStore, open_store
from data_pipeline.text import Tokenizer, train_ranks
from tests.fault.fault_proxy import Fault
from tests.unit.data_pipeline.media import samples

pytestmark = pytest.mark.fault
TOKENIZER = Tokenizer(train_ranks([f"row {i} of {i * i} rows" for i in range(99)], 280), "tiny")

HOLD = """
import sys, time
from data_pipeline.ingest import claim
from data_pipeline.store.open import open_store
claim.BEAT_S = 0.2
if sys.argv[2] == "elsewhere":
    claim._machine = lambda: "another machine"
with claim.Claim(open_store(sys.argv[1]), "src") as held:
    print("held", flush=True)
    sys.stdin.readline()
    held._end.set(), held._thread.join()
    print("silent", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder():
    """Starts a process that holds the name `src` in a store; the end of the test kills it."""
    running = []

    def hold(uri: str, where: str) -> subprocess.Popen:
        arguments = [sys.executable, "-c", HOLD, uri, where]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        running.append(subprocess.Popen(arguments, **pipes))
        assert running[-1].stdout.readline() == b"held\n"
        return running[-1]

    yield hold
    for process in running:
        process.kill()
        process.wait()


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_a_name_has_one_writer_and_outlives_a_killed_one(
    kind, s3_environment, tmp_path, holder, monkeypatch
):
    bucket = f"s3://{s3_environment.bucket}/claim-{random.randrange(10**9)}"
    store = open_store(bucket if kind == "s3" else tmp_path)
    # Long enough for a heartbeat on a loaded machine, during which no process may take the name.
    monkeypatch.setattr(claim, "SILENT_S", 40.0)
    for where in ("here", "elsewhere"):
        process = holder(store.uri, where)
        with pytest.raises(claim.NameTaken, match=f"another process: {process.pid} on .*, since"):
            ingest(samples(2), store, "src", TOKENIZER)
        assert "src/manifest.json" not in store.list()
        # No heartbeat may be in flight when the process is killed.
        process.stdin.write(b"\n")
        assert process.stdout.readline() == b"silent\n"
        process.kill()
        process.wait()
        # A dead process on this machine is detected without waiting.
        monkeypatch.setattr(claim, "SILENT_S", 1e9 if where == "here" else 0.5)
        with claim.Claim(store, "src"):
            assert json.loads(store.get("src/.ingest/lock"))["pid"] == os.getpid()
        assert store.list() == []
        monkeypatch.setattr(claim, "SILENT_S", 40.0)


def test_who_lost_its_claim_writes_nothing_more(tmp_path):
    """A long-suspended process whose name another one took stops writing."""
    target = FolderStore(tmp_path)

    def taken_over():
        yield from samples(8)
        target.put("src/.ingest/lock", b'{"id": "other", "pid": 7, "host": "far"}')
        yield from samples(16)[8:]

    with pytest.raises(claim.NameTaken, match="another process: 7 on far"):
        ingest(taken_over(), target, "src", TOKENIZER, 1 << 20)
    assert sorted(target.list()) == ["src/.ingest/lock", "src/rejected.jsonl"]


class StoppedInPut(FolderStore):
    """Suspends a process inside its second put while another takes its name."""

    def put(self, key: str, data: bytes) -> None:
        assert not self.woken.is_set()
        super().put(key, b'{"id": "other", "pid": 7, "host": "far"}')
        time.sleep(2 * claim.SILENT_S)
        super().put(key, data)
        self.woken.set()


def test_who_slept_while_it_renewed_its_claim_gives_up(tmp_path, monkeypatch):
    """Its late write overwrites its successor's lock, so the successor gives up as well."""
    monkeypatch.setattr(claim, "SILENT_S", 0.5)
    monkeypatch.setattr(claim, "BEAT_S", 0.01)
    store = StoppedInPut(tmp_path)
    store.woken = threading.Event()
    with claim.Claim(store, "src") as held:
        assert store.woken.wait(60)
        held._thread.join(60)  # the next heartbeat noticed it
        with pytest.raises(claim.NameTaken, match="stood still .* run it again"):
            held.check()


def test_of_many_that_create_an_object_one_does(s3_environment, tmp_path):
    bucket = f"s3://{s3_environment.bucket}/new-{random.randrange(10**9)}"
    for store in (open_store(bucket), FolderStore(tmp_path), MemoryStore("new")):
        with ThreadPoolExecutor(8) as pool:
            won = list(pool.map(store.put_new, ["a/b"] * 8, [b"%d" % n for n in range(8)]))
        assert sum(won) == 1
        assert store.get("a/b") == b"%d" % won.index(True)
        assert store.list() == ["a/b"]


def test_a_server_without_conditions_still_creates(s3_environment, proxy):
    """Old servers answer 501 to the unknown header."""
    uri = f"s3://{s3_environment.bucket}/old-{random.randrange(10**9)}"
    store = open_store(uri, endpoint=proxy.endpoint)
    proxy.faults = [Fault("error", method="PUT", status=501, code="NotImplemented")]
    assert store.put_new("a", b"1")
    assert not store.put_new("a", b"2")
    assert store.get("a") == b"1"
