"""Tests of signals to a rank: they are recorded, and the handler precedes the torch import."""

import signal
import subprocess
import sys
import time

import pytest

from tests import ROOT

NOTE = """
import signal, sys, time
from launch.local.signals import StopSignal
stop = StopSignal().install()
print("ready", flush=True)
while stop.name is None:
    time.sleep(0.01)
print(stop.reason(), flush=True)
for line in sys.stdin:
    print("still here", flush=True)
"""


@pytest.fixture
def process():
    process = subprocess.Popen(
        [sys.executable, "-c", NOTE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        cwd=ROOT,
    )  # fmt: skip
    yield process
    process.kill()
    process.communicate()


def line(process: subprocess.Popen) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def answers(process: subprocess.Popen) -> bool:
    assert process.stdin is not None
    process.stdin.write("?\n")
    process.stdin.flush()
    return line(process) == "still here"


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_a_second_changes_nothing(process, number):
    assert line(process) == "ready"
    process.send_signal(number)
    assert line(process) == f"signal {number.name}"
    for again in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(again)
        time.sleep(0.02)
    assert answers(process)
    process.send_signal(signal.SIGINT)  # a second signal, Ctrl-C: ends at once
    assert process.wait(60) == -signal.SIGINT or process.returncode == 1


def test_a_signal_that_was_held_back_is_noted(process):
    """A parent may block a signal until the rank has installed its handler."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    code = f"import os, signal\nos.kill(os.getpid(), signal.SIGUSR1)\n{NOTE}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", code], input="", capture_output=True, text=True, cwd=ROOT,
            timeout=60, check=False,
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert done.stdout.splitlines() == ["ready", "signal SIGUSR1"]
    assert done.returncode == 0


def test_a_rank_takes_signals_over_before_torch_is_imported():
    """The rank installs the handler before any slow import."""
    code = """
import signal, sys
sys.argv = ["rank", "no JSON"]
from launch.local import signals
def install(self):
    heavy = {name.partition(".")[0] for name in sys.modules} & {"torch", "numpy", "typer"}
    print("installed", sorted(heavy), flush=True)
    raise SystemExit(0)
signals.StopSignal.install = install
import runpy
runpy.run_module("launch.local.worker", run_name="__main__")
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60,
        check=False,
    )  # fmt: skip
    assert done.stdout == "installed []\n", done.stdout + done.stderr
