"""Asks SLURM: submits a script, reads a job's state, follows its log until it has ended."""

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# States that no job leaves again (man squeue, JOB STATE CODES); a requeued one is PENDING.
ENDED = (
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "TIMEOUT",
)  # fmt: skip
# The controller is one process for the whole cluster: many who follow must not load it.
POLL_SECONDS = 2.0
# A controller that restarts is away for so long and loses nothing.
PATIENCE_SECONDS = 600.0


@dataclass(frozen=True)
class JobState:
    """What SLURM knows of a job or of one element of an array.

    Attributes:
        label: "12", or "12_3" for element 3 of array 12.
        state: as SLURM calls it, such as "RUNNING".
        reason: why it waits or how it ended; "None" where there is nothing to say.
        exit_code: of the batch script; 128 + signal where one ended it.
        restarts: how often it went back into the queue.
        nodes: where it runs.
        log: the file with its output.

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
        """Whether nothing more will happen to it."""
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
    """Refuse where there is no SLURM.

    Raises:
        ValueError: sbatch is not on PATH.

    """
    if shutil.which("sbatch") is None:
        raise ValueError("sbatch is not on PATH; run this on a login node, or use --dry-run")


def submit(script: Path) -> int:
    """Submit a script; returns the job's number.

    Raises:
        ValueError: SLURM refused it; says what SLURM said.

    """
    done = subprocess.run(
        ["sbatch", "--parsable", str(script)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ValueError(f"sbatch refused {script}: {' '.join(done.stderr.split())}")
    return int(done.stdout.split(";")[0])


def parse_job(text: str) -> JobState:
    """Return what a line of `scontrol --oneliner show job` says."""
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
    """Return the state of a job, of each element of an array; None where SLURM does not answer.

    Raises:
        RuntimeError: SLURM has forgotten the job (it does a while after its end) or never knew it.

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
    """What was added to a file since the last look; the file need not exist yet."""

    def __init__(self, file: Path):
        self.file, self._read = file, 0

    def lines(self) -> Iterator[str]:
        """Yield new whole lines, without their ends."""
        try:
            with self.file.open("rb") as file:
                file.seek(self._read)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        # A progress bar paints its line again and again: only the last picture counts.
        for line in whole.decode(errors="replace").split("\n")[:-1]:
            yield line.rsplit("\r", 1)[-1]


def follow(
    job: int,
    show: Callable[[str], None],
    tell: Callable[[str], None],
) -> list[JobState]:
    """Show a job's log until it has ended; returns how it ended, each element of an array.

    Args:
        job: its number.
        show: takes a line of the log; of an array with the element in front.
        tell: takes a line about a change of state.

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
            # What stands in the log by now comes before the state that is told.
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
    """Return 0 if all ended well, else the first other exit code, and 1 for those without one."""
    for one in found:
        if one.state != "COMPLETED":
            return one.exit_code or 1
    return 0
