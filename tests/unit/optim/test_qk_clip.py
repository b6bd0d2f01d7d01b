"""QK-Clip on a 64-head toy attention: the logits themselves are the oracle."""

import math

import pytest
import torch
from einops import rearrange
from torch import Tensor

from kimi_pretrain.optim.groups import ModelShape
from kimi_pretrain.optim.qk_clip import clip_, factors

SHAPE = ModelShape(
    num_heads=64, qk_nope_dim=6, qk_rope_dim=4, v_dim=5, kv_lora_rank=8, vision_heads=1
)
THRESHOLD = 100.0
TOKENS, QUERY_RANK = 12, 16


def rotate(x: Tensor) -> Tensor:
    """RoPE on adjacent pairs of [tokens, ..., 4]; the token's number is its position."""
    position = torch.arange(len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    angle = position * torch.tensor([1.0, 0.02], dtype=x.dtype)
    a, b = x[..., 0::2], x[..., 1::2]
    pair = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return pair.flatten(-2)


class Attention:
    """Weights of one layer in the checkpoint's layout, fp64, with a few heads planted huge."""

    def __init__(self, planted: dict[int, float]):
        generator = torch.Generator().manual_seed(0)
        kw = {"generator": generator, "dtype": torch.float64}
        self.x = torch.randn(TOKENS, QUERY_RANK, **kw)
        self.latent = torch.randn(TOKENS, SHAPE.kv_lora_rank, **kw)
        self.k_rope = torch.randn(TOKENS, SHAPE.qk_rope_dim, **kw)
        self.q = torch.randn(64 * 10, QUERY_RANK, **kw)
        self.kv_b = torch.randn(64 * 11, SHAPE.kv_lora_rank, **kw)
        for head, factor in planted.items():
            self.q[head * 10 : head * 10 + 10] *= factor

    def logits(self) -> Tensor:
        """[heads, tokens, tokens] of the softmax's input; query after key is cut by the caller."""
        q = rearrange(self.x @ self.q.T, "t (n d) -> t n d", n=64)
        kv = rearrange(self.latent @ self.kv_b.T, "t (n d) -> t n d", n=64)
        nope = torch.einsum("qnd,knd->nqk", q[..., :6], kv[..., :6])
        rope = torch.einsum("qnd,kd->nqk", rotate(q[..., 6:]), rotate(self.k_rope))
        return (nope + rope) / math.sqrt(10)

    def maxima(self) -> Tensor:
        valid = torch.ones(TOKENS, TOKENS).tril().bool()
        return self.logits().masked_fill(~valid, -math.inf).amax(dim=(1, 2))


def test_logits_of_clipped_heads_shrink_by_gamma_and_no_other_moves():
    layer = Attention({3: 40.0, 17: 25.0, 63: 90.0})
    old, maxima = layer.logits(), layer.maxima()
    gamma = factors(maxima, THRESHOLD)
    clipped = (maxima > THRESHOLD).nonzero().flatten().tolist()
    assert set(clipped) >= {3, 17, 63}
    assert len(clipped) < 64
    clip_(layer.q, layer.kv_b, gamma, SHAPE)
    new = layer.logits()
    for head in range(64):
        if head in clipped:
            torch.testing.assert_close(new[head], gamma[head] * old[head], rtol=1e-12, atol=1e-11)
            assert layer.maxima()[head].item() == pytest.approx(THRESHOLD)
        else:
            assert torch.equal(new[head], old[head])


def test_values_and_unclipped_rows_keep_their_bits():
    layer = Attention({5: 100.0})
    q, kv_b = layer.q.clone(), layer.kv_b.clone()
    clip_(layer.q, layer.kv_b, factors(layer.maxima().where(torch.arange(64) == 5, -1), 100), SHAPE)
    changed_q = (layer.q != q).any(dim=1).nonzero().flatten().tolist()
    changed_kv = (layer.kv_b != kv_b).any(dim=1).nonzero().flatten().tolist()
    assert changed_q == list(range(50, 60))
    assert changed_kv == list(range(55, 61))


def test_factors_by_hand():
    maxima = torch.tensor([200.0, 100.0, 99.0, 0.0, -3.0, -math.inf, math.inf, math.nan, 400.0])
    expected = torch.tensor([0.5, 1, 1, 1, 1, 1, 1, 1, 0.25])
    assert torch.equal(factors(maxima, 100.0), expected)


def test_one_head_over_while_another_is_negative():
    """The case in which Megatron-LM#7517 makes NaN."""
    layer = Attention({})
    old = layer.logits()
    maxima = torch.full((64,), -7.0, dtype=torch.float64)
    maxima[9] = 250.0
    clip_(layer.q, layer.kv_b, factors(maxima, THRESHOLD), SHAPE)
    new = layer.logits()
    assert torch.isfinite(new).all()
    torch.testing.assert_close(new[9], 0.4 * old[9], rtol=1e-12, atol=1e-12)
    others = [head for head in range(64) if head != 9]
    assert torch.equal(new[others], old[others])


def test_bf16_weights_are_scaled_in_fp32():
    weight = torch.randn(64 * 10, 3).bfloat16()
    kv_b = torch.randn(64 * 11, 3).bfloat16()
    gamma = torch.full((64,), 0.3)
    expected = (weight[6].float() * 0.3).bfloat16()
    clip_(weight, kv_b, gamma, SHAPE)
    assert torch.equal(weight[6], expected)


def test_sizes_that_do_not_fit_are_refused():
    q, kv_b = torch.zeros(640, 2), torch.zeros(704, 2)
    with pytest.raises(ValueError, match="64 heads of 10 rows"):
        clip_(torch.zeros(630, 2), kv_b, torch.ones(64), SHAPE)
    with pytest.raises(ValueError, match="64 heads of 10 rows"):
        clip_(q, kv_b, torch.ones(63), SHAPE)
    with pytest.raises(ValueError, match="64 heads of 11 rows"):
        clip_(q, torch.zeros(640, 2), torch.ones(64), SHAPE)
