"""Compares FP8 blocks with transformers, and block by block where a matrix has an edge."""

import re

import pytest
import torch

from kimi_pretrain.weights import fp8
from kimi_pretrain.weights.compatibility import check_scheme, open_compatible
from tests.unit.kimi_pretrain.weights.weight_folders import (
    language_alone,
    random_weights,
    small_config,
    write_folder,
)

# K2's choice: attention, dense and expert matrices, but no router, embedding, head or norm.
QUANTISED = re.compile(r"(_proj|_proj_with_mqa|q_proj)\.weight$")
STATED = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}


def random(rows: int, width: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw any finite FP8 numbers, and scales of either sign."""
    draw = torch.Generator().manual_seed(seed)
    bits = torch.randint(0, 256, (rows, width), generator=draw).to(torch.uint8)
    bits[(bits & 127) == 127] = 0  # the two codes for NaN
    scale = torch.randn(fp8.scale_shape((rows, width)), generator=draw)
    return bits.view(fp8.DTYPE), scale


def by_hand(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    rows, columns = (torch.arange(size) // 128 for size in weight.shape)
    return weight.float() * scale[rows][:, columns]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_transformers_agrees(dtype):
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # slow import

    weight, scale = random(384, 256)
    theirs = Fp8Dequantize(None)._dequantize_one(weight, scale, output_dtype=dtype)
    assert torch.equal(fp8.dequantize(weight, scale).to(dtype), theirs)


@pytest.mark.parametrize("shape", [(200, 130), (64, 300), (128, 1), (576, 129)])
def test_blocks_at_an_edge_are_smaller(shape):
    """K2's kv_a_proj_with_mqa, for example, has 576 rows."""
    weight, scale = random(*shape)
    assert torch.equal(fp8.dequantize(weight, scale), by_hand(weight, scale))


def folder_of(path, config, change=None):
    """Return a language model in FP8 under K2's names, and the values that it stands for."""
    stored, meant = {}, {}
    for name, tensor in language_alone(random_weights(config, torch.bfloat16)).items():
        stored[name] = tensor
        if QUANTISED.search(name):
            scale_name = name.removesuffix("weight") + fp8.SCALE
            stored[name], stored[scale_name] = random(*tensor.shape)
            meant[name] = by_hand(stored[name], stored[scale_name])
        else:
            meant[name] = tensor.float()
    if change is not None:
        change(stored)
    return write_folder(path, stored, 2), meant


def test_a_released_model_is_read(tmp_path):
    config = small_config()
    folder, meant = folder_of(tmp_path / "fp8", config)
    weights, _ = open_compatible(folder, config.model)
    assert weights.quantized == "FP8"
    assert sum(len(sources) == 2 for sources in weights.sources.values()) > 10
    for name, tensor in meant.items():
        found = weights.read(f"language_model.{name}", torch.bfloat16)
        if not name.endswith("e_score_correction_bias"):  # which is float32 in both
            assert torch.equal(found, tensor.bfloat16()), name


NAME = "model.layers.0.self_attn.o_proj.weight"
DAMAGE = {
    "no scale": (lambda s: s.pop(f"{NAME}_scale_inv"), "_scale_inv' is missing beside"),
    "scale of another shape": (
        lambda s: s.update({f"{NAME}_scale_inv": torch.ones(7, 1)}),
        r"_scale_inv' has shape \[7, 1\], expected \[",
    ),
    "scale of another type": (
        lambda s: s.update({f"{NAME}_scale_inv": s[f"{NAME}_scale_inv"].bfloat16()}),
        "is bfloat16, expected float32",
    ),
    "a scale beside bfloat16": (
        lambda s: s.update({NAME: s[NAME].bfloat16()}),
        "is bfloat16, expected float8_e4m3fn",
    ),
    "a scale of nothing": (
        lambda s: s.update({"model.norm.weight_scale_inv": torch.ones(1, 1)}),
        r"model\.norm\.weight.*FP8 in blocks takes matrices",
    ),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_does_not_fit_is_named(tmp_path, damage):
    change, told = DAMAGE[damage]
    config = small_config()
    folder, _ = folder_of(tmp_path / "fp8", config, change)
    with pytest.raises(ValueError, match=told):
        open_compatible(folder, config.model)


def test_a_weight_that_is_no_number_is_named(tmp_path):
    config = small_config()

    def spoil(stored) -> None:
        stored[NAME].view(torch.uint8)[3, 5] = 127

    weights, _ = open_compatible(folder_of(tmp_path / "fp8", config, spoil)[0], config.model)
    with pytest.raises(ValueError, match=r"o_proj\.weight\[3, 5\] is nan: expected finite"):
        weights.read(f"language_model.{NAME}", torch.bfloat16)


@pytest.mark.parametrize(
    ("key", "value"),
    [("fmt", "e5m2"), ("weight_block_size", [64, 64]), ("weight_block_size", None)],
)
def test_other_kinds_are_refused_by_name(key, value):
    check_scheme(STATED, "here")
    check_scheme({"quant_method": "fp8", "weight_block_size": [128, 128]}, "here")
    with pytest.raises(ValueError, match=f"here: quantised with {key}"):
        check_scheme(STATED | {key: value}, "here")
