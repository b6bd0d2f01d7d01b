"""Reads of files whose disk or file server does not answer for a while: again until patience ends.

A server that is being replaced, a path that is switched over, a disk that is reset: for seconds or
minutes reads fail with EIO, ESTALE and the like, and then the same file can be read.
"""

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from data_pipeline.store.retry import Tries

T = TypeVar("T")
log = logging.getLogger("data_pipeline.store.patient")

AWAY = frozenset(
    (
        *(errno.EIO, errno.ESTALE, errno.EREMOTEIO, errno.ENOLINK, errno.ECOMM, errno.EPROTO),
        *(errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH),
        *(errno.ENOTCONN, errno.ECONNRESET, errno.ECONNREFUSED, errno.ECONNABORTED),
        *(errno.ESHUTDOWN, errno.EBUSY),
    )
)
"""Errors of a file system that is away, and not of a path, a right or a full disk."""


def patiently(read: Callable[[], T], where: str, patience: float) -> T:
    """Return what `read` returns; while its error is one of `AWAY`, call it again.

    Args:
        read: may be called again after it failed.
        where: name of the file.
        patience: seconds after which to give up.

    Raises:
        OSError: what `read` raised last; its `filename` is set, and it tells of the attempts.
    """
    try:
        return _named(read, where)
    except OSError as error:
        if error.errno not in AWAY:
            raise
        log.warning("%s: %s; tried again for %g s", where, error.strerror, patience)
        with Tries(where, patience, None, random.Random()) as tries:
            return _again(read, where, tries, error)


def _again(read: Callable[[], T], where: str, tries: Tries, error: OSError) -> T:
    while (wait := tries.failed()) is not None:
        time.sleep(wait)
        try:
            return _named(read, where)
        except OSError as again:
            if again.errno not in AWAY:
                raise
            error = again
    told = f"{error.strerror} ({tries.failures} attempts in {tries.seconds:.0f} s)"
    raise OSError(error.errno, told, error.filename) from error


def _named(read: Callable[[], T], where: str) -> T:
    try:
        return read()
    except OSError as error:  # that of `read` on an open file lacks it
        error.filename = error.filename or where
        raise
