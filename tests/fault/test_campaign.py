"""The short form of `tests.fault.campaign`: one kill in an upload, one intruder, planted secrets.

All data is in a real S3 server, whose keys are only in a credentials file. Afterwards the keys must
not appear in any file, message, argument or environment of any process.
"""

import os
import secrets
import subprocess
import sys
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from data_pipeline.store.open import open_store
from kimi_pretrain.verify.traces import numbers_of
from launch.local.s3_server import S3Server
from tests import ROOT, fork_server
from tests.fault.campaign.compare import difference
from tests.fault.campaign.kills import uploads
from tests.fault.campaign.phases import PHASES, phase_of
from tests.fault.campaign.processes import Training, wait_until
from tests.fault.campaign.runs import LATEST, Campaign, Result, after_strike, newest
from tests.fault.fault_proxy import Fault, FaultProxy

pytestmark = [pytest.mark.fault, pytest.mark.dist, pytest.mark.timeout(400)]
BUCKET, STEPS = "short", 6


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """A server whose keys are only in a credentials file, which the environment names."""
    folder = tmp_path_factory.mktemp("planted")
    key, secret = f"PLANTEDKEY{secrets.token_hex(5)}", f"plantedSecret{secrets.token_hex(12)}"
    with (
        S3Server(folder / "s3", BUCKET, key, secret) as server,
        FaultProxy(server.endpoint) as proxy,
        pytest.MonkeyPatch.context() as environment,
    ):
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            environment.delenv(name)
        file = folder / "credentials"
        file.write_text(f"[planted]\naws_access_key_id = {key}\naws_secret_access_key = {secret}\n")
        environment.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
        environment.setenv("AWS_PROFILE", "planted")
        environment.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        yield SimpleNamespace(proxy=proxy, key=key, secret=secret, folder=folder / "runs")
        server.stop(timeout=0)


class Watcher(threading.Thread):
    """Records arguments and environments of a training's processes while they live."""

    def __init__(self, training: Training) -> None:
        super().__init__(daemon=True)
        self.training, self.seen, self.over = training, set(), threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.2):
            with suppress(psutil.Error):
                root = psutil.Process(self.training.process.pid)
                for process in [root, *root.children(recursive=True)]:
                    with suppress(psutil.Error):
                        self.seen.add(" ".join(process.cmdline()))
                        self.seen.add(str(process.environ()))


