"""`kimi-pretrain verify resume`: compares a resumed run to a run that was never stopped.

straight          all steps
stopped           stopped in the middle, then resumed in the same folder
faults/NAME       resumed with a fault, in the processes of the resumed run
other_layout      resumed in another layout
"""

import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_pipeline.store.addresses import split_place
from data_pipeline.store.open import open_store
from kimi_pretrain.checkpoint.storage_read import Checkpoint, open_place
from kimi_pretrain.config import Config, dump_config, load_config
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.reliability.status import read_status
from kimi_pretrain.verify import configs
from kimi_pretrain.verify.result import Outcome, Result
from kimi_pretrain.verify.resume_compare import (
    LayoutComparison,
    ResumeComparison,
    compare,
    compare_layouts,
)
from kimi_pretrain.verify.resume_faults import RESUME_FAULTS
from kimi_pretrain.verify.traces import OBSTACLE, UNINTERRUPTED, Trace, read_trace, reader
from launch.verify.jobs import Jobs, JobStopped
from launch.verify.terminal import number
from launch.verify.verification import Verification, check_machine
from launch.verify.worker import VerifyJob

STRAIGHT, STOPPED, ELSEWHERE, FAULTS = "straight", "stopped", "other_layout", "faults"


@dataclass(frozen=True)
class VerifyResume(Verification):
    """Verification that a resumed run equals a run that was never stopped.

    Attributes:
        steps: number of steps of the run that is never stopped.
        stop_after: step after which the other run is stopped.
        elsewhere: overrides of another layout to resume in as well; () chooses a layout, None
            skips this.
    """

    steps: int = 4
    stop_after: int = 2
    elsewhere: tuple[str, ...] | None = None
    faults = RESUME_FAULTS
    verdicts = {
        "comparison": (
            "the resumed run is the run that was never stopped, bit for bit",
            "the resumed run is not the run that was never stopped",
        ),
        "elsewhere": (
            "in another layout the same but for rounding",
            "in the other layout it is another run",
        ),
    }

    def prepare(self, config: Config) -> Config:
        """Return the config of all jobs."""
        return configs.resumable(config, self.steps, self.stop_after)

    def run(self, config: Config, jobs: Jobs, faults: Sequence[str]) -> Result:
        """Run the jobs of the comparison, the last also with each fault; then the other layout."""
        other = self._other(config, jobs.folder)
        check_start(config, self.steps, ranks_here=config.layout.world_size())
        jobs.announce(config)
        with temporary_place(config, jobs.folder) as place, ExitStack() as opened:
            runs = Runs(config, jobs, place, self.stop_after, opened)
            comparison = runs.stop_and_resume(faults)
            return Result(
                comparison,
                {name: runs.outcome(name) for name in faults},
                {"elsewhere": None if other is None else runs.resume_in(other)},
                {
                    "stop_after": self.stop_after,
                    "place": config.checkpoint.place or "run folder",
                    "asynchronous": config.checkpoint.asynchronous,
                },
            )

    def _other(self, config: Config, folder: Path) -> Config | None:
        """Return the config in the other layout, or None if it is not requested."""
        if self.elsewhere is None:
            return None
        if not self.elsewhere:
            other = configs.other_layout(config)
        else:
            file = folder / "config.yaml"
            file.write_text(dump_config(config))
            other = load_config(str(file), self.elsewhere)
            configs.check_other_layout(config, other, self.elsewhere)
        check_machine(other)
        return other

    def lines(self, result: dict[str, Any]) -> list[str]:
        """Return the extent of the comparison and the differences."""
        c, elsewhere = result["comparison"], result["elsewhere"]
        compared = (
            f"stopped in step {result['stop_after']} of {result['steps']}, resumed in new "
            f"processes: compared {c['numbers']:,} numbers of {c['steps']} "
            f"step{'' if c['steps'] == 1 else 's'} and {c['tensors']:,} tensors"
        )
        if c["restored_tensors"] == []:
            compared += ", these also at the moment the run went on"
        suggested = [f"this suggests: {c['suggestion']}"] if c["suggestion"] else []
        found = [compared, *(f"  {line}" for line in (*c["differences"], *suggested))]
        return found + (_elsewhere_lines(elsewhere) if elsewhere else [])

    def evidence(self, comparison: dict[str, Any]) -> str:
        """Return the first difference."""
        return next(iter(comparison["differences"]), "")


def chosen_layout(other_layout: str | None, layouts: bool) -> tuple[str, ...] | None:
    """Return the overrides of the other layout to resume in; () to choose one, None to skip it.

    Raises:
        ValueError: both options are given, or the text is empty.
    """
    if other_layout is None:
        return () if layouts else None
    if layouts:
        raise ValueError("--layouts chooses another layout itself; leave out --other-layout")
    if not other_layout.split():
        raise ValueError('--other-layout is empty; give for example "layout.pp=1 layout.dp=2"')
    return tuple(other_layout.split())


