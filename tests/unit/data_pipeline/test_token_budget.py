"""Budgets of tokens: the last step is that of a plain loop, and schedules are shares of them."""

import pytest
from pydantic import ValidationError

from data_pipeline.config import BlendStage, TokenBudget
from data_pipeline.plan.budget import budget_end, budget_notices, used_up
from data_pipeline.plan.planner import Planner
from tests.unit.data_pipeline.test_plan import CONFIG, made_indices

TEXTS = {"web": 1.0}
MEDIA = {"captions": 1.0, "clips": 1.0}
BUDGETS = ({"text": 9000}, {"vision": 2500}, {"text": 9000, "vision": 1200}, {"text": 1})


def planner_of(**changes) -> Planner:
    config = CONFIG.replace(pack_window=16, **changes)
    names = config.source_names
    return Planner([index for index in made_indices() if index.name in names], config)


def walk(planner, steps):
    """Yield (state after it, text, vision tokens so far) of each step."""
    state, text, vision = planner.state_dict(), 0, 0
    for _ in range(steps):
        plan, state = planner.plan(state)
        vision += int(plan.items.tokens.sum())
        text += int(plan.samples.length.sum()) - int(plan.items.tokens.sum())
        yield state, text, vision


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_ends_at_the_first_step_that_reaches_it(budget):
    """Padding is not counted; the first of two that is used up ends the run."""
    planner = planner_of(budget=TokenBudget(**budget))
    for number, (state, text, vision) in enumerate(walk(planner, 30), 1):
        assert state["tokens"] == [text, vision]
        assert state == planner.state_at(number)
        over = {"text": text, "vision": vision}
        reached = [kind for kind, most in budget.items() if over[kind] >= most]
        told = used_up(planner.config.budget, state)
        if reached:
            assert f"data.budget.{reached[0]}={budget[reached[0]]:,} tokens are used up" in told
            end = budget_end(planner)
            assert (end.step, end.exact, end.tokens) == (number, True, (text, vision))
            return
        assert told is None
    raise AssertionError("the budget was never reached")


def test_a_budget_that_a_step_meets_exactly_ends_there():
    *_, (_, text, vision) = walk(planner_of(), 3)
    for budget in (TokenBudget(text=text), TokenBudget(vision=vision)):
        end = budget_end(planner := planner_of(budget=budget))
        assert (end.step, end.exact, end.tokens) == (3, True, (text, vision))
        (told,) = budget_notices(planner, steps=3)
        assert told.startswith("data.budget ends after 3 steps")
        (told,) = budget_notices(planner, steps=2)
        assert told.startswith("train.steps=2 ends the run before")


def test_the_end_of_a_run_of_stages_is_told_from_the_shares_of_each():
    """Text alone, then media as well, of which there is a budget."""
    stage = BlendStage(after_share=0.5, sources=MEDIA | TEXTS, vision_token_ratio=0.2)
    budget = TokenBudget(text=400_000)
    planner = planner_of(sources=TEXTS, vision_token_ratio=None, schedule=[stage], budget=budget)
    about, exact = budget_end(planner, most_windows=6), budget_end(planner, most_windows=10**6)
    assert (about.exact, exact.exact) == (False, True)
    assert about.step == pytest.approx(exact.step, rel=0.05)
    assert about.tokens == pytest.approx(exact.tokens, rel=0.05)


@pytest.mark.parametrize("budget", [{"text": 240_000}, {"vision": 60_000}])
def test_a_long_run_s_end_is_told_from_its_first_windows(budget):
    planner = planner_of(budget=TokenBudget(**budget))
    about, exact = budget_end(planner, most_windows=12), budget_end(planner, most_windows=10**6)
    assert (about.exact, exact.exact) == (False, True)
    assert about.step == pytest.approx(exact.step, rel=0.05)
    assert about.tokens == pytest.approx(exact.tokens, rel=0.05)
    assert "about" in str(about)
    assert "about" not in str(exact)
    (told,) = budget_notices(planner, steps=exact.step)
    assert told.startswith("data.budget ends after ")
    (told,) = budget_notices(planner, steps=3)
    assert told.startswith("train.steps=3 ends the run before data.budget does")
    assert budget_notices(planner_of(), steps=3) == []


