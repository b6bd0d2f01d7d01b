"""Kills random ranks with SIGKILL at random moments of one run, resuming with `latest` each time.

A month-long run is interrupted hundreds of times. Here one run is interrupted repeatedly, and at
its end it must equal the uninterrupted run. The seed determines the moments: a delay within a step
or within the start-up, or the first sight of a save or an upload.
"""

import random
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.fault.campaign.processes import Training, wait_until
from tests.fault.campaign.runs import (
    EVERY,
    FOUR,
    KILLED_STEPS,
    LATEST,
    TWO,
    Campaign,
    Result,
    after_strike,
    newest,
)
from tests.fault.fault_proxy import Fault, FaultProxy

# Target of each kill in the two chains.
LOCAL = ("step", "optimizer", "save", "step", "start", "step", "optimizer", "save") * 2
UPLOADS = ("upload",) * 4
# At most this many steps pass between a resume and a kill; approximate seconds of a step and a
# start.
_STEPS, _STEP_S, _START_S = 3, 0.6, 8.0


def kills_of_ranks(campaign: Campaign, number: int = len(LOCAL)) -> None:
    """Run a chain of kills with checkpoints in the run folder."""
    straight = campaign.straight(axes=FOUR, steps=KILLED_STEPS)
    settings = campaign.settings("checkpoint.keep_last=2", axes=FOUR, steps=KILLED_STEPS)
    run_dir = campaign.folder / "killed"
    place = run_dir / "checkpoints"

    def watch() -> Callable[[], str]:
        return partials(place)

    _chain(campaign, run_dir, settings, straight, str(place), LOCAL[:number], watch)


def kills_in_uploads(campaign: Campaign, proxy: FaultProxy, bucket: str) -> None:
    """Run a chain of kills during checkpoint uploads to S3, which answers late."""
    straight = campaign.straight(axes=TWO, steps=3 * EVERY + len(UPLOADS) * EVERY)
    steps = 3 * EVERY + len(UPLOADS) * EVERY
    place = f"s3://{bucket}/killed_in_uploads"
    settings = campaign.settings(f"checkpoint.place={place}", axes=TWO, steps=steps)
    proxy.faults = [Fault("late", method="PUT", path="safetensors", times=None, delay=0.4)]
    run_dir = campaign.folder / "killed_in_uploads"
    _chain(campaign, run_dir, settings, straight, place, UPLOADS, partial(uploads, proxy, place))
    proxy.faults = []


def partials(place: Path) -> Callable[[], str]:
    """Return a function that lists the save folders begun since this call; "" if none."""
    begun = time.time()

    def saving() -> str:
        found = []
        for folder in place.glob("*.partial"):
            with suppress(FileNotFoundError):  # the save has completed meanwhile
                found += [folder.name] if folder.stat().st_mtime > begun else []
        return ", ".join(sorted(found))

    return saving


def uploads(proxy: FaultProxy, place: str) -> Callable[[], str]:
    """Return a function that names the checkpoint uploading to `place` since this call; "" if none.

    Objects of an earlier, torn upload do not count.
    """
    inside, begun = place.removeprefix("s3:/"), len(proxy.requests)

    def uploading() -> str:
        sent = [r.path for r in proxy.requests[begun:] if r.method in ("PUT", "POST")]
        names = [p.removeprefix(inside).split("/")[1] for p in sent if p.startswith(f"{inside}/")]
        last = max((name for name in names if name.startswith("step_")), default="")
        return f"upload of {last}" if last > f"step_{newest(place):08d}" else ""

    return uploading


def _chain(
    campaign: Campaign,
    run_dir: Path,
    settings: tuple,
    straight: Path,
    place: str,
    aims: tuple[str, ...],
    watch: Callable[[], Callable[[], str]],
) -> None:
    results = []
    for number, aim in enumerate(aims):
        begun, draw, saving = time.monotonic(), campaign.draw(run_dir.name, number), watch()
        with Training(run_dir, settings, *LATEST) as training:
            _wait_for(aim, training, draw, newest(place), saving)
            ranks = training.ranks()
            if training.process.poll() is not None or not ranks:
                campaign.skipped[f"{run_dir.name}, kill {number + 1}"] = "the run had ended"
                break
            rank = draw.choice(sorted(ranks))
            phase = _phase_at(aim, training, ranks[rank])
            ranks[rank].kill()
            done, save = training.steps, saving()
            where = f"step {done + 1}, {phase}" if done else phase
            under_way = f"; {save} under way" if save else ""
            result = Result(f"kill -9 of rank {rank}", f"{where}{under_way}", "", None)
            after_strike(training, result, straight, place, done)
            results.append(campaign.add(result, begun))
    begun = time.monotonic()
    last = Result(f"after {len(results)} kills", "", "ran to its end")
    campaign.go_on(run_dir, settings, straight, last)
    for result in results:  # an error after any kill shows in the final comparison at the latest
        result.equal = last.equal
    campaign.add(last, begun)


def _phase_at(aim: str, training: Training, rank: psutil.Process) -> str:
    """Return the phase of a rank; for the aim "optimizer", wait until the rank is in that phase."""

    def found() -> str:
        phase = training.phase_of(rank)
        return phase if aim != "optimizer" or phase.startswith("optimizer") else ""

    return wait_until(found, "the optimizer")


def _wait_for(
    aim: str, training: Training, draw: random.Random, base: int, saving: Callable[[], str]
) -> None:
    """Wait for the moment of the kill."""
    if aim == "start":
        wait_until(lambda: len(training.ranks()) > 1, "the ranks")
        time.sleep(draw.uniform(0, _START_S))
    elif aim in ("step", "optimizer"):
        training.wait_for_step(base + draw.randint(1, _STEPS))
        time.sleep(draw.uniform(0, _STEP_S))
    else:  # at once in the first save, or in the second
        training.wait_for_step(base + EVERY * draw.randint(1, 2) - 1)
        wait_until(lambda: saving() or training.process.poll() is not None, f"a {aim}")
        time.sleep(draw.uniform(0, 0.05 if aim == "save" else 0.3))
