"""The errors of checkpoints, and which of them are transient."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# Errors of files that a retry meets again until somebody mends their cause.
_PERMANENT = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written.

    The message names the file, what was found and what was expected, and what to do.
    """


class CheckpointUnavailable(CheckpointError):
    """A place of checkpoints does not answer now, but may later. No sign of damage."""


def is_transient(error: BaseException) -> bool:
    """Whether a retry may succeed: a store or a shared folder does not answer at the moment.

    A server that is being replaced answers ESTALE, EIO, ETIMEDOUT and others for a while.
    """
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT
    # Imported late: it brings boto3.
    from data_pipeline.store.open import StoreUnavailable

    return isinstance(error, StoreUnavailable | CheckpointUnavailable)


def error_class(error: BaseException) -> type[CheckpointError]:
    """Return the class for an error at a place of checkpoints: whether it is transient."""
    return CheckpointUnavailable if is_transient(error) else CheckpointError


@contextmanager
def storage_errors(where: str) -> Iterator[None]:
    """Turn errors of a store or a disk at `where` into a `CheckpointError`; see `error_class`."""
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
