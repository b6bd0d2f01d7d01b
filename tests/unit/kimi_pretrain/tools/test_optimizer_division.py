"""Compares a job's division with brute force on a toy and with bounds on the shipped layouts."""

import itertools

import pytest

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape
from kimi_pretrain.optim.newton_schulz import flops
from kimi_pretrain.optim.owners import TensorSize
from kimi_pretrain.tools.optimizer_division import (
    Balance,
    Division,
    PlannedGroup,
    balance,
    divide,
    least_possible,
    stage_groups,
    traffic,
)
from kimi_pretrain.tools.optimizer_report import (
    advice,
    assignments,
    fold,
    runs,
    summarise,
    summary_lines,
    tab_separated,
)
from tests.unit.kimi_pretrain.optim import presets

SHAPE = ModelShape(num_heads=2, qk_nope_dim=4, qk_rope_dim=2, v_dim=4, kv_lora_rank=6)
PLAIN = dict(lr=1e-3, min_lr=0.0, warmup_steps=0, stable_steps=1, decay_steps=0)
CONFIG = OptimConfig(**PLAIN)
LAYERS = "language_model.model.layers."


def size(name: str, *shape: int, itemsize: int = 4) -> TensorSize:
    return TensorSize(name, shape, itemsize)


def toy_groups() -> list[PlannedGroup]:
    """Return every kind of group for two stages of two ranks and two slices of one expert each."""
    groups = [
        PlannedGroup(
            "encoder",
            (0, 1, 2, 3),
            (
                size("vision_tower.encoder.blocks.0.wo.weight", 10, 10),
                size("vision_tower.encoder.blocks.0.wo.bias", 10),
                size("mm_projector.proj.0.weight", 12, 12),
            ),
        )
    ]
    for stage, layers in enumerate(((0, 1), (2,))):
        dense = [size(f"{LAYERS}{layer}.self_attn.o_proj.weight", 16, 12) for layer in layers]
        dense += [size(f"{LAYERS}{layer}.input_layernorm.weight", 12) for layer in layers]
        expert = [size(f"{LAYERS}{layer}.mlp.experts.0.up_proj.weight", 8, 12) for layer in layers]
        groups += stage_groups(stage, 2, 2, {"dense": dense, "expert": expert})
    return groups


def toy(**settings) -> Division:
    return divide(toy_groups(), 4, SHAPE, OptimConfig(**PLAIN, **settings))


def test_groups_of_a_stage():
    dense = [size(f"{LAYERS}4.input_layernorm.weight", 12)]
    first = [size(f"{LAYERS}4.mlp.experts.{e}.up_proj.weight", 8, 12) for e in range(2)]
    groups = list(stage_groups(1, 6, 3, {"dense": dense, "expert": first}))
    assert [(group.replicas, group.ranks) for group in groups] == [
        ("dense", (6, 7, 8, 9, 10, 11)),
        ("expert", (6, 9)),
        ("expert", (7, 10)),
        ("expert", (8, 11)),
    ]
    assert [tensor.name for group in groups[1:] for tensor in group.tensors] == [
        f"{LAYERS}4.mlp.experts.{expert}.up_proj.weight" for expert in range(6)
    ]


def test_every_tensor_has_one_owner_that_holds_it_and_loads_add_up():
    division = toy()
    flops_of, state_of = [0] * 4, [0] * 4
    seen = []
    for group, owners in zip(division.groups, division.owners, strict=True):
        assert owners is not None
        assert sorted(owners) == sorted(tensor.name for tensor in group.tensors)
        seen += owners
        for tensor in group.tensors:
            rank = owners[tensor.name]
            assert rank in group.ranks
            matrix = len(tensor.shape) > 1
            flops_of[rank] += flops(*tensor.shape, 5) if matrix else 0
            state_of[rank] += tensor.elements * (4 if matrix else 8)
    assert len(seen) == len(set(seen)) == 3 + (4 + 2 * 2) + (2 + 2 * 1)
    assert [load.flops for load in division.loads] == flops_of
    assert [load.state_bytes for load in division.loads] == state_of


def test_least_possible_is_below_every_division_and_ours_is_close():
    division = toy()
    choices = []
    for group in division.groups:
        choices += [(group.ranks, flops(*t.shape, 5)) for t in group.tensors if len(t.shape) > 1]
    best = min(
        max(sum(cost for (_, cost), r in zip(choices, ranks) if r == rank) for rank in range(4))
        for ranks in itertools.product(*(ranks for ranks, _ in choices))
    )
    ours = max(load.flops for load in division.loads)
    assert least_possible(division) <= best <= ours <= 1.1 * best
    assert least_possible(division) >= 0.8 * best


def test_traffic_is_that_of_a_ring():
    """A job sends each copy but one once, gradients in fp32 and weights in their own type."""
    groups = [
        PlannedGroup(
            "dense", (0, 1, 2), (size(f"{LAYERS}0.input_layernorm.weight", 5, itemsize=2),)
        ),
        PlannedGroup("encoder", tuple(range(4)), (size("mm_projector.pre_norm.bias", 7),)),
    ]
    moved = traffic(divide(groups, 4, SHAPE, CONFIG))
    assert sum(rank.gradients for rank in moved) == pytest.approx(2 * 5 * 4 + 3 * 7 * 4)
    assert sum(rank.weights for rank in moved) == pytest.approx(2 * 5 * 2 + 3 * 7 * 4)
    assert moved[3].weights == pytest.approx(0.75 * 7 * 4)
    unsharded = OptimConfig(**PLAIN, shard_state=False)
    moved = traffic(divide(groups, 4, SHAPE, unsharded))
    assert sum(rank.gradients for rank in moved) == pytest.approx(2 * (2 * 5 * 4 + 3 * 7 * 4))
    assert all(rank.weights == 0 for rank in moved)


