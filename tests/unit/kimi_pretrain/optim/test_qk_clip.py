"""Tests QK-Clip by the logits of a 64-head toy MLA with K2's head widths."""

import math

import pytest
import torch
from einops import rearrange
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.muonclip import DistributedMuonClip
from kimi_pretrain.optim.qk_clip import factors, table_of_maxima

HEADS, NOPE, ROPE, VALUE, LATENT = 64, 128, 64, 128, 16
SHAPE = ModelShape(HEADS, NOPE, ROPE, VALUE, LATENT)
THRESHOLD = 100.0
TOKENS, HIDDEN, QUERY_LATENT = 10, 20, 12
PLANTED = {3: 30.0, 17: -20.0, 63: 160.0}  # factors by which the rows of these heads are scaled
LAYER = "language_model.model.layers.0.self_attn."


def rotate(x: Tensor) -> Tensor:
    """Apply RoPE to adjacent pairs of [tokens, ..., ROPE]; the token's index is its position."""
    position = torch.arange(len(x), dtype=x.dtype).reshape(-1, *[1] * (x.ndim - 1))
    angle = position * 50_000.0 ** (-torch.arange(ROPE // 2, dtype=x.dtype) / (ROPE // 2))
    a, b = x[..., 0::2], x[..., 1::2]
    pair = torch.stack([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)
    return pair.flatten(-2)


def normalised(x: Tensor) -> Tensor:
    return x / x.square().mean(-1, keepdim=True).sqrt()


class Layer:
    """Weights of one layer in the checkpoint's layout, with or without a query latent."""

    def __init__(self, q_lora: bool, planted: dict[int, float], dtype: torch.dtype):
        generator = torch.Generator().manual_seed(0)

        def draw(*shape: int, std: float = 1.0) -> Tensor:
            return std * torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.x = draw(TOKENS, HIDDEN)
        self.q_a = draw(QUERY_LATENT, HIDDEN) if q_lora else None
        self.kv_a = draw(LATENT + ROPE, HIDDEN, std=HIDDEN**-0.5)
        inner = QUERY_LATENT if q_lora else HIDDEN
        query = draw(HEADS, NOPE + ROPE, inner, std=2 * inner**-0.5)
        for head, factor in planted.items():
            query[head] *= factor
        self.query = query.flatten(0, 1).to(dtype)
        self.kv_b = draw(HEADS * (NOPE + VALUE), LATENT, std=LATENT**-0.5).to(dtype)
        self.q_name = LAYER + ("q_b_proj.weight" if q_lora else "q_proj.weight")
        self.kv_name = LAYER + "kv_b_proj.weight"

    def optimizer(self) -> DistributedMuonClip:
        weights = {self.q_name: self.query, self.kv_name: self.kv_b}
        named = [
            NamedTensor(name, w, lambda: torch.zeros(0), "dense") for name, w in weights.items()
        ]
        config = OptimConfig(lr=1e-3, min_lr=0.0, warmup_steps=0, stable_steps=1, decay_steps=0)
        return DistributedMuonClip(named, {"dense": None}, config, SHAPE)

    def clip(self, gamma: Tensor) -> None:
        self.optimizer().apply_qk_clip(self.q_name, self.kv_name, gamma, SHAPE)

    def logits(self, query: Tensor | None = None, kv_b: Tensor | None = None) -> Tensor:
        """Return the softmax input [heads, tokens, tokens], in fp64 from the current weights."""
        query, kv_b = (
            own.double() if given is None else given.double()
            for own, given in ((self.query, query), (self.kv_b, kv_b))
        )
        into = self.x if self.q_a is None else normalised(self.x @ self.q_a.T)
        q = rearrange(into @ query.T, "t (n d) -> t n d", n=HEADS)
        latent, k_rope = (self.x @ self.kv_a.T).split([LATENT, ROPE], dim=1)
        kv = rearrange(normalised(latent) @ kv_b.T, "t (n d) -> t n d", n=HEADS)
        nope = torch.einsum("qnd,knd->nqk", q[..., :NOPE], kv[..., :NOPE])
        rope = torch.einsum("qnd,kd->nqk", rotate(q[..., NOPE:]), rotate(k_rope))
        return (nope + rope) / math.sqrt(NOPE + ROPE)


def maxima(logits: Tensor) -> Tensor:
    """Return the largest logit of each head over the pairs that attention sees."""
    seen = torch.ones(TOKENS, TOKENS).tril().bool()
    return logits.masked_fill(~seen, -math.inf).amax(dim=(1, 2))


def over(largest: Tensor) -> list[int]:
    return (largest > THRESHOLD).nonzero().flatten().tolist()


# Relative to the largest logit of a clipped head, which is the threshold after the clip.
EXACT = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("q_lora", [True, False])
def test_logits_of_clipped_heads_shrink_by_gamma_and_no_other_moves(q_lora, dtype):
    layer = Layer(q_lora, PLANTED, dtype)
    old = layer.logits()
    largest = maxima(old)
    gamma = factors(largest, THRESHOLD)
    clipped = over(largest)
    assert set(clipped) == {3, 17, 63}
    layer.clip(gamma)
    new = layer.logits()
    for head in range(HEADS):
        if head in clipped:
            error = (new[head] - gamma[head] * old[head]).abs().max()
            assert error <= EXACT[dtype] * THRESHOLD
            assert maxima(new)[head].item() == pytest.approx(THRESHOLD, rel=EXACT[dtype])
        else:
            assert torch.equal(new[head], old[head])


def test_values_and_unclipped_rows_keep_their_bits():
    layer = Layer(True, {5: 50.0}, torch.float64)
    query, kv_b = layer.query.clone(), layer.kv_b.clone()
    layer.clip(factors(maxima(layer.logits()), THRESHOLD))
    changed_q = (layer.query != query).any(dim=1).nonzero().flatten().tolist()
    changed_kv = (layer.kv_b != kv_b).any(dim=1).nonzero().flatten().tolist()
    assert changed_q == list(range(5 * (NOPE + ROPE), 6 * (NOPE + ROPE)))
    begin = 5 * (NOPE + VALUE)
    assert changed_kv == list(range(begin, begin + NOPE))


@pytest.mark.parametrize("q_lora", [True, False])
def test_bf16_copies_and_fp32_masters_are_clipped(q_lora):
    """The optimizer holds both: the master's logits are exact to fp32, the copy's to bf16."""
    layer = Layer(q_lora, PLANTED, torch.bfloat16)
    optimizer = layer.optimizer()
    state = optimizer.state_dict()
    masters = [state[f"optim.master.{name}"] for name in (layer.q_name, layer.kv_name)]
    for master in masters:  # adds bits below bf16, as steps of training do
        noise = torch.rand(master.shape, generator=torch.Generator().manual_seed(1))
        master.mul_(1 + 1e-3 * (noise - 0.5))
    old = {"copy": layer.logits(), "master": layer.logits(*masters)}
    gamma = factors(maxima(old["copy"]), THRESHOLD)
    optimizer.apply_qk_clip(layer.q_name, layer.kv_name, gamma, SHAPE)
    new = {"copy": layer.logits(), "master": layer.logits(*masters)}
    assert layer.query.dtype == layer.kv_b.dtype == torch.bfloat16
    for part, exact in (("copy", 2**-8), ("master", 1e-6)):
        error = (new[part] - gamma[:, None, None] * old[part]).abs().amax(dim=(1, 2))
        for head in range(HEADS):
            if head in PLANTED:
                assert 0 < error[head] <= exact * THRESHOLD, (part, head)
            else:
                assert error[head] == 0, (part, head)


def test_factors_by_hand():
    largest = torch.tensor([200.0, 100.0, 99.0, 0.0, -3.0, -math.inf, math.inf, math.nan, 400.0])
    expected = torch.tensor([0.5, 1, 1, 1, 1, 1, 1, 1, 0.25])
    assert torch.equal(factors(largest, 100.0), expected)


def test_one_head_over_while_another_is_negative():
    """Megatron-LM#7517 makes NaN in this case, from the root of a negative ratio."""
    largest = torch.full((HEADS,), -7.0, dtype=torch.float64)
    largest[9] = 250.0
    assert (THRESHOLD / largest).clamp(max=1.0).pow(0.5).isnan().any()
    layer = Layer(True, {}, torch.float64)
    old = layer.logits()
    layer.clip(factors(largest, THRESHOLD))
    new = layer.logits()
    assert torch.isfinite(new).all()
    torch.testing.assert_close(new[9], 0.4 * old[9], rtol=1e-12, atol=1e-12)
    others = [head for head in range(HEADS) if head != 9]
    assert torch.equal(new[others], old[others])


@pytest.mark.parametrize("unhealthy", [-math.inf, math.inf, math.nan, 0.0, -0.0, -3e38])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unhealthy_maxima_never_reach_the_weights(unhealthy, dtype):
    """Fully masked rows, heads without tokens and overflow occur next to a head over the limit."""
    layer = Layer(True, {}, dtype)
    largest = torch.full((HEADS,), unhealthy)
    largest[[0, 40]] = torch.tensor([200.0, 3e38])  # nearly the largest fp32 number
    old_q, old_kv = layer.query.clone(), layer.kv_b.clone()
    (table,) = table_of_maxima({0: largest}, 1, HEADS)
    layer.clip(factors(table, THRESHOLD))
    for new, old, rows in ((layer.query, old_q, NOPE + ROPE), (layer.kv_b, old_kv, NOPE + VALUE)):
        assert torch.isfinite(new).all()
        changed = (new != old).any(dim=1).nonzero().flatten() // rows
        assert sorted(set(changed.tolist())) == [0, 40]


def test_the_table_holds_layers_of_other_ranks_as_unseen():
    mine = {2: torch.tensor([1.5, math.nan, -2.0]), 0: torch.tensor([-math.inf, math.inf, 0.1])}
    table = table_of_maxima(mine, 4, 3)
    unseen = [-math.inf] * 3
    assert table.dtype == torch.float64
    tenth = float(torch.tensor(0.1))
    expected = [[-math.inf, math.inf, tenth], unseen, [1.5, math.inf, -2.0], unseen]
    assert table.tolist() == expected
    assert table_of_maxima({}, 2, 3).tolist() == [unseen, unseen]
