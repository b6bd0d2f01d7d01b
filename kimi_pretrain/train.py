"""Builds everything, then the loop. Start here to see how the rooms fit together."""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_pipeline.loader import LoaderError, StepBatch
from data_pipeline.plan.planner import DataUsedUp
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.scheduler import Saves
from kimi_pretrain.config import Config, describe
from kimi_pretrain.dep.memory import TooMuchMemory
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.randomness import seed_step
from kimi_pretrain.reliability.anomaly_guard import AnomalyError
from kimi_pretrain.reliability.exit_report import nobodys_mistake
from kimi_pretrain.reliability.preflight import check_node
from kimi_pretrain.reliability.run_history import (
    check_may_begin,
    check_way_back,
    claim_place,
    latest_in,
    line_before,
    place_of,
)
from kimi_pretrain.reliability.watchdog import WAIT_FOR_DATA, Watchdog, backstop
from kimi_pretrain.run import Run
from kimi_pretrain.step import StepReport
from kimi_pretrain.telemetry.metrics import record_of
from kimi_pretrain.telemetry.recorder import Notes, Told, check_alike, stop_asked
from kimi_pretrain.telemetry.run_dir import describe_environment, log_to
from kimi_pretrain.tools.state_hashes import measure_efficiency, write_state_hashes

log = logging.getLogger("kimi_pretrain.train")


def train(
    config: Config,
    run_dir: Path,
    resume: str | os.PathLike[str] | None = None,
    *,
    otherwise: str | None = None,
    or_start: bool = False,
    restarted: bool = False,
    stop: Callable[[], str | None] = lambda: None,
    prepare: Callable[[Run], None] | None = None,
) -> None:
    """Train from scratch or from a checkpoint, in every process of the job.

    Args:
        config: of the run; written resolved into `run_dir`.
        run_dir: folder shared by all ranks; see docs/ARCHITECTURE.md for what it holds.
        resume: a checkpoint's folder or URI, or that of a run for its newest one, or "latest": the
            newest of this run.
        otherwise: what to resume from where "latest" finds nothing.
        or_start: begin from scratch where "latest" finds nothing, unless something was saved.
        restarted: whether this rank was started again after a fault of the same job. If any was,
            all go on from the run's latest checkpoint; from `resume` if there is none yet.
        stop: returns why this rank was asked to stop, with the name of the signal; None as long as
            it was not. The run ends after the step, saved.
        prepare: called with the run before its first step, to watch it or to change it.
    """
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    watchdog = _watchdog(config, run_dir, stop)
    watchdog.enter("join the job")
    mesh = engine_mesh.start(config.layout, backstop(config.train.timeout_seconds))
    log_to(run_dir, mesh.rank)
    # Nothing is torn down on an error: other ranks may be inside a collective, and leaving it in
    # order would wait for them. The process ends, and with it the job.
    place = place_of(config, run_dir)
    restarted = any(mesh.gather(restarted))  # of several machines not all need to know
    watchdog.enter("claim the place of checkpoints")
    owner = mesh.from_first(partial(claim_place, place, run_dir, resume, restarted))
    progress = watchdog.progress("find the checkpoint")
    found, before = None, 0
    for wanted in ("latest" if restarted else None, resume, otherwise):
        if found is None and wanted is not None:
            if wanted != "latest":
                wanted = mesh.from_first(partial(latest_in, wanted))
            found = find(wanted, place, config, mesh, progress, own=True)
            if found is not None:
                before = line_before(place, found)
                if wanted != "latest":
                    mesh.from_first(partial(check_way_back, place, before))
    if found is None and (restarted or resume is not None):
        mesh.from_first(partial(check_may_begin, run_dir, place, or_start or restarted))
    run = Run(config, mesh, found, watchdog.enter)
    run.train_step.clock.on_phase = watchdog.enter
    if prepare is not None:
        prepare(run)
    if mesh.rank == 0:
        describe_environment(run_dir, config)
        log.info("%s", describe(config))
        if run.step >= config.train.steps:
            log.warning("all %d steps (train.steps) are done: nothing is trained", run.step)
        log.info("data: %s", run.loader.planner.report())
        for notice in run.loader.planner.notices():
            log.warning("%s", notice)
        check_node(config)
    saves = Saves(place, owner, run, watchdog.enter, found and found.uri, before)
    run.update.before_change = saves.before_update
    notes = Notes(config, run_dir, mesh, run.step, run.loader.indices)
    notes.status("running", run.step, saves.uri)
    with nobodys_mistake():
        reason = _loop(run, notes, saves, watchdog, stop)
    if reason is None:
        watchdog.enter("end")
        write_state_hashes(run, run_dir / "state_hashes.json")
        if config.train.efficiency_pairs:
            measure_efficiency(run, run_dir / "efficiency.json")
    watchdog.enter("end")
    state = "finished" if reason is None else "stopped"
    notes.status(state, run.step, saves.uri, reason)
    notes.close()
    saves.close(hurry=reason is not None)
    run.close()
    mesh.barrier()
    engine_mesh.stop()
    watchdog.stop()


