"""Builds torchrun's command line and environment, for one node and for several.

Nothing is started here. On a single node torchrun and its ranks meet in files of a private folder
(why: `kimi_pretrain.parallel.rendezvous`), so nothing listens beyond the loopback address. On
several nodes torchrun's own store listens on all addresses of the node that holds it, and torch
lets nobody change that: the network between nodes has to be trusted.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from launch.local.job import MEETING, WORKER, Job


@dataclass(frozen=True)
class Nodes:
    """How a job is spread over machines.

    Attributes:
        processes: on every node, one per GPU.
        count: number of nodes.
        rendezvous: "host:port" that all nodes can reach; needed for more than one node.
        name: tells this job's rendezvous from others at the same place.

    """

    processes: int
    count: int = 1
    rendezvous: str | None = None
    name: str = "kimi-pretrain"


def spread(world_size: int, num_nodes: int, rendezvous: str | None) -> Nodes:
    """Deal `world_size` processes out evenly over nodes.

    Raises:
        ValueError: the processes do not divide, or several nodes have no place to meet.

    """
    if world_size % num_nodes:
        raise ValueError(
            f"{world_size} processes (pp x dp x cp x tp) do not divide over {num_nodes} nodes"
        )
    if num_nodes > 1 and not rendezvous:
        raise ValueError(
            f"{num_nodes} nodes need --rendezvous HOST:PORT, the same on every node; "
            "HOST is one of them"
        )
    return Nodes(world_size // num_nodes, num_nodes, rendezvous)


def log_name(nodes: Nodes) -> str:
    """Return the name of torchrun's log on this machine; several machines share the folder."""
    return "torchrun.log" if nodes.count == 1 else f"torchrun_{socket.gethostname()}.log"


# That torchrun leaves its processes to end when it is asked to end itself: time for a save. (When
# one of them has failed it waits for the others for 30 seconds, whatever is said here.)
SHUTDOWN_SECONDS = 600
# torchrun adds a line to its file that often, to tell other nodes that it lives: here are none.
KEEP_ALIVE_SECONDS = 3600


@contextmanager
def prepared(
    job: Job,
    nodes: Nodes,
    worker: str = WORKER,
    max_restarts: int = 0,
    base: Mapping[str, str] = os.environ,
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Give command and environment of this node's processes; what they meet in ends with it.

    Args:
        job, nodes, worker, max_restarts: see `command`.
        base: see `environment`.
    """
    cores = len(os.sched_getaffinity(0))
    with TemporaryDirectory(prefix="kimi-pretrain-meeting-") as folder:  # of mode 0700
        yield (
            command(job, nodes, Path(folder), worker=worker, max_restarts=max_restarts),
            environment(base, nodes, cores, Path(folder)),
        )


def meeting(nodes: Nodes, folder: Path) -> list[str]:
    """Return torchrun's arguments that say where it meets; `folder` is for a single node."""
    if nodes.count > 1:
        return ["--rdzv-backend=c10d", f"--rdzv-endpoint={nodes.rendezvous}"]
    return [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={folder / 'torchrun'}",
        f"--rdzv-conf=store_type=file,keep_alive_interval={KEEP_ALIVE_SECONDS}",
        "--local-addr=127.0.0.1",
    ]


def command(
    job: Job,
    nodes: Nodes,
    folder: Path,
    python: str = sys.executable,
    worker: str = WORKER,
    max_restarts: int = 0,
) -> list[str]:
    """Return the command that starts this node's processes; the same on every node.

    Args:
        job: what each process is told.
        nodes: how they are spread.
        folder: that nobody else can open, where the processes of a single node meet.
        python: interpreter.
        worker: module that each process runs.
        max_restarts: how often all processes are started again after one has failed.

    """
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes.count}",
        f"--nproc-per-node={nodes.processes}",
        f"--rdzv-id={nodes.name}",
        *meeting(nodes, folder),
        f"--max-restarts={max_restarts}",
        f"--shutdown-timeout={SHUTDOWN_SECONDS}",
        "--module",
        worker,
        job.argument(),
    ]


def environment(base: Mapping[str, str], nodes: Nodes, cores: int, folder: Path) -> dict[str, str]:
    """Return the environment for the processes of one node.

    Store: every start of the processes meets in a new one. torchrun would give them its own, in
    which the addresses of the processes before a restart still stand, and those no one answers.

    Threads: each process gets its part of the cores. With torch's own default every process would
    start one thread per core and they would fight. A value set by the user stays.

    Args:
        base: environment to start from.
        nodes: how the processes are spread.
        cores: that this node offers.
        folder: see `command`.

    """
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if nodes.count == 1:
        own[MEETING] = str(folder)
    # Inherited from inside of another job, its folder would be one on every node.
    others = {name: value for name, value in base.items() if name != MEETING}
    return {"OMP_NUM_THREADS": str(max(1, cores // nodes.processes)), **others, **own}
