"""Run history: protects the checkpoints of a run folder from loss and from mixing two runs.

run.json stores the checkpoint location of the run. A run that resumes from another working folder
or with another `checkpoint.place` therefore does not silently start over in a new location.
"""

import os
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from kimi_pretrain.checkpoint.errors import CheckpointError, storage_errors
from kimi_pretrain.checkpoint.manifest import MANIFEST, check_resumes, step_name
from kimi_pretrain.checkpoint.ownership import Owner
from kimi_pretrain.checkpoint.storage_read import Checkpoint, Place, open_place
from kimi_pretrain.reliability.run_lock import RUN, claim, read_run, write_run
from kimi_pretrain.reliability.status import read_status

if TYPE_CHECKING:
    from kimi_pretrain.config import Config

METRICS = "metrics.jsonl"
# Checkpoints of other runs that this run started from, by key, as recorded at that time.
BEGAN = "began_from.json"


def place_of(config: "Config", run_dir: Path) -> Place:
    """Return the checkpoint location of a run."""
    return open_place(config.checkpoint.place or run_dir / "checkpoints")


def where(place: Place) -> str:
    """Return the name of a location, independent of the working folder."""
    return place.uri.rstrip("/") if place.folder is None else str(place.folder.resolve())


def noted_place(run_dir: Path) -> str | None:
    """Return the checkpoint location recorded in run.json, or None.

    A location inside the run folder is recorded as a relative path, so it moves with the folder.
    """
    noted = (read_run(run_dir) or {}).get("place")
    if noted is None or "://" in noted:
        return noted
    return str((run_dir / noted).resolve())


def latest_in(uri: str | os.PathLike[str]) -> str:
    """Return the newest complete checkpoint of a run or location; any other URI is unchanged."""
    text = os.fspath(uri).rstrip("/") or "/"
    place = open_place(text)
    if place.folder is not None and (place.folder / MANIFEST).is_file():
        return text
    for root in (text, *places_of_run(place.folder)):
        with storage_errors(root):
            steps = open_place(root).steps()
        if steps:
            return f"{root}/{step_name(steps[-1])}"
    return text


def check_ended(uri: str | os.PathLike[str]) -> None:
    """Refuse the folder of an unfinished run, because its newest checkpoint is not its last.

    The folder of its checkpoints is refused, too. The path of a single checkpoint is accepted. An
    object store holds no run status, so it is accepted.

    Raises:
        CheckpointError: states the progress of the run and the remedy.
    """
    folder = open_place(os.fspath(uri)).folder
    if folder is None or not folder.is_dir() or (folder / MANIFEST).is_file():
        return
    for run_dir in (folder, folder.resolve().parent):
        status = read_status(run_dir)
        if run_dir != folder and status is not None:
            places = places_of_run(run_dir)
            status = status if any(_same_folder(one, str(folder)) for one in places) else None
        if status is not None and status.state != "finished":
            of = "" if status.steps is None else f" of {status.steps}"
            raise CheckpointError(
                f"the run of {run_dir} has not finished ({status.state} after step "
                f"{status.step}{of}); end it first, or name the checkpoint that is meant"
            )


def places_of_run(folder: Path | None) -> list[str]:
    """Return the checkpoint locations of the run in this folder; empty if there is no run."""
    if folder is None or not folder.is_dir():
        return []
    if (noted := noted_place(folder)) is not None:
        return [noted]
    places = [str(folder / "checkpoints")]
    if (folder / "config.yaml").is_file():  # run.json of an earlier version records no location
        from kimi_pretrain.config import load_config

        if named := load_config(folder / "config.yaml").checkpoint.place:
            places.append(named.rstrip("/"))
    return places


def note_place(run_dir: Path, place: Place) -> None:
    """Record the checkpoint location in run.json. Call this under the lock."""
    name, folder = where(place), str(run_dir.resolve())
    if name.startswith(f"{folder}/"):
        name = os.path.relpath(name, folder)
    values = read_run(run_dir) or {}
    if values.get("place") != name:
        write_run(run_dir, values | {"place": name})


def has_lines(run_dir: Path) -> bool:
    """Return True if a run in this folder has completed a step."""
    file = run_dir / METRICS
    return file.is_file() and file.stat().st_size > 0


def check_fresh(run_dir: Path) -> None:
    """Refuse to start from scratch in the folder of an earlier run, which would mix the two.

    Raises:
        ValueError: states the remedy.
    """
    if any(run_dir.glob("checkpoints/step_*/manifest.json")) or (run_dir / METRICS).is_file():
        raise ValueError(
            f"{run_dir} holds an earlier run; go on with --resume latest, or choose another "
            "--run-dir"
        )


def check_unused(place: Place) -> None:
    """Refuse to start from scratch in a location that holds checkpoints.

    Raises:
        ValueError: states the remedy.
        CheckpointError: the location cannot be read.
    """
    with storage_errors(place.uri):
        steps = place.steps()
    if steps:
        raise ValueError(
            f"{where(place)} holds checkpoints, the newest of step {steps[-1]}; go on "
            "with --resume latest, or choose another --run-dir and checkpoint.place"
        )


