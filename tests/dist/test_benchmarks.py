"""Short form of every benchmark runs to completion, and the runs it compares are comparable."""

import json
import subprocess
import sys

import pytest

from benchmarks import bench_fp8
from benchmarks.fusion.report import T95, compared, interval, rise
from benchmarks.fusion.training import End, measured, nearest
from benchmarks.muonclip.settings import (
    ADAMW,
    MUON,
    MUONCLIP,
    PRESET,
    RATES,
    Plan,
    Run,
    control_runs,
    overrides_of,
)
from benchmarks.step_plan.summary import summarise, targets
from kimi_pretrain.config import load_config
from tests import ROOT

# Benchmark -> extra arguments besides --quick and --out, and required parts of its result file.
SHORT = {
    "bench_bubbles.py": ([], ("cases",)),
    "bench_context.py": ([], ("forms", "targets")),
    "bench_dep.py": (["--work", "{}/work", "--picture", "{}/memory.png"], ("timing", "memory")),
    "bench_facts.py": (["--work", "{}/work"], ("written", "counted", "integers_compared")),
    "bench_extension.py": (["--work", "{}/work", "--pictures", "{}"], ("extension", "border")),
    "bench_index.py": ([], ("alone", "shared", "targets")),
    "bench_projector.py": (["--work", "{}/work"], ("seeds", "targets")),
    "bench_fusion.py": (["--work", "{}/work", "--pictures", "{}"], ("ends", "dips", "runs")),
    "bench_loader.py": (["--work", "{}", "--count", "400"], ("speed", "resume", "elastic")),
    "bench_muonclip.py": (["--work", "{}/work", "--pictures", "{}"], ("runs", "targets")),
    "bench_muon.py": ([], ("layers", "accuracy", "targets")),
    "bench_fp8.py": (["--work", "{}/work"], ("found", "targets", "runs")),
    "bench_memory.py": ([], ("layer", "attention", "host_time", "demo", "policies", "targets")),
    "bench_serve.py": (["--work", "{}/work"], ("pages", "p95_s", "memory_bytes")),
    "bench_step_plan.py": (["--work", "{}/work"], ("summary", "targets", "raw")),
    "bench_sync.py": ([], ("summary", "requests", "measured")),
    "sim_dep.py": (["--picture", "{}/found.png"], ("grid",)),
}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHORT)
def test_the_short_form_measures_everything(name, tmp_path):
    arguments, parts = SHORT[name]
    out = tmp_path / "found.json"
    module = f"benchmarks.{name.removesuffix('.py')}"
    command = [sys.executable, "-m", module, "--quick", "--out", str(out)]
    command += [argument.format(tmp_path) for argument in arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    assert all(found[part] for part in parts)
    assert out.with_suffix(".md").exists()


def test_runs_differ_in_what_they_are_compared_for_and_in_nothing_else():
    def settings(optimizer):
        run = Run(RATES, optimizer, 0.02, 3)
        return load_config(PRESET, overrides_of(run, Plan(), "/corpus")).model_dump(mode="json")

    found = {name: settings(name) for name in (ADAMW, MUON, MUONCLIP)}
    for name, values in found.items():
        optim = values["optim"]
        assert optim.pop("qk_clip_threshold") == (30.0 if name == MUONCLIP else None)
        assert optim.pop("matrices") == ("adamw" if name == ADAMW else "muon")
    assert found[ADAMW] == found[MUON] == found[MUONCLIP]
    assert found[MUON]["data"]["seed"] == found[MUON]["train"]["seed"] == 3
    for run in control_runs(Plan(), 0.005):
        optim = load_config(PRESET, overrides_of(run, Plan(), "/corpus")).optim
        assert optim.matrices == "adamw"
        rates = [optim.lr_of(name, optim.lr) for name in ("embedding", "head", "attention")]
        assert rates == [0.005, 0.005, run.lr]


def test_only_a_finished_run_of_the_same_settings_is_taken_over(tmp_path):
    kept = tmp_path / "run.json"
    config, other = (bench_fp8.config_of(tmp_path, 4, 0, fp8) for fp8 in (True, False))
    assert bench_fp8.finished(kept, config) is None
    kept.write_text(
        json.dumps({"config": config.model_dump(mode="json"), "run": {"losses": [1.0]}})
    )
    assert bench_fp8.finished(kept, config) == {"losses": [1.0]}
    assert bench_fp8.finished(kept, other) is None


def test_arms_end_where_both_kinds_of_tokens_are_nearest():
    early = [End(9, 900, 100), End(10, 1000, 111)]
    late = [End(9, 899, 60), End(10, 950, 112), End(11, 1000, 162)]
    assert nearest([early, late]) == (End(10, 1000, 111), End(10, 950, 112))


def test_what_is_kept_of_a_run():
    steps = [{"text_tokens": t, "vision_tokens": v} for t, v in ((10, 0), (8, 1), (5, 5), (6, 4))]
    losses = {"prose_heldout": 2.0}
    lines = [
        {"step": n, "loss_by_source": losses, "loss_tokens_by_source": {"prose_heldout": 7}}
        for n in (0, 2, 4)
    ]
    found = measured(steps, lines)
    assert [point[:2] for point in found["curve"]] == [[0, 0], [2, 19], [4, 39]]
    assert (found["text"], found["vision"], found["start"]) == (29, 10, 1)
    assert found["share"] == 9 / 20  # of the steps after the first one with media


def test_errors_and_pairs_of_predicted_steps():
    def case(name, predicted, *seconds):
        run = {"no_core": 0.0, "phases": {"4 backbone": 1.0}, "busy": {"4 backbone": 1.0}}
        step = {"passes": predicted, "total": predicted, "tokens": 1}
        return {
            "name": name, "predicted": {"steps": [step] * 3}, "network": {},
            "expert_imbalance": 1.0, "runs": [[{"seconds": one, **run}] for one in seconds],
        }  # fmt: skip

    cases = [case("a", 1.09, 0.5, 1.0, 9.0), case("b", 1.9, 2.0), case("c", 1.0, 1.04)]
    found = summarise(cases)
    assert [row["error"] for row in found["cases"]] == pytest.approx([0.09, -0.05, 1 / 1.04 - 1])
    assert (found["pairs"], found["ranked_right"]) == (2, 2)  # a and c are too close
    assert [row["met"] for row in targets(found)] == [True, True, True]
    cases[2] = case("c", 2.6, 1.06)  # now apart, and predicted as the slowest of all
    found = summarise(cases)
    assert (found["pairs"], found["ranked_right"]) == (3, 2)
    assert [row["met"] for row in targets(found)] == [True, False, False]


@pytest.mark.parametrize("count", T95)
def test_intervals_are_those_of_scipy(count):
    from scipy import stats  # the import costs every worker that collects this file 1 s of a core

    values = [0.3, 1.2, 0.7, 0.1, 2.0, 0.4, 1.1, 0.9, 0.2, 0.5][:count]
    found = interval(values)
    low, high = stats.t.interval(0.95, count - 1, loc=found["mean"], scale=stats.sem(values))
    assert (high - low) / 2 == pytest.approx(found["half"], rel=2e-4)


def test_a_dip_is_seen_wherever_it_is():
    assert rise([3.0, 2.0, 1.0]) == 0
    assert rise([3.0, 1.0, 2.5, 0.5, 1.0]) == 1.5


def test_what_may_be_none_stands_in_brackets():
    assert compared({"mean": 0.2, "half": 0.1}) == "+0.200 ± 0.100"
    assert compared({"mean": -0.1, "half": 0.1}) == "(-0.100 ± 0.100)"
    assert compared({"mean": 0.2, "half": None}) == "(+0.200)"
