"""Tests the comparison of two steps: rounding errors pass, other differences fail by name."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from kimi_pretrain.verify import dep_compare as compare
from kimi_pretrain.verify.dep_compare import (
    GROUPS,
    TOLERANCES,
    StepFacts,
    StepRoutes,
    Tolerance,
    difference,
    group_of,
    tolerance_for,
)
from kimi_pretrain.verify.dep_files import GradientFiles, write_gradients
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder

LAYER = "language_model.model.layers.3."
LANGUAGE = {
    "language_model.model.embed_tokens.weight": "embedding",
    "language_model.model.norm.weight": "norms",
    LAYER + "input_layernorm.weight": "norms",
    LAYER + "post_attention_layernorm.weight": "norms",
    LAYER + "self_attn.q_a_layernorm.weight": "norms",
    LAYER + "self_attn.kv_a_layernorm.weight": "norms",
    LAYER + "self_attn.q_proj.weight": "attention",
    LAYER + "self_attn.kv_a_proj_with_mqa.weight": "attention",
    LAYER + "self_attn.o_proj.weight": "attention",
    LAYER + "mlp.gate_proj.weight": "dense MLP",
    LAYER + "mlp.down_proj.weight": "dense MLP",
    LAYER + "mlp.gate.weight": "router",
    LAYER + "mlp.experts.11.up_proj.weight": "experts",
    LAYER + "mlp.shared_experts.gate_proj.weight": "shared experts",
    "language_model.lm_head.weight": "head",
}
FACTS = StepFacts(
    losses=(6.5,),
    grad_norm=1.25,
    loss_tokens=700,
    vision_tokens=90,
    items=8,
    skipped_samples=0,
)


def vision_names() -> list[str]:
    tiny = MoonViTConfig(width=8, depth=1, heads=2, mlp_width=8, pos_grid=2, out_width=8)
    return [name for name, _ in VisionEncoder(tiny).named_parameters()]


def gradients(seed: int = 0, dtype=torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(5, 7, generator=generator, dtype=dtype)
        for name in [*vision_names(), *LANGUAGE]
    }


FP32, BF16 = TOLERANCES["float32"], TOLERANCES["bfloat16"]


def compared(found=None, facts=FACTS, tolerance=FP32):
    found = gradients() if found is None else found
    return compare.compare(found, gradients(), facts, FACTS, tolerance)


def test_every_parameter_has_its_group():
    assert {name: group_of(name) for name in LANGUAGE} == LANGUAGE
    groups = {name: group_of(name) for name in vision_names()}
    assert groups["vision_tower.patch_embed.proj.bias"] == "vision patch embedding"
    assert groups["vision_tower.patch_embed.pos_emb.weight"] == "vision position table"
    assert groups["vision_tower.encoder.blocks.0.norm1.bias"] == "vision blocks"
    assert groups["vision_tower.encoder.final_layernorm.weight"] == "vision final norm"
    assert groups["mm_projector.proj.2.weight"] == "projector"
    assert {*groups.values(), *LANGUAGE.values()} == set(GROUPS)
    with pytest.raises(ValueError, match=r"'language_model\.model\.layers\.3\.mlp\.bias'"):
        group_of(LAYER + "mlp.bias")


@pytest.mark.parametrize("piece", [4, 1 << 24], ids=["in pieces", "at once"])
def test_the_error_is_that_of_plain_numpy(piece, monkeypatch):
    monkeypatch.setattr(compare, "_PIECE", piece)
    generator = np.random.Generator(np.random.Philox(key=5))
    a, b = generator.normal(size=(2, 9, 11)).astype(np.float32)
    one = difference(torch.from_numpy(a), torch.from_numpy(b))
    a, b = a.astype(np.float64), b.astype(np.float64)
    assert one.error == pytest.approx(np.sqrt(((a - b) ** 2).sum() / (b**2).sum()), rel=1e-14)
    assert one.found_norm == pytest.approx(np.sqrt((a**2).sum()), rel=1e-14)
    assert one.reference_norm == pytest.approx(np.sqrt((b**2).sum()), rel=1e-14)


def test_errors_without_a_ratio():
    zero, some = torch.zeros(3), torch.tensor([0.0, 1e-30, 0.0])
    nan = torch.tensor([math.nan, 1.0, 1.0])
    assert difference(zero, zero).error == 0
    assert difference(some, zero).error == math.inf
    assert difference(zero, some).error == 1
    assert math.isnan(difference(nan, zero).error)
    assert math.isnan(difference(some, nan).error)
    assert difference(torch.ones(3, 1), torch.ones(3)).error == math.inf


def test_rounding_passes_and_ten_times_as_much_does_not():
    noise = {name: g * (1 + 5e-6) for name, g in gradients().items()}
    result = compared(noise)
    assert result.passed
    assert [group.group for group in result.groups] == list(GROUPS)
    assert sum(group.parameters for group in result.groups) == len(noise)
    assert not compared({name: g * (1 + 5e-5) for name, g in gradients().items()}).passed


def test_one_wrong_parameter_fails_its_group_alone():
    """The smallest of the 6 norm tensors is wrong, by an amount too small to show in the group."""
    wrong = gradients()
    name = LAYER + "self_attn.q_a_layernorm.weight"
    wrong[name] = wrong[name] + 1e-3 * torch.ones(5, 7)
    result = compared(wrong)
    failed = [group for group in result.groups if not group.passed]
    assert [(group.group, group.worst) for group in failed] == [("norms", name)]
    assert not result.passed
    assert failed[0].norm_ratio == pytest.approx(1, abs=1e-3)


def test_a_doubled_group_shows_in_the_norms():
    doubled = gradients()
    for name in vision_names():
        if name.startswith("mm_projector"):
            doubled[name] = 2 * doubled[name]
    (projector,) = [group for group in compared(doubled).groups if not group.passed]
    assert (projector.group, projector.norm_ratio, projector.error) == ("projector", 2.0, 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_fails(value):
    broken = gradients()
    broken["language_model.lm_head.weight"][0, 0] = value
    result = compared(broken)
    assert not result.passed
    (head,) = [group for group in result.groups if not group.passed]
    assert head.group == "head"
    plain = json.loads(json.dumps(result.as_dict(), allow_nan=False))
    assert plain["groups"][-1]["error"] is None
    both = compare.compare(broken, broken, FACTS, FACTS, FP32)
    assert not both.passed


def test_missing_and_extra_parameters_fail():
    head = "language_model.lm_head.weight"
    without = {name: g for name, g in gradients().items() if name != head}
    result = compared(without)
    assert (result.missing, result.extra, result.passed) == ((head,), (), False)
    result = compare.compare(gradients(), without, FACTS, FACTS, FP32)
    assert (result.missing, result.extra, result.passed) == ((), (head,), False)
    assert not compare.compare({}, {}, FACTS, FACTS, FP32).passed


@pytest.mark.parametrize(
    "change",
    [
        {"losses": (6.5002,)},
        {"losses": (math.nan,)},
        {"losses": (6.5, 6.5)},
        {"grad_norm": 1.2501},
        {"grad_norm": math.nan},
        {"loss_tokens": 701},
        {"vision_tokens": 89},
        {"items": 7},
        {"skipped_samples": 1},
        {"differing": ("mm_projector.proj.0.bias",)},
    ],
    ids=str,
)
def test_what_is_no_gradient_counts_too(change):
    assert compared(facts=FACTS).passed
    assert not compared(facts=replace(FACTS, **change)).passed


def test_a_token_at_a_tie_passes_and_a_wrong_route_does_not():
    def passes(*routes):
        facts = replace(FACTS, routes=routes)
        return compare.compare(gradients(), gradients(), FACTS, facts, FP32).passed

    tie, wrong = StepRoutes(1, 700, 3, 0), StepRoutes(2, 700, 0, 1, "row 0")
    assert passes(tie)
    assert not passes(tie, wrong)


def test_in_bfloat16_vectors_may_be_coarser_than_matrices():
    generator = torch.Generator().manual_seed(3)
    wanted = {name: torch.randn(9, generator=generator) for name in LANGUAGE}
    head = "language_model.lm_head.weight"
    wanted[head] = torch.randn(9, 9, generator=generator)

    def passes(error, name, tolerance):
        found = wanted | {name: wanted[name] * (1 + error)}
        return compare.compare(found, wanted, FACTS, FACTS, tolerance).passed

    norm = "language_model.model.norm.weight"
    assert passes(0.1, norm, BF16)
    assert not passes(0.3, norm, BF16)
    assert passes(0.01, head, BF16)
    assert not passes(0.1, head, BF16)
    assert not passes(1e-4, norm, FP32)
    assert not passes(1e-4, head, FP32)
    assert not compared(facts=replace(FACTS, losses=(6.7,)), tolerance=BF16).passed


def test_the_worst_parameter_is_the_one_furthest_over_what_is_allowed():
    wanted = {
        "mm_projector.proj.0.weight": torch.ones(3, 3),
        "mm_projector.proj.0.bias": torch.ones(3),
    }
    found = {name: g * f for (name, g), f in zip(wanted.items(), (1.05, 1.1), strict=True)}
    (projector,) = compare.compare(found, wanted, FACTS, FACTS, BF16).groups
    assert (projector.worst, projector.passed) == ("mm_projector.proj.0.weight", False)
    assert projector.error == pytest.approx(0.05, rel=1e-6)


def test_the_coarsest_type_on_the_way_counts():
    fp64 = TOLERANCES["float64"]
    assert tolerance_for("float64", "model") == fp64 == Tolerance(1e-10, 1e-10, 5e-7)
    assert tolerance_for("float32", "model") == FP32 == Tolerance(1e-5, 1e-5, 1e-5)
    assert tolerance_for("float64", "float32") == FP32
    assert tolerance_for("float32", "bfloat16") == tolerance_for("bfloat16", "model") == BF16
    assert tolerance_for("bfloat16", "float32") == BF16
    assert tolerance_for("float32", "model", steps=3).matrices == pytest.approx(1e-4)
    assert tolerance_for("float32", "model", steps=3).vectors == pytest.approx(1e-4)
    assert tolerance_for("float32", "model", steps=3).ties == pytest.approx(1e-4)
    for types in (("bfloat16", "model"), ("float32", "bfloat16")):
        with pytest.raises(ValueError, match=r"--steps 2 .* --steps 1"):
            tolerance_for(*types, steps=2)


def test_gradients_come_back_from_the_files_of_all_ranks(tmp_path):
    whole = gradients(dtype=torch.float32)
    names = list(whole)
    for rank in range(3):
        mine = ((name, whole[name]) for name in names[rank::3])
        write_gradients(tmp_path, rank, mine, limit=300)
    files = list(tmp_path.glob("*.safetensors"))
    assert len(files) > 2 * 3  # 140 bytes each, so the third one closes a file
    found = GradientFiles(tmp_path)
    assert sorted(found) == sorted(names)
    assert all(torch.equal(found[name], whole[name]) for name in names)
    write_gradients(tmp_path, 3, [(names[0], whole[names[0]])])
    with pytest.raises(ValueError, match=names[0]):
        GradientFiles(tmp_path)


def test_a_view_is_written_as_what_it_shows(tmp_path):
    whole = torch.arange(12.0).reshape(3, 4)
    write_gradients(tmp_path, 0, [("a", whole[:, 1:3]), ("b", whole.T)])
    found = GradientFiles(tmp_path)
    assert torch.equal(found["a"], whole[:, 1:3])
    assert torch.equal(found["b"], whole.T)
