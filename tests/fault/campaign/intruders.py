"""Starts in the folder of another run: a simultaneous start, and ranks started by hand."""

import os
import subprocess
import sys
import time
from dataclasses import replace

from launch.local.job import Job
from tests import ROOT
from tests.fault.campaign.compare import difference
from tests.fault.campaign.processes import PATIENCE_S, Training
from tests.fault.campaign.runs import Campaign, Result
from tests.slurm.lab import free_ports

# A rank without peers soon ends by its own watchdog.
_ALONE = "train.timeout_seconds=5"


def second_starts(campaign: Campaign) -> None:
    """Start two runs at once; both look into the folder before either has its lock."""
    begun, run_dir = time.monotonic(), campaign.folder / "at_once"
    straight, settings = campaign.straight(), campaign.settings()
    with Training(run_dir, settings) as one, Training(run_dir, settings) as other:
        codes = {training: training.wait() for training in (one, other)}
        left = [told for training in codes for told in training.left_over()]
    result = Result("two starts in one folder at once", "both before rank 0 has the lock", "")
    result.wrong += [f"left running: {told}" for told in left]
    refused = [training for training, code in codes.items() if code == 2]
    if sorted(codes.values()) != [0, 2] or "in use by another run" not in refused[0].error:
        result.wrong.append(f"expected exit 0, and 2 with the holder's name: {codes.values()}")
        result.wrong += [training.output[-600:] for training in codes]
    result.equal = difference(run_dir, straight) is None
    result.happened = f"one is refused (exit 2; {refused[0].error if refused else ''}), one trains"
    campaign.add(result, begun)


def bare_ranks(campaign: Campaign) -> None:
    """Start bare ranks, as srun does, during training; each fails while the run continues."""
    begun, run_dir = time.monotonic(), campaign.folder / "bare"
    straight, settings = campaign.straight(), campaign.settings()
    job = Job("tiny_cpu", str(run_dir), (*settings, _ALONE))
    results = []
    with Training(run_dir, settings) as first:
        first.wait_for_step(2)
        with first.held():
            for rank, expected in ((0, 2), (1, 75)):
                moment = f"step {first.steps + 1} of the run"
                result = Result(f"a bare rank {rank} in the folder of a run", moment, "")
                before = _reports(run_dir)
                done = _bare(job, rank)
                told = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
                result.happened = f"exit {done.returncode}; {told[-1] if told else ''}"
                result.noticed_s = round(time.monotonic() - begun, 1)
                if done.returncode != expected or not told:
                    result.wrong.append(
                        f"expected exit {expected} and a line: {done.stderr[-600:]}"
                    )
                if _reports(run_dir) != before:
                    result.wrong.append("it wrote into the folder")
                results.append(result)
            time.sleep(5)  # the run's supervisor looks for reports for this long
        code = first.wait()
        left = first.left_over()
    undisturbed = Result("... and the run", "", f"exit {code}, undisturbed")
    undisturbed.equal = difference(run_dir, straight) is None
    undisturbed.wrong += [f"left running: {told}" for told in left]
    if code:
        undisturbed.wrong.append(first.output[-600:])
    for result in (*results, undisturbed):
        campaign.add(replace(result), begun)


def _reports(run_dir) -> dict[str, bytes]:
    """Return every file of the folder that a process outside the run might write."""
    files = [*run_dir.glob("logs/*.txt"), *run_dir.glob("logs/*.json"), run_dir / "status.json"]
    return {file.name: file.read_bytes() for file in sorted(files)}


def _bare(job: Job, rank: int) -> subprocess.CompletedProcess[str]:
    (port,) = free_ports(1)
    variables = {
        **os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore", "RANK": str(rank),
        "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    command = [sys.executable, "-m", "launch.local.worker", job.argument()]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
