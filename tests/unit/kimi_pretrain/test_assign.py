"""The vision plan against brute force, and its two ends against each other."""

from itertools import product

import numpy as np
import pytest

from kimi_pretrain.dep.assign import (
    load_per_rank,
    longest_processing_time,
    max_over_mean,
    plan_vision,
    round_robin,
)


def heavy_tailed(number: int, seed: int) -> np.ndarray:
    generator = np.random.Generator(np.random.Philox(key=seed))
    return np.ceil(4 * (1 + generator.pareto(1.1, number)))


@pytest.mark.parametrize("seed", range(6))
def test_slowest_rank_is_near_the_best_possible(seed):
    costs, ranks = heavy_tailed(8, seed), 3
    best = min(
        load_per_rank(costs, np.array(choice), ranks).max()
        for choice in product(range(ranks), repeat=len(costs))
    )
    slowest = load_per_rank(costs, longest_processing_time(costs, ranks), ranks).max()
    assert best <= slowest <= best * (4 / 3 - 1 / (3 * ranks)) + 1e-9  # Graham, 1969


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_balances_better_than_counting(ranks):
    costs = heavy_tailed(2000, 3)
    balanced = max_over_mean(load_per_rank(costs, longest_processing_time(costs, ranks), ranks))
    counted = max_over_mean(load_per_rank(costs, round_robin(costs, ranks), ranks))
    bound = max(1.0, costs.max() / (costs.sum() / ranks))
    assert balanced <= counted
    assert balanced <= 1.02 * bound


@pytest.mark.parametrize("items", [0, 1, 3, 200])
def test_what_is_sent_is_what_is_received(items):
    ranks, generator = 5, np.random.Generator(np.random.Philox(key=items))
    patches = heavy_tailed(items, 1).astype(np.int64)
    owner = np.sort(generator.integers(0, 2, items))  # two replicas own all rows
    plan = plan_vision(patches.astype(float), owner, patches // 4, patches, ranks)
    everyone = np.concatenate([plan.encoded_by(rank) for rank in range(ranks)])
    assert sorted(everyone.tolist()) == list(range(items))
    sent = np.array([plan.tokens_to(rank) for rank in range(ranks)])
    received = np.array([plan.tokens_from(rank) for rank in range(ranks)])
    assert np.array_equal(sent, received.T)
    for rank in range(ranks):  # an all-to-all sends and receives rank by rank
        assert np.all(np.diff(plan.owner[plan.encoded_by(rank)]) >= 0)
        assert np.all(np.diff(plan.encoder[plan.received_by(rank)]) >= 0)
    for rank in range(ranks):  # the bytes of one pair are in the same order at both ends
        for source in range(ranks):
            mine = [i for i in plan.received_by(rank) if plan.encoder[i] == source]
            theirs = [i for i in plan.encoded_by(source) if plan.owner[i] == rank]
            assert mine == theirs
