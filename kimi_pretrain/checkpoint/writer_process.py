"""The process beside each rank that writes its checkpoints: `python -m kimi_pretrain.checkpoint
.writer PARENT PLACE PATIENCE`.

Files to write come as descriptors of memory that the rank has filled (`aside`), jobs as lines of
JSON on stdin, answers go to stdout in the same way. So training goes on while files are hashed and
written, and no bytes are copied between the two. Knows no torch: it starts in an instant and takes
little memory.

    {"do": "tidy", "id", "owner"}    begins it, and it goes on beside other jobs
    {"do": "spare", "id", "step"}    have it leave a step alone; all jobs with a step do so
    {"do": "write", "id", "step", "files": [{"name", "fd", "bytes"}]}
    {"do": "commit", "id", "step", "manifest", "files", "owner"}
    {"do": "retire", "id", "step", "keep_last", "keep_every"}
    {"do": "remove_torn", "id", "step"}

    {"id", "bytes": so many more}    {"id", "told": warning}
    {"id", "done": value}            {"id", "failed": one line, "passing": see `Progress`}
    {"id", "tidied": true}
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

from kimi_pretrain.checkpoint.errors import CheckpointError, kind_of, passing
from kimi_pretrain.checkpoint.ownership import OWNER, Owner, told_owner
from kimi_pretrain.checkpoint.retention import kept
from kimi_pretrain.checkpoint.steps import Steps
from kimi_pretrain.checkpoint.storage_read import Place, open_place
from kimi_pretrain.checkpoint.storage_write import Sink, Source, open_sink, set_aside_later

_FILES = 2  # written at a time: while one waits for the disk, the other is hashed
_NICE = 10  # training goes first
_PR_SET_PDEATHSIG = 1


class Writer:
    """Does one job after the other, and tidies up beside them.

    Args:
        place: where checkpoints go.
        answer: sends values to the rank; called from several threads.
    """

    def __init__(self, place: Place, answer: "Answers"):
        self._place, self._answer = place, answer
        self._sink: Sink = open_sink(place)
        self._sources: dict[int, Source] = {}
        self._steps = Steps()

    def do(self, job: dict[str, Any]) -> Any:
        """Carry out one job; returns what it answers."""
        if job["do"] == "tidy":
            return threading.Thread(target=self._tidy, args=(job["owner"],), daemon=True).start()
        self._steps.spare(job["step"])
        if job["do"] == "write":
            return self._write(job)
        if job["do"] == "commit":
            check_owner(self._place, job["owner"])
            return self._sink.commit(job["step"], job["manifest"], job["files"])
        if job["do"] == "retire":
            return self._try("removing old ones", lambda: self._retire(job))
        if job["do"] == "remove_torn":
            return self._sink.remove_torn(job["step"])
        assert job["do"] == "spare", job["do"]
        return None

    def _write(self, job: dict[str, Any]) -> dict[str, Any]:
        step = job["step"]
        self._sink.open_step(step)

        def write(file: dict[str, Any]) -> dict[str, Any]:
            source = self._source(file["fd"], file["bytes"])
            return asdict(self._sink.write(step, file["name"], source, self._answer.wrote))

        with ThreadPoolExecutor(_FILES) as pool:
            found = list(pool.map(write, job["files"]))
        names = (file["name"] for file in job["files"])
        return dict(zip(names, found, strict=True))

    def _source(self, fd: int, size: int) -> Source:
        if fd not in self._sources:
            self._sources[fd] = Source(fd, size)
        return self._sources[fd]

    def _retire(self, job: dict[str, Any]) -> None:
        """Remove what need not be kept; set aside what lies ahead of the run."""
        step = job["step"]
        for told in set_aside_later(self._place, self._sink, step):
            self._answer.send(told=told)
        now = [found for found in self._place.steps() if found <= step]
        stay = kept(now, job["keep_last"], job["keep_every"], good=step)
        for old in (found for found in now if found not in stay):
            self._steps.spare(old)
            self._sink.remove(old)

    def _tidy(self, owner: Sequence[str] | None) -> None:
        def tidy() -> None:
            check_owner(self._place, owner)  # what is torn may be another run's save under way
            self._sink.tidy(self._steps)

        with suppress(BrokenPipeError):  # the rank is gone, or needs this process no longer
            self._try("tidying up", tidy)
            self._answer.send(tidied=True)

    def _try(self, what: str, action: Any) -> None:
        """Do what a save does not depend on; tell when it fails."""
        try:
            action()
        except Exception as error:
            self._answer.send(told=f"{self._place.uri}: {what} failed: {_one_line(error)}")


def check_owner(place: Place, owner: Sequence[str] | None) -> None:
    """Refuse to go on at a place that belongs to another run; two may have claimed it at once.

    Or to another start of this run, as of a copy of its folder on another cluster.

    Nobody's place is everybody's: its owner.json may have been removed on purpose.

    Args:
        place: of the checkpoints.
        owner: the values of an `Owner`, who claimed it; None: no run of those that claim places.

    Raises:
        CheckpointError: names the other one (CheckpointUnavailable: the place does not answer).
    """
    if owner is None:
        return
    try:
        text = place.read_text(OWNER)
    except Exception as error:  # of the store, or of a disk
        raise kind_of(error)(f"{place.uri}/{OWNER}: {_one_line(error)}") from None
    if text is not None and (told := told_owner(place.uri, text, *Owner(*owner))):
        raise CheckpointError(told)


class Answers:
    """Sends lines of JSON to the rank."""

    def __init__(self, fd: int):
        self._fd, self._lock = fd, threading.Lock()
        self.job = 0

    def send(self, **values: Any) -> None:
        """Send an answer to the present job."""
        line = json.dumps({"id": self.job, **values}).encode() + b"\n"
        with self._lock:
            while line:
                line = line[os.write(self._fd, line) :]

    def wrote(self, count: int) -> None:
        """Tell that so many bytes more were written."""
        self.send(bytes=count)


def serve(lines: Iterable[str], place: Place, answer: Answers) -> None:
    """Carry out jobs until there are no more lines."""
    writer: Writer | None = None
    for line in lines:
        job = json.loads(line)
        answer.job = job["id"]
        try:
            writer = writer or Writer(place, answer)
            answer.send(done=writer.do(job))
        except CheckpointError as error:
            answer.send(failed=_one_line(error), passing=passing(error))
        except Exception as error:
            traceback.print_exc()
            told = f"{type(error).__name__}: {_one_line(error)}"
            answer.send(failed=told, passing=passing(error))


def die_with(parent: int) -> None:
    """Let this process be killed when its rank ends, however that ends.

    The signal is sent when the thread that started this process ends; the rank's main thread does.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def main() -> None:
    """Serve one rank until it closes stdin or ends."""
    parent, uri, patience = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
    die_with(parent)
    os.nice(_NICE)
    logging.basicConfig(level=logging.WARNING, format="checkpoint writer: %(message)s")
    # What prints must not get in between the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        serve(sys.stdin, open_place(uri, patience), Answers(answers))
    except BrokenPipeError:
        os._exit(1)  # the rank is gone
    os._exit(0)  # threads of a store may still wait


if __name__ == "__main__":
    main()
