"""Compares the schedule with numbers by hand and a walk token by token, and tests refusals."""

import math
import random

import pytest
import yaml
from pydantic import TypeAdapter, ValidationError

from kimi_pretrain.config import ConfigError, describe, dump_config, load_config, parse_config
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.recipes import Segment
from kimi_pretrain.optim.schedule import describe_schedule, learning_rate, total_steps

CONFIG = OptimConfig(lr=1.0, min_lr=0.1, warmup_steps=4, stable_steps=3, decay_steps=4)
K2, K2_BATCH = OptimConfig(schedule="k2"), 16384 * 4096
MOONLIGHT, MOONLIGHT_BATCH = OptimConfig(schedule="moonlight"), 2048 * 8192
# Overrides that remove the keys of tiny_cpu that `schedule` replaces.
NO_RAMP = [f"optim.{name}=null" for name in ("lr", "min_lr", "warmup_steps", "stable_steps")]
NO_RAMP.append("optim.decay_steps=null")


def of(*segments: Segment) -> OptimConfig:
    return OptimConfig(schedule=list(segments))


def test_warm_up_stable_decay_by_hand():
    found = [learning_rate(step, CONFIG, 7) for step in range(13)]
    half = math.sqrt(0.5)
    cosine = [0.1 + 0.9 * (1 + half) / 2, 0.1 + 0.9 / 2, 0.1 + 0.9 * (1 - half) / 2, 0.1]
    expected = [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0, *cosine, 0.1, 0.1]
    assert found == pytest.approx(expected)
    assert total_steps(CONFIG, 7) == 11


@pytest.mark.parametrize(
    ("change", "first", "expected"),
    [
        ({"decay": "linear", "min_lr": 0.0}, 6, [1.0, 0.75, 0.5, 0.25, 0.0, 0.0]),
        (
            {"warmup_steps": 0, "stable_steps": 0, "decay": "linear", "min_lr": 0},
            0,
            [0.75, 0.5, 0.25, 0.0, 0.0],
        ),
        ({"warmup_steps": 0, "stable_steps": 0, "decay_steps": 0}, 1000, [1.0]),
    ],
)
def test_parts_of_the_ramp_by_hand(change, first, expected):
    config = CONFIG.replace(**change)
    found = [learning_rate(first + step, config, 7) for step in range(len(expected))]
    assert found == pytest.approx(expected)


def test_steps_and_batches_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="step -1"):
        learning_rate(-1, CONFIG, 7)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        learning_rate(0, CONFIG, 0)


def test_kimi_k2_recipe():
    """Report 2.5, in tokens; the position after a step is (step + 1) batches."""

    def rate(tokens: float) -> float:
        return learning_rate(round(tokens / K2_BATCH) - 1, K2, K2_BATCH)

    assert learning_rate(0, K2, K2_BATCH) == pytest.approx(4e-7)
    assert learning_rate(249, K2, K2_BATCH) == pytest.approx(1e-4)
    assert learning_rate(499, K2, K2_BATCH) == learning_rate(500, K2, K2_BATCH) == 2e-4
    assert rate(9.9999e12) == 2e-4
    assert rate(12.75e12) == pytest.approx((2e-4 + 2e-5) / 2, rel=1e-4)
    assert rate(10e12 + 5.5e12 / 4) == pytest.approx(2e-5 + 1.8e-4 * 0.853553, rel=1e-4)
    assert rate(15.5e12) == pytest.approx(2e-5, rel=1e-4)
    assert rate(15.73e12) == pytest.approx((2e-5 + 7e-6) / 2, rel=1e-3)
    assert rate(15.97e12) == rate(20e12) == 7e-6
    assert total_steps(K2, K2_BATCH) == math.ceil(15.96e12 / K2_BATCH) == 237823


