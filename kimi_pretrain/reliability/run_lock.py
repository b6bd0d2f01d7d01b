"""Run locks: allow one run at a time per run folder, and one run per checkpoint location.

Rank 0 holds an flock on `lock` in the run folder while it lives; the system releases it however the
process ends. The file names its holder and the start of the holder; only processes of that start
write into the folder (`kimi_pretrain.reliability.start_identity`). The holder renews the file's
modification time every BEAT_S.

Each run has an id in `run.json`. The checkpoint location that it writes to stores the id in
`owner.json`, which is read again before every commit, so that two runs never complete checkpoints
in one location, whatever machines they run on. `owner.json` also names the run folder: a copy of a
run folder has the same id, but must not save where the original does. If the original folder is not
visible, as from another cluster, the copy gets the location. `owner.json` also names the last start
that claimed the location, so the original run ends at its next save.

If the node of an earlier start is lost, a file server may hold its lock for a long time, NFS
forever. So a later start of the same SLURM job takes over a lock whose holder seems dead: its file
is SILENT_S old and does not get newer during WATCHED_S of this process's own time, so that a clock
jump cannot cost a live run its lock. If the holder wakes up, it finds a different file at its path,
or on NFS that its own file is gone (ESTALE), and ends within BEAT_S. It also ends, with a message,
if the folder was moved or removed while it ran.
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
# An earlier start counts as dead after SILENT_S without a sign of life by the file server's clock,
# confirmed by WATCHED_S of observation by this process. PATIENCE_S bounds the wait for an earlier
# start to end; it is shorter than other ranks wait for this rank.
SILENT_S = 180.0
WATCHED_S = 3 * BEAT_S
PATIENCE_S = 90.0
# Consecutive beats at which the lock file must be missing before the process acts on it.
_MISSING = 2
# An object store has no exclusive create. If two runs claim a location at once, both see the last
# write after this time.
_SETTLE_S = 1.0
RUN = "run.json"


class RunLocked(ValueError):
    """Another run uses this folder or location; the message names it."""


class FormerStart(RunLocked):
    """An earlier start of the same job still runs; a later attempt may succeed."""


class RunLock:
    """Holds a run folder while this process lives, or until `release`.

    If another file appears at the lock's path, `leave` ends this process.
    """

    def __init__(self, file: IO[str], path: Path, leave: Callable[[int], object] = os._exit):
        self._file, self._path, self._leave = file, path, leave
        self._end = threading.Event()
        self._beat = threading.Thread(target=self._show_life, name="run lock", daemon=True)
        self._beat.start()

    def release(self) -> None:
        """Release the folder."""
        self._end.set()
        self._beat.join(1.0)  # an unavailable file server may block it forever, and the close too
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
        """Renew the file's time and return the owner of its path; "ours" if that is unknown.

        A takeover replaces the lock file. An NFS server then forgets the old file: a process that
        still has it open gets ESTALE and has lost its lock.
        """
        try:
            os.utime(self._file.fileno())
        except OSError as error:  # ownership is checked even if the time cannot be renewed
            if error.errno == errno.ESTALE:
                return "another's"
        try:
            mine, there = os.fstat(self._file.fileno()), self._path.stat()
            return "ours" if os.path.samestat(mine, there) else "another's"
        except FileNotFoundError:
            # If the folders above are missing, too, the file system may be unavailable for a while.
            return "nobody's" if self._path.parent.parent.is_dir() else "ours"
        except OSError:  # the file server is unavailable
            return "ours"


def _told_gone(file: IO[str], path: Path) -> tuple[str, int]:
    """Return the reason why a lock file is missing at its path, and the exit code.

    /proc gives the current name of an open file, at least for changes made on this machine.
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

    If the holder is an earlier start of the same SLURM job, wait for it to end; if it shows no sign
    of life, take over its lock. Reports of earlier starts in the folder are removed.

    Raises:
        RunLocked: another run holds the lock; names host, process and start time.
        FormerStart: an earlier start of this job is still alive.
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
    """Return the time of the holder's last sign of life, for comparison only."""
    with suppress(FileNotFoundError):
        return path.stat().st_mtime_ns
    return None


