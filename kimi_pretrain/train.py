"""Training program: joins the job, finds the checkpoint, builds the run, and loops over steps.

`train` runs in every process of the job. Each iteration of its loop, `_train_steps`, is one step:
phases 0 to 8 of docs/ARCHITECTURE.md. Phases 0 and 1 (plan, fetch) run ahead in the loader,
`kimi_pretrain.step` runs phases 2 to 7, and phase 8 (report, record, save) is here.
"""

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from data_pipeline.access import sources_ahead
from data_pipeline.loader import LoaderError, StepBatch
from data_pipeline.plan.budget import BudgetEnd, budget_end, budget_notices
from data_pipeline.plan.planner import DataUsedUp, TooManyUnusable
from data_pipeline.plan.report import blend_report, mixtures
from kimi_pretrain.attention.choice import check_kind
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.scheduler import CheckpointScheduler
from kimi_pretrain.checkpoint.storage_read import Checkpoint, Place
from kimi_pretrain.config import Config, describe
from kimi_pretrain.dep.memory_limit import TooMuchMemory
from kimi_pretrain.engine import mesh as engine_mesh
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.randomness import seed_step
from kimi_pretrain.reliability.anomaly_guard import AnomalyError
from kimi_pretrain.reliability.exit_report import step_faults
from kimi_pretrain.reliability.preflight import check_host, check_node, unsaved
from kimi_pretrain.reliability.run_history import (
    check_may_begin,
    check_way_back,
    claim_place,
    last_own_step,
    latest_in,
    place_of,
)
from kimi_pretrain.reliability.start_identity import join_start, start_id
from kimi_pretrain.reliability.watchdog import WAIT_FOR_DATA, Watchdog, backstop
from kimi_pretrain.run import Run
from kimi_pretrain.step import StepReport
from kimi_pretrain.telemetry.metrics import rank_metrics
from kimi_pretrain.telemetry.recorder import RankReport, Recorder, check_agreement, stop_reason
from kimi_pretrain.telemetry.run_dir import (
    History,
    describe_environment,
    log_to,
    note_beginning,
    note_tombstones,
    tell_sources,
    with_earlier_heldout,
)
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
    change_data: bool = False,
    stop: Callable[[], str | None] = lambda: None,
    prepare: Callable[[Run], None] | None = None,
) -> None:
    """Train from scratch or from a checkpoint, in every process of the job.

    Args:
        config: configuration of the run; written resolved into `run_dir`.
        run_dir: folder shared by all ranks; docs/RELIABILITY.md describes its content.
        resume: folder or URI of a checkpoint, or of a run (for its newest checkpoint), or "latest"
            for the newest checkpoint of this run.
        otherwise: checkpoint to resume from if "latest" finds none.
        or_start: start from scratch if "latest" finds nothing, unless a checkpoint was saved.
        restarted: True if this rank was restarted after a fault of the same job. If any rank was,
            all resume from the run's latest checkpoint, or from `resume` if there is none yet.
        change_data: with `resume`: switch to this configuration's sources and weights at the next
            window of the data (`data_pipeline.plan.change`).
        stop: returns the reason why this rank was asked to stop, with the name of the signal, or
            None. The run ends after the current step, with a checkpoint.
        prepare: called with the run before its first step, to observe or change it.
    """
    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    check_kind(config)
    check_host(config)
    watchdog = _start_watchdog(config, run_dir, stop)
    watchdog.enter("join the job")
    mesh = engine_mesh.start(config.layout, backstop(config.train.timeout_seconds))
    join_start(mesh.broadcast_from_rank0(start_id))  # rank 0's start owns the folder; all may write
    watchdog.joined()
    log_to(run_dir, mesh.rank)
    # Nothing is torn down after an error: other ranks may be inside a collective, and an orderly
    # shutdown would wait for them. The process ends, and the job with it.
    place = place_of(config, run_dir)
    restarted = any(mesh.all_gather_object(restarted))  # some machines may not know of the restart
    watchdog.enter("claim the place of checkpoints")
    owner = mesh.broadcast_from_rank0(partial(claim_place, place, run_dir, resume, restarted))
    # Do this before slow start-up work: garbage collection cannot protect our sources until then.
    watchdog.enter("tell the sources")
    mesh.broadcast_from_rank0(partial(_tell_sources, config, run_dir))
    progress = watchdog.progress("find the checkpoint")
    wanted = ("latest" if restarted else None, resume, otherwise)
    found, last_own = _find_checkpoint(wanted, place, config, mesh, progress)
    if found is None and (restarted or resume is not None):
        mesh.broadcast_from_rank0(partial(check_may_begin, run_dir, place, or_start or restarted))
    run = Run(config, mesh, found, watchdog.enter, change_data=change_data)
    run.train_step.clock.on_phase = watchdog.enter
    if prepare is not None:
        prepare(run)
    check_node(config)
    history = "none" if found is None else "own" if last_own == run.step else "other"
    end = _log_start(run, run_dir, history) if mesh.rank == 0 else None
    checkpoints = CheckpointScheduler(
        place, owner, run, watchdog.enter, found and found.uri, last_own
    )
    run.update.before_change = checkpoints.before_update
    recorder = Recorder(config, run_dir, mesh, run.step, run.loader.indices, history, end)
    if mesh.rank == 0:  # no step completes before rank 0 has written this
        note_tombstones(run_dir, run.loader.planner.tombstones.record())
    recorder.status("running", run.step, checkpoints.uri)
    with step_faults():
        reason = _train_steps(run, recorder, checkpoints, watchdog, stop)
    if reason is None:
        watchdog.enter("end")
        write_state_hashes(run, run_dir / "state_hashes.json")
        if config.train.efficiency_pairs:
            measure_efficiency(run, run_dir / "efficiency.json")
    watchdog.enter("end")
    if reason is not None:
        recorder.status("stopped", run.step, checkpoints.uri, reason)
    checkpoints.close(hurry=reason is not None)
    run.close()
    mesh.barrier()
    if reason is None:  # every rank has flushed; other tools rely on "finished"
        recorder.status("finished", run.step, checkpoints.uri)
    recorder.close()
    engine_mesh.stop()
    watchdog.stop()


