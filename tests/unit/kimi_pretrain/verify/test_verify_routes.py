"""Compares margins of expert choices with brute force, and tests which choices count as ties."""

import math

import pytest
import torch

from kimi_pretrain.verify.routes import at_a_tie, margins

BOUND = 1e-5


def plain_margin(scores: list[float], chosen: list[int]) -> float:
    others = [score for expert, score in enumerate(scores) if expert not in chosen]
    return (min(scores[expert] for expert in chosen) - max(others)) / max(map(abs, scores))


def test_margins_are_those_of_a_plain_loop():
    generator = torch.Generator().manual_seed(4)
    scores = torch.rand(60, 8, generator=generator)
    chosen = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(60)])
    found = margins(scores, chosen)
    wanted = [plain_margin(s, c) for s, c in zip(scores.tolist(), chosen.tolist(), strict=True)]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5)
    assert (margins(scores, scores.topk(3).indices) >= 0).all()
    assert (found < 0).any()


def test_no_choice_and_one_expert_twice_have_no_margin():
    scores = torch.tensor([[0.5, 0.5, 0.1]])
    assert math.isnan(margins(scores, torch.tensor([[-1, -1]])))
    assert math.isnan(margins(scores, torch.tensor([[1, 1]])))
    assert margins(scores, torch.tensor([[0, 1, 2]])) == math.inf  # no other expert is left


@pytest.mark.parametrize(
    ("scores", "theirs", "margin", "tie"),
    [
        ([0.6, 0.5, 0.500001, 0.1], [0, 1], 1e-6, True),
        ([0.6, 0.5, 0.5, 0.1], [0, 2], 0.0, True),
        ([0.6, 0.5, 0.5001, 0.1], [0, 1], 1e-6, False),  # no tie in this run
        ([0.6, 0.5, 0.500001, 0.1], [0, 1], 1e-3, False),  # no tie in the other run
        ([0.6, 0.5, 0.500001, 0.1], [0, 1], -1e-7, False),  # its own scores select other experts
        ([0.6, 0.5, 0.500001, 0.1], [0, 3], 1e-6, False),  # a third expert
        ([0.6, 0.5, 0.500001, 0.1], [-1, -1], math.nan, False),  # no scores were recorded
        ([0.6, 0.5, 0.500001, 0.1], [0, 0], 1e-6, False),  # one expert twice
    ],
)
def test_a_tie_is_one_in_both_runs(scores, theirs, margin, tie):
    found = at_a_tie(torch.tensor([scores]), torch.tensor([theirs]), torch.tensor([margin]), BOUND)
    assert found.tolist() == [tie]
