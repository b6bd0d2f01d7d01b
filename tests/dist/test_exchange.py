"""The exchange and the gradient sum between real processes; see exchange_case.py."""

import subprocess
import sys

import pytest

from tests.dist.jobs import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_four_processes_exchange_and_add_up():
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=4",
        "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1",
        "tests/dist/exchange_case.py",
    ]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("passed") == 5
