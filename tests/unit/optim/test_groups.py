"""Rules by name, pieces by brute-force row lists, owners by exhaustive search."""

import itertools
import random

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import (
    ModelShape,
    NamedTensor,
    assignment_table,
    choose_owners,
    muon_flops,
    rule_of,
    state_bytes,
)

K25 = ModelShape(
    num_heads=64, qk_nope_dim=128, qk_rope_dim=64, v_dim=128, kv_lora_rank=512, vision_heads=16
)
SMALL = ModelShape(
    num_heads=3, qk_nope_dim=4, qk_rope_dim=2, v_dim=5, kv_lora_rank=6, vision_heads=2
)
CONFIG = OptimConfig(lr=1e-3, min_lr=0, warmup_steps=0, stable_steps=1, decay_steps=0)

LAYER = "language_model.model.layers.7."
BLOCK = "vision_tower.encoder.blocks.26."
K25_SHAPES = {
    "language_model.model.embed_tokens.weight": ((163840, 7168), "adamw", []),
    "language_model.lm_head.weight": ((163840, 7168), "adamw", []),
    "language_model.model.norm.weight": ((7168,), "adamw", []),
    LAYER + "input_layernorm.weight": ((7168,), "adamw", []),
    LAYER + "post_attention_layernorm.weight": ((7168,), "adamw", []),
    LAYER + "self_attn.q_a_proj.weight": ((1536, 7168), "muon", [(1536, 7168)]),
    LAYER + "self_attn.q_a_layernorm.weight": ((1536,), "adamw", []),
    LAYER + "self_attn.q_b_proj.weight": ((12288, 1536), "muon", [(8192, 1536), (4096, 1536)]),
    LAYER + "self_attn.q_proj.weight": ((12288, 2048), "muon", [(8192, 2048), (4096, 2048)]),
    LAYER + "self_attn.kv_a_proj_with_mqa.weight": (
        (576, 7168),
        "muon",
        [(512, 7168), (64, 7168)],
    ),
    LAYER + "self_attn.kv_a_layernorm.weight": ((512,), "adamw", []),
    LAYER + "self_attn.kv_b_proj.weight": ((16384, 512), "muon", [(8192, 512), (8192, 512)]),
    LAYER + "self_attn.o_proj.weight": ((7168, 8192), "muon", [(7168, 8192)]),
    LAYER + "mlp.gate_proj.weight": ((18432, 7168), "muon", [(18432, 7168)]),
    LAYER + "mlp.gate.weight": ((384, 7168), "muon", [(384, 7168)]),
    LAYER + "mlp.experts.383.up_proj.weight": ((2048, 7168), "muon", [(2048, 7168)]),
    LAYER + "mlp.shared_experts.down_proj.weight": ((7168, 2048), "muon", [(7168, 2048)]),
    "vision_tower.patch_embed.proj.weight": ((1152, 3, 14, 14), "muon", [(1152, 588)]),
    "vision_tower.patch_embed.proj.bias": ((1152,), "adamw", []),
    "vision_tower.patch_embed.pos_emb.weight": ((64, 64, 1152), "adamw", []),
    BLOCK + "norm0.weight": ((1152,), "adamw", []),
    BLOCK + "norm1.bias": ((1152,), "adamw", []),
    BLOCK + "wqkv.weight": ((3456, 1152), "muon", [(1152, 1152)] * 3),
    BLOCK + "wqkv.bias": ((3456,), "adamw", []),
    BLOCK + "wo.weight": ((1152, 1152), "muon", [(1152, 1152)]),
    BLOCK + "wo.bias": ((1152,), "adamw", []),
    BLOCK + "mlp.fc0.weight": ((4304, 1152), "muon", [(4304, 1152)]),
    BLOCK + "mlp.fc1.bias": ((1152,), "adamw", []),
    "vision_tower.encoder.final_layernorm.bias": ((1152,), "adamw", []),
    "mm_projector.pre_norm.weight": ((1152,), "adamw", []),
    "mm_projector.proj.0.weight": ((4608, 4608), "muon", [(4608, 4608)]),
    "mm_projector.proj.2.weight": ((7168, 4608), "muon", [(7168, 4608)]),
    "mm_projector.proj.2.bias": ((7168,), "adamw", []),
}


def named(name: str, data: Tensor, replicas: str = "dense") -> NamedTensor:
    return NamedTensor(name, data, lambda: torch.zeros_like(data), replicas)


@pytest.mark.parametrize("name", sorted(K25_SHAPES))
def test_rule_and_pieces_of_every_kind_of_tensor(name):
    shape, kind, pieces = K25_SHAPES[name]
    rule = rule_of(name, shape, K25)
    assert rule.kind == kind
    matrix = torch.empty(shape, device="meta").flatten(1) if pieces else None
    assert [piece.shape(matrix) for piece in rule.pieces] == pieces


def rows_of(part: str) -> list[int]:
    """Rows of a piece for SMALL, row by row from the checkpoint's layout."""
    heads, nope, rope, v = 3, 4, 2, 5
    return {
        "q_nope": [h * (nope + rope) + r for h in range(heads) for r in range(nope)],
        "q_rope": [h * (nope + rope) + nope + r for h in range(heads) for r in range(rope)],
        "k_nope": [h * (nope + v) + r for h in range(heads) for r in range(nope)],
        "v": [h * (nope + v) + nope + r for h in range(heads) for r in range(v)],
        "latent": list(range(6)),
        "k_rope": [6, 7],
    }[part]


