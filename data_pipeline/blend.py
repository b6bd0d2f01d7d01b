"""Which source a position of the stream draws from: exact shares, in closed form.

Positions fall into blocks of 256. How many draws of a block go to each source follows from
Webster's apportionment (each source's k-th draw is due at time (2k + 1) / (2 weight)), so the
shares hold in every block, rounding errors never add up, and the counts up to any position are a
table lookup: weights are whole numbers of UNITS, after UNITS draws the pattern of counts repeats.
Largest remainders block by block would lose small sources (a quota below half a draw rounds to
nothing for ever), and on running totals a count can go down. Inside a block the sources stand in
an order keyed by (seed, block).

A change of shares appends a segment {start, weights}; what lies before `start` never changes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_pipeline.order import keyed, mix

BLOCK = 256
UNITS = 1 << 18  # resolution of a weight: 4 draws in a million


@dataclass(frozen=True)
class Segment:
    """One stretch of the stream with constant weights.

    Attributes:
        start: its first position.
        weights: draws of each source in UNITS draws; they sum to UNITS.
        counts: draws of each source before `start`.
    """

    start: int
    weights: tuple[int, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class SourceTotals:
    """What one epoch of a source delivers: draws, tokens, and media tokens among them."""

    name: str
    samples: int
    tokens: int
    vision_tokens: int


def append_segment(
    segments: Sequence[Segment], start: int, weights: Sequence[int], seed: int
) -> tuple[Segment, ...]:
    """Return the segments with one more that begins at `start` (0 for the first one).

    Raises:
        ValueError: weights that are not UNITS in sum, or a start that is not after the last one.
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
    counts = counts_before(start, segments, seed)
    return (*segments, Segment(start, tuple(weights), tuple(counts.tolist())))


def blend(
    positions: ArrayLike, segments: Sequence[Segment], seed: int
) -> tuple[NDArray[np.int16], NDArray[np.int64]]:
    """Return (source int16 [n], draw number int64 [n]) of positions [n] >= 0, in any order."""
    places = np.asarray(positions, np.int64).ravel()
    if places.size and places.min() < 0:
        raise ValueError(f"position {places.min()} is negative")
    starts = np.array([segment.start for segment in segments])
    owner = np.searchsorted(starts, places, side="right") - 1
    source = np.empty(places.size, np.int16)
    draw = np.empty(places.size, np.int64)
    for number, segment in enumerate(segments):
        chosen = np.flatnonzero(owner == number)
        block, slot = np.divmod(places[chosen] - segment.start, BLOCK)
        blocks, which = np.unique(block, return_inverse=True)
        sources, draws = _block_table(segment, blocks, seed)
        source[chosen], draw[chosen] = sources[which, slot], draws[which, slot]
    return source, draw


def counts_before(position: int, segments: Sequence[Segment], seed: int) -> NDArray[np.int64]:
    """Return the draws of each source in positions 0..position-1, int64 [sources]."""
    segment = [s for s in segments if s.start <= position][-1]
    block, slot = divmod(position - segment.start, BLOCK)
    counts = _border_counts(segment, np.array([block]))[0]
    if slot:
        sources, _ = _block_table(segment, np.array([block]), seed)
        counts = counts + np.bincount(sources[0, :slot], minlength=counts.size)
    return counts


def _block_table(
    segment: Segment, blocks: NDArray[np.int64], seed: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return (source, draw), int64 [blocks, BLOCK] each, of whole blocks of a segment."""
    num_sources = len(segment.weights)
    before, after = _border_counts(segment, blocks), _border_counts(segment, blocks + 1)
    counts = after - before
    grouped = np.repeat(np.tile(np.arange(num_sources), blocks.size), counts.ravel())
    grouped = grouped.reshape(blocks.size, BLOCK)
    # The k-th of a source's entries in the block is its draw before + k.
    first = np.cumsum(counts, axis=1) - counts
    rank = np.arange(BLOCK) - np.take_along_axis(first, grouped, axis=1)
    grouped_draws = np.take_along_axis(before, grouped, axis=1) + rank

    key = keyed(seed, "blend", segment.start)
    words = (blocks[:, None] * BLOCK + np.arange(BLOCK)).astype(np.uint64)
    shuffled = np.argsort(mix(mix(words) ^ np.uint64(key)), axis=1, kind="stable")
    source = np.take_along_axis(grouped, shuffled, axis=1)
    # Draw numbers rise with position: the j-th place held by a source takes its j-th draw.
    places = np.argsort(source, axis=1, kind="stable")
    draw = np.empty_like(grouped_draws)
    np.put_along_axis(draw, places, grouped_draws, axis=1)
    return source, draw


def _border_counts(segment: Segment, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the draws of each source before each block of a segment, int64 [blocks, sources]."""
    cycle, place = np.divmod(blocks, UNITS // BLOCK)
    weights = np.array(segment.weights, np.int64)
    table = _cycle_table(segment.weights)
    return np.array(segment.counts, np.int64) + cycle[:, None] * weights + table[place]


@lru_cache(maxsize=16)
def _cycle_table(weights: tuple[int, ...]) -> NDArray[np.int64]:
    """Return the draws of each source before each block of one cycle, [UNITS / BLOCK, sources]."""
    # Numerators are below 2**37 and divisions are correctly rounded: equal times compare equal
    # on every machine, and the stable sort gives them to the lower source.
    due = [(2 * np.arange(w) + 1) * (UNITS / 2) / w if w else np.empty(0) for w in weights]
    source = np.repeat(np.arange(len(weights)), weights)
    source = source[np.argsort(np.concatenate(due), kind="stable")].reshape(-1, BLOCK)
    counts = np.stack([(source == s).sum(axis=1) for s in range(len(weights))], axis=1)
    return np.cumsum(counts, axis=0) - counts


def weights_for_ratio(
    totals: Sequence[SourceTotals], shares: Sequence[float], vision_token_ratio: float | None
) -> tuple[int, ...]:
    """Return draw weights (whole numbers of UNITS) that give the wanted shares of tokens.

    With a ratio, shares are token shares inside two groups, sources with media tokens and sources
    without, and the groups are weighted so that expected media tokens over expected tokens equal
    the ratio. Without one, shares are token shares over all sources.

    Raises:
        ValueError: the ratio cannot be reached (the message gives the reachable range), or a
            source would be drawn less than once in UNITS draws.
    """
    parts = [Fraction(share) for share in shares]
    if vision_token_ratio is not None:
        parts = _grouped_shares(totals, parts, Fraction(vision_token_ratio))
    # Tokens per draw turn token shares into draw shares. Exact fractions: no float sum here may
    # round differently on another machine.
    draws = [part * t.samples / t.tokens for part, t in zip(parts, totals)]
    weights = apportion(draws, UNITS)
    for total, weight in zip(totals, weights):
        if weight == 0:
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
        (s / media * t.vision_tokens / t.tokens for s, t in zip(shares, totals) if t.vision_tokens),
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
        s / media * group if t.vision_tokens else s / plain * (1 - group)
        for s, t in zip(shares, totals)
    ]


def apportion(shares: Sequence[Fraction], total: int) -> tuple[int, ...]:
    """Split `total` in proportion to `shares` by largest remainders; ties go to the earlier."""
    whole = sum(shares, Fraction(0))
    exact = [share / whole * total for share in shares]
    counts = [int(e) for e in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)