@pytest.fixture(scope="module")
def story(planted):
    """An undisturbed run, and a run with an intruder that is killed in an upload and resumed.

    The second run uses real processes and starts in a folder with modules named like those of the
    standard library. The other commands are forks.
    """
    elsewhere = planted.folder / "elsewhere"
    elsewhere.mkdir(parents=True)
    for name in ("random", "pickle", "yaml"):
        (elsewhere / f"{name}.py").write_text("raise SystemExit('not this one')\n")
    campaign = Campaign(planted.folder)
    campaign.build()
    _upload(campaign.data_root, f"s3://{BUCKET}/corpus")
    data = f"data.root=s3://{BUCKET}/corpus"
    settings = campaign.settings(data, f"checkpoint.place=s3://{BUCKET}/alone", steps=STEPS)
    alone = campaign.folder / "alone"
    done = _train(alone, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    place, run_dir = f"s3://{BUCKET}/killed", campaign.folder / "killed"
    settings = campaign.settings(data, f"checkpoint.place={place}", steps=STEPS)
    late = Fault("late", "PUT", "step_00000004/.*safetensors", delay=60, times=None)
    planted.proxy.faults = [late]
    uploading, result = uploads(planted.proxy, place), Result("kill", "", "")
    with Training(run_dir, settings, cwd=elsewhere) as training:
        watcher = Watcher(training)
        watcher.start()
        training.wait_for_step(1)
        with training.held():
            intruder = _train(run_dir, *LATEST, *settings)
        wait_until(lambda: newest(place) and uploading(), "an upload after a whole one")
        victim = training.ranks()[1]
        phase, under_way = training.phase_of(victim), uploading()
        victim.kill()
        after_strike(training, result, alone, place, training.steps)
        watcher.over.set()
        watcher.join()
    planted.proxy.faults = []
    kept = newest(place)
    done = _train(run_dir, *LATEST, *settings)
    assert done.returncode == 0, done.stdout + done.stderr
    result.equal = difference(run_dir, alone) is None
    return SimpleNamespace(
        alone=alone, run_dir=run_dir, result=result, kept=kept, place=place, phase=phase,
        under_way=under_way, intruder=intruder, watcher=watcher,
    )  # fmt: skip


def _train(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "launch.cli", "train", "--config", "tiny_cpu", "--run-dir", str(run_dir)]
    done = fork_server.run([*command, *arguments], timeout=200)
    with run_dir.with_suffix(".out").open("a") as file:  # the search for secrets covers this file
        file.write(done.stdout + done.stderr)
    return done


def _upload(folder: Path, to: str) -> None:
    store = open_store(to)
    for file in folder.rglob("*"):
        if file.is_file():
            store.put_file(file.relative_to(folder).as_posix(), file)
    store.close()


def test_a_run_killed_in_an_upload_goes_on_and_equals_the_one_left_alone(story):
    assert story.under_way.startswith("upload of step_")
    assert story.under_way != f"upload of step_{story.kept:08d}", "a torn save was taken"
    assert story.kept == 2
    assert story.result.wrong == []
    assert story.result.equal is True
    assert story.result.again in (2, 3, 4)
    assert story.phase


def test_the_comparison_can_fail(story, tmp_path):
    for name, change in (("loss", '"loss_tokens": 1'), ("grad_norm", '"applied": false')):
        copy = tmp_path / name
        copy.mkdir()
        for file in ("metrics.jsonl", "state_hashes.json"):
            (copy / file).write_text((story.run_dir / file).read_text())
        assert difference(copy, story.alone) is None
        key = change.split(":")[0]
        lines = (copy / "metrics.jsonl").read_text().splitlines(keepends=True)
        at = lines[3].index(key)
        end = lines[3].index(",", at)
        lines[3] = lines[3][:at] + change + lines[3][end:]
        (copy / "metrics.jsonl").write_text("".join(lines))
        assert "step 4" in (difference(copy, story.alone) or "")
    (copy / "metrics.jsonl").write_text((story.run_dir / "metrics.jsonl").read_text())
    hashes = (copy / "state_hashes.json").read_text()
    (copy / "state_hashes.json").write_text(hashes.replace('"loader": "', '"loader": "0'))
    assert difference(copy, story.alone) == "final state: loader differ"
    kept = numbers_of({"seconds": 1, "loss": 2, "checkpoint": {}, "exchange_bytes": {"over": 3}})
    assert kept == {"loss": 2, "exchange_bytes.over": 3}


def test_a_second_run_in_the_folder_was_refused(story):
    told = story.intruder.stderr
    assert story.intruder.returncode == 2, told
    error = [line for line in told.splitlines() if line.startswith("error: ")][-1]
    assert "is in use by another run" in error
    assert "--run-dir" in error
    assert "Traceback" not in told


def test_no_secret_is_anywhere(story, planted):
    """Checks run folders, checkpoints, output, arguments and environments."""
    found, files = [], 0
    for file in planted.folder.rglob("*"):
        if file.is_file():
            files += 1
            data = file.read_bytes()
            found += [str(file) for word in (planted.key, planted.secret) if word.encode() in data]
    assert files > 50
    assert found == []
    store = open_store(story.place)
    for name in store.list():
        if name.endswith(".json"):
            assert planted.key not in store.get(name).decode(), name
            assert planted.secret not in store.get(name).decode(), name
    store.close()
    seen = story.watcher.seen
    assert len(seen) > 8
    assert any("launch.local.worker" in text for text in seen)
    assert any("writer" in text for text in seen)
    assert [text for text in seen if planted.key in text or planted.secret in text] == []


def test_errors_of_the_store_show_no_secret(planted, tmp_path, monkeypatch):
    """Covers a refusal, an absent server and an unknown profile."""
    token = f"plantedToken{secrets.token_hex(8)}"
    wrong = f"wrong{planted.secret}"
    monkeypatch.delenv("AWS_PROFILE")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", planted.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong)
    monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    told = []
    for endpoint in (planted.proxy.endpoint, "http://127.0.0.1:9"):
        with pytest.raises(Exception) as error:  # noqa: PT011 (of the store's many)
            open_store(f"s3://{BUCKET}/x", endpoint=endpoint, attempts=1).get("y")
        told.append(f"{error.value!r} {error.value.__cause__!r}")
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    with pytest.raises(Exception) as error:  # noqa: PT011
        open_store(f"s3://{BUCKET}/x")
    told.append(f"{error.value!r} {error.value.__cause__!r}")
    for text in told:
        assert not any(word in text for word in (planted.key, planted.secret, wrong, token)), text


def test_phases_are_told_by_files_and_functions_that_exist():
    """No other test would notice a renamed file or function."""
    megatron = Path(find_spec("megatron.core").origin).parent
    ours = [ROOT / name for name in ("data_pipeline", "kimi_pretrain", "launch")]
    files = [str(file) for root in (*ours, megatron) for file in root.rglob("*.py")]
    for ending, function, _ in PHASES:
        known = [f for f in files if (ending in f if ending.endswith("/") else f.endswith(ending))]
        assert known, ending
        assert any(f"def {function}" in Path(file).read_text() for file in known), function


def test_phases_are_read_from_stacks():
    """The innermost known frame decides."""
    for phase, file in (
        ("optimizer", "kimi_pretrain/optim/muon.py"),
        ("waiting for data", "data_pipeline/loader.py"),
        ("starting", "launch/local/worker.py"),
    ):
        frames = ("/x/numpy/a.py", f"/x/{file}", "/x/launch/local/worker.py")
        lines = "\n".join(f'  File "{name}", line 1 in anything' for name in frames)
        assert phase_of(f"Stack (most recent call first):\n{lines}\n") == phase
    assert phase_of("") == "before Python had begun"


def test_a_killed_command_takes_torchrun_with_it(tmp_path):
    """The kernel kills torchrun's process, whose children end by the same rule."""
    code = (
        "import sys; from pathlib import Path; from launch.local import supervise\n"
        "child = [sys.executable, '-c', 'import time; time.sleep(600)', sys.argv[1]]\n"
        "supervise.run(child, {}, Path(sys.argv[1]))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, env=environment) as process:
        try:
            watched = psutil.Process(process.pid)
            # Wait until the program runs: its parent-death signal is set before exec.
            program = "import time; time.sleep(600)"
            (child,) = wait_until(
                lambda: [one for one in watched.children() if program in one.cmdline()],
                "the child", 60,
            )  # fmt: skip
        finally:
            process.kill()
    left = psutil.wait_procs([child], timeout=100)[1]
    for process in left:
        process.kill()
    assert left == []
