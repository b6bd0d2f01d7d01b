"""Temporary PostgreSQL server on the loopback for tests, run by an unprivileged user.

`postgres` refuses to run as root. Under root it runs as the user postgres (from Debian's package)
or nobody.
"""

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER, PASSWORD = "owner", "not a secret: of a server on the loopback"
MISSING = (
    "PostgreSQL is not installed (apt-get install postgresql): its half of the suite is left out"
)


def binaries() -> Path | None:
    """Return the folder of the newest `initdb` and `postgres`; None if they are not installed."""
    found = [*Path("/usr/lib/postgresql").glob("*/bin/initdb")]
    if found:
        return max(found, key=lambda file: float(file.parts[-3])).parent
    there = shutil.which("initdb")
    return None if there is None else Path(there).resolve().parent


@contextmanager
def server() -> Iterator[str]:
    """Run a server and yield the URL of its database. PGPASSWORD holds the password meanwhile."""
    tools = binaries()
    assert tools is not None
    as_user = _ordinary_user()
    folder = Path(tempfile.mkdtemp(prefix="postgres-"))
    before = os.environ.get("PGPASSWORD")
    os.environ["PGPASSWORD"] = PASSWORD
    process = None
    try:
        (folder / "password").write_text(PASSWORD)
        if as_user:
            for place in (folder, folder / "password"):
                os.chown(place, as_user["user"], as_user["group"])
        data, words = folder / "data", ["-U", OWNER, "-A", "scram-sha-256", "--no-sync"]
        words += ["-E", "UTF8", "--locale=C", f"--pwfile={folder}/password", "-D", str(data)]
        made = subprocess.run(
            [tools / "initdb", *words], capture_output=True, text=True, cwd=folder, **as_user
        )
        assert made.returncode == 0, made.stderr
        port = _free_port()
        settings = {"port": port, "listen_addresses": "127.0.0.1", "unix_socket_directories": ""}
        settings |= {"fsync": "off", "shared_buffers": "16MB", "logging_collector": "off"}
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [tools / "postgres", "-D", data, *options],
                stdout=log, stderr=log, cwd=folder, **as_user,
            )  # fmt: skip
        _await(process, port, folder / "log")
        yield f"postgresql://{OWNER}@127.0.0.1:{port}/postgres"
    finally:
        if process is not None:
            process.send_signal(signal.SIGQUIT)  # immediate shutdown; no data is kept
            process.wait(30)
        shutil.rmtree(folder)
        os.environ.pop("PGPASSWORD")
        if before is not None:
            os.environ["PGPASSWORD"] = before


def _ordinary_user() -> dict:
    if os.geteuid() != 0:
        return {}
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            found = pwd.getpwnam(name)
            return {"user": found.pw_uid, "group": found.pw_gid, "extra_groups": []}
    raise AssertionError("no ordinary user")


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def _await(process: subprocess.Popen, port: int, log: Path) -> None:
    import psycopg

    end = time.monotonic() + 60
    while True:
        assert process.poll() is None, log.read_text()
        try:
            psycopg.connect(host="127.0.0.1", port=port, user=OWNER, dbname="postgres").close()
            return
        except psycopg.OperationalError:
            assert time.monotonic() < end, log.read_text()
            time.sleep(0.05)
