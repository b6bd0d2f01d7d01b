"""Notes in states and run folders on the steps from which redacted samples are excluded.

A note is [[step, {source: [n, hash of the n samples]}], ...]. From that step on, no row contains
the first n redacted samples of the source. A root whose manifests list redactions in another order
would give other rows, so the hash check refuses it; a copy by `data sync` keeps the order. The hash
covers the samples' numbers, which belong to the source's content.
"""

import hashlib
from collections.abc import Sequence
from typing import Any, cast

from data_pipeline.names import listed

HASH = 12
"""Hexadecimal digits of a hash of samples in a state."""

Since = tuple[tuple[int, tuple[int, ...]], ...]
"""(step, number of redacted samples of each source excluded from that step on), ascending."""


def note_of(
    names: Sequence[str], redacted: Sequence[Sequence[int]], since: Since
) -> list[list[Any]]:
    """Return the note for some steps, ready for JSON.

    Args:
        names: names of the sources.
        redacted: redacted samples of each source, in order of redaction.
        since: steps with the number of samples excluded from them on.
    """
    return [
        [step, {names[at]: [n, digest(names[at], redacted[at][:n])] for at, n in _some(counts)}]
        for step, counts in since
    ]


def since_of(
    where: str, note: object, names: Sequence[str], redacted: Sequence[Sequence[int]]
) -> Since:
    """Check a note against the order of redactions in a root, and return its steps.

    Args:
        where: name of the note, for messages.
        note: result of `note_of`.
        names, redacted: as in `note_of`.

    Raises:
        ValueError: the note is malformed, or other samples were redacted first in this root.
    """
    try:
        noted = [
            (int(step), {names.index(name): (int(n), sha) for name, (n, sha) in told.items()})
            for step, told in cast("Any", note)
        ]
    except (AttributeError, TypeError, ValueError):
        raise ValueError(
            f"{where} is {str(note)[:200]}; expected [[step, {{source: [samples, hash]}}], ...], "
            f"of sources {listed(names)}"
        ) from None
    found = []
    for step, told in noted:
        counts = [0] * len(names)
        for at, (count, sha) in told.items():
            _check(f"{where}, from step {step + 1} on", names[at], count, sha, redacted[at])
            counts[at] = count
        found.append((step, tuple(counts)))
    return tuple(found)


def _check(where: str, name: str, count: int, sha: object, here: Sequence[int]) -> None:
    """Refuse a note unless its hash matches the first `count` redacted samples of a source."""
    if count > len(here):
        raise ValueError(
            f"{where}: source {name!r} has {count:,} redacted samples, in this root it has "
            f"{len(here):,}: its redacted manifest was replaced by an older one, or this is a copy "
            "that lags behind; restore it, or bring the copy up to date (data sync)"
        )
    if sha != digest(name, here[:count]):
        raise ValueError(
            f"{where}: source {name!r} has {count:,} redacted samples, and the first {count:,} "
            "redacted in this root are others: it has them in another order, so the rows would "
            "not be those of the run; use the root that the run read, or a copy of it by data sync"
        )


def digest(name: str, samples: Sequence[int]) -> str:
    """Return a hash of a source's samples, independent of their order."""
    text = "\n".join(f"{name} {sample}" for sample in sorted(samples))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH]


def _some(counts: Sequence[int]) -> list[tuple[int, int]]:
    return [(at, count) for at, count in enumerate(counts) if count]
