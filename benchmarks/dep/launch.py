"""Starts the processes of a benchmark, with one thread each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.local import torchrun

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = 2
PATIENCE_S = 1800.0  # time limit of a job; only a fault takes this long


def run(
    module: str,
    arguments: Sequence[str],
    variables: Mapping[str, str],
    processes: int = PROCESSES,
) -> None:
    """Run a module in a group of connected processes and wait for them.

    Args:
        variables: environment variables, in addition to those that give each process one thread.

    Raises:
        SystemExit: a process failed; its output has already been printed.
    """
    nodes = torchrun.Nodes(processes)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = {"PYTHONWARNINGS": "ignore", **os.environ, **threads, **variables}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={processes}",
            *torchrun.meeting(nodes, Path(folder)), "--module", module, *arguments,
        ]  # fmt: skip
        environment = torchrun.environment(environment, nodes, 1, Path(folder))
        done = subprocess.run(command, env=environment, check=False, timeout=PATIENCE_S)
    if done.returncode:
        sys.exit(f"error: {module} {arguments[0]} failed with {done.returncode}; see above")
