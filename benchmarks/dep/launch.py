"""Starts the benchmarks' two processes of one thread each."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.local import torchrun

ROOT = Path(__file__).resolve().parent.parent.parent
PROCESSES = 2
PATIENCE_S = 1800.0  # for a job; only a fault takes as long


def run(module: str, arguments: Sequence[str], variables: Mapping[str, str]) -> None:
    """Run a module in processes that can meet, and wait for them.

    Args:
        variables: of the environment, beside those that give each process one thread.

    Raises:
        SystemExit: they failed; their output has been seen.
    """
    nodes = torchrun.Nodes(PROCESSES)
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment = {"PYTHONWARNINGS": "ignore", **os.environ, **threads, **variables}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={PROCESSES}",
            *torchrun.meeting(nodes, Path(folder)), "--module", module, *arguments,
        ]  # fmt: skip
        environment = torchrun.environment(environment, nodes, 1, Path(folder))
        done = subprocess.run(command, env=environment, check=False, timeout=PATIENCE_S)
    if done.returncode:
        sys.exit(f"error: {module} {arguments[0]} failed with {done.returncode}; see above")
