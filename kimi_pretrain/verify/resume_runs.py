"""What a process of `kimi-pretrain verify resume` does besides the run that it was started for.

To start processes takes longer than a run of a few steps, and new ones matter only for the run
without faults. So those with faults follow it in the same processes, one after the other: each by
the same `train`, in a folder and a place of its own, from the checkpoint of the run that was
stopped.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import Config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.reliability.watchdog import backstop
from kimi_pretrain.run import Run
from kimi_pretrain.train import train
from kimi_pretrain.verify.resume_faults import (
    OBSTACLE,
    RESUME_FAULTS,
    UNINTERRUPTED,
    ResumeFault,
)
from kimi_pretrain.verify.watch import watch


def train_watched(
    config: Config,
    folder: Path,
    resume: str | None,
    stop: int,
    asked: Callable[[], str | None],
    *,
    interrupt: bool = False,
) -> None:
    """Train as a user's run does, watched.

    Args:
        config: of the run.
        folder: of the run.
        resume: as in `train`.
        stop: step after which a run of the comparison is stopped.
        asked: why this process was asked to stop, or None.
        interrupt: this is the run that is stopped; its last rank gets USR1 in step `stop`.
    """

    def prepare(run: Run) -> None:
        watch(run, folder, stop, interrupt=interrupt)

    train(config, folder, resume, stop=asked, prepare=prepare)


def train_with_faults(
    config: Config, folder: Path, place: str, stop: int, faults: Sequence[str]
) -> None:
    """Train once with each fault.

    Args:
        config: of the run that was stopped; says where its checkpoints are.
        folder: of all runs: FAULT/, and FAULT-uninterrupted/ for one that is there throughout.
        place: of their checkpoints, likewise.
        stop: step after which the run was stopped.
        faults: names in `RESUME_FAULTS`.
    """
    for name in faults:
        fault, saved = RESUME_FAULTS[name], config.checkpoint.place
        if fault.throughout:
            straight = f"{name}-{UNINTERRUPTED}"
            saved = f"{place}/{straight}"
            saving = _saving(config, saved, every=stop)
            _train_with(fault, saving, folder / straight, None, stop)
        assert saved is not None
        start = open_place(saved).checkpoint(stop).uri
        _train_with(fault, _saving(config, f"{place}/{name}"), folder / name, start, stop)


@contextmanager
def one_mesh(config: Config) -> Iterator[None]:
    """Keep the mesh, which every `train` starts and stops, from the first of them to the last."""
    start, end = engine_mesh.start, engine_mesh.stop
    mesh = start(config.layout, backstop(config.train.timeout_seconds))
    engine_mesh.start = lambda layout, timeout_seconds=0.0: mesh
    engine_mesh.stop = lambda: None
    try:
        yield
    finally:
        engine_mesh.start, engine_mesh.stop = start, end
    end()  # not after an error, when other ranks may be in a collective


def _saving(config: Config, place: str, **changes: object) -> Config:
    checkpoint = config.checkpoint.model_copy(update={"place": place, **changes})
    return config.model_copy(update={"checkpoint": checkpoint})


def _train_with(
    fault: ResumeFault, config: Config, folder: Path, checkpoint: str | None, stop: int
) -> None:
    """Train with a fault; a run that cannot have it ends before its first step and says why."""
    obstacle: str | None = None

    def prepare(run: Run) -> None:
        nonlocal obstacle
        obstacle = fault.obstacle(run)
        if obstacle is None:
            fault.plant(run)
            watch(run, folder, stop)
        elif run.mesh.rank == 0:
            (folder / OBSTACLE).write_text(obstacle)

    train(config, folder, checkpoint, stop=lambda: obstacle, prepare=prepare)
