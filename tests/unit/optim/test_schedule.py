"""The schedule against numbers worked out by hand, and what the config refuses."""

import dataclasses
import math

import pytest
from pydantic import TypeAdapter, ValidationError

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.schedule import learning_rate

CONFIG = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, stable_steps=3, decay_steps=4)


def test_warm_up_stable_decay_by_hand():
    found = [learning_rate(step, CONFIG) for step in range(13)]
    half = math.sqrt(0.5)
    cosine = [0.1 + 0.9 * (1 + half) / 2, 0.1 + 0.9 / 2, 0.1 + 0.9 * (1 - half) / 2, 0.1]
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, *cosine, 0.1, 0.1]
    assert found == pytest.approx(expected)
    assert CONFIG.total_steps == 11


def test_linear_decay_by_hand():
    config = dataclasses.replace(CONFIG, decay="linear", min_lr=0.0)
    found = [learning_rate(step, config) for step in range(6, 12)]
    assert found == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_kimi_k2_recipe():
    """500 steps up, 2e-4 for 10T tokens, cosine to 2e-5 over 5.5T, 67.1M tokens a step."""
    config = OptimConfig(
        lr=2e-4, min_lr=2e-5, warmup_steps=500, stable_steps=148512, decay_steps=81956
    )
    assert learning_rate(0, config) == pytest.approx(4e-7)
    assert learning_rate(499, config) == 2e-4
    assert learning_rate(149011, config) == 2e-4
    assert learning_rate(149011 + 40978, config) == pytest.approx(1.1e-4)
    assert learning_rate(230967, config) == pytest.approx(2e-5)


def test_no_warm_up_and_no_decay():
    config = dataclasses.replace(CONFIG, warmup_steps=0, stable_steps=0, decay_steps=0)
    assert [learning_rate(step, config) for step in (0, 1000)] == [1.0, 1.0]
    with pytest.raises(ValueError, match="step -1"):
        learning_rate(-1, config)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"min_lr": 2.0}, "min_lr must lie"),
        ({"warmup_steps": -1}, "warmup_steps must not be negative, got -1"),
        ({"decay": "step"}, "decay must be"),
        ({"momentum": 1.0}, "momentum must lie"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"ns_dtype": "float16"}, "ns_dtype"),
        ({"adam_betas": (0.9, 1.0)}, "adam_betas"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"qk_clip_threshold": -1.0}, "qk_clip_threshold"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lr": math.nan}, "lr must be positive"),
    ],
)
def test_config_refuses(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(CONFIG, **change)


def test_config_from_a_mapping_refuses_unknown_keys():
    adapter = TypeAdapter(OptimConfig)
    values = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, "stable_steps": 3, "decay_steps": 4}
    assert adapter.validate_python(values | {"adam_betas": [0.9, 0.95]}) == CONFIG
    with pytest.raises(ValidationError, match="learning_rate"):
        adapter.validate_python(values | {"learning_rate": 1.0})
