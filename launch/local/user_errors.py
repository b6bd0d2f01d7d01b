"""Classifies user errors and shows them in one line, without a traceback.

Exit codes: 0 finished, or stopped in order (`status.json` says which); 2 user error, a retry fails
again; 75 no progress in time, a store or shared folder that does not answer, or a chain that was
stopped in order; any other code is a fault, such as a dead process. After 75 or a fault, a restart
can help.
"""

import errno
import os
import socket
import traceback
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from data_pipeline.store.patient import AWAY
from kimi_pretrain.reliability.exit_report import FAULT, NO_PROGRESS, USER_ERROR, is_foreign
from kimi_pretrain.reliability.stack_inspection import where

# Full disk, missing permission, a file where a folder should be: not faults of this program.
STORAGE = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
    *(errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG),
)


def user_message(error: BaseException) -> str | None:
    """Return the line to show for a user error, or None for any other error.

    Invalid values, missing files and requests that the object store refuses are user errors.
    Anything else is a fault of this program and keeps its traceback. So does a ValueError in a step
    or its loader that this project did not raise
    (`kimi_pretrain.reliability.exit_report.is_foreign`).
    """
    if isinstance(error, FileNotFoundError) and error.filename is not None:
        return f"{error.filename}: no such file or folder"  # without the errno
    if type(error).__name__ == "ValidationError":  # of a section; pydantic is loaded already
        from typed_config.section import ValidationError, problems

        if isinstance(error, ValidationError):
            return "; ".join(problems(error))
    if isinstance(error, ValueError | FileNotFoundError):
        return " ".join(str(error).split())
    if isinstance(error, OSError) and error.errno in STORAGE:
        return f"{error.filename or _place(error)}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in AWAY and error.filename is not None:
        return f"{error.filename}: {error.strerror}; check the disk or file server, then run again"
    if _port_in_use(error):
        port = os.environ.get("MASTER_PORT")
        return (
            f"MASTER_PORT={port}: another program listens there on {socket.gethostname()}, where "
            "the ranks are to meet; choose another port"
        )
    # Imported late, because the store imports boto3, and the most frequent errors need neither.
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
    """Return True if rank 0 could not open the ranks' store; compare names to avoid torch."""
    return type(error).__name__ == "DistNetworkError" and "EADDRINUSE" in str(error)


def _place(error: BaseException) -> str:
    """Return the line of this project that raised a disk error without a file name."""
    lines = [(f.filename, f.lineno or 0, f.name) for f in traceback.extract_tb(error.__traceback__)]
    return f"a file written at {where(lines[::-1])}"


def exit_code(error: BaseException) -> int:
    """Return the exit code of an error that `user_message` shows in one line.

    The whole chain of causes is checked. A store or shared folder that does not answer may answer
    after a restart, so the code is 75. A loader worker that died, usually for lack of memory, is a
    dead process like any other, so the code is 1. If it dies again, restarts stop after some
    failures without progress.
    """
    from data_pipeline.workers.workers import WorkerDied

    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerDied):
            return FAULT
        if _passes(cause) or _port_in_use(cause):  # the batch script chooses another port
            return NO_PROGRESS
        cause = cause.__cause__ or cause.__context__
    return USER_ERROR


def _passes(error: BaseException) -> bool:
    """Return True if a restart may get past this error.

    An OSError without errno does not count, because it does not come from a file system (PIL raises
    one for a broken image). Neither do errors of locks and processes.
    """
    from kimi_pretrain.checkpoint.errors import is_transient
    from kimi_pretrain.reliability.run_lock import FormerStart

    if isinstance(error, OSError):
        answers = BlockingIOError | ProcessLookupError | ChildProcessError | InterruptedError
        return error.errno is not None and not isinstance(error, answers) and is_transient(error)
    return isinstance(error, FormerStart) or is_transient(error)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Show a user error as one line on stderr, and exit with its code; let other errors pass."""
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
