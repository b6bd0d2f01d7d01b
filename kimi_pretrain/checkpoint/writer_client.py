"""Client of a rank's writer process: starts it, sends it jobs, and reads its replies."""

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kimi_pretrain.checkpoint.storage_read import Place

_PATIENCE_S = 10.0
_TICK_S = 0.5
# Jobs that nothing waits for, as a later run would also do them.
_REMOVALS = ("tidy", "retire", "remove_torn")
_ROOT = Path(__file__).parent.parent.parent
# Signals that all processes of a job receive when it must end. The rank then saves a checkpoint, so
# the writer must survive them.
_BLOCKED = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP}


class WriterClient:
    """A writer process and its current job.

    Args:
        place: location of the checkpoints.
        fds: descriptors of the staging memory, which the process reads.

    Attributes:
        bytes_done: bytes written in the current job.
        done: {"value": result of the job}, or None while it runs.
        failed: reason of the failure in one line, or None.
        transient: True if a retry may succeed: the location does not respond, or the process died.
        tidying: True if, at the last `poll`, the process was removing leftovers of killed runs in
            addition to its job.
        warnings: warnings received so far; the reader empties the list.
    """

    def __init__(self, place: Place, fds: Sequence[int]):
        self._job, self._partial_line, self._job_kind = 0, b"", ""
        self.bytes_done = 0
        self.done: dict[str, Any] | None = None
        self.failed: str | None = None
        self.transient = self.tidying = False
        self.warnings: list[str] = []
        path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
        given = [str(os.getpid()), place.uri, str(place.patience)]
        command = [sys.executable, "-m", "kimi_pretrain.checkpoint.writer_process", *given]
        # The child inherits the mask, so these signals are blocked from its start.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=fds,
                env={**os.environ, "PYTHONPATH": path},
                bufsize=0,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True if the process runs."""
        return self._process.poll() is None

    @property
    def busy(self) -> bool:
        """True if a job is in progress."""
        return bool(self._job) and self.done is None and self.failed is None

    def send(self, do: str, **values: Any) -> None:
        """Send a job, which runs after the previous job; replies to earlier jobs are dropped.

        If the process has ended, the job fails.
        """
        self._job += 1
        self._job_kind, self.tidying = do, self.tidying or do == "tidy"
        self.bytes_done, self.done, self.failed, self.transient = 0, None, None, False
        line = json.dumps({"do": do, "id": self._job, **values}).encode() + b"\n"
        try:
            assert self._process.stdin is not None
            while line:
                line = line[self._process.stdin.write(line) :]
        except BrokenPipeError:
            self._on_exit()

    def poll(self, seconds: float = 0.0) -> None:
        """Read the replies of the process, and wait up to `seconds` for the end of the job."""
        self._listen(seconds, lambda: self.busy)

    def _listen(self, seconds: float, wanted: Callable[[], bool]) -> None:
        """Read available replies, and wait up to `seconds` for more while `wanted` returns True."""
        assert self._process.stdout is not None
        if self._process.stdout.closed:
            return
        fd, until = self._process.stdout.fileno(), time.monotonic() + seconds
        # select.select does not accept descriptors above 1023, and rank 0 has thousands.
        answers = select.poll()
        answers.register(fd, select.POLLIN)
        while answers.poll(1000 * max(0.0, until - time.monotonic()) if wanted() else 0):
            data = os.read(fd, 1 << 20)
            if not data:
                self._on_exit()
                return
            *lines, self._partial_line = (self._partial_line + data).split(b"\n")
            for line in lines:
                self._handle(json.loads(line))

    def close(
        self, patience: float | None = None, alive: Callable[[], None] = lambda: None
    ) -> None:
        """End the process and drop unfinished files; may be called more than once.

        Args:
            patience: seconds to wait for pending deletions; None for 10.
            alive: called repeatedly during the wait.
        """
        if self._process.stdout is None or self._process.stdout.closed:
            return
        until = time.monotonic() + (_PATIENCE_S if patience is None else patience)
        while self._removing and (left := until - time.monotonic()) > 0:
            self._listen(min(_TICK_S, left), lambda: self._removing)
            alive()
        if self.busy:
            self._process.kill()
            self.failed = "the process that writes checkpoints was ended"
        self.tidying = False
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(timeout=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    @property
    def _removing(self) -> bool:
        return self._job_kind in _REMOVALS if self.busy else self.tidying

    def _handle(self, answer: dict[str, Any]) -> None:
        if "warning" in answer:
            self.warnings.append(answer["warning"])
        elif "tidied" in answer:
            self.tidying = False
        elif answer["id"] != self._job:
            return
        elif "bytes" in answer:
            self.bytes_done += answer["bytes"]
        elif "failed" in answer:
            self.failed, self.transient = answer["failed"], answer["transient"]
            self.tidying = self.tidying and self._job_kind != "tidy"
        else:
            self.done = {"value": answer["done"]}

    def _on_exit(self) -> None:
        self.tidying = False
        if not self.busy:  # no job is lost
            return
        code = self._process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self.failed, self.transient = f"the process that writes checkpoints {how}", True
