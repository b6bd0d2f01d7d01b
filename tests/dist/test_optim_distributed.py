"""The distributed optimizer against the plain one, over 1, 2 and 4 gloo processes."""

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.muon import PlainMuon
from kimi_pretrain.optim.qk_clip import clip_, factors
from tests.dist import optim_worker
from tests.dist.jobs import run_ranks
from tests.dist.optim_worker import ALL_EXPERTS, ALONE, CONFIG, SAVE_AT, SHAPE, STEPS, Job, Toy

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def plain() -> dict[str, Tensor]:
    """Weights after all steps of the plain optimizer, clipped by hand once."""
    toy = Toy(ALL_EXPERTS, torch.float32)
    optimizer = PlainMuon(toy.named(), CONFIG, SHAPE)
    prefix = f"language_model.model.layers.{optim_worker.CLIP_LAYER}.self_attn."
    for step in range(STEPS):
        toy.backward(step)
        optimizer.step(CONFIG.lr * (1 + step % 3), 0.5)
        if step == optim_worker.CLIP_AT:
            gamma = factors(torch.tensor([150.0, -4.0, 99.0, 300.0]), 100.0)
            query = toy.weights[prefix + "q_b_proj.weight"]
            clip_(query, toy.weights[prefix + "kv_b_proj.weight"], gamma, SHAPE)
    return toy.weights


@pytest.fixture(scope="module")
def alone() -> dict[str, dict]:
    """The same class in one process: its state half way, and its end."""
    job = Job(ALONE, ALL_EXPERTS).train(0, SAVE_AT)
    return {"saved": job.save(), "fp32": job.train(SAVE_AT, STEPS).save()}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory, alone) -> list[dict]:
    """Results of all ranks of a job of 2 or 4 processes."""
    world = request.param
    folder = tmp_path_factory.mktemp(f"world{world}")
    torch.save(alone["saved"], folder / "alone.pt")
    return run_ranks(optim_worker.__file__, world, folder)


def assert_near(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def union(ranks: list[dict], scenario: str) -> dict[str, dict[str, Tensor]]:
    """One checkpoint out of what the ranks hold, as a writer would make it."""
    whole: dict[str, dict[str, Tensor]] = {"weights": {}, "state": {}}
    for rank in ranks:
        for part, tensors in rank[scenario].items():
            whole[part] |= tensors
    return whole


def test_one_process_equals_the_plain_optimizer(plain, alone):
    assert len(alone["fp32"]["weights"]) == len(plain)
    assert_near(alone["fp32"]["weights"], plain, 1e-6)


@pytest.mark.parametrize("scenario", ["fp32", "from_alone"])
def test_every_rank_equals_the_plain_optimizer(ranks, plain, scenario):
    for rank in ranks:
        assert_near(rank[scenario]["weights"], plain, 1e-6)


@pytest.mark.parametrize("scenario", ["one_bucket", "one_tensor_a_bucket"])
def test_buckets_change_nothing_but_rounding(ranks, alone, scenario):
    for rank in ranks:
        for part in ("weights", "state"):
            assert_near(rank[scenario][part], alone["saved"][part], 1e-6)


@pytest.mark.parametrize("scenario", ["fp32", "bf16"])
def test_members_of_a_group_hold_the_same_bits(ranks, scenario):
    first: dict[str, Tensor] = {}
    for rank in ranks:
        for name, weight in rank[scenario]["weights"].items():
            assert torch.equal(first.setdefault(name, weight), weight), name
    assert len(first) == len(Toy(ALL_EXPERTS, torch.float32).weights)


def test_a_resumed_job_equals_an_uninterrupted_one_bit_for_bit(ranks):
    for rank in ranks:
        for part in ("weights", "state"):
            assert rank["resumed"][part].keys() == rank["fp32"][part].keys()
            for name, tensor in rank["resumed"][part].items():
                assert torch.equal(tensor, rank["fp32"][part][name]), name


def test_state_of_many_processes_continues_in_one(ranks, alone):
    whole = union(ranks, "saved")
    assert whole["state"].keys() == alone["saved"]["state"].keys()
    ended = Job(ALONE, ALL_EXPERTS).load(whole).train(SAVE_AT, STEPS).save()
    for part in ("weights", "state"):
        assert_near(ended[part], alone["fp32"][part], 1e-6)


def test_state_is_divided_and_every_entry_has_one_owner(ranks):
    owned = [set(rank["fp32"]["state"]) - {"optim.step"} for rank in ranks]
    assert sum(map(len, owned)) == len(set().union(*owned))
    assert all(owned)
    assert all(rank["fp32"]["state"]["optim.step"] == STEPS for rank in ranks)


def test_owners_are_known_without_talking(ranks):
    for name in ranks[0]["owners"]:
        same = {rank["owners"][name] for rank in ranks if name in rank["owners"]}
        assert len(same) == 1


def test_world_sum_of_squares_counts_every_tensor_once(ranks):
    job = Job(ALONE, ALL_EXPERTS).train(0, SAVE_AT)
    expected = sum(float(grad.double().square().sum()) for grad in job.toy.grads.values())
    for rank in ranks:
        assert float(rank["grad_square_sum"]) == pytest.approx(expected, rel=1e-6)


def test_bf16_weights_are_their_rounded_masters(ranks):
    masters = {k: v for k, v in union(ranks, "bf16")["state"].items() if ".master." in k}
    weights = union(ranks, "bf16")["weights"]
    assert len(masters) == len(weights)
    for name, weight in weights.items():
        assert torch.equal(weight, masters[f"optim.master.{name}"].bfloat16()), name


def test_members_that_disagree_are_told_so(ranks):
    for rank in ranks:
        assert "'dense' hold different tensors" in rank["disagreement"]