def test_a_budget_of_what_no_sample_holds_is_refused():
    config = CONFIG.replace(
        sources=TEXTS, vision_token_ratio=None, budget=TokenBudget(vision=5), pack_window=16
    )
    (web,) = [index for index in made_indices() if index.name == "web"]
    with pytest.raises(ValueError, match="would never end the run"):
        budget_end(Planner([web], config))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_stage_begins_at_its_share_of_the_budget(share):
    """Text alone, then text and media; both budgets together are what is counted."""
    budget = TokenBudget(text=40_000, vision=4_000)
    stage = BlendStage(after_share=share, sources=MEDIA | TEXTS, vision_token_ratio=0.2)
    planner = planner_of(sources=TEXTS, vision_token_ratio=None, schedule=[stage], budget=budget)
    window = planner.config.pack_window * max(t.tokens / t.samples for t in planner.totals)
    begun = next(
        text + vision for _, text, vision in walk(planner, 400) if vision
    )  # after the step that saw the first media
    row = CONFIG.seq_len * CONFIG.rows_per_step
    assert share * 44_000 - window < begun < share * 44_000 + 2 * window + row


@pytest.mark.parametrize(("budget", "kind"), [({"text": 30_000}, 0), ({"vision": 6_000}, 1)])
def test_a_share_of_one_budget_counts_its_own_tokens(budget, kind):
    stage = BlendStage(after_share=0.5, sources=TEXTS | MEDIA, vision_token_ratio=0.4)
    planner = planner_of(schedule=[stage], budget=TokenBudget(**budget))
    border = planner.mixture.segments[1].start
    (most,) = budget.values()
    segments = planner.mixture.segments
    rate = [
        sum(w * (t.tokens - t.vision_tokens, t.vision_tokens)[kind] / t.samples
            for w, t in zip(segments[0].weights, planner.totals)) / sum(segments[0].weights)
    ]  # fmt: skip
    assert most / 2 <= border * rate[0] < most / 2 + (planner.config.pack_window + 1) * rate[0]


def test_a_stage_that_could_never_begin_is_refused():
    stage = BlendStage(after_share=0.5, sources=MEDIA | TEXTS, vision_token_ratio=0.2)
    with pytest.raises(ValueError, match=r"data.schedule\[0\] begins at a share of data.budget"):
        planner_of(
            sources=TEXTS, vision_token_ratio=None, schedule=[stage], budget=TokenBudget(vision=9)
        )


def test_states_of_earlier_versions_go_on_without_a_budget_alone():
    old = {name: value for name, value in planner_of().state_at(3).items() if name != "tokens"}
    planner = planner_of()
    planner.load_state_dict(old)
    _, state = planner.plan(planner.state_dict())
    assert state["tokens"] is None
    assert used_up(None, state) is None
    with pytest.raises(ValueError, match="'tokens' is missing: .* earlier version"):
        planner_of(budget=TokenBudget(text=9)).load_state_dict(old)
    for wrong in ([1], [1, -1], "12", [1, True]):
        with pytest.raises(ValueError, match="expected \\[text, vision\\]"):
            planner.load_state_dict(old | {"tokens": wrong})


ONE = {"after_tokens": 5, "sources": TEXTS}
SHARE = {"after_share": 0.5, "sources": TEXTS}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"budget": {}}, "give text, vision or both"),
        ({"budget": {"text": 0}}, "greater than or equal to 1"),
        ({"schedule": [SHARE]}, "after_share is a share of data.budget, which is not given"),
        ({"schedule": [ONE, SHARE], "budget": {"text": 9}}, "each stage wants after_tokens, or"),
        ({"schedule": [ONE | SHARE], "budget": {"text": 9}}, "each stage wants after_tokens, or"),
        ({"schedule": [{"sources": TEXTS}]}, "each stage wants after_tokens, or each after_share"),
        ({"schedule": [SHARE, SHARE], "budget": {"text": 9}}, "after_share are .* must increase"),
        ({"schedule": [SHARE | {"after_share": 1.0}]}, "less than 1"),
    ],
)
def test_budgets_and_shares_that_cannot_be_are_refused(changes, told):
    with pytest.raises(ValidationError, match=told):
        CONFIG.replace(**changes)
