"""Assigns a source to each position of the stream, with exact shares at every position.

Since the last change of shares, the number of draws of each source differs from its share by less
than one draw at every position. This is just-in-time sequencing (Tijdeman, "The chairman assignment
problem", 1980; Steiner and Yeomans, 1993). Each draw of a source has a first and a last position at
which this holds, and always choosing the draw with the earliest last position satisfies all bounds.
Largest remainders per block would lose small sources, because a quota below half a draw always
rounds to zero.

Weights are whole numbers that sum to UNITS, so the sequence repeats after UNITS draws. It is
computed once, and any position is a table lookup. The seed decides which *samples* are drawn
(`plan.order`); the sequence of sources is deterministic and follows from the weights.

A change of shares appends a segment {start, weights}; positions before `start` never change.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

UNITS = 1 << 18  # resolution of a weight: 4 draws in a million


@dataclass(frozen=True)
class Segment:
    """Segment of the stream with constant weights.

    Attributes:
        start: first position of the segment.
        weights: number of draws of each source per UNITS draws; they sum to UNITS.
        counts: number of draws of each source before `start`.
    """

    start: int
    weights: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class SourceTotals:
    """Number of draws, tokens and media tokens in one epoch of a source."""

    name: str
    samples: int
    tokens: int
    vision_tokens: int


def append_segment(
    segments: Sequence[Segment], start: int, weights: Sequence[int]
) -> tuple[Segment, ...]:
    """Return the segments with a new one that begins at `start` (0 for the first segment).

    Raises:
        ValueError: the weights do not sum to UNITS, or `start` is not after the last start.
    """
    if sum(weights) != UNITS or min(weights) < 0:
        raise ValueError(f"weights {tuple(weights)} must be 0 or more and sum to {UNITS}")
    if not segments:
        if start != 0:
            raise ValueError(f"the first blend segment starts at {start}; it must start at 0")
        return (Segment(0, tuple(weights), (0,) * len(weights)),)
    last = segments[-1]
    if len(weights) != len(last.weights):
        raise ValueError(f"{len(weights)} weights, but the blend has {len(last.weights)} sources")
    if start <= last.start:
        raise ValueError(f"blend segment at {start} does not come after the last, {last.start}")
    counts = counts_before(start, segments)
    return (*segments, Segment(start, tuple(weights), tuple(counts.tolist())))


def blend(
    positions: ArrayLike, segments: Sequence[Segment]
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return source, int16 [n], and draw number, int64 [n], of positions [n] >= 0 in any order."""
    places = np.asarray(positions, np.int64).ravel()
    if places.size and places.min() < 0:
        raise ValueError(f"position {places.min()} is negative")
    starts = np.array([segment.start for segment in segments])
    owner = np.searchsorted(starts, places, side="right") - 1
    source = np.empty(places.size, np.int16)
    draw = np.empty(places.size, np.int64)
    for number, segment in enumerate(segments):
        chosen = np.flatnonzero(owner == number)
        if not chosen.size:
            continue
        cycle, place = np.divmod(places[chosen] - segment.start, UNITS)
        sources, ranks = _cycle(segment.weights)
        source[chosen] = sources[place]
        before = np.array(segment.counts, np.int64)[sources[place]]
        whole = cycle * np.array(segment.weights, np.int64)[sources[place]]
        draw[chosen] = before + whole + ranks[place]
    return source, draw


def counts_before(position: int, segments: Sequence[Segment]) -> NDArray[np.int64]:
    """Return the number of draws of each source in positions 0..position-1, int64 [sources]."""
    segment = [s for s in segments if s.start <= position][-1]
    cycle, place = divmod(position - segment.start, UNITS)
    counts = np.array(segment.counts, np.int64) + cycle * np.array(segment.weights, np.int64)
    if place:
        sources, _ = _cycle(segment.weights)
        counts += np.bincount(sources[:place], minlength=counts.size)
    return counts


def position_of(source: int, draw: int, segment: Segment) -> int:
    """Return the position of a draw of `source`, which `segment` must hold; its end is ignored."""
    cycle, rank = divmod(draw - segment.counts[source], segment.weights[source])
    sources, _ = _cycle(segment.weights)
    place = np.flatnonzero(sources == source)[rank]
    return segment.start + cycle * UNITS + int(place)


