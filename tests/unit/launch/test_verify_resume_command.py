"""Tests of `kimi-pretrain verify resume` without ranks: options, jobs, folders and output."""

import json
import math
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from kimi_pretrain.config import ConfigError, load_config
from kimi_pretrain.verify import configs
from kimi_pretrain.verify.result import Result
from kimi_pretrain.verify.resume_compare import LayoutComparison, ResumeComparison
from kimi_pretrain.verify.traces import Trace, ValueDifference
from launch.cli.main import app
from launch.verify.jobs import Jobs
from launch.verify.resume import Runs, VerifyResume, temporary_place
from launch.verify.terminal import Terminal
from launch.verify.verification import verify

CONFIG = load_config("tiny_cpu")
GOOD = ResumeComparison(stop=2, steps=2, numbers=90, tensors=300, restored_tensors=())
BAD = replace(
    GOOD,
    restored_tensors=("optim.momentum.head",),
    after=(ValueDifference(3, "loss", 2.0, 1.0),),
)
LAYOUT = LayoutComparison(
    stop=2, steps=2, after=(), loss_errors=(1e-7, 0.0), norm_errors=(2e-7, 0.0),
    allowed=(1e-5, 1e-3), layout={"pp": 1, "dp": 2, "stages": None},
)  # fmt: skip
ENDLESS = replace(LAYOUT, loss_errors=(1e-7, math.inf))
FACTS = {"changes": [], "steps": 4, "stop_after": 2}


def result(comparison=GOOD, elsewhere=None, **faults) -> Result:
    named = {name.replace("_", "-"): outcome for name, outcome in faults.items()}
    return Result(comparison, named, {"elsewhere": elsewhere}, FACTS)


def shown(outcome: Result, capsys) -> list[str]:
    Terminal().show(VerifyResume(), json.loads(json.dumps(outcome.as_dict(), allow_nan=False)))
    return capsys.readouterr().out.rstrip().splitlines()


def test_what_fails_says_where(capsys):
    lines = shown(result(BAD), capsys)
    assert "optim.momentum.head" in lines[1]
    assert lines[2].strip() == "step 3 is the first that differs: loss is 2.0, was 1.0"
    assert lines[3].strip().startswith("this suggests: the optimizer's state")
    assert lines[-1] == "FAIL: the resumed run is not the run that was never stopped"
    outcome = result(elsewhere=replace(LAYOUT, after=(ValueDifference(3, "items", 4, 5),)))
    assert not outcome.passed
    assert "step 3 read others: items is 4, was 5" in shown(outcome, capsys)[2]
    assert shown(outcome, capsys)[-1] == "FAIL: in the other layout it is another run"
    assert "1.0e-07, not finite, of" in shown(result(elsewhere=ENDLESS), capsys)[1]


def test_a_fault_that_is_not_found_fails_the_self_test(capsys):
    found = result(lost_momentum=BAD, lost_master="there are no fp32 masters")
    assert found.passed
    lines = shown(found, capsys)
    assert "bit for bit" in lines[-1]
    assert any("lost-momentum" in line and "optim.momentum.head" in line for line in lines)
    assert any("not planted" in line and "fp32 masters" in line for line in lines)
    missed = result(lost_momentum=BAD, unsaved_rng=GOOD)
    assert not missed.passed
    assert shown(missed, capsys)[-1] == "FAIL: planted and not found: unsaved-rng"
    broken = result(BAD, lost_momentum=BAD).as_dict()
    assert not broken["faults"]["lost-momentum"]["found"]  # unknown: the clean run fails