def test_moonlight_recipe():
    """Report 3.3, with its first batch size throughout."""

    def rate(tokens: float, after: int = 0) -> float:
        return learning_rate(int(tokens // MOONLIGHT_BATCH) + after, MOONLIGHT, MOONLIGHT_BATCH)

    assert rate(0) == pytest.approx(4.2e-4 / 2000)
    assert rate(33e9) == pytest.approx(4.2e-4, rel=0.02)  # 2,000 steps are 33.6B tokens
    assert rate(0, 1999) == 4.2e-4
    assert rate(0, 2000) == pytest.approx(4.2e-4, rel=1e-6)
    middle = (2000 * MOONLIGHT_BATCH + 5.2e12) / 2
    assert rate(middle) == pytest.approx((4.2e-4 + 4.2e-5) / 2, rel=1e-4)
    assert rate(5.2e12, -1) == pytest.approx(4.2e-5, rel=1e-6)
    assert rate(5.2e12, 50) == pytest.approx((4.2e-5 + 1e-4) / 2, rel=0.02)
    assert rate(5.2e12, 100) == pytest.approx(1e-4, rel=1e-4)
    assert rate(5.45e12) == pytest.approx(1e-4 / 2, rel=0.01)
    assert rate(5.7e12, 0) == rate(9e12) == 0.0


def test_the_step_that_reaches_a_border_has_exactly_the_rate_of_the_segment():
    """Checks exact doubles for rates and lengths that binary cannot represent."""
    config = of(
        Segment(steps=3, lr=0.3, shape="linear"),
        Segment(tokens=70, lr=0.1, shape="cosine"),
        Segment(until_tokens=210, lr=0.7, shape="linear"),
        Segment(steps=2, lr=0.2, shape="constant"),
    )
    rates = [learning_rate(step, config, 10) for step in range(24)]
    assert (rates[2], rates[9], rates[20], rates[21], rates[23]) == (0.3, 0.1, 0.7, 0.2, 0.2)
    assert 0.1 < rates[8] < rates[3] < 0.3
    assert rates[10] == pytest.approx(0.1 + 0.6 / 11)


def walked(segments: list[Segment], tokens_per_step: int) -> list[float]:
    """Return the rate after each token by brute force."""
    rates, before = [0.0], 0.0
    for segment in segments:
        if segment.until_tokens is not None:
            length = int(segment.until_tokens) - (len(rates) - 1)
        else:
            length = int(segment.tokens or (segment.steps or 0) * tokens_per_step)
        for token in range(1, length + 1):
            way = {
                "linear": token / length,
                "cosine": math.sin(math.pi / 2 * token / length) ** 2,
                "constant": 1.0,
            }[segment.shape]
            rates.append((1 - way) * before + way * segment.lr)
        before = segment.lr
    return rates


@pytest.mark.parametrize("seed", range(6))
def test_any_list_of_segments_equals_a_walk_token_by_token(seed):
    draw = random.Random(seed)
    batch, segments, start = draw.randint(1, 9), [], 0
    for _ in range(5):
        kind = draw.choice(["steps", "tokens", "until_tokens"])
        length = draw.randint(0, 40)
        segment = Segment(
            lr=draw.random(),
            shape=draw.choice(["linear", "cosine", "constant"]),
            **{kind: length + (start if kind == "until_tokens" else 0)},
        )
        segments.append(segment)
        start = segment.end(start, batch)
    rates = walked(segments, batch)
    for step in range(start // batch + 3):
        expected = rates[min((step + 1) * batch, len(rates) - 1)]
        assert learning_rate(step, of(*segments), batch) == pytest.approx(expected, abs=1e-12)


def test_segments_in_steps_do_not_depend_on_the_batch_and_tokens_do():
    steps = of(Segment(steps=9, lr=1e-3, shape="cosine"), Segment(steps=5, lr=0.0, shape="linear"))
    for step in range(16):
        assert len({learning_rate(step, steps, batch) for batch in (1, 7, 2**26)}) == 1
    tokens = of(Segment(tokens=2**40, lr=1e-3, shape="cosine"))
    assert learning_rate(2**10 - 1, tokens, 2**16) == learning_rate(2**6 - 1, tokens, 2**20)


def test_a_segment_of_no_length_only_sets_what_the_next_begins_with():
    config = of(
        Segment(steps=0, lr=1.0, shape="constant"), Segment(steps=4, lr=0.0, shape="linear")
    )
    assert [learning_rate(step, config, 3) for step in range(4)] == [0.75, 0.5, 0.25, 0.0]


def test_the_schedule_reads_well():
    told = describe_schedule(K2, K2_BATCH)
    assert told == (
        "learning rate: 0 to 0.0002 (linear) until step 500, 0.0002 (constant) until step 149,012, "
        "0.0002 to 2e-05 (cosine) until step 230,968, 2e-05 to 7e-06 (linear) until step 237,823, "
        "then 7e-06"
    )
    assert describe_schedule(CONFIG, 3).endswith("1 to 0.1 (cosine) until step 11, then 0.1")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"lr": 0.0}, "lr must be positive"),
        ({"min_lr": 2.0}, "min_lr must lie"),
        ({"warmup_steps": -1}, "warmup_steps\n.* equal to 0"),
        ({"decay": "step"}, "decay\n.* 'cosine' or 'linear'"),
        ({"momentum": 1.0}, "momentum\n.* less than 1"),
        ({"ns_steps": 0}, "ns_steps"),
        ({"ns_dtype": "float16"}, "ns_dtype"),
        ({"adam_betas": (0.9, 1.0)}, "adam_betas"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"qk_clip_threshold": -1.0}, "qk_clip_threshold"),
        ({"qk_clip_threshold": 0.0}, "qk_clip_threshold\n.* must be positive"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"lr": math.nan}, "lr must be positive"),
        ({"lr": math.inf}, "lr must be positive"),
        ({"matrices": "sgd"}, "matrices\n.* 'muon' or 'adamw'"),
        ({"lr": None, "decay_steps": None}, "lr, decay_steps must be given, unless schedule is"),
        ({"schedule": "k2"}, "schedule already says what lr, min_lr, warmup_steps,"),
    ],
)
def test_config_refuses(change, complaint):
    with pytest.raises(ValueError, match=complaint):
        CONFIG.replace(**change)


