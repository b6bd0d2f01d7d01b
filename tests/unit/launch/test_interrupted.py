"""Tests of Ctrl-C and SIGTERM while a command waits for a store that does not answer."""

import os
import signal
import subprocess
import sys

import pytest

from tests import ROOT
from tests.silent import KEYS, SilentServer, refusing

# A command that reads two objects in threads; unwinding waits for such threads.
READS = """
import sys, threading, time
from launch.cli.main import app, main
from data_pipeline.store.open import Span, get_many, open_store
from data_pipeline.store.retry import longest_silence

def tell():
    while longest_silence()[1] < 0.3:
        time.sleep(0.01)
    print("reads", flush=True)

@app.command()
def read():
    store = open_store("s3://bucket", patience=3600)
    threading.Thread(target=tell, daemon=True).start()
    get_many(store, [Span("a", 0, 1), Span("b", 0, 1)])

sys.argv[1:] = ["read"]
main()
"""


@pytest.mark.parametrize("server", ["silent", "refusing"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_command_ends_although_its_threads_wait_for_a_store(number, server):
    with SilentServer() as silent:
        endpoint = silent.endpoint if server == "silent" else refusing()
        environment = {**os.environ, **KEYS, "AWS_ENDPOINT_URL": endpoint, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-c", READS], env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "reads\n"
            process.send_signal(number)
            _, told = process.communicate(timeout=90)  # the store's timeout is 3,600 s
        finally:
            process.kill()
            process.communicate()
    if number == signal.SIGTERM:
        assert process.returncode == -signal.SIGTERM
        return
    assert process.returncode == 128 + signal.SIGINT, told
    assert "Traceback" not in told
