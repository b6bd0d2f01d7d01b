"""Positions, angles and the order of passes, in a process that Megatron-Core may modify."""

import pytest

from tests import fork_server

pytestmark = [pytest.mark.dist]


def test_positions_follow_the_config_angles_the_positions_and_plans_megatron_core():
    cases = (
        "tests/dist/positions_case.py", "tests/dist/rotary_case.py", "tests/dist/schedule_case.py",
        "tests/dist/microbatch_case.py",
    )  # fmt: skip
    done = fork_server.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", *cases], 100)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    assert " passed" in done.stdout or done.stdout.strip().startswith(".")