@lru_cache(maxsize=64)
def _cycle(weights: tuple[int, ...]) -> tuple[NDArray[np.int16], NDArray[np.int32]]:
    """Return one cycle: source, int16 [UNITS], and the draw's number within it, int32 [UNITS].

    After t positions a source of weight w must have been drawn more than w * t / UNITS - 1 times
    and fewer than w * t / UNITS + 1 times. So its draw k is released at position k * UNITS // w and
    due by position ceil((k + 1) * UNITS / w) - 1. Each position takes the earliest due draw among
    the released ones.
    """
    owner = np.repeat(np.arange(len(weights)), weights)
    rank = np.concatenate([np.arange(w) for w in weights])
    weight = np.array(weights, np.int64)[owner]
    released = rank * UNITS // weight
    due = -(-(rank + 1) * UNITS // weight)
    order = np.argsort(released, kind="stable")  # equal releases are ordered by source
    # One integer combines due position and source, so ties go to the lower source.
    tickets = (due[order] * len(weights) + owner[order]).tolist()
    ready: list[int] = []
    taken: list[int] = []
    start = 0
    ends = np.searchsorted(released[order], np.arange(UNITS), side="right").tolist()
    for end in ends:
        for ticket in tickets[start:end]:
            heapq.heappush(ready, ticket)
        start = end
        taken.append(heapq.heappop(ready))
    source = np.array(taken, np.int64) % len(weights)
    ranks = np.empty(UNITS, np.int32)
    for number, w in enumerate(weights):
        ranks[source == number] = np.arange(w)
    source = source.astype(np.int16)
    source.flags.writeable = ranks.flags.writeable = False
    return source, ranks


def weights_for_ratio(
    totals: Sequence[SourceTotals], shares: Sequence[float], vision_token_ratio: float | None
) -> tuple[int, ...]:
    """Return draw weights (integers that sum to UNITS) that give the requested token shares.

    A source with share 0 is not drawn. With a ratio, shares are token shares inside two groups,
    sources with and without media tokens, and the groups are weighted so that expected media tokens
    over expected tokens equal the ratio. Without a ratio, shares are token shares over all sources.

    Raises:
        ValueError: the ratio cannot be reached (the message gives the reachable range), or a
            source would be drawn less than once in UNITS draws.
    """
    parts = [Fraction(share) for share in shares]
    if not any(parts):
        raise ValueError("no source is left to draw from")
    if vision_token_ratio is not None:
        parts = _grouped_shares(totals, parts, Fraction(vision_token_ratio))
    # Tokens per draw convert token shares into draw shares. Fractions are exact, so no machine
    # rounds differently.
    draws = [part * t.samples / t.tokens for part, t in zip(parts, totals)]
    weights = apportion(draws, UNITS)
    for total, part, weight in zip(totals, parts, weights):
        if part > 0 and weight == 0:
            raise ValueError(
                f"source {total.name!r} would be drawn less than once in {UNITS} draws; "
                "raise its share, lower vision_token_ratio, or leave it out"
            )
    return weights


def _grouped_shares(
    totals: Sequence[SourceTotals], shares: Sequence[Fraction], ratio: Fraction
) -> list[Fraction]:
    media = sum((s for s, t in zip(shares, totals) if t.vision_tokens), Fraction(0))
    plain = sum((s for s, t in zip(shares, totals) if not t.vision_tokens), Fraction(0))
    reach = sum(
        (
            s / (media or 1) * t.vision_tokens / t.tokens
            for s, t in zip(shares, totals)
            if t.vision_tokens
        ),
        Fraction(0),
    )
    if ratio > reach:
        raise ValueError(
            f"vision_token_ratio is {float(ratio):.6g}, but the sources with media hold "
            f"{float(reach):.6g} of their tokens as media tokens; reachable is at most that"
        )
    if not plain and ratio != reach:
        raise ValueError(
            f"vision_token_ratio is {float(ratio):.6g}, but no source is text only, so the ratio "
            f"is fixed at {float(reach):.6g}; add a text source or set vision_token_ratio to null"
        )
    group = ratio / reach  # share of all tokens that come from sources with media
    return [
        s / media * group if t.vision_tokens else s / (plain or 1) * (1 - group)
        for s, t in zip(shares, totals)
    ]


def apportion(shares: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Divide `total` in proportion to `shares` by largest remainders; ties favor earlier shares."""
    whole = sum(shares, Fraction(0))
    exact = [share / whole * total for share in shares]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)
