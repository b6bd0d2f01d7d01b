"""Builds torchrun's command line and environment, for one node and for several.

This module starts no process. On a single node, torchrun and its ranks use files in a private
folder for their rendezvous (why: `kimi_pretrain.parallel.rendezvous`), so nothing listens beyond
the loopback address. On several nodes, torchrun's own store listens on all addresses of its node,
which torch does not let us change; the network between nodes must be trusted.
"""

import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from kimi_pretrain.reliability.start_identity import REPORTS, START
from launch.local.job import MEETING, WORKER, Job


@dataclass(frozen=True)
class Nodes:
    """Distribution of a job over machines.

    Attributes:
        processes: number on each node, one per GPU.
        count: number of nodes.
        rendezvous: "host:port" that all nodes can reach; required for several nodes.
        name: id of this job's rendezvous, to distinguish it from others at the same address.
    """

    processes: int
    count: int = 1
    rendezvous: str | None = None
    name: str = "kimi-pretrain"


def spread(world_size: int, num_nodes: int, rendezvous: str | None) -> Nodes:
    """Divide `world_size` processes evenly over nodes.

    Raises:
        ValueError: the processes do not divide evenly, or several nodes have no rendezvous.
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


# Time that torchrun gives its processes for a save when it is asked to end. (After the failure of
# one process it waits 30 seconds for the others, whatever this value is.)
SHUTDOWN_SECONDS = 600
# Interval of torchrun's keep-alive for other nodes; a single node has none.
KEEP_ALIVE_SECONDS = 3600


@contextmanager
def prepared(
    job: Job,
    nodes: Nodes,
    worker: str = WORKER,
    max_restarts: int = 0,
    base: Mapping[str, str] = os.environ,
) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Yield command and environment of this node's processes; delete their private folder.

    Args:
        job, nodes, worker, max_restarts: see `command`.
        base: see `environment`.
    """
    cores = len(os.sched_getaffinity(0))
    with TemporaryDirectory(prefix="kimi-pretrain-meeting-") as folder:  # mode 0700
        yield (
            command(job, nodes, Path(folder), worker=worker, max_restarts=max_restarts),
            environment(base, nodes, cores, Path(folder)),
        )


def meeting(nodes: Nodes, folder: Path) -> list[str]:
    """Return torchrun's rendezvous arguments; `folder` is used on a single node only."""
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
        job: passed to each process.
        nodes: distribution of the processes.
        folder: private folder for the rendezvous of a single node.
        python: interpreter.
        worker: module that each process runs.
        max_restarts: how often all processes are restarted after a failure.
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

    Store: every start of the processes uses a new store. torchrun would share its own store, which
    still has the addresses of the processes before a restart.

    Start: `launch.local.supervise` names the start. For several machines it is named here, because
    they must agree.

    Threads: each process gets its share of the cores (OMP_NUM_THREADS, unless the user has set it).
    By torch's default each process would start one thread per core.

    Args:
        base: environment to start from.
        nodes: distribution of the processes.
        cores: number of cores of this node.
        folder: see `command`.
    """
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    if nodes.count == 1:
        own[MEETING] = str(folder)
    elif nodes.rendezvous is not None:  # so that all machines use the same name
        own[START] = f"{nodes.name}@{nodes.rendezvous}"
    # Inside another job, inherited variables would refer to that job.
    others = {name: value for name, value in base.items() if name not in (MEETING, START, REPORTS)}
    return {"OMP_NUM_THREADS": str(max(1, cores // nodes.processes)), **others, **own}
