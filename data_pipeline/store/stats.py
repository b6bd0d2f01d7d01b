"""What was asked of a store: counts since it was opened."""

import threading
from dataclasses import dataclass, replace


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
    """What stores have in common: an address, and thread-safe counts."""

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
