"""Ingest killed at every write step, and as a command with workers on a real S3 server."""

import itertools
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pytest

from data_pipeline.ingest import claim
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.readers import open_inputs
from data_pipeline.store import objects
from data_pipeline.store.open import FolderStore, open_store
from data_pipeline.text import Tokenizer, train_ranks
from tests.fault.fault_proxy import Fault
from tests.unit.data_pipeline.media import encoded, noise

pytestmark = pytest.mark.fault
WORDS = [f"a sample of text number {i}, and more of it" for i in range(50)]


def crude(folder: Path, count: int, side: int) -> list[str]:
    """Write pictures with captions, as a folder and as a manifest; some are unusable."""
    (folder / "in").mkdir(parents=True)
    for number in range(count):
        (folder / "in" / f"{number:04d}.png").write_bytes(encoded(noise(side, side, number)))
        (folder / "in" / f"{number:04d}.txt").write_text(WORDS[number % 50])
    (folder / "in" / "0002.png").write_bytes(b"\x89PNG, broken")
    lines = [{"image": f"in/{number:04d}.png", "text": "again"} for number in range(count // 2)]
    lines[1] = {"image": "in/none.png", "text": "no picture"}
    manifest = "".join(json.dumps(line) + "\n" for line in lines) + "{\n"
    (folder / "m.jsonl").write_text(manifest)
    (folder / "t.tiktoken").write_bytes(train_ranks(WORDS, 280))
    return [str(folder / "in"), str(folder / "m.jsonl")]


# At every step, in one process that forks ---------------------------------------------------------


class Steps:
    """Counts steps that make a change visible; kills this process before or after number `kill`."""

    def __init__(self, kill: int, after: bool) -> None:
        self._numbers, self._kill, self._after = itertools.count(1), kill, after

    def __call__(self, step):
        def counted(*arguments):
            number = next(self._numbers)  # several threads delete
            if number == self._kill and not self._after:
                os.kill(os.getpid(), signal.SIGKILL)
            result = step(*arguments)
            if number == self._kill:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return counted


def run_once(root: str, inputs: list[str], ranks: bytes, kill: int, after: bool) -> bool:
    """Ingest in a forked process; return whether it finished."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    try:
        steps = Steps(kill, after)
        objects.os.fsync = lambda _: None  # slow, and only guards against power loss
        objects.os.replace = steps(os.replace)  # makes an object of a folder visible
        objects.os.link = steps(os.link)  # ... and one that must be new
        # Only one ingest runs at a time, and its heartbeats would count as steps.
        claim._SETTLE_S, claim.BEAT_S = 0.0, 1e6
        FolderStore.delete = steps(FolderStore.delete)
        reader = open_inputs(inputs, "caption")
        ingest(reader, FolderStore(root), "src", Tokenizer(ranks, "tiny"), 32_000)
        os._exit(0)
    except BaseException as error:
        print(repr(error), flush=True)
        os._exit(1)


def objects_of(store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def kill_everywhere(folder: str, step: int) -> None:
    """Kill at every `step`-th point, resume and compare; then kill one ingest repeatedly."""
    inputs = crude(Path(folder), 12, 40)
    ranks = (Path(folder) / "t.tiktoken").read_bytes()
    pa.array(["imports pandas, once instead of in every fork"])
    assert run_once(f"{folder}/whole", inputs, ranks, 0, False)
    whole = objects_of(FolderStore(f"{folder}/whole"))
    points = 0
    for kill in range(1, 100, step):
        for after in (False, True):
            root = f"{folder}/{kill}-{after}"
            if run_once(root, inputs, ranks, kill, after):
                break
            points += 1
            left = objects_of(FolderStore(root))
            # Visible objects are complete, and the manifest is visible only with all the others.
            assert all(left[key] == whole[key] for key in left if key.endswith((".tar", "parquet")))
            assert "src/manifest.json" not in left or set(whole) <= set(left)
            done = left.keys() - {"src/.ingest/lock"} == whole.keys()
            assert run_once(root, inputs, ranks, 0, False) or done
            assert objects_of(FolderStore(root)) == whole
            assert sorted(os.listdir(f"{root}/src")) == sorted(os.listdir(f"{folder}/whole/src"))
        else:
            continue
        break
    root, tries = f"{folder}/often", 1
    while not run_once(root, inputs, ranks, 6, True):
        tries += 1
        if FolderStore(root).list() == sorted(whole):
            break  # killed with nothing left to do
    assert objects_of(FolderStore(root)) == whole
    print(json.dumps({"points": points, "tries": tries, "objects": len(whole)}))


def test_killed_at_every_step_the_result_is_the_same(tmp_path):
    code = "import sys; from tests.fault.test_ingest import kill_everywhere as k; k(sys.argv[1], 1)"
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["objects"] >= 6
    # Each shard is put and gets a part file, which is removed. Lock, request and rejections are put
    # before; rejections, provenance, index and manifest afterwards. Request and lock are removed.
    shards = found["objects"] - 4
    assert found["points"] == 2 * (3 * shards + 9)
    assert 2 < found["tries"] < 20


# The command, with workers, on S3 -----------------------------------------------------------------


def command(inputs, uri, tokenizer, *more) -> list[str]:
    return [
        sys.executable, "-m", "launch.cli", "data", "ingest", *inputs, "--to", uri, "--name", "src",
        "--category", "caption", "--tokenizer", tokenizer, "--shard-mb", "1", "--workers", "1",
        "--json", *more,
    ]  # fmt: skip


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def stopped_at(number: int, arguments: list[str], store, proxy, how: signal.Signals) -> int:
    """Stop the command once shard `number` exists; check that its workers end; return its code.

    The proxy refuses the next shard meanwhile, because a fast ingest could finish before the stop.
    """
    next_one = f"src/{number + 1:06d}.tar"
    proxy.faults = [Fault("slowdown", method="PUT", path=next_one, times=None)]
    running = subprocess.Popen(arguments, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        end = time.monotonic() + 50
        while f"src/{number:06d}.tar" not in store.list("src/"):
            assert running.poll() is None
            assert time.monotonic() < end
            time.sleep(0.01)
        workers = [one.pid for one in psutil.Process(running.pid).children(recursive=True)]
        assert workers
        running.send_signal(how)
        code = running.wait(50)
        end = time.monotonic() + 50
        while any(map(alive, workers)) and time.monotonic() < end:
            time.sleep(0.02)
        assert not [pid for pid in workers if alive(pid)]
        return code
    finally:
        proxy.faults = []
        running.kill()
        running.wait()


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="looks for processes in /proc")
def test_the_command_killed_on_s3_goes_on_and_gives_the_same_objects(
    s3_environment, proxy, tmp_path, monkeypatch
):
    inputs, tokenizer = crude(tmp_path, 60, 200), str(tmp_path / "t.tiktoken")
    bucket = f"s3://{s3_environment.bucket}/ingest-{random.randrange(10**9)}"
    whole, cut = open_store(f"{bucket}/whole"), open_store(f"{bucket}/cut")
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)  # used by the command
    arguments = command(inputs, cut.uri, tokenizer)
    assert stopped_at(1, arguments, cut, proxy, signal.SIGKILL) == -signal.SIGKILL
    assert stopped_at(5, arguments, cut, proxy, signal.SIGINT) == 130
    assert "src/manifest.json" not in cut.list()
    with pytest.raises(ValueError, match="begun with another input"):
        ingest(open_inputs(inputs[:1], "caption"), cut, "src", Tokenizer.from_file(tokenizer),
               1 << 20, category="caption")  # fmt: skip
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout.splitlines()[-1])
    assert summary["samples"] == 87
    assert summary["rejected"] == {"undecodable": 2, "missing file": 1, "unreadable": 1}
    ranks = Tokenizer.from_file(tokenizer)
    index = ingest(open_inputs(inputs, "caption"), whole, "src", ranks, 1 << 20, category="caption")
    assert objects_of(open_store(cut.uri)) == objects_of(open_store(whole.uri))
    # Its shards, read from the server, also work as input.
    again = open_inputs([f"{cut.uri}/src"], "caption")
    copy = ingest(again, FolderStore(tmp_path / "copy"), "src", ranks, 1 << 20, category="caption")
    assert copy.content_hash == index.content_hash
