"""The short form of MuonClip's benchmark, and the arithmetic of its summary and targets."""

from tests import ROOT
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest


from benchmarks.muonclip import report, summary, targets
from benchmarks.muonclip.settings import (
    ADAMW,
    CLIP,
    CONTROL,
    MUON,
    MUONCLIP,
    PRESET,
    RATES,
    Plan,
    Run,
    control_runs,
    overrides_of,
    quick_plan,
)
from kimi_pretrain.config import load_config
from kimi_pretrain.optim.schedule import learning_rate

SMALL = replace(
    Plan(),
    threshold=10.0,
    clip_seeds=(0,),
    rates=(0.1, 0.2, 0.4),
    control_rates=(0.1,),
    rates_seeds=(0, 1),
    tail_steps=2,
)


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(180)
def test_the_short_form_trains_every_optimizer_and_says_that_it_is_short(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/bench_muonclip.py", "--quick", "--out", out]
    command += ["--work", tmp_path / "work", "--pictures", tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found, plan = json.loads(out.read_text()), quick_plan()
    page = out.with_suffix(".md").read_text()
    assert "Quick form" in page
    assert str(tmp_path) not in page + out.read_text()
    for name in ("muonclip_clip.png", "muonclip_rates.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
    assert len(found["targets"]) == 7
    for curve in found["runs"]:
        steps = plan.clip_steps if curve["part"] == CLIP else plan.rates_steps
        assert len(curve["loss"]) == len(curve["max_logit"]) == steps
        assert curve["not_applied"] == 0
        if curve["optimizer"] != MUONCLIP:
            assert not any(curve["clipped_heads"])
    assert found["setup"]["seen_before"]["all"] < 0.9
    (muon,) = summary.find(found["runs"], part=CLIP, optimizer=MUON)
    (clipped,) = summary.find(found["runs"], part=CLIP, optimizer=MUONCLIP)
    # Same start, same batches; from the step after the first clip on they differ.
    first = next(n for n, heads in enumerate(clipped["clipped_heads"]) if heads)
    assert clipped["loss"][: first + 1] == muon["loss"][: first + 1]
    assert clipped["loss"][first + 1 :] != muon["loss"][first + 1 :]
    rates = summary.find(found["runs"], part=RATES, seed=0)
    assert len(rates) == 3 * len(plan.rates) + len(plan.control_rates)
    adamw, *_ = summary.find(rates, optimizer=ADAMW, lr=plan.rates[0])
    muon, *_ = summary.find(rates, optimizer=MUON, lr=plan.rates[0])
    assert adamw["loss"][0] == muon["loss"][0]  # before any update
    assert adamw["loss"][1:] != muon["loss"][1:]


def test_runs_differ_in_what_they_are_compared_for_and_in_nothing_else():
    def settings(optimizer, part=RATES, seed=3):
        config = load_config(
            PRESET, overrides_of(Run(part, optimizer, 0.02, seed), Plan(), "/corpus")
        )
        return config.model_dump(mode="json"), config

    found = {name: settings(name)[0] for name in (ADAMW, MUON, MUONCLIP)}
    for name, values in found.items():
        optim = values["optim"]
        assert optim.pop("qk_clip_threshold") == (30.0 if name == MUONCLIP else None)
        assert optim.pop("matrices") == ("adamw" if name == ADAMW else "muon")
    assert found[ADAMW] == found[MUON] == found[MUONCLIP]
    assert found[MUON]["data"]["seed"] == found[MUON]["train"]["seed"] == 3
    optim = settings(MUON)[1].optim
    rates = [learning_rate(step, optim, 2048) for step in range(Plan.rates_steps)]
    half = Plan.rates_steps // 2
    assert max(rates) == rates[half - 1] == 0.02 > rates[half]
    assert rates[0] == pytest.approx(0.02 / (Plan.rates_steps // 12))
    assert rates[-1] == pytest.approx(0.002)
    control = control_runs(Plan(), 0.005)
    assert [run.lr for run in control] == list(Plan.control_rates)
    for run in control:
        optim = load_config(PRESET, overrides_of(run, Plan(), "/corpus")).optim
        assert optim.matrices == "adamw"
        rates = [optim.lr_of(name, optim.lr) for name in ("embedding", "head", "attention")]
        assert rates == [0.005, 0.005, run.lr]
    constant = settings(MUON, CLIP)[1].optim
    assert learning_rate(Plan.clip_steps - 1, constant, 2048) == 0.02


def curve(part, optimizer, lr, seed, loss, logits=(1.0,), heads=(0,)):
    return {"part": part, "optimizer": optimizer, "lr": lr, "seed": seed, "seconds": 1.0,
            "not_applied": 0, "loss": list(loss), "max_logit": list(logits),
            "clipped_heads": list(heads)}  # fmt: skip


def test_figures_of_the_clip_worked_out_by_hand():
    lr = SMALL.clip_lr
    curves = [
        curve(CLIP, MUON, lr, 0, [5, 4, 3, 3], [2, 9, 20, 40]),
        curve(CLIP, MUONCLIP, lr, 0, [5, 4, 3, 2], [2, 9, 12, 9.5], [0, 0, 3, 0]),
    ]
    found = summary.clip_summary(curves, SMALL)
    (row,) = found["seeds"]
    assert row[MUON]["first_over"] == row[MUONCLIP]["first_over"] == 3
    assert (row[MUON]["largest"], row[MUONCLIP]["largest"]) == (40, 12)
    assert row[MUONCLIP]["median_after"] == pytest.approx(10.75)
    assert row[MUONCLIP]["share_over_after"] == 0.5
    assert row[MUONCLIP]["heads_a_step"] == 0.75
    assert (row[MUON]["final_loss"], row[MUONCLIP]["final_loss"]) == (3, 2.5)
    assert row["worst_lead"] == 0  # they began together, and then it was below
    met = targets.targets({"clip": found})
    assert [one["met"] for one in met] == [True, True, True]
    assert "not finite" in "\n".join(report._clip(summary.clip_summary(diverged(), SMALL)))
    assert not any(one["met"] for one in targets.targets({"clip": turned(found)}))


def turned(found):
    """The same figures with the two optimizers' names exchanged."""
    rows = [row | {MUON: row[MUONCLIP], MUONCLIP: row[MUON]} for row in found["seeds"]]
    return found | {"seeds": rows}


def diverged():
    lr = SMALL.clip_lr
    return [
        curve(CLIP, MUON, lr, 0, [5, None, None], [2, 90, None]),
        curve(CLIP, MUONCLIP, lr, 0, [5, 4, 3], [2, 9, 9]),
    ]


def test_a_run_that_diverged_harms_only_its_own_optimizer():
    found = summary.clip_summary(diverged(), SMALL)
    assert found["seeds"][0][MUON]["final_loss"] is None
    assert found["seeds"][0]["worst_lead"] == 0
    assert [one["met"] for one in targets.targets({"clip": found})] == [True, True, True]


def rates_curves():
    finals = {
        ADAMW: {0.1: 5.0, 0.2: 4.0, 0.4: 6.0},
        MUON: {0.1: 3.0, 0.2: 3.5, 0.4: None},
        MUONCLIP: {0.1: 3.4, 0.2: 3.2, 0.4: 3.6},
    }
    curves = [
        curve(RATES, name, lr, 0, [8, 6, 4, last, last])
        for name, losses in finals.items()
        for lr, last in losses.items()
    ]
    curves.append(curve(RATES, ADAMW, 0.2, 1, [8, 6, 5, 3, 3]))
    curves.append(curve(RATES, MUON, 0.1, 1, [8, 6, 5, 3.5, 3.5]))
    curves.append(curve(RATES, MUONCLIP, 0.2, 1, [8, 4, 2, 2, 2]))
    return curves


def test_each_optimizer_is_compared_at_its_own_best_rate():
    control = [
        curve(RATES, CONTROL, 0.1, 0, [8, 6, 4, 3.75, 3.75]),
        curve(RATES, CONTROL, 0.1, 1, [8, 6, 5, 3.25, 3.25]),
    ]
    found = summary.rates_summary([*rates_curves(), *control], SMALL)
    assert found[MUONCLIP]["ahead_of_control"] == pytest.approx([0.55, 1.25])
    assert [one["met"] for one in targets.targets({"rates": found})] == [False, True, False, True]
    found = summary.rates_summary(rates_curves(), SMALL)
    assert [found[name]["lr"] for name in (ADAMW, MUON, MUONCLIP)] == [0.2, 0.1, 0.2]
    assert [found[name]["at_edge"] for name in (ADAMW, MUON, MUONCLIP)] == [False, True, False]
    assert found[ADAMW]["final_losses"] == [4, 3]
    assert found[MUON]["ahead_of_adamw"] == [1, -0.5]
    assert found[MUONCLIP]["ahead_of_adamw"] == pytest.approx([0.8, 1])
    # Means of two: 8, 7, 5, 3.5 with the first seed, 8, 7, 5.5, 4.25, 3.5 with the second.
    assert found[MUON]["tokens_to_adamw"] == [0.8, None]
    assert found[MUONCLIP]["tokens_to_adamw"] == [0.8, 0.6]
    assert [one["met"] for one in targets.targets({"rates": found})] == [False, True]
    setup = {"rates_seeds": [0, 1], "rates_steps": 5}
    page = "\n".join(report._rates(found, setup))
    assert "| 0.1 | 5.000 (1.0) | **3.000 (1.0)** | 3.400 (1.0) |" in page
    assert "| 0.4 | 6.000 (1.0) | not finite (1.0) | 3.600 (1.0) |" in page
    assert "best rate of Muon is at the sweep's edge" in page


def test_a_run_is_spared_only_where_the_clip_would_have_changed_nothing():
    muon = [
        curve(RATES, MUON, 0.1, 0, [5, 4], [9, 10]),
        curve(RATES, MUON, 0.2, 0, [5, 4], [9, 10.1]),
        curve(RATES, MUON, 0.4, 0, [5, None], [9, None]),
    ]
    spared = summary.unclipped(Run(RATES, MUONCLIP, 0.1, 0), muon, SMALL)
    assert spared is not None
    assert (spared["optimizer"], spared["same_as"]) == (MUONCLIP, MUON)
    assert spared["loss"] == [5, 4]
    for optimizer, lr, seed in ((MUONCLIP, 0.2, 0), (MUONCLIP, 0.4, 0), (MUONCLIP, 0.1, 1)):
        assert summary.unclipped(Run(RATES, optimizer, lr, seed), muon, SMALL) is None
    assert summary.unclipped(Run(RATES, ADAMW, 0.1, 0), muon, SMALL) is None
