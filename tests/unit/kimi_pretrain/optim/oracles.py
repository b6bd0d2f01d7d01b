"""Toy tensors under checkpoint names, and reference results of other optimizers for them."""

from fnmatch import fnmatch

import torch
from torch import Tensor

from kimi_pretrain.optim import MuonClip, Split
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.muon import PlainMuon
from kimi_pretrain.optim.muonclip import DistributedMuonClip

SHAPE = ModelShape(num_heads=3, qk_nope_dim=4, qk_rope_dim=2, v_dim=5, kv_lora_rank=6)
CONFIG = OptimConfig(
    lr=0.02, min_lr=0, warmup_steps=0, stable_steps=1, decay_steps=0, ns_dtype="float32"
)
STEPS = 20
ATTENTION = "language_model.model.layers.0.self_attn."
MLP = "language_model.model.layers.1.mlp."
BLOCK = "vision_tower.encoder.blocks.0."
NORM = "language_model.model.norm.weight"

# name -> shape, and the row lists of the matrices that Kimi orthogonalises separately
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
    MLP + "gate.weight": ((4, 9), [list(range(4))]),
    MLP + "experts.0.up_proj.weight": ((6, 9), [list(range(6))]),
    MLP + "experts.1.up_proj.weight": ((6, 9), [list(range(6))]),
    "vision_tower.patch_embed.proj.weight": ((4, 3, 2, 2), [[0, 1, 2, 3]]),
    BLOCK + "wqkv.weight": (
        (12, 4),
        [list(range(4)), list(range(4, 8)), list(range(8, 12))],
    ),
}
ADAMW: dict[str, tuple[int, ...]] = {
    "language_model.model.embed_tokens.weight": (11, 5),
    "language_model.lm_head.weight": (11, 5),
    NORM: (5,),
    "vision_tower.patch_embed.pos_emb.weight": (3, 3, 4),
    "mm_projector.proj.0.bias": (7,),
}
# The row lists above as rules of the public optimizer.
RULES = {
    ATTENTION + "q_b_proj.weight": Split(rows=(4, 2), blocks=3),
    ATTENTION + "kv_a*": Split(rows=(6, 2)),
    ATTENTION + "kv_b*": Split(rows=(4, 5), blocks=3),
    BLOCK + "wqkv.weight": Split(rows=(4, 4, 4)),
    "*embed_tokens*": "adamw",
    "*lm_head*": "adamw",
    "*pos_emb*": "adamw",
    "*": "muon",
}
SHAPES = {name: shape for name, (shape, _) in MATRICES.items()} | ADAMW


def draw(shape: tuple[int, ...], *key: object) -> Tensor:
    seed = sum(ord(c) * 31**i for i, c in enumerate(repr(key))) % 2**31
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def lr_at(step: int) -> float:
    return 0.02 * (1 + step % 3)


class Fp32Gradient(Tensor):
    """Gradient that stays in fp32 where torch.optim.Muon would round it to bf16.

    The rest of torch's optimizer and all of ours run unchanged.
    """

    def bfloat16(self, memory_format: torch.memory_format = torch.preserve_format) -> Tensor:
        return self.clone()


def sharded(named, config: OptimConfig, shape: ModelShape) -> DistributedMuonClip:
    """Return the training's optimizer in one process."""
    return DistributedMuonClip(named, {"dense": None}, config, shape)


class Public:
    """`MuonClip` with the matrices of `MATRICES` as rules, stepped like the other two."""

    def __init__(self, named, config: OptimConfig, shape: ModelShape):
        self.named, self.params = named, {t.name: torch.nn.Parameter(t.data) for t in named}
        rules = {at: rule for at, rule in RULES.items() if any(fnmatch(t.name, at) for t in named)}
        settings = {"ns_dtype": config.ns_dtype, "nesterov": config.nesterov}
        self.optimizer = MuonClip(self.params.items(), lr=1.0, rules=rules, **settings)

    def step(self, lr: float) -> None:
        for tensor in self.named:
            self.params[tensor.name].grad = tensor.grad()
        self.optimizer.param_groups[0]["lr"] = lr
        self.optimizer.step()


OPTIMIZERS = {"plain": PlainMuon, "sharded": sharded, "public": Public}


