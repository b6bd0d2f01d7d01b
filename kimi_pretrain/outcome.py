"""What one rank does for all: its result or its error, in a form that can be sent to the others."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """Of a piece of work.

    Attributes:
        value: what it returned.
        error: what it raised; None: nothing.
    """

    value: Any = None
    error: Exception | None = None

    @classmethod
    def of(cls, work: Callable[[], Any]) -> "Outcome":
        """Do a piece of work whose error must not keep others waiting."""
        try:
            return cls(work())
        except Exception as error:
            return cls(error=error)

    def result(self) -> Any:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value

    def sendable(self) -> "Outcome":
        """Return the same for other processes.

        An exception whose constructor wants more than its message would break where it arrives: one
        that says the same goes in its place.
        """
        if self.error is None:
            return self
        try:
            if str(pickle.loads(pickle.dumps(self.error))) == str(self.error):
                return self
        except Exception:
            pass
        return Outcome(error=RuntimeError(f"{type(self.error).__name__}: {self.error}"))
