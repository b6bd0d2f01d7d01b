"""When a run ends that has a budget of tokens: a function of the planner's states alone.

Each state counts the tokens of the steps before it (`tokens`: text, vision; padding apart, unusable
samples as planned), so every rank and every resume knows which step is the last when it is planned.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from data_pipeline.config import TokenBudget
from data_pipeline.plan.planner import DataUsedUp, Planner


def used_up(budget: TokenBudget | None, state: Mapping[str, Any]) -> str | None:
    """Return which tokens of the budget are used up before a state's step; None: there are some."""
    if budget is None:
        return None
    for kind, most, used in zip(("text", "vision"), (budget.text, budget.vision), state["tokens"]):
        if most is not None and used >= most:
            return f"data.budget.{kind}={most:,} tokens are used up ({used:,})"
    return None


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


def budget_end(planner: Planner, most_windows: int = 32) -> BudgetEnd | None:
    """Return where `data.budget` ends a run that goes on from the planner's state; None: nowhere.

    No data are read. Up to `most_windows` windows are planned as the run will; what is left after
    them follows from the shares of the stages and from how these filled their rows.

    Raises:
        ValueError: no sample holds tokens of which there is a budget.
    """
    budget = planner.config.budget
    if budget is None:
        return None
    first = state = planner.state_dict()
    reason = used_up(budget, state)
    while reason is None and state["window"] < first["window"] + most_windows:
        try:
            _, state = planner.plan(state)
        except DataUsedUp as error:
            reason = str(error)
            break
        reason = used_up(budget, state)
    step, tokens = state["step"], _pair(state)
    if reason is not None:
        return BudgetEnd(step, True, tokens, _pair(first), reason)
    whole, reason = _expected(planner, budget, state)
    planned = (sum(tokens) - sum(_pair(first))) / (step - first["step"])
    left = round((sum(whole) - sum(tokens)) / planned)
    return BudgetEnd(step + left, False, whole, _pair(first), reason)


def _pair(state: Mapping[str, Any]) -> tuple[int, int]:
    text, vision = state["tokens"]
    return text, vision


def _expected(
    planner: Planner, budget: TokenBudget, state: Mapping[str, Any]
) -> tuple[tuple[int, int], str]:
    """Return the text and vision tokens of a whole run, and its end.

    Those after the state by the shares of the stages to come.
    """
    mixture, totals = planner.mixture_of(state), planner.totals
    at = state["window"] * planner.config.pack_window
    sums = list(map(float, _pair(state)))
    ends = [segment.start for segment in mixture.segments[1:]] + [mixture.end or math.inf]
    for segment, end in zip(mixture.segments, ends, strict=True):
        if end <= at:
            continue
        draws = [w / sum(segment.weights) / t.samples for w, t in zip(segment.weights, totals)]
        vision = sum(n * t.vision_tokens for n, t in zip(draws, totals))
        rates = sum(n * t.tokens for n, t in zip(draws, totals)) - vision, vision
        whole = float(end - max(segment.start, at))
        positions, reason = whole, mixture.reason
        for kind, (name, most) in enumerate((("text", budget.text), ("vision", budget.vision))):
            if most is not None and rates[kind] and (most - sums[kind]) / rates[kind] < positions:
                positions = (most - sums[kind]) / rates[kind]
                reason = f"data.budget.{name}={most:,} tokens are used up"
        if positions == math.inf:
            raise ValueError(
                f"data.budget (text {budget.text}, vision {budget.vision}) would never end the "
                "run: its sources hold no such tokens"
            )
        sums = [before + positions * rate for before, rate in zip(sums, rates)]
        if positions < whole:
            return (round(sums[0]), round(sums[1])), reason
    return (round(sums[0]), round(sums[1])), mixture.reason


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
