"""Checks a chain before its first stage starts: finished stages and all hand-overs.

The inputs that a stage takes from a finished stage, or from elsewhere, are opened. The outputs that
an earlier stage has yet to write are predicted from its config (`kimi_pretrain.weights.planned`).
Only headers are read. In a stage's run folder, status.json holds its progress, and the file BEGAN,
which its run wrote, names the checkpoints of earlier stages that it started from.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kimi_pretrain.checkpoint.manifest import MANIFEST
from kimi_pretrain.checkpoint.storage_read import open_checkpoint
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.run_history import BEGAN, check_fresh, latest_in
from kimi_pretrain.reliability.run_lock import check_folder
from kimi_pretrain.reliability.status import Status, read_status
from launch.chain.stages_file import TAKEN, PlannedStage
from launch.local.user_errors import user_message

if TYPE_CHECKING:
    from kimi_pretrain.weights.weight_reader import WeightReader


class Progress(Enum):
    """Progress of a stage: not started, started, or finished."""

    NEW = "to be run"
    BEGUN = "to be gone on with"
    FINISHED = "finished"


@dataclass(frozen=True)
class CheckedStage:
    """A stage that can run, or has finished.

    Attributes:
        stage: the stage with its config.
        progress: progress of the stage.
        status: status in its run folder; None before it has started.
        changed: allowed differences between the file and the stage's last start.
        settings: model settings that differ in the source of its weights.
    """

    stage: PlannedStage
    progress: Progress
    status: Status | None
    changed: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()

    @property
    def has_own(self) -> bool:
        """True if the stage no longer needs its inputs."""
        saved = self.status is not None and self.status.checkpoint is not None
        return saved or self.progress is Progress.FINISHED


def check_chain(stages: Sequence[PlannedStage]) -> list[CheckedStage]:
    """Check every hand-over of a chain, and that finished stages ran with the file's settings.

    Raises:
        ValueError: names the stage and the conflict.
    """
    checked = list[CheckedStage]()
    for stage in stages:
        with of_stage(stage):
            status = _status_of(stage.folder)
            one = CheckedStage(stage, _progress(status), status)
            if one.has_own and one.progress is Progress.BEGUN:
                one = replace(one, changed=tuple(_check_begun(stage)))
        checked.append(one)
    planned: dict[str, WeightReader] = {}
    for number, one in enumerate(checked):
        takers = [other for other in checked if one.stage.name in other.stage.sources.values()]
        with of_stage(one.stage):
            if one.progress is Progress.FINISHED:
                _check_finished(one, handed_on=not all(taker.has_own for taker in takers))
                for taker in takers:
                    _check_began(one, taker)
                continue
            _check_takers(takers)
            check_folder(one.stage.folder)
            if one.status is None:
                check_fresh(one.stage.folder)
            if not one.has_own:
                settings = _check_hand_over(one.stage, planned)
                checked[number] = replace(one, settings=settings)
        if takers:
            from kimi_pretrain.weights.planned import planned_weights  # it loads torch

            folder = str(one.stage.folder)
            planned[folder] = planned_weights(one.stage.config, folder)
    return checked


@contextmanager
def of_stage(stage: PlannedStage) -> Iterator[None]:
    """Prefix a user error with the stage's name; its exit code stays that of its cause."""
    try:
        yield
    except Exception as error:
        if (message := user_message(error)) is None:
            raise
        raise ValueError(f"stage {stage.name}: {message}") from error


