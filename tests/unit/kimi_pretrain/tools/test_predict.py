"""Tests that the advice is usable; test_plan_command.py compares predictions with the plan."""

import re

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.places import Moved
from kimi_pretrain.tools.predict import Load, Prediction, Predictions, advice

EIGHT_RANKS = ["layout.dp=4", "data.rows_per_step=32"]


def test_the_advised_split_is_one_that_the_configuration_takes():
    """A node has eight ranks, but the encoder has only four heads to divide among them."""
    config = load_config("tiny_cpu", EIGHT_RANKS)
    step = Prediction(
        step=1, items=9, patches=300, tokens=200, vision_tokens=75, loads={}, own=Load(1.0, 8.0),
        largest_patches=256, largest_seconds=8.0, split=0, moved=Moved(0, 0, 0), exchange_bytes=0,
        memory_bytes=0, memory_rank=0,
    )  # fmt: skip
    text = next(advice(Predictions(config, (step,))))
    assert re.search("try (dep.max_split=4), ", text)
    load_config("tiny_cpu", [*EIGHT_RANKS, "dep.max_split=4"])
