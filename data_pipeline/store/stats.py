"""What was asked of a store: counts since it was opened, and how long recent reads took."""

import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

# Quantiles are of this many reads: enough for a p95, little enough to sort for every log line.
_RECENT = 1024


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was opened, over all threads. A store leaves at 0 what it has not.

    Args:
        requests: HTTP requests sent (each retry and each hedge is one), or file operations.
        bytes: payload bytes received, those of broken and of abandoned bodies included.
        written: payload bytes sent.
        resumes: bodies that broke and were taken up again.
        retries: requests sent again because the one before had failed; resumes are among them.
        hedges: second requests sent because the first was late.
        hedges_won: those of them that were complete before the first.
        throttled: answers 503 and 429.
        budget_wait_s: seconds that requests waited for the node's budget, summed over threads.
        latency_p50_s, latency_p95_s, latency_max_s: seconds of the last 1,024 reads that were
            answered, from call to last byte, waits and retries included; 0 before the first.
    """

    requests: int = 0
    bytes: int = 0
    written: int = 0
    resumes: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    throttled: int = 0
    budget_wait_s: float = 0.0
    latency_p50_s: float = 0.0
    latency_p95_s: float = 0.0
    latency_max_s: float = 0.0


def quantile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the sorted values do not exceed; 0 of none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


class Counter:
    """Thread-safe sums behind `StoreStats`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: tuple[Any, ...] = (0, 0, 0, 0, 0, 0, 0, 0, 0.0)  # as StoreStats begins
        self._seconds: deque[float] = deque(maxlen=_RECENT)

    def add(
        self,
        requests: int = 0,
        received: int = 0,
        written: int = 0,
        resumes: int = 0,
        retries: int = 0,
        hedges: int = 0,
        hedges_won: int = 0,
        throttled: int = 0,
        budget_wait_s: float = 0.0,
    ) -> None:
        """Add to the counts; `received` is what `StoreStats` calls bytes."""
        more = (
            *(requests, received, written, resumes),
            *(retries, hedges, hedges_won, throttled, budget_wait_s),
        )
        with self._lock:
            self._sums = tuple(old + new for old, new in zip(self._sums, more))

    def timed(self, seconds: float) -> None:
        """Remember how long one answered read took."""
        with self._lock:
            self._seconds.append(seconds)

    @property
    def stats(self) -> StoreStats:
        """The counts at this moment."""
        with self._lock:
            sums, seconds = self._sums, list(self._seconds)
        seconds.sort()
        names = (field.name for field in fields(StoreStats))
        values: list[Any] = [*sums, *(quantile(seconds, share) for share in (0.5, 0.95, 1.0))]
        return StoreStats(**dict(zip(names, values, strict=True)))
