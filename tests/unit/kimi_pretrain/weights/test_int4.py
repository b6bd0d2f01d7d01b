"""Compares INT4 of compressed-tensors with its documented layout and with the library's output."""

import pytest
import torch

from kimi_pretrain.weights import int4
from kimi_pretrain.weights.compatibility import check_scheme
from tests.unit.kimi_pretrain.weights.weight_folders import dequantized_by_hand

# Output of compressed-tensors 0.20.0 for `ramp()`: observer "minmax", groups of 32, symmetric.
PACKED = [
    [1127358737, -2022283948, -1146447480, -1122868, *[-2004318072] * 4],
    [-2012706680, *[-2004318072] * 3, 1126310159, -2023332540, -878007928, -1118772],
]
SCALE = [[2.140625, 0.0078125], [0.400390625, 1.0]]


def ramp():
    """Return two rows of two groups: a ramp, zeros, one number, and halves that round to even."""
    up = torch.arange(32) - 16.0
    alone = torch.zeros(32)
    alone[5] = -3.0
    halves = torch.cat([torch.tensor([7.5]), torch.arange(31) * 0.5 - 7.5])
    return torch.stack([torch.cat([up, torch.zeros(32)]), torch.cat([alone, halves])]).bfloat16()


def random(rows, width, std=1.0):
    return (torch.randn(rows, width, generator=torch.Generator().manual_seed(0)) * std).bfloat16()


def test_quantizing_gives_the_librarys_words_and_scales():
    packed, scale = int4.quantize(ramp())
    assert packed.tolist() == PACKED
    assert scale.tolist() == SCALE


@pytest.mark.parametrize("std", [1e-3, 1.0, 50.0])
def test_dequantizing_gives_what_the_layout_says(std):
    packed, scale = int4.quantize(random(6, 96, std))
    assert torch.equal(int4.dequantize(packed, scale), dequantized_by_hand(packed, scale))


def test_any_word_and_scale_is_read_as_the_layout_says():
    """Covers sign bits and negative scales, beyond the output of `quantize`."""
    generator = torch.Generator().manual_seed(1)
    packed = torch.randint(-(2**31), 2**31 - 1, (5, 8), generator=generator).to(torch.int32)
    scale = torch.randn(5, 2, generator=generator).bfloat16()
    assert torch.equal(int4.dequantize(packed, scale), dequantized_by_hand(packed, scale))
    assert torch.equal(int4.pack(int4.unpack(packed)), packed)


def test_quantizing_costs_half_a_step_at_most():
    weight = random(16, 128)
    packed, scale = int4.quantize(weight)
    gap = (int4.dequantize(packed, scale).float() - weight.float()).unflatten(1, (-1, 32)).abs()
    # A little more than half a step, because scales and weights are bfloat16.
    assert (gap <= 0.57 * scale.float()[:, :, None] + 1e-6).all()


def test_the_library_agrees():
    pack_quantized = pytest.importorskip("compressed_tensors.compressors.pack_quantized.base")
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    stated = int4.QUANTIZATION["config_groups"]["group_0"]["weights"]
    args = {key: value for key, value in stated.items() if key != "block_structure"}
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    packed, scale = int4.quantize(random(32, 256))
    stored = {"weight_packed": packed, "weight_scale": scale}
    stored["weight_shape"] = torch.tensor([32, 256], dtype=torch.int32)
    theirs = pack_quantized.PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(int4.dequantize(packed, scale), theirs)


def test_shapes_and_rows_that_are_no_groups():
    assert int4.packed_shapes((2048, 7168)) == {
        "weight_packed": (2048, 896),
        "weight_scale": (2048, 224),
        "weight_shape": (2,),
    }
    with pytest.raises(ValueError, match=r"\[8, 48\].*groups of 32"):
        int4.packed_shapes((8, 48))


@pytest.mark.parametrize(
    ("key", "value"),
    [("num_bits", 8), ("group_size", 128), ("symmetric", False), ("type", "float")],
)
def test_other_quantizations_are_refused_by_name(key, value):
    check_scheme(int4.QUANTIZATION, "here")
    weights = int4.QUANTIZATION["config_groups"]["group_0"]["weights"] | {key: value}
    other = int4.QUANTIZATION | {"config_groups": {"group_0": {"weights": weights}}}
    with pytest.raises(ValueError, match=f"here: quantised with {key} {value!r}"):
        check_scheme(other, "here")
