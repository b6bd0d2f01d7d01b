"""Run locks: one run at a time in a run folder, and one run in a checkpoint place.

Rank 0 holds a lock (flock) on `lock` in the run folder while it lives: the system releases it when
the process ends, however it ends. The file names its holder and its start, whose processes alone
write into the folder (`kimi_pretrain.reliability.start_identity`); its modification time is renewed
every BEAT_S. A run has an id of its own in `run.json`; a checkpoint place that it writes to
carries the id in `owner.json`, which is looked at again before every commit, so that two runs never
complete checkpoints in one place, on whatever machines they are. It names the run folder, too: a
copy of a folder has its id, and must not save where the first one does. Where the first folder
cannot be seen, as from another cluster, the copy gets the place; but `owner.json` also names the
start that claimed it last, and the other one ends at its next save.

Where the node of a job's former start is lost, a file server may hold its lock for long, NFS for
good. So a later start of the same SLURM job takes over a lock whose holder shows no life: its file
is SILENT_S old, and does not get newer in WATCHED_S of this process's own time, so that a clock
that jumps takes nobody's lock. Should the holder come to life again, it finds another file in the
place of its own, or on NFS that its own is gone (ESTALE), and ends within BEAT_S. It also ends
where somebody has moved or removed the folder under it, and says that.
"""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from kimi_pretrain.checkpoint.ownership import OWNER, Owner, ownership_conflict
from kimi_pretrain.reliability.exit_report import (
    NO_PROGRESS,
    USER_ERROR,
    ExitReport,
    remove_exit_reports,
    write_exit_report,
)
from kimi_pretrain.reliability.run_files import naming, read_patiently, write_whole
from kimi_pretrain.reliability.start_identity import LOCK, start_id

if TYPE_CHECKING:
    from kimi_pretrain.checkpoint.storage_read import Place

log = logging.getLogger("kimi_pretrain.reliability.run_lock")

BEAT_S = 15.0
# Without a sign of life after which a former start counts as dead: by the file server's clock, and
# for how long this process has to see that itself. And how long the end of a former start is waited
# for: not as long as other ranks wait for this one.
SILENT_S = 180.0
WATCHED_S = 3 * BEAT_S
PATIENCE_S = 90.0
# Beats in a row at which the lock's name is nobody's before that is believed.
_MISSING = 2
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
        missing = 0
        while not self._end.wait(BEAT_S):
            there = self._whose()
            missing = missing + 1 if there == "nobody's" else 0
            if there == "another's":
                told, code = (
                    f"{self._path} was taken over by a later start of this job",
                    NO_PROGRESS,
                )
            elif missing >= _MISSING:
                told, code = _told_gone(self._file, self._path)
            else:
                continue
            write_exit_report(self._path.parent, 0, ExitReport(told, code))
            print(f"error: {told}", file=sys.stderr, flush=True)
            self._leave(code)
            return

    def _whose(self) -> Literal["ours", "another's", "nobody's"]:
        """Renew the file's time; return whose file has its name now, "ours" if nobody can tell.

        A lock that is taken over is replaced. An NFS server forgets the old file then: who still
        has it open gets ESTALE, and has lost its lock with it.
        """
        try:
            os.utime(self._file.fileno())
        except OSError as error:  # ownership is asked whatever became of the sign of life
            if error.errno == errno.ESTALE:
                return "another's"
        try:
            mine, there = os.fstat(self._file.fileno()), self._path.stat()
            return "ours" if os.path.samestat(mine, there) else "another's"
        except FileNotFoundError:
            # Where the folders above are gone, too, a whole file system may be away for a while.
            return "nobody's" if self._path.parent.parent.is_dir() else "ours"
        except OSError:  # a file server that is away
            return "ours"


def _told_gone(file: IO[str], path: Path) -> tuple[str, int]:
    """Return why a lock's name is nobody's, and the exit code of that.

    The system knows the present name of an open file, on one machine at least.
    """
    run_dir, now = path.parent, Path(os.readlink(f"/proc/self/fd/{file.fileno()}"))
    if now != path and _is_at(file, now):
        went = f"was moved to {now.parent} while this run wrote to it; go on with --run-dir "
        return f"{run_dir} {went}{now.parent} --resume latest", USER_ERROR
    if run_dir.is_dir():
        told = f"{path} was removed while this run held it: a second run could start in the folder"
        return f"{told}; resume, which makes a new one", NO_PROGRESS
    told = f"{run_dir} was moved or removed while this run wrote to it"
    return f"{told}; put it back, or name its new place by --run-dir, then resume", USER_ERROR


def take(run_dir: Path, environment: Mapping[str, str] = os.environ) -> RunLock:
    """Lock a run folder.

    Where the holder is an earlier start of the same SLURM job, its end is waited for; if it shows
    no life, its lock is taken over. What earlier starts reported in the folder is removed.

    Raises:
        RunLocked: another run holds it; names host, process and since when. FormerStart: an earlier
            start of this job, which lives.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, begun = run_dir / LOCK, time.monotonic()
    job, start = environment.get("SLURM_JOB_ID"), environment.get("SLURM_RESTART_COUNT", "0")
    file, beat = path.open("a+"), (begun, _beat_of(path))
    while not (_try_lock(file) and _is_at(file, path)):
        holder, now = _read(file), time.monotonic()
        former = job is not None and holder.get("job") == job
        former = former and int(str(holder.get("start", 0))) < int(start)
        file.close()
        if not former:
            raise RunLocked(_told(run_dir, holder))
        if (newest := _beat_of(path)) != beat[1]:
            beat = (now, newest)
        silent = _silence(path) > SILENT_S
        if silent and now - beat[0] >= WATCHED_S:
            log.warning("%s; no sign of life: taken over", _told(run_dir, holder))
            file = _another(path)
            break
        if not silent and now - begun > PATIENCE_S:
            raise FormerStart(_told(run_dir, holder))
        time.sleep(0.5)
        file = path.open("a+")
    remove_exit_reports(run_dir)
    since = time.strftime("%Y-%m-%d %H:%M:%S %z")
    who = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "start": int(start)}
    with naming(path):
        os.truncate(file.fileno(), 0)
        os.write(
            file.fileno(), json.dumps({**who, "id": start_id(), "since": since}).encode() + b"\n"
        )
    return RunLock(file, path)


def _beat_of(path: Path) -> int | None:
    """Return the last sign of life of a lock's holder; says nothing of when that was."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


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
    fresh = path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
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
        file = (run_dir / LOCK).open("r")
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
        OSError: it cannot be read; names it.
    """
    file = run_dir / RUN
    if (data := read_patiently(file)) is None:
        return None
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
