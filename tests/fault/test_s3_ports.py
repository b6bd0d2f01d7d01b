"""The other ports of the S3 server, as seen by another local user and by a web page."""

import json
import os
import socket
import ssl
import stat
from pathlib import Path

import pytest

from data_pipeline.store.open import open_store
from launch.local.s3_server import S3Server


def listening(pid: int) -> tuple[list[tuple[str, int]], list[str]]:
    """Return the TCP addresses and Unix sockets on which a process listens, read from /proc."""
    links = (os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir())
    own = {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}
    places: list[tuple[str, int]] = []
    for name, family in (("tcp", socket.AF_INET), ("tcp6", socket.AF_INET6)):
        for words in map(str.split, Path(f"/proc/net/{name}").read_text().splitlines()[1:]):
            if words[3] == "0A" and words[9] in own:
                host, port = words[1].split(":")
                packed = b"".join(
                    bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)
                )
                places.append((socket.inet_ntop(family, packed), int(port, 16)))
    lines = map(str.split, Path("/proc/net/unix").read_text().splitlines()[1:])
    return sorted(places), [one[7] for one in lines if one[6] in own and len(one) > 7]


_REST = b" HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
ASKED = (
    b"GET / HTTP/1.1\r\nHost: evil.example\r\nConnection: close\r\n\r\n",  # DNS rebinding
    b"GET /buckets/fault-tests/ports/key" + _REST,
    b"GET /dir/assign" + _REST,
    b"DELETE /buckets/fault-tests/ports/key" + _REST,
    b"DELETE /fault-tests/ports/key" + _REST,
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",  # gRPC, which answers with its settings
)


def _answer(place: tuple[str, int], asked: bytes, secured: bool) -> str:
    """Return a port's answer: the status, the first bytes, or the error."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with socket.create_connection(place, timeout=10) as plain:
            out = context.wrap_socket(plain) if secured else plain
            out.sendall(asked)
            found = out.recv(64)
            return found.split()[1].decode() if found.startswith(b"HTTP/1") else repr(found)
    except ssl.SSLError as error:
        return str(error.reason)
    except OSError as error:
        return type(error).__name__


def _as_nobody(places: list[tuple[str, int]], sockets: list[str]) -> dict:
    """Return what another local user gets: the answers, and the Unix sockets that open."""
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:
        found: dict = {"failed": True}
        try:
            os.setgroups([])
            os.setgid(65534)
            os.setuid(65534)
            found = {
                "plain": [[port, asked.decode(), _answer((host, port), asked, False)]
                          for host, port in places for asked in ASKED],
                "secured": [[port, asked.decode(), _answer((host, port), asked, True)]
                            for host, port in places for asked in ASKED],
                "sockets": [path for path in sockets if os.access(path, os.W_OK)],
            }  # fmt: skip
        finally:
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        found = json.loads(pipe.read())
    os.waitpid(child, 0)
    return found


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can ask as another user")
def test_another_user_gets_nothing_from_any_port(s3_environment):
    """Every port except the S3 port requires a certificate; the S3 port requires a signature."""
    kept = open_store(f"s3://{s3_environment.bucket}/ports")
    kept.put("key", b"kept")
    shell = s3_environment.pid
    [pid, *_] = Path(f"/proc/{shell}/task/{shell}/children").read_text().split()
    places, sockets = listening(int(pid))
    assert {host for host, _ in places} == {"127.0.0.1"}
    assert min(len(places), len(sockets)) > 4
    found = _as_nobody(places, sockets)
    assert found["sockets"] == []
    own = int(s3_environment.endpoint.rpartition(":")[2])
    for port, asked, answer in found["plain"]:
        refusals = ("400", "b''", "ConnectionResetError")
        if port == own:
            refusals = ("404",) if asked.startswith("PRI") else ("403",)
        assert answer in refusals, (port, asked, answer)
    for port, asked, answer in found["secured"]:
        refusal = "WRONG_VERSION_NUMBER" if port == own else "TLSV13_ALERT_CERTIFICATE_REQUIRED"
        assert answer == refusal, (port, asked, answer)
    assert kept.get("key") == b"kept"


def test_a_servers_files_are_its_owners_alone(s3_server):
    folder = s3_server.data_dir
    modes = {name: stat.S_IMODE((folder / name).stat().st_mode)
             for name in ("tls", "tls/server.pem", "filerldb2")}  # fmt: skip
    assert modes == {"tls": 0o700, "tls/server.pem": 0o600, "filerldb2": 0o700}


def test_a_server_with_ports_that_want_no_certificate_is_refused(tmp_path, monkeypatch):
    """SeaweedFS only warns about an unusable certificate and serves without it."""
    monkeypatch.setattr("launch.local.s3_server._mutual_tls", lambda folder: {})
    with pytest.raises(RuntimeError, match="answers a client without a certificate"):
        S3Server(tmp_path, "bucket").__enter__()
