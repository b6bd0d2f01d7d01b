"""Retry policy: full jitter, and a deadline that progress extends.

Full jitter (a uniform draw between 0 and a doubling bound) spreads clients that one outage stopped
at the same moment; see "Exponential Backoff And Jitter" in the AWS Architecture Blog. The draw
changes only when a request is sent, never the bytes that are read, so it needs no seed.
"""

import random
import time
from typing import Self

BASE_S = 0.05
CAP_S = 4.0


def backoff(failures: int, draw: random.Random) -> float:
    """Return the seconds to wait after the `failures`-th failure in a row, counted from 1."""
    return draw.uniform(0.0, min(CAP_S, BASE_S * 2.0 ** min(failures, 30)))


class Tries:
    """Attempts of one operation, as a context manager around the operation.

    Args:
        what: the requested object and the server, for messages.
        patience: seconds without progress after which to give up.
        attempts: failures in a row after which to give up early; None means no limit.
        draw: random generator for the jitter.

    Attributes:
        failures: number of failures in a row.
        renewed: True if the credentials were renewed since the last progress. A long read may
            outlive more than one token.
    """

    def __init__(
        self, what: str, patience: float, attempts: int | None, draw: random.Random
    ) -> None:
        self.what = what
        self._patience, self._attempts, self._draw = patience, attempts, draw
        self.failures, self.renewed = 0, False
        self._since = time.monotonic()

    def __enter__(self) -> Self:
        _UNDER_WAY.add(self)
        return self

    def __exit__(self, *_: object) -> None:
        _UNDER_WAY.discard(self)

    @property
    def seconds(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self._since

    def progress(self) -> None:
        """Record progress: reset the failures and the clock."""
        self.failures, self.renewed, self._since = 0, False, time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Subtract a wait that the server did not cause from the clock."""
        self._since += seconds

    def failed(self) -> float | None:
        """Record a failure; return the seconds until the next attempt, or None to give up.

        The last attempt happens at the deadline, not before it.
        """
        self.failures += 1
        left = self._patience - self.seconds
        if left <= 0 or (self._attempts is not None and self.failures >= self._attempts):
            return None
        return min(backoff(self.failures, self._draw), left)


_UNDER_WAY: set[Tries] = set()


def longest_silence() -> tuple[str, float]:
    """Return the operation of this process that has waited longest without progress, in seconds.

    It covers all stores and threads of this process, and is ("", 0.0) if nothing is in progress.
    """
    slowest = max(list(_UNDER_WAY), key=lambda tries: tries.seconds, default=None)
    return ("", 0.0) if slowest is None else (slowest.what, slowest.seconds)
