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
    """Where a budget ends a run from its first step on.

    Attributes:
        step: the last one, counted from 1.
        exact: whether all steps were planned; otherwise it follows from those that were.
        tokens: text and vision tokens of all steps up to it.
        reason: which budget is used up, or that the data ends before.
    """

    step: int
    exact: bool
    tokens: tuple[int, int]
    reason: str

    def __str__(self) -> str:
        text, vision = self.tokens
        about = "" if self.exact else "about "
        return (
            f"ends after {about}{self.step:,} steps with {about}{text:,} text and {vision:,} "
            f"vision tokens: {self.reason}"
        )


def budget_end(planner: Planner, most_windows: int = 32) -> BudgetEnd | None:
    """Return where `data.budget` ends a run of this configuration; None without a budget.

    No data are read. Up to `most_windows` windows are planned as the run will; what is left after
    them follows from the shares of the stages and from how these filled their rows.

    Raises:
        ValueError: no sample holds tokens of which there is a budget.
    """
    budget = planner.config.budget
    if budget is None:
        return None
    state = planner.state_at(0)
    reason = None
    while reason is None and state["window"] < most_windows:
        try:
            _, state = planner.plan(state)
        except DataUsedUp as error:
            reason = str(error)
            break
        reason = used_up(budget, state)
    step, tokens = state["step"], state["tokens"]
    if reason is not None:
        return BudgetEnd(step, True, (tokens[0], tokens[1]), reason)
    whole, reason = _expected(planner, budget)
    return BudgetEnd(round(sum(whole) / sum(tokens) * step), False, whole, reason)


def _expected(planner: Planner, budget: TokenBudget) -> tuple[tuple[int, int], str]:
    """Return the text and vision tokens of a whole run by the shares of its stages, and its end."""
    mixture, totals = planner.mixture, planner.totals
    sums = [0.0, 0.0]
    ends = [segment.start for segment in mixture.segments[1:]] + [mixture.end or math.inf]
    for segment, end in zip(mixture.segments, ends, strict=True):
        draws = [w / sum(segment.weights) / t.samples for w, t in zip(segment.weights, totals)]
        vision = sum(n * t.vision_tokens for n, t in zip(draws, totals))
        rates = sum(n * t.tokens for n, t in zip(draws, totals)) - vision, vision
        positions, reason = float(end - segment.start), mixture.reason
        for at, (kind, most) in enumerate((("text", budget.text), ("vision", budget.vision))):
            if most is not None and rates[at] and (most - sums[at]) / rates[at] < positions:
                positions = (most - sums[at]) / rates[at]
                reason = f"data.budget.{kind}={most:,} tokens are used up"
        if positions == math.inf:
            raise ValueError(
                f"data.budget (text {budget.text}, vision {budget.vision}) would never end the "
                "run: its sources hold no such tokens"
            )
        sums = [before + positions * rate for before, rate in zip(sums, rates)]
        if positions < end - segment.start:
            return (round(sums[0]), round(sums[1])), reason
    return (round(sums[0]), round(sums[1])), mixture.reason


def budget_notices(planner: Planner, steps: int) -> list[str]:
    """Return what a person should know of a run's budget and its `steps`, in lines."""
    end = budget_end(planner)
    if end is None:
        return []
    if steps < end.step:
        return [f"train.steps={steps:,} ends the run before data.budget does, which {end}"]
    return [f"data.budget {end}"]
