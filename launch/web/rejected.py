"""Reads the rejected samples of an ingest in parts, from a list of any length.

Each request searches one stretch of the file from an offset, and returns the offset of the next
stretch. Counts by reason are computed once; each request extends them by one stretch.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from data_pipeline.store.open import MissingKey, ObjectInfo, Store
from launch.web.lines import LONGEST, UNREADABLE, begin_of, fields_of

LINES = 200  # lines on a page
STRETCH = 16 << 20  # bytes that a request searches, and the same number that it counts
_PIECE = 4 << 20
_REASONS, _OTHERS = 100, "other reasons"  # number of reasons counted separately


class Rejected(NamedTuple):
    """One page of rejected samples.

    Attributes:
        lines: key, reason and detail of the matching samples.
        after: byte offset where the next page starts; None at the end of the list.
        reasons: {reason: number of samples} in the counted part of the list.
        counted: fraction of the list that is counted, 0 to 1.
    """

    lines: list[dict[str, str]]
    after: int | None
    reasons: dict[str, int]
    counted: float


class RejectedList:
    """List of rejected samples of one source; thread-safe.

    Args:
        store: store of the source.
        source: name of the source.
    """

    def __init__(self, store: Store, source: str) -> None:
        self._store, self._key = store, f"{source}/rejected.jsonl"
        self._lock = threading.Lock()
        self._info: ObjectInfo | None = None
        self._reasons, self._counted = Counter[str](), 0

    def page(self, reason: str, key: str, after: int) -> Rejected:
        """Return a page of rejected samples from an offset of the list.

        Args:
            reason: reason that lines must have; "" for all.
            key: text that the keys of lines must contain, in any case; "" for all.
            after: `after` of the previous page; 0 for the first page.

        Raises:
            ValueError: no line begins at `after`. StoreError: the list cannot be read.
        """
        try:
            info = self._store.head(self._key)
        except MissingKey:  # a reindexed source, or one from an earlier release
            return Rejected([], None, {}, 1.0)
        inside = 0 < after < info.size
        if after and not (inside and self._store.get(self._key, after - 1, 1) == b"\n"):
            raise ValueError(f"after={after}: no line of {self._key} begins there")
        reasons, counted = self._count(info)
        lines, end = list[dict[str, str]](), after
        for end, line in self._lines(info, after):
            one = _rejected(line)
            if reason in ("", one["reason"]) and key.lower() in one["key"].lower():
                lines.append(one)
            if len(lines) == LINES or end - after >= STRETCH:
                break
        return Rejected(lines, end if end < info.size else None, reasons, counted)

    def _count(self, info: ObjectInfo) -> tuple[dict[str, int], float]:
        with self._lock:
            if info != self._info:
                self._info, self._reasons, self._counted = info, Counter(), 0
            begin = self._counted
            for end, line in self._lines(info, begin):
                reason = _rejected(line)["reason"]
                known = reason in self._reasons or len(self._reasons) < _REASONS
                self._reasons[reason if known else _OTHERS] += 1
                self._counted = end
                if end - begin >= STRETCH:
                    break
            share = self._counted / info.size if info.size else 1.0
            return dict(self._reasons.most_common()), share

    def _lines(self, info: ObjectInfo, begin: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset of the next line, line) from an offset on.

        Lines that are too long are cut; a line longer than a stretch ends the iteration.
        """
        at, rest, left_out = begin, b"", 0
        for offset in range(begin, info.size, _PIECE):
            length = min(_PIECE, info.size - offset)
            piece = self._store.get(self._key, offset, length, etag=info.etag)
            *whole, last = piece.split(b"\n")
            for part in whole:
                line = rest + part
                at += len(line) + left_out + 1
                yield at, line
                rest, left_out = b"", 0
            rest += last
            left_out += len(rest[LONGEST + 1 :])
            rest = rest[: LONGEST + 1]
            if left_out > STRETCH:
                break
        if rest:
            yield info.size, rest


def _rejected(line: bytes) -> dict[str, str]:
    """Return the fields of a line, or a note that the line is unreadable."""
    found = fields_of(line, ("key", "reason", "detail"))
    return found or {"key": "", "reason": UNREADABLE, "detail": begin_of(line)}
