"""Distributed optimizer against the plain one, in four layouts of gloo processes."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.muon import PlainMuon
from kimi_pretrain.optim.qk_clip import factors
from tests.dist import optim_worker
from tests.dist.jobs import run_ranks
from tests.dist.optim_worker import (
    ALONE,
    CLIP_AT,
    CONFIG,
    GO_ON_TO,
    LAYOUTS,
    PAIRS,
    SAVE_AT,
    SHAPE,
    SILENT,
    STEPS,
    Job,
    Toy,
)
from tests.unit.kimi_pretrain.optim.oracles import clip_by_hand

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def plain() -> dict[int, dict[str, Tensor]]:
    """Weights of the plain optimizer, clipped by hand once, by the number of steps done."""
    toy = Toy(ALONE, torch.float32)
    optimizer = PlainMuon(toy.named(), CONFIG, SHAPE)
    prefix = f"language_model.model.layers.{optim_worker.CLIP_LAYER}.self_attn."
    found = {}
    for step in range(STEPS):
        toy.backward(step)
        optimizer.step(CONFIG.lr * (1 + step % 3), 0.5)
        if step == CLIP_AT:
            gamma = factors(torch.tensor([150.0, -4.0, 99.0, 300.0]), 100.0)
            query = toy.weights[prefix + "q_b_proj.weight"]
            clip_by_hand(query, toy.weights[prefix + "kv_b_proj.weight"], gamma, SHAPE)
        found[step + 1] = {name: weight.clone() for name, weight in toy.weights.items()}
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """Results of the same class in one process, half-way and at the end."""
    job = Job(ALONE).train(0, SAVE_AT)
    saved, half = job.save(), job.train(SAVE_AT, GO_ON_TO).save()
    return {"saved": saved, "half": half, "fp32": job.train(GO_ON_TO, STEPS).save()}


def run(folder: Path, alone: dict[str, dict], layouts: Sequence[str]) -> list[dict]:
    torch.save(alone["saved"], folder / "alone.pt")
    (folder / "layouts.json").write_text(json.dumps(layouts))
    return run_ranks(optim_worker.__file__, 4, folder)


@pytest.fixture(scope="module")
def job(tmp_path_factory, alone) -> list[dict]:
    """Results of the four ranks, by layout."""
    return run(tmp_path_factory.mktemp("optim"), alone, LAYOUTS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory, alone) -> list[dict]:
    """Results of the layouts with two ranks."""
    return run(tmp_path_factory.mktemp("optim_pairs"), alone, PAIRS)


@pytest.fixture(params=[*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in PAIRS)])
def ranks(request) -> list[dict]:
    """Results of the ranks of one layout."""
    found = request.getfixturevalue("pairs" if request.param in PAIRS else "job")
    return [rank[request.param] for rank in found if request.param in rank]


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, tensor in found.items():
        error = (tensor.double() - expected[name].double()).norm()
        assert error <= tolerance * expected[name].double().norm(), (name, float(error))


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def union(ranks: list[dict], scenario: str) -> dict[str, dict[str, Tensor]]:
    """Return one checkpoint from all ranks' tensors, as a writer would build it."""
    whole: dict[str, dict[str, Tensor]] = {"weights": {}, "state": {}}
    for rank in ranks:
        for part, tensors in rank[scenario].items():
            whole[part] |= tensors
    return whole


def test_one_process_equals_the_plain_optimizer(plain, alone):
    assert alone["fp32"]["weights"].keys() == plain[STEPS].keys()
    assert_near(alone["fp32"]["weights"], plain[STEPS], 1e-6)


@pytest.mark.parametrize("scenario", ["fp32", "twin", "from alone", "twin from alone", "from twin"])
def test_every_rank_equals_the_plain_optimizer(ranks, plain, scenario):
    """State is sharded or not, and may come from the other kind of checkpoint or another layout."""
    expected = plain[STEPS if scenario in ("fp32", "twin") else GO_ON_TO]
    for rank in ranks:
        assert_near(rank[scenario]["weights"], expected, 1e-6)
    assert union(ranks, scenario)["weights"].keys() == expected.keys()


def test_the_tolerance_is_far_below_an_update(plain):
    """Control: twenty steps, and the clip alone, move every tensor by far more than 1e-6."""
    for name, start in plain[1].items():
        assert (plain[STEPS][name] - start).norm() > 1e-2 * start.norm(), name


