"""A training that is told to stop while its store does not answer, which could last an hour."""

import os
import signal
import subprocess
import sys

import pytest

from kimi_pretrain.reliability.exit_report import NO_PROGRESS
from kimi_pretrain.reliability.status import read_status
from tests import ROOT
from tests.silent import KEYS, SilentServer


@pytest.mark.timeout(400)  # importing torch and megatron is slow on a busy machine
def test_a_training_told_to_stop_does_not_wait_for_the_store(tmp_path):
    with SilentServer() as server:
        command = [
            *(sys.executable, "-m", "launch.cli", "train", "--config", "tiny_cpu"),
            *("--run-dir", str(tmp_path / "run"), "layout={pp: 1, vpp: 1, dp: 1, ep: 1}"),
            *("data.root=s3://bucket", "data.patience=3600", f"data.endpoint={server.endpoint}"),
        ]
        environment = {**os.environ, **KEYS, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
        process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
        try:
            assert server.asked.wait(240)
            process.send_signal(signal.SIGTERM)
            _, told = process.communicate(timeout=100)
        finally:
            process.kill()
            process.communicate()
    assert process.returncode == NO_PROGRESS, told
    assert f"(asked {server.endpoint}, as configured" in told
    status = read_status(tmp_path / "run")
    assert status is not None
    assert status.state == "failed"
    assert "stopped (signal SIGTERM)" in str(status.reason)
