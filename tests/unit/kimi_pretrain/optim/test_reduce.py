"""Tests how gradients are cut into reduce buckets in one order on all ranks, whoever owns them.

Copies of gradients are released as soon as a sum is complete.
"""

import random
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from kimi_pretrain.optim.groups import NamedTensor
from kimi_pretrain.optim.reduce import GradientReduction, buckets_of, cut_segments
from kimi_pretrain.optim.replica_group import ReplicaGroup


def tensors_of(slice_number: int) -> list[NamedTensor]:
    """Return a stage's tensors in backward order, with one of several slices of the experts."""
    found = []
    for layer in reversed(range(6)):
        for expert in range(4):
            name = f"layers.{layer}.mlp.experts.{4 * slice_number + expert}.down_proj.weight"
            found.append((name, (3 + layer, 5), "expert"))
        for part, shape in (("norm", (7,)), ("o_proj", (9, 8)), ("q_proj", (4, 4))):
            found.append((f"layers.{layer}.{part}.weight", shape, "dense"))
    return [
        NamedTensor(name, torch.zeros(shape), lambda: torch.zeros(0), replicas)
        for name, shape, replicas in found
    ]


@pytest.mark.parametrize("limit", [1, 40, 100, 10**6])
def test_segments_keep_the_order_and_the_bound(limit):
    tensors = tensors_of(0)
    segments = cut_segments(tensors, limit)
    assert [t.name for segment in segments for t in segment] == [t.name for t in tensors]
    sizes = [[t.data.numel() for t in segment] for segment in segments]
    assert all(sum(size) <= limit or len(size) == 1 for size in sizes)
    for size, following in zip(sizes, sizes[1:]):  # no segment could have been longer
        assert sum(size) + following[0] > limit
    assert cut_segments([], limit) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [40, 100, 10**6])
def test_ranks_with_other_experts_agree_on_what_they_share(limit, seed):
    """Two slices of the experts have their own owners and share the dense tensors."""
    draw = random.Random(seed)
    dense = {t.name: draw.randrange(4) for t in tensors_of(0) if t.replicas == "dense"}
    found = []
    for number in range(2):
        tensors = tensors_of(number)
        owners = {t.name: dense.get(t.name, draw.randrange(4)) for t in tensors}
        segments = cut_segments(tensors, limit)
        buckets = [(k, b) for k, part in enumerate(segments) for b in buckets_of(part, owners)]
        assert sum(len(bucket.tensors) for _, bucket in buckets) == len(tensors)
        for _, bucket in buckets:
            assert {(owners[t.name], t.replicas) for t in bucket.tensors} == {
                (bucket.owner, bucket.replicas)
            }
        # All ranks launch in one order of segment and group, so no deadlock is possible.
        order = [(k, bucket.replicas) for k, bucket in buckets]
        assert order == sorted(order)
        found.append([(k, b.owner, [t.name for t in b.tensors])
                      for k, b in buckets if b.replicas == "dense"])  # fmt: skip
    assert found[0] == found[1]


def test_without_owners_a_segment_is_one_bucket_a_group():
    (segment,) = cut_segments(tensors_of(0), 10**6)
    buckets = buckets_of(segment, None)
    assert [(bucket.replicas, bucket.owner) for bucket in buckets] == [
        ("dense", None), ("expert", None),
    ]  # fmt: skip


class Sum:
    """Sum with a rank that has the same gradients; it completes when the test says so."""

    def __init__(self, flat: Tensor):
        self.flat = weakref.ref(flat)
        self.complete = False

    def arrive(self) -> None:
        self.flat().mul_(2)
        self.complete = True

    def is_completed(self) -> bool:
        return self.complete

    def wait(self) -> None:
        assert self.complete  # otherwise it would block the backward pass


def test_copies_go_during_the_backward_pass_once_their_sums_are_complete(monkeypatch):
    """Four segments of two separate tensors each, so that every segment is summed in a copy."""
    sums: list[Sum] = []

    def reduce(flat: Tensor, *args, **options) -> Sum:
        sums.append(Sum(flat))
        return sums[-1]

    monkeypatch.setattr(dist, "reduce", reduce)
    monkeypatch.setattr(ReplicaGroup, "of", lambda group: ReplicaGroup(None, (0, 1), 0))
    grads = {f"{i}": torch.ones(3) for i in range(8)}
    tensors = [NamedTensor(n, grad, lambda grad=grad: grad, "dense") for n, grad in grads.items()]
    reduction = GradientReduction(tensors, dict.fromkeys(grads, 0), {"dense": None}, 6)

    def alive_after(*names: str) -> list[bool]:
        for name in names:
            reduction.ready(name)
        return [a_sum.flat() is not None for a_sum in sums]

    assert alive_after("0", "1", "2", "3") == [True, True]
    sums[1].arrive()
    assert alive_after("4", "5") == [True, False, True]
    assert [grads[name].tolist() for name in "0123"] == [[1] * 3] * 2 + [[2] * 3] * 2
    sums[0].arrive()
    assert alive_after("6", "7") == [False, False, True, True]
    for a_sum in sums[2:]:
        a_sum.arrive()
    reduction.finish()
    assert alive_after() == [False] * 4
    assert all(grad.tolist() == [2] * 3 for grad in grads.values())
