"""Rotary angles equal transformers' up to the last position, and keep no tables."""

import gc

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding

from kimi_pretrain.engine.latent_attention import RestartingRotary

LONGEST = 262_144
# K2.5's long stage, K2's 128k, and another: factor, beta_fast, mscale_all_dim. If mscale_all_dim is
# 0, the temperature scales cosines and sines; in the others this factor is 1.
SCALINGS = {
    "K2.5": (64.0, 32.0, 1.0),
    "K2": (32.0, 1.0, 1.0),
    "eightfold, temperature": (8.0, 32.0, 0.0),
}


def yarn(factor, beta_fast, mscale_all_dim):
    """Return the embedding as Megatron-Core's attention builds it."""
    from megatron.core.models.common.embeddings import YarnRotaryEmbedding

    return YarnRotaryEmbedding(
        64, rotary_base=50_000.0, scaling_factor=factor, original_max_position_embeddings=4096,
        beta_fast=beta_fast, beta_slow=1.0, mscale=1.0, mscale_all_dim=mscale_all_dim,
    )  # fmt: skip


@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_are_those_of_transformers_bit_for_bit(name):
    factor, beta_fast, mscale_all_dim = SCALINGS[name]
    scaling = dict(
        rope_type="yarn", factor=factor, beta_fast=beta_fast, beta_slow=1.0, mscale=1.0,
        mscale_all_dim=mscale_all_dim, original_max_position_embeddings=4096, rope_theta=50_000.0,
    )  # fmt: skip
    config = DeepseekV3Config(
        qk_rope_head_dim=64, max_position_embeddings=LONGEST, rope_parameters=scaling
    )
    positions = torch.arange(LONGEST)
    cos, sin = DeepseekV3RotaryEmbedding(config)(torch.zeros(1), positions[None])
    angles, factor = RestartingRotary(yarn(*SCALINGS[name]))(positions)
    assert angles.shape == (LONGEST, 1, 1, 64)
    assert (factor != 1.0) == (mscale_all_dim == 0.0)
    assert torch.equal(angles[:, 0, 0].cos() * factor, cos[0])
    assert torch.equal(angles[:, 0, 0].sin() * factor, sin[0])


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "yarn"])
def test_angles_are_the_rows_of_the_table_that_is_not_kept(plain):
    """Each microbatch has a different length, set by its longest document.

    Megatron-Core kept a table for each length, up to 32.
    """
    from megatron.core.models.common.embeddings import RotaryEmbedding

    theirs = RotaryEmbedding(64, 1.0) if plain else yarn(*SCALINGS["K2.5"])
    rotary = RestartingRotary(theirs)
    gc.collect()
    before = _bytes_of_tensors()
    for length in range(1000, 1040):
        angles, _ = rotary(torch.arange(length).flip(0))
        assert angles.shape[0] == length
    table = theirs.get_emb(length)
    table = table if plain else table[0]
    assert torch.equal(angles, table.flip(0))
    assert theirs.forward.cache_info().currsize == 0
    del angles, table
    gc.collect()
    assert _bytes_of_tensors() <= before


def _bytes_of_tensors():
    found = {one.untyped_storage().data_ptr(): one.nbytes for one in gc.get_objects()
             if type(one) is torch.Tensor and one.device.type == "cpu"}  # fmt: skip
    return sum(found.values())