def test_a_planted_run_is_shown_as_the_run(capsys):
    outcome = result(lost_momentum=BAD).with_fault("lost-momentum")
    assert not outcome.passed
    assert shown(outcome, capsys)[-1].endswith("(planted: lost-momentum)")
    assert outcome.as_dict()["planted"] == "lost-momentum"
    outcome = result(lost_momentum=GOOD).with_fault("lost-momentum")
    assert "nothing was found" in shown(outcome, capsys)[-1]
    with pytest.raises(ValueError, match=r"--plant lost-master .* no masters"):
        result(lost_master="no masters").with_fault("lost-master")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--plant", "nothing"], "there are unsaved-rng, loader-off-by-one"),
        (["--plant", "lost-momentum", "--self-test"], "leave out --plant"),
        (["--steps", "4", "--stop-after", "4"], "--stop-after 4 with --steps 4"),
        (["--layouts", "--other-layout", "layout.pp=1"], "leave out --other-layout"),
        (["--other-layout", " "], "--other-layout is empty"),
        (["--other-layout", "optim.lr=1"], "optim.lr=1 is no part of the layout"),
        (["--other-layout", "layout.pp=2"], "the configuration's own layout"),
        (["--other-layout", "layout.pp=3"], "layout.pp"),
    ],
)
def test_wrong_options_are_told_before_anything_starts(arguments, told):
    done = CliRunner().invoke(app, ["verify", "resume", "--config", "tiny_cpu", *arguments])
    assert done.exit_code == 2, done.output
    assert told in " ".join(done.output.split())
    assert "running" not in done.output


def test_it_starts_its_own_processes(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ValueError, match="not under torchrun"):
        verify(VerifyResume(), "tiny_cpu")


def test_all_jobs_are_the_user_s_configuration():
    mine = load_config(
        "tiny_cpu",
        ["checkpoint.asynchronous=false", "checkpoint.keep_last=1", "checkpoint.file_mib=3"],
    )
    proof = configs.resumable(mine, 6, 2)
    assert (proof.train.steps, proof.train.efficiency_pairs) == (6, 0)
    assert (proof.checkpoint.every, proof.checkpoint.keep_last) == (6, None)
    assert (proof.checkpoint.asynchronous, proof.checkpoint.file_mib) == (False, 3)
    kept = ("model", "layout", "data", "optim", "dep", "guard", "resume")
    assert all(getattr(proof, name) == getattr(mine, name) for name in kept)
    for stop in (0, 6, 7):
        with pytest.raises(ValueError, match=f"--stop-after {stop}"):
            configs.resumable(mine, 6, stop)
    assert configs.saving_to(proof, "/b").checkpoint.place == "/b"


def test_checkpoints_go_beside_the_user_s_own(tmp_path):
    def place(config) -> str:
        with temporary_place(config, tmp_path / "temporary") as found:
            return found

    for own in ("memory://bucket/run", str(tmp_path / "own")):
        found = place(configs.saving_to(CONFIG, own + "/"))
        assert found.startswith(f"{own}/verify-resume-")
        assert found != place(configs.saving_to(CONFIG, own))
    assert place(CONFIG) == str(tmp_path / "temporary" / "checkpoints")


@pytest.mark.parametrize("own", ["folder", "memory://verify-resume-test/run"])
def test_what_was_saved_is_removed_and_nothing_else(own, tmp_path):
    from data_pipeline.store.open import open_store

    own = own if "://" in own else str(tmp_path / own)
    store = open_store(own)
    store.put("step_00000001/manifest.json", b"mine")
    with temporary_place(configs.saving_to(CONFIG, own), tmp_path) as place:
        open_store(place).put("straight/step_00000004/manifest.json", b"for now")
        assert len(store.list()) == 2
    assert store.list() == ["step_00000001/manifest.json"]


def test_the_other_layout_is_another():
    assert configs.other_layout(CONFIG).layout.world_size() == 1
    one = configs.other_layout(CONFIG)
    two = configs.other_layout(one)
    assert (two.layout.dp, two.layout.world_size()) == (2, 2)
    odd = load_config(
        "tiny_cpu",
        ["layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1", "data.rows_per_step=6"],
    )
    assert configs.other_layout(odd).layout.pp == 2
    for config in (one, two):
        assert (config.model, config.data, config.optim) == (
            CONFIG.model, CONFIG.data, CONFIG.optim
        )  # fmt: skip
    with pytest.raises(ConfigError, match="own layout"):
        configs.check_other_layout(CONFIG, CONFIG, ["layout.pp=2"])


def test_a_run_from_scratch_is_no_resumed_run(tmp_path):
    """A run from scratch would give the same result, but it would prove nothing about resuming."""
    runs = Runs(CONFIG, Jobs(tmp_path, lambda line: None), "", 2)
    runs.check_began("stopped", Trace({}, began=2))
    for began in (0, 1, None):
        with pytest.raises(ValueError, match=f"from step {began}, not from the checkpoint"):
            runs.check_began("stopped", Trace({}, began=began))
