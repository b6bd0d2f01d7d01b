"""Which errors are the user's to mend, and how they are shown: one line, no traceback.

Exit codes: 0 finished, or stopped in order (`status.json` says which); 2 the user's to mend, and a
restart would come to it again; 75 no progress in time, or a store or shared folder that does not
answer; any other a fault, such as a dead process. After the last two a restart helps.
"""

import errno
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kimi_pretrain.reliability.exit_report import FAULT, NO_PROGRESS, USER_ERROR, is_foreign
from kimi_pretrain.reliability.stack_inspection import where

__all__ = ["EXIT_CODE", "NO_PROGRESS", "told_plainly", "user_message"]

EXIT_CODE = USER_ERROR
# A full disk, a folder that may not be written, and a path with a file where a folder is expected
# are not faults of this program.
STORAGE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
)


def user_message(error: BaseException) -> str | None:
    """Return the line to show for an error in the user's input, or None for any other error.

    Bad values, missing files and everything the object store refuses are the user's; anything else
    is a fault of this program and keeps its traceback, a ValueError without a class of this
    project's that comes up in a step or in its loader as well
    (`kimi_pretrain.reliability.exit_report.is_foreign`).
    """
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{error.filename}: no such file or folder"  # without its number
    if isinstance(error, ValueError | FileNotFoundError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in STORAGE:
        return f"{error.filename or _place(error)}: {error.strerror}"
    if _port_in_use(error):
        port = os.environ.get("MASTER_PORT")
        return (
            f"MASTER_PORT={port}: another program listens there on {socket.gethostname()}, where "
            "the ranks are to meet; choose another port"
        )
    # Imported late: the store brings boto3, and the commonest errors need neither.
    from data_pipeline.index.manifest import IndexMismatch
    from data_pipeline.loader import LoaderError
    from data_pipeline.store.open import StoreError
    from data_pipeline.workers.workers import WorkerDied

    if isinstance(error, LoaderError) and error.__cause__ is not None:
        cause = None if is_foreign(error.__cause__) else user_message(error.__cause__)
        return cause and f"step {error.step}: {cause}"
    if isinstance(error, StoreError | IndexMismatch | WorkerDied):
        return " ".join(str(error).split())
    return None


def _port_in_use(error: BaseException) -> bool:
    """Whether rank 0 could not open the store where ranks meet; torch is not loaded to know."""
    return type(error).__name__ == "DistNetworkError" and "EADDRINUSE" in str(error)


def _place(error: BaseException) -> str:
    """Return the line of this project that met an error of the disk which names no file."""
    lines = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return f"a file written at {where(lines[::-1])}"


def exit_code(error: BaseException) -> int:
    """Return the exit code that goes with an error of which `user_message` tells in one line.

    A store or shared folder that does not answer may do so after a restart, whatever became of its
    error on the way. A loader's worker that died, of want of memory as a rule, is a dead process as
    any other; where it comes again, who restarts gives up after some times without progress.
    """
    from data_pipeline.workers.workers import WorkerDied

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerDied):
            return FAULT
        if _passes(cause) or _port_in_use(cause):  # the batch script looks for a port again
            return NO_PROGRESS
        cause = cause.__cause__ or cause.__context__
    return EXIT_CODE


def _passes(error: BaseException) -> bool:
    """Whether a restart may not meet this error.

    Without a number an OSError says nothing of a file system (a picture that is none is one), and
    a lock or a process that was asked for is no fault.
    """
    from kimi_pretrain.checkpoint.errors import passing
    from kimi_pretrain.reliability.run_lock import FormerStart

    if isinstance(error, OSError):
        answers = BlockingIOError | ProcessLookupError | ChildProcessError | InterruptedError
        return error.errno is not None and not isinstance(error, answers) and passing(error)
    return isinstance(error, FormerStart) or passing(error)


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn an error that the user can mend into one line and its exit code."""
    try:
        yield
    except (typer.Exit, typer.Abort):
        raise
    except Exception as error:
        message = user_message(error)
        if message is None:
            raise
        typer.echo(f"error: {message}", err=True)
        raise typer.Exit(exit_code(error)) from None
