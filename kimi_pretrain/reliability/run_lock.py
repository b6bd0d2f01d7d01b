"""Run locks: one run at a time in a run folder, and one run in a checkpoint place.

Rank 0 holds a lock (flock) on `lock` in the run folder while it lives: the system releases it when
the process ends, however it ends. The file names its holder, and its modification time is renewed
every BEAT_S. A run has an id of its own in `run.json`; a checkpoint place that it writes to
carries the id in `owner.json`, which is looked at again before every commit, so that two runs never
complete checkpoints in one place, on whatever machines they are. It names the run folder, too: a
copy of a folder has its id, and must not save where the first one does. Where the first folder
cannot be seen, as from another cluster, the copy gets the place; but `owner.json` also names the
start that claimed it last, and the other one ends at its next save.

Where the node of a job's former start is lost, a file server may hold its lock for long, NFS for
good. So a later start of the same SLURM job takes a lock over whose holder shows no life; should it
come to life again, it finds another file in the place of its own, or on NFS that its own is gone
(ESTALE), and ends within BEAT_S.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kimi_pretrain.checkpoint.ownership import OWNER, Owner, ownership_conflict
from kimi_pretrain.reliability.exit_report import NO_PROGRESS, ExitReport, write_exit_report
from kimi_pretrain.reliability.run_files import naming, write_whole

if TYPE_CHECKING:
    from kimi_pretrain.checkpoint.storage_read import Place

log = logging.getLogger("kimi_pretrain.reliability.run_lock")

BEAT_S = 15.0
# Without a sign of life after which a former start counts as dead; and how long its end is waited
# for: not as long as other ranks wait for this one.
SILENT_S = 180.0
PATIENCE_S = 90.0
# In an object store, where nothing can be created exclusively, two runs that claim a place at once
# see what the last one wrote after so long.
_SETTLE_S = 1.0
RUN = "run.json"


class RunLocked(ValueError):
    """Another run is using this folder or place; the message says which."""


class FormerStart(RunLocked):
    """An earlier start of the same job is still there; a later attempt may find it gone."""


class RunLock:
    """Holds a run folder for as long as this process lives, or until `release`.

    Where the locked file's path has come to be another's, `leave` ends this process.
    """

    def __init__(self, file: IO[str], path: Path, leave: Callable[[int], object] = os._exit):
        self._file, self._path, self._leave = file, path, leave
        self._end = threading.Event()
        self._beat = threading.Thread(target=self._show_life, name="run lock", daemon=True)
        self._beat.start()

    def release(self) -> None:
        """Release the folder."""
        self._end.set()
        self._beat.join(1.0)  # a file server that is away may hold it for ever, and the close too
        if not self._beat.is_alive():
            self._file.close()

    def _show_life(self) -> None:
        while not self._end.wait(BEAT_S):
            if self._is_lost():
                told = f"{self._path} was taken over by a later start of this job"
                with suppress(OSError):
                    write_exit_report(self._path.parent, 0, ExitReport(told, NO_PROGRESS))
                self._leave(NO_PROGRESS)
                return

    def _is_lost(self) -> bool:
        """Renew the file's time; returns whether it is no longer ours, False if nobody can tell.

        A lock that is taken over is replaced. An NFS server forgets the old file then: who still
        has it open gets ESTALE, and has lost its lock with it.
        """
        try:
            os.utime(self._file.fileno())
        except OSError as error:
            if error.errno == errno.ESTALE:
                return True
        try:
            return not _is_at(self._file, self._path)
        except OSError:  # a file server that is away
            return False


def take(run_dir: Path, environment: Mapping[str, str] = os.environ) -> RunLock:
    """Lock a run folder.

    Where the holder is an earlier start of the same SLURM job, its end is waited for; if it has
    shown no life for SILENT_S, its lock is taken over.

    Raises:
        RunLocked: another run holds it; names host, process and since when. FormerStart: an earlier
            start of this job, which lives.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, begun = run_dir / "lock", time.monotonic()
    job, start = environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "0")
    file = path.open("a+")
    while not (_try_lock(file) and _is_at(file, path)):
        holder = _read(file)
        former = job is not None and holder.get("job") == job
        former = former and int(str(holder.get("start", 0))) < int(start)
        file.close()
        if former and _silence(path) > SILENT_S:
            log.warning("%s; no sign of life: taken over", _told(run_dir, holder))
            file = _another(path)
            break
        if not former:
            raise RunLocked(_told(run_dir, holder))
        if time.monotonic() - begun > PATIENCE_S:
            raise FormerStart(_told(run_dir, holder))
        time.sleep(0.5)
        file = path.open("a+")
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    who = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "start": int(start)}
    with naming(path):
        os.truncate(file.fileno(), 0)
        os.write(file.fileno(), json.dumps({**who, "since": now}).encode() + b"\n")
    return RunLock(file, path)


def _is_at(file: IO[str], path: Path) -> bool:
    """Whether a file is still the one that has this name."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _silence(path: Path) -> float:
    """Return for how many seconds the holder of a lock has shown no life, by the server's clock."""
    with tempfile.TemporaryFile(dir=path.parent) as now, path.open() as lock:
        os.utime(now.fileno())
        return os.fstat(now.fileno()).st_mtime - os.fstat(lock.fileno()).st_mtime


def _another(path: Path) -> IO[str]:
    """Put a new file in the place of one whose lock never ends, and lock that."""
    fresh = path.with_name(f"lock.{socket.gethostname()}.{os.getpid()}")
    file = fresh.open("a+")
    _try_lock(file)
    fresh.replace(path)
    return file


