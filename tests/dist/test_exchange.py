"""Exchange and gradient sum between real processes; see exchange_case.py."""

import pytest

from tests import fork_server

pytestmark = [pytest.mark.dist]


def test_four_processes_exchange_and_add_up():
    done = fork_server.run_ranks([["tests/dist/exchange_case.py"]] * 4, timeout=100)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    assert done.stdout.count("passed") == 5
