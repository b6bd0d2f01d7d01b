"""The vision plan of a step: who encodes which media item, and who receives which of its tokens.

A function of metadata, the same on every rank (phase 0). Two tables:

    shares   an item, or a part of one that several ranks encode together, on its rank
    spans    a run of an item's tokens that goes from the rank that encodes it to the first-stage
             rank that holds these places of the row (under context or tensor parallelism the
             tokens of one item may lie on several)

Both ends of the exchange read the same spans, so they agree on what is sent without communication.
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
    """What ranks encode: whole items, or token ranges of split ones. Columns of equal length.

    Attributes:
        item: number of the item in the step.
        rank: who encodes it.
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
    """Runs of tokens on their way. Columns of equal length.

    Attributes:
        item: number of the item in the step.
        begin, count: which of its tokens.
        source, dest: rank that encodes them, first-stage rank that needs them.
        microbatch, position: where they go: microbatch of the replica, place in what `dest` holds
            of it.
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
    """Where the items of a step are needed.

    Attributes:
        microbatch: of the replica, [items].
        position: place of the item's first token in its microbatch, [items].
        ranks: first-stage rank of each part of the microbatch, [items, parts].
        holder: part that holds each granule of a microbatch, [granules].
        offset: where the granule begins inside that part, [granules].
        granule: tokens of a granule.
    """

    microbatch: Ints
    position: Ints
    ranks: Ints
    holder: Ints
    offset: Ints
    granule: int

    @property
    def home(self) -> Ints:
        """The rank that needs an item's first token, [items]."""
        part = self.holder[self.position // self.granule]
        return self.ranks[np.arange(len(part)), part]


@dataclass(frozen=True)
class VisionPlan:
    """Who encodes each item of a step, and who needs it. The same on every rank.

    Attributes:
        rank: first of the ranks that encode item i, [items].
        parts: how many do, [items].
        home: first-stage rank that needs its first token, [items].
        tokens, patches: of item i, [items].
        costs: predicted seconds of item i on one rank, [items].
        split_efficiency: what is left of a rank's speed when it shares an item.
        order: all ranks, those that share their media side by side; an item that several ranks
            encode lies on neighbours in this order, [ranks].
        spans: which tokens go from which rank to which, and where they lie there.
        bubbles: when each item that one rank encodes is encoded inside the pipeline; None: all are
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
        """Ranks of the job."""
        return len(self.order)

    @cached_property
    def shares(self) -> Shares:
        """Everything that is encoded, in the order of items and members."""
        return shares_of(self.rank, self.parts, self.tokens, self.order)

    def together(self) -> Self:
        """Return the plan of those items alone that several ranks encode."""
        found = replace(self, spans=self.spans[self.parts[self.spans.item] > 1], bubbles=None)
        found.__dict__["shares"] = self.shares[self.shares.parts > 1]
        return found

    def encoded_by(self, rank: int) -> Shares:
        """Return what `rank` encodes, in its order: shared items first, then whole ones.

        Blocks of ranks are nested and all begin with the items of the largest blocks, so no
        deadlock is possible. Whole items are in the order in which they are sent.
        """
        mine = self.shares[self.shares.rank == rank]
        alone = mine.parts == 1
        dest = np.where(alone, self.home[mine.item], 0)
        return mine[np.lexsort((mine.item, dest, -mine.parts))]

    def fetched_by(self, rank: int) -> Ints:
        """Return the items whose pixels `rank` reads: an item that is shared is read once."""
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
        """Return the embeddings that each rank sends, to itself too, [ranks]."""
        return _sums(self.spans.source, self.spans.count, self.num_ranks)

    def tokens_received(self) -> Ints:
        """Return the embeddings that each rank receives, from itself too, [ranks]."""
        return _sums(self.spans.dest, self.spans.count, self.num_ranks)

    def tokens_away(self) -> tuple[Ints, Ints]:
        """Return the embeddings that each rank sends to others, and receives, [ranks] each."""
        away = self.spans[self.spans.source != self.spans.dest]
        sent = _sums(away.source, away.count, self.num_ranks)
        return sent, _sums(away.dest, away.count, self.num_ranks)

    def tokens_held(self) -> Ints:
        """Return the most embeddings that each rank holds at a time, [ranks].

        What it encodes, twice while it is put together or sorted; what it receives, as it arrived
        and as leaves.
        """
        return 2 * (self.tokens_sent() + self.tokens_received())

    def predicted_seconds(self) -> Floats:
        """Return the encoder's predicted seconds of each rank in this step, float64 [ranks]."""
        shares = self.shares
        costs = self.costs[shares.item]
        seconds = seconds_of_part(costs, shares.parts, self.split_efficiency)
        return np.bincount(shares.rank, seconds, self.num_ranks).astype(np.float64)

    def patches_per_rank(self) -> Floats:
        """Return the patches that each rank encodes, float64 [ranks]."""
        shares = self.shares
        part = (shares.end - shares.begin) / np.maximum(1, self.tokens[shares.item])
        weights = self.patches[shares.item] * part
        return np.bincount(shares.rank, weights, self.num_ranks).astype(np.float64)


def shares_of(rank: Ints, parts: Ints, tokens: Ints, order: Ints) -> Shares:
    """Return one row for each item and each rank that encodes some of it; see `VisionPlan`."""
    item = np.repeat(np.arange(len(rank)), parts)
    first = np.repeat(np.cumsum(parts) - parts, parts)
    member = np.arange(len(item)) - first
    begin = token_border(tokens[item], parts[item], member)
    end = token_border(tokens[item], parts[item], member + 1)
    place = np.argsort(order)
    return Shares(item, order[place[rank[item]] + member], parts[item], member, begin, end)


def spans_of(shares: Shares, where: Destinations) -> Spans:
    """Cut what is encoded at the borders of what is needed."""
    at = where.position[shares.item]
    first = (at + shares.begin) // where.granule
    last = (at + shares.end - 1) // where.granule
    pieces = np.where(shares.end > shares.begin, last - first + 1, 0)
    of = np.repeat(np.arange(len(shares)), pieces)
    granule = first[of] + np.arange(len(of)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    start = granule * where.granule - at[of]  # in tokens of the item
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
    """Return begin, begin + 1, ... of each run, one run after the other, int64 [sum of counts]."""
    before = np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(begins, counts) + np.arange(len(before)) - before


def _sums(places: Ints, weights: Ints, size: int) -> Ints:
    return np.bincount(places, weights, size).astype(np.int64)


def grids_of(plan: GlobalPlan) -> Ints:
    """Return the patch grids (frames, height, width) of a plan's items, int64 [items, 3]."""
    items = plan.items
    return np.stack([items.frames, items.grid_h, items.grid_w], axis=1).astype(np.int64)