def check_free(run_dir: Path) -> None:
    """Refuse a folder that a run is using, and leave it as it is.

    Raises:
        RunLocked: as for `take`.
    """
    try:
        file = (run_dir / "lock").open("r")
    except FileNotFoundError:
        return
    with file:
        if not _try_lock(file, fcntl.LOCK_SH):
            raise RunLocked(_told(run_dir, _read(file)))


def check_folder(run_dir: Path) -> Path:
    """Refuse a path that cannot be a run folder; returns it, or its nearest existing parent.

    Raises:
        ValueError: a file stands there, or on the way there.
    """
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(
            f"--run-dir {run_dir}: {there} is a file; expected a folder, or a name that is free"
        )
    return there


def run_id(run_dir: Path) -> str:
    """Return the id of the run in this folder; a new one gets it now. Call it under the lock.

    Raises:
        ValueError: as `read_run`.
        OSError: run.json cannot be written; names it.
    """
    if (values := read_run(run_dir)) is None:
        values = {"id": secrets.token_hex(8)}
        write_run(run_dir, values)
    return values["id"]


def read_run(run_dir: Path) -> dict[str, Any] | None:
    """Return what run.json says; None where there is none yet.

    Raises:
        ValueError: it holds no id; says what to do.
    """
    file = run_dir / RUN
    if not file.is_file():
        return None
    data = file.read_bytes()
    try:
        values = json.loads(data)
    except ValueError:
        values = None
    if not isinstance(values, dict) or not isinstance(values.get("id"), str):
        raise ValueError(
            f'{file} is {data[:100]!r}, expected {{"id": ...}}, the id of this run; write it '
            f'there as it stands under "run" in {OWNER} of its checkpoints, or remove {file.name} '
            "if it has none"
        )
    return values


def write_run(run_dir: Path, values: Mapping[str, Any]) -> None:
    """Write run.json. Call it under the lock."""
    write_whole(run_dir / RUN, json.dumps(values) + "\n")


def claim(place: "Place", run_dir: Path, check: Callable[[], object] = lambda: None) -> Owner:
    """Make a place belong to this start of the run, which it returns.

    Where it is not another's, `check` is called before anything is written there; it may raise.

    Raises:
        RunLocked: it belongs to another run, or cannot be written.
        CheckpointUnavailable: it does not answer.
    """
    from data_pipeline.store.open import StoreError  # brings boto3, which few need
    from kimi_pretrain.checkpoint.errors import CheckpointUnavailable, is_transient

    mine = Owner(run_id(run_dir), secrets.token_hex(8))
    try:
        if told := _claim(place, run_dir, mine, check):
            raise RunLocked(told)
        return mine
    except (OSError, StoreError) as error:
        kind = CheckpointUnavailable if is_transient(error) else RunLocked
        raise kind(f"{place.uri} cannot be written: {error}") from None


def _try_lock(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some shared file systems are mounted without locks. The run can go on, unprotected.
        log.warning("%s cannot be locked (%s): nothing stops a second run here", file.name, error)
    return True


def _read(file: IO[str]) -> dict[str, object]:
    file.seek(0)
    try:
        return json.loads(file.read())
    except ValueError:  # the holder has not written it yet
        return {}


def _told(run_dir: Path, holder: Mapping[str, object]) -> str:
    job = f", SLURM job {holder['job']}" if holder.get("job") else ""
    return (
        f"{run_dir} is in use by another run: process {holder.get('pid', 'unknown')} on "
        f"{holder.get('host', 'an unknown host')}{job}, since {holder.get('since', 'just now')}; "
        "wait for its end, or choose another --run-dir"
    )


def _claim(place: "Place", run_dir: Path, mine: Owner, check: Callable[[], object]) -> str | None:
    """Return why the place cannot be had; None: it is this start's now."""
    where = {"run_dir": str(run_dir.resolve()), "host": socket.gethostname()}
    text, wanted = place.read_text(OWNER), json.dumps({**mine._asdict(), **where}) + "\n"
    if text is None:
        check()
        _own(place, mine.run, wanted)
        text = place.read_text(OWNER) or ""  # another run may have come at the same time
    told = ownership_conflict(place.uri, text, mine.run) or _told_copy(
        place, json.loads(text), run_dir
    )
    if told is None and text != wanted:
        check()
        place.write_text(OWNER, wanted)
    return told


def _told_copy(place: "Place", owner: Mapping[str, Any], run_dir: Path) -> str | None:
    """Return why a place of this run is not this folder's; None: it is, or the folder was moved.

    A copy of a run folder has the run's id. What was copied along inside of it is its own. A first
    folder that is not seen from here counts as moved.
    """
    here, noted = run_dir.resolve(), owner.get("run_dir")
    if noted in (None, str(here)):
        return None
    inside = place.folder is not None and place.folder.resolve().is_relative_to(here)
    if not inside and _is_run(Path(noted), owner["run"]) and not os.path.samefile(noted, here):
        return (
            f"{place.uri} holds the checkpoints of {noted}, of which {run_dir} is a copy; give the "
            "copy a checkpoint.place of its own, and say what it goes on from (--resume and one of "
            f"these checkpoints); or, where {noted} will never go on, remove run.json there"
        )
    return None


def _is_run(folder: Path, name: str) -> bool:
    """Whether a folder is that of a run, as far as can be seen from here."""
    try:
        values = read_run(folder)
    except (OSError, ValueError):
        return False
    return values is not None and values["id"] == name


def _own(place: "Place", mine: str, text: str) -> None:
    """Write who owns a place that nobody owns, unless another run is faster."""
    if place.folder is None:
        place.write_text(OWNER, text)
        time.sleep(_SETTLE_S)
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    partial = place.folder / f".{OWNER}.{mine}"
    partial.write_text(text)
    try:
        os.link(partial, place.folder / OWNER)  # whole, and only if there is none
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        place.write_text(OWNER, text)
    finally:
        partial.unlink()
