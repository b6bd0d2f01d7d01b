"""Description of a training job, passed to every process as one command-line argument.

It is one JSON object instead of flags, because torchrun matches a script's flags with its own by
prefix (`--start` is "ambiguous" to it).
"""

import json
from dataclasses import asdict, dataclass

from data_pipeline.store.addresses import check_local

WORKER = "launch.local.worker"
LATEST = "latest"
# Environment variable: folder of the rendezvous of one machine's ranks
# (`kimi_pretrain.parallel.rendezvous`).
MEETING = "KIMI_PRETRAIN_MEETING"


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        config: path of a YAML file or name of a shipped preset.
        run_dir: the run folder, shared by all ranks.
        overrides: `section.key=value` strings.
        resume: folder or URI of a complete checkpoint, or of a run (its newest checkpoint);
            "latest" for this run's newest checkpoint; None to start from scratch.
        otherwise: checkpoint to resume from if "latest" finds none.
        or_start: start from scratch if "latest" finds no checkpoint and none was ever saved.
        change_data: switch to this configuration's mixture weights and sources.

    Raises:
        ValueError: the run folder is a URI.
    """

    config: str
    run_dir: str
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    otherwise: str | None = None
    or_start: bool = False
    change_data: bool = False

    def __post_init__(self) -> None:
        check_local("--run-dir", self.run_dir)

    def argument(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(argument: str) -> "Job":
        """Return the job from the output of `argument()`."""
        values = json.loads(argument)
        # A batch script of an earlier version, where "latest" implied this, may still be queued.
        values.setdefault("or_start", True)
        return Job(**{**values, "overrides": tuple(values["overrides"])})
