"""The exchange and the gradient sum between real processes; see exchange_case.py."""

import pytest

from tests.dist.jobs import run_torchrun

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_four_processes_exchange_and_add_up():
    done = run_torchrun(4, ["tests/dist/exchange_case.py"], timeout=100)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("passed") == 5
