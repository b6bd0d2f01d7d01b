"""The errors of this room, and which faults pass."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

# Errors of files that come again until somebody does something about them.
_LASTING = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP),
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EPERM),
}


class CheckpointError(ValueError):
    """A checkpoint that cannot be used or written.

    The message names the file, what was found and what was expected, and what to do.
    """


class CheckpointUnavailable(CheckpointError):
    """A place of checkpoints that does not answer now, and may later. Says nothing of damage."""


def passing(error: BaseException) -> bool:
    """Whether a later attempt may not meet this error: a store or a shared folder that is away.

    A server that is being replaced answers ESTALE, EIO, ETIMEDOUT and others for a while.
    """
    if isinstance(error, OSError):
        return error.errno not in _LASTING
    # Imported late: it brings boto3.
    from data_pipeline.store.open import StoreUnavailable

    return isinstance(error, StoreUnavailable | CheckpointUnavailable)


def kind_of(error: BaseException) -> type[CheckpointError]:
    """Return the class that tells of an error met at a place of checkpoints."""
    return CheckpointUnavailable if passing(error) else CheckpointError


@contextmanager
def told_of(where: str) -> Iterator[None]:
    """Turn errors of a store or a disk into ours, of the kind that says whether they pass."""
    from data_pipeline.store.open import StoreError

    try:
        yield
    except OSError as error:
        told = f"{error.filename or where}: {error.strerror or error}"
        raise kind_of(error)(told) from error
    except StoreError as error:
        told = str(error) if where in str(error) else f"{where}: {error}"
        raise kind_of(error)(told) from error
