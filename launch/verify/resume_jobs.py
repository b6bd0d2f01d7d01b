"""The jobs of `kimi-pretrain verify resume`: starts them, and compares what they leave behind.

straight          all steps
stopped           stopped in the middle, then resumed in the same folder
faults/NAME       resumed with a fault, in the processes of the resumed run
other_layout      resumed in another layout
"""

import shutil
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.verify import jobs as verify_jobs
from launch.verify.jobs import JobStopped, Tell

if TYPE_CHECKING:
    from kimi_pretrain.checkpoint.storage_read import Checkpoint
    from kimi_pretrain.config import Config
    from kimi_pretrain.verify.resume import Comparison, Trace

STRAIGHT, STOPPED, ELSEWHERE, FAULTS = "straight", "stopped", "other_layout", "faults"


@dataclass
class ResumeJobs:
    """The jobs of one verification.

    Attributes:
        config: of all of them.
        folder: of all run folders.
        place: of all checkpoints.
        stop: step after which a run is stopped.
        tell: takes a line about what is going on.
        opened: closes what reads checkpoints.
        seconds: that each job took.
    """

    config: "Config"
    folder: Path
    place: str
    stop: int
    tell: Tell
    opened: ExitStack
    seconds: dict[str, float] = field(default_factory=dict)

    def stop_and_resume(self, faults: tuple[str, ...]) -> "Comparison":
        """Run the three jobs of the comparison, the last of them also with each fault."""
        from kimi_pretrain.reliability.status import read_status

        self._run("uninterrupted", self.folder / STRAIGHT)
        self._run("to be stopped", self.folder / STOPPED, interrupt=True)
        status = read_status(self.folder / STOPPED)
        saved = self._saved(STOPPED, self.stop).uri
        wanted = ("stopped", self.stop, saved)
        if status is None or (status.state, status.step, status.checkpoint) != wanted:
            raise JobStopped(
                f"a rank got USR1 in step {self.stop}, after which the run was to stop, with its "
                f"checkpoint {saved}; its status.json says {status}"
            )
        name = "resumed, then with faults" if faults else "resumed"
        self._run(name, self.folder / STOPPED, resume="latest", faults=faults)
        return self._compare(STOPPED)

    def in_layout(self, overrides: tuple[str, ...]) -> "Config":
        """Return the configuration in another layout, which this machine can hold."""
        from kimi_pretrain.config import dump_config, load_config
        from kimi_pretrain.verify import resume_jobs

        if not overrides:
            other = resume_jobs.other_layout(self.config)
        else:
            file = self.folder / "config.yaml"
            file.write_text(dump_config(self.config))
            other = load_config(str(file), overrides)
            resume_jobs.check_other_layout(self.config, other, overrides)
        verify_jobs.check_machine(other)
        return other

    def resume_in(self, other: "Config") -> dict[str, Any]:
        """Resume in another layout, and compare what must be the same in any."""
        from kimi_pretrain.verify.resume_layout import compare_layouts
        from kimi_pretrain.verify.trace import read_trace

        folder = self.folder / ELSEWHERE
        self._run("other layout", folder, resume=self._saved(STOPPED, self.stop).uri, config=other)
        found, wanted = (read_trace(self.folder / name) for name in (ELSEWHERE, STRAIGHT))
        self.check_began(ELSEWHERE, found)
        verdict = compare_layouts(found, wanted, self.stop, self.config.train.dtype)
        return verdict.as_dict() | {"layout": other.layout.model_dump(mode="json")}

    def verdict(self, fault: str) -> dict[str, Any]:
        """Return what became of a fault that was planted."""
        from kimi_pretrain.verify.resume_faults import OBSTACLE, UNINTERRUPTED

        folder = self.folder / FAULTS / fault
        if (folder / OBSTACLE).is_file():
            return {"obstacle": (folder / OBSTACLE).read_text()}
        straight = f"{FAULTS}/{fault}-{UNINTERRUPTED}"
        own = (self.folder / straight).is_dir()  # it is in that run as well
        comparison = self._compare(f"{FAULTS}/{fault}", straight if own else STRAIGHT)
        return {"found": not comparison.passed, "comparison": told(comparison)}

    def _compare(self, name: str, straight: str = STRAIGHT) -> "Comparison":
        from kimi_pretrain.verify.resume import compare
        from kimi_pretrain.verify.trace import read_trace, reader

        steps = self.config.train.steps
        found, wanted = self._saved(name, steps), self._saved(straight, steps)
        traces = read_trace(self.folder / name, found), read_trace(self.folder / straight, wanted)
        self.check_began(name, traces[0])
        return compare(*traces, self.stop, reader(found, wanted))

    def check_began(self, name: str, trace: "Trace") -> None:
        """Refuse a run that began elsewhere: one from scratch would be the same, and prove nothing.

        Raises:
            JobStopped: it did.
        """
        if trace.began != self.stop:
            raise JobStopped(
                f"the resumed run ({name}) went on from step {trace.began}, not from the "
                f"checkpoint of step {self.stop}"
            )

    def _saved(self, name: str, step: int) -> "Checkpoint":
        from kimi_pretrain.checkpoint.storage_read import open_place

        place = open_place(f"{self.place}/{name}")
        self.opened.callback(place.close)
        return place.checkpoint(step)

    def _run(
        self,
        name: str,
        folder: Path,
        *,
        interrupt: bool = False,
        resume: str | None = None,
        faults: tuple[str, ...] = (),
        config: "Config | None" = None,
    ) -> None:
        from kimi_pretrain.verify.resume_jobs import saving_to
        from launch.verify.resume_worker import WORKER, ResumeJob

        config = saving_to(config or self.config, f"{self.place}/{folder.name}")
        job = ResumeJob(
            str(folder.with_suffix(".yaml")),
            str(folder),
            resume=resume,
            stop=self.stop,
            interrupt=interrupt,
            faults=faults,
            runs=str(self.folder / FAULTS),
            place=f"{self.place}/{FAULTS}",
        )
        self.seconds[name] = verify_jobs.run(job, WORKER, config, name, self.tell)


def told(comparison: "Comparison") -> dict[str, Any]:
    """Return a comparison as plain values, with what a person is told."""
    from kimi_pretrain.verify.findings import differences, suggestion

    found = None if comparison.passed else suggestion(comparison)
    return comparison.as_dict() | {"differences": differences(comparison), "suggestion": found}


@contextmanager
def temporary_place(config: "Config", folder: Path) -> Iterator[str]:
    """Give a place for checkpoints beside the user's own, which is empty again in the end."""
    from kimi_pretrain.verify.resume_jobs import place_beside

    place = place_beside(config, folder, uuid.uuid4().hex[:12])
    try:
        yield place
    finally:
        if config.checkpoint.place is not None:  # otherwise it goes, or stays, with the folder
            _remove(place)


def _remove(place: str) -> None:
    if "://" not in place:
        shutil.rmtree(place, ignore_errors=True)
        return
    from data_pipeline.store.open import open_store

    store = open_store(place)
    for key in store.list():
        store.delete(key)
    store.close()
