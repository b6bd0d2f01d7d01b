"""Runs a chain on this machine, one stage after the other, each as `kimi-pretrain train` would.

A stage always runs in processes of torchrun, even if it has only one, so that no state leaks from
stage to stage. The config is written into the run folder and read from there, so that editing the
file while an earlier stage runs has no effect.
"""

import hashlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import typer

from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from kimi_pretrain.config import Config, dump_config
from kimi_pretrain.reliability import run_lock
from kimi_pretrain.reliability.exit_report import NO_PROGRESS
from kimi_pretrain.reliability.run_files import write_whole
from kimi_pretrain.reliability.run_history import check_latest, check_unused, latest_in
from kimi_pretrain.reliability.status import read_status
from launch.chain.hand_over import CheckedStage, Progress, check_chain, of_stage
from launch.chain.stages_file import PlannedStage
from launch.local.job import LATEST, Job
from launch.local.start import Machines, start

# Maps the run folder of a stage to the loader state in which it will end.
EndStates = dict[str, Callable[[], dict[str, Any]]]
# Time for the ranks of a killed start to save and end.
PATIENCE_S = 60.0


def run_chain(stages: Sequence[PlannedStage], max_restarts: int = 0) -> int:
    """Check all stages and run the unfinished stages; return the exit code of the last one.

    The code is 0 if all have finished. NO_PROGRESS means that a stage was stopped in an orderly way
    and that the same command resumes it.

    Raises:
        ValueError: a stage cannot run; raised before any stage starts.
    """
    for stage in stages:
        _await_former_start(stage.folder)
    checked = check_chain(stages)
    to_come: EndStates = {}
    for one in checked:
        check_stage(one, to_come, here=True)
    for one in checked:
        typer.echo(told(one))
        if one.progress is Progress.FINISHED:
            continue
        code = _run(one, max_restarts)
        status = read_status(one.stage.folder)
        if code or status is None or status.state != "finished":
            typer.echo(f"{one.stage}: not finished; the same command goes on with it")
            return code or NO_PROGRESS  # commands that follow rely on the end of the last stage
    return 0


def told(one: CheckedStage) -> str:
    """Return the status line of a stage."""
    if one.progress is Progress.NEW:
        return f"{one.stage}: {one.stage.folder}"
    assert one.status is not None
    state = "finished" if one.progress is Progress.FINISHED else one.status.state
    done = "" if one.progress is Progress.FINISHED else ", goes on"
    changed = f"; set otherwise now: {'; '.join(one.changed)}" if one.changed else ""
    return f"{one.stage}: {state} after step {one.status.step}{done}: {one.stage.folder}{changed}"


def check_stage(
    one: CheckedStage, to_come: EndStates, patience: float | None = None, *, here: bool = False
) -> None:
    """Check the data, memory, attention and checkpoint location of a stage that is to run.

    Args:
        to_come: end states of the earlier stages that are to run; this stage's is added.
        patience: longest wait in seconds for a store that does not answer.
        here: True if this machine runs the stage.

    Raises:
        ValueError: as `preflight.check_start`, with the stage's name.
    """
    from kimi_pretrain.attention.choice import check_kind
    from kimi_pretrain.reliability.preflight import check_start

    if one.progress is Progress.FINISHED:
        return
    stage, config = one.stage, one.stage.config
    with of_stage(stage):
        if here:
            check_kind(config, explicit=True)
            _check_devices(config)
        check_place(one, patience)
        saved = open_checkpoint(latest_in(stage.folder)) if one.has_own else None
        found = check_start(
            config,
            0 if one.has_own else 1,
            patience,
            ranks_here=config.layout.world_size() if here else None,
            goes_on=None if saved is None else saved.manifest().state.loader,
            to_come=to_come,
        )
    if found.end_state is not None:
        to_come[str(stage.folder)] = found.end_state
    for notice in found.notices:
        typer.echo(f"{stage}: {notice}")


def check_place(one: CheckedStage, patience: float | None = None) -> None:
    """Check that a stage's checkpoint location holds nothing of another run and can be resumed.

    Raises:
        ValueError: as `run_history.check_unused` and `check_latest`.
    """
    folder, config = one.stage.folder, one.stage.config
    place = open_place(
        config.checkpoint.place or folder / "checkpoints", patience or config.data.patience
    )
    if one.progress is Progress.BEGUN:
        check_latest(config, folder, place, or_start=True)
    elif one.progress is Progress.NEW and config.checkpoint.place is not None:
        check_unused(place)


def _check_devices(config: Config) -> None:
    """Refuse more ranks than GPUs, if the machine has GPUs."""
    import torch

    ranks, gpus = config.layout.world_size(), torch.cuda.device_count()
    if 0 < gpus < ranks:
        raise ValueError(
            f"the layout has {ranks} processes (layout.pp x dp x cp x tp), this machine has {gpus} "
            "GPUs, one for each; give a smaller layout, add --submit, or hide the GPUs with "
            "CUDA_VISIBLE_DEVICES="
        )


def _run(one: CheckedStage, max_restarts: int) -> int:
    folder, config = one.stage.folder, one.stage.config
    folder.mkdir(parents=True, exist_ok=True)
    # Named by its content, because another process may write one before the folder is locked.
    text = dump_config(config)
    file = folder / f"job-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    write_whole(file, text)
    begun = one.progress is Progress.BEGUN
    job = Job(str(file), str(folder), resume=LATEST if begun else None, or_start=begun)
    return start(job, config, Machines(max_restarts=max_restarts), apart=True)


def _await_former_start(folder: Path) -> None:
    """Wait for the ranks of a killed start, which save and then end.

    Raises:
        RunLocked: these ranks, or another run, still hold the folder after a minute.
    """
    if not folder.is_dir():
        return
    end, said = time.monotonic() + PATIENCE_S, False
    while True:
        try:
            return run_lock.check_free(folder)
        except run_lock.RunLocked as error:
            if time.monotonic() > end:
                raise
            if not said:
                typer.echo(f"{error}; waiting for its end")
            said = True
        time.sleep(0.2)
