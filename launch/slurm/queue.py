"""Talks to SLURM: submits a script, reads a job's state, and follows its log until it ends."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Final states (man squeue, JOB STATE CODES); a requeued job is PENDING.
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
)  # fmt: skip
# One controller serves the whole cluster, and many commands may poll it.
POLL_SECONDS = 2.0
# Tolerated outage: a restart of the controller takes time but loses no job.
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class JobState:
    """State of a job, or of one element of an array.

    Attributes:
        label: "12", or "12_3" for element 3 of array 12.
        state: SLURM's name of the state, such as "RUNNING".
        reason: why the job waits or how it ended; SLURM writes "None" for no reason.
        exit_code: exit code of the batch script; 128 + signal if a signal ended it.
        restarts: number of requeues.
        nodes: nodes on which it runs.
        log: path of its output file.
    """

    label: str
    state: str
    reason: str
    exit_code: int
    restarts: int
    nodes: str
    log: Path

    @property
    def ended(self) -> bool:
        """True if the state is final."""
        return self.state in ENDED

    def __str__(self) -> str:
        text = f"job {self.label} {self.state}"
        if self.ended:
            times = f", {self.restarts} requeues" if self.restarts else ""
            return f"{text}, exit code {self.exit_code}{times}"
        if self.state == "RUNNING":
            return f"{text} on {self.nodes}" + (f", start {self.restarts}" if self.restarts else "")
        return text if self.reason == "None" else f"{text} ({self.reason})"


def check_slurm() -> None:
    """Refuse a machine without SLURM.

    Raises:
        ValueError: sbatch is not on PATH.
    """
    if shutil.which("sbatch") is None:
        raise ValueError("sbatch is not on PATH; run this on a login node, or use --dry-run")


def submit(script: Path) -> int:
    """Submit a script and return the job's number.

    Raises:
        ValueError: SLURM refused the script; contains SLURM's message.
    """
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {' '.join(done.stderr.split())}")
    return int(done.stdout.split(";")[0])


def parse_job(text: str) -> JobState:
    """Parse a line of `scontrol --oneliner show job`."""
    values = dict(re.findall(r"(\w+)=(\S*)", text))
    label = values["JobId"]
    if "ArrayTaskId" in values:
        label = f"{values['ArrayJobId']}_{values['ArrayTaskId']}"
    code, _, signal = values.get("ExitCode", "0:0").partition(":")
    exit_code = int(code) or (128 + int(signal) if int(signal or 0) else 0)
    return JobState(
        label,
        values["JobState"],
        values.get("Reason", "None"),
        exit_code,
        int(values.get("Restarts", 0)),
        values.get("NodeList", ""),
        Path(values.get("StdOut", "/dev/null")),
    )


def states(job: int) -> list[JobState] | None:
    """Return the state of a job, or of each element of an array; None if SLURM does not answer.

    Raises:
        RuntimeError: SLURM does not know the job; it forgets a job some time after its end.
    """
    done = subprocess.run(
        ["scontrol", "--oneliner", "show", "job", str(job)],
        capture_output=True,
        text=True,
        check=False,
    )
    if "Invalid job id" in done.stderr:
        raise RuntimeError(f"SLURM knows nothing of job {job} any more; try sacct -j {job}")
    if done.returncode:
        return None
    return [parse_job(line) for line in done.stdout.splitlines() if line.strip()]


class Tail:
    """Reads lines added to a file since the last call; the file need not exist yet."""

    def __init__(self, file: Path):
        self.file, self._read = file, 0

    def lines(self) -> Iterator[str]:
        """Yield the new complete lines, without line ends."""
        try:
            with self.file.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        # A progress bar rewrites its line after each "\r": only the last version matters.
        for line in whole.decode(errors="replace").split("\n")[:-1]:
            yield line.rsplit("\r", 1)[-1]


def follow(
    job: int,
    show: Callable[[str], None],
    tell: Callable[[str], None],
) -> list[JobState]:
    """Show a job's log until it ends; return its final state, or one state per array element.

    Args:
        job: number of the job.
        show: called with each line of the log; for an array, the element precedes the line.
        tell: called with a line for each change of state.

    Raises:
        RuntimeError: SLURM did not answer for `PATIENCE_SECONDS`, or has forgotten the job.
    """
    known: dict[str, str] = {}
    tails: dict[str, Tail] = {}
    heard = time.monotonic()
    while True:
        found = states(job)
        if found is None:
            if time.monotonic() - heard > PATIENCE_SECONDS:
                raise RuntimeError(f"SLURM says nothing about job {job}; try squeue, or sacct")
            time.sleep(POLL_SECONDS)
            continue
        heard = time.monotonic()
        for one in found:
            # Show the log first: its lines are older than the change of state reported below.
            tail = tails.setdefault(one.label, Tail(one.log))
            front = f"{one.label}: " if "_" in one.label else ""
            for line in tail.lines():
                show(front + line)
            if known.get(one.label) != str(one):
                tell(str(one))
                known[one.label] = str(one)
        if all(one.ended for one in found):
            return found
        time.sleep(POLL_SECONDS)


def worst_exit_code(found: Sequence[JobState]) -> int:
    """Return 0 if all completed, else the first failed job's exit code, or 1 if it has none."""
    for one in found:
        if one.state != "COMPLETED":
            return one.exit_code or 1
    return 0
