"""Transports a result or an exception of one rank in a form that other ranks can raise."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Result or exception of a function call.

    Attributes:
        value: value that the function returned.
        error: exception that it raised, or None.
        causes: chain of `__cause__` and `__context__` of the error, nearest first.
    """

    value: Any = None
    error: Exception | None = None
    causes: tuple[BaseException, ...] = ()

    @classmethod
    def of(cls, work: Callable[[], Any]) -> "Outcome":
        """Call `work` and catch its exception, so that it can be sent to the waiting ranks."""
        try:
            return cls(work())
        except Exception as error:
            return cls(None, error, tuple(_causes(error)))

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is None:
            return self.value
        error: BaseException = self.error
        for cause in self.causes:  # pickling drops the chain
            error.__cause__ = error = cause
        raise self.error

    def sendable(self) -> "Outcome":
        """Return an equivalent outcome that survives pickling.

        An exception whose constructor needs more than its message cannot be unpickled; a
        RuntimeError with the same text replaces it.
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
