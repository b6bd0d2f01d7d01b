"""Public optimizer, sharded over two processes under DistributedDataParallel.

DDP changes the order of its sums after its first step, and after a resume. Only sums of two
gradients have the same bits in any order, so there are two processes.
"""

import pytest
import torch
from torch import Tensor

from tests.dist import ddp_worker
from tests.dist.ddp_worker import SAVE_AT, STEPS, Toy, Training
from tests.dist.jobs import run_ranks

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> list[dict]:
    """Results of the ranks."""
    return run_ranks(ddp_worker.__file__, 2, tmp_path_factory.mktemp("ddp"))


@pytest.fixture(params=["fp64", "fp32", "bf16"])
def ranks(request, job) -> list[dict]:
    """Results of the ranks in one dtype."""
    return [rank[request.param] for rank in job]


def error(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest distance of a tensor, relative to its movement from the start."""
    start = {name: p.detach() for name, p in Toy(torch.float64).named_parameters()}
    assert found.keys() == expected.keys()
    return max(
        float((found[name].double() - end.double()).norm() / (end.double() - start[name]).norm())
        for name, end in expected.items()
    )


def test_all_ranks_hold_the_same_bits(ranks):
    for rank in ranks[1:]:
        for name, weight in rank["sharded"].items():
            assert torch.equal(weight, ranks[0]["sharded"][name]), name


def test_sharded_equals_every_rank_doing_all(job):
    """The gradients are equal; only the batching of matrix products differs."""
    for rank in job:
        assert error(rank["fp64"]["sharded"], rank["fp64"]["unsharded"]) <= 1e-5
        assert error(rank["fp32"]["sharded"], rank["fp32"]["unsharded"]) <= 1e-4


def test_two_processes_equal_one(job):
    """In fp64, the gradients of two half batches match those of the whole batch."""
    alone = Training(torch.float64).train(STEPS)
    assert error(job[0]["fp64"]["sharded"], alone.weights()) <= 1e-5
    assert alone.clipped == 1


def test_the_maxima_of_all_ranks_clip_on_all(ranks):
    assert [rank["clipped"] for rank in ranks] == [1, 1]


def test_state_is_divided(ranks):
    owned = [rank["owned"] for rank in ranks]
    assert all(owned)
    assert sorted(sum(owned, [])) == list(range(len(list(Toy(torch.float32).parameters()))))
    assert [rank["full"] is not None for rank in ranks] == [False, True]
    assert sorted(ranks[1]["full"]["state"]) == sorted(sum(owned, []))


@pytest.mark.parametrize("scenario", ["from own", "from full"])
def test_resumed_equals_uninterrupted_bit_for_bit(ranks, scenario):
    assert SAVE_AT < STEPS
    for rank in ranks:
        for name, weight in rank["sharded"].items():
            assert torch.equal(rank[scenario][name], weight), name


def test_a_state_of_many_ranks_continues_unsharded(job):
    for rank in job:
        assert error(rank["fp64"]["from full, unsharded"], rank["fp64"]["sharded"]) <= 1e-5
