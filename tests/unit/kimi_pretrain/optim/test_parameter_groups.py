"""Compares per-group rates and decay, and AdamW on all tensors, with torch's optimizers."""

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.config import GROUPS, GroupConfig, OptimConfig
from kimi_pretrain.optim.groups import NamedTensor
from kimi_pretrain.optim.muon import PlainMuon
from kimi_pretrain.optim.recipes import Segment
from kimi_pretrain.optim.schedule import learning_rate
from tests.resume import assert_resumes_anywhere
from tests.unit.kimi_pretrain.optim.oracles import (
    ADAMW,
    CONFIG,
    MATRICES,
    SHAPE,
    SHAPES,
    Fp32Gradient,
    draw,
    sharded,
    torch_adamw,
    torch_muon,
    train,
)

# Every kind of group setting, over groups of both kinds.
SETTINGS = {
    "embedding": GroupConfig(lr_scale=0.0),
    "head": GroupConfig(weight_decay=0.0),
    "norms": GroupConfig(lr_scale=2.0, weight_decay=0.0),
    "attention": GroupConfig(lr_scale=0.5, weight_decay=0.3),
    "router": GroupConfig(weight_decay=0.0),
    "vision_tower": GroupConfig(lr_scale=0.25),
}
GROUPED = CONFIG.replace(groups=SETTINGS)
EVERYTHING_ADAMW = GROUPED.replace(matrices="adamw")


def torch_settings(name: str) -> dict[str, float]:
    """Return the settings of a torch parameter group for a tensor."""
    own = SETTINGS.get(SHAPE.rule_of(name, SHAPES[name]).group, GroupConfig())
    decay = 0.1 if own.weight_decay is None else own.weight_decay
    return {"lr_scale": own.lr_scale, "weight_decay": decay}


@pytest.mark.parametrize("optimizer_of", [PlainMuon, sharded])
def test_groups_have_their_own_rate_and_decay(optimizer_of):
    found = train(SHAPES, GROUPED, optimizer_of=optimizer_of)
    for name in MATRICES:
        expected = torch_muon(name, gradient=Fp32Gradient, **torch_settings(name))
        moved = (expected - draw(SHAPES[name], name)).norm()
        assert (found[name] - expected).norm() <= 3e-5 * moved, name
    for name in ADAMW:
        expected = torch_adamw(name, **torch_settings(name))
        torch.testing.assert_close(found[name], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("optimizer_of", [PlainMuon, sharded])
def test_adamw_may_train_every_tensor(optimizer_of):
    found = train(SHAPES, EVERYTHING_ADAMW, dtype=torch.float64, optimizer_of=optimizer_of)
    for name in SHAPES:
        expected = torch_adamw(name, torch.float64, **torch_settings(name))
        torch.testing.assert_close(found[name], expected, rtol=1e-13, atol=1e-13)


def test_a_frozen_group_keeps_its_bits():
    name = "language_model.model.embed_tokens.weight"
    assert torch.equal(train(SHAPES, GROUPED)[name], draw(SHAPES[name], name))


def test_norms_decay_like_everything_else_unless_told():
    """RMSNorm gains are decayed (Moonlight, appendix D: crucial)."""
    assert {CONFIG.weight_decay_of(group) for group in GROUPS} == {0.1}
    assert {CONFIG.lr_of(group, 0.5) for group in GROUPS} == {0.5}
    assert GROUPED.weight_decay_of("norms") == 0.0
    assert GROUPED.lr_of("norms", 0.5) == 1.0


@pytest.mark.parametrize(
    ("groups", "told"),
    [
        ({"routers": GroupConfig()}, "did you mean router?"),
        ({"all": GroupConfig()}, ", ".join(GROUPS)),
        ({"router": {"lr_scale": -1.0}}, "groups.router.lr_scale\n  Input should be greater than"),
        ({"router": {"weight_decay": -0.1}}, "groups.router.weight_decay\n"),
        ({"norms": {"lr_scale": float("nan")}}, "groups.norms.lr_scale\n"),
        ({"norms": {"weight_decay": float("inf")}}, "groups.norms.weight_decay\n"),
    ],
)
def test_a_wrong_group_is_named(groups, told):
    with pytest.raises(ValueError) as error:
        CONFIG.replace(groups=groups)
    assert told in str(error.value)


class Run:
    """Run on a schedule in tokens, with settings for single groups."""

    def __init__(self, matrices):
        segments = [
            Segment(steps=2, lr=0.02, shape="linear"),
            Segment(tokens=35, lr=0.002, shape="cosine"),
        ]
        self.config = OptimConfig(
            schedule=segments, groups=SETTINGS, matrices=matrices, ns_dtype="float32"
        )
        self.weights = {name: draw(shape, name) for name, shape in SHAPES.items()}
        self.grads: dict[str, Tensor] = {}
        named = [
            NamedTensor(name, weight, lambda name=name: self.grads[name], "dense")
            for name, weight in self.weights.items()
        ]
        self.optimizer = sharded(named, self.config, SHAPE)

    def __next__(self):
        step = self.optimizer.steps
        self.grads = {name: draw(shape, name, step) for name, shape in SHAPES.items()}
        self.optimizer.step(learning_rate(step, self.config, tokens_per_step=10))
        return {name: weight.clone() for name, weight in self.weights.items()}

    def state_dict(self):
        return {"weights": self.weights, "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state) -> None:
        for name, weight in self.weights.items():
            weight.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])


@pytest.mark.parametrize("matrices", ["muon", "adamw"])
def test_a_schedule_in_tokens_and_groups_resume_bit_for_bit(matrices):
    assert_resumes_anywhere(lambda: Run(matrices), steps=7)


def test_the_state_of_adamw_on_everything_is_two_moments_of_each_tensor():
    run = Run("adamw")
    next(run)
    parts = ("exp_avg", "exp_avg_sq")
    expected = {"optim.step"} | {f"optim.{part}.{name}" for part in parts for name in SHAPES}
    state = run.optimizer.state_dict()
    assert state.keys() == expected
    with pytest.raises(ValueError, match=r"lacks 'optim\.momentum"):
        Run("muon").optimizer.load_state_dict(state)
