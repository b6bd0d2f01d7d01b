"""What an ingest left out, of a list of any length: a part of it at a time.

Lines are looked through from a place in the file on, a stretch a request, which says where the next
one goes on. Their numbers by reason are counted once, as far as the requests so far went.
"""

import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import MissingKey, ObjectInfo, Store

LINES = 200  # on a page
STRETCH = 16 << 20  # bytes that a request looks through, and as many that it counts
_PIECE = 4 << 20


class Rejected(NamedTuple):
    """Rejected samples.

    Attributes:
        lines: key, reason and detail of those that were asked for, a page of them.
        after: bytes of the list that they, and others before them, take up; None at its end.
        reasons: how many there are of each reason, in that part of the list which was counted.
        counted: which part that is, 0 to 1.
    """

    lines: list[dict[str, Any]]
    after: int | None
    reasons: dict[str, int]
    counted: float


class RejectedList:
    """The list of one source, from any thread.

    Args:
        store: where the source lies.
        source: its name.
    """

    def __init__(self, store: Store, source: str) -> None:
        self._store, self._key = store, f"{source}/rejected.jsonl"
        self._lock = threading.Lock()
        self._info: ObjectInfo | None = None
        self._reasons, self._counted = Counter[str](), 0

    def page(self, reason: str, key: str, after: int) -> Rejected:
        """Return rejected samples from a place of the list on.

        Args:
            reason, key: that lines must have, or have in them; "" for all.
            after: of the page before; 0 for the first one.

        Raises:
            ValueError: `after` is not where a line begins. StoreError: the list cannot be read.
        """
        try:
            info = self._store.head(self._key)
        except MissingKey:  # reindexed, or of an earlier version
            return Rejected([], None, {}, 1.0)
        inside = 0 < after < info.size
        if after and not (inside and self._store.get(self._key, after - 1, 1) == b"\n"):
            raise ValueError(f"after={after}: no line of {self._key} begins there")
        reasons, counted = self._count(info)
        lines, end = list[dict[str, Any]](), after
        for end, line in self._lines(info, after):
            one = parse_json(line, self._key)
            if reason in ("", one["reason"]) and key.lower() in str(one["key"]).lower():
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
                self._reasons[parse_json(line, self._key)["reason"]] += 1
                self._counted = end
                if end - begin >= STRETCH:
                    break
            share = self._counted / info.size if info.size else 1.0
            return dict(self._reasons.most_common()), share

    def _lines(self, info: ObjectInfo, begin: int) -> Iterator[tuple[int, bytes]]:
        """Yield lines from a place on, each with the place of the next one."""
        at, rest = begin, b""
        for offset in range(begin, info.size, _PIECE):
            length = min(_PIECE, info.size - offset)
            piece = self._store.get(self._key, offset, length, etag=info.etag)
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                at += len(line) + 1
                yield at, line
        if rest:
            yield info.size, rest
