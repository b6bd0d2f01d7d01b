"""One process of a verification: `python -m launch.verify.dep_worker JSON`."""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.local import worker
from launch.local.job import Job
from launch.local.quiet import quiet_libraries

WORKER = "launch.verify.dep_worker"


@dataclass(frozen=True)
class VerifyJob(Job):
    """One of the jobs that are compared; `run_dir` takes its gradients.

    Attributes:
        steps: to run; the gradients are of the last.
        faults: that the last step is run again with, one at a time.
        follow: folder of the job whose routes are followed at ties; None: this one writes its own.
        ties: the largest margin of a tie; see `kimi_pretrain.verify.routes`.
    """

    steps: int = 1
    faults: tuple[str, ...] = ()
    follow: str | None = None
    ties: float = 0.0

    @classmethod
    def inside(
        cls,
        folder: Path,
        steps: int,
        faults: Sequence[str],
        follow: str | None = None,
        ties: float = 0.0,
    ) -> "VerifyJob":
        """Return a job whose configuration lies in its folder, too."""
        place = str(folder / "config.yaml"), str(folder)
        return cls(*place, steps=steps, faults=tuple(faults), follow=follow, ties=ties)

    @staticmethod
    def parse(argument: str) -> "VerifyJob":
        """Return the job that `argument()` wrote."""
        values = json.loads(argument)
        lists = {name: tuple(values[name]) for name in ("overrides", "faults")}
        return VerifyJob(**{**values, **lists})


def run_job(job: VerifyJob) -> None:
    """Take the steps and write the gradients; rank and world come from the environment."""
    quiet_libraries()
    from kimi_pretrain.config import load_config
    from kimi_pretrain.verify.dep import Routing, measure

    config = load_config(job.config, job.overrides)
    routing = Routing(None if job.follow is None else Path(job.follow), job.ties)
    measure(config, Path(job.run_dir), job.steps, job.faults, routing)


if __name__ == "__main__":
    logging.getLogger().addHandler(logging.NullHandler())  # what stops a job is told once
    worker.leave(worker.main(sys.argv[1], VerifyJob.parse, run_job))
