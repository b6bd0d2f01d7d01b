"""Tests rules by name, parameter groups, and pieces against brute-force row lists."""

import re

import pytest
import torch

from kimi_pretrain.optim.config import GROUPS
from kimi_pretrain.optim.groups import _RULES, ModelShape, Rule

K25 = ModelShape(num_heads=64, qk_nope_dim=128, qk_rope_dim=64, v_dim=128, kv_lora_rank=512)
SMALL = ModelShape(num_heads=3, qk_nope_dim=4, qk_rope_dim=2, v_dim=5, kv_lora_rank=6)

LAYER = "language_model.model.layers.7."
ATTENTION = LAYER + "self_attn."
TOWER = "vision_tower."
BLOCK = "vision_tower.encoder.blocks.26."
# name -> shape, parameter group, pieces of Muon (empty: AdamW)
K25_TENSORS = {
    "language_model.model.embed_tokens.weight": ((163840, 7168), "embedding", []),
    "language_model.lm_head.weight": ((163840, 7168), "head", []),
    "language_model.model.norm.weight": ((7168,), "norms", []),
    LAYER + "input_layernorm.weight": ((7168,), "norms", []),
    LAYER + "post_attention_layernorm.weight": ((7168,), "norms", []),
    ATTENTION + "q_a_layernorm.weight": ((1536,), "norms", []),
    ATTENTION + "kv_a_layernorm.weight": ((512,), "norms", []),
    ATTENTION + "q_a_proj.weight": ((1536, 7168), "attention", [(1536, 7168)]),
    ATTENTION + "q_b_proj.weight": ((12288, 1536), "attention", [(8192, 1536), (4096, 1536)]),
    ATTENTION + "q_proj.weight": ((12288, 2048), "attention", [(8192, 2048), (4096, 2048)]),
    ATTENTION + "kv_a_proj_with_mqa.weight": ((576, 7168), "attention", [(512, 7168), (64, 7168)]),
    ATTENTION + "kv_b_proj.weight": ((16384, 512), "attention", [(8192, 512), (8192, 512)]),
    ATTENTION + "o_proj.weight": ((7168, 8192), "attention", [(7168, 8192)]),
    LAYER + "mlp.gate_proj.weight": ((18432, 7168), "dense_mlp", [(18432, 7168)]),
    LAYER + "mlp.gate.weight": ((384, 7168), "router", [(384, 7168)]),
    LAYER + "mlp.experts.383.up_proj.weight": ((2048, 7168), "experts", [(2048, 7168)]),
    LAYER + "mlp.shared_experts.down_proj.weight": (
        (7168, 2048),
        "shared_experts",
        [(7168, 2048)],
    ),
    TOWER + "patch_embed.proj.weight": ((1152, 3, 14, 14), "vision_tower", [(1152, 588)]),
    TOWER + "patch_embed.proj.bias": ((1152,), "vision_tower", []),
    TOWER + "patch_embed.pos_emb.weight": ((64, 64, 1152), "vision_tower", []),
    BLOCK + "norm0.weight": ((1152,), "vision_tower", []),
    BLOCK + "norm1.bias": ((1152,), "vision_tower", []),
    BLOCK + "wqkv.weight": ((3456, 1152), "vision_tower", [(1152, 1152)] * 3),
    BLOCK + "wqkv.bias": ((3456,), "vision_tower", []),
    BLOCK + "wo.weight": ((1152, 1152), "vision_tower", [(1152, 1152)]),
    BLOCK + "wo.bias": ((1152,), "vision_tower", []),
    BLOCK + "mlp.fc0.weight": ((4304, 1152), "vision_tower", [(4304, 1152)]),
    BLOCK + "mlp.fc1.bias": ((1152,), "vision_tower", []),
    TOWER + "encoder.final_layernorm.bias": ((1152,), "vision_tower", []),
    "mm_projector.pre_norm.weight": ((1152,), "projector", []),
    "mm_projector.proj.0.weight": ((4608, 4608), "projector", [(4608, 4608)]),
    "mm_projector.proj.2.weight": ((7168, 4608), "projector", [(7168, 4608)]),
    "mm_projector.proj.2.bias": ((7168,), "projector", []),
    "siglip.vision_model.head.probe": ((1, 1, 1152), "siglip", []),
    "siglip.text_model.head.weight": ((1152, 1152), "siglip", []),
    "siglip.logit_scale": ((1,), "siglip", []),
}


@pytest.mark.parametrize("name", sorted(K25_TENSORS))
def test_rule_group_and_pieces_of_every_kind_of_tensor(name):
    shape, group, pieces = K25_TENSORS[name]
    rule = K25.rule_of(name, shape)
    assert (rule.kind, rule.group) == ("muon" if pieces else "adamw", group)
    matrix = torch.empty(shape, device="meta").flatten(1) if pieces else None
    assert [piece.shape(matrix.shape) for piece in rule.pieces] == pieces
    assert K25.rule_of(name, shape, matrices="adamw") == Rule("adamw", group)
    assert sum(bool(re.fullmatch(pattern, name)) for pattern, _, _ in _RULES) == 1


def test_every_group_has_tensors_and_every_rule_one_group():
    assert {group for _, group, _ in K25_TENSORS.values()} == set(GROUPS)
    assert {group for _, group, _ in _RULES} == set(GROUPS)


def rows_of(part: str) -> list[int]:
    """Return the rows of a piece for SMALL, row by row from the checkpoint's layout."""
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
    rule = SMALL.rule_of(LAYER + f"self_attn.{projection}.weight", (num_rows, 2))
    matrix = torch.arange(num_rows).repeat_interleave(2).reshape(num_rows, 2)
    found = [piece.rows(matrix)[..., 0].flatten().tolist() for piece in rule.pieces]
    assert [piece.name for piece in rule.pieces] == parts
    assert found == [rows_of(part) for part in parts]
    assert sorted(sum(found, [])) == list(range(num_rows))


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
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
def test_an_unknown_name_is_an_error_that_names_it(name, matrices):
    with pytest.raises(ValueError, match="no rule for tensor") as error:
        SMALL.rule_of(name, (4, 4), matrices)
    assert f"'{name}' (4, 4)" in str(error.value)


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
@pytest.mark.parametrize(
    ("name", "shape", "complaint"),
    [
        (LAYER + "self_attn.q_b_proj.weight", (17, 4), "18 rows"),
        (LAYER + "self_attn.kv_b_proj.weight", (18, 4), "27 rows"),
        (LAYER + "self_attn.kv_a_proj_with_mqa.weight", (6, 4), "8 rows"),
        (BLOCK + "wqkv.weight", (8, 4), "12 rows"),
        (LAYER + "self_attn.o_proj.weight", (4,), "2 non-empty dimensions"),
        (LAYER + "mlp.experts.0.up_proj.weight", (0, 4), "2 non-empty dimensions"),
        ("vision_tower.patch_embed.proj.weight", (4, 588), "4 non-empty dimensions"),
    ],
)
def test_a_shape_that_does_not_fit_is_an_error(name, shape, complaint, matrices):
    with pytest.raises(ValueError, match=complaint):
        SMALL.rule_of(name, shape, matrices)
