"""Tests the statistics of a step: sums by group, over several ranks, and healthy update sizes."""

import math

import pytest
import torch

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.deepspeed_zero import _ShardedAdamW
from kimi_pretrain.optim.newton_schulz import orthogonalise, update_scale
from kimi_pretrain.optim.step_stats import StepStats, UpdateFigures, merge_figures

CPU = torch.device("cpu")


def report_of(updates: dict[str, list[torch.Tensor]]) -> StepStats:
    report = StepStats(CPU)
    for group, tensors in updates.items():
        report.count(group, tensors)
    return report


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_rms_of_a_group_is_that_of_all_its_numbers_whoever_owns_them():
    attention = [draw(6, 8, seed=1), 5 * draw(3, 3, seed=2), draw(7, seed=3)]
    experts = [0.1 * draw(2, 4, 5, seed=4)]
    wanted = {
        "attention": torch.cat([x.flatten() for x in attention]).square().mean().sqrt().item(),
        "experts": experts[0].square().mean().sqrt().item(),
    }
    alone = report_of({"attention": attention, "experts": experts}).figures()
    assert alone.update_rms == pytest.approx(wanted)
    split = [
        report_of({"attention": attention[:1]}),
        report_of({"experts": experts, "attention": attention[1:]}),
        report_of({"attention": []}),  # owns no tensor
    ]
    whole = merge_figures(report.figures() for report in split)
    assert whole.update_rms == pytest.approx(wanted)
    assert list(whole.update_rms) == ["attention", "experts"]
    assert whole.elements == {"attention": 48 + 9 + 7, "experts": 40}
    # Where every rank updates everything, all ranks count equally.
    assert merge_figures([alone] * 3).update_rms == pytest.approx(wanted)


def test_the_worst_error_and_the_slowest_rank():
    report = StepStats(CPU)
    assert report.figures() == UpdateFigures()
    report.orthogonality(torch.tensor([0.25, 0.5]))
    report.orthogonality(torch.tensor(0.125))
    assert report.figures().orthogonality_error == 0.5
    with report.clock():
        sum(range(10_000))
    seconds = report.figures().newton_schulz_seconds
    assert seconds > 0
    others = [UpdateFigures(newton_schulz_seconds=9.0), UpdateFigures(orthogonality_error=0.3)]
    found = merge_figures([*others, report.figures()])
    assert (found.newton_schulz_seconds, found.orthogonality_error) == (9.0, 0.5)
    assert merge_figures([UpdateFigures()]).orthogonality_error is None


@pytest.mark.parametrize("place", [0, 1])
def test_an_error_that_is_no_number_stays_one(place):
    errors = [0.4, 0.4]
    errors[place] = math.nan
    report = StepStats(CPU)
    for error in errors:
        report.orthogonality(torch.tensor(error))
    assert math.isnan(report.figures().orthogonality_error or 0.0)
    ranks = [UpdateFigures(orthogonality_error=error) for error in errors]
    assert math.isnan(merge_figures(ranks).orthogonality_error or 0.0)


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (384, 96), (24, 512)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_muon_s_updates_is_the_documented_one(shape, dtype):
    """docs/METRICS.md calls 0.16 to 0.2 healthy."""
    update = update_scale(*shape) * orthogonalise(draw(*shape, seed=5), 5, dtype)
    assert 0.16 < report_of({"experts": [update]}).figures().update_rms["experts"] < 0.2


def test_counting_twice_adds_up():
    report = report_of({"router": [torch.full((4,), 2.0)]})
    report.count("router", [torch.full((12,), 4.0)])
    assert report.figures().update_rms == {"router": pytest.approx(math.sqrt(13.0))}
    assert report.figures().elements == {"router": 16}


@pytest.mark.parametrize("padding", [0, 3])
def test_the_padding_of_a_shard_is_no_part_of_its_figures(padding):
    """DeepSpeed pads the last shard with elements that belong to no parameter."""
    config = OptimConfig(lr=1.0, min_lr=0.0, warmup_steps=0, stable_steps=1, decay_steps=1)
    shards = [torch.nn.Parameter(torch.zeros(10)) for _ in range(2)]
    names = ("projector", "vision_tower")
    groups = [{"params": [one], "name": name} for one, name in zip(shards, names)]
    optimizer, stats = _ShardedAdamW(groups, config), StepStats(CPU)
    optimizer.begin([0, padding])
    for shard in shards:
        shard.grad = torch.ones(10)
        shard.grad[10 - padding :] = 0.0
    optimizer.now = (1, 0.1, 1.0, stats)
    optimizer.step()
    figures = stats.figures()
    assert figures.elements == {"projector": 10, "vision_tower": 10 - padding}
    # Adam's first update is the sign of each gradient, whatever its size.
    assert figures.update_rms["vision_tower"] == pytest.approx(1.0, rel=1e-5)
