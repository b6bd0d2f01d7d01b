"""Counts of a store's requests and bytes since it was opened."""

import threading
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was opened, over all threads; counts that do not apply stay 0.

    Args:
        requests: HTTP requests sent (each retry and each hedge counts), or file operations.
        bytes: payload bytes received, including broken and abandoned bodies.
        written: payload bytes sent.
        resumes: bodies that broke and were resumed.
        retries: requests sent again after a failure, including resumes.
        hedges: second requests sent because the first was late.
        hedges_won: hedges that completed before the first request.
        throttled: responses with status 503 or 429.
        budget_wait_s: seconds that requests waited for the node's budget, summed over threads.
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


class Counted:
    """Base class of stores: an address and thread-safe counts."""

    uri: str

    def __init__(self) -> None:
        self._stats, self._stats_lock = StoreStats(), threading.Lock()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.uri!r})"

    @property
    def stats(self) -> StoreStats:
        """See `Store.stats`."""
        return self._stats

    def count(self, **more: float) -> None:
        """Add to the named counts."""
        with self._stats_lock:
            now = self._stats
            self._stats = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})