def _check_began(one: CheckedStage, taker: CheckedStage) -> None:
    """Refuse a finished stage that was continued or run again after a later stage used it."""
    stage, file = one.stage, taker.stage.folder / BEGAN
    if not taker.has_own or not file.is_file():  # an earlier version wrote no file
        return
    try:
        noted = json.loads(file.read_text())
        keys = [key for key, name in taker.stage.sources.items() if name == stage.name]
        pairs = [noted.get(key, {}) for key in keys]
        began = {pair.get("manifest_sha256"): pair.get("checkpoint", "elsewhere") for pair in pairs}
    except (ValueError, AttributeError):
        raise ValueError(f"{file}: expected the checkpoints that a run began from") from None
    uri = latest_in(stage.folder)
    if uri == str(stage.folder):  # removed to free space: no stage needs it any more
        return
    newest = open_checkpoint(uri)
    if {*began} == {newest.manifest_sha256()} or (one.status and newest.step != one.status.step):
        return
    raise ValueError(
        f"its last checkpoint is {newest.uri}, but stage {taker.stage.name}, which takes from it, "
        f"began from {' and '.join(began.values())} as it was then; remove {taker.stage.folder}, "
        "too, or give another run_dir"
    )


def _status_of(folder: Path) -> Status | None:
    """Return the status of a stage; an existing checkpoint counts even if status.json lacks it."""
    status = read_status(folder)
    if status is not None and (status.checkpoint is not None or status.state == "finished"):
        return status
    if not any(folder.glob(f"checkpoints/step_*/{MANIFEST}")):
        return status
    newest = open_checkpoint(latest_in(folder))
    status = status or Status("stopped", newest.step)
    return replace(status, checkpoint=newest.uri)


def _check_begun(stage: PlannedStage) -> list[str]:
    """Refuse to resume a stage that started from other inputs; return the other differences."""
    found = load_config(stage.folder / "config.yaml").model_dump(mode="json")
    wanted = stage.config.model_dump(mode="json")
    changed = list(differences(found, wanted))
    if taken := [text for text in changed if text.partition("=")[0] in TAKEN]:
        raise ValueError(
            f"it has begun in {stage.folder} with {'; '.join(taken)}: it goes on from its own "
            "checkpoint, which came from there; set it as it was, or remove that folder"
        )
    return changed


def _progress(status: Status | None) -> Progress:
    if status is None:
        return Progress.NEW
    return Progress.FINISHED if status.state == "finished" else Progress.BEGUN


def _check_hand_over(stage: PlannedStage, planned: Mapping[str, "WeightReader"]) -> tuple[str, ...]:
    train = stage.config.train
    if train.start_from is None and train.vision_weights is None:
        return ()
    from kimi_pretrain.weights.initial_weights import check_initial_weights  # it loads torch

    return check_initial_weights(stage.config, planned)


def _check_takers(takers: Sequence[CheckedStage]) -> None:
    """Refuse to run a stage if a later stage already used the output of an earlier run of it."""
    for taker in takers:
        if taker.has_own:
            raise ValueError(
                f"it has not finished, but stage {taker.stage.name}, which takes from it, has been "
                f"run in {taker.stage.folder}: of what was here before; remove that folder too, or "
                "give another run_dir"
            )


def _check_finished(one: CheckedStage, handed_on: bool) -> None:
    """Refuse a stage that ran with other settings than the file's, or lost its final checkpoint."""
    stage, status = one.stage, one.status
    assert status is not None
    found = load_config(stage.folder / "config.yaml").model_dump(mode="json")
    wanted = stage.config.model_dump(mode="json")
    if changed := list(differences(found, wanted)):
        raise ValueError(
            f"it has finished in {stage.folder} with {'; '.join(changed)}: what follows would not "
            "be of this file; set it as it was, or give a run_dir where it can run again"
        )
    if not handed_on:
        return
    newest = open_checkpoint(latest_in(stage.folder))
    if newest.step != status.step:
        raise ValueError(
            f"it finished after step {status.step}, but its newest checkpoint is {newest.uri}: "
            "the last one is gone"
        )


def differences(found: Any, wanted: Any, key: str = "") -> Iterator[str]:
    """Yield "key=value (now value)" for every key that differs between two plain configs."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for name in sorted({*found, *wanted}):
            inner = f"{key}.{name}" if key else name
            yield from differences(found.get(name), wanted.get(name), inner)
    elif found != wanted:
        yield f"{key}={found!r} (now {wanted!r})"
