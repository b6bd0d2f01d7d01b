"""Tests of the web server against clients that hold connections, on real sockets."""

import asyncio
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

pytest.importorskip("starlette", reason="the extra platform is not installed")
import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.types import Receive, Scope, Send

from launch.web import connections
from launch.web.connections import web_server
from launch.web.site import form_fields

WHOLE = b"GET /%d HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n"
HALVES = (
    b"",
    b"GET / HTTP/1.1\r\nHost: here\r\nX-Long: ",
    b"POST / HTTP/1.1\r\nHost: here\r\nContent-Type: application/x-www-form-urlencoded\r\n"
    b"Content-Length: 1000\r\n\r\ntoken=",
)


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    """Echo the path, read the form of a POST, and answer /endless without end."""
    if scope["type"] != "http":
        return
    if scope["method"] == "POST":
        await form_fields(Request(scope, receive))
    if scope["path"] == "/slow":
        await asyncio.sleep(0.6)
    answer = PlainTextResponse(scope["path"])
    if scope["path"] == "/endless":
        answer = StreamingResponse(b"x" * 65_536 for _ in iter(int, 1))
    await answer(scope, receive, send)


@contextmanager
def serving(**given) -> Iterator[tuple[int, uvicorn.Server]]:
    """Serve from a thread; yield the port and the server."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen(256)
        server = web_server(application, **given)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        try:
            yield listening.getsockname()[1], server
        finally:
            server.should_exit = True
            thread.join(60)
    assert not thread.is_alive()


def connected(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=60)


def answer(port: int, number: int) -> bytes:
    with connected(port) as client:
        client.sendall(WHOLE % number)
        return until(client, b"never")


def until(client: socket.socket, end: bytes) -> bytes:
    """Return the bytes received until `end` arrives or the connection ends."""
    found = b""
    while not found.endswith(end) and (piece := client.recv(4096)):
        found += piece
    return found


def ended(client: socket.socket) -> bool:
    """Return whether the peer closes the connection without sending anything."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("half", HALVES)
def test_half_sent_requests_do_not_close_the_server(monkeypatch, half):
    """The server drops the requests that have waited longest, however many there are."""
    monkeypatch.setattr(connections, "MOST_WAITING", 8)
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 16)
    with serving() as (port, _), ExitStack() as held:
        clients = [held.enter_context(connected(port)) for _ in range(40)]
        for client in clients:
            client.sendall(half)
        for number in range(3):
            assert answer(port, number).endswith(b"\r\n\r\n/%d" % number)
        assert ended(clients[0])


@pytest.mark.parametrize("half", HALVES)
def test_a_request_has_a_deadline(monkeypatch, half):
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    with serving() as (port, _), connected(port) as client:
        client.sendall(half)
        assert ended(client)


def test_a_byte_now_and_then_puts_the_deadline_off_no_further(monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 0.5)
    with serving() as (port, _), connected(port) as client:
        client.sendall(HALVES[1])
        client.settimeout(0.01)
        for _ in range(3_000):  # for 30 s
            try:
                client.sendall(b"x")
                assert client.recv(1) == b""
                return
            except TimeoutError:
                continue
            except ConnectionError:
                return
    pytest.fail("the connection was kept")


def test_requests_one_after_another_on_one_connection():
    """Each request has a separate deadline, and no response ends the connection."""
    with serving() as (port, _), connected(port) as client:
        for number in range(3):
            client.sendall(b"GET /%d HTTP/1.1\r\nHost: here\r\n\r\n" % number)
            assert until(client, b"/%d" % number).startswith(b"HTTP/1.1 200")
        client.sendall(b"GET /a HTTP/1.1\r\nHost: here\r\n\r\n" + WHOLE % 9)  # two requests at once
        assert until(client, b"never").count(b"\r\n\r\n/") == 2


def test_an_answer_that_takes_long_has_no_deadline(monkeypatch):
    monkeypatch.setattr(connections, "REQUEST_S", 0.2)
    with serving() as (port, _), connected(port) as client:
        client.sendall(b"GET /slow HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
        assert until(client, b"never").endswith(b"/slow")


def test_an_answer_that_nobody_reads_ends_its_connection(monkeypatch):
    monkeypatch.setattr(connections, "UNREAD_S", 0.2)
    with serving() as (port, server), connected(port) as client:
        client.sendall(b"GET /endless HTTP/1.1\r\nHost: here\r\n\r\n")
        assert client.recv(10) == b"HTTP/1.1 2"
        end = time.monotonic() + 60
        while server.server_state.connections and time.monotonic() < end:
            time.sleep(0.02)
        assert not server.server_state.connections


def test_a_handshake_has_a_deadline(monkeypatch, tmp_path):
    trustme = pytest.importorskip("trustme", reason="the extra demo is not installed")
    own = trustme.CA().issue_cert("127.0.0.1")
    own.private_key_and_cert_chain_pem.write_to_path(tmp_path / "pem")
    monkeypatch.setattr(connections, "HANDSHAKE_S", 0.2)
    with serving(certificate=tmp_path / "pem", key=tmp_path / "pem") as (port, _):
        with connected(port) as silent:
            assert ended(silent)
        context = ssl._create_unverified_context()
        with connected(port) as plain, context.wrap_socket(plain) as client:
            client.sendall(WHOLE % 1)
            assert client.recv(4096).startswith(b"HTTP/1.1 200")
