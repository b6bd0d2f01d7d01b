"""Trains on one rank of `kimi-pretrain verify resume` under observation, then with each fault.

Starting processes takes longer than a run of a few steps, and only the run without faults needs new
processes. So the runs with faults follow in the same processes. Each uses the same `train`, a
separate folder and checkpoint location, and the checkpoint of the stopped run.

Observation does not change a run. Before each step the hash of its plan is written; before the
first step after the stop, hashes of the whole state are written, too. In the middle of a step the
run can receive the signal of a scheduler that wants the machine back, as from `kill -USR1`.
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
    """Train as a user's run does, under observation; then once with each fault.

    Args:
        config: config of the run; names the checkpoint location of the stopped run.
        folder: folder of the run.
        resume: as in `train`.
        asked: returns why this process was asked to stop, or None.
        stop: step after which a run of the comparison is stopped.
        interrupt: True for the run that is stopped; its last rank gets USR1 in step `stop`.
        faults: names in `RESUME_FAULTS`.
        runs: folder of the runs with faults: FAULT/, and `UNINTERRUPTED` for a fault's reference.
        place: location of their checkpoints, with the same subfolders.
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
        engine_mesh.stop()  # not after an error, because other ranks may be in a collective


def _keep_mesh(replaced: Replaced, config: Config) -> None:
    """Start a mesh and keep it for all calls of `train`, which would each start and stop one."""
    mesh = engine_mesh.start(config.layout, backstop(config.train.timeout_seconds))
    replaced.put(engine_mesh, "start", lambda layout, timeout_seconds=0.0: mesh)
    replaced.put(engine_mesh, "stop", lambda: None)


def _train(
    config: Config, folder: Path, resume: str | None, stop: int, fault: Fault[Run] | None = None,
    *, asked: Callable[[], str | None] = lambda: None, interrupt: bool = False,
) -> None:  # fmt: skip
    """Train; a run that cannot have the fault ends before its first step and writes the reason."""
    obstacle: str | None = None

    def prepare(run: Run) -> None:
        nonlocal obstacle
        obstacle = fault.obstacle(run) if fault else None
        if obstacle is None:
            if fault:
                fault.plant(Replaced(), run)  # permanent: this run is discarded afterwards
            watch(run, folder, stop, interrupt=interrupt)
        elif run.mesh.rank == 0:
            (folder / OBSTACLE).write_text(obstacle)

    train(config, folder, resume, stop=lambda: obstacle or asked(), prepare=prepare)


def watch(run: Run, folder: Path, stop: int, *, interrupt: bool = False) -> None:
    """Observe the following steps of a run; called on every rank, rank 0 writes into `folder`."""
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

    run.train_step.run = watched  # on this object only


def _write_moment(run: Run, folder: Path) -> None:
    """Write hashes of the whole state, with the loader's state after fetching this step."""
    tensors = hash_tensors(run.tensors(), run.mesh)
    if run.mesh.rank == 0:
        moment = {"tensors": tensors, "state": vars(run.run_state())}
        (folder / RESUMED).write_text(json.dumps(moment) + "\n")
