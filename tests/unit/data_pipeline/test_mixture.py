"""The mixture over a whole training run: schedule, epoch caps, and the part that a state holds."""

from fractions import Fraction

import numpy as np
import pytest

from data_pipeline.config import BlendStage, DataConfig
from data_pipeline.plan.blend import UNITS, SourceTotals, blend, counts_before
from data_pipeline.plan.mixture import Mixer
from data_pipeline.plan.planner import DataUsedUp, Planner
from tests.unit.data_pipeline.plain import made_index

WINDOW = 64
CONFIG = DataConfig(
    root="unused",
    sources={"a": 1.0, "b": 1.0, "c": 2.0},
    seq_len=100,
    rows_per_step=4,
    pack_window=WINDOW,
)
TOTALS = [
    SourceTotals("a", samples=500, tokens=5_000, vision_tokens=0),
    SourceTotals("b", samples=2000, tokens=40_000, vision_tokens=10_000),
    SourceTotals("c", samples=9000, tokens=90_000, vision_tokens=0),
]
UNITS_OF = [500, 2000, 9000]


def mixture_of(**changes):
    config = CONFIG.replace(**changes)
    return Mixer(config, TOTALS, UNITS_OF).mixture()


def test_one_segment_without_schedule_or_caps():
    mixture = mixture_of()
    assert len(mixture.segments) == 1
    assert mixture.end is None


def test_a_stage_begins_at_the_first_border_after_its_tokens():
    later = BlendStage(after_tokens=30_000, sources={"b": 1.0, "c": 1.0})
    mixture = mixture_of(schedule=[later])
    first, second = mixture.segments
    assert second.weights[0] == 0
    assert second.start % WINDOW == 0
    per_draw = [Fraction(t.tokens, t.samples) for t in TOTALS]

    def tokens(position):
        counts = counts_before(position, (first,)).tolist()
        return sum(n * mean for n, mean in zip(counts, per_draw))

    assert tokens(second.start) >= 30_000 - max(per_draw) * 3  # a prefix is off by one draw at most
    assert tokens(second.start - WINDOW) < 30_000
    source, draw = blend(np.arange(second.start + 5000), mixture.segments)
    for s in range(3):
        assert draw[source == s].tolist() == list(range((source == s).sum()))


@pytest.mark.parametrize("cap", [0.5, 1.0, 3.25])
def test_a_source_stops_at_the_last_border_inside_its_epochs(cap):
    mixture = mixture_of(max_epochs={"a": cap})
    first, second = mixture.segments
    assert second.weights[0] == 0
    assert second.start % WINDOW == 0
    drawn = counts_before(second.start, mixture.segments)[0]
    assert drawn <= cap * 500
    assert drawn + WINDOW > cap * 500 - WINDOW * first.weights[0] / UNITS - 1
    assert counts_before(second.start + WINDOW, (first,))[0] > cap * 500
    # The other sources keep their relative weights.
    tokens = [w * t.tokens / t.samples for w, t in zip(second.weights, TOTALS)]
    assert tokens[2] / tokens[1] == pytest.approx(2, rel=1e-3)
    assert counts_before(10**7, mixture.segments)[0] == drawn


def test_when_all_are_used_up_the_data_ends():
    mixture = mixture_of(max_epochs={"a": 1, "b": 1.5, "c": 2})
    assert mixture.end is not None
    assert mixture.end % WINDOW == 0
    counts = counts_before(mixture.end, mixture.segments).tolist()
    for drawn, cap, units in zip(counts, (1, 1.5, 2), UNITS_OF):
        assert drawn <= cap * units
    assert sum(counts) > 0.9 * (500 + 3000 + 18_000)
    assert "max_epochs" in mixture.reason


def test_a_ratio_that_cannot_be_kept_ends_the_data():
    mixture = mixture_of(vision_token_ratio=0.1, max_epochs={"b": 1})
    assert mixture.end is not None
    assert "['b'] have reached" in mixture.reason


def test_the_rest_is_the_same_from_any_segment_on():
    """The segments begun, which a state holds, determine the later segments."""
    config = CONFIG.replace(
        max_epochs={"a": 1.0, "c": 3.0},
        schedule=[
            BlendStage(after_tokens=5_000, sources={"a": 1.0, "b": 1.0, "c": 1.0}),
            BlendStage(after_tokens=60_000, sources={"b": 1.0, "c": 1.0}),
        ],
    )
    mixer = Mixer(config, TOTALS, UNITS_OF)
    whole = mixer.mixture()
    assert len(whole.segments) >= 4
    for number, segment in enumerate(whole.segments):
        again = mixer.mixture(whole.segments[:number], segment.start)
        assert again == whole


def planner_of(**changes):
    indices = [
        made_index("a", [40, 10], 1),
        made_index("b", [60], 2, media=0.4, text=(3, 30), side=100),
        made_index("c", [300], 3),
    ]
    return Planner(indices, CONFIG.replace(**changes))


