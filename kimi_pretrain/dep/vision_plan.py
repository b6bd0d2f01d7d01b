"""Vision plan of a step: assignment of media items to ranks, and transfers of their tokens.

The plan depends only on metadata and is the same on every rank (phase 0). It has two tables:

    shares   an item, or a part of an item that several ranks encode together, with its rank
    spans    a run of an item's tokens that goes from the encoding rank to the first-stage rank that
             holds these positions of the row (under context or tensor parallelism, the tokens of
             one item may be spread over several ranks)

Both ends of the exchange read the same spans, so they agree on the messages without communication.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.dep.places import seconds_of_part, token_border
from kimi_pretrain.dep.step_bubbles import StepBubbles

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class _Columns:
    """A table: frozen columns of equal length."""

    item: Ints

    def __len__(self) -> int:
        return len(self.item)

    def __getitem__(self, index: Ints | NDArray[np.bool_]) -> Self:
        return type(self)(*(column[index] for column in vars(self).values()))


@dataclass(frozen=True)
class Shares(_Columns):
    """Units of encoding: whole items, or token ranges of split items. Columns of equal length.

    Attributes:
        item: number of the item in the step.
        rank: rank that encodes the share.
        parts, member: number of sharing ranks; this rank's index among them.
        begin, end: range of the item's tokens.
    """

    item: Ints
    rank: Ints
    parts: Ints
    member: Ints
    begin: Ints
    end: Ints


@dataclass(frozen=True)
class Spans(_Columns):
    """Runs of tokens in transit. Columns of equal length.

    Attributes:
        item: number of the item in the step.
        begin, count: range of the item's tokens.
        source, dest: rank that encodes them, first-stage rank that needs them.
        microbatch, position: destination: microbatch of the replica, position in the part of the
            microbatch that `dest` holds.
    """

    item: Ints
    begin: Ints
    count: Ints
    source: Ints
    dest: Ints
    microbatch: Ints
    position: Ints


@dataclass(frozen=True)
class Destinations:
    """Destinations of the items of a step.

    Attributes:
        microbatch: microbatch of the replica, [items].
        position: position of the item's first token in its microbatch, [items].
        ranks: first-stage rank of each part of the microbatch, [items, parts].
        holder: part that holds each granule of a microbatch, [granules].
        offset: begin of the granule inside that part, [granules].
        granule: tokens per granule.
    """

    microbatch: Ints
    position: Ints
    ranks: Ints
    holder: Ints
    offset: Ints
    granule: int

    @property
    def home(self) -> Ints:
        """First-stage rank that needs an item's first token, [items]."""
        part = self.holder[self.position // self.granule]
        return self.ranks[np.arange(len(part)), part]


@dataclass(frozen=True)
class VisionPlan:
    """Assignment and destinations of all items of a step. The same on every rank.

    Attributes:
        rank: first of the ranks that encode item i, [items].
        parts: number of ranks that encode item i, [items].
        home: first-stage rank that needs its first token, [items].
        tokens, patches: tokens and patches of item i, [items].
        costs: predicted seconds of item i on one rank, [items].
        split_efficiency: fraction of its speed that a rank keeps when it shares an item.
        order: all ranks, with those that share their media adjacent; the ranks that encode an item
            together are neighbours in this order, [ranks].
        spans: token transfers between ranks, with their destination positions.
        bubbles: schedule of single-rank items inside the pipeline; None: all items are encoded
            before and after it.
    """

    rank: Ints
    parts: Ints
    home: Ints
    tokens: Ints
    patches: Ints
    costs: Floats
    split_efficiency: float
    order: Ints
    spans: Spans
    bubbles: StepBubbles | None = None

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the job."""
        return len(self.order)

    @cached_property
    def shares(self) -> Shares:
        """All shares, in the order of items and members."""
        return shares_of(self.rank, self.parts, self.tokens, self.order)

    def together(self) -> Self:
        """Return the plan restricted to items that several ranks encode."""
        found = replace(self, spans=self.spans[self.parts[self.spans.item] > 1], bubbles=None)
        found.__dict__["shares"] = self.shares[self.shares.parts > 1]
        return found

    def encoded_by(self, rank: int) -> Shares:
        """Return the shares of `rank` in its execution order: shared items first, then whole items.

        Blocks of ranks are nested and all begin with the items of the largest blocks, which
        excludes deadlocks. Whole items are in the order in which they are sent.
        """
        mine = self.shares[self.shares.rank == rank]
        alone = mine.parts == 1
        dest = np.where(alone, self.home[mine.item], 0)
        return mine[np.lexsort((mine.item, dest, -mine.parts))]

    def fetched_by(self, rank: int) -> Ints:
        """Return the items whose pixels `rank` reads; one rank reads a shared item."""
        return np.flatnonzero(self.rank == rank)

    def sent_by(self, rank: int) -> Spans:
        """Return the spans that `rank` sends, in the order of destination, item and token."""
        mine = self.spans[self.spans.source == rank]
        return mine[np.lexsort((mine.begin, mine.item, mine.dest))]

    def received_by(self, rank: int) -> Spans:
        """Return the spans that `rank` receives, in the order of source, item and token."""
        mine = self.spans[self.spans.dest == rank]
        return mine[np.lexsort((mine.begin, mine.item, mine.source))]

    def tokens_sent(self) -> Ints:
        """Return the embeddings that each rank sends, including to itself, [ranks]."""
        return _sums(self.spans.source, self.spans.count, self.num_ranks)

    def tokens_received(self) -> Ints:
        """Return the embeddings that each rank receives, including from itself, [ranks]."""
        return _sums(self.spans.dest, self.spans.count, self.num_ranks)

    def tokens_away(self) -> tuple[Ints, Ints]:
        """Return the embeddings that each rank sends to others, and receives, [ranks] each."""
        away = self.spans[self.spans.source != self.spans.dest]
        sent = _sums(away.source, away.count, self.num_ranks)
        return sent, _sums(away.dest, away.count, self.num_ranks)

    def tokens_held(self) -> Ints:
        """Return the largest number of embeddings that each rank holds at a time, [ranks].

        Encoded embeddings count twice, because concatenating or sorting copies them. Received
        embeddings count twice, as received and as leaves.
        """
        return 2 * (self.tokens_sent() + self.tokens_received())

    def predicted_seconds(self) -> Floats:
        """Return each rank's predicted seconds of encoder work in this step, float64 [ranks]."""
        shares = self.shares
        costs = self.costs[shares.item]
        seconds = seconds_of_part(costs, shares.parts, self.split_efficiency)
        return np.bincount(shares.rank, seconds, self.num_ranks).astype(np.float64)

    def patches_per_rank(self) -> Floats:
        """Return the number of patches that each rank encodes, float64 [ranks]."""
        shares = self.shares
        part = (shares.end - shares.begin) / np.maximum(1, self.tokens[shares.item])
        weights = self.patches[shares.item] * part
        return np.bincount(shares.rank, weights, self.num_ranks).astype(np.float64)


def shares_of(rank: Ints, parts: Ints, tokens: Ints, order: Ints) -> Shares:
    """Return one share for each item and each rank that encodes part of it; see `VisionPlan`."""
    item = np.repeat(np.arange(len(rank)), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    member = np.arange(len(item)) - first
    begin = token_border(tokens[item], parts[item], member)
    end = token_border(tokens[item], parts[item], member + 1)
    place = np.argsort(order)
    return Shares(item, order[place[rank[item]] + member], parts[item], member, begin, end)


def spans_of(shares: Shares, where: Destinations) -> Spans:
    """Cut shares at the borders of granules, and return the resulting spans."""
    at = where.position[shares.item]
    first = (at + shares.begin) // where.granule
    last = (at + shares.end - 1) // where.granule
    pieces = np.where(shares.end > shares.begin, last - first + 1, 0)
    of = np.repeat(np.arange(len(shares)), pieces)
    granule = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = granule * where.granule - at[of]  # in tokens relative to the item
    begin = np.maximum(shares.begin[of], start)
    end = np.minimum(shares.end[of], start + where.granule)
    item, part = shares.item[of], where.holder[granule]
    return Spans(
        item=item,
        begin=begin,
        count=end - begin,
        source=shares.rank[of],
        dest=where.ranks[item, part],
        microbatch=where.microbatch[item],
        position=where.offset[granule] + begin - start,
    )


def runs(begins: Ints, counts: Ints) -> Ints:
    """Return begin, begin + 1, ... of all runs, concatenated, int64 [sum of counts]."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(begins, counts) + np.arange(len(before)) - before


def _sums(places: Ints, weights: Ints, size: int) -> Ints:
    return np.bincount(places, weights, size).astype(np.int64)


def grids_of(plan: GlobalPlan) -> Ints:
    """Return the patch grids (frames, height, width) of a plan's items, int64 [items, 3]."""
    items = plan.items
    return np.stack([items.frames, items.grid_h, items.grid_w], axis=1).astype(np.int64)
