"""`kimi-pretrain verify resume` without its processes: options, jobs, places, what it prints."""

import json
from contextlib import ExitStack

import pytest
from typer.testing import CliRunner

from kimi_pretrain.config import ConfigError, load_config
from kimi_pretrain.verify import resume_jobs
from kimi_pretrain.verify.resume import Trace
from kimi_pretrain.verify.resume_faults import RESUME_FAULTS
from launch.cli import verify_resume
from launch.cli.main import app
from launch.verify import resume_view as verify_resume_view
from launch.verify.resume_jobs import ResumeJobs, temporary_place
from launch.verify.resume_worker import ResumeJob

CONFIG = load_config("tiny_cpu")
GOOD = {
    "passed": True, "numbers": 90, "steps": 2, "tensors": 300, "restored_tensors": [],
    "differences": [], "suggestion": None,
}  # fmt: skip
BAD = GOOD | {
    "passed": False,
    "restored_tensors": ["optim.momentum.head"],
    "differences": ["step 3 is the first that differs: loss is 2.0, was 1.0"],
    "suggestion": "the optimizer's state",
}
LAYOUT = {
    "passed": True, "layout": {"pp": 1, "dp": 2, "stages": None}, "after": [],
    "loss_errors": [1e-7, None], "norm_errors": [2e-7, 0.0], "allowed": [1e-5, 1e-3],
}  # fmt: skip


def result(comparison: dict = GOOD, **changes) -> dict:
    plain = dict(comparison=comparison, elsewhere=None, faults={}, changes=[], steps=4)
    found = plain | {"stop_after": 2, "passed": comparison["passed"]} | changes
    return found | {"passed": verify_resume._passed(found)}


def shown(outcome: dict, capsys) -> list[str]:
    verify_resume_view.ResumeTerminal().show(outcome)
    return capsys.readouterr().out.rstrip().splitlines()


def test_what_passes_says_what_was_compared(capsys):
    assert shown(result(), capsys) == [
        "stopped in step 2 of 4, resumed in new processes: compared 90 numbers of 2 steps and 300 "
        "tensors, these also at the moment the run went on",
        "PASS: the resumed run is the run that was never stopped, bit for bit",
    ]
    lines = shown(result(elsewhere=LAYOUT), capsys)
    assert lines[1].startswith(
        "resumed with dp=2: errors of the loss 1.0e-07, not finite, of the gradient norm 2.0e-07, "
    )
    assert lines[1].endswith("every step read the same samples")
    assert lines[2].endswith("bit for bit, and in another layout the same but for rounding")


def test_what_fails_says_where(capsys):
    lines = shown(result(BAD), capsys)
    assert lines[1].strip() == "step 3 is the first that differs: loss is 2.0, was 1.0"
    assert lines[2].strip() == "this suggests: the optimizer's state"
    assert lines[-1] == "FAIL: the resumed run is not the run that was never stopped"
    one = {"step": 3, "name": "items", "found": 4, "wanted": 5}
    outcome = result(elsewhere=LAYOUT | {"passed": False, "after": [one]})
    assert not outcome["passed"]
    assert "step 3 read others: items is 4, was 5" in shown(outcome, capsys)[2]
    assert shown(outcome, capsys)[-1] == "FAIL: in the other layout it is another run"


def test_a_fault_that_is_not_found_fails_the_self_test(capsys):
    found = {"found": True, "comparison": BAD}
    faults = {"lost-momentum": found, "lost-master": {"obstacle": "there are no fp32 masters"}}
    lines = shown(result(faults=faults), capsys)
    assert "bit for bit" in lines[-1]
    assert any("lost-momentum" in line and "loss is 2.0" in line for line in lines)
    assert any("not planted" in line and "fp32 masters" in line for line in lines)
    missed = {"lost-momentum": found, "unsaved-rng": {"found": False, "comparison": GOOD}}
    outcome = result(faults=missed)
    assert not outcome["passed"]
    assert shown(outcome, capsys)[-1] == "FAIL: planted and not found: unsaved-rng"


