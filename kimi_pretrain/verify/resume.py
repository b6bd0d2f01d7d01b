"""What a rank of `kimi-pretrain verify resume` does: train, watched, and again with each fault.

To start processes takes longer than a run of a few steps, and new ones matter only for the run
without faults. So the runs with faults follow it in the same processes: each by the same `train`,
in a folder and a place of its own, from the checkpoint of the run that was stopped.

A watched run is not changed. Before each step the hash of its plan is written, before the first
step after the stop also hashes of its whole state. It can get the signal of a scheduler that wants
the machine back, in the middle of a step, as `kill -USR1` would send it.
"""

import json
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data_pipeline.loader import StepBatch
from kimi_pretrain.checkpoint.hashes import hash_tensors
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import Config
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.reliability.watchdog import backstop
from kimi_pretrain.run import Run
from kimi_pretrain.step import StepReport
from kimi_pretrain.train import train
from kimi_pretrain.verify.configs import saving_to
from kimi_pretrain.verify.fault import Fault, Replaced
from kimi_pretrain.verify.resume_faults import RESUME_FAULTS
from kimi_pretrain.verify.traces import OBSTACLE, RESUMED, UNINTERRUPTED, WATCHED


def run_training(
    config: Config, folder: Path, resume: str | None, asked: Callable[[], str | None], *,
    stop: int, interrupt: bool, faults: Sequence[str], runs: str, place: str,
) -> None:  # fmt: skip
    """Train as a user's run does, watched; then once with each fault.

    Args:
        config: of the run; says where the checkpoints of the stopped run are.
        folder: of the run.
        resume: as in `train`.
        asked: why this process was asked to stop, or None.
        stop: step after which a run of the comparison is stopped.
        interrupt: this is the run that is stopped; its last rank gets USR1 in step `stop`.
        faults: names in `RESUME_FAULTS`.
        runs: folder of the runs with faults: FAULT/, and `UNINTERRUPTED` for its own reference.
        place: of their checkpoints, likewise.
    """
    with Replaced() as replaced:
        if faults:
            _keep_mesh(replaced, config)
        _train(config, folder, resume, stop, asked=asked, interrupt=interrupt)
        for name in faults:
            fault, saved = RESUME_FAULTS[name], config.checkpoint.place
            if fault.own_reference:
                own = UNINTERRUPTED.format(name)
                saved = f"{place}/{own}"
                _train(saving_to(config, saved, every=stop), Path(runs, own), None, stop, fault)
            assert saved is not None
            start = open_place(saved).checkpoint(stop).uri
            again = saving_to(config, f"{place}/{name}")
            _train(again, Path(runs, name), start, stop, fault)
    if faults:
        engine_mesh.stop()  # not after an error, when other ranks may be in a collective


def _keep_mesh(replaced: Replaced, config: Config) -> None:
    """Start the mesh that every `train` starts and stops, and keep it for all of them."""
    mesh = engine_mesh.start(config.layout, backstop(config.train.timeout_seconds))
    replaced.put(engine_mesh, "start", lambda layout, timeout_seconds=0.0: mesh)
    replaced.put(engine_mesh, "stop", lambda: None)


def _train(
    config: Config, folder: Path, resume: str | None, stop: int, fault: Fault[Run] | None = None,
    *, asked: Callable[[], str | None] = lambda: None, interrupt: bool = False,
) -> None:  # fmt: skip
    """Train; a run that cannot have the fault ends before its first step and writes why."""
    obstacle: str | None = None

    def prepare(run: Run) -> None:
        nonlocal obstacle
        obstacle = fault.obstacle(run) if fault else None
        if obstacle is None:
            if fault:
                fault.plant(Replaced(), run)  # for good: the run is thrown away
            watch(run, folder, stop, interrupt=interrupt)
        elif run.mesh.rank == 0:
            (folder / OBSTACLE).write_text(obstacle)

    train(config, folder, resume, stop=lambda: obstacle or asked(), prepare=prepare)


def watch(run: Run, folder: Path, stop: int, *, interrupt: bool = False) -> None:
    """Watch the steps of a run from now on; called on every rank, rank 0 writes into `folder`."""
    train_step, began = run.train_step.run, run.step

    def watched(batch: StepBatch, **options: Any) -> StepReport:
        step = run.step + 1
        if step == stop + 1:
            _write_moment(run, folder)
        if run.mesh.rank == 0:
            with (folder / WATCHED).open("a") as lines:
                line = {"step": step, "samples": batch.plan.content_hash(), "began": began}
                lines.write(json.dumps(line) + "\n")
        if interrupt and step == stop and run.mesh.rank == run.mesh.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)
        return train_step(batch, **options)

    run.train_step.run = watched  # of this object alone


def _write_moment(run: Run, folder: Path) -> None:
    """Write hashes of the whole state, with the loader as it is when this step was fetched."""
    tensors = hash_tensors(run.tensors(), run.mesh)
    if run.mesh.rank == 0:
        moment = {"tensors": tensors, "state": vars(run.run_state())}
        (folder / RESUMED).write_text(json.dumps(moment) + "\n")
