"""When a run ends that has a budget of tokens: a function of the planner's states alone.

Each state counts the tokens of the steps before it (`tokens`: text, vision; padding apart, unusable
samples as planned), so every rank and every resume knows which step is the last when it is planned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.config import TokenBudget
from data_pipeline.plan.planner import DataUsedUp, Planner, State

_WINDOWS = 32  # planned at most to find an end
_SURE = 0.99  # of what is expected


def used_up(budget: TokenBudget | None, state: Mapping[str, Any]) -> str | None:
    """Return which tokens of the budget are used up before a state's step; None: there are some."""
    for (kind, most), used in zip(_limits(budget), state["tokens"] or ()):
        if most is not None and used >= most:
            return f"data.budget.{kind}={most:,} tokens are used up ({used:,})"
    return None


def _limits(budget: TokenBudget | None) -> tuple[tuple[str, int | None], ...]:
    text, vision = (None, None) if budget is None else (budget.text, budget.vision)
    return ("text", text), ("vision", vision)


@dataclass(frozen=True)
class BudgetEnd:
    """Where a budget ends a run.

    Attributes:
        step: the last one, counted from 1 of the run, or of the stages of one optimizer.
        exact: whether all steps were planned; otherwise it follows from those that were.
        tokens: text and vision tokens of all steps that the budget counts, up to it.
        before: those of them that were used before this start.
        reason: which budget is used up, or that the data ends before.
    """

    step: int
    exact: bool
    tokens: tuple[int, int]
    before: tuple[int, int]
    reason: str

    def __str__(self) -> str:
        text, vision = self.tokens
        about = "" if self.exact else "about "
        used = " (those of earlier steps, {:,} and {:,}, among them)".format(*self.before)
        return (
            f"ends after {about}{self.step:,} steps with {about}{text:,} text and {vision:,} "
            f"vision tokens{used if any(self.before) else ''}: {self.reason}"
        )


def budget_end(planner: Planner, most_windows: int = _WINDOWS) -> BudgetEnd | None:
    """Return where `data.budget` ends a run that goes on from the planner's state; None: nowhere.

    No data are read. Up to `most_windows` windows are planned as the run will; what is left after
    them follows from the shares of the stages and from how these filled their rows.

    Raises:
        ValueError: no sample holds tokens of which there is a budget.
    """
    if planner.config.budget is None:
        return None
    first = planner.state_dict()
    state, reason = _planned(planner, math.inf, most_windows)
    step, tokens = state["step"], _pair(state)
    if reason is not None:
        return BudgetEnd(step, True, tokens, _pair(first), reason)
    whole, reason, _ = _expected(planner, state)
    planned = (sum(tokens) - sum(_pair(first))) / (step - first["step"])
    left = round((sum(whole) - sum(tokens)) / planned)
    return BudgetEnd(step + left, False, whole, _pair(first), reason)


def end_state(planner: Planner, steps: int, most_windows: int = _WINDOWS) -> State:
    """Return the state in which a run of at most `steps` ends that goes on from the planner's.

    As `budget_end` finds its end. Where not all steps were planned, the numbers are a hundredth
    below those that are expected, but for a budget that is used up then: what refuses to go on
    from this state refuses that of the end.

    Raises:
        ValueError: as `budget_end`.
    """
    first = planner.state_dict()
    state, reason = _planned(planner, steps, most_windows)
    if reason is not None:
        return state
    size = planner.config.pack_window
    windows = (state["window"] - first["window"]) / (state["step"] - first["step"])
    until = (state["window"] + (steps - state["step"]) * windows) * size
    whole, _, end = _expected(planner, state, until)
    last = state["step"] + (end / size - state["window"]) / windows
    window = max(int(_SURE * end / size), state["window"])
    step = max(int(_SURE * last), state["step"])
    tokens = [
        most if most is not None and n >= most else int(_SURE * n)
        for n, (_, most) in zip(whole, _limits(planner.config.budget))
    ]
    segments = planner.mixture_of(state).segments
    begun = [[s.start, list(s.weights)] for s in segments if s.start <= window * size]
    return state | {
        "blend": max(begun, state["blend"], key=len), "window": window, "row": 0, "opened": step,
        "step": step, "tokens": state["tokens"] and tokens,
    }  # fmt: skip


def _planned(planner: Planner, steps: float, most_windows: int) -> tuple[State, str | None]:
    """Return the state after so many windows, or at the end before that, and why it is one."""
    budget, first = planner.config.budget, planner.state_dict()
    state = first
    while (reason := used_up(budget, state)) is None:
        if state["step"] >= steps:
            return state, f"all {steps} steps are done"
        if state["window"] >= first["window"] + most_windows:
            break
        try:
            _, state = planner.plan(state)
        except DataUsedUp as error:
            return state, str(error)
    return state, reason


def _pair(state: Mapping[str, Any]) -> tuple[int, int]:
    text, vision = state["tokens"] or (0, 0)  # None: of an earlier version, without a budget
    return text, vision


def _expected(
    planner: Planner, state: Mapping[str, Any], until: float = math.inf
) -> tuple[tuple[int, int], str, float]:
    """Return the text and vision tokens of a whole run, why it ends, and at which position.

    Those after the state by the shares of the stages to come. `until`: ends no later.
    """
    mixture, totals = planner.mixture_of(state), planner.totals
    budget, at = planner.config.budget, state["window"] * planner.config.pack_window
    sums = list(map(float, _pair(state)))
    ends = [segment.start for segment in mixture.segments[1:]] + [mixture.end or math.inf]
    for segment, end in zip(mixture.segments, (min(end, until) for end in ends), strict=True):
        begin = max(segment.start, at)
        if end <= begin:
            continue
        draws = [w / sum(segment.weights) / t.samples for w, t in zip(segment.weights, totals)]
        vision = sum(n * t.vision_tokens for n, t in zip(draws, totals))
        rates = sum(n * t.tokens for n, t in zip(draws, totals)) - vision, vision
        whole = float(end - begin)
        positions, reason = whole, mixture.reason
        for kind, (name, most) in enumerate(_limits(budget)):
            if most is not None and rates[kind] and (most - sums[kind]) / rates[kind] < positions:
                positions = (most - sums[kind]) / rates[kind]
                reason = f"data.budget.{name}={most:,} tokens are used up"
        if positions == math.inf:
            text, vision = (most for _, most in _limits(budget))
            raise ValueError(
                f"data.budget (text {text}, vision {vision}) would never end the run: its sources "
                "hold no such tokens"
            )
        sums = [before + positions * rate for before, rate in zip(sums, rates)]
        at = begin + positions
        if positions < whole:
            return (round(sums[0]), round(sums[1])), reason, at
    return (round(sums[0]), round(sums[1])), mixture.reason, at


def budget_notices(end: BudgetEnd | None, steps: int) -> list[str]:
    """Return what a person should know of a run's budget and its `steps`, in lines."""
    if end is None:
        return []
    if steps < end.step:
        return [f"train.steps={steps:,} ends the run before data.budget does, which {end}"]
    return [f"data.budget {end}"]


def last_step(end: BudgetEnd | None, steps: int) -> int:
    """Return the last step of a run of at most `steps`; about, where the budget's end is so."""
    return steps if end is None else min(steps, end.step)
