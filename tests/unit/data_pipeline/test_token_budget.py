"""Token budgets: the last step equals that of a plain loop, and stages start at budget shares."""

import pytest
from pydantic import ValidationError

from data_pipeline.config import BlendStage, TokenBudget
from data_pipeline.plan.budget import budget_end, budget_notices, end_state, last_step, used_up
from data_pipeline.plan.planner import Planner
from data_pipeline.plan.stage import taken_over
from tests.unit.data_pipeline.test_plan import CONFIG, made_indices, row_stream, run

TEXTS = {"web": 1.0}
MEDIA = {"captions": 1.0, "clips": 1.0}
BUDGETS = ({"text": 9000}, {"vision": 2500}, {"text": 9000, "vision": 1200}, {"text": 1})


def planner_of(**changes) -> Planner:
    config = CONFIG.replace(pack_window=16, **changes)
    names = config.source_names
    return Planner([index for index in made_indices() if index.name in names], config)


def walk(planner, steps):
    """Yield (state after the step, text tokens, vision tokens so far) for each step."""
    state, text, vision = planner.state_dict(), 0, 0
    for _ in range(steps):
        plan, state = planner.plan(state)
        vision += int(plan.items.tokens.sum())
        text += int(plan.samples.length.sum()) - int(plan.items.tokens.sum())
        yield state, text, vision


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_budget_ends_at_the_first_step_that_reaches_it(budget):
    """Padding is not counted; the first exhausted budget of two ends the run."""
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
        end = budget_end(planner_of(budget=budget))
        assert (end.step, end.exact, end.tokens) == (3, True, (text, vision))
        (told,) = budget_notices(end, steps=3)
        assert told.startswith("data.budget ends after 3 steps")
        (told,) = budget_notices(end, steps=2)
        assert told.startswith("train.steps=2 ends the run before")


def test_the_end_of_a_run_of_stages_is_told_from_the_shares_of_each():
    """Text alone, then text and media; only text has a budget."""
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
    (told,) = budget_notices(exact, steps=exact.step)
    assert told.startswith("data.budget ends after ")
    (told,) = budget_notices(exact, steps=3)
    assert told.startswith("train.steps=3 ends the run before data.budget does")
    assert budget_notices(budget_end(planner_of()), steps=3) == []
    assert [last_step(exact, steps) for steps in (3, 10**6)] == [3, exact.step]
    assert last_step(None, 3) == 3


