"""Computes the last step of a run with a token budget, from the planner's states only.

Each state counts the tokens of the steps before it (`tokens`: text, vision; without padding, with
unusable samples as planned). So every rank and every resume agrees on the last step when that step
is planned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.config import TokenBudget
from data_pipeline.plan.planner import DataUsedUp, Planner, State

_WINDOWS = 32  # maximum number of windows planned to find an end
_SURE = 0.99  # fraction of the expected values that is safe to assume


def used_up(budget: TokenBudget | None, state: Mapping[str, Any]) -> str | None:
    """Return which budget is used up before a state's step; None if tokens are left."""
    for (kind, most), used in zip(_limits(budget), state["tokens"] or ()):
        if most is not None and used >= most:
            return f"data.budget.{kind}={most:,} tokens are used up ({used:,})"
    return None


def _limits(budget: TokenBudget | None) -> tuple[tuple[str, int | None], ...]:
    text, vision = (None, None) if budget is None else (budget.text, budget.vision)
    return ("text", text), ("vision", vision)


@dataclass(frozen=True)
class BudgetEnd:
    """End of a run with a token budget.

    Attributes:
        step: last step, counted from 1 over the run, or over the stages that share an optimizer.
        exact: True if all steps were planned; otherwise the step is an estimate.
        tokens: text and vision tokens up to that step, over all steps that the budget counts.
        before: the part of `tokens` used before this start.
        reason: which budget is used up, or why the data ends earlier.
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
    """Return the end that `data.budget` sets for a run from the planner's state; None without one.

    No data is read. Up to `most_windows` windows are planned exactly. The rest is estimated from
    the shares of the stages and from the tokens per step in the planned windows.

    Raises:
        ValueError: no sample has tokens of the kind that the budget limits.
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
    """Return the final state of a run of at most `steps` steps from the planner's state.

    The end is found as in `budget_end`. If not all steps are planned, the numbers are 1% below the
    expected values, except for a used-up budget. So a check that refuses to continue from this
    state also refuses the real final state.

    Raises:
        ValueError: as in `budget_end`.
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
    """Return the state after `most_windows` windows, or an earlier end with its reason."""
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
    text, vision = state["tokens"] or (0, 0)  # None: written by a version without token counts
    return text, vision


def _expected(
    planner: Planner, state: Mapping[str, Any], until: float = math.inf
) -> tuple[tuple[int, int], str, float]:
    """Return text and vision tokens of a whole run, the reason for its end, and its last position.

    Tokens after the state are estimated from the shares of the stages. `until` is the latest end.
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
    """Return notices for the user on a run's budget and its `steps`, one line each."""
    if end is None:
        return []
    if steps < end.step:
        return [f"train.steps={steps:,} ends the run before data.budget does, which {end}"]
    return [f"data.budget {end}"]


def last_step(end: BudgetEnd | None, steps: int) -> int:
    """Return the last step of a run of at most `steps`; an estimate if the budget's end is one."""
    return steps if end is None else min(steps, end.step)
