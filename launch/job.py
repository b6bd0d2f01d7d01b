"""What every process of a training job is told, as one argument on its command line.

torchrun compares a script's flags with its own by prefix (`--start` is "ambiguous" to it), so a
process gets no flags at all but one JSON object.
"""

import json
from dataclasses import asdict, dataclass

WORKER = "launch.worker"
LATEST = "latest"


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        config: path of a YAML file or name of a shipped preset.
        run_dir: the run folder, shared by all ranks.
        overrides: `section.key=value` strings.
        resume: folder or URI of a complete checkpoint, "latest" for the newest one of the run
            (from scratch if there is none), or None.
        otherwise: checkpoint to go on from where "latest" finds none.

    """

    config: str
    run_dir: str
    overrides: tuple[str, ...] = ()
    resume: str | None = None
    otherwise: str | None = None

    def argument(self) -> str:
        """Return the job as one line of JSON."""
        return json.dumps(asdict(self))

    @staticmethod
    def parse(argument: str) -> "Job":
        """Return the job that `argument()` wrote."""
        values = json.loads(argument)
        return Job(**{**values, "overrides": tuple(values["overrides"])})
