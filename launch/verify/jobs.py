"""Starts the jobs of a verification, each in processes of its own, one after the other."""

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from kimi_pretrain.config import Config, describe, dump_config
from launch.local import supervise, torchrun
from launch.verify.worker import WORKER, VerifyJob


class JobStopped(ValueError):
    """One of the jobs did not come to its end; the message says which."""


@dataclass
class Jobs:
    """The jobs of one verification."""

    folder: Path  # of all run folders
    tell: Callable[[str], None]  # takes a line of progress
    seconds: dict[str, float] = field(default_factory=dict[str, float])  # that each job took

    def announce(self, config: Config) -> None:
        """Tell what is going to run."""
        for line in describe(config).splitlines():
            self.tell(line)

    def run(self, name: str, job: VerifyJob, config: Config) -> None:
        """Run one job to its end.

        Args:
            name: of the job, in messages.
            job: what each process gets; `job.config` is written here.
            config: of the job.

        Raises:
            JobStopped: it failed.
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
