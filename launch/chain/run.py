"""Runs a chain on this machine: one stage after the other, each as `kimi-pretrain train` would.

A stage's processes are torchrun's, also where there is one: no stage sees what another left behind
in its process. The configuration is written into the run folder and read from there, so that an
edit while an earlier stage runs changes nothing.
"""

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import typer

from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import dump_config
from kimi_pretrain.reliability import run_lock
from kimi_pretrain.reliability.run_files import write_whole
from kimi_pretrain.reliability.run_history import check_unused
from kimi_pretrain.reliability.status import read_status
from launch.chain.hand_over import CheckedStage, Progress, check_chain, note_sources, of_stage
from launch.chain.stages_file import PlannedStage
from launch.local.job import LATEST, Job
from launch.local.start import Machines, start

# So long the ranks of a start that was killed may take to save and end.
PATIENCE_S = 60.0


def run_chain(stages: Sequence[PlannedStage], max_restarts: int = 0) -> int:
    """Check all stages, and run those that have not finished; returns the exit code of the last.

    0: all have finished, or one was stopped in order, and the same command goes on with it.

    Raises:
        ValueError: a stage cannot run; before any is started.
    """
    for stage in stages:
        _await_former_start(stage.folder)
    checked = check_chain(stages)
    check_data(checked, here=True)
    for one in checked:
        typer.echo(told(one))
        if one.progress is Progress.FINISHED:
            continue
        code = _run(one, max_restarts)
        status = read_status(one.stage.folder)
        if code or status is None or status.state != "finished":
            typer.echo(f"{one.stage}: not finished; the same command goes on with it")
            return code
    return 0


def told(one: CheckedStage) -> str:
    """Return a stage's line."""
    if one.progress is Progress.NEW:
        return f"{one.stage}: {one.stage.folder}"
    assert one.status is not None
    state = "finished" if one.progress is Progress.FINISHED else one.status.state
    done = "" if one.progress is Progress.FINISHED else ", goes on"
    changed = f"; set otherwise now: {'; '.join(one.changed)}" if one.changed else ""
    return f"{one.stage}: {state} after step {one.status.step}{done}: {one.stage.folder}{changed}"


def check_data(
    checked: Sequence[CheckedStage], patience: float | None = None, *, here: bool = False
) -> None:
    """Check data, memory, attention and the place of checkpoints of every stage that is to run.

    Args:
        patience: most seconds to wait for a store that does not answer.
        here: this machine is to run them.

    Raises:
        ValueError: as `preflight.check_start`, with the stage's name.
    """
    from kimi_pretrain.attention.choice import check_kind
    from kimi_pretrain.reliability.preflight import check_start

    for one in checked:
        if one.progress is Progress.FINISHED:
            continue
        config, steps = one.stage.config, 1 if one.progress is Progress.NEW else 0
        ranks = config.layout.world_size() if here else None
        with of_stage(one.stage):
            if here:
                check_kind(config, explicit=True)
            for notice in check_start(config, steps, patience, ranks_here=ranks).notices:
                typer.echo(f"{one.stage}: {notice}")
            if config.checkpoint.place is not None and one.progress is Progress.NEW:
                check_unused(open_place(config.checkpoint.place, patience or config.data.patience))


def _run(one: CheckedStage, max_restarts: int) -> int:
    folder, config = one.stage.folder, one.stage.config
    folder.mkdir(parents=True, exist_ok=True)
    # Named by its content: it is written before the folder is locked, and another may write there.
    text = dump_config(config)
    file = folder / f"job-{hashlib.sha256(text.encode()).hexdigest()[:8]}.yaml"
    write_whole(file, text)
    if not one.has_own:
        note_sources(one.stage)
    begun = one.progress is Progress.BEGUN
    job = Job(str(file), str(folder), resume=LATEST if begun else None, or_start=begun)
    return start(job, config, Machines(max_restarts=max_restarts), apart=True)


def _await_former_start(folder: Path) -> None:
    """Wait for the ranks of a start that was killed: they save and end by themselves.

    Raises:
        RunLocked: they, or another run, are still there after a minute.
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
