"""Tests how updated weights are cut into broadcast buckets with a limit for each group."""

import random

import pytest
import torch

from kimi_pretrain.optim.broadcast import cut_rounds
from kimi_pretrain.optim.groups import NamedTensor, Rule


@pytest.mark.parametrize("limits", [
    {"dense": 1, "expert": 10**6}, {"dense": 40, "expert": 90}, {"dense": 90, "expert": 40},
])  # fmt: skip
def test_buckets_keep_the_bound_of_their_group(limits):
    draw = random.Random(7)
    tensors = [
        NamedTensor(f"{i}", torch.zeros(draw.randint(5, 60)), lambda: torch.zeros(0), group)
        for i, group in enumerate(["dense", "expert"] * 30)
    ]
    owners = {t.name: draw.randrange(3) for t in tensors}
    rules = {t.name: Rule(draw.choice(("muon", "adamw")), "experts") for t in tensors}
    rounds = cut_rounds(tensors, rules, owners, limits)

    lanes: dict[tuple[str, int], list[list[int]]] = {}  # (group, owner) -> sizes in its buckets
    for round_ in rounds:
        assert len({bucket.replicas for bucket in round_}) == 1
        assert [b.owner for b in round_] == sorted({b.owner for b in round_})  # one for each owner
        for bucket in round_:
            assert {(t.replicas, owners[t.name]) for t in bucket.tensors} == {
                (bucket.replicas, bucket.owner)
            }
            sizes = [t.data.numel() for t in bucket.tensors]
            lanes.setdefault((bucket.replicas, bucket.owner), []).append(sizes)
    sent = [t.name for round_ in rounds for bucket in round_ for t in bucket.tensors]
    assert sorted(sent) == sorted(owners)
    for (group, _), buckets in lanes.items():
        assert all(sum(sizes) <= limits[group] or len(sizes) == 1 for sizes in buckets)
        for sizes, following in zip(buckets, buckets[1:]):  # no bucket could have been longer
            assert sum(sizes) + following[0] > limits[group]