@pytest.mark.parametrize("scenario", ["one bucket", "one tensor a bucket"])
def test_buckets_change_nothing_but_rounding(ranks, alone, scenario):
    for rank in ranks:
        for part in ("weights", "state"):
            assert_near(rank[scenario][part], alone["saved"][part], 1e-6)


@pytest.mark.parametrize("scenario", ["fp32", "twin", "bf16"])
def test_members_of_a_group_hold_the_same_bits(ranks, scenario):
    first: dict[str, Tensor] = {}
    for rank in ranks:
        for name, weight in rank[scenario]["weights"].items():
            assert torch.equal(first.setdefault(name, weight), weight), name
    assert len(first) == len(Toy(ALONE, torch.float32).weights)


@pytest.mark.parametrize(
    ("stopped", "whole"), [("resumed", "fp32 half"), ("bf16 resumed", "bf16 ended")]
)
def test_a_resumed_job_equals_an_uninterrupted_one_bit_for_bit(ranks, stopped, whole):
    for rank in ranks:
        for part in ("weights", "state"):
            assert_equal(rank[stopped][part], rank[whole][part])


@pytest.mark.parametrize("scenario", ["fp32 saved", "twin saved"])
def test_state_of_many_processes_continues_in_one(ranks, alone, scenario):
    whole = union(ranks, scenario)
    assert whole["state"].keys() == alone["saved"]["state"].keys()
    ended = Job(ALONE).load(whole).train(SAVE_AT, GO_ON_TO).save()
    for part in ("weights", "state"):
        assert_near(ended[part], alone["half"][part], 1e-6)


def test_state_is_divided_and_every_entry_has_one_owner(ranks):
    owned = [set(rank["fp32"]["state"]) - {"optim.step"} for rank in ranks]
    assert sum(map(len, owned)) == len(set().union(*owned))
    assert all(owned)
    assert all(rank["fp32"]["state"]["optim.step"] == STEPS for rank in ranks)


def test_the_twin_keeps_all_state_everywhere(ranks):
    for rank in ranks:
        held = {name.split(".", 2)[2] for name in rank["twin"]["state"] if name != "optim.step"}
        assert held == rank["twin"]["weights"].keys()


def test_owners_are_the_same_for_all_members(ranks):
    for name in set().union(*(rank["fp32 owners"] for rank in ranks)):
        same = {rank["fp32 owners"][name] for rank in ranks if name in rank["fp32 owners"]}
        assert len(same) == 1


@pytest.mark.parametrize("twin", ["", "twin "])
def test_world_sum_of_squares_counts_every_tensor_once(ranks, twin):
    done = Job(ALONE)
    done.backward(0)
    done.optimizer.step(0.0)
    done.backward(1)
    expected = sum(float(grad.double().square().sum()) for grad in done.toy.grads.values())
    for rank in ranks:
        assert rank[twin + "square sum"] == pytest.approx(expected, rel=1e-6)
        assert rank[twin + "poisoned"] != rank[twin + "poisoned"]  # NaN on all ranks


@pytest.mark.parametrize("twin", ["", "twin "])
def test_what_is_counted_is_what_torch_was_asked_to_move(ranks, twin):
    told = {op: sum(rank[twin + "bytes told"][op] for rank in ranks)
            for op in ("reduce", "broadcast", "all_reduce")}  # fmt: skip
    moved = {way: sum(rank[twin + "bytes"][way] for rank in ranks)
             for way in ("gradients", "weights")}  # fmt: skip
    assert moved["weights"] == told["broadcast"]
    assert moved["gradients"] == told["all_reduce" if twin else "reduce"] > 0
    assert bool(told["all_reduce"]) == bool(twin)


def test_sums_leave_early_and_never_before_what_is_missing(ranks):
    """The missing gradient delays only its own rank's launches, from its position on."""
    early = [rank["early"] for rank in ranks]
    assert max(early) > 0
    order = Toy(ALONE, torch.float32).order()
    assert 0 < order.index(SILENT) < len(order) - 1
    assert len(set(early)) > 1


def test_bf16_weights_are_their_rounded_masters(ranks):
    masters = {k: v for k, v in union(ranks, "bf16")["state"].items() if ".master." in k}
    weights = union(ranks, "bf16")["weights"]
    assert len(masters) == len(weights)
    for name, weight in weights.items():
        assert torch.equal(weight, masters[f"optim.master.{name}"].bfloat16()), name


def test_members_that_disagree_are_told_so(job):
    for rank in job:
        assert "'encoder' hold different tensors" in rank["disagreement"]