@dataclass
class Runs:
    """The runs of one verification."""

    config: Config  # config of all runs
    jobs: Jobs
    place: str  # parent of all checkpoint locations
    stop: int  # step after which a run is stopped
    opened: ExitStack = field(default_factory=ExitStack)  # closes open checkpoint locations

    def stop_and_resume(self, faults: Sequence[str]) -> ResumeComparison:
        """Run the three jobs of the comparison, the last also with each fault."""
        self._run("uninterrupted", STRAIGHT)
        self._run("to be stopped", STOPPED, interrupt=True)
        status = read_status(self.jobs.folder / STOPPED)
        saved = self._saved(STOPPED, self.stop).uri
        wanted = ("stopped", self.stop, saved)
        if status is None or (status.state, status.step, status.checkpoint) != wanted:
            raise JobStopped(
                f"a rank got USR1 in step {self.stop}, after which the run was to stop, with its "
                f"checkpoint {saved}; its status.json says {status}"
            )
        name = "resumed, then with faults" if faults else "resumed"
        self._run(name, STOPPED, resume="latest", faults=faults)
        return self._compare(STOPPED)

    def resume_in(self, other: Config) -> LayoutComparison:
        """Resume in another layout, and compare the values that do not depend on the layout."""
        start = self._saved(STOPPED, self.stop).uri
        self._run("other layout", ELSEWHERE, resume=start, config=other)
        found, wanted = (read_trace(self.jobs.folder / name) for name in (ELSEWHERE, STRAIGHT))
        self.check_began(ELSEWHERE, found)
        layout = other.layout.model_dump(mode="json")
        return compare_layouts(found, wanted, self.stop, self.config.train.dtype, layout)

    def outcome(self, fault: str) -> Outcome:
        """Return the outcome of a planted fault."""
        folder = self.jobs.folder / FAULTS
        if (folder / fault / OBSTACLE).is_file():
            return (folder / fault / OBSTACLE).read_text()
        own = UNINTERRUPTED.format(fault)
        beside = f"{FAULTS}/{own}" if (folder / own).is_dir() else STRAIGHT
        return self._compare(f"{FAULTS}/{fault}", beside)

    def _compare(self, name: str, straight: str = STRAIGHT) -> ResumeComparison:
        steps = self.config.train.steps
        last = self._saved(name, steps), self._saved(straight, steps)
        found = read_trace(self.jobs.folder / name, last[0])
        wanted = read_trace(self.jobs.folder / straight, last[1])
        self.check_began(name, found)
        return compare(found, wanted, self.stop, reader(*last))

    def check_began(self, name: str, trace: Trace) -> None:
        """Refuse a run that did not resume: a run from scratch would be equal and prove nothing.

        Raises:
            JobStopped: the run started from another step.
        """
        if trace.began != self.stop:
            raise JobStopped(
                f"the resumed run ({name}) went on from step {trace.began}, not from the "
                f"checkpoint of step {self.stop}"
            )

    def _saved(self, name: str, step: int) -> Checkpoint:
        place = open_place(f"{self.place}/{name}")
        self.opened.callback(place.close)
        return place.checkpoint(step)

    def _run(
        self, name: str, folder: str, *, interrupt: bool = False, resume: str | None = None,
        faults: Sequence[str] = (), config: Config | None = None,
    ) -> None:  # fmt: skip
        options = {
            "stop": self.stop, "interrupt": interrupt, "faults": list(faults),
            "runs": str(self.jobs.folder / FAULTS), "place": f"{self.place}/{FAULTS}",
        }  # fmt: skip
        path = self.jobs.folder / folder
        job = VerifyJob(f"{path}.yaml", str(path), resume=resume, kind="resume", options=options)
        saving = configs.saving_to(config or self.config, f"{self.place}/{folder}")
        self.jobs.run(name, job, saving)


@contextmanager
def temporary_place(config: Config, folder: Path) -> Iterator[str]:
    """Yield a temporary checkpoint location, below the configured location if there is one.

    It is deleted at the end. Without a configured location it is inside `folder`, the folder of the
    verification, which is kept or deleted as a whole.
    """
    own = config.checkpoint.place
    if own is None:
        yield str(folder / "checkpoints")
        return
    is_uri = bool(split_place("checkpoint.place", own)[0])
    beside = own.rstrip("/") if is_uri else str(Path(own).resolve())
    place = f"{beside}/verify-resume-{uuid.uuid4().hex[:12]}"
    try:
        yield place
    finally:
        if not is_uri:
            shutil.rmtree(place, ignore_errors=True)
        else:
            store = open_store(place)
            for key in store.list():
                store.delete(key)
            store.close()


def _elsewhere_lines(elsewhere: dict[str, Any]) -> list[str]:
    """Return the lines about the run that resumed in another layout."""
    axes = {name: value for name, value in elsewhere["layout"].items() if value not in (1, None)}
    layout = " ".join(f"{name}={value}" for name, value in axes.items()) or "one process"
    names = ("loss_errors", "norm_errors")
    losses, norms = (", ".join(number(error) for error in elsewhere[name]) for name in names)
    if elsewhere["heldout_errors"]:
        norms += f", of the held-out loss {', '.join(map(number, elsewhere['heldout_errors']))}"
    first, others = elsewhere["allowed"]
    errors = (
        f"resumed with {layout}: errors of the loss {losses}, of the gradient norm {norms} "
        f"(rounding explains {first:.0e} in the first step, {others:.0e} after it)"
    )
    if not elsewhere["after"]:
        return [f"{errors}; every step read the same samples"]
    one = elsewhere["after"][0]
    differs = f"{one['name']} is {one['found']}, was {one['wanted']}"
    return [errors, f"  step {one['step']} read others: {differs}"]
