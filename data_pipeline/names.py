"""Names in messages: the nearest to a misspelt one, and lists of them. Pure."""

import difflib
from collections.abc import Iterable, Sequence

_LISTED = 20  # more names than this say nothing to a reader


def did_you_mean(name: str, known: Sequence[str]) -> str:
    """Return "did you mean 'digits'? there are: charts, digits", or the latter part alone."""
    near = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    return f"{guess}there are: {listed(known)}"


def listed(names: Iterable[object]) -> str:
    """Return names with commas between them, the first 20."""
    found = [str(name) for name in names]
    return (", ".join(found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")) or "none"
