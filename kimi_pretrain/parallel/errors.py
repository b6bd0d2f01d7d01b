"""What one rank does for all: its result or its error, in a form that can be sent to the others."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Of a piece of work.

    Attributes:
        value: what it returned.
        error: what it raised; None: nothing.
        causes: of the error, the nearest first: what it was raised from, or while handling.
    """

    value: Any = None
    error: Exception | None = None
    causes: tuple[BaseException, ...] = ()

    @classmethod
    def of(cls, work: Callable[[], Any]) -> "Outcome":
        """Do a piece of work whose error must not keep others waiting."""
        try:
            return cls(work())
        except Exception as error:
            return cls(None, error, tuple(_causes(error)))

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is None:
            return self.value
        error: BaseException = self.error
        for cause in self.causes:  # which being sent has cut off
            error.__cause__ = error = cause
        raise self.error

    def sendable(self) -> "Outcome":
        """Return the same for other processes.

        An exception whose constructor wants more than its message would break where it arrives: one
        that says the same goes in its place.
        """
        if self.error is None:
            return self
        error = self.error
        if not _survives(error):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        return Outcome(None, error, tuple(filter(_survives, self.causes)))


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    while (cause := error.__cause__ or error.__context__) is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield (error := cause)


def _survives(error: BaseException) -> bool:
    try:
        return str(pickle.loads(pickle.dumps(error))) == str(error)
    except Exception:
        return False