def _watchdog(config: Config, run_dir: Path, stop: Callable[[], str | None]) -> Watchdog:
    """Start watching before there is a mesh: to meet the other ranks is a wait, too."""
    rank, world_size = (
        int(os.environ.get(name, d)) for name, d in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    seconds = config.train.timeout_seconds
    workers = config.data.workers > 0
    return Watchdog(run_dir, rank, world_size, seconds, stop=stop, workers=workers).start()


def _loop(
    run: Run, notes: Notes, saves: Saves, watchdog: Watchdog, stop: Callable[[], str | None]
) -> str | None:
    """Train step by step; returns why it stopped before the last one, or None."""
    config, mesh = run.config, run.mesh
    reason = stop_asked(mesh.gather(stop()))
    while run.step < config.train.steps and reason is None:
        watchdog.begin_step(run.step + 1)
        watchdog.enter(WAIT_FOR_DATA)
        state, start = run.loader.state_dict(), time.time()
        batch = _next_batch(run, saves)
        fetched = time.time()
        seed_step(config.train.seed, run.step, mesh)
        report = run.train_step.run(batch)
        run.step += 1
        report.spans[WAIT_FOR_DATA] = (start, fetched)
        watchdog.enter("8 tell all ranks")
        mine = _tell(run, report, time.time() - start, saves, stop())
        everyone: list[Any] = mesh.gather(mine)  # the one collective besides the step's own
        check_alike(run.step, everyone)
        watchdog.enter("8 remember")
        notes.step(run.step, batch, report, everyone, state)
        if report.skipped.size:  # others fill their places later on, on every rank alike
            run.loader.quarantine(batch.plan, report.skipped.tolist())
        _heed_guard(run, report, saves, notes)
        if saves.after_step([told.save for told in everyone]):
            notes.status("running", run.step, saves.uri)
        reason = stop_asked(told.stop for told in everyone)
    if run.step >= config.train.steps:
        if config.checkpoint.every:
            saves.now()
        return None
    return _stop(saves, reason)


def _next_batch(run: Run, saves: Saves) -> StepBatch:
    """Return the next step; where there can be none, keep what was trained so far and say so.

    The data is used up, or a step does not fit: with more memory or smaller chunks it may go on.
    """
    try:
        return next(run.loader)
    except LoaderError as error:
        if isinstance(error.__cause__, DataUsedUp | TooMuchMemory):
            # A function of config and step: all ranks are here, and saving is collective.
            log.warning("step %d: %s; saving a checkpoint", run.step, error.__cause__)
            saves.now()
        raise


def _tell(run: Run, report: StepReport, seconds: float, saves: Saves, stop: str | None) -> Told:
    """Return what this rank tells of a step that took so long."""
    for bad in report.bad:
        log.warning("step %d: skipped a sample: %s", run.step, bad.reason)
    first_stage, stats = run.mesh.is_first_stage, run.loader.stats
    return Told(
        record_of(report, seconds, stats, first_stage=first_stage, save=saves.seconds()),
        report.update.verdict,
        stop,
        saves.progress(),
        tuple((bad.sample, bad.item, bad.reason) for bad in report.bad),
        report.update.copies,
    )


def _heed_guard(run: Run, report: StepReport, saves: Saves, notes: Notes) -> None:
    """End the run where the guard says so, on all ranks; a save under way is waited for."""
    update = report.update
    try:
        run.update.guard.check(run.step, update.verdict, report.loss, update.grad_norm)
    except AnomalyError:
        try:
            saves.finish()
        except CheckpointError as error:
            log.warning("the checkpoint under way is not complete: %s", error)
        notes.status("running", run.step, saves.uri)  # who catches this adds that it failed
        raise


def _stop(saves: Saves, reason: str | None) -> str | None:
    """Save what was trained, also in a run that saves nothing else; returns why it stopped.

    Raises:
        CheckpointError: that failed. Such an end is not in order: a job that is started again, and
            stopped again without having saved, would do the same steps for ever.
    """
    try:
        saves.now()
    except CheckpointError as error:
        kept = f"go on from {saves.uri}" if saves.uri else "there is no checkpoint yet"
        told = f"stopped ({reason}), but the last step could not be saved: {error}; {kept}"
        raise type(error)(told) from error
    return reason
