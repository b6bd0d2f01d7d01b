"""Broadcasting errors: a result or an exception of one rank, in a form that others can raise."""

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Result or exception of a function call.

    Attributes:
        value: what the function returned.
        error: what it raised, or None.
        causes: of the error, nearest first: its chain of `__cause__` and `__context__`.
    """

    value: Any = None
    error: Exception | None = None
    causes: tuple[BaseException, ...] = ()

    @classmethod
    def of(cls, work: Callable[[], Any]) -> "Outcome":
        """Call `work` and catch its exception, so that the ranks that wait can be told of it."""
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
        """Return an equivalent that survives pickling.

        An exception whose constructor needs more than its message cannot be unpickled: it is
        replaced by a RuntimeError with the same text.
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
