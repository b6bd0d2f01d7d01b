"""Errors of checkpoints, divided into transient and permanent ones."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# File errors that retries cannot resolve until their cause is fixed.
_PERMANENT = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
}


class CheckpointError(ValueError):
    """A checkpoint cannot be used or written.

    The message names the file, the actual and the expected state, and the remedy.
    """


class CheckpointUnavailable(CheckpointError):
    """A checkpoint location does not respond now, but may later; no sign of damage."""


def is_transient(error: BaseException) -> bool:
    """Return whether a retry may succeed, because a store or shared folder is unavailable for now.

    While a file server is replaced, it returns ESTALE, EIO, ETIMEDOUT and others for a while.
    """
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT
    # Imported late, because it imports boto3.
    from data_pipeline.store.open import StoreUnavailable

    return isinstance(error, StoreUnavailable | CheckpointUnavailable)


def error_class(error: BaseException) -> type[CheckpointError]:
    """Return `CheckpointUnavailable` for a transient error, else `CheckpointError`."""
    return CheckpointUnavailable if is_transient(error) else CheckpointError


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Convert errors of a store or a disk at `where` to `CheckpointError`; see `error_class`."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        hint = "; free some space, or lower checkpoint.keep_last" if full else ""
        message = f"{error.filename or where}: {error.strerror or error}{hint}"
        raise error_class(error)(message) from error
    except Exception as error:
        from data_pipeline.store.open import StoreError

        if not isinstance(error, StoreError):
            raise
        message = str(error) if where in str(error) else f"{where}: {error}"
        raise error_class(error)(message) from error