def _train_steps(
    run: Run,
    recorder: Recorder,
    checkpoints: CheckpointScheduler,
    watchdog: Watchdog,
    stop: Callable[[], str | None],
) -> str | None:
    """Train step by step; return the reason for an early stop, or None after the last step."""
    config, mesh = run.config, run.mesh
    reason = stop_reason(mesh.all_gather_object(stop()))
    while run.finished is None and reason is None:
        if not _validate_if_due(run, recorder, watchdog, stop):
            reason = stop_reason(mesh.all_gather_object(stop()))
            break
        watchdog.begin_step(run.step + 1)
        watchdog.enter(WAIT_FOR_DATA)  # phases 0 and 1 ran ahead
        loader_state, start, began = run.loader.state_dict(), time.time(), time.perf_counter()
        batch = _next_batch(run, checkpoints)
        fetched = start + time.perf_counter() - began
        seed_step(config.train.seed, run.step, mesh)
        report = run.train_step.run(batch)  # phases 2 to 7
        run.step += 1
        report.spans[WAIT_FOR_DATA] = (start, fetched)
        watchdog.enter("8 report")
        mine = _rank_report(run, report, time.perf_counter() - began, checkpoints, stop())
        # The only collective of the loop, except for validations and the begin and end of saves.
        everyone: list[Any] = mesh.all_gather_object(mine)
        check_agreement(run.step, everyone)
        run.planner.learning.add(run.step - 1, [rank.metrics.bubble_times for rank in everyone])
        watchdog.enter("8 record")
        recorder.step(run.step, batch, report, everyone, loader_state)
        _check_guard(run, report, checkpoints, recorder)
        _quarantine(run, batch, report, checkpoints)
        if checkpoints.after_step([rank.save for rank in everyone]):
            recorder.status("running", run.step, checkpoints.uri)
        reason = stop_reason(rank.stop for rank in everyone)
    if run.finished is not None:
        log.info("finished after step %d: %s", run.step, run.finished)
        if config.checkpoint.every:
            checkpoints.now()
        validated = _validate_if_due(run, recorder, watchdog, stop)  # if stopped: after a resume
        return None if validated else stop_reason(mesh.all_gather_object(stop()))
    return _save_and_stop(checkpoints, reason)


def _validate_if_due(
    run: Run, recorder: Recorder, watchdog: Watchdog, stop: Callable[[], str | None]
) -> bool:
    """Validate and record the held-out loss, unless an earlier start already did at this step.

    The loop calls this before the next step, so that a resumed run catches up on a validation that
    a kill prevented, and a stage that keeps the step count begins with a validation.

    Returns:
        False if a rank was asked to stop; nothing is recorded then.
    """
    every = run.config.train.validate_every
    due = bool(every) and (run.step % every == 0 or run.finished is not None)
    if run.validation is None or not (due or run.step == recorder.first_step):
        return True
    watchdog.enter("validate")
    if not run.mesh.broadcast_from_rank0(partial(recorder.to_validate, run.step, due)):
        return True
    found = run.validation.run(watchdog.progress("validate"), stop)
    if found is not None:
        recorder.heldout(found.line(run.step))
    return found is not None


def _next_batch(run: Run, checkpoints: CheckpointScheduler) -> StepBatch:
    """Return the next step's batch; if there is none, save the trained state and raise."""
    try:
        return next(run.loader)
    except LoaderError as error:
        if isinstance(error.__cause__, DataUsedUp | TooMuchMemory):
            # The cause depends only on config and step, so all ranks get here and can save
            # collectively. A run with more memory or smaller chunks can resume.
            log.warning("step %d: %s; saving a checkpoint", run.step + 1, error.__cause__)
            checkpoints.now()
        raise


