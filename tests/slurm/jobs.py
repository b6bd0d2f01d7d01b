"""Submits the small configuration to a lab, as a user would, and inspects the jobs."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from launch.slurm import queue as slurm_queue
from launch.slurm.queue import JobState
from tests import ROOT
from tests.dist.jobs import SMALL, layout
from tests.dist.live import is_told
from tests.slurm.lab import Lab

# Two ranks, one on each of two nodes.
TWO_NODES = ("--gpus-per-node=0", "--tasks-per-node=1", "--cpus-per-task=1", *layout(pp=2))
RUN_SECONDS = 240.0  # far above the half minute that a job takes on a busy machine


def submit(lab: Lab, run_dir: Path, *arguments: str) -> int:
    """Run `kimi-pretrain submit` on the small configuration; return the job id."""
    done = subprocess.run(
        command(run_dir, "--parsable", *arguments),
        env=environment(lab), capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return int(done.stdout)


def command(run_dir: Path, *arguments: str) -> list[str]:
    """Return the command line."""
    return [
        sys.executable, "-m", "launch.cli", "submit", "--config", "tiny_cpu", "--run-dir",
        str(run_dir), *SMALL, *TWO_NODES, *arguments,
    ]  # fmt: skip


def environment(lab: Lab) -> dict[str, str]:
    """Return the environment of a user on this cluster."""
    own = {"PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "GLOO_SOCKET_IFNAME": "lo"}
    return os.environ | {"SLURM_CONF": lab.env["SLURM_CONF"], "PATH": lab.env["PATH"]} | own


def state(lab: Lab, job: int | str) -> JobState:
    """Return the state of a job, or of one array element ("12_3")."""
    (one,) = states(lab, job)
    return one


def states(lab: Lab, job: int | str) -> list[JobState]:
    """Return the state of every element of an array."""
    text = lab.run("scontrol", "--oneliner", "show", "job", str(job))
    return [slurm_queue.parse_job(line) for line in text.splitlines() if line.strip()]


def wait_steps(lab: Lab, job: int | str, run_dir: Path, steps: int = 1) -> None:
    """Wait until a job has done some steps."""
    file = run_dir / "metrics.jsonl"

    def done() -> bool:
        return file.is_file() and file.read_text().count("\n") >= steps

    wait(done, f"{steps} steps of job {job}", lambda: log_of(lab, job), pause=0.02)


def preempt(lab: Lab, job: int | str, run_dir: Path, steps: int = 1, *, save: bool = True) -> None:
    """Preempt a job after its first steps with the signal that SLURM sends before a time limit.

    The ranks are suspended meanwhile, so that steps remain on any machine. Without `save`, the
    checkpoint writers are suspended too and stay so.
    """
    wait_steps(lab, job, run_dir, steps)
    signal_ranks(run_dir, signal.SIGSTOP)
    if not save:  # neither a save in progress nor a later one can finish
        for pid in writer_pids(run_dir):
            os.kill(pid, signal.SIGSTOP)
    lab.run("scancel", "--signal=USR1", "--batch", str(job))
    wait(lambda: "got USR1" in log_of(lab, job), "the signal", lambda: log_of(lab, job))
    # Wait until the signal is pending at the ranks, which handle it once resumed.
    wait(
        lambda: any(is_told(pid, signal.SIGUSR1) for pid in rank_pids(run_dir)),
        "the signal at a rank", lambda: log_of(lab, job),
    )  # fmt: skip
    signal_ranks(run_dir, signal.SIGCONT)


def signal_ranks(run_dir: Path, number: signal.Signals) -> None:
    """Send a signal to all ranks of a job."""
    pids = rank_pids(run_dir)
    assert len(pids) == 2
    for pid in pids:
        os.kill(pid, number)


def writer_pids(run_dir: Path) -> list[int]:
    """Return the checkpoint writer processes of a job's ranks."""
    children = [one for pid in rank_pids(run_dir) for one in psutil.Process(pid).children()]
    return [
        one.pid for one in children if "kimi_pretrain.checkpoint.writer_process" in one.cmdline()
    ]


def rank_pids(run_dir: Path) -> list[int]:
    """Return the processes of a job's ranks."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "launch.local.worker" in line and str(run_dir) in line[-1] and "python" in line[0]:
            found.append(process.pid)
    return found


def wait_end(lab: Lab, job: int) -> JobState:
    """Wait until a job has ended; return its final state."""
    wait(lambda: state(lab, job).ended, f"end of job {job}", lambda: log_of(lab, job))
    return state(lab, job)


def wait(found, what: str, told=lambda: "", seconds: float = RUN_SECONDS, pause=0.25) -> None:
    """Wait until `found()` is true; on a timeout fail with `told()`."""
    end = time.monotonic() + seconds
    while not found():
        assert time.monotonic() < end, f"not after {seconds:.0f} s: {what}\n{told()}"
        time.sleep(pause)


def log_of(lab: Lab, job: int | str) -> str:
    """Return a job's output."""
    log = state(lab, job).log
    return log.read_text()[-6000:] if log.is_file() else f"{log} is not there"


def result(run_dir: Path) -> tuple[list[tuple[int, float, float]], dict]:
    """Return step, loss and gradient norm of every step, and the hashes of the final state.

    Two equal runs must agree in these.
    """
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    numbers = [(line["step"], line["loss"], line["grad_norm"]) for line in lines]
    return numbers, json.loads((run_dir / "state_hashes.json").read_text())


def status(run_dir: Path) -> dict:
    """Return status.json of a run."""
    return json.loads((run_dir / "status.json").read_text())
