"""The description of a training job that every process gets as one argument on its command line.

It is one JSON object and no flags, because torchrun matches a script's flags with its own by prefix
(`--start` is "ambiguous" to it).
"""

import json
from dataclasses import asdict, dataclass

from data_pipeline.store.addresses import check_local

WORKER = "launch.local.worker"
LATEST = "latest"
# Environment variable: the folder where ranks of one machine meet
# (`kimi_pretrain.parallel.rendezvous`).
MEETING = "KIMI_PRETRAIN_MEETING"


@dataclass(frozen=True)
class Job:
    """A training job.

    Attributes:
        config: path of a YAML file or name of a shipped preset.
        run_dir: the run folder, shared by all ranks.
        overrides: `section.key=value` strings.
        resume: folder or URI of a complete checkpoint, or of a run (its newest one); "latest" for
            the newest one of this run; None to begin from scratch.
        otherwise: checkpoint to resume from if "latest" finds none.
        or_start: begin from scratch if "latest" finds none and none was ever saved.
        change_data: go over to this configuration's shares and sources.

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
        """Return the job that `argument()` wrote."""
        values = json.loads(argument)
        # A batch script of an earlier version may still be queued: there "latest" implied this.
        values.setdefault("or_start", True)
        return Job(**{**values, "overrides": tuple(values["overrides"])})
