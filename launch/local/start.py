"""Starts a training on this machine and reports how it ended, for `kimi-pretrain train`."""

import os
import shlex
import socket
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from launch.local.job import LATEST, WORKER, Job

if TYPE_CHECKING:
    from kimi_pretrain.config import Config

PING_SECONDS = 10.0
# magic number of torch's TCPStore (torch/csrc/distributed/c10d/TCPStoreBackend.hpp)
STORE_MAGIC = 0x3C85F7CE


@dataclass(frozen=True)
class Machines:
    """Machines of a training: options of `kimi-pretrain train`.

    Attributes:
        count: number of machines, each of which runs the command.
        rendezvous: HOST:PORT of the rendezvous; required for several machines.
        processes: number on this machine; None: derived from the layout.
        max_restarts: how often all processes are restarted after a failure.
    """

    count: int = 1
    rendezvous: str | None = None
    processes: int | None = None
    max_restarts: int = 0


def start(
    job: Job,
    config: "Config",
    machines: Machines,
    worker: str = WORKER,
    *,
    apart: bool = False,
) -> int:
    """Train in this process or in several processes started by torchrun; return the exit code.

    Args:
        job: the training job.
        config: of the job, loaded.
        machines: machines to train on.
        worker: module that each of several processes runs.
        apart: use torchrun even for a single process.

    Raises:
        ValueError: the folder is in use or belongs to another run, or the processes do not fit.
    """
    world_size = config.layout.world_size()
    check_machines(world_size, machines)
    if "RANK" not in os.environ:  # otherwise torchrun or srun started this process as a rank
        if job.resume not in (None, LATEST):
            from kimi_pretrain.reliability.run_history import latest_in

            job = replace(job, resume=latest_in(job.resume))
        check_once(job, config, alone=machines.count == 1)
    if "RANK" in os.environ or (world_size == 1 and not machines.max_restarts and not apart):
        from launch.local.signals import StopSignal
        from launch.local.worker import rank_of_this, run_job

        run_job(job, StopSignal().install())
        code, message = 0, None
        if rank_of_this() != 0:
            return 0
    else:
        code, message = _start_several(job, config, machines, worker)
    tell_end(job, code, message)
    # otherwise every machine would draw
    if code == 0 and machines.count == 1 and config.train.pictures:
        _draw(Path(job.run_dir))
    return code


def _draw(run_dir: Path) -> None:
    """Draw the pictures of a finished run."""
    from kimi_pretrain.reliability.status import read_status

    status = read_status(run_dir)
    if status is not None and status.state == "finished":
        from kimi_pretrain.tools.run_plots import draw_at_the_end

        draw_at_the_end(run_dir)


def _start_several(
    job: Job, config: "Config", machines: Machines, worker: str
) -> tuple[int, str | None]:
    from kimi_pretrain.attention.choice import check_kind
    from kimi_pretrain.config import describe
    from kimi_pretrain.reliability.preflight import check_start
    from launch.local import supervise, torchrun

    nodes = torchrun.spread(config.layout.world_size(), machines.count, machines.rendezvous)
    if nodes.rendezvous is not None and nodes.count > 1:
        check_rendezvous(nodes.rendezvous)
    check_kind(config, explicit=True)
    # Check once here instead of in every rank.
    check_start(config, steps=1 if job.resume is None else 0, ranks_here=nodes.processes)
    typer.echo(describe(config))
    log = torchrun.log_name(nodes)
    with torchrun.prepared(job, nodes, worker, machines.max_restarts) as (command, env):
        return supervise.run(command, env, Path(job.run_dir), in_order=True, log_name=log)


def check_machines(world_size: int, machines: Machines) -> None:
    """Refuse options that do not fit the layout, or that would have no effect.

    Raises:
        ValueError: names the option.
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
    """Refuse a port where another program listens: torchrun would wait for it forever.

    Two cases are allowed: a free port, and the torch store of a machine that started earlier. The
    store answers a ping with the number it received. torch's own client has no timeout here.

    Args:
        place: "host:port".

    Raises:
        ValueError: the text is not HOST:PORT, or another program listens there.
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
            except OSError:  # no answer in time, or connection closed
                answer = b""
    except OSError:  # nothing listens there yet
        return
    if answer != number:
        raise ValueError(
            f"--rendezvous {place}: another program listens there, which is no torchrun; choose "
            "another port, the same on every machine"
        )


def check_once(job: Job, config: "Config", *, alone: bool) -> None:
    """Check folder and checkpoints once, before torch is loaded and any process is started.

    Args:
        job: the training job.
        config: of the job.
        alone: True if this is the only machine; otherwise rank 0 may hold the folder already.

    Raises:
        ValueError: the folder is a file, is in use or belongs to another run; or a checkpoint is
            missing, incomplete or from another model. The checkpoint's files are verified later.
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
        check_weights(config)
    elif job.resume == LATEST:
        place = run_history.place_of(config, run_dir)
        run_history.check_latest(config, run_dir, place, job.or_start)
    else:
        from kimi_pretrain.checkpoint.manifest import check_fits, check_resumes
        from kimi_pretrain.checkpoint.storage_read import open_checkpoint

        found = open_checkpoint(job.resume)
        check_fits(found.manifest(), config, found.uri)
        check_resumes(found.manifest(), config, found.uri)


def check_weights(config: "Config") -> None:
    """Compare the initial weights' headers with the model; load torch if any are configured."""
    if config.train.start_from is not None or config.train.vision_weights is not None:
        from kimi_pretrain.weights.initial_weights import open_initial_weights

        open_initial_weights(config)


def tell_end(job: Job, code: int, message: str | None) -> None:
    """Print a training's outcome, the location of its results, and the command to resume it."""
    from kimi_pretrain.reliability.status import read_status

    run_dir = Path(job.run_dir)
    if message:
        typer.echo(f"error: {message}", err=True)
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
        # A run stopped before its first step only has the checkpoint it resumed from.
        of_another = status.checkpoint is None or status.checkpoint == job.resume
        typer.echo(f"  {command_to_go_on(job, job.resume if of_another else LATEST)}")


def command_to_go_on(job: Job, resume: str | None) -> str:
    """Return the command that resumes a stopped training."""
    words = ["kimi-pretrain", "train", "--config", job.config, "--run-dir", job.run_dir]
    again = ["--resume", resume or LATEST]
    # without a checkpoint, it must be allowed to start from scratch
    if resume is None or job.or_start:
        again.append("--or-start")
    return shlex.join([*words, *again, *job.overrides])
