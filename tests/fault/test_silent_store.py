"""Tests of a stop request while the store does not answer, which could take an hour."""

import os
import signal

import pytest

from kimi_pretrain.reliability.exit_report import NO_PROGRESS
from kimi_pretrain.reliability.status import read_status
from tests import fork_server
from tests.silent import KEYS, SilentServer


@pytest.mark.timeout(400)  # the machine may be busy
def test_a_training_told_to_stop_does_not_wait_for_the_store(tmp_path):
    with SilentServer() as server:
        command = [
            *("-m", "launch.cli", "train", "--config", "tiny_cpu"),
            *("--run-dir", str(tmp_path / "run"), "layout={pp: 1, vpp: 1, dp: 1, ep: 1}"),
            *("data.root=s3://bucket", "data.patience=3600", f"data.endpoint={server.endpoint}"),
        ]
        with (tmp_path / "told").open("w") as output:
            run = fork_server.start(command, output, output, KEYS)
        try:
            assert server.asked.wait(240)
            os.kill(run.pid, signal.SIGTERM)
            code = run.wait(100.0)
        finally:
            run.kill()
    told = (tmp_path / "told").read_text()
    assert code == NO_PROGRESS, told
    assert f"(asked {server.endpoint}, as configured" in told
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "failed"
    assert "stopped (signal SIGTERM)" in str(status.reason)
