"""Builds torchrun's command line and environment, for one node and for several.

Pure functions: nothing is started here. The rendezvous of a single node is bound to the loopback
address, so it needs no name service and is not reachable from outside.
"""

import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass

from launch.job import WORKER, Job


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


def command(
    job: Job,
    nodes: Nodes,
    python: str = sys.executable,
    worker: str = WORKER,
    max_restarts: int = 0,
) -> list[str]:
    """Return the command that starts this node's processes; the same on every node.

    Args:
        job: what each process is told.
        nodes: how they are spread.
        python: interpreter.
        worker: module that each process runs.
        max_restarts: how often all processes are started again after one has failed.

    """
    meeting = ["--rdzv-backend=c10d", f"--rdzv-id={nodes.name}"]
    if nodes.count == 1:
        # Port 0: the system picks a free one, so that several runs fit on one machine.
        meeting += ["--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    else:
        meeting += [f"--rdzv-endpoint={nodes.rendezvous}"]
    return [
        python,
        "-m",
        "torch.distributed.run",
        f"--nnodes={nodes.count}",
        f"--nproc-per-node={nodes.processes}",
        *meeting,
        f"--max-restarts={max_restarts}",
        f"--shutdown-timeout={SHUTDOWN_SECONDS}",
        "--module",
        worker,
        job.argument(),
    ]


def environment(base: Mapping[str, str], processes: int, cores: int) -> dict[str, str]:
    """Return the environment for the processes of one node.

    Store: every start of the processes meets in a new one. torchrun would give them its own, in
    which the addresses of the processes before a restart still stand, and those no one answers.

    Threads: each process gets its part of the cores. With torch's own default every process would
    start one thread per core and they would fight. A value set by the user stays.

    Args:
        base: environment to start from.
        processes: on this node.
        cores: that this node offers.

    """
    own = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return {"OMP_NUM_THREADS": str(max(1, cores // processes)), **base, **own}