def test_a_run_goes_through_its_stages_and_ends_in_order():
    planner = planner_of(
        max_epochs={"a": 2.0, "b": 4.0, "c": 3.0},
        schedule=[BlendStage(after_tokens=9_000, sources={"b": 1.0, "c": 1.0})],
    )
    state, epochs, plans = planner.state_dict(), {0: 0, 1: 0, 2: 0}, []
    with pytest.raises(DataUsedUp, match="the data ends at position"):  # noqa: PT012
        while True:
            plan, after = planner.plan(state)
            plans.append((state, plan.content_hash()))
            for source, epoch in zip(plan.samples.source.tolist(), plan.samples.epoch.tolist()):
                epochs[source] = max(epochs[source], epoch + 1)
            state = after
    assert len(plans) > 50
    assert epochs[0] <= 2
    assert epochs[1] <= 4
    assert epochs[2] <= 3
    assert len(state["blend"]) > 1
    for state, expected in plans[:: len(plans) // 9]:
        fresh = planner_of(
            max_epochs={"a": 2.0, "b": 4.0, "c": 3.0},
            schedule=[BlendStage(after_tokens=9_000, sources={"b": 1.0, "c": 1.0})],
        )
        fresh.load_state_dict(state)
        assert fresh.plan(state)[0].content_hash() == expected


def test_a_new_source_may_come_in_with_a_stage():
    indices = [made_index("a", [40], 1), made_index("late", [50], 5)]
    config = CONFIG.replace(
        sources={"a": 1.0},
        schedule=[BlendStage(after_tokens=5_000, sources={"a": 1.0, "late": 1.0})],
    )
    planner = Planner(indices, config)
    state, seen = planner.state_dict(), []
    for _ in range(60):
        plan, state = planner.plan(state)
        seen.append(set(plan.samples.source.tolist()))
    assert seen[0] == {0}
    assert seen[-1] == {0, 1}


def test_bad_schedules_and_caps_are_refused():
    for changes, message in [
        ({"max_epochs": {"x": 1}}, "max_epochs names x, which no source is called; there are: "),
        ({"max_epochs": {"a": 0}}, "max_epochs.a\n.* greater than 0"),
        (
            {
                "schedule": [
                    BlendStage(after_tokens=5, sources={"a": 1}),
                    BlendStage(after_tokens=5, sources={"b": 1}),
                ]
            },
            "they must increase",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            CONFIG.replace(**changes)
    with pytest.raises(ValueError, match="after_tokens\n.* greater than or equal to 1"):
        BlendStage(after_tokens=0, sources={"a": 1.0})


def test_a_change_that_lies_in_the_past_is_refused():
    """A run resumed with the change would continue from counts of draws that were never made."""
    plain = planner_of()
    state = plain.state_dict()
    while state["window"] < 9:
        _, state = plain.plan(state)
    for changes in (
        {"schedule": [BlendStage(after_tokens=1_500, sources={"b": 1.0, "c": 1.0})]},
        {"max_epochs": {"a": 2.0}},
    ):
        changed = planner_of(**changes)
        assert 0 < changed.mixture.segments[1].start < state["window"] * WINDOW
        with pytest.raises(ValueError, match="this config changes at"):
            changed.load_state_dict(state)
        moved = changed.with_own_blend(state)
        changed.load_state_dict(moved)
        assert changed.plan(moved)[0].step == state["step"]
    ahead = planner_of(schedule=[BlendStage(after_tokens=900_000, sources={"b": 1.0, "c": 1.0})])
    ahead.load_state_dict(state)  # future stages may change at any time
    assert ahead.plan(state)[0].content_hash() == plain.plan(state)[0].content_hash()


def test_what_would_never_come_is_refused():
    with pytest.raises(ValueError, match=r"sources \['a'\] would never be drawn.*pack_window=64"):
        planner_of(max_epochs={"a": 0.1})
    stages = [
        BlendStage(after_tokens=10, sources={"b": 1.0, "c": 1.0}),
        BlendStage(after_tokens=20, sources={"a": 1.0, "c": 1.0}),
    ]
    with pytest.raises(ValueError, match=r"stages of the schedule after \[10\] tokens are over"):
        planner_of(schedule=stages)


def test_a_stage_keeps_the_ratio_unless_it_has_its_own():
    shares = {"b": 1.0, "c": 1.0}
    stages = [
        BlendStage(after_tokens=9_000, sources=shares),
        BlendStage(after_tokens=30_000, sources=shares, vision_token_ratio=0.02),
    ]
    planner = planner_of(vision_token_ratio=0.04, schedule=stages)
    ratios = []
    for segment in planner.mixture.segments:
        tokens = [w * t.tokens / t.samples for w, t in zip(segment.weights, planner.totals)]
        vision = sum(
            w * t.vision_tokens / t.samples for w, t in zip(segment.weights, planner.totals)
        )
        ratios.append(vision / sum(tokens))
    assert ratios == pytest.approx([0.04, 0.04, 0.02], abs=1e-4)