def _quarantine(
    run: Run, batch: StepBatch, report: StepReport, checkpoints: CheckpointScheduler
) -> None:
    """Quarantine the samples that the step skipped; later windows replace them on every rank.

    Raises:
        TooManyUnusable: too many samples are unusable; the trained state is saved first.
    """
    with checkpoints.saving_before(TooManyUnusable):
        run.loader.quarantine(batch.plan, report.skipped.tolist())


def _rank_report(
    run: Run, report: StepReport, seconds: float, checkpoints: CheckpointScheduler, stop: str | None
) -> RankReport:
    """Return this rank's report of a step that took `seconds`."""
    for bad in report.bad:
        log.warning("step %d: skipped a sample: %s", run.step, bad.reason)
    first_stage, stats = run.mesh.is_first_stage, run.loader.stats
    return RankReport(
        rank_metrics(report, seconds, stats, first_stage=first_stage, save=checkpoints.seconds()),
        report.update.verdict,
        stop,
        checkpoints.progress(),
        tuple((bad.sample, bad.item, bad.reason) for bad in report.bad),
        report.update.copies,
    )


def _check_guard(
    run: Run, report: StepReport, checkpoints: CheckpointScheduler, recorder: Recorder
) -> None:
    """Raise on all ranks if the guard ends the run, after finishing a save in progress."""
    update = report.update
    try:
        run.update.guard.check(run.step, update.verdict, report.loss, update.grad_norm)
    except AnomalyError:
        try:
            checkpoints.finish()
        except CheckpointError as error:
            log.warning("the checkpoint under way is not complete: %s", error)
        # The caller that catches this records the failure.
        recorder.status("running", run.step, checkpoints.uri)
        raise


def _save_and_stop(checkpoints: CheckpointScheduler, reason: str | None) -> str | None:
    """Save the trained state, even if the run saves nothing else; return the reason for the stop.

    Raises:
        CheckpointError: saving failed. The run must not look like an orderly stop: a job that is
            restarted and stopped again without a save would repeat the same steps forever.
    """
    try:
        checkpoints.now()
    except CheckpointError as error:
        kept = f"go on from {checkpoints.uri}" if checkpoints.uri else "there is no checkpoint yet"
        message = f"stopped ({reason}), but the last step could not be saved: {error}; {kept}"
        raise type(error)(message) from error
    return reason


def _tell_sources(config: Config, run_dir: Path) -> None:
    """Write the sources that this start will read. Rank 0."""
    held_out = config.data.heldout if config.train.validate_every is not None else ()
    tell_sources(run_dir, sources_ahead(config.data, sorted(held_out)))


def _start_watchdog(config: Config, run_dir: Path, stop: Callable[[], str | None]) -> Watchdog:
    """Start watching before the mesh exists, because joining the other ranks can hang, too."""
    rank, world_size = (
        int(os.environ.get(name, d)) for name, d in (("RANK", 0), ("WORLD_SIZE", 1))
    )
    seconds = config.train.timeout_seconds
    workers = config.data.workers > 0
    return Watchdog(run_dir, rank, world_size, seconds, stop=stop, workers=workers).start()


def _find_checkpoint(
    wanted: tuple[str | os.PathLike[str] | None, ...],
    place: Place,
    config: Config,
    mesh: Mesh,
    progress: Callable[[object], None],
) -> tuple[Checkpoint | None, int]:
    """Return the first existing checkpoint of `wanted`, verified, with its `last_own_step`.

    Args:
        wanted: "latest" (the newest of this run), or a folder or URI of another run or checkpoint.

    Returns:
        the checkpoint and its last own step; (None, 0) if the run starts from scratch.
    """
    for one in wanted:
        if one is None:
            continue
        uri = one if one == "latest" else mesh.broadcast_from_rank0(partial(latest_in, one))
        found = find(uri, place, config, mesh, progress, own=True)
        if found is not None:
            last_own = last_own_step(place, found)
            if uri != "latest":
                mesh.broadcast_from_rank0(partial(check_way_back, place, last_own))
            return found, last_own
    return None, 0


def _log_start(run: Run, run_dir: Path, history: History) -> BudgetEnd | None:
    """Write run, configuration and data to folder and log; return the budget's end. Rank 0."""
    planner = run.loader.planner
    sources = run.sources if history == "none" else with_earlier_heldout(run_dir, run.sources)
    describe_environment(run_dir, run.config, run.began_from, sources, mixtures(planner))
    note_beginning(run_dir, planner.state_dict(), history)
    log.info("%s", describe(run.config))
    if run.finished is not None:
        log.warning("%s: nothing is trained", run.finished)
    elif (notice := unsaved(run.config)) is not None:
        log.warning("%s", notice)
    log.info("data: %s", blend_report(planner))
    if run.data_change is not None:
        log.warning("data: %s", run.data_change)
    end = budget_end(planner)
    for notice in (*planner.notices(), *budget_notices(end, run.config.train.steps)):
        log.warning("%s", notice)
    return end
