"""Tests of `kimi-pretrain verify dep`: its refusals and its output."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kimi_pretrain.verify.dep_compare import TOLERANCES
from kimi_pretrain.verify.dep_files import compare_jobs, write_gradients
from kimi_pretrain.verify.result import Result
from launch.cli.main import app
from launch.verify.dep import VerifyDep
from launch.verify.terminal import Terminal
from launch.verify.worker import VerifyJob

runner = CliRunner()
BASE = ["verify", "dep", "--config", "tiny_cpu"]


def told(arguments: list[str]) -> str:
    result = runner.invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    (line,) = result.stderr.strip().splitlines()
    return line


def test_a_wrong_option_is_told_in_a_line(tmp_path, monkeypatch):
    line = told([*BASE, "--plant", "lost-items"])
    assert "--plant lost-items" in line
    assert "lost-item, " in line
    assert "leave out --plant" in told([*BASE, "--plant", "lost-item", "--self-test"])
    assert "train.stepz" in told([*BASE, "train.stepz=1"])
    line = told([*BASE, "train.dtype=bfloat16", "--steps", "2"])
    assert "--steps 1" in line
    (tmp_path / "file").touch()
    assert f"--keep {tmp_path} is not empty" in told([*BASE, "--keep", str(tmp_path)])
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]
    monkeypatch.setenv("RANK", "0")
    assert "not under torchrun" in told(BASE)


def test_a_layout_that_this_machine_cannot_hold_is_refused():
    line = told(["verify", "dep", "--config", "kimi_k25_1t"])
    assert "256 processes" in line
    assert "--shrink --processes 4" in line


@pytest.mark.parametrize(
    "job",
    [
        VerifyJob("a.yaml", "b"),
        VerifyJob("a.yaml", "run dir", ("x.y=1",), "latest", kind="resume", options={"stop": 2}),
        VerifyJob("a.yaml", "b", kind="dep", options={"faults": ["wrong-expert"], "ties": 1e-5}),
    ],
)
def test_a_job_travels_as_one_argument(job):
    assert VerifyJob.parse(job.argument()) == job


def group(name: str, error: float | None = 1e-7, **values) -> dict:
    plain = dict(parameters=4, zero=0, error=error, worst=f"{name}.weight", norm_ratio=1.0)
    plain["vector"] = False
    return plain | {"group": name, "passed": error is not None and error < 1e-5} | values


def comparison(*groups: dict, **values) -> dict:
    plain = {
        "passed": all(one["passed"] for one in groups),
        "tolerance": {"matrices": 1e-5, "vectors": 1e-5},
        "loss_errors": [0.0],
        "grad_norm_error": 1e-8,
        "counts": {"loss_tokens": [7, 7], "items": [3, 3]},
        "missing": [],
        "extra": [],
        "differing": [],
        "routes": [],
        "groups": list(groups),
    }
    return plain | values


def result(clean: dict, faults: dict | None = None, **values) -> dict:
    faults = faults or {}
    found = all(fault.get("found", True) for fault in faults.values())
    plain = {
        "passed": clean["passed"] and found,
        "comparison": clean,
        "faults": faults,
        "plan": dict(
            items=3, patches=99, encoding_ranks=2, moved_items=1, shared_items=0, items_in_bubbles=2
        ),
        "processes": 2,
        "dtype": "float32",
        "changes": [["layout.pp", 16, 2], ["layout.stages", "Et|L", None]],
    }
    return plain | values


def shown(outcome: dict, capsys) -> str:
    Terminal().show(VerifyDep(), outcome)
    return capsys.readouterr().out


GOOD = comparison(group("router"), group("head"))
BAD = comparison(group("router", 0.5), group("head", None))


def test_what_fails_says_where(capsys):
    lines = shown(result(BAD), capsys).splitlines()
    (router,) = [line for line in lines if line.startswith(" router")]
    assert "FAIL" in router
    assert "5.0e-01 > 1e-05" in router
    assert "router.weight" in router
    assert any("not finite" in line for line in lines if line.startswith(" head"))
    assert lines[-1] == "FAIL: the step with DEP is not the step without it"
    wrong = comparison(
        group("head"), passed=False, missing=["a", "b", "c", "d"], counts={"items": [3, 4]}
    )
    out = shown(result(wrong), capsys)
    assert "FAIL: no gradient with DEP: a, b, c and 1 more" in out
    assert "media 3 (FAIL: the reference has 4)" in out
    out = shown(result(comparison(group("head"), passed=False, loss_errors=[1e-9, 2e-5])), capsys)
    assert "loss: error 1.0e-09, 2.0e-05 (FAIL: over 1e-05)\n" in out
    assert "gradient norm: error 1.0e-08\n" in out


def test_a_fault_that_is_not_found_fails_the_self_test(capsys):
    found = {"found": True, "comparison": BAD}
    faults = {"lost-item": found, "wrong-divisor": {"obstacle": "layout.dp=1"}}
    assert "PASS" in shown(result(GOOD, faults), capsys)
    missed = {"lost-item": found, "swapped-items": {"found": False, "comparison": GOOD}}
    outcome = result(GOOD, missed)
    assert not outcome["passed"]
    last = shown(outcome, capsys).rstrip().splitlines()[-1]
    assert last == "FAIL: planted and not found: swapped-items"


def leave(folder: Path, scale: float = 1.0, items: int = 3, **facts) -> None:
    """Write the files that a job with one parameter leaves."""
    plain = dict(losses=[1.0], grad_norm=1.0, loss_tokens=9, vision_tokens=5, items=items)
    plain |= dict(skipped_samples=0, differing=[]) | facts
    gradient = scale * torch.arange(1.0, 7.0).reshape(2, 3)
    write_gradients(folder, 0, [("language_model.lm_head.weight", gradient)])
    (folder / "facts.json").write_text(json.dumps({"step": plain, "plan": {"items": items}}))


def test_faults_are_judged_by_the_reference(tmp_path):
    leave(tmp_path / "reference/clean")
    leave(tmp_path / "dep/clean", 1 + 1e-7)
    leave(tmp_path / "dep/lost-item", 1.1)
    leave(tmp_path / "dep/lost-gradient", 1 - 1e-7)
    (tmp_path / "dep/wrong-divisor").mkdir()
    (tmp_path / "dep/wrong-divisor/facts.json").write_text('{"obstacle": "layout.dp=1"}')

    def outcome(*faults: str) -> Result:
        folders = tmp_path / "dep", tmp_path / "reference"
        return compare_jobs(*folders, TOLERANCES["float32"], faults)

    assert outcome().passed
    found = outcome("lost-item", "wrong-divisor")
    assert found.passed
    assert found.as_dict()["plan"] == {"items": 3}
    faults = found.as_dict()["faults"]
    assert faults["lost-item"]["found"]
    assert faults["wrong-divisor"] == {"obstacle": "layout.dp=1"}
    assert not found.with_fault("lost-item").passed
    with pytest.raises(ValueError, match=r"--plant wrong-divisor .* layout.dp=1"):
        found.with_fault("wrong-divisor")
    missed = outcome("lost-item", "lost-gradient")
    assert not missed.passed
    assert missed.comparison.passed
    assert not missed.as_dict()["faults"]["lost-gradient"]["found"]
    leave(tmp_path / "reference/lost-item", 1.1)  # a separate reference
    assert not outcome("lost-item").passed
    leave(tmp_path / "dep/clean", 1.1)
    broken = outcome("lost-gradient")
    assert not broken.passed
    assert not broken.as_dict()["faults"]["lost-gradient"]["found"]  # unknown: the clean run fails


def test_what_passes_says_so(capsys):
    out = shown(result(GOOD), capsys)
    assert out.rstrip().splitlines()[-1] == "PASS: the step with DEP is the step without it"
    assert "FAIL" not in out
    assert "layout.pp" in out
    assert "2 in the pipeline's bubbles" in out.replace("\n", " ")
    coarse = shown(result(GOOD, dtype="bfloat16"), capsys)
    assert "PASS" in coarse
    assert "train.dtype=float32" in coarse


def test_a_planted_step_is_shown_as_the_step(capsys):
    out = shown(result(BAD, planted="lost-item"), capsys)
    assert out.rstrip().endswith("(planted: lost-item)")


def test_tokens_that_chose_other_experts_are_counted(capsys):
    def routes(step: int, at_ties: int, wrong: int = 0, first: str | None = None) -> dict:
        return dict(step=step, tokens=1864, at_ties=at_ties, wrong=wrong, first_wrong=first)

    ties = [routes(1, 0), routes(2, 1), routes(3, 5)]
    out = shown(result(comparison(group("head"), routes=ties)), capsys)
    assert "one token of 1,864 chose another expert in step 2: rounding" in out
    assert "5 tokens of 1,864 chose other experts in step 3: rounding" in out
    assert "in step 1" not in out
    assert "FAIL" not in out
    wrong = [routes(1, 0, 2, "row 0, token 7")]
    out = shown(result(comparison(group("head"), passed=False, routes=wrong)), capsys)
    assert "FAIL: 2 tokens of 1,864 chose other experts in step 1, and at no tie" in out
    assert "first row 0, token 7" in out
