"""Runs one process of a verification: `python -m launch.verify.worker JSON`, under torchrun."""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.local import worker
from launch.local.job import Job
from launch.local.quiet import quiet_libraries
from launch.local.signals import StopSignal

WORKER = "launch.verify.worker"


@dataclass(frozen=True)
class VerifyJob(Job):
    """One of the jobs that are compared.

    Attributes:
        kind: work of the ranks, "dep" or "resume".
        options: arguments of `kimi_pretrain.verify.dep.run_steps` or of
            `kimi_pretrain.verify.resume.run_training`, by name.
    """

    kind: str = ""
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @staticmethod
    def parse(argument: str) -> "VerifyJob":
        """Return the job that `argument()` serialised."""
        values = json.loads(argument)
        return VerifyJob(**{**values, "overrides": tuple(values["overrides"])})


def run_job(job: VerifyJob) -> None:
    """Run this rank of a job; rank and world size come from the environment."""
    stop = StopSignal()
    if job.kind == "resume":  # this training saves when it is asked to stop
        stop.install()
    quiet_libraries()
    # Imported late so that signals are handled before torch has loaded.
    from kimi_pretrain.config import load_config

    config, folder = load_config(job.config, job.overrides), Path(job.run_dir)
    if job.kind == "resume":
        from kimi_pretrain.verify.resume import run_training

        run_training(config, folder, job.resume, stop.reason, **job.options)
    else:
        from kimi_pretrain.verify.dep import run_steps

        run_steps(config, folder, **job.options)


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # the error is printed once elsewhere
    worker.leave(worker.main(sys.argv[1], VerifyJob.parse, run_job))
