"""`kimi-pretrain s3 start|stop` with the real server."""

import json
import os
import shlex
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from data_pipeline.store.open import open_store
from launch.cli.main import app
from tests import ROOT

runner = CliRunner()


def s3(*arguments: object, code: int = 0) -> str:
    result = runner.invoke(app, ["s3", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def sourced(folder: Path) -> dict[str, str]:
    """Return the variables of a shell that sources the credentials."""
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_ENDPOINT_URL")
    script = f"set -eu; . {shlex.quote(str(folder))}/credentials.env; printenv {' '.join(names)}"
    found = subprocess.run(["/bin/sh", "-c", script], env={"PATH": os.environ["PATH"]},
                           capture_output=True, text=True, check=True)  # fmt: skip
    return dict(zip(names, found.stdout.splitlines(), strict=True))


def test_a_server_of_ones_own(tmp_path, monkeypatch):
    folder = tmp_path / "my s3"
    command = [sys.executable, "-m", "launch.cli", "s3", "start", "--folder", str(folder)]
    first = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    try:
        _check(folder, first.stdout + first.stderr, monkeypatch)
    finally:
        s3("stop", "--folder", folder)


def _check(folder: Path, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The command has ended, but its server continues.
    found = sourced(folder)
    assert stat.S_IMODE((folder / "credentials.env").stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "data").stat().st_mode) == 0o700
    assert found["AWS_ENDPOINT_URL"] in told
    assert "credentials.env" in told
    assert found["AWS_SECRET_ACCESS_KEY"] not in told
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    open_store("s3://kimi/x").put("key", b"kept")
    again = s3("start", "--folder", folder)
    assert "is running already" in again
    assert found["AWS_SECRET_ACCESS_KEY"] not in again
    refused = s3("start", "--folder", folder, "--bucket", "other", code=2)
    assert "is running with bucket kimi" in refused

    # The pid of the server now belongs to another process, which must survive.
    file = folder / "server.json"
    running = json.loads(file.read_text())
    with subprocess.Popen(["sleep", "600"]) as other:
        file.write_text(json.dumps(running | {"pid": other.pid}))
        assert "no server" in s3("stop", "--folder", folder)
        assert other.poll() is None
        other.kill()
    file.write_text(json.dumps(running))

    assert "stopped" in s3("stop", "--folder", folder)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(running["endpoint"].rpartition(":")[2])))
    assert "no server" in s3("stop", "--folder", folder)
    s3("start", "--folder", folder)
    assert sourced(folder) == found  # the same keys, and the same port, which was free again
    assert open_store("s3://kimi/x").get("key") == b"kept"


def test_where_nothing_was_started(tmp_path):
    assert "no such folder" in s3("stop", "--folder", tmp_path / "none", code=2)
    assert not (tmp_path / "none").exists()
