"""What was made of objects of a store, made again as soon as one of them is another.

Each request looks at the objects' ETags first, a HEAD each: what was erased or replaced a moment
ago is in no answer, whatever is kept in memory. Whoever comes first has it made again and waits;
others wait for a moment, and are told to come again.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from data_pipeline.index.manifest import manifest_key
from data_pipeline.store.objects import in_threads
from data_pipeline.store.open import MissingKey, ObjectInfo, Store
from launch.pages.turns import turn

Made = TypeVar("Made")
State = tuple[ObjectInfo | None, ...]
"""Size and ETag of objects; None for one that is not there."""

WAIT_S = 2.0
"""So long a request waits for what others have under way."""

_THREADS = 16
_AT_ONCE = threading.BoundedSemaphore(2)  # an index is read, and 0.7 GB of memory are used for it


def manifests_of(store: Store, names: Sequence[str]) -> State:
    """Return the state of the manifests of sources.

    Raises:
        MissingKey: there is no such source any more. StoreError: it cannot be told.
    """
    return tuple(in_threads(lambda name: store.head(manifest_key(name)), names, _THREADS))


def state_of(store: Store, key: str) -> ObjectInfo | None:
    """Return size and ETag of an object, None if it is not there.

    Raises:
        StoreError: it cannot be told.
    """
    try:
        return store.head(key)
    except MissingKey:
        return None


class Fresh(Generic[Made]):
    """Something made of objects, as they are now; from any thread.

    Args:
        what: it is, for messages.
        look: returns the state of the objects.
        make: makes it of them; by a store of its own, as one that has read an object takes another
            in its place for a fault.
        first: makes it for the first time; None: as `make`.

    Raises:
        Whatever `look` and `make` do.
    """

    def __init__(
        self,
        what: str,
        look: Callable[[], State],
        make: Callable[[], Made],
        first: Callable[[], Made] | None = None,
    ) -> None:
        self._what, self._look, self._make = what, look, make
        self._lock = threading.Lock()
        # Looked at before: what changes while it is made is seen by the next look.
        self._held = look(), (first or make)()

    @property
    def last(self) -> Made:
        """What was made last, for what does not change with the objects."""
        return self._held[1]

    def now(self) -> Made:
        """Return what is made of the objects as they are.

        Raises:
            ComeAgain: it is being made again. Whatever `look` and `make` do.
        """
        if (made := self._current()) is not None:
            return made
        told = f"{self._what} was changed a moment ago and is being read again"
        until = time.monotonic() + WAIT_S
        with turn(self._lock, until, told), turn(_AT_ONCE, until, told):
            if (made := self._current()) is not None:
                return made
            state = self._look()
            self._held = state, self._make()
            return self._held[1]

    def _current(self) -> Made | None:
        state, made = self._held
        return made if self._look() == state else None