def _is_at(file: IO[str], path: Path) -> bool:
    """Return True if an open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _silence(path: Path) -> float:
    """Return the seconds since the holder's last sign of life, by the file server's clock."""
    with tempfile.TemporaryFile(dir=path.parent) as now, path.open() as lock:
        os.utime(now.fileno())
        return os.fstat(now.fileno()).st_mtime - os.fstat(lock.fileno()).st_mtime


def _another(path: Path) -> IO[str]:
    """Replace a lock file whose lock is never released by a new locked file."""
    fresh = path.with_name(f"{LOCK}.{socket.gethostname()}.{os.getpid()}")
    file = fresh.open("a+")
    _try_lock(file)
    fresh.replace(path)
    return file


def check_free(run_dir: Path) -> None:
    """Refuse a folder that a run is using; change nothing.

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
    """Refuse a path that cannot be a run folder; return it, or its nearest existing parent.

    Raises:
        ValueError: the path or one of its parents is a file.
    """
    there = next(path for path in (run_dir, *run_dir.parents) if path.exists())
    if not there.is_dir():
        raise ValueError(
            f"--run-dir {run_dir}: {there} is a file; expected a folder, or a name that is free"
        )
    return there


def run_id(run_dir: Path) -> str:
    """Return the id of the run in this folder; create it for a new run. Call this under the lock.

    Raises:
        ValueError: as `read_run`.
        OSError: run.json cannot be written; names it.
    """
    if (values := read_run(run_dir)) is None:
        values = {"id": secrets.token_hex(8)}
        write_run(run_dir, values)
    return values["id"]


def read_run(run_dir: Path) -> dict[str, Any] | None:
    """Return the content of run.json, or None if there is no file.

    Raises:
        ValueError: the file holds no id; states the remedy.
        OSError: the file cannot be read; names it.
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
    """Write run.json. Call this under the lock."""
    write_whole(run_dir / RUN, json.dumps(values) + "\n")


def claim(place: "Place", run_dir: Path, check: Callable[[], object] = lambda: None) -> Owner:
    """Claim a checkpoint location for this start of the run and return the owner record.

    If no other run owns it, `check` is called before anything is written; `check` may raise.

    Raises:
        RunLocked: the location belongs to another run or cannot be written.
        CheckpointUnavailable: the location does not answer.
    """
    from data_pipeline.store.open import StoreError  # imports boto3, which few runs need
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
        # Some shared file systems are mounted without locks; the run continues unprotected.
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
    """Claim the location; return the reason why that failed, or None on success."""
    where = {"run_dir": str(run_dir.resolve()), "host": socket.gethostname()}
    text, wanted = place.read_text(OWNER), json.dumps({**mine._asdict(), **where}) + "\n"
    if text is None:
        check()
        _own(place, mine.run, wanted)
        text = place.read_text(OWNER) or ""  # another run may have claimed it at the same time
    told = ownership_conflict(place.uri, text, mine.run) or _told_copy(
        place, json.loads(text), run_dir
    )
    if told is None and text != wanted:
        check()
        place.write_text(OWNER, wanted)
    return told


def _told_copy(place: "Place", owner: Mapping[str, Any], run_dir: Path) -> str | None:
    """Return the reason why this run folder does not own the location, or None if it does.

    A copy of a run folder has the run's id. Checkpoints inside the copied folder belong to the
    copy. If the original folder is not visible from here, the folder counts as moved.
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
    """Return True if the folder is visible from here and belongs to the run with this id."""
    try:
        values = read_run(folder)
    except (OSError, ValueError):
        return False
    return values is not None and values["id"] == name


def _own(place: "Place", mine: str, text: str) -> None:
    """Write the owner of an unowned location, unless another run is faster."""
    if place.folder is None:
        place.write_text(OWNER, text)
        time.sleep(_SETTLE_S)
        return
    place.folder.mkdir(parents=True, exist_ok=True)
    partial = place.folder / f".{OWNER}.{mine}"
    partial.write_text(text)
    try:
        os.link(partial, place.folder / OWNER)  # atomic, and only if there is no file yet
    except FileExistsError:
        pass
    except OSError:  # the file system has no hard links
        place.write_text(OWNER, text)
    finally:
        partial.unlink()
