"""How gradients are cut into what travels together: one order on all ranks, whoever owns what."""

import random

import pytest
import torch

from kimi_pretrain.optim.groups import NamedTensor
from kimi_pretrain.optim.reduce import buckets_of, cut_segments


def tensors_of(slice_number: int) -> list[NamedTensor]:
    """A stage in the order of its backward pass, with one of several slices of the experts."""
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
    for size, following in zip(sizes, sizes[1:]):  # none could have been longer
        assert sum(size) + following[0] > limit
    assert cut_segments([], limit) == []


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("limit", [40, 100, 10**6])
def test_ranks_with_other_experts_agree_on_what_they_share(limit, seed):
    """Two slices of the experts have owners of their own; the dense tensors are common to both."""
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
        # All launches in one order of segment and group: nobody can wait in a circle.
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
