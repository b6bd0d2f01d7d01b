"""Muon and AdamW as plain functions, and a single-process optimizer that uses them.

For a matrix W with gradient G (Moonlight, arXiv:2502.16982, eq. 1 to 4):

    M <- mu M + G
    O  = NewtonSchulz(mu M + G)                   for each piece of W separately
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(A, B)) O

The factor 0.2 sqrt(max(A, B)) matches the RMS of AdamW's updates, so that one learning rate and one
weight decay serve both. A parameter group may scale the learning rate and replace the weight decay.
`PlainMuon` is the slow reference in the tests of `muonclip.DistributedMuonClip`.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from kimi_pretrain.optim.batched import orthogonalise_pieces_
from kimi_pretrain.optim.config import OptimConfig, UpdateSettings
from kimi_pretrain.optim.groups import ModelShape, NamedTensor, Rule, as_matrix


@torch.no_grad()
def muon_update(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rules: Sequence[Rule],
    lr: float,
    config: UpdateSettings,
    clock: AbstractContextManager[object] | None = None,
) -> list[Tensor]:
    """Run one Muon step for several tensors, in place on weights and momenta.

    Args:
        weights: [A, ...] each, fp32 (or wider); masters, not bf16 copies.
        grads: gradients of the same shapes and dtype, already scaled.
        momenta: momenta of the same shapes and dtype.
        rules: pieces and parameter group of each tensor.
        lr: scheduled learning rate of this step, before the scale of a parameter group.
        config: settings of the update.
        clock: context around the orthogonalisation, to time it.

    Returns:
        The updates before the learning rate, [A, B] each (a convolution is flattened).
    """
    values, inputs = [config.group_values(rule.group, lr) for rule in rules], []
    for grad, momentum, own in zip(grads, momenta, values, strict=True):
        mu = own.momentum
        torch.add(grad, momentum, alpha=mu, out=momentum)
        inputs.append(torch.add(grad, momentum, alpha=mu) if own.nesterov else momentum.clone())
    updates = [as_matrix(x) for x in inputs]
    with clock or nullcontext():
        orthogonalise_pieces_(updates, rules, config)
    for weight, update, own in zip(weights, updates, values, strict=True):
        weight.mul_(1 - own.lr * own.weight_decay).sub_(update.view_as(weight), alpha=own.lr)
    return updates


@torch.no_grad()
def adamw_update(
    weight: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rule: Rule,
    step: int,
    lr: float,
    config: UpdateSettings,
) -> Tensor:
    """Run one AdamW step, in place on weight, exp_avg and exp_avg_sq (same shape, fp32 or wider).

    `step` counts from 1 and corrects the bias of the two averages. `lr` is the scheduled learning
    rate, before the scale of the parameter group, as in `muon_update`.

    Returns:
        The update before the learning rate, in the shape of the weight.
    """
    own = config.group_values(rule.group, lr)
    beta1, beta2 = own.betas
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (exp_avg_sq / (1 - beta2**step)).sqrt_().add_(own.eps)
    update = (exp_avg / (1 - beta1**step)).div_(denominator)
    weight.mul_(1 - own.lr * own.weight_decay).sub_(update, alpha=own.lr)
    return update


class PlainMuon:
    """Optimizer of fp32 (or fp64) tensors in one process.

    It has no masters, no gradient clip and no QK-Clip. With `matrices: adamw` it applies AdamW to
    every tensor.
    """

    def __init__(self, named: Sequence[NamedTensor], config: OptimConfig, shape: ModelShape):
        rules = {t.name: shape.rule_of(t.name, t.data.shape, config.matrices) for t in named}
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
        """Update every tensor from its gradient times `scale`, with the scheduled rate `lr`."""
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
            state = self.exp_avg[t.name], self.exp_avg_sq[t.name], self.rules[t.name]
            adamw_update(t.data, t.grad() * scale, *state, self.steps, lr, self.config)