def test_a_planted_run_is_shown_as_the_run(capsys):
    faults = {"lost-momentum": {"found": True, "comparison": BAD}}
    outcome = verify_resume.with_fault(result(faults=faults), "lost-momentum")
    assert not outcome["passed"]
    assert shown(outcome, capsys)[-1].endswith("(planted: lost-momentum)")
    assert json.loads(json.dumps(outcome))["planted"] == "lost-momentum"
    blind = {"lost-momentum": {"found": False, "comparison": GOOD}}
    outcome = verify_resume.with_fault(result(faults=blind), "lost-momentum")
    assert "nothing was found" in shown(outcome, capsys)[-1]
    with pytest.raises(ValueError, match=r"--plant lost-master .* no masters"):
        verify_resume.with_fault(
            result(faults={"lost-master": {"obstacle": "no masters"}}), "lost-master"
        )


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
        verify_resume.verify_resume("tiny_cpu")


def test_the_faults_of_the_help_are_those_there_are():
    done = CliRunner().invoke(app, ["verify", "resume", "--help"])
    text = "".join(part.strip("│ ") for part in done.output.splitlines())
    assert all(name.replace("-", "") in text.replace("-", "") for name in RESUME_FAULTS)


def test_all_jobs_are_the_user_s_configuration():
    mine = load_config(
        "tiny_cpu",
        ["checkpoint.asynchronous=false", "checkpoint.keep_last=1", "checkpoint.file_mib=3"],
    )
    proof = resume_jobs.proof(mine, 6, 2)
    assert (proof.train.steps, proof.train.efficiency_pairs) == (6, 0)
    assert (proof.checkpoint.every, proof.checkpoint.keep_last) == (6, None)
    assert (proof.checkpoint.asynchronous, proof.checkpoint.file_mib) == (False, 3)
    kept = ("model", "layout", "data", "optim", "dep", "guard", "resume")
    assert all(getattr(proof, name) == getattr(mine, name) for name in kept)
    for stop in (0, 6, 7):
        with pytest.raises(ValueError, match=f"--stop-after {stop}"):
            resume_jobs.proof(mine, 6, stop)
    assert resume_jobs.saving_to(proof, "/b").checkpoint.place == "/b"


def test_checkpoints_go_beside_the_user_s_own(tmp_path):
    def place(own: str) -> str:
        config = resume_jobs.saving_to(CONFIG, own)
        return resume_jobs.place_beside(config, tmp_path / "temporary", "tag")

    assert place("s3://bucket/run/") == "s3://bucket/run/verify-resume-tag"
    assert place(str(tmp_path / "own")) == str(tmp_path / "own" / "verify-resume-tag")
    none = resume_jobs.place_beside(CONFIG, tmp_path / "temporary", "tag")
    assert none == str(tmp_path / "temporary" / "checkpoints")


@pytest.mark.parametrize("own", ["folder", "memory://verify-resume-test/run"])
def test_what_was_saved_is_removed_and_nothing_else(own, tmp_path):
    from data_pipeline.store.open import open_store

    own = own if "://" in own else str(tmp_path / own)
    store = open_store(own)
    store.put("step_00000001/manifest.json", b"mine")
    with temporary_place(resume_jobs.saving_to(CONFIG, own), tmp_path) as place:
        open_store(place).put("straight/step_00000004/manifest.json", b"for now")
        assert len(store.list()) == 2
    assert store.list() == ["step_00000001/manifest.json"]


def test_the_other_layout_is_another():
    assert resume_jobs.other_layout(CONFIG).layout.world_size() == 1
    one = resume_jobs.other_layout(CONFIG)
    two = resume_jobs.other_layout(one)
    assert (two.layout.dp, two.layout.world_size()) == (2, 2)
    odd = load_config(
        "tiny_cpu",
        ["layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1", "data.rows_per_step=12"],
    )
    assert resume_jobs.other_layout(odd).layout.pp == 2
    for config in (one, two):
        assert (config.model, config.data, config.optim) == (
            CONFIG.model, CONFIG.data, CONFIG.optim
        )  # fmt: skip
    with pytest.raises(ConfigError, match="own layout"):
        resume_jobs.check_other_layout(CONFIG, CONFIG, ["layout.pp=2"])


def test_a_job_survives_its_command_line():
    job = ResumeJob("c.yaml", "run", ("a.b=1",), "latest", stop=2, faults=("lost-momentum",))
    assert ResumeJob.parse(job.argument()) == job


def test_a_run_from_scratch_is_no_resumed_run(tmp_path):
    """It would come out the same, and prove nothing."""
    jobs = ResumeJobs(CONFIG, tmp_path, "", 2, lambda line: None, ExitStack())
    jobs.check_began("stopped", Trace({}, began=2))
    for began in (0, 1, None):
        with pytest.raises(ValueError, match=f"from step {began}, not from the checkpoint"):
            jobs.check_began("stopped", Trace({}, began=began))
