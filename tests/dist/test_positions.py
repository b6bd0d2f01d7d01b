"""Position ids of microbatches, in a process of their own: Megatron-Core changes its process."""

import subprocess
import sys

import pytest

from tests import ROOT

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_positions_follow_the_config():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "tests/dist/positions_case.py"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or done.stdout.strip().startswith(".")
