"""One run at a time in a run folder, and one run in a checkpoint place.

Rank 0 holds a lock (flock) on `lock` in the run folder as long as it lives: the system takes it
back when the process ends, however it ends. Inside stands who holds it, and its time of change is
renewed every BEAT_S. A run has an id of its own in `run.json`; a checkpoint place that it writes to
carries the id in `owner.json`, which is looked at again before every commit, so that two runs never
complete checkpoints in one place, on whatever machines they are.

Where the node of a job's former start is lost, a file server may hold its lock for long, NFS for
good. So a start of the same SLURM job takes a lock over whose holder shows no life.
"""

import fcntl
import json
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kimi_pretrain.checkpoint.place import Place

log = logging.getLogger("kimi_pretrain.run_lock")

BEAT_S = 15.0
# Without a sign of life after which a former start counts as dead: file systems show a change a
# minute late. And how long its end is waited for as long as it shows some.
SILENT_S = 180.0
ALIVE_S = 300.0
# In an object store, where nothing can be created exclusively, two runs that claim a place at once
# see what the last one wrote after so long.
_SETTLE_S = 1.0
OWNER = "owner.json"
METRICS = "metrics.jsonl"


class RunLocked(ValueError):
    """Another run is using this folder or place; the message says which."""


class RunLock:
    """Holds a run folder for as long as this process lives, or until `release`."""

    def __init__(self, file: IO[str]):
        self._file, self._end = file, threading.Event()
        self._beat = threading.Thread(target=self._show_life, name="run lock", daemon=True)
        self._beat.start()

    def release(self) -> None:
        """Give the folder free."""
        self._end.set()
        self._beat.join()
        self._file.close()

    def _show_life(self) -> None:
        while not self._end.wait(BEAT_S):
            with suppress(OSError):  # a file server that is away
                os.utime(self._file.fileno())


class _Silence:
    """How long the holder of a lock has shown no life, by this machine's own clock."""

    def __init__(self, path: Path):
        self._path, self._beat, self._since = path, None, time.monotonic()

    def seconds(self) -> float:
        """Look, and return the seconds since the last change."""
        beat = self._path.stat().st_mtime_ns
        if beat != self._beat:
            self._beat, self._since = beat, time.monotonic()
        return time.monotonic() - self._since


def take(run_dir: Path, environment: Mapping[str, str] = os.environ) -> RunLock:
    """Lock a run folder.

    Where the holder is an earlier start of the same SLURM job, its end is waited for; if it shows
    no life for SILENT_S, its lock is taken over.

    Raises:
        RunLocked: another run holds it; names host, process and since when.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    path, job = run_dir / "lock", environment.get("SLURM_JOB_ID")
    file, begun, silence = path.open("a+"), time.monotonic(), _Silence(path)
    while not _try_lock(file):
        holder = _read(file)
        own = job is not None and holder.get("job") == job
        if own and silence.seconds() > SILENT_S:
            log.warning("%s; no sign of life: taken over", _told(run_dir, holder))
            file.close()
            file = _another(path)
            break
        if not own or time.monotonic() - begun > ALIVE_S:
            file.close()
            raise RunLocked(_told(run_dir, holder))
        time.sleep(0.5)
    now = time.strftime("%Y-%m-%d %H:%M:%S %z")
    holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": job, "since": now}
    file.truncate(0)
    file.write(json.dumps(holder) + "\n")
    file.flush()
    return RunLock(file)


def _another(path: Path) -> IO[str]:
    """Put a new file in the place of one whose lock never ends, and lock that."""
    fresh = path.with_suffix(".new")
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


def check_fresh(run_dir: Path) -> None:
    """Refuse to begin from scratch in the folder of an earlier run: it would mix the two.

    Raises:
        ValueError: says what can be done.
    """
    if any(run_dir.glob("checkpoints/step_*/manifest.json")) or (run_dir / METRICS).is_file():
        raise ValueError(
            f"{run_dir} holds an earlier run; go on with --resume latest, or choose another "
            "--run-dir"
        )


def run_id(run_dir: Path) -> str:
    """Return the id of the run in this folder; a new one gets it now. Call it under the lock."""
    file = run_dir / "run.json"
    if file.is_file():
        return json.loads(file.read_text())["id"]
    name = secrets.token_hex(8)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps({"id": name}) + "\n")
    partial.replace(file)
    return name


def claim(place: "Place", run_dir: Path) -> None:
    """Make a place belong to this run.

    Raises:
        RunLocked: it belongs to another run, or cannot be written.
        CheckpointUnavailable: it does not answer.
    """
    from data_pipeline.store.open import StoreError  # brings boto3, which few need
    from kimi_pretrain.checkpoint.errors import CheckpointUnavailable, passing

    try:
        if told := _claim(place, run_dir):
            raise RunLocked(told)
    except (OSError, StoreError) as error:
        kind = CheckpointUnavailable if passing(error) else RunLocked
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


def _claim(place: "Place", run_dir: Path) -> str | None:
    """Return why the place cannot be had; None: it is this run's now."""
    mine = run_id(run_dir)
    text = place.read_text(OWNER)
    if text is None:
        owner = {"run": mine, "run_dir": str(run_dir.resolve()), "host": socket.gethostname()}
        _own(place, mine, json.dumps(owner) + "\n")
        text = place.read_text(OWNER) or ""  # another run may have come at the same time
    return told_owner(place.uri, text, mine)


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


def told_owner(uri: str, text: str, mine: str) -> str | None:
    """Return why a place is not this run's, by the text of its owner.json; None: it is."""
    try:
        owner: Mapping[str, Any] = json.loads(text)
        if owner["run"] == mine:
            return None
    except (ValueError, KeyError, TypeError):
        return f"{uri}/{OWNER} is {text[:100]!r}, expected the id of a run; remove the file"
    return (
        f"{uri} holds the checkpoints of another run ({owner['run']}, run folder "
        f"{owner.get('run_dir', 'unknown')} on {owner.get('host', 'an unknown host')}); choose "
        f"another checkpoint.place, or remove {OWNER} there if that run will never go on"
    )
