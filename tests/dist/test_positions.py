"""Position ids of microbatches, in a process of their own: Megatron-Core changes its process."""

import pytest

from tests import fork_server

pytestmark = [pytest.mark.dist, pytest.mark.timeout(120)]


def test_positions_follow_the_config():
    case = "tests/dist/positions_case.py"
    done = fork_server.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", case], 100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or done.stdout.strip().startswith(".")
