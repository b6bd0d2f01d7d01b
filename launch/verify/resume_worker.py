"""One process of a job of `kimi-pretrain verify resume`, started by torchrun.

It trains as `launch.local.worker` does, and is watched.
"""

from launch.local.signals import StopSignal

# Before anything that takes time, as in `launch.local.worker`.
STOP = StopSignal().install() if __name__ == "__main__" else StopSignal()

import json  # noqa: E402
import logging  # noqa: E402
import sys  # noqa: E402
from contextlib import nullcontext  # noqa: E402
from dataclasses import dataclass  # noqa: E402
from pathlib import Path  # noqa: E402

from launch.local import worker  # noqa: E402
from launch.local.job import Job  # noqa: E402
from launch.local.quiet import quiet_libraries  # noqa: E402

WORKER = "launch.verify.resume_worker"


@dataclass(frozen=True)
class ResumeJob(Job):
    """One of the runs that are compared.

    Attributes:
        stop: step after which a run of the comparison is stopped.
        interrupt: this is the one; a rank gets USR1.
        faults: to plant one at a time, after this run, each into a run that goes on like it.
        runs, place: of the folders and of the checkpoints of the runs with faults.
    """

    stop: int = 0
    interrupt: bool = False
    faults: tuple[str, ...] = ()
    runs: str = ""
    place: str = ""

    @staticmethod
    def parse(argument: str) -> "ResumeJob":
        """Return the job that `argument()` wrote."""
        values = json.loads(argument)
        lists = {name: tuple(values[name]) for name in ("overrides", "faults")}
        return ResumeJob(**{**values, **lists})


def run_job(job: ResumeJob) -> None:
    """Train, once and then with each fault; rank and world come from the environment."""
    quiet_libraries()
    from kimi_pretrain.config import load_config
    from kimi_pretrain.verify.resume_runs import one_mesh, train_watched, train_with_faults

    config = load_config(job.config, job.overrides)
    with one_mesh(config) if job.faults else nullcontext():
        train_watched(
            config, Path(job.run_dir), job.resume, job.stop, STOP.reason, interrupt=job.interrupt
        )
        train_with_faults(config, Path(job.runs), job.place, job.stop, job.faults)


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # what stops a job is told once
    worker.leave(worker.main(sys.argv[1], ResumeJob.parse, run_job))
