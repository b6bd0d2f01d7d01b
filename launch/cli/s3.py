"""The `kimi-pretrain s3` commands, which run an S3 server on this machine for your own use.

It is the demo's server (`launch.local.s3_server`), but it runs until it is stopped. Its folder
holds the data, `credentials.env` (for the shell, readable only by its owner) and `server.json`,
which identifies the process by id and start time, because the system may reuse an id.
"""

import fcntl
import json
import os
import select
import shlex
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launch.local.user_errors import one_line_errors

if TYPE_CHECKING:
    from launch.local.s3_server import S3Server

s3 = typer.Typer(help="An S3 server on this machine, for your own use.", no_args_is_help=True)

CREDENTIALS = "credentials.env"
STOP_S = 15.0  # between TERM and KILL
FolderOption = Annotated[Path, typer.Option(help="Where data and credentials are kept.")]
DEFAULT = Path("runs/s3")


@dataclass(frozen=True)
class Running:
    """A started server.

    Attributes:
        pid: id of its process.
        began: boot id and start time of the process; see `_began`.
        endpoint: URL of the server.
        bucket: name of the bucket created at its start.
    """

    pid: int
    began: str
    endpoint: str
    bucket: str

    @property
    def port(self) -> int:
        """Port of the endpoint."""
        return int(self.endpoint.rpartition(":")[2])


@s3.command()
def start(
    folder: FolderOption = DEFAULT,
    port: Annotated[
        int | None,
        typer.Option(
            min=1024, max=55_000, help="And the four above it, and these plus 10000; else any."
        ),
    ] = None,
    bucket: Annotated[
        str | None, typer.Option(help="Bucket to create; the one of last time, or 'kimi'.")
    ] = None,
) -> None:
    """Start a server on 127.0.0.1 that runs until it is stopped, and create a bucket.

    The first start creates keys and stores them in FOLDER/credentials.env, which only
    its owner may read. A later start on the same folder uses the same data, keys and,
    if it is free, port.

    \b
    kimi-pretrain s3 start
    source runs/s3/credentials.env
    kimi-pretrain data ingest photos/ --to s3://kimi --name photos \\
        --category caption --tokenizer kimi.tiktoken
    kimi-pretrain s3 start --folder /data/s3 --port 8333 --bucket corpus
    """
    with one_line_errors(), _held(folder):
        former = _read(folder)
        if former is not None and _began(former.pid) == former.began:
            for what, asked, has in (
                ("port", port, former.port),
                ("bucket", bucket, former.bucket),
            ):
                if asked not in (None, has):
                    raise ValueError(
                        f"--{what} {asked}: the server of {folder} is running with {what} {has}; "
                        f"stop it first: kimi-pretrain s3 stop --folder {folder}"
                    )
            _tell(folder, former, "is running already")
            return
        _tell(folder, _start(folder, former, port, bucket), "is running")


@s3.command()
def stop(folder: FolderOption = DEFAULT) -> None:
    """Stop the server of a folder, and no other process; its data and keys stay.

    \b
    kimi-pretrain s3 stop
    kimi-pretrain s3 stop --folder /data/s3
    """
    with one_line_errors():
        if not folder.is_dir():
            raise ValueError(f"{folder}: no such folder, so no server was started there")
        with _held(folder):
            former = _read(folder)
            if former is None or not _end(former):
                typer.echo(f"no server of {folder} is running")
            else:
                typer.echo(f"stopped; data and keys stay in {folder}")


def _start(folder: Path, former: Running | None, port: int | None, bucket: str | None) -> Running:
    from launch.local.s3_server import S3Server, is_free

    if port is None and former is not None and is_free(former.port):
        port = former.port
    access, secret = _keys(folder)
    name = bucket or (former.bucket if former else "kimi")
    server = S3Server(folder / "data", name, access, secret, port, lasts=True)
    try:
        server.__enter__()
    except RuntimeError as error:
        raise ValueError(str(error)) from error
    pid = server.pid
    running = Running(pid, _began(pid) or "", server.endpoint, name)
    try:
        _write(folder / CREDENTIALS, _shell_lines(server))
        _write(folder / "server.json", json.dumps(asdict(running)) + "\n")
    except BaseException:
        server.stop()
        raise
    return running


def _tell(folder: Path, server: Running, how: str) -> None:
    at = shlex.quote(str(folder))
    typer.echo(f"the S3 server of {folder} {how}: {server.endpoint}, process {server.pid}")
    typer.echo(f"in each shell that is to use it:  source {at}/{CREDENTIALS}")
    typer.echo(f"then s3://{server.bucket} is its bucket, as --to or data.root")
    typer.echo(f"to stop it:  kimi-pretrain s3 stop --folder {at}")


def _shell_lines(server: "S3Server") -> str:
    values = server.exported().items()
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values)


def _keys(folder: Path) -> tuple[str | None, str | None]:
    """Return the keys of the last start, so that they stay valid in shells that use them."""
    file = folder / CREDENTIALS
    if not file.is_file():
        return None, None
    words = (line.removeprefix("export ").partition("=") for line in file.read_text().splitlines())
    values = {name: "".join(shlex.split(value)) for name, _, value in words}
    try:
        return values["AWS_ACCESS_KEY_ID"], values["AWS_SECRET_ACCESS_KEY"]
    except KeyError as error:
        raise ValueError(f"{file}: no {error.args[0]}; remove it, and new keys are made") from None


def _read(folder: Path) -> Running | None:
    file = folder / "server.json"
    try:
        return Running(**json.loads(file.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        raise ValueError(f"{file}: not what `s3 start` wrote; end the server, remove it") from None


def _write(file: Path, text: str) -> None:
    """Write a file atomically, readable only by its owner."""
    unfinished = file.with_suffix(".partial")
    unfinished.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(unfinished, flags, 0o600), "w") as out:
        out.write(text)
    unfinished.replace(file)


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """Lock the folder against concurrent starts and stops."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    lock = os.open(folder / "lock", flags, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _began(pid: int) -> str | None:
    """Return the boot id and a process's start in clock ticks since boot (proc(5), field 22).

    Return None if there is no such process or it is a zombie.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return None if fields[0] in "ZX" else f"{boot} {fields[19]}"


def _end(server: Running) -> bool:
    """End exactly this process and wait for its end; return True if it was running."""
    try:
        handle = os.pidfd_open(server.pid)
    except ProcessLookupError:
        return False
    with closing(os.fdopen(handle, closefd=True)):
        # A pidfd never changes its process, so the process compared is the process ended.
        if _began(server.pid) != server.began:
            return False
        for number, seconds in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
            signal.pidfd_send_signal(handle, number)
            if select.select([handle], [], [], seconds)[0]:
                break
    return True
