"""Tests which measured costs the slots are planned with."""

import numpy as np
import pytest

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.bubble_times import WINDOW, Learning, RankTimes

STAGES, CHUNKS = 2, 2
CONFIG = load_config("tiny_cpu", ["layout.pp=2", "layout.vpp=2", "data.prefetch_steps=1"])
DELAY = 3


def times(stage, seconds, took=2.0, modelled=1.0):
    """Return times in which chunk c takes seconds + c forward and ten times that backward.

    No recompute is done.
    """
    passes = tuple((seconds + chunk, 10 * (seconds + chunk)) for chunk in range(CHUNKS))
    return RankTimes(stage, passes, ((took, modelled), (0.0, 0.0), (3 * took, modelled)))


def learned(*steps):
    """Return learning with steps 0, 1, ...: stage 0 takes the given seconds, stage 1 twice that.

    The first step is not counted.
    """
    learning = Learning(CONFIG)
    for step, seconds in enumerate((1e9, *steps)):
        ranks = [times(stage, seconds * (1 + stage), took=seconds) for stage in range(STAGES)]
        learning.add(step, ranks)
    return learning


def test_a_step_is_planned_with_what_was_measured_long_before():
    learning = learned(1.0, 1.0)
    assert learning.delay == DELAY
    assert learning.of(0) is None
    assert learning.of(DELAY) is None  # from step 0, which is not counted
    assert learning.of(1 + DELAY) is not None


def test_passes_are_those_of_virtual_stages_and_ranks_of_a_stage_are_averaged():
    learning = Learning(CONFIG)
    slow, fast, last = times(0, 3.0), times(0, 1.0), times(1, 7.0)
    for step in range(2):
        learning.add(step, [fast, slow, last, last])
    found = learning.of(1 + DELAY)
    assert found.forward.tolist() == [2.0, 7.0, 3.0, 8.0]
    assert found.backward.tolist() == [20.0, 70.0, 30.0, 80.0]
    assert found.factors == (2.0, 1.0, 6.0)


def test_short_pieces_count_as_long_ones_do():
    """A step of a few milliseconds has the same factors."""
    found = learned(1e-3, 1e-3).of(2 + DELAY)
    assert found.factors == pytest.approx((1e-3, 1.0, 3e-3))


def test_one_slow_step_of_several_is_not_believed():
    found = learned(1.0, 1.0, 50.0).of(3 + DELAY)
    assert found.forward.tolist() == [1.0, 2.0, 2.0, 3.0]


def test_old_steps_are_forgotten():
    steps = [5.0] * WINDOW + [1.0] * WINDOW
    learning = learned(*steps)
    assert learning.of(len(steps) + DELAY).forward[0] == 1.0
    assert learning.of(len(steps) + DELAY).factors[0] == 1.0
    assert len(learning._known) <= DELAY + 1


def test_a_step_without_media_changes_nothing():
    learning = learned(1.0)
    for step in range(2, 20):
        learning.add(step, [None] * STAGES)
        found = learning.of(step + 1)
        assert found is None if step < DELAY else found.forward[0] == 1.0


def test_the_same_step_has_the_same_costs_whenever_it_is_asked_for():
    learning = learned(1.0, 1.0)
    before = learning.of(2 + DELAY)
    learning.add(3, [times(stage, 99.0) for stage in range(STAGES)])
    assert learning.of(2 + DELAY) is before
    assert learning.of(3 + DELAY) is not before


def test_what_comes_too_late_for_a_planned_step_is_an_error():
    learning = learned(1.0)
    learning.of(2 + DELAY)
    with pytest.raises(AssertionError):
        learning.add(2, [times(stage, 1.0) for stage in range(STAGES)])


def test_means_are_float64():
    found = learned(1.0).of(1 + DELAY)
    assert found.forward.dtype == found.backward.dtype == np.float64
