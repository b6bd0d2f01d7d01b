import hashlib

import numpy as np
import pytest

from data_pipeline.keyed import keyed
from data_pipeline.plan.order import ShardOrder, permute

PINNED = ([54, 45, 32, 37, 34, 39], "defbc6d6a8cc11b1")


@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 1000, 4097, 30001])
def test_every_size_is_permuted_one_to_one(size):
    for key in (0, 1, keyed(3, "x")):
        image = permute(np.arange(size), size, key)
        assert np.array_equal(np.sort(image), np.arange(size))


def test_arrays_of_sizes_and_keys_equal_single_calls():
    rng = np.random.default_rng(0)
    size = rng.integers(1, 1 << rng.integers(1, 40, 500))
    index, key = rng.integers(0, size), rng.integers(0, 2**63, 500)
    together = permute(index, size, key)
    one_by_one = [int(permute(i, n, k)) for i, n, k in zip(index, size, key)]
    assert together.tolist() == one_by_one


def test_huge_domains_stay_inside_and_do_not_collide():
    size = 2**62 - 12345
    image = permute(np.arange(size - 20000, size), size, 9)
    assert image.min() >= 0
    assert image.max() < size
    assert np.unique(image).size == 20000


def test_keys_place_an_element_everywhere_equally_often():
    keys = np.array([keyed(k, "spread") for k in range(6000)], np.uint64)
    for size in (2, 3, 5, 12):
        seen = np.bincount(permute(0, size, keys), minlength=size)
        expected = 6000 / size
        chi2 = float(((seen - expected) ** 2 / expected).sum())
        assert chi2 < size + 6 * np.sqrt(2 * size), (size, seen)


def test_neighbours_are_torn_apart():
    image = permute(np.arange(10000), 10000, 5)
    assert abs(np.corrcoef(np.arange(10000), image)[0, 1]) < 0.04
    assert np.mean(np.abs(np.diff(image)) < 100) < 0.03  # a random order gives 0.02


def test_the_order_is_pinned():
    """A change here resumes old runs with other data: it must be deliberate."""
    order = ShardOrder([30, 1, 0, 25, 40, 7], 2, seed=11, source="demo")
    index, _ = order.samples(np.arange(1000))
    digest = hashlib.sha256(index.astype("<i8").tobytes()).hexdigest()
    assert (index[:6].tolist(), digest[:16]) == PINNED


@pytest.mark.parametrize("window", [1, 2, 3, 50])
@pytest.mark.parametrize("sizes", [[1], [5], [0, 3], [4, 0, 0, 1, 9, 2, 2], [10] * 12])
def test_each_epoch_is_a_bijection_and_access_is_random(sizes, window):
    order = ShardOrder(sizes, window, seed=1, source="s")
    total = sum(sizes)
    index, epoch = order.samples(np.arange(4 * total))
    assert np.array_equal(epoch, np.repeat(np.arange(4), total))
    for e in range(4):
        assert np.array_equal(np.sort(index[e * total : (e + 1) * total]), np.arange(total))
    mixed = np.random.default_rng(2).permutation(4 * total)
    fresh = ShardOrder(sizes, window, seed=1, source="s")
    assert np.array_equal(fresh.samples(mixed)[0], index[mixed])
    assert [int(fresh.samples([d])[0][0]) for d in mixed] == index[mixed].tolist()


def test_epochs_seeds_and_sources_differ():
    def one(seed, source, epoch):
        return ShardOrder([20] * 5, 2, seed, source).samples(np.arange(100) + 100 * epoch)[0]

    orders = [one(0, "a", 0), one(0, "a", 1), one(1, "a", 0), one(0, "b", 0)]
    for i, left in enumerate(orders):
        for right in orders[:i]:
            assert np.mean(left == right) < 0.1


def test_a_window_of_draws_touches_few_shards():
    sizes = np.random.default_rng(3).integers(50, 200, 40)
    order = ShardOrder(sizes.tolist(), 4, seed=0, source="s")
    index, _ = order.samples(np.arange(sizes.sum()))
    shard = np.searchsorted(np.cumsum(sizes), index, side="right")
    place, groups = 0, []
    while place < shard.size:  # walk window by window: four new shards, used up together
        size, seen = 0, []
        while place + size < shard.size and len(seen) <= 4:
            if shard[place + size] not in seen:
                if len(seen) == 4:
                    break
                seen.append(shard[place + size])
            size += 1
        assert size == sizes[seen].sum()
        groups.append(seen)
        place += size
    assert sorted(sum(groups, [])) == list(range(40))
    mixed = shard[: sizes[groups[0]].sum()]
    assert np.mean(mixed[1:] != mixed[:-1]) > 0.5  # its four shards are interleaved


def test_refusals_name_the_numbers():
    with pytest.raises(ValueError, match="index 5 is outside a permutation of 5"):
        permute([0, 5], 5, 1)
    with pytest.raises(ValueError, match="'empty' holds 0 samples"):
        ShardOrder([0, 0], 1, 0, "empty")
    with pytest.raises(ValueError, match="shard_window is 0"):
        ShardOrder([1], 0, 0, "s")
    with pytest.raises(ValueError, match="draw -1"):
        ShardOrder([3], 1, 0, "s").samples([-1])


def test_another_thread_s_tables_never_take_the_place_of_one_s_own():
    """Another thread may replace a thread's cached tables before the call returns."""

    class Shared(ShardOrder):
        def __setattr__(self, name, value):
            super().__setattr__(name, others if name == "_recent" and value is not None else value)

    order = ShardOrder([20] * 5, 2, seed=1, source="s")
    order.samples(np.arange(300, 400))
    others = order._recent
    expected = order.samples(np.arange(100))[0].tolist()
    assert Shared([20] * 5, 2, seed=1, source="s").samples(np.arange(100))[0].tolist() == expected
