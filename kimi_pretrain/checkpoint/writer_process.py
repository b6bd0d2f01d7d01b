"""Writer process that writes the checkpoints of one rank.

    python -m kimi_pretrain.checkpoint.writer_process PARENT PLACE PATIENCE

It inherits descriptors of memory that the rank fills (`staging`), receives jobs as lines of JSON on
stdin, and sends replies to stdout in the same format. Training therefore continues while files are
hashed and written, and no bytes are copied between the two processes. The process does not import
torch, so it starts quickly and needs little memory.

    {"do": "tidy", "id", "owner"}    starts a clean-up, which runs concurrently with other jobs
    {"do": "protect", "id", "step"}  excludes a step from the clean-up; implied by jobs with a step
    {"do": "write", "id", "step", "files": [{"name", "fd", "bytes"}]}
    {"do": "commit", "id", "step", "manifest", "files", "owner"}
    {"do": "retire", "id", "step", "keep_last", "keep_every"}
    {"do": "remove_torn", "id", "step"}

    {"id", "bytes": written since the last reply}
    {"id", "warning": text}
    {"id", "tidied": true}
    {"id", "done": value}
    {"id", "failed": one line, "transient": see `SaveProgress`}
"""

import ctypes
import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from kimi_pretrain.checkpoint.disk_write import StagedFile
from kimi_pretrain.checkpoint.errors import CheckpointError, is_transient, storage_errors
from kimi_pretrain.checkpoint.ownership import OWNER, Owner, ownership_conflict
from kimi_pretrain.checkpoint.retention import steps_to_keep
from kimi_pretrain.checkpoint.storage_read import Place, open_place
from kimi_pretrain.checkpoint.storage_write import (
    ProtectedSteps,
    StorageWriter,
    abandon_later_checkpoints,
    open_storage_writer,
)

_FILES = 2  # concurrent files: while one waits for the disk, the other is hashed
_NICE = 10  # training has priority
_PR_SET_PDEATHSIG = 1


class WriterProcess:
    """Worker that runs one job after the other, and the clean-up in a separate thread.

    Args:
        place: location of the checkpoints.
        reply: sends replies to the rank; called from several threads.
    """

    def __init__(self, place: Place, reply: "Replies"):
        self._place, self._reply = place, reply
        self._storage: StorageWriter = open_storage_writer(place)
        self._sources: dict[int, StagedFile] = {}
        self._steps = ProtectedSteps()

    def do(self, job: dict[str, Any]) -> Any:
        """Run one job and return its result."""
        if job["do"] == "tidy":
            return threading.Thread(target=self._tidy, args=(job["owner"],), daemon=True).start()
        self._steps.protect(job["step"])
        if job["do"] == "write":
            return self._write(job)
        if job["do"] == "commit":
            check_owner(self._place, job["owner"])
            return self._storage.commit(job["step"], job["manifest"], job["files"])
        if job["do"] == "retire":
            return self._try("removing old ones", lambda: self._retire(job))
        if job["do"] == "remove_torn":
            return self._storage.remove_torn(job["step"])
        assert job["do"] == "protect", job["do"]
        return None

    def _write(self, job: dict[str, Any]) -> dict[str, Any]:
        step = job["step"]
        self._storage.open_step(step)

        def write(file: dict[str, Any]) -> dict[str, Any]:
            source = self._source(file["fd"], file["bytes"])
            return asdict(self._storage.write(step, file["name"], source, self._reply.wrote))

        with ThreadPoolExecutor(_FILES) as pool:
            found = list(pool.map(write, job["files"]))
        names = (file["name"] for file in job["files"])
        return dict(zip(names, found, strict=True))

    def _source(self, fd: int, size: int) -> StagedFile:
        if fd not in self._sources:
            self._sources[fd] = StagedFile(fd, size)
        return self._sources[fd]

    def _retire(self, job: dict[str, Any]) -> None:
        """Remove checkpoints that need not be kept, and mark those of later steps as abandoned."""
        step = job["step"]
        for warning in abandon_later_checkpoints(self._place, self._storage, step):
            self._reply.send(warning=warning)
        now = [found for found in self._place.steps() if found <= step]
        stay = steps_to_keep(now, job["keep_last"], job["keep_every"], good=step)
        for old in (found for found in now if found not in stay):
            self._steps.protect(old)
            self._storage.remove(old)

    def _tidy(self, owner: Sequence[str] | None) -> None:
        def tidy() -> None:
            check_owner(self._place, owner)  # incomplete files may be another run's current save
            self._storage.tidy(self._steps)

        with suppress(BrokenPipeError):  # the rank has ended, or has closed this process
            self._try("tidying up", tidy)
            self._reply.send(tidied=True)

    def _try(self, what: str, action: Any) -> None:
        """Run an action that no save depends on; an error becomes a warning."""
        try:
            action()
        except Exception as error:
            self._reply.send(warning=f"{self._place.uri}: {what} failed: {_one_line(error)}")


def check_owner(place: Place, owner: Sequence[str] | None) -> None:
    """Refuse a location that belongs to another run, or to another start of this run.

    Two runs may have claimed it at once, for example if a run's folder was copied to another
    cluster. A location without owner.json passes, because the file may have been removed on
    purpose; `owner` None also passes.

    Raises:
        CheckpointError: the location has another owner, whom the message names
            (CheckpointUnavailable if the location does not respond).
    """
    if owner is None:
        return
    with storage_errors(f"{place.uri}/{OWNER}"):
        text = place.read_text(OWNER)
    if text is not None and (told := ownership_conflict(place.uri, text, *Owner(*owner))):
        raise CheckpointError(told)


class Replies:
    """Thread-safe sender of replies, lines of JSON, to the rank."""

    def __init__(self, fd: int):
        self._fd, self._lock = fd, threading.Lock()
        self.job = 0

    def send(self, **values: Any) -> None:
        """Send a reply to the current job."""
        line = json.dumps({"id": self.job, **values}).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]

    def wrote(self, count: int) -> None:
        """Report that `count` more bytes were written."""
        self.send(bytes=count)


def serve(lines: Iterable[str], place: Place, reply: Replies) -> None:
    """Run jobs until there are no more lines."""
    writer: WriterProcess | None = None
    for line in lines:
        job = json.loads(line)
        reply.job = job["id"]
        try:
            writer = writer or WriterProcess(place, reply)
            reply.send(done=writer.do(job))
        except CheckpointError as error:
            reply.send(failed=_one_line(error), transient=is_transient(error))
        except Exception as error:
            traceback.print_exc()
            told = f"{type(error).__name__}: {_one_line(error)}"
            reply.send(failed=told, transient=is_transient(error))


def die_with(parent: int) -> None:
    """Make the kernel kill this process when its rank ends for any reason.

    The signal is sent when the thread that started this process ends, which is the rank's main
    thread.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the rank ended before the call above
        os._exit(1)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main() -> None:
    """Serve one rank until it closes stdin or ends."""
    parent, uri, patience = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    die_with(parent)
    os.nice(_NICE)
    logging.basicConfig(level=logging.WARNING, format="checkpoint writer: %(message)s")
    # Redirect prints to stderr, so that they cannot mix with the replies.
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        serve(sys.stdin, open_place(uri, patience), Replies(answers))
    except BrokenPipeError:
        os._exit(1)  # the rank has ended
    os._exit(0)  # do not wait for threads of a store


if __name__ == "__main__":
    main()
