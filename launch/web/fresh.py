"""Caches values made from store objects, and rebuilds them when one of the objects changes.

Each request first compares the objects' ETags, with one HEAD per object, so no answer contains data
that were just erased or replaced. The first request after a change rebuilds the value and waits;
other requests wait for a moment and then get a retry hint.
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
"""Size and ETag of each object; None for a missing object."""

WAIT_S = 2.0
"""Seconds that a request waits while another request rebuilds a value."""

_THREADS = 16
_AT_ONCE = threading.BoundedSemaphore(2)  # each reads an index, which takes 0.7 GB of memory


def manifests_of(store: Store, names: Sequence[str]) -> State:
    """Return the state of the manifests of sources.

    Raises:
        MissingKey: a source no longer exists. StoreError: the store cannot be read.
    """
    return tuple(in_threads(lambda name: store.head(manifest_key(name)), names, _THREADS))


def state_of(store: Store, key: str) -> ObjectInfo | None:
    """Return size and ETag of an object, or None if it is missing.

    Raises:
        StoreError: the store cannot be read.
    """
    try:
        return store.head(key)
    except MissingKey:
        return None


class Fresh(Generic[Made]):
    """Value made from the current state of store objects; thread-safe.

    Args:
        what: name of the value, for messages.
        look: returns the state of the objects.
        make: makes the value, with a new store: a store that has read an object treats a changed
            object as an error.
        first: makes the first value; None uses `make`.

    Raises:
        Exception: any error of `look` and `make`.
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
        # Reads the state first, so that the next comparison sees changes during the making.
        self._held = look(), (first or make)()

    @property
    def last(self) -> Made:
        """Last value, for facts that do not change with the objects."""
        return self._held[1]

    def now(self) -> Made:
        """Return the value for the current state of the objects.

        Raises:
            ComeAgain: another request is rebuilding the value. Also any error of `look` and `make`.
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
