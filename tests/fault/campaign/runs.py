"""Runs of the campaign: small trainings, their uninterrupted references, and the results."""

import json
import os
import random
import shutil
import socket
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kimi_pretrain.checkpoint.storage_read import open_place
from tests.dist import corpus
from tests.dist.jobs import SMALL, layout
from tests.fault.campaign.compare import difference, difference_of_lines
from tests.fault.campaign.processes import Training

SEED = "train.seed=1"
FOUR = (*layout(pp=2, dp=2, ep=2), SEED)
TWO = (*layout(dp=2), SEED)
# Also restarts a run that was killed before its first save.
LATEST = ("--resume", "latest", "--or-start")
KILLED_STEPS, STEPS, EVERY = 60, 8, 2


@dataclass
class Result:
    """One fault and its outcome; a row of the table.

    Attributes:
        fault: the injected fault.
        moment: the moment of the fault.
        happened: reaction of the run, or the text of its error.
        noticed_s: seconds until the command had ended; None if the fault did not end it.
        again: number of repeated steps; None if no steps could be lost.
        equal: True if the resumed run equals the uninterrupted one; None if it cannot resume and
            `happened` says what to do.
        wrong: violations; empty if all is well.
        seconds: duration of the whole case.
    """

    fault: str
    moment: str
    happened: str
    noticed_s: float | None = None
    again: int | None = None
    equal: bool | None = None
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def sound(self) -> bool:
        """True if the case went as promised."""
        return not self.wrong and self.equal is not False


class Campaign:
    """A folder of runs over one corpus, with the uninterrupted runs and the results.

    Args:
        folder: exclusive folder for all files.
        seed: determines all moments and choices.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.folder, self.seed = folder, seed
        self.data_root = folder / "corpus"
        self.results: list[Result] = []
        self.skipped: dict[str, str] = {}
        self._straight: dict[str, Path] = {}

    def build(self) -> None:
        """Build the corpus."""
        if not self.data_root.is_dir():
            self.data_root.mkdir(parents=True)
            corpus.build(self.data_root)

    def draw(self, *name: object) -> random.Random:
        """Return a generator for one purpose, the same in every campaign with this seed."""
        return random.Random(json.dumps([self.seed, *map(str, name)]))

    def settings(self, *more: str, axes: tuple[str, ...] = TWO, steps: int = STEPS) -> tuple:
        """Return the overrides for a run of the campaign."""
        common = (f"data.root={self.data_root}", f"train.steps={steps}")
        return (*SMALL, *common, f"checkpoint.every={EVERY}", *axes, *more)

    def straight(
        self, *more: str, axes: tuple[str, ...] = TWO, steps: int = STEPS, name: str = ""
    ) -> Path:
        """Return the folder of an uninterrupted run, which runs on first request."""
        name = name or f"straight_{'two' if axes == TWO else 'four'}_{steps}"
        if name not in self._straight:
            run_dir = self.folder / name
            with Training(run_dir, self.settings(*more, axes=axes, steps=steps)) as training:
                code = training.wait()
                assert code == 0, f"the uninterrupted run failed:\n{training.output[-4000:]}"
                assert not (left := training.left_over()), left
            self._straight[name] = run_dir
        return self._straight[name]

    def copy_of_straight(self, name: str) -> Path:
        """Return a copy of the short uninterrupted run, for a test to damage."""
        run_dir = self.folder / name
        shutil.copytree(self.straight(), run_dir)
        return run_dir

    def add(self, result: Result, begun: float) -> Result:
        """Record a result and print it."""
        result.seconds = round(time.monotonic() - begun, 1)
        result.moment, result.happened = self._plain(result.moment), self._plain(result.happened)
        result.wrong = [self._plain(told) for told in result.wrong]
        self.results.append(result)
        mark = "ok   " if result.sound else "WRONG"
        noticed = "" if result.noticed_s is None else f", after {result.noticed_s:.1f} s"
        again = "" if result.again is None else f", {result.again} steps again"
        equal = {True: ", equal", False: ", NOT EQUAL", None: ""}[result.equal]
        print(
            f"{mark} {result.fault} [{result.moment}]: {result.happened}{noticed}{again}{equal}"
            f" ({result.seconds:.0f} s){''.join(f'; {told}' for told in result.wrong)}",
            flush=True,
        )
        return result

    def _plain(self, text: str) -> str:
        """Return text without machine-specific names, because it goes into documents."""
        return text.replace(f"{self.folder}/", "").replace(socket.gethostname(), "HOST")

    def go_on(self, run_dir: Path, settings: tuple, straight: Path, result: Result, *options: str):
        """Resume a run to its end and record whether it equals the uninterrupted one."""
        with Training(run_dir, settings, *LATEST, *options) as training:
            code = training.wait()
            if code:
                result.wrong.append(
                    f"resume ended with {code}: {training.error or 'no error line'}"
                )
                print(training.output[-3000:], flush=True)
            result.wrong += [f"left running: {told}" for told in training.left_over()]
        found = difference(run_dir, straight)
        result.equal = found is None
        if found:
            result.wrong.append(found)

    def dump(self) -> dict:
        """Return the results as JSON-serialisable values."""
        return {
            "seed": self.seed,
            "results": [asdict(result) for result in self.results],
            "skipped": self.skipped,
        }


def newest(place: str | os.PathLike) -> int:
    """Return the step of the newest complete checkpoint; 0 without one."""
    opened = open_place(place)
    with suppress(OSError):
        steps = opened.steps()
        opened.close()
        return steps[-1] if steps else 0
    return 0


def damage_of_newest(place: str | os.PathLike) -> list[str]:
    """Return the problems of the newest complete checkpoint; [] if there is none."""
    opened = open_place(place)
    steps = opened.steps()
    problems = opened.checkpoint(steps[-1]).verify() if steps else []
    opened.close()
    return problems


def after_strike(
    training: Training, result: Result, straight: Path, place: str | os.PathLike, done: int
) -> None:
    """Wait for the end of a run hit by a fault, and check what it left.

    Args:
        done: steps in its metrics when the fault hit.
    """
    struck = time.monotonic()
    code = training.wait()
    result.noticed_s = round(time.monotonic() - struck, 1)
    result.wrong += [f"left running: {told}" for told in training.left_over()]
    result.wrong += damage_of_newest(place)
    if found := difference_of_lines(training.run_dir, straight):
        result.wrong.append(found)
    kept = newest(place)
    result.again = max(0, done - kept)
    told = f"; {training.error}" if training.error and code in (2, 75) else ""
    result.happened = f"exit {code}{told}; goes on from step {kept}"