@pytest.mark.parametrize(
    ("projection", "num_rows", "parts"),
    [
        ("q_b_proj", 18, ["q_nope", "q_rope"]),
        ("kv_a_proj_with_mqa", 8, ["latent", "k_rope"]),
        ("kv_b_proj", 27, ["k_nope", "v"]),
    ],
)
def test_pieces_are_the_right_rows(projection, num_rows, parts):
    rule = rule_of(LAYER + f"self_attn.{projection}.weight", (num_rows, 2), SMALL)
    matrix = torch.arange(num_rows).repeat_interleave(2).reshape(num_rows, 2)
    found = [piece.rows(matrix)[..., 0].flatten().tolist() for piece in rule.pieces]
    assert [piece.name for piece in rule.pieces] == parts
    assert found == [rows_of(part) for part in parts]
    assert sorted(sum(found, [])) == list(range(num_rows))


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.1.mlp.gate.e_score_correction_bias",
        "model.layers.1.self_attn.o_proj.weight",
        "language_model.model.layers.1.self_attn.o_proj.weight.extra",
        "vision_tower.encoder.blocks.0.wk.weight",
        "languageXmodel.lm_head.weight",
        "",
    ],
)
def test_an_unknown_name_is_an_error(name):
    with pytest.raises(ValueError, match="no rule for tensor"):
        rule_of(name, (4, 4), SMALL)


@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        (LAYER + "self_attn.q_b_proj.weight", (17, 4), "18 rows"),
        (LAYER + "self_attn.kv_b_proj.weight", (18, 4), "27 rows"),
        (LAYER + "self_attn.kv_a_proj_with_mqa.weight", (6, 4), "8 rows"),
        (BLOCK + "wqkv.weight", (8, 4), "12 rows"),
        (BLOCK + "wqkv.weight", (9, 3), "do not divide"),
        (LAYER + "self_attn.o_proj.weight", (4,), "2 non-empty dimensions"),
        (LAYER + "mlp.experts.0.up_proj.weight", (0, 4), "2 non-empty dimensions"),
        ("vision_tower.patch_embed.proj.weight", (4, 588), "4 non-empty dimensions"),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error(name, shape, complaint):
    with pytest.raises(ValueError, match=complaint):
        rule_of(name, shape, SMALL)


def expert(number: int, rows: int, columns: int = 8, dtype=torch.float32) -> NamedTensor:
    name = f"{LAYER}mlp.experts.{number}.up_proj.weight"
    return named(name, torch.empty(rows, columns, dtype=dtype), "expert")


def norm(layer: int, width: int) -> NamedTensor:
    return named(f"language_model.model.layers.{layer}.input_layernorm.weight", torch.empty(width))


def test_owners_do_not_depend_on_the_order_of_the_tensors():
    tensors = [expert(i, 4 + i % 3) for i in range(12)] + [norm(i, 8 + i % 2) for i in range(9)]
    sizes = {"dense": 4, "expert": 2}
    expected = choose_owners(tensors, SMALL, sizes, CONFIG)
    assert set(expected) == {tensor.name for tensor in tensors}
    for seed in range(5):
        random.Random(seed).shuffle(tensors)
        assert choose_owners(tensors, SMALL, sizes, CONFIG) == expected


@pytest.mark.parametrize("seed", range(8))
def test_flops_are_spread_within_four_thirds_of_the_best_assignment(seed):
    draw = random.Random(seed)
    tensors = [expert(i, draw.randint(1, 40), 40) for i in range(6)]
    costs = [muon_flops(t.data, rule_of(t.name, t.data.shape, SMALL), 5) for t in tensors]
    owners = choose_owners(tensors, SMALL, {"expert": 3}, CONFIG)

    def longest(assignment) -> int:
        return max(sum(c for c, o in zip(costs, assignment) if o == m) for m in range(3))

    best = min(longest(assignment) for assignment in itertools.product(range(3), repeat=6))
    assert longest([owners[t.name] for t in tensors]) * 9 <= best * (4 * 3 - 1)


def test_adamw_tensors_go_where_the_least_state_lies():
    heavy = named(LAYER + "self_attn.o_proj.weight", torch.empty(64, 64))
    tensors = [heavy, *(norm(i, 64) for i in range(6))]
    owners = choose_owners(tensors, SMALL, {"dense": 2}, CONFIG)
    assert {owners[t.name] for t in tensors[1:]} == {1 - owners[heavy.name]}


def test_state_bytes_count_masters():
    assert state_bytes(torch.empty(10), "muon") == 40
    assert state_bytes(torch.empty(10), "adamw") == 80
    assert state_bytes(torch.empty(10, dtype=torch.bfloat16), "muon") == 80
    assert state_bytes(torch.empty(10, dtype=torch.bfloat16), "adamw") == 120
    assert state_bytes(torch.empty(10, dtype=torch.float64), "muon") == 80


def test_the_table_reads_well():
    query = named(LAYER + "self_attn.q_b_proj.weight", torch.empty(18, 7))
    rows = assignment_table([query, norm(3, 5)], {query.name: 1, norm(3, 5).name: 0}, SMALL)
    assert [tuple(row) for row in rows] == [
        (norm(3, 5).name, (5,), (), "adamw", "dense", 0),
        (query.name, (18, 7), ("q_nope [12, 7]", "q_rope [6, 7]"), "muon", "dense", 1),
    ]
