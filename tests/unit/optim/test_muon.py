"""The plain optimizer against torch.optim.Muon on hand-cut pieces and torch.optim.AdamW."""

import dataclasses

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.muon import PlainMuon

SHAPE = ModelShape(
    num_heads=3, qk_nope_dim=4, qk_rope_dim=2, v_dim=5, kv_lora_rank=6, vision_heads=2
)
CONFIG = OptimConfig(
    lr=0.02, min_lr=0, warmup_steps=0, stable_steps=1, decay_steps=0, ns_dtype="float32"
)
STEPS = 20
ATTENTION = "language_model.model.layers.0.self_attn."
# name -> shape, and the row lists of the matrices that Kimi orthogonalises by themselves
MATRICES: dict[str, tuple[tuple[int, ...], list[list[int]]]] = {
    ATTENTION + "o_proj.weight": ((10, 16), [list(range(10))]),
    ATTENTION + "q_a_proj.weight": ((16, 10), [list(range(16))]),
    ATTENTION + "q_b_proj.weight": (
        (18, 12),
        [[0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15], [4, 5, 10, 11, 16, 17]],
    ),
    ATTENTION + "kv_a_proj_with_mqa.weight": ((8, 11), [[0, 1, 2, 3, 4, 5], [6, 7]]),
    ATTENTION + "kv_b_proj.weight": (
        (27, 6),
        [
            [h * 9 + r for h in range(3) for r in range(4)],
            [h * 9 + r for h in range(3) for r in range(4, 9)],
        ],
    ),
    "language_model.model.layers.1.mlp.gate.weight": ((4, 9), [list(range(4))]),
    "language_model.model.layers.1.mlp.experts.0.up_proj.weight": ((6, 9), [list(range(6))]),
    "language_model.model.layers.1.mlp.experts.1.up_proj.weight": ((6, 9), [list(range(6))]),
    "vision_tower.patch_embed.proj.weight": ((4, 3, 2, 2), [[0, 1, 2, 3]]),
    "vision_tower.encoder.blocks.0.wqkv.weight": (
        (12, 4),
        [list(range(4)), list(range(4, 8)), list(range(8, 12))],
    ),
}
ADAMW = {
    "language_model.model.embed_tokens.weight": (11, 5),
    "language_model.lm_head.weight": (11, 5),
    "language_model.model.norm.weight": (5,),
    "vision_tower.patch_embed.pos_emb.weight": (3, 3, 4),
    "mm_projector.proj.0.bias": (7,),
}


def draw(shape: tuple[int, ...], *key: object) -> Tensor:
    seed = sum(ord(c) * 31**i for i, c in enumerate(repr(key))) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def train(shapes: dict[str, tuple[int, ...]], config: OptimConfig, steps: int = STEPS):
    """Weights after some steps of the plain optimizer on random gradients."""
    weights = {name: draw(shape, name) for name, shape in shapes.items()}
    grads: dict[str, Tensor] = {}
    named = [NamedTensor(n, w, lambda n=n: grads[n], "dense") for n, w in weights.items()]
    optimizer = PlainMuon(named, config, SHAPE)
    for step in range(steps):
        grads |= {name: draw(shape, name, step) for name, shape in shapes.items()}
        optimizer.step(config.lr * (1 + step % 3))
    return weights


def torch_muon(name: str, config: OptimConfig) -> Tensor:
    """torch.optim.Muon with one parameter per hand-cut matrix, put together again."""
    shape, row_lists = MATRICES[name]
    weight = draw(shape, name).flatten(1)
    parameters = [torch.nn.Parameter(weight[rows].clone()) for rows in row_lists]
    optimizer = torch.optim.Muon(
        parameters, lr=config.lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(STEPS):
        grad = draw(shape, name, step).flatten(1)
        for parameter, rows in zip(parameters, row_lists):
            parameter.grad = grad[rows].clone()
        optimizer.param_groups[0]["lr"] = config.lr * (1 + step % 3)
        optimizer.step()
    for parameter, rows in zip(parameters, row_lists):
        weight[rows] = parameter.detach()
    return weight.view(shape)


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_muon_in_fp32_equals_torch(name, monkeypatch):
    # torch rounds to bf16 before the iteration; keep its fp32 to compare the maths closely.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    expected = torch_muon(name, CONFIG)
    found = train({n: shape for n, (shape, _) in MATRICES.items()}, CONFIG)[name]
    moved = (expected - draw(MATRICES[name][0], name)).norm()
    assert (found - expected).norm() <= 1e-4 * moved


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_muon_in_bf16_equals_torch_within_bf16(name):
    config = dataclasses.replace(CONFIG, ns_dtype="bfloat16")
    expected = torch_muon(name, config)
    found = train({name: MATRICES[name][0]}, config)[name]
    moved = (expected - draw(MATRICES[name][0], name)).norm()
    assert (found - expected).norm() <= 0.03 * moved


@pytest.mark.parametrize("name", sorted(ADAMW))
def test_adamw_equals_torch(name):
    parameter = torch.nn.Parameter(draw(ADAMW[name], name))
    optimizer = torch.optim.AdamW(
        [parameter], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    for step in range(STEPS):
        parameter.grad = draw(ADAMW[name], name, step)
        optimizer.param_groups[0]["lr"] = CONFIG.lr * (1 + step % 3)
        optimizer.step()
    torch.testing.assert_close(train(ADAMW, CONFIG)[name], parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(ATTENTION + "o_proj.weight", (10, 16)), ("language_model.model.norm.weight", (5,))],
)
def test_decay_is_decoupled_unscaled_and_reaches_norms(name, shape):
    weight = torch.ones(shape)
    optimizer = PlainMuon(
        [NamedTensor(name, weight, lambda: torch.zeros(shape), "dense")], CONFIG, SHAPE
    )
    for _ in range(3):
        optimizer.step(0.02)
    torch.testing.assert_close(weight, torch.full(shape, (1 - 0.02 * 0.1) ** 3))


def test_without_nesterov_the_momentum_itself_is_orthogonalised():
    """One step from zero momentum: M = G and mu*M + G have one direction, so the first agree."""
    name = ATTENTION + "o_proj.weight"
    plain = dataclasses.replace(CONFIG, nesterov=False)
    first = [train({name: (10, 16)}, config, 1)[name] for config in (CONFIG, plain)]
    torch.testing.assert_close(first[0], first[1], rtol=0, atol=1e-6)
    later = [train({name: (10, 16)}, config, 3)[name] for config in (CONFIG, plain)]
    assert (later[0] - later[1]).norm() > 0.01


def test_the_scale_multiplies_gradients_and_leaves_them_alone():
    name = "language_model.model.norm.weight"
    results = []
    for factor, scale in ((1.0, 0.25), (0.25, 1.0)):
        weight, grad = torch.ones(5), factor * draw((5,), "grad")
        kept = grad.clone()
        optimizer = PlainMuon([NamedTensor(name, weight, lambda g=grad: g, "dense")], CONFIG, SHAPE)
        optimizer.step(0.1, scale)
        assert torch.equal(grad, kept)
        results.append((weight, optimizer.exp_avg_sq[name]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
