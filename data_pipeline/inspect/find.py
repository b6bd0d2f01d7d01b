"""Searches the samples of a source by their facts, page by page, for sources of any size.

A search scans a bounded stretch of the source and returns the position where the next search
continues. So every search takes bounded time, even if nothing matches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from data_pipeline.inspect.query import ITEMS, SAMPLES, Facts

STRETCH = 1 << 19
"""Maximum samples that a search scans."""

HOLDS = {
    "": "TRUE",
    "text": "items = 0",
    "images": "images > 0",
    "videos": "videos > 0",
    "regions": "points + boxes + polygons + turns > 0",
    "points": "points > 0",
    "boxes": "boxes > 0",
    "polygons": "polygons > 0",
    "variants": "variants > 0",
}
"""Name of a content filter -> its SQL condition."""

_SIZE = "json_bytes + media_bytes"
_COLUMNS = f"sample, key, tokens, items, images, videos, {_SIZE} AS size"


@dataclass(frozen=True)
class Wanted:
    """Search criteria for samples; None and "" are no restriction.

    Attributes:
        key: substring of the key, case-insensitive.
        holds: a key of `HOLDS`.
        tokens_from, tokens_to, bytes_from, bytes_to, items_from, items_to: minimum and maximum.
        side_from, side_to: minimum and maximum pixels of the longer side of one of the items.
    """

    key: str = ""
    holds: str = ""
    tokens_from: int | None = None
    tokens_to: int | None = None
    bytes_from: int | None = None
    bytes_to: int | None = None
    items_from: int | None = None
    items_to: int | None = None
    side_from: int | None = None
    side_to: int | None = None

    @property
    def asks(self) -> dict[str, Any]:
        """The criteria that are set, by name."""
        every = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in every.items() if value not in (None, "")}


class Found(NamedTuple):
    """A sample: number in the source, key, tokens, items, images, videos, and bytes."""

    sample: int
    key: str
    tokens: int
    items: int
    images: int
    videos: int
    size: int


class Page(NamedTuple):
    """Matching samples in order, and the sample to continue from; None at the end."""

    samples: list[Found]
    after: int | None


def find(facts: Facts, wanted: Wanted, first: int = 0, count: int = 60) -> Page:
    """Return up to `count` matching samples of the stretch that starts at sample `first`.

    Raises:
        ValueError: `wanted.holds` is unknown.
        FactsError: as for `Facts`.
    """
    total = facts.file.about["samples"]
    end = min(first + STRETCH, total)
    where, values = _where(wanted, first, end)
    rows = facts.rows(
        f"SELECT {_COLUMNS} FROM facts WHERE {where} ORDER BY sample LIMIT {int(count)}", values
    )
    samples = [Found(*row) for row in rows]
    following = samples[-1].sample + 1 if len(samples) == count else end
    return Page(samples, following if following < total else None)


def longest(facts: Facts, wanted: Wanted, count: int = 60) -> list[Found]:
    """Return the matching samples with the most tokens."""
    where, values = _where(wanted, 0, facts.file.about["samples"])
    top = facts.rows(
        f"SELECT sample FROM facts WHERE {where} ORDER BY tokens DESC, sample LIMIT {int(count)}",
        values,
    )
    if not top:
        return []
    numbers = ", ".join(str(int(sample)) for (sample,) in top)
    rows = facts.rows(f"SELECT {_COLUMNS} FROM facts WHERE {SAMPLES} AND sample IN ({numbers})")
    return sorted((Found(*row) for row in rows), key=lambda one: (-one.tokens, one.sample))


def count(facts: Facts, wanted: Wanted) -> int:
    """Return the number of matching samples in the source."""
    if not wanted.asks:
        return facts.file.about["samples"]
    where, values = _where(wanted, 0, facts.file.about["samples"])
    ((found,),) = facts.rows(f"SELECT count(*) FROM facts WHERE {where}", values)
    return int(found)


def number_of(facts: Facts, key: str) -> int | None:
    """Return the number of the sample with this key, or None."""
    rows = facts.rows(f"SELECT sample FROM facts WHERE {SAMPLES} AND key = ? LIMIT 1", [key])
    return int(rows[0][0]) if rows else None


def _where(wanted: Wanted, first: int, end: int) -> tuple[str, list[Any]]:
    """Return the SQL condition on rows of samples, and its parameters."""
    if wanted.holds not in HOLDS:
        raise ValueError(f"holds is {wanted.holds!r}; expected one of {', '.join(HOLDS)}")
    # Literal numbers let DuckDB skip row groups by their statistics.
    stretch = f"sample >= {int(first)} AND sample < {int(end)}"
    parts, values = [SAMPLES, stretch, HOLDS[wanted.holds]], list[Any]()
    if wanted.key:
        parts.append("contains(lower(key), ?)")
        values.append(wanted.key.lower())
    for column, name in (("tokens", "tokens"), (f"({_SIZE})", "bytes"), ("items", "items")):
        for condition, value in _between(column, wanted, name):
            parts.append(condition)
            values.append(value)
    sides = list(_between("greatest(height, width)", wanted, "side"))
    if sides:
        inner = " AND ".join([ITEMS, stretch, *(condition for condition, _ in sides)])
        parts.append(f"sample IN (SELECT sample FROM facts WHERE {inner})")
        values += [value for _, value in sides]
    return " AND ".join(parts), values


def _between(column: str, wanted: Wanted, name: str) -> Iterator[tuple[str, int]]:
    for suffix, sign in (("from", ">="), ("to", "<=")):
        value = getattr(wanted, f"{name}_{suffix}")
        if value is not None:
            yield f"{column} {sign} ?", value
