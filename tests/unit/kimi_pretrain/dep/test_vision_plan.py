"""Compares the spans of received tokens with a plain loop, for every way to cut a row."""

import numpy as np
import pytest

from kimi_pretrain.dep.vision_plan import Destinations, VisionPlan, shares_of, spans_of
from kimi_pretrain.parallel.layout import LayoutConfig
from kimi_pretrain.parallel.ranks import Ranks
from kimi_pretrain.parallel.sequence import SequenceParts

ROW = 96  # tokens of a microbatch
MICROBATCHES = 3


def made_plan(cp: int, tp: int, dp: int, items: int, seed: int, *, split: bool, order=None):
    """Return items at random positions in the rows of every replica, on random ranks."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    ranks = Ranks(LayoutConfig(pp=2, dp=dp, cp=cp, tp=tp), per_node=8)
    parts = SequenceParts(ROW, cp, tp)
    replica = np.sort(draw.integers(0, dp, items))
    where = Destinations(
        microbatch=draw.integers(0, MICROBATCHES, items),
        position=draw.integers(0, ROW - 40, items),
        ranks=ranks.first_stage[replica],
        holder=parts.holder,
        offset=parts.offset,
        granule=parts.granule,
    )
    order = np.arange(ranks.world_size) if order is None else order
    share = draw.choice([1, 2, 4], items) if split else np.ones(items, np.int64)
    block = draw.integers(0, ranks.world_size // 4, items) * 4
    tokens = draw.integers(1, 40, items)
    plan = VisionPlan(
        rank=order[block],
        parts=share,
        home=where.home,
        tokens=tokens,
        patches=4 * tokens,
        costs=tokens.astype(float),
        split_efficiency=0.5,
        order=order,
        spans=spans_of(shares_of(order[block], share, tokens, order), where),
    )
    return plan, where, parts


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (1, 2), (4, 1), (2, 2)])
@pytest.mark.parametrize("split", [False, True])
def test_every_token_goes_to_the_rank_that_holds_its_place(cp, tp, split):
    plan, where, parts = made_plan(cp, tp, dp=2, items=30, seed=cp * 10 + tp, split=split)
    held = {part: parts.positions(part).tolist() for part in range(cp * tp)}
    wanted = set()
    for item, tokens in enumerate(plan.tokens.tolist()):
        borders = [tokens * m // plan.parts[item] for m in range(plan.parts[item] + 1)]
        for token in range(tokens):
            place = int(where.position[item]) + token
            (part,) = [part for part, positions in held.items() if place in positions]
            (member,) = [m for m in range(plan.parts[item]) if borders[m] <= token < borders[m + 1]]
            source, dest = int(plan.rank[item]) + member, int(where.ranks[item, part])
            local = held[part].index(place)
            wanted.add((item, token, source, dest, int(where.microbatch[item]), local))
    found = [
        (item, begin + n, source, dest, microbatch, position + n)
        for item, begin, count, source, dest, microbatch, position in zip(
            *(column.tolist() for column in vars(plan.spans).values()), strict=True
        )
        for n in range(count)
    ]
    assert len(found) == len(wanted)
    assert set(found) == wanted


@pytest.mark.parametrize("items", [0, 1, 3, 200])
def test_what_is_sent_is_what_is_received(items):
    plan, *_ = made_plan(2, 1, dp=2, items=items, seed=items, split=True)
    sent = received = 0
    for rank in range(plan.num_ranks):
        out, into = plan.sent_by(rank), plan.received_by(rank)
        assert np.all(np.diff(out.dest) >= 0)  # an all-to-all sends and receives in rank order
        assert np.all(np.diff(into.source) >= 0)
        sent, received = sent + out.count.sum(), received + into.count.sum()
        for other in range(plan.num_ranks):  # a pair's tokens have the same order at both ends
            theirs = plan.received_by(other)
            theirs, mine = theirs[theirs.source == rank], out[out.dest == other]
            assert np.array_equal(mine.item, theirs.item)
            assert np.array_equal(mine.begin, theirs.begin)
    assert sent == received == plan.tokens.sum() == plan.tokens_sent().sum()
    assert np.array_equal(
        plan.tokens_received(),
        [plan.received_by(rank).count.sum() for rank in range(plan.num_ranks)],
    )


def test_shared_items_come_first_and_every_token_is_encoded_once():
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # two groups of ranks that share nothing
    plan, *_ = made_plan(1, 1, dp=4, items=60, seed=5, split=True, order=order)
    place = np.argsort(order)
    seen = np.zeros(int(plan.tokens.sum()), int)
    start = np.cumsum(plan.tokens) - plan.tokens
    for rank in range(plan.num_ranks):
        mine = plan.encoded_by(rank)
        assert np.all(np.diff(mine.parts) <= 0)
        for parts in (2, 4):
            assert np.all(np.diff(mine.item[mine.parts == parts]) > 0)
        assert np.array_equal(place[plan.rank[mine.item]] + mine.member, place[mine.rank])
        for item, begin, end in zip(mine.item, mine.begin, mine.end, strict=True):
            seen[start[item] + begin : start[item] + end] += 1
    assert np.all(seen == 1)
    fetched = np.concatenate([plan.fetched_by(rank) for rank in range(plan.num_ranks)])
    assert sorted(fetched.tolist()) == list(range(60))  # a shared item is read once


def test_loads_count_a_shared_item_on_each_of_its_ranks():
    plan, *_ = made_plan(1, 1, dp=2, items=20, seed=9, split=True)
    wanted = np.zeros(plan.num_ranks)
    for item in range(20):
        for member in range(plan.parts[item]):
            slower = 1.0 if plan.parts[item] == 1 else plan.parts[item] * plan.split_efficiency
            wanted[plan.rank[item] + member] += plan.costs[item] / slower
    assert np.allclose(plan.predicted_seconds(), wanted, rtol=1e-12)
    assert plan.patches_per_rank().sum() == pytest.approx(plan.patches.sum())
