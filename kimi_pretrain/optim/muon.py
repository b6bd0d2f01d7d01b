"""Muon and AdamW as plain functions, and the optimizer of one process made of them.

For a matrix W with gradient G (Moonlight, arXiv:2502.16982, eq. 1 to 4):

    M <- mu M + G
    O  = NewtonSchulz(mu M + G)                   of each piece of W by itself
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(A, B)) O

The factor brings Muon's step to AdamW's size, so that one learning rate and one weight decay serve
both; a parameter group may scale the one and replace the other. `PlainMuon` is the slow twin that
`muonclip.DistributedMuonClip` is tested against.
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
    """One Muon step of several tensors, in place on weights and momenta.

    Args:
        weights: [A, ...] each, fp32 (or wider): the master, not a bf16 copy.
        grads: same shapes and dtype, already scaled.
        momenta: same shapes and dtype.
        rules: how each tensor is cut, and its parameter group.
        lr: learning rate of this step by the schedule; each group scales it for itself.
        clock: entered around the orthogonalisation, to time it.

    Returns:
        The updates before lr, [A, B] each (a convolution is flattened).
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
    """One AdamW step, in place on weight, exp_avg and exp_avg_sq (all one shape, fp32 or wider).

    `step` counts from 1: it corrects the bias of the two averages. `lr` is the schedule's; the
    rule's parameter group scales it, as in `muon_update`.

    Returns:
        The update before lr, of the weight's shape.
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
    """The whole optimizer over a list of fp32 (or fp64) tensors in one process.

    No masters, no gradient clip, no QK-Clip. With `matrices: adamw` it is AdamW on every tensor.
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
        """Update every tensor from its gradient times `scale`; `lr` is the schedule's."""
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
