"""Tests of `kimi-pretrain train`'s checks before it starts ranks, mainly of the rendezvous."""

import socket
import threading
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from launch.cli.main import app
from launch.local import start
from launch.local.start import check_rendezvous
from launch.local.user_errors import exit_code, user_message


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Yield a socket that listens and never answers."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield taken


def test_machines_meet_where_nobody_is_or_a_store():
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    check_rendezvous(f"127.0.0.1:{store.port}")
    store.set("after", "the ping")
    assert store.get("after") == b"the ping"
    with socket.socket() as held:  # bound but not listening, so connections are refused
        held.bind(("127.0.0.1", 0))
        check_rendezvous(f"127.0.0.1:{held.getsockname()[1]}")


def test_a_rendezvous_that_another_program_has_is_refused(listener, monkeypatch):
    """torchrun would wait for the rendezvous forever."""
    monkeypatch.setattr(start, "PING_SECONDS", 0.3)
    place = f"127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ValueError, match=f"--rendezvous {place}: another program listens there"):
        check_rendezvous(place)


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n"])
def test_so_is_one_that_answers_something_else(listener, answer, monkeypatch):
    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(answer)

    monkeypatch.setattr(start, "PING_SECONDS", 60.0)
    thread = threading.Thread(target=serve)
    thread.start()
    with pytest.raises(ValueError, match="no torchrun; choose another port"):
        check_rendezvous(f"127.0.0.1:{listener.getsockname()[1]}")
    thread.join()


@pytest.mark.parametrize("place", ["127.0.0.1", ":29500", "host:port"])
def test_a_rendezvous_without_a_port_is_refused(place):
    with pytest.raises(ValueError, match=f"--rendezvous {place}: expected HOST:PORT"):
        check_rendezvous(place)


def test_a_master_port_that_is_taken_is_told_and_worth_another_start(listener, monkeypatch):
    port = listener.getsockname()[1]
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(RuntimeError) as caught:
        dist.TCPStore("127.0.0.1", port, is_master=True, timeout=timedelta(seconds=5))
    message = user_message(caught.value)
    assert message is not None
    assert message.startswith(f"MASTER_PORT={port}: another program listens there on ")
    assert exit_code(caught.value) == 75


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_run_dir_that_is_a_file_is_named(below, tmp_path):
    (tmp_path / "file").write_text("mine")
    run_dir = tmp_path / "file" / below
    given = ["train", "--config", "tiny_cpu", "--run-dir", str(run_dir)]
    done = CliRunner().invoke(app, given)
    assert done.exit_code == 2
    assert done.stderr == (
        f"error: --run-dir {run_dir}: {tmp_path}/file is a file; expected a folder, or a name that "
        "is free\n"
    )
    assert (tmp_path / "file").read_text() == "mine"