def check_place(run_dir: Path, place: Place) -> None:
    """Refuse to look for a run's latest checkpoint outside the location where it saved.

    Raises:
        ValueError: names both locations.
    """
    noted, here = noted_place(run_dir), where(place)
    if noted in (None, here) or _same_folder(noted, here):
        return
    saved = _saved(run_dir)
    if saved is None and not has_lines(run_dir):
        return  # nothing is lost
    raise ValueError(
        f"--resume latest: the run of {run_dir} saves to {noted} ({RUN}), but checkpoint.place is "
        f"{here} now; set it as it was, or, to save there from now on, name what to go on from: "
        f"--resume {saved or f'{noted}/step_...'}"
    )


def check_may_begin(run_dir: Path, place: Place, or_start: bool) -> None:
    """Refuse to start at step 0 if the latest checkpoint is requested and there is none.

    With `or_start` the run may start if it has never saved a checkpoint.

    Raises:
        ValueError: names the searched location, the state of the run and the remedy.
    """
    looked = f"--resume latest: there is no checkpoint in {where(place)}"
    if (saved := _saved(run_dir)) is not None:
        raise ValueError(
            f"{looked}, but {run_dir}/status.json names {saved}; set checkpoint.place as it was, "
            f"or go on with --resume {saved}; where it is lost, begin in another --run-dir"
        )
    if or_start:
        return
    if has_lines(run_dir):
        raise ValueError(
            f"{looked}, but {run_dir}/{METRICS} holds steps; if checkpoint.place was another one, "
            "set it as it was; if nothing was ever saved, --or-start begins again at step 0 (and "
            "keeps these lines under another name)"
        )
    raise ValueError(
        f"{looked}, and {run_dir} holds no run; is --run-dir right? To begin one there, add "
        "--or-start"
    )


def check_latest(config: "Config", run_dir: Path, place: Place, or_start: bool) -> None:
    """Refuse an impossible start with "latest" early, from one listing and one manifest.

    Raises:
        ValueError, CheckpointError: as `check_place`, `check_may_begin`, `check_resumes`; or the
            location cannot be read.
    """
    check_place(run_dir, place)
    with storage_errors(place.uri):
        empty, steps = not place.folders(), place.steps()
    if empty:
        check_may_begin(run_dir, place, or_start)
    if steps:
        newest = place.checkpoint(steps[-1])
        if not newest.manifest_problems():  # the start itself reports or skips a damaged checkpoint
            check_resumes(newest.manifest(), config, newest.uri)


def claim_place(
    place: Place, run_dir: Path, resume: str | os.PathLike[str] | None, restarted: bool
) -> Owner:
    """Claim the checkpoint location for this run, unless the run folder contradicts.

    Rank 0 calls this under the run folder's lock. `restarted` is True if the job was restarted
    after a fault.

    Raises:
        ValueError, CheckpointError: from the checks.
    """
    fresh = resume is None and not restarted
    if fresh:
        check_fresh(run_dir)
    elif resume in (None, "latest"):  # with an explicit checkpoint, the run saves here from now on
        check_place(run_dir, place)
    # Check before claiming: if this start is refused, the location stays unclaimed.
    owner = claim(place, run_dir, partial(check_unused, place) if fresh else lambda: None)
    note_place(run_dir, place)
    return owner


def last_own_step(place: Place, found: Checkpoint) -> int:
    """Return the newest checkpoint step here on the lineage of checkpoint `found`, or -1.

    If `found` is elsewhere or renamed, it says nothing about the checkpoints here, which may belong
    to any lineage.
    """
    folder, _, name = found.uri.rstrip("/").rpartition("/")
    at_home = folder == where(place) or (place.folder and _same_folder(folder, str(place.folder)))
    return found.step if at_home and name == step_name(found.step) else -1


def check_way_back(place: Place, step: int) -> None:
    """Refuse to abandon later checkpoints that cannot be renamed, as in an object store.

    In a folder, checkpoints of the other lineage are renamed; in a store the new lineage would
    overwrite them. `step` is the newest step of this lineage; see `last_own_step`.

    Raises:
        ValueError: states the remedy.
        CheckpointError: the location cannot be read.
    """
    if place.folder is not None:
        return
    with storage_errors(place.uri):
        later = [found for found in place.steps() if found > step]
    if later:
        raise ValueError(
            f"--resume: {place.uri} holds checkpoints of another course of this run (steps "
            f"{later[0]} to {later[-1]}), which the new one would write over; give it a "
            "--run-dir and a checkpoint.place of its own, or remove them"
        )


def _saved(run_dir: Path) -> str | None:
    status = read_status(run_dir)
    return None if status is None else status.checkpoint


def _same_folder(one: str | None, other: str) -> bool:
    """Return True if two paths name the same folder, as with two mounts on a node."""
    try:
        return one is not None and os.path.samefile(one, other)
    except OSError:  # a path does not exist or is a URI
        return False
