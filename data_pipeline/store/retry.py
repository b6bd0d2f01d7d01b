"""When to try again and when to stop: full jitter, and a deadline that progress moves.

Full jitter (a uniform draw between 0 and a doubling bound) spreads the clients that one outage
stopped at the same moment; see "Exponential Backoff And Jitter" of the AWS Architecture Blog. The
draw changes when a request is sent, never what is read, so it needs no seed.
"""

import random
import time
from typing import Self

BASE_S = 0.05
CAP_S = 4.0


def backoff(failures: int, draw: random.Random) -> float:
    """Seconds to wait after the `failures`-th failure in a row (from 1)."""
    return draw.uniform(0.0, min(CAP_S, BASE_S * 2.0 ** min(failures, 30)))


class Tries:
    """The attempts of one operation; a context manager for as long as it lasts.

    Args:
        what: is asked for, and of whom.
        patience: seconds without progress after which to give up.
        attempts: failures in a row after which to give up although there is time; None: no limit.
        draw: where jitter comes from.

    Attributes:
        failures: in a row.
        renewed: were the credentials fetched anew since there was progress? A long read may outlive
            more than one token.
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
        """How long there has been no progress."""
        return time.monotonic() - self._since

    def progress(self) -> None:
        """Something came of it: failures and the clock start afresh."""
        self.failures, self.renewed, self._since = 0, False, time.monotonic()

    def excuse(self, seconds: float) -> None:
        """Take a wait that was not the server's fault off the clock."""
        self._since += seconds

    def failed(self) -> float | None:
        """Note a failure: seconds to wait before the next attempt, or None to give up.

        The last attempt is made at the deadline, not before it.
        """
        self.failures += 1
        left = self._patience - self.seconds
        if left <= 0 or (self._attempts is not None and self.failures >= self._attempts):
            return None
        return min(backoff(self.failures, self._draw), left)


_UNDER_WAY: set[Tries] = set()


def longest_silence() -> tuple[str, float]:
    """What this process has asked a store for in vain for longest, and for how many seconds.

    ("", 0.0) if nothing is under way. Of all stores and threads; other processes are not seen.
    """
    slowest = max(list(_UNDER_WAY), key=lambda tries: tries.seconds, default=None)
    return ("", 0.0) if slowest is None else (slowest.what, slowest.seconds)