def test_the_end_of_a_resumed_run_is_that_of_the_whole_one():
    """The estimate from other windows is close; the exact end is the same step."""
    planner = planner_of(budget=TokenBudget(text=240_000))
    whole = budget_end(planner, most_windows=10**6)
    planner.load_state_dict(planner.state_at(whole.step // 2))
    exact, about = budget_end(planner, most_windows=10**6), budget_end(planner, most_windows=5)
    assert (exact.step, exact.tokens) == (whole.step, whole.tokens)
    assert not about.exact
    assert about.step == pytest.approx(whole.step, rel=0.05)
    assert about.tokens == pytest.approx(whole.tokens, rel=0.05)
    used = "earlier steps, {:,} and {:,}".format(*planner.state_dict()["tokens"])
    assert used in str(exact)
    assert "earlier" not in str(whole)


@pytest.mark.parametrize("budget", [None, TokenBudget(text=240_000), TokenBudget(vision=9)])
def test_the_state_of_a_run_s_end_is_that_of_its_last_step(budget):
    planner = planner_of(budget=budget)
    last = last_step(budget_end(planner, 10**6), 40)
    assert end_state(planner, 40, 10**6) == planner.state_at(last)
    planner.load_state_dict(planner.state_at(1))
    assert end_state(planner, 40, 10**6) == planner.state_at(last)
    assert end_state(planner, 1) == planner.state_at(1)


@pytest.mark.parametrize("steps", [150, 10**6], ids=["by its steps", "by its budget"])
def test_the_state_of_a_long_run_s_end_is_one_shortly_before(steps):
    """The schedule's later stages all begin after the planned windows."""
    later = [BlendStage(after_tokens=n, sources=MEDIA | TEXTS, vision_token_ratio=ratio)
             for n, ratio in ((60_000, 0.1), (90_000, 0.3))]  # fmt: skip
    given = {"schedule": later, "budget": TokenBudget(text=300_000)}
    planner = planner_of(**given)
    exact, about = (end_state(planner, steps, windows) for windows in (10**6, 6))
    assert exact["step"] == (steps if steps == 150 else budget_end(planner, 10**6).step)
    assert about["blend"] == exact["blend"]
    assert len(about["blend"]) == 3
    for name in ("step", "window"):
        assert about[name] == pytest.approx(0.99 * exact[name], rel=0.05), name
    assert about["tokens"] == pytest.approx(exact["tokens"], rel=0.05)
    if steps == 150:
        assert taken_over(planner, about, about["step"]) == (about, None)
    else:
        assert about["tokens"][0] == 300_000
        with pytest.raises(ValueError, match=r"text=300,000 tokens are used up \(300,000\)"):
            taken_over(planner, about, about["step"])
    more = planner_of(**given | {"budget": TokenBudget(text=400_000)})
    assert taken_over(more, about, about["step"]) == (about, None)
    other = planner_of(budget=TokenBudget(text=400_000))
    with pytest.raises(ValueError, match="give its data.schedule here, too"):
        taken_over(other, about, about["step"])


def later_stages(kind: str) -> dict:
    """Return a budget of one or both kinds of tokens; text, then media, then text again."""
    most = {"text": 30_000} if kind == "text" else {"text": 30_000, "vision": 3_000}
    stages = [
        BlendStage(after_share=0.25, sources=MEDIA | TEXTS, vision_token_ratio=0.2),
        BlendStage(after_share=0.5, sources={"web": 3.0, "clips": 1.0}, vision_token_ratio=0.1),
    ]
    return {
        "sources": TEXTS, "vision_token_ratio": None, "schedule": stages,
        "budget": TokenBudget(**most),
    }  # fmt: skip


@pytest.mark.parametrize("begun", [1, 2])
@pytest.mark.parametrize("kind", ["text", "both"])
def test_a_raised_budget_moves_what_has_not_begun_and_no_stage_that_has(kind, begun):
    """The refusal names the token positions of the begun stages; with them the run continues."""
    changes = later_stages(kind)
    planner = planner_of(**changes)
    start = planner.mixture.segments[begun].start
    states = [planner.state_dict(), *(state for state, *_ in walk(planner, 200))]
    window = planner.config.pack_window
    before = [s for s in states if s["window"] * window < planner.mixture.segments[1].start][-2]
    state = next(s for s in states if s["window"] * window > start)
    budget = {k: v and 2 * v for k, v in changes["budget"].model_dump().items()}
    raised = planner_of(**changes | {"budget": TokenBudget(**budget)})
    raised.load_state_dict(before)
    assert raised.mixture.segments[1].start > planner.mixture.segments[1].start
    with pytest.raises(ValueError, match=r"'blend' ends with .* moves with data\.budget") as error:
        raised.load_state_dict(state)
    told = str(error.value)
    places = [
        int(told.partition(f"data.schedule[{number}] with after_tokens=")[2].split(",")[0])
        for number in range(begun)
    ]
    rest = [10**9 + number for number in range(begun, 2)]  # not begun: any later position
    stages = [
        stage.replace(after_share=None, after_tokens=tokens)
        for stage, tokens in zip(changes["schedule"], places + rest, strict=True)
    ]
    further = planner_of(**changes | {"budget": TokenBudget(**budget), "schedule": stages})
    starts = [segment.start for segment in further.mixture.segments[: begun + 1]]
    assert starts == [segment.start for segment in planner.mixture.segments[: begun + 1]]
    further.load_state_dict(state)
    assert row_stream(run(further, 1, state)[0]) == row_stream(run(planner, 1, state)[0])


def test_a_lowered_budget_says_why_a_stage_should_have_begun():
    changes = later_stages("text")
    planner = planner_of(**changes)
    state = planner.state_at(4)
    assert len(state["blend"]) == 1
    lowered = planner_of(**changes | {"budget": TokenBudget(text=6_000)})
    with pytest.raises(ValueError, match=r"this config changes at .* moves with data\.budget"):
        lowered.load_state_dict(state)


BUDGET = {"budget": TokenBudget(text=9000)}
OTHERS = {
    "seed": {"seed": 77},
    "packing": {"seq_len": 200},
    "sources": {"sources": MEDIA},
    "first shares": {"vision_token_ratio": 0.1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_data_of_a_stage_begin_anew_where_they_are_others(name):
    """The data order restarts at row 0, the step count continues, a budget counts from there."""
    state = planner_of(**BUDGET).state_at(5)
    changes = BUDGET | OTHERS[name]
    if name == "sources":
        changes |= {"vision_token_ratio": None}
    planner = planner_of(**changes)
    found, why = taken_over(planner, state, 5)
    assert why is not None
    assert found == planner.state_at(0) | {"step": 5, "opened": 5}
    planner.load_state_dict(found)
    end, alone = budget_end(planner), budget_end(planner_of(**changes))
    assert (end.step, end.tokens, end.before) == (alone.step + 5, alone.tokens, (0, 0))
    plan, _ = planner.plan(found)
    assert plan.step == 5


def test_the_data_of_a_stage_go_on_where_they_are_the_same():
    """Also with another number of rows per step, or with weights that change later."""
    later = BlendStage(after_tokens=10**6, sources=MEDIA | TEXTS, vision_token_ratio=0.1)
    before = planner_of(**BUDGET)
    assert before.quarantine(0, 3, 2)
    state = before.with_quarantine(before.state_at(5))
    for changes in ({}, {"rows_per_step": 5}, {"schedule": [later]}):
        planner = planner_of(**BUDGET | changes)
        found, why = taken_over(planner, state, 5)
        assert (found, why) == (state, None)
        planner.load_state_dict(found)
        assert not planner.quarantine(0, 3, 7)  # known to be unusable
        assert budget_end(planner).before == tuple(state["tokens"])


def test_the_same_data_that_cannot_go_on_are_refused_not_begun_anew():
    stage = BlendStage(after_tokens=900, sources=MEDIA | TEXTS, vision_token_ratio=0.1)
    first = planner_of(schedule=[stage])
    state = next(state for state, *_ in walk(first, 99) if len(state["blend"]) > 1)
    with pytest.raises(ValueError, match="'blend' ends with"):
        taken_over(planner_of(), state, state["step"])
    with pytest.raises(ValueError, match="'decoders' is 'pillow 1'"):
        taken_over(first, state | {"decoders": "pillow 1"}, state["step"])


def test_a_stage_with_nothing_left_of_its_budget_is_refused():
    planner = planner_of(**BUDGET)
    state = planner.state_at(budget_end(planner).step)
    text = state["tokens"][0]
    told = rf"data\.budget\.text=9,000 tokens are used up \({text:,}\) by the stages before"
    with pytest.raises(ValueError, match=f"{told}.*raise data.budget"):
        taken_over(planner, state, state["step"])
    more = planner_of(budget=TokenBudget(text=text + 1))
    assert taken_over(more, state, state["step"]) == (state, None)


def test_a_budget_of_what_no_sample_holds_is_refused():
    config = CONFIG.replace(
        sources=TEXTS, vision_token_ratio=None, budget=TokenBudget(vision=5), pack_window=16
    )
    (web,) = [index for index in made_indices() if index.name == "web"]
    with pytest.raises(ValueError, match="would never end the run"):
        budget_end(Planner([web], config))


@pytest.mark.parametrize("share", [0.25, 0.5])
def test_a_stage_begins_at_its_share_of_the_budget(share):
    """Text alone, then text and media; the share refers to the sum of both budgets."""
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
