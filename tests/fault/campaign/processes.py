"""A training started as a user starts it, with its processes and their leftovers."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests import ROOT
from tests.fault.campaign.compare import read_lines
from tests.fault.campaign.phases import phase_of

SITE = Path(__file__).parent / "site"
STACKS = signal.SIGRTMIN + 3
# Far above the needs of a busy machine: a step of these runs takes half a second, a start ten.
PATIENCE_S = float(os.environ.get("CAMPAIGN_PATIENCE", "240"))
_MARK = "CAMPAIGN_RUN"


def wait_until(ready: Callable[[], Any], what: str, seconds: float = PATIENCE_S) -> Any:
    """Wait until `ready` returns a true value, and return it."""
    end = time.monotonic() + seconds
    while not (found := ready()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.01)
    return found


class Training:
    """`kimi-pretrain train` as a process whose descendants can always be found.

    Args:
        run_dir: run folder; the output file goes next to it.
        overrides: overrides of the configuration `tiny_cpu`.
        options: more arguments, such as ("--resume", "latest").
        environment: more environment variables.
        cwd: working directory of the command; None for the current one.
    """

    def __init__(
        self,
        run_dir: Path,
        overrides: tuple[str, ...],
        *options: str,
        environment: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.run_dir, self.mark, self.begun = run_dir, uuid.uuid4().hex, time.time()
        self.stacks = run_dir.parent / f"{run_dir.name}.stacks"
        self.stacks.mkdir(parents=True, exist_ok=True)
        self.output_file = run_dir.parent / f"{run_dir.name}.{self.mark[:6]}.out"
        command = [  # -P: like the installed command, which does not import from the working folder
            sys.executable, "-P", "-m", "launch.cli", "train", "--config", "tiny_cpu",
            "--run-dir", str(run_dir), *options, *overrides,
        ]  # fmt: skip
        variables = {
            **os.environ, **(environment or {}), _MARK: self.mark, "PYTHONWARNINGS": "ignore",
            "PYTHONPATH": f"{SITE}:{ROOT}", "CAMPAIGN_STACKS": str(self.stacks),
        }  # fmt: skip
        with self.output_file.open("w") as output:
            self.process = subprocess.Popen(
                command, env=variables, cwd=cwd, stdout=output, stderr=output,
                start_new_session=True,
            )  # fmt: skip

    def __enter__(self) -> "Training":
        return self

    def __exit__(self, *_: object) -> None:
        self.sweep()

    @property
    def output(self) -> str:
        """Output of the command."""
        return self.output_file.read_text()

    @property
    def error(self) -> str:
        """The last error line of the command; "" without one."""
        lines = [line for line in self.output.splitlines() if line.startswith("error: ")]
        return lines[-1] if lines else ""

    @property
    def steps(self) -> int:
        """Steps of the run, earlier starts included; 0 until this start has begun to train.

        Before that, metrics.jsonl still holds steps that will be repeated.
        """
        status = self.run_dir / "status.json"
        if not status.is_file() or status.stat().st_mtime < self.begun:
            return 0
        lines = read_lines(self.run_dir / "metrics.jsonl")
        return lines[-1]["step"] if lines else 0

    def family(self) -> list[psutil.Process]:
        """Return every living process that descends from this training, including orphans."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                mine = process.environ().get(_MARK) == self.mark
                if mine and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def ranks(self) -> dict[int, psutil.Process]:
        """Return rank -> process for the ranks that have started."""
        found = {}
        for process in self.family():
            # torchrun has the same words among its arguments, but is not a rank.
            with suppress(psutil.Error, KeyError):
                if "launch.local.worker" in process.cmdline():
                    found[int(process.environ()["RANK"])] = process
        return found

    def writers(self) -> list[psutil.Process]:
        """Return the processes that write checkpoints in the background."""
        found = []
        for process in self.family():
            with suppress(psutil.Error):
                if "kimi_pretrain.checkpoint.writer_process" in process.cmdline():
                    found.append(process)
        return found

    def torchrun(self) -> psutil.Process:
        """Return the agent that started the ranks."""
        found = [p for p in self.family() if "torch.distributed.run" in p.cmdline()]
        assert len(found) == 1, found
        return found[0]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Suspend all ranks meanwhile, so that the run cannot end first."""
        ranks = list(self.ranks().values())
        for process in ranks:
            process.suspend()
        try:
            yield
        finally:
            for process in ranks:
                with suppress(psutil.NoSuchProcess):
                    process.resume()

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl holds a step; fail if the training ends before."""
        wait_until(lambda: self.steps >= step or self.process.poll() is not None, f"step {step}")
        assert self.steps >= step, f"ended before step {step}:\n{self.output[-4000:]}"

    def wait(self, seconds: float = PATIENCE_S) -> int:
        """Wait for the end of the command and return its exit code."""
        return self.process.wait(seconds)

    def phase_of(self, process: psutil.Process) -> str:
        """Return the current phase of a process, which must have loaded `sitecustomize`."""
        file = self.stacks / f"{process.pid}.txt"
        if not file.is_file():
            return "starting"
        file.write_text("")
        process.send_signal(STACKS)
        with suppress(AssertionError):
            wait_until(lambda: "most recent call first" in file.read_text(), "a stack", 5)
        time.sleep(0.005)  # the outermost frame is written last
        return phase_of(file.read_text())

    def left_over(self, seconds: float = 60.0) -> list[str]:
        """Return the processes that still run some seconds after the end, as text."""
        end = time.monotonic() + seconds
        while (family := self.family()) and time.monotonic() < end:
            time.sleep(0.05)
        told = []
        for process in family:
            with suppress(psutil.Error):
                told.append(f"{process.pid} {' '.join(process.cmdline())[:120]}")
        return told

    def sweep(self) -> None:
        """Kill all remaining processes."""
        for process in self.family():
            with suppress(psutil.Error):
                process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
