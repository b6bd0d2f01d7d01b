"""Tests the order of a replica's microbatches and the properties that it preserves."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from benchmarks.sim import corpus
from kimi_pretrain.config import load_config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.dep.row_order import light_ends, microbatch_order
from moonvit3d.flops import flops

SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 40))
WORK = SHAPES.flatmap(lambda shape: arrays(np.int64, shape, elements=st.integers(0, 9)))


@given(WORK)
def test_work_rises_to_the_middle_and_falls(work):
    order = light_ends(work)
    for load, one in zip(work, order):
        assert sorted(one.tolist()) == list(range(len(load)))
        laid = load[one]
        top = int(laid.argmax())
        assert (np.diff(laid[: top + 1]) >= 0).all()
        assert (np.diff(laid[top:]) <= 0).all()
        # The two lightest are first and last, and the end is lighter than the beginning.
        assert sorted(laid[[0, -1]].tolist()) == sorted(load.tolist())[:2] or len(load) == 1
        for depth in range(len(load) // 4):
            assert laid[-1 - depth] <= laid[2 * depth + 1]


def test_an_order_by_hand():
    # Positions are filled from both ends in turn; equal loads keep their order.
    assert light_ends(np.array([[0, 0, 0, 0, 5, 1]])).tolist() == [[0, 2, 5, 4, 3, 1]]


@given(WORK)
def test_replicas_do_not_know_each_other(work):
    alone = [light_ends(load[None])[0].tolist() for load in work]
    assert light_ends(work).tolist() == alone


def config_of(order: str, dp: int, per_microbatch: int = 1):
    return load_config(
        "kimi_k25_1t",
        [f"layout.dp={dp}", "layout.ep=1", "layout.overlap_experts=false", "layout.pp=1",
         "layout.vpp=1", "layout.stages=null", "data.rows_per_step=64", "data.seed=3",
         "data.vision_token_ratio=0.3", f"data.order_rows={order}", "dep.memory_limit_gib=null",
         f"train.rows_per_microbatch={per_microbatch}"],
    )  # fmt: skip


@pytest.fixture(scope="module")
def plans():
    """Return the plan of a step in each order; no data is read, but packing is real."""
    mix = corpus.read_mix()
    return {
        order: next(corpus.steps(config_of(order, 2).data, 1, mix))
        for order in ("as_drawn", "light_ends")
    }


@pytest.mark.parametrize(("dp", "per_microbatch"), [(1, 1), (2, 1), (4, 1), (2, 4), (8, 8)])
def test_a_step_has_the_same_rows_and_so_has_each_replica_and_microbatch(plans, dp, per_microbatch):
    plan = plans["light_ends"]
    assert plan.content_hash() == plans["as_drawn"].content_hash()
    plain = microbatch_order(plan, config_of("as_drawn", dp, per_microbatch))
    order = microbatch_order(plan, config_of("light_ends", dp, per_microbatch))
    count = 64 // dp // per_microbatch
    assert plain.tolist() == [list(range(count))] * dp
    linear, quadratic = flops(
        np.stack([plan.items.frames, plan.items.grid_h, plan.items.grid_w], axis=1),
        config_of("as_drawn", dp).model.vision,
    )
    for replica, one in enumerate(order):
        assert sorted(one.tolist()) == list(range(count))
        first = replica * 64 // dp
        load = [0] * count
        for row, a, b in zip(plan.items.row.tolist(), linear.tolist(), quadratic.tolist()):
            if first <= row < first + 64 // dp:
                load[(row - first) // per_microbatch] += a + b
        assert one.tolist() == light_ends(np.array([load]))[0].tolist()


@pytest.mark.parametrize(("dp", "per_microbatch"), [(2, 1), (4, 2)])
def test_media_go_where_their_rows_run(plans, dp, per_microbatch):
    """Only the microbatch of a span changes; encoding ranks and positions stay."""
    plan = plans["as_drawn"]
    configs = [config_of(order, dp, per_microbatch) for order in ("as_drawn", "light_ends")]
    drawn, light = (VisionPlanner(config).plan(plan) for config in configs)
    order = microbatch_order(plan, configs[1])
    assert (order != np.arange(order.shape[1])).any(axis=1).all()
    for column in ("item", "begin", "count", "source", "dest", "position"):
        assert np.array_equal(getattr(drawn.spans, column), getattr(light.spans, column))
    assert np.array_equal(drawn.rank, light.rank)
    replica = plan.items.row[light.spans.item] // (64 // dp)
    assert np.array_equal(order[replica, light.spans.microbatch], drawn.spans.microbatch)


def test_a_calibration_changes_no_order(plans):
    config = config_of("light_ends", 2)
    measured = config.replace(
        dep=config.dep.replace(cost={"per_patch": 1.0, "per_patch_squared": 0.0, "per_item": 9.0})
    )
    order, again = (microbatch_order(plans["light_ends"], one) for one in (config, measured))
    assert np.array_equal(order, again)