def test_without_sharding_every_rank_updates_what_it_holds():
    division = toy(shard_state=False)
    assert division.owners == (None,) * len(division.groups)
    encoder = flops(10, 10, 5) + flops(12, 12, 5)
    first = encoder + 2 * flops(16, 12, 5) + 2 * flops(8, 12, 5)
    second = encoder + flops(16, 12, 5) + flops(8, 12, 5)
    assert [load.flops for load in division.loads] == [first, first, second, second]
    assert {row.owner for row in assignments(division)} == {None}
    assert {row.owners for row in fold(assignments(division))} == {"each"}


def test_balance_counts_all_ranks():
    assert balance([4, 8, 0, 8]) == Balance(8, 5, 1, 1.6)
    assert balance([0, 0]).ratio == 1.0


def one_t(replicas: int) -> Division:
    """Return two stages of the 1T model, with two layers and 16 x `replicas` ranks each."""
    config, shape = presets.preset("kimi_k25_1t")
    encoder = tuple(presets.encoder(config))
    groups = [PlannedGroup("encoder", tuple(range(32 * replicas)), encoder)]
    for stage, layers in enumerate((range(4, 6), range(6, 8))):
        tensors = {
            "dense": presets.dense(config, layers),
            "expert": presets.experts(config, layers, range(24)),
        }
        groups += stage_groups(stage, 16 * replicas, 16, tensors)
    return divide(groups, 32 * replicas, shape, config.optim)


@pytest.mark.parametrize("replicas", [1, 2, 8])
def test_experts_even_out_what_large_matrices_leave(replicas):
    """Ranks with an o_proj are given fewer experts if each expert has several copies.

    Otherwise they would be busier than the others by the whole matrix.
    """
    division = one_t(replicas)
    assert max(load.flops for load in division.loads) <= 1.06 * least_possible(division)
    owners = [owner for some in division.owners if some for owner in some.items()]
    busy = {rank for name, rank in owners if name.endswith("self_attn.o_proj.weight")}
    counts = [0] * len(division.loads)
    for name, rank in owners:
        counts[rank] += ".experts." in name
    assert len(busy) == 4
    assert sum(counts) == 4 * 384 * 3
    if replicas > 1:
        idle = [count for rank, count in enumerate(counts) if rank not in busy]
        assert max(counts[rank] for rank in busy) < min(idle)


def test_advice_names_the_cause():
    """With 16 copies of an expert, one o_proj exceeds a rank's mean share."""
    summary = summarise(one_t(replicas=16), [(4, 5), (6, 7)])
    assert summary.flops.ratio > 1.15
    text = "\n".join(advice(summary))
    assert f"rank {summary.flops.rank} has {summary.flops.ratio:.2f} times the mean" in text
    assert f"'{LAYERS}4.self_attn.o_proj.weight' alone is {summary.flops.ratio:.2f}" in text
    assert summary.flops.largest == summary.least_possible == summary.largest_tensor.flops


def test_the_table_folds_what_is_alike():
    rows = assignments(toy())
    assert [row.name for row in rows][:3] == [
        "vision_tower.encoder.blocks.0.wo.bias",
        "vision_tower.encoder.blocks.0.wo.weight",
        "mm_projector.proj.0.weight",
    ]
    folded = {row.name: row for row in fold(rows)}
    assert sorted(folded) == [
        f"{LAYERS}0-2.input_layernorm.weight",
        f"{LAYERS}0-2.mlp.experts.0-1.up_proj.weight",
        f"{LAYERS}0-2.self_attn.o_proj.weight",
        "mm_projector.proj.0.weight",
        "vision_tower.encoder.blocks.0.wo.bias",
        "vision_tower.encoder.blocks.0.wo.weight",
    ]
    experts = folded[f"{LAYERS}0-2.mlp.experts.0-1.up_proj.weight"]
    assert (experts.tensors, experts.owners, experts.like.copies) == (6, "0-3", 1)
    assert (experts.like.group, experts.like.trained_by) == ("experts", "muon")
    assert sum(row.tensors for row in folded.values()) == len(rows)


def test_lines_and_the_whole_table_can_be_read():
    query = size(f"{LAYERS}3.self_attn.q_b_proj.weight", 12, 7)
    division = divide([PlannedGroup("dense", (0, 1), (query,))], 2, SHAPE, CONFIG)
    head, line = tab_separated(assignments(division))
    cells = dict(zip(head.split("\t"), line.split("\t"), strict=True))
    assert cells == {
        "name": query.name, "shape": "[12, 7]", "pieces": "q_nope [8, 7] + q_rope [4, 7]",
        "trained_by": "muon", "group": "attention", "replicas": "dense", "copies": "2",
        "owner": "0",
    }  # fmt: skip
    (text,) = [
        line for line in summary_lines(summarise(division, [(3,)])) if line.startswith("language")
    ]
    assert text.split()[:2] == [query.name, "1"]
    assert "muon: rows q_nope 8 + q_rope 4  attention  dense 2  0" in text


def test_runs():
    assert runs([33, 0, 1, 32]) == "0-1,32-33"
    assert runs([5, 7]) == "5,7"
    assert runs([]) == "none"
