"""Retries file reads while a disk or file server is temporarily unavailable.

While a server is replaced, a path fails over or a disk is reset, reads fail for seconds or minutes
with EIO, ESTALE and similar errors. Afterwards the same file is readable again.
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
"""Errors of an unavailable file system, as opposed to a bad path, missing rights or a full disk."""


def patiently(read: Callable[[], T], where: str, patience: float) -> T:
    """Return the result of `read`; call it again while its error is in `AWAY`.

    Args:
        read: function that may be called again after a failure.
        where: name of the file.
        patience: seconds after which to give up.

    Raises:
        OSError: the last error of `read`, with `filename` set and the attempts in its message.
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
    except OSError as error:  # an error on an open file has no file name
        error.filename = error.filename or where
        raise
