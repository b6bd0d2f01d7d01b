"""Compares combinations of switches under a memory limit with brute force and applies them."""

from itertools import combinations

import pytest

from kimi_pretrain.config import GIB, ConfigError, load_config
from kimi_pretrain.memory.limits import check_memory_limit
from kimi_pretrain.memory.plan import plan_memory
from kimi_pretrain.memory.search import search
from kimi_pretrain.memory.states import Sizes
from tests.dist.jobs import SMALL

RUN = (
    *SMALL, "dep.exchange_budget_mib=1", "dep.max_patches_per_chunk=1024", "data.rows_per_step=64",
    "data.limits={image: 64, frame: 16, side: 16}",
    "train.dtype=bfloat16", "train.attention=portable", "train.offload_min_mib=0",
    "dep.offload_outputs=true", "train.recompute=[norms,swiglu]", "train.rows_per_microbatch=2",
)  # fmt: skip
# All switches that this configuration can still set.
SWITCHES = (
    ("dep.max_patches_per_chunk=512", "dep.max_patches_per_chunk=256"),
    ("train.recompute=[norms,swiglu,mla_up]",), ("train.offload=true",),
    ("train.rows_per_microbatch=1",), ("train.fp8_storage=true",),
)  # fmt: skip


def made(*settings: str):
    return load_config("tiny_cpu", [*RUN, *settings])


def peak(*settings: str) -> int:
    return plan_memory(made(*settings)).fullest.peak


@pytest.fixture(scope="module")
def peaks() -> dict[frozenset[str], int]:
    """Return the peak of every combination, each planned from its settings."""
    chosen = [frozenset[str]()]
    for levels in SWITCHES:
        chosen = [one | {level} for one in chosen for level in levels] + chosen
    return {one: peak(*one) for one in chosen}


@pytest.mark.parametrize("place", [0.0, 0.1, 0.4, 0.9])
def test_what_fits_is_what_brute_force_finds(place, peaks):
    least, most = min(peaks.values()), peaks[frozenset()]
    limit = int(least + place * (most - least))
    found = search(made(), limit)
    own = on_the_same_layout(found)
    fits = {one for one, size in peaks.items() if size <= limit}
    for one in own:
        assert one.fullest.peak == peaks[frozenset(one.settings)] <= limit
        for fewer in range(len(one.settings)):  # no smaller combination fits
            for some in combinations(one.settings, fewer):
                assert frozenset(some) not in fits
    # Each combination that fits has all switches of a reported one, at the same or a further level.
    for fit in fits:
        assert any(
            all(mild in fit or further(mild) & fit for mild in one.settings) for one in own
        ), fit
    assert found.least.fullest.peak == least
    assert found.tried >= len(peaks)


def on_the_same_layout(found):
    return [one for one in found.fits if not any("layout." in s for s in one.settings)]


def further(setting: str) -> set[str]:
    """Return the levels of a switch beyond this one."""
    (levels,) = [levels for levels in SWITCHES if setting in levels]
    return set(levels[levels.index(setting) + 1 :])


def test_more_ranks_are_told_where_they_spare_switches(peaks):
    """Each row has fewer or milder switches than all before it, and its settings are valid."""
    limit = min(peaks.values()) * 9 // 10  # too little for this layout
    found = search(made(), limit)
    assert found.fits
    assert found.least.fullest.peak > limit
    ranks = [one.ranks for one in found.fits]
    assert ranks == sorted(ranks)
    for one in found.fits:
        config = made(*one.settings)
        assert config.layout.world_size() == one.ranks
        assert plan_memory(config).fullest == one.fullest
        assert one.fullest.peak <= limit
    with pytest.raises(ConfigError) as error:
        check_memory_limit(made(f"train.memory_limit_gib={limit / GIB}"))
    first = found.fits[0]
    assert f"{first.ranks} ranks suffice with {' '.join(first.settings)}" in str(error.value)


def test_switches_that_suffice_together_are_told(peaks):
    singles = [size for one, size in peaks.items() if len(one) == 1]
    limit = (min(singles) + min(peaks.values())) / 2
    with pytest.raises(ConfigError) as error:
        check_memory_limit(made(f"train.memory_limit_gib={limit / GIB}"))
    found = search(made(), int(limit))
    assert f"{' '.join(found.fits[0].settings)} bring it to" in str(error.value)
    assert len(found.fits[0].settings) > 1


def test_a_limit_below_the_weights_says_so():
    weights = max(stage.weights for stage in plan_memory(made()).stages)
    with pytest.raises(ConfigError) as error:
        check_memory_limit(made(f"train.memory_limit_gib={weights * 0.9 / GIB}"))
    assert "weights alone take up to" in str(error.value)
    with pytest.raises(ConfigError, match="do not suffice; layout.pp"):
        check_memory_limit(made("train.memory_limit_gib=1e-6"))


def cost(one) -> list[int]:
    """Return how far each switch is set, the most costly switch first."""
    return [
        1 + levels.index(set(levels).intersection(one.settings).pop())
        if set(levels).intersection(one.settings)
        else 0
        for levels in reversed(SWITCHES)
    ]


def test_rows_are_in_the_order_of_their_cost(peaks):
    """Chunks and recompute come before FP8 storage.

    On other layouts each row costs less than all before it.
    """
    least, most, rows = min(peaks.values()), peaks[frozenset()], []
    for place in (-0.3, -0.1, *(n / 16 for n in range(1, 16, 3))):
        found = search(made(), int(least + place * (most - least)))
        own = on_the_same_layout(found)
        others = found.fits[len(own) :]
        assert found.fits[: len(own)] == tuple(own)
        assert [cost(one) for one in own] == sorted(cost(one) for one in own)
        best = cost(own[0]) if own else [9]
        for one in others:
            assert cost(one) < best
            best = cost(one)
        rows += [len(own), len(others)]
    assert max(rows[::2]) > 1
    assert max(rows[1::2]) > 1


@pytest.mark.parametrize("more", [(), ("layout.dp=8",), ("layout.dp=8", "layout.ep=8")])
def test_the_least_state_is_less_than_what_the_fullest_rank_has(more):
    config = made(*more)
    for stage, least in zip(plan_memory(config).stages, Sizes.of(config).state, strict=True):
        assert 0 < least <= stage.optimizer
