"""Tests which steps are applied, the records of the others, and decisions after a resume."""

import json
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import Rule
from kimi_pretrain.optim.muon import adamw_update
from kimi_pretrain.reliability.anomaly_guard import (
    LARGEST_NORM,
    AnomalyError,
    Guard,
    Verdict,
    anomaly,
    finite,
    judge,
)
from kimi_pretrain.reliability.config import GuardConfig

GOOD = Verdict()
SPIKES = GuardConfig(spike="skip", spike_ratio=2.0, spike_window=5)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf, 1.0])
@pytest.mark.parametrize("norm", [math.nan, math.inf, 1.0])
@pytest.mark.parametrize("action", ["skip", "stop"])
def test_what_is_not_finite_never_updates(loss, norm, action):
    verdict = judge(GuardConfig(nonfinite=action), (), loss, norm)
    if loss == norm == 1.0:
        assert verdict == GOOD
        assert verdict.applies
    else:
        assert verdict == Verdict("nonfinite", action)
        assert not verdict.applies


RULE = Rule("adamw", "embedding")
ADAMW = OptimConfig(lr=1e-3, min_lr=0, warmup_steps=0, stable_steps=1, decay_steps=0)


def moves_after(grad: float) -> bool:
    """Return whether AdamW still moves a weight after this gradient and thousands of good ones."""
    weight, mean, square = torch.zeros(3)
    for step in range(1, 3001):
        given = torch.tensor(grad if step == 1 else -1.0)
        before = weight.clone()
        adamw_update(weight, given, mean, square, RULE, step, 1e-3, ADAMW)
    return bool(weight > before)


def test_a_gradient_whose_squares_are_not_finite_never_updates():
    """Such a gradient would stop AdamW for good, because its average of squares stays infinite."""
    for norm, passes in ((LARGEST_NORM, True), (1e21, False)):
        assert judge(GuardConfig(), (), 1.0, norm).applies == passes
        assert moves_after(norm) == passes


def test_a_spike_is_a_loss_far_above_the_median_of_a_full_window():
    losses = (1.0, 100.0, 1.0, 3.0, 2.0)  # median 2, which one outlier does not move
    assert judge(SPIKES, losses, 4.0, 1.0) == GOOD  # not above twice the median
    assert judge(SPIKES, losses, 4.001, 1.0) == Verdict("spike", "skip")
    assert judge(SPIKES, losses[1:], 1e9, 1.0) == GOOD  # too few losses so far
    assert judge(SPIKES, (1e6, *losses), 4.001, 1.0).kind == "spike"  # only the last losses count
    assert judge(GuardConfig(), losses * 20, 1e9, 1.0) == GOOD  # spikes are not checked
    for action, applies in (("record", True), ("skip", False), ("stop", False)):
        verdict = judge(SPIKES.model_copy(update={"spike": action}), losses, 5.0, 1.0)
        assert (verdict.action, verdict.applies) == (action, applies)


def test_a_skipped_spike_does_not_become_usual_and_a_recorded_one_does():
    for action, remembered in (("skip", [1.0] * 5), ("record", [1.0] * 4 + [9.0])):
        guard = Guard(SPIKES.model_copy(update={"spike": action}))
        for _ in range(5):
            guard.judge(1.0, 1.0)
        guard.judge(9.0, 1.0)
        assert guard.losses == tuple(remembered), action


def test_skips_in_a_row_end_the_run_and_a_good_step_forgives():
    guard = Guard(GuardConfig(skips_in_row=3))
    for good in (False, False, True, False, False):
        verdict = guard.judge(1.0 if good else math.nan, 1.0)
        guard.check(7, verdict, 1.0, 1.0)
    verdict = guard.judge(math.nan, 1.0)
    with pytest.raises(AnomalyError, match=r"step 9 .*3 steps in a row.*guard\.skips_in_row=3"):
        guard.check(9, verdict, math.nan, 1.0)


def test_stop_names_the_step_and_what_to_do():
    guard = Guard(GuardConfig(nonfinite="stop"))
    verdict = guard.judge(math.inf, 2.0)
    with pytest.raises(AnomalyError, match=r"step 12 .*inf.*anomalies\.jsonl.*nonfinite=skip"):
        guard.check(12, verdict, math.inf, 2.0)
    for passes in (GOOD, Verdict("spike", "record")):
        guard.check(13, passes, 1.0, 1.0)


@pytest.mark.parametrize("stop", range(1, 60, 7))
def test_a_resumed_guard_decides_as_one_that_was_never_stopped(stop):
    """A checkpoint at any step carries spikes, skips, and the number of skips in a row."""
    draw = random.Random(3)
    steps = [(draw.choice([1.0, 1.1, 0.9, 3.0, math.nan]), draw.random()) for _ in range(60)]
    straight, first = Guard(SPIKES), Guard(SPIKES)
    expected = [(straight.judge(*step), straight.skips_in_row) for step in steps]
    for step in steps[:stop]:
        first.judge(*step)
    saved = json.loads(json.dumps([list(first.losses), first.skips_in_row], allow_nan=False))
    resumed = Guard(SPIKES)
    resumed.resume(*saved)
    found = [(resumed.judge(*step), resumed.skips_in_row) for step in steps[stop:]]
    assert found == expected[stop:]
    assert resumed.losses == straight.losses
    assert len({verdict.kind for verdict, _ in expected}) == 3  # all kinds occurred


def test_a_guard_that_looks_for_no_spikes_keeps_no_losses():
    guard = Guard(GuardConfig())
    guard.judge(1.0, 1.0)
    assert guard.losses == ()


def test_an_anomaly_names_the_samples_of_the_whole_batch():
    indices = [
        SimpleNamespace(name="pictures", key_of=lambda at: f"p-{at}"),
        SimpleNamespace(name="words", key_of=lambda at: f"w-{at}"),
    ]
    samples = SimpleNamespace(source=np.array([1, 0, 0], np.int16), index=np.array([5, 7, 2]))
    line = anomaly(
        4, Verdict("nonfinite", "skip"), math.nan, 2.0, SimpleNamespace(samples=samples),
        indices, {"step": 3},
    )  # fmt: skip
    assert json.loads(json.dumps(line), parse_constant=pytest.fail) == {
        "step": 4, "kind": "nonfinite", "loss": None, "grad_norm": 2.0, "action": "skip",
        "samples": [["words", "w-5"], ["pictures", "p-7"], ["pictures", "p-2"]],
        "loader": {"step": 3},
    }  # fmt: skip


def test_what_json_cannot_hold_becomes_null_wherever_it_is():
    line = {"a": math.nan, "b": [1.5, math.inf, {"c": -math.inf}], "d": True, "e": 3, "f": "nan"}
    assert finite(line) == {"a": None, "b": [1.5, None, {"c": None}], "d": True, "e": 3, "f": "nan"}