def train(
    shapes: dict[str, tuple[int, ...]],
    config: OptimConfig = CONFIG,
    steps: int = STEPS,
    dtype: torch.dtype = torch.float32,
    optimizer_of=PlainMuon,
) -> dict[str, Tensor]:
    """Return the weights after some steps of our optimizer on random gradients."""
    weights = {name: draw(shape, name).to(dtype) for name, shape in shapes.items()}
    grads: dict[str, Tensor] = {}
    named = [NamedTensor(n, w, lambda n=n: grads[n], "dense") for n, w in weights.items()]
    optimizer = optimizer_of(named, config, SHAPE)
    for step in range(steps):
        grads |= {name: draw(shape, name, step).to(dtype) for name, shape in shapes.items()}
        optimizer.step(lr_at(step))
    return weights


def torch_muon(
    name: str,
    steps: int = STEPS,
    gradient: type[Tensor] = Tensor,
    lr_scale: float = 1.0,
    **settings: float,
) -> Tensor:
    """Train with torch.optim.Muon, one parameter per hand-cut matrix; return the joined weight."""
    shape, row_lists = MATRICES[name]
    weight = draw(shape, name).flatten(1)
    parameters = [torch.nn.Parameter(weight[rows].clone()) for rows in row_lists]
    settings = {"weight_decay": 0.1, "momentum": 0.95} | settings
    optimizer = torch.optim.Muon(parameters, lr=1.0, adjust_lr_fn="match_rms_adamw", **settings)
    for step in range(steps):
        grad = draw(shape, name, step).flatten(1)
        for parameter, rows in zip(parameters, row_lists):
            parameter.grad = grad[rows].clone().as_subclass(gradient)
        optimizer.param_groups[0]["lr"] = lr_scale * lr_at(step)
        optimizer.step()
    for parameter, rows in zip(parameters, row_lists):
        weight[rows] = parameter.detach()
    return weight.view(shape)


def torch_adamw(
    name: str,
    dtype: torch.dtype = torch.float32,
    lr_scale: float = 1.0,
    weight_decay: float = 0.1,
    steps: int = STEPS,
) -> Tensor:
    """Train one whole tensor with torch.optim.AdamW; return the weight."""
    parameter = torch.nn.Parameter(draw(SHAPES[name], name).to(dtype))
    optimizer = torch.optim.AdamW(
        [parameter], lr=1.0, betas=(0.9, 0.95), eps=1e-8, weight_decay=weight_decay
    )
    for step in range(steps):
        parameter.grad = draw(SHAPES[name], name, step).to(dtype)
        optimizer.param_groups[0]["lr"] = lr_scale * lr_at(step)
        optimizer.step()
    return parameter.detach()


def polynomial(values: Tensor, steps: int = 5) -> Tensor:
    """Return what Newton-Schulz steps make of each singular value."""
    for _ in range(steps):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return values


def clip_by_hand(query: Tensor, kv_b: Tensor, gamma: Tensor, shape: ModelShape) -> None:
    """Apply QK-Clip to a layer in place: roots for content rows, gamma for rotary rows."""
    nope, query_rows = shape.qk_nope_dim, shape.qk_nope_dim + shape.qk_rope_dim
    for head in range(shape.num_heads):
        own = gamma[head, None]
        rows = query[head * query_rows : (head + 1) * query_rows]
        rows[:nope].mul_(own.sqrt())
        rows[nope:].mul_(own)
        kv_b[head * (nope + shape.v_dim) :][:nope].mul_(own.sqrt())


def svd_muon(name: str, steps: int = STEPS, nesterov: bool = True) -> Tensor:
    """Run Muon in fp64 by singular value decomposition, without matrix iterations or our code."""
    shape, row_lists = MATRICES[name]
    weight = draw(shape, name).flatten(1).double()
    momentum = torch.zeros_like(weight)
    for step in range(steps):
        grad = draw(shape, name, step).flatten(1).double()
        momentum = 0.95 * momentum + grad
        moved = grad + 0.95 * momentum if nesterov else momentum
        for rows in row_lists:
            u, s, vt = torch.linalg.svd(moved[rows], full_matrices=False)
            update = u @ torch.diag(polynomial(s / (s.square().sum().sqrt() + 1e-7))) @ vt
            scale = 0.2 * max(update.shape) ** 0.5
            weight[rows] -= lr_at(step) * (scale * update + 0.1 * weight[rows])
    return weight.view(shape)
