"""Starts a training on this machine, and tells how it ended: what `kimi-pretrain train` does."""

import os
import shlex
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launch.local.job import LATEST, WORKER, Job

if TYPE_CHECKING:
    from kimi_pretrain.config import Config

PING_SECONDS = 10.0
STORE_MAGIC = 0x3C85F7CE  # of torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp)


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
    world_size = config.layout.world_size()
    check_machines(world_size, machines)
    if "RANK" not in os.environ:  # otherwise this is one of many
        if job.resume not in (None, LATEST):
            from kimi_pretrain.reliability.run_history import latest_in

            job = replace(job, resume=latest_in(job.resume))
        check_once(job, config, alone=machines.count == 1)
    if "RANK" in os.environ or (world_size == 1 and not machines.max_restarts):
        from launch.local.signals import StopSignal
        from launch.local.worker import rank_of_this, run_job

        run_job(job, StopSignal().install())
        code, message = 0, None
        if rank_of_this() != 0:
            return 0
    else:
        code, message = _start_several(job, config, machines, worker)
    tell_end(job, code, message)
    if code == 0 and machines.count == 1 and config.train.pictures:  # of several each would draw
        _draw(Path(job.run_dir))
    return code


def _draw(run_dir: Path) -> None:
    """Draw a run that has finished."""
    from kimi_pretrain.reliability.status import read_status

    status = read_status(run_dir)
    if status is not None and status.state == "finished":
        from launch.local.pictures import draw_at_the_end

        draw_at_the_end(run_dir)


def _start_several(
    job: Job, config: "Config", machines: Machines, worker: str
) -> tuple[int, str | None]:
    from kimi_pretrain.config import describe
    from kimi_pretrain.reliability.preflight import check_start
    from launch.local import supervise, torchrun

    nodes = torchrun.spread(config.layout.world_size(), machines.count, machines.rendezvous)
    if nodes.rendezvous is not None and nodes.count > 1:
        check_rendezvous(nodes.rendezvous)
    check_start(config, steps=1 if job.resume is None else 0)  # one process looks itself, first
    typer.echo(describe(config))
    log = torchrun.log_name(nodes)
    with torchrun.prepared(job, nodes, worker, machines.max_restarts) as (command, env):
        return supervise.run(command, env, Path(job.run_dir), in_order=True, log_name=log)


def check_machines(world_size: int, machines: Machines) -> None:
    """Refuse what does not fit the layout, and what nobody would heed.

    Raises:
        ValueError: says which option.
    """
    from launch.local import torchrun

    if "RANK" in os.environ:
        if machines != Machines():
            raise ValueError(
                "--nnodes, --rendezvous, --nproc and --max-restarts are for who starts the "
                "processes; here torchrun or srun did (RANK is set): leave them out"
            )
        return
    nodes = torchrun.spread(world_size, machines.count, machines.rendezvous)
    if machines.processes not in (None, nodes.processes):
        raise ValueError(
            f"--nproc {machines.processes} x --nnodes {machines.count} is not the layout's "
            f"{world_size} processes (layout.pp x dp x cp x tp)"
        )
    if machines.count == 1 and machines.rendezvous is not None:
        raise ValueError(
            f"--rendezvous {machines.rendezvous} is for several machines; add --nnodes, or leave "
            "it out"
        )


def check_rendezvous(place: str) -> None:
    """Refuse a port where another program listens: torchrun would wait for it for ever.

    Nobody, or the store of a machine that came first, is as it should be. torch's store answers a
    ping with its number; torch's own client has no time limit on this.

    Args:
        place: "host:port".

    Raises:
        ValueError: something else answers there, or nothing.
    """
    host, _, port = place.rpartition(":")
    if not (host and port.isdigit()):
        raise ValueError(f"--rendezvous {place}: expected HOST:PORT")
    number = struct.pack("<I", os.getpid())
    try:
        with socket.create_connection((host.strip("[]"), int(port)), PING_SECONDS) as store:
            store.sendall(struct.pack("<BI", 0, STORE_MAGIC) + b"\x0d" + number)  # validate, ping
            try:
                answer = store.recv(len(number))
            except OSError:  # no answer in time, or closed
                answer = b""
    except OSError:  # nobody there yet
        return
    if answer != number:
        raise ValueError(
            f"--rendezvous {place}: another program listens there, which is no torchrun; choose "
            "another port, the same on every machine"
        )


def check_once(job: Job, config: "Config", *, alone: bool) -> None:
    """Find what is wrong before torch is loaded, and before many processes find the same mistake.

    Args:
        job: what to do.
        config: that of the job.
        alone: on no other machine; otherwise rank 0 may hold the folder already.

    Raises:
        ValueError: the folder is none, is in use or holds another run, or a checkpoint is not
            there, not complete, or of another model; its files are verified later.
    """
    from kimi_pretrain.reliability import run_history, run_lock

    run_dir = Path(job.run_dir)
    run_lock.check_folder(run_dir)
    if alone:
        run_lock.check_free(run_dir)
    if job.resume is None:
        if job.or_start:
            raise ValueError("--or-start says what --resume latest does where there is nothing")
        run_history.check_fresh(run_dir)
        _check_weights(config)
    elif job.resume == LATEST:
        run_history.check_latest(run_dir, run_history.place_of(config, run_dir), job.or_start)
    else:
        from kimi_pretrain.checkpoint.manifest import check_fits
        from kimi_pretrain.checkpoint.storage_read import open_checkpoint

        found = open_checkpoint(job.resume)
        check_fits(found.manifest(), config, found.uri)


def _check_weights(config: "Config") -> None:
    if config.train.vision_weights is not None:
        from kimi_pretrain.dep.weights import check_vision_weights

        check_vision_weights(config)
    if config.train.start_from is not None:
        from kimi_pretrain.weights.start import open_start

        open_start(config)


def tell_end(job: Job, code: int, message: str | None) -> None:
    """Print how a training ended, and where what it left can be looked at."""
    from kimi_pretrain.reliability.run_lock import RunLocked, check_free
    from kimi_pretrain.reliability.status import mark_failed, read_status

    run_dir = Path(job.run_dir)
    if message:
        typer.echo(f"error: {message}", err=True)
        with suppress(RunLocked):  # another run's folder, which is why this one has ended
            check_free(run_dir)
            mark_failed(run_dir, message)
        return
    status = read_status(run_dir)
    if code == 0 and status is not None and status.state == "finished":
        typer.echo(f"finished after step {status.step}: {run_dir}")
        if status.checkpoint is not None:
            typer.echo(f"  checkpoint {status.checkpoint}")
        typer.echo(f"  {shlex.join(['tensorboard', '--logdir', f'{run_dir}/tensorboard'])}")
    if code == 0 and status is not None and status.state == "stopped":
        saved = f"checkpoint {status.checkpoint}" if status.checkpoint else "nothing saved"
        typer.echo(f"stopped after step {status.step} ({status.reason}), {saved}; go on with:")
        # Before its first step a run has nothing but what it was to go on from.
        of_another = status.checkpoint is None or status.checkpoint == job.resume
        typer.echo(f"  {command_to_go_on(job, job.resume if of_another else LATEST)}")


def command_to_go_on(job: Job, resume: str | None) -> str:
    """Return the command that takes a stopped training up again."""
    words = ["kimi-pretrain", "train", "--config", job.config, "--run-dir", job.run_dir]
    again = ["--resume", resume or LATEST]
    if resume is None or job.or_start:  # nothing was saved: there is nothing else to go on from
        again.append("--or-start")
    return shlex.join([*words, *again, *job.overrides])
