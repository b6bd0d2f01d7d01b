"""Muon and AdamW as plain functions, and the optimizer of one process made of them.

For a matrix W with gradient G (Moonlight, arXiv:2502.16982, eq. 1 to 4):

    M <- mu M + G
    O  = NewtonSchulz(mu M + G)                   of each piece of W by itself
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(A, B)) O

The factor brings Muon's step to AdamW's size, so that one learning rate and one weight decay serve
both. `PlainMuon` is the slow twin that `distributed.py` is tested against.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from einops import rearrange
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape, NamedTensor, Piece, Rule, as_matrix, rule_of
from kimi_pretrain.optim.newton_schulz import orthogonalise, update_scale


@torch.no_grad()
def muon_update(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rules: Sequence[Rule],
    lr: float,
    config: OptimConfig,
    clock: AbstractContextManager[object] | None = None,
) -> list[Tensor]:
    """One Muon step of several tensors, in place on weights and momenta.

    Args:
        weights: [A, ...] each, fp32 (or wider): the master, not a bf16 copy.
        grads: same shapes and dtype, already scaled.
        momenta: same shapes and dtype.
        rules: how each tensor is cut.
        lr: learning rate of this step.
        config: momentum, decay, Newton-Schulz settings.
        clock: entered around the orthogonalisation, to time it.

    Returns:
        The updates before lr, [A, B] each (a convolution is flattened).
    """
    inputs = []
    for grad, momentum in zip(grads, momenta, strict=True):
        momentum.mul_(config.momentum).add_(grad)
        inputs.append(grad + config.momentum * momentum if config.nesterov else momentum)
    with clock or nullcontext():
        updates = _orthogonal_updates([as_matrix(x) for x in inputs], rules, config)
    for weight, update in zip(weights, updates, strict=True):
        weight.mul_(1 - lr * config.weight_decay).sub_(lr * update.view_as(weight))
    return updates


def _orthogonal_updates(
    matrices: Sequence[Tensor], rules: Sequence[Rule], config: OptimConfig
) -> list[Tensor]:
    """Orthogonalise every piece of every [A, B] matrix; equal shapes go in one batched call."""
    updates = [torch.empty_like(matrix) for matrix in matrices]
    batches: dict[tuple[int, int], list[tuple[Piece, Tensor, Tensor]]] = {}
    for matrix, update, rule in zip(matrices, updates, rules, strict=True):
        for piece in rule.pieces:
            batches.setdefault(piece.shape(matrix), []).append((piece, matrix, update))
    for shape, batch in batches.items():
        x = torch.stack([rearrange(p.rows(m), "n r b -> (n r) b") for p, m, _ in batch])
        o = orthogonalise(x, config.ns_steps, getattr(torch, config.ns_dtype))
        for (piece, _, update), part in zip(batch, update_scale(*shape) * o, strict=True):
            piece.rows(update).copy_(rearrange(part, "(n r) b -> n r b", n=piece.blocks))
    return updates


@torch.no_grad()
def adamw_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: int,
    lr: float,
    config: OptimConfig,
) -> None:
    """One AdamW step, in place on weight, exp_avg and exp_avg_sq (all one shape, fp32 or wider).

    `step` counts from 1: it corrects the bias of the two averages.
    """
    beta1, beta2 = config.adam_betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(config.adam_eps)
    weight.mul_(1 - lr * config.weight_decay)
    weight.addcdiv_(exp_avg, denominator, value=-lr / (1 - beta1**step))


class PlainMuon:
    """Muon and AdamW over a list of fp32 (or fp64) tensors in one process; no masters, no clip."""

    def __init__(self, named: Sequence[NamedTensor], config: OptimConfig, shape: ModelShape):
        rules = {t.name: rule_of(t.name, t.data.shape, shape) for t in named}
        self.config = config
        self.steps = 0
        self.rules = rules
        self.muon = [t for t in named if rules[t.name].kind == "muon"]
        self.adamw = [t for t in named if rules[t.name].kind == "adamw"]
        self.momentum = {t.name: torch.zeros_like(t.data) for t in self.muon}
        self.exp_avg = {t.name: torch.zeros_like(t.data) for t in self.adamw}
        self.exp_avg_sq = {t.name: torch.zeros_like(t.data) for t in self.adamw}

    @torch.no_grad()
    def step(self, lr: float, scale: float = 1.0) -> None:
        """Update every tensor from its gradient times `scale`."""
        self.steps += 1
        muon_update(
            [t.data for t in self.muon],
            [t.grad() * scale for t in self.muon],
            [self.momentum[t.name] for t in self.muon],
            [self.rules[t.name] for t in self.muon],
            lr,
            self.config,
        )
        for t in self.adamw:
            moments = self.exp_avg[t.name], self.exp_avg_sq[t.name]
            adamw_update(t.data, t.grad() * scale, *moments, self.steps, lr, self.config)
