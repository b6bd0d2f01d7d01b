"""`kimi-pretrain train --nnodes 2`: two torchruns that rendezvous, here on one machine."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from kimi_pretrain.reliability.exit_report import ExitReport, first_exit_report, write_exit_report
from tests import ROOT
from tests.dist.jobs import SMALL, layout, read_metrics, train
from tests.slurm.lab import free_ports

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = 12


@contextmanager
def machines(run_dir: Path, *arguments: str):
    """Start the command once for each of two machines; kill the remaining processes at the end."""
    (port,) = free_ports(1)
    command = [
        sys.executable, "-m", "launch.cli", "train", "--config", "tiny_cpu", "--run-dir",
        str(run_dir), "--nnodes", "2", "--rendezvous", f"127.0.0.1:{port}",
        "--max-restarts", "1", *SMALL, *arguments,
    ]  # fmt: skip
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo",
    }  # fmt: skip
    logs = [run_dir.parent / f"machine_{number}.log" for number in range(2)]
    started = []
    for log in logs:
        with log.open("w") as out:
            started.append(subprocess.Popen(command, env=env, stdout=out, stderr=out))
    try:
        yield started, logs
    finally:
        for process in started:
            with suppress(psutil.NoSuchProcess):
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
            process.kill()
            process.wait()


def ends_well(started, logs):
    codes = [process.wait(timeout=300) for process in started]
    assert codes == [0, 0], "\n".join(log.read_text()[-3000:] for log in logs)


def starts_once(logs):
    """Check for a single start, except if another program took the port that torchrun chose.

    That race is in torch; it is worth another start, and the message says so
    (`launch.local.user_errors`).
    """
    words = logs[0].read_text() + logs[1].read_text()
    assert "exitcode" not in words or "another program listens there" in words


def result(run_dir: Path):
    numbers = [(line["step"], line["loss"]) for line in read_metrics(run_dir)]
    return numbers, json.loads((run_dir / "state_hashes.json").read_text())


@pytest.fixture(scope="module")
def overrides(data_root):
    return (
        f"data.root={data_root}", f"train.steps={STEPS}", "checkpoint.every=3",
        "dep.ranks_per_node=1", *layout(pp=2),
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(overrides, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("one") / "run"
    done = train(run_dir, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return result(run_dir)


def test_two_machines_train_as_one_does(overrides, straight, tmp_path):
    with machines(tmp_path / "run", *overrides) as (started, logs):
        ends_well(started, logs)
        starts_once(logs)
    assert result(tmp_path / "run") == straight


def test_words_of_an_earlier_failure_keep_no_machine_from_starting(overrides, straight, tmp_path):
    """Both machines remove the reports at once; there are too many to do so in turn."""
    run_dir = tmp_path / "run"
    for rank in range(4000):
        write_exit_report(run_dir, rank, ExitReport("of an earlier run"))
    with machines(run_dir, *overrides) as (started, logs):
        ends_well(started, logs)
        starts_once(logs)
    assert result(run_dir) == straight
    assert first_exit_report(run_dir) is None
    names = {file.name for file in (run_dir / "logs").glob("torchrun*.log")}
    assert names == {f"torchrun_{socket.gethostname()}.log"}  # one per host; here both are one


def test_both_machines_go_on_after_one_lost_a_process(overrides, straight, tmp_path):
    run_dir = tmp_path / "run"
    arguments = (*overrides, "train.timeout_seconds=60")
    with machines(run_dir, *arguments) as (started, logs):
        end = time.monotonic() + 200
        while not (run_dir / "checkpoints" / "step_00000003" / "manifest.json").exists():
            assert time.monotonic() < end, logs[0].read_text()[-3000:]
            assert all(process.poll() is None for process in started)
            time.sleep(0.1)
        ranks = [
            child
            for child in psutil.Process(started[1].pid).children(recursive=True)
            if "launch.local.worker" in child.cmdline()
            and "torch.distributed.run" not in child.cmdline()
        ]
        ranks[0].send_signal(signal.SIGKILL)
        ends_well(started, logs)
    assert "exitcode: -9" in logs[1].read_text()  # so there was a second start
    assert result(run_dir) == straight
