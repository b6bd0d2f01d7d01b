"""Starts the jobs of a verification one after the other, each in new processes."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kimi_pretrain.config import Config, describe, dump_config
from launch.local import supervise, torchrun
from launch.verify.worker import WORKER, VerifyJob


class JobStopped(ValueError):
    """A job ended early; the message names it."""


@dataclass
class Jobs:
    """The jobs of one verification."""

    folder: Path  # parent of all run folders
    tell: Callable[[str], None]  # called with a line of progress
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # duration of each job

    def announce(self, config: Config) -> None:
        """Report the config that is about to run."""
        for line in describe(config).splitlines():
            self.tell(line)

    def run(self, name: str, job: VerifyJob, config: Config) -> None:
        """Run one job to its end.

        Args:
            name: name of the job in messages.
            job: argument of each process; `job.config` is written here.
            config: config of the job.

        Raises:
            JobStopped: the job failed.
        """
        folder = Path(job.run_dir)
        folder.mkdir(exist_ok=True)
        Path(job.config).write_text(dump_config(config))
        processes = config.layout.world_size()
        self.tell(f"running {name}: {processes} process{'es' if processes > 1 else ''} ...")
        start = time.perf_counter()
        with torchrun.prepared(job, torchrun.Nodes(processes), WORKER) as (command, env):
            if processes == 1:
                command = [sys.executable, "-m", WORKER, job.argument()]
            code, message = supervise.run(command, env, folder)
        if message:
            raise JobStopped(f"{name} job: {message}")
        if code:
            raise JobStopped(f"the {name} job stopped with exit code {code}; see above why")
        self.seconds[name] = time.perf_counter() - start
