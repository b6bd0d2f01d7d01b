"""Compares the items shared by blocks of ranks, and their blocks, with brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.heavy_tail import certified_bound, heavy_tailed_tokens
from kimi_pretrain.dep.assign import Placement, Places, choose_splits, loads, place
from kimi_pretrain.dep.cost import CostModel
from kimi_pretrain.dep.makespan import in_units
from kimi_pretrain.dep.places import seconds_of_part
from kimi_pretrain.dep.split import _bounds, place_blocks, predicted
from moonvit3d.config import MoonViTConfig

COSTS = CostModel.from_flops(MoonViTConfig(), 3e14)
EFFICIENCY = 0.85


def generator(seed: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=seed))


def heavy_tailed(number: int, seed: int) -> np.ndarray:
    return np.ceil(4 * (1 + generator(seed).pareto(1.1, number)))


def nodes(ranks: int, size: int) -> Places:
    return Places(np.zeros(ranks, dtype=np.int64), np.arange(ranks) // size)


def slowest(placement: Placement, costs: np.ndarray, ranks: int) -> float:
    return float(loads(placement, costs, ranks, EFFICIENCY).max())


def best_of_all(costs: np.ndarray, parts: tuple[int, ...], ranks: int) -> float:
    """Return the best makespan over every aligned block for every item."""
    choices = np.array(list(product(*(range(0, ranks, number) for number in parts))))
    work = np.zeros((len(choices), ranks))
    for item, number in enumerate(parts):
        seconds = costs[item] if number == 1 else costs[item] / (number * EFFICIENCY)
        for member in range(number):
            work[np.arange(len(choices)), choices[:, item] + member] += seconds
    return float(work.max(axis=1).min())


def test_loads_count_a_shared_item_on_every_member():
    placement = Placement(np.array([2, 0, 3]), np.array([2, 1, 1]))
    found = loads(placement, np.array([3.4, 1.0, 0.5]), 4, 0.85)
    assert found == pytest.approx([1.0, 0.0, 2.0, 2.5])
    item, part, rank = placement.members()
    assert (item.tolist(), part.tolist()) == ([0, 0, 1, 2], [0, 1, 0, 0])
    assert rank.tolist() == [2, 3, 0, 3]


# Blocks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "node", "parts", "first"),
    [
        (8, 8, 2, [0, 2, 4, 6]),
        (7, 8, 2, [0, 2, 4]),  # a block at 6 would exceed the ranks
        (12, 4, 4, [0, 4, 8]),
        (12, 6, 4, [0, 8]),  # a block at 4 would span two nodes
        (24, 8, 16, []),
        (40, 40, 16, [0, 16]),
        (5, 1, 1, [0, 1, 2, 3, 4]),
    ],
)
def test_blocks_are_aligned_whole_and_on_one_node(ranks, node, parts, first):
    assert nodes(ranks, node).blocks(parts).tolist() == first


def test_a_node_that_comes_back_later_is_still_one_node():
    places = Places(np.zeros(6, dtype=np.int64), np.array([0, 0, 1, 0, 1, 1]))
    assert places.blocks(2).tolist() == [0, 4]


@pytest.mark.parametrize("seed", range(12))
def test_blocks_and_the_rest_are_balanced_as_well_as_can_be(seed):
    ranks, costs = 4, heavy_tailed(6, seed)
    parts = np.array([1, 1, 1, 1, 2, 4])[np.argsort(np.argsort(costs, kind="stable"))]
    home = generator(seed).integers(0, ranks, 6)
    found = place(costs, parts, home, Places.together(ranks), EFFICIENCY)
    best = best_of_all(costs, tuple(parts.tolist()), ranks)
    assert best * (1 - 1e-9) <= slowest(found, costs, ranks) <= best * (1 + 1e-9)


@settings(max_examples=50)
@given(st.integers(1, 40), st.sampled_from([1, 3, 4, 8, 16]), st.integers(0, 60), st.integers())
def test_every_placement_keeps_to_the_blocks(ranks, node, items, seed):
    numbers, places = generator(abs(seed) % 2**32), nodes(ranks, node)
    widths = [width for width in (1, 2, 4, 8, 16) if len(places.blocks(width))]
    parts = numbers.choice(np.array(widths), items)
    costs, home = numbers.pareto(1.1, items), numbers.integers(0, ranks, items)
    found = place(costs, parts, home, places, EFFICIENCY)
    assert np.array_equal(found.parts, parts)
    assert np.all(found.rank % parts == 0)
    assert np.all(found.rank + parts <= ranks)
    assert np.all(places.node[found.rank] == places.node[found.rank + parts - 1])
    work = np.where(parts > 1, costs / EFFICIENCY, costs).sum()
    assert loads(found, costs, ranks, EFFICIENCY).sum() == pytest.approx(work)


def test_blocks_go_near_the_rank_in_need():
    ranks, numbers = 32, generator(3)
    places = Places(np.arange(ranks) // 16, np.arange(ranks) // 8)
    home = numbers.permutation(8) * 4 + numbers.integers(0, 4, 8)  # one home in each block of 4
    found = place(np.full(8, 5.0), np.full(8, 4), home, places, EFFICIENCY)
    assert np.array_equal(found.rank, home // 4 * 4)
    crowd = place(np.full(2, 5.0), np.full(2, 4), np.array([9, 10]), places, EFFICIENCY)
    assert sorted(crowd.rank.tolist()) == [8, 12]  # the second block is on the same node


def test_ranks_of_a_block_have_the_same_to_do_before_the_next_block():
    """Otherwise a block's members would wait for each other.

    The most widely shared items come first, and blocks are nested.
    """
    numbers, places = generator(8), nodes(32, 16)
    parts = numbers.choice(np.array([2, 4, 8, 16]), 40)
    work, _ = in_units(seconds_of_part(numbers.pareto(1.1, 40), parts, 0.85), parts, 32)
    rank, base = place_blocks(work, parts, places)
    for width in (16, 8, 4, 2):
        before = np.zeros(32, dtype=np.int64)
        for item in np.flatnonzero(parts > width):
            before[rank[item] : rank[item] + parts[item]] += work[item]
        blocks = before.reshape(-1, width)
        assert np.array_equal(blocks, np.repeat(blocks[:, :1], width, axis=1))
    assert base.sum() == (work * parts).sum()


# Choice of items ----------------------------------------------------------------------------------


def test_near_the_best_of_all_splits_of_tiny_cases():
    ranks, items, off, whole = 4, 4, [], []
    for seed in range(15):
        costs = heavy_tailed(items, seed + 900)
        best = min(best_of_all(costs, parts, ranks) for parts in product((1, 2, 4), repeat=items))
        home, places = np.zeros(items, dtype=np.int64), Places.together(ranks)
        parts = choose_splits(costs, ranks, 4, EFFICIENCY)
        off.append(slowest(place(costs, parts, home, places, EFFICIENCY), costs, ranks) / best)
        alone = place(costs, np.ones(items, dtype=np.int64), home, places, EFFICIENCY)
        whole.append(slowest(alone, costs, ranks) / best)
    assert min(off) > 1 - 1e-9
    assert max(off) < 1.1
    assert np.mean(off) < 1.04
    assert np.mean(whole) > 1.4


@pytest.mark.parametrize(("items", "meet"), [(2, 1), (3, 2), (4, 2), (5, 3), (7, 4)])
def test_bounds_of_whole_items_are_those_of_pigeonholes(items, meet):
    """Some of the equal items must share one of two ranks; each split item reduces their number."""
    bounds = _bounds(np.full(items, 6.0), 2, 1.0, 16)
    left = [-(-(items - split) // 2) for split in range(items + 1)]
    assert left[0] == meet
    assert bounds.tolist() == [max(items * 6.0 / 2, 6.0 * ranks) for ranks in left]


@pytest.mark.parametrize("items_per_rank", [0.5, 1, 2, 3, 4.5, 6, 9, 10, 20])
@pytest.mark.parametrize("ranks", [8, 64, 256])
def test_splits_only_where_the_slowest_rank_gains(ranks, items_per_rank):
    places = nodes(ranks, 16)
    for seed in range(3):
        items = round(ranks * items_per_rank)
        costs = COSTS.seconds(4 * heavy_tailed_tokens(items, seed))
        home = generator(seed).integers(0, ranks, items)
        parts = choose_splits(costs, ranks, 16, EFFICIENCY, places)
        whole = place(costs, np.ones(items, dtype=np.int64), home, places, EFFICIENCY)
        split = place(costs, parts, home, places, EFFICIENCY)
        if (parts > 1).any():
            assert slowest(split, costs, ranks) * 1.01 < slowest(whole, costs, ranks)
        if items_per_rank <= 3:  # the largest item dominates, which is what splits are for
            total = np.where(parts > 1, costs / EFFICIENCY, costs).sum()
            assert (parts > 1).any()
            assert slowest(split, costs, ranks) < 1.25 * total / ranks


def test_does_not_split_what_is_balanced():
    costs = COSTS.seconds(4 * heavy_tailed_tokens(2000, 1))
    assert certified_bound(costs, 64) == pytest.approx(costs.sum() / 64)
    assert np.all(choose_splits(costs, 64, 16, EFFICIENCY) == 1)
    assert np.all(choose_splits(np.full(64, 3.0), 64, 16, EFFICIENCY) == 1)


def test_splits_one_huge_item_as_wide_as_is_allowed():
    costs = np.append(np.ones(64), 60.0)
    for most in (1, 2, 4, 8, 16):
        parts = choose_splits(costs, 64, most, EFFICIENCY, nodes(64, 16))
        assert parts.max() == parts[-1] == most
        assert np.all(parts[:-1] == 1)
    assert choose_splits(costs, 64, 16, EFFICIENCY, nodes(64, 4)).max() == 4
    assert choose_splits(costs, 64, 16, EFFICIENCY, nodes(64, 1)).max() == 1
    assert choose_splits(costs, 6, 16, EFFICIENCY).max() == 4


def test_two_ranks_at_half_their_speed_are_no_help():
    costs = np.append(np.ones(8), 40.0)
    assert choose_splits(costs, 8, 2, 0.5).max() == 1
    assert choose_splits(costs, 8, 4, 0.5).max() == 4
    for seed in range(5):  # nor next to items that more ranks share
        parts = choose_splits(heavy_tailed(40, seed), 64, 16, 0.45)
        assert parts.max() > 2
        assert not (parts == 2).any()


def test_the_prediction_is_near_what_is_reached():
    places = nodes(256, 8)
    for items in (200, 700, 3000):  # with 3,000 the small items are poured, not placed
        costs = COSTS.seconds(4 * heavy_tailed_tokens(items, 2))
        parts = np.where(costs > 0.3, 8, np.where(costs > 0.1, 2, 1)).astype(np.int64)
        found = place(costs, parts, np.zeros(items, dtype=np.int64), places, EFFICIENCY)
        reached = slowest(found, costs, 256)
        assert 0.98 * reached <= predicted(costs, parts, places, EFFICIENCY) <= 1.03 * reached


def test_other_places_than_ranks_are_refused():
    with pytest.raises(ValueError, match="4 ranks, but places of 8"):
        choose_splits(np.ones(3), 4, 2, EFFICIENCY, nodes(8, 4))
