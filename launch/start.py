"""Starts a training on this machine, and tells how it ended: what `kimi-pretrain train` does."""

import os
import shlex
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launch.job import LATEST, WORKER, Job

if TYPE_CHECKING:
    from kimi_pretrain.config import Config


@dataclass(frozen=True)
class Machines:
    """How a training is spread over machines, as the user says it.

    Attributes:
        count: of machines, each of which runs this command.
        rendezvous: HOST:PORT where they meet.
        processes: on this one; None: what the layout makes of it.
        max_restarts: how often all processes are started again after one has failed.
    """

    count: int = 1
    rendezvous: str | None = None
    processes: int | None = None
    max_restarts: int = 0


def start(job: Job, config: "Config", machines: Machines, worker: str = WORKER) -> int:
    """Train, in this process or in several; returns the exit code.

    Args:
        job: what to do.
        config: that of the job, loaded.
        machines: where.
        worker: module that each of several processes runs.

    Raises:
        ValueError: the folder is in use or holds another run, or the processes do not fit.
    """
    if "RANK" not in os.environ:  # otherwise this is one of many
        check_once(job, config, alone=machines.count == 1)
    if "RANK" in os.environ or config.layout.world_size() == 1:
        from launch.preempt import StopSignal
        from launch.worker import rank_of_this, run_job

        run_job(job, StopSignal().install())
        code, message = 0, None
        if rank_of_this() != 0:
            return 0
    else:
        code, message = _start_several(job, config, machines, worker)
    tell_end(job, code, message)
    return code


def _start_several(
    job: Job, config: "Config", machines: Machines, worker: str
) -> tuple[int, str | None]:
    from kimi_pretrain.config import describe
    from launch import supervise, torchrun

    nodes = torchrun.spread(config.layout.world_size(), machines.count, machines.rendezvous)
    if machines.processes not in (None, nodes.processes):
        raise ValueError(
            f"--nproc {machines.processes} x --nnodes {machines.count} is not the layout's "
            f"{config.layout.world_size()} processes (layout.pp x dp x cp x tp)"
        )
    typer.echo(describe(config))
    cores = len(os.sched_getaffinity(0))
    env = torchrun.environment(os.environ, nodes.processes, cores)
    command = torchrun.command(job, nodes, worker=worker, max_restarts=machines.max_restarts)
    log = torchrun.log_name(nodes)
    return supervise.run(command, env, Path(job.run_dir), in_order=True, log_name=log)


def check_once(job: Job, config: "Config", *, alone: bool) -> None:
    """Find what is wrong before torch is loaded, and before many processes find the same mistake.

    Args:
        job: what to do.
        config: that of the job.
        alone: on no other machine; otherwise rank 0 may hold the folder already.

    Raises:
        ValueError: the folder is in use or holds another run, or a checkpoint is not there, not
            complete, or of another model; its files are verified later.
    """
    from kimi_pretrain import run_lock

    if alone:
        run_lock.check_free(Path(job.run_dir))
    if job.resume is None:
        run_lock.check_fresh(Path(job.run_dir))
        _check_weights(config)
    elif job.resume != LATEST:
        from kimi_pretrain.checkpoint.manifest import check_fits
        from kimi_pretrain.checkpoint.place import open_checkpoint

        found = open_checkpoint(job.resume)
        check_fits(found.manifest(), config, found.uri)


def _check_weights(config: "Config") -> None:
    if config.train.vision_weights is not None:
        from kimi_pretrain.vision_weights import check_vision_weights

        check_vision_weights(config)
    if config.train.start_from is not None:
        from kimi_pretrain.weights.start import open_start

        open_start(config)


def tell_end(job: Job, code: int, message: str | None) -> None:
    """Print how a training ended, if there is more to say than that it is finished."""
    from kimi_pretrain.run_lock import RunLocked, check_free
    from kimi_pretrain.status import mark_failed, read_status

    run_dir = Path(job.run_dir)
    if message:
        typer.echo(f"error: {message}", err=True)
        with suppress(RunLocked):  # another run's folder, which is why this one has ended
            check_free(run_dir)
            mark_failed(run_dir, message)
        return
    status = read_status(run_dir)
    if code == 0 and status is not None and status.state == "stopped":
        saved = f"checkpoint {status.checkpoint}" if status.checkpoint else "nothing saved"
        typer.echo(f"stopped after step {status.step} ({status.reason}), {saved}; go on with:")
        # Before its first step a run has nothing but what it was to go on from.
        of_another = status.checkpoint is None or status.checkpoint == job.resume
        typer.echo(f"  {command_to_go_on(job, job.resume if of_another else LATEST)}")


def command_to_go_on(job: Job, resume: str | None) -> str:
    """Return the command that takes a stopped training up again."""
    words = ["kimi-pretrain", "train", "--config", job.config, "--run-dir", job.run_dir]
    return shlex.join([*words, "--resume", resume or LATEST, *job.overrides])
