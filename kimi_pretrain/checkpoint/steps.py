"""Which steps a writer leaves alone while it tidies up beside its other jobs."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Steps:
    """The steps that this run writes or removes itself. May be used from several threads.

    Whoever tidies up asks here before it removes anything of a step, and is never at a step that
    another job has begun with.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spared: set[int] = set()
        self._removing: int | None = None

    def spare(self, step: int) -> None:
        """Have a step left alone from now on; waits while something of it is being removed."""
        with self._changed:
            self._spared.add(step)
            self._changed.wait_for(lambda: self._removing != step)

    def spared(self, step: int) -> bool:
        """Whether a step is to be left alone."""
        with self._changed:
            return step in self._spared

    @contextmanager
    def removing(self, step: int) -> Iterator[bool]:
        """Give whether a step may be removed; if so, `spare` waits for the end of the block.

        One thread alone removes.
        """
        with self._changed:
            assert self._removing is None, self._removing
            free = step not in self._spared
            self._removing = step if free else None
        try:
            yield free
        finally:
            with self._changed:
                self._removing = None
                self._changed.notify_all()