def test_config_takes_what_lies_just_inside_its_bounds():
    for change in (
        {"max_grad_norm": 1e-3}, {"max_grad_norm": None}, {"qk_clip_threshold": 0.5},
        {"min_lr": 1.0}, {"min_lr": 0.0}, {"lr": 1e-9, "min_lr": 0.0}, {"weight_decay": 0.0},
    ):  # fmt: skip
        assert CONFIG.replace(**change).model_dump().items() >= change.items()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({}, "lr, min_lr, warmup_steps, stable_steps, decay_steps must be given"),
        ({"schedule": "k3"}, "one of k2, moonlight or a list of segments, got 'k3'"),
        ({"schedule": "k2", "lr": 1e-3}, "schedule already says what lr would"),
        ({"schedule": "k2", "decay": "linear"}, "schedule already says what decay would"),
        ({"schedule": []}, "no segment with a positive lr"),
        ({"schedule": [Segment(steps=5, lr=0.0, shape="linear")]}, "no segment with a positive lr"),
    ],
)
def test_a_schedule_is_given_once(settings, complaint):
    with pytest.raises(ValueError, match=complaint):
        OptimConfig(**settings)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"steps": 5, "tokens": 9}, "exactly one of steps, tokens and until_tokens"),
        ({}, "exactly one of steps"),
        ({"steps": -1}, "whole number >= 0, got -1"),
        ({"tokens": 2.5}, "whole number >= 0, got 2.5"),
        ({"until_tokens": math.inf}, "whole number >= 0, got inf"),
        ({"tokens": math.nan}, "whole number >= 0, got nan"),
        ({"steps": 5, "lr": -1.0}, r"{steps: 5, lr: -1.0, shape: linear}: lr must be a number"),
        ({"steps": 5, "lr": math.nan}, "lr must be a number >= 0"),
        ({"steps": 5, "shape": "step"}, "shape\n.* 'linear', 'cosine' or 'constant'"),
    ],
)
def test_a_segment_refuses(values, complaint):
    with pytest.raises(ValueError, match=complaint):
        Segment(**({"lr": 1.0, "shape": "linear"} | values))


def test_config_from_a_mapping_refuses_unknown_keys():
    adapter = TypeAdapter(OptimConfig)
    values = {"lr": 1.0, "min_lr": 0.1, "warmup_steps": 4, "stable_steps": 3, "decay_steps": 4}
    assert adapter.validate_python(values | {"adam_betas": [0.9, 0.95]}) == CONFIG
    with pytest.raises(ValidationError, match="learning_rate"):
        adapter.validate_python(values | {"learning_rate": 1.0})


def test_schedule_and_groups_come_back_from_what_is_written():
    segments = "[{steps: 5, lr: 1e-3, shape: linear}, {tokens: 1e9, lr: 1e-5, shape: cosine}]"
    groups = "{router: {weight_decay: 0}, head: {lr_scale: 0.5}}"
    for schedule in ("k2", segments):
        overrides = [*NO_RAMP, f"optim.schedule={schedule}", f"optim.groups={groups}"]
        config = load_config("tiny_cpu", overrides)
        assert parse_config(yaml.safe_load(dump_config(config))) == config
        assert config.optim.weight_decay_of("router") == 0.0
        assert "learning rate: 0 to " in describe(config)
    assert config.optim.schedule == [
        Segment(steps=5, lr=1e-3, shape="linear"), Segment(tokens=1e9, lr=1e-5, shape="cosine")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.schedule=[{stepz: 3, lr: 1, shape: linear}]", "optim.schedule.0.stepz; did you"),
        ("optim.schedule=k3", "one of k2, moonlight"),
        ("optim.schedule=[{steps: 3, shape: linear}]", "optim.schedule.0.lr: Field required"),
        (
            "optim.schedule=[{steps: 3, lr: x, shape: linear}]",
            "optim.schedule.0.lr: Input should be",
        ),
        ("optim.schedule=3", "optim.schedule"),
        ("optim.groups={router: {lr_scal: 3}}", "did you mean optim.groups.router.lr_scale?"),
        ("optim.schedule=[{steps: -3, lr: 1, shape: linear}]", "optim.schedule.0: segment {steps:"),
        ("optim.matrices=sgd", "optim.matrices"),
        (
            "optim.schedule=[{tokens: 9000, lr: 1, shape: linear},"
            " {until_tokens: 5000, lr: 0, shape: linear}]",
            "ends at 5,000 tokens, but the segments before it take 9,000",
        ),
    ],
)
def test_a_wrong_schedule_in_a_file_is_one_clear_error(override, told):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [*NO_RAMP, override])
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("optim.groups={rooter: {lr_scale: 3}}", "yaml: optim: groups names 'rooter'; the"),
        ("optim.schedule=k2", "yaml: optim: schedule already says what lr, min_lr, warmup_steps,"),
        ("optim.lr=null", "yaml: optim: lr must be given, unless schedule is"),
        ("optim.qk_clip_threshold=0", "yaml: optim.qk_clip_threshold: must be positive (or null"),
    ],
)
def test_what_contradicts_the_rest_of_a_file_is_one_clear_error(override, told):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [override])
    assert told in str(error.value)
