"""Formats names for messages: suggests the nearest known name, and shortens long lists."""

import difflib
from collections.abc import Iterable, Sequence

_LISTED = 20  # longer lists do not help a reader


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return "did you mean 'digits'? there are: charts, digits"; without a guess, the list only."""
    near = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}there are: {listed(known)}"


def listed(names: Iterable[object]) -> str:
    """Return the first 20 names, separated by commas."""
    found = [str(name) for name in names]
    return (", ".join(found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")) or "none"
