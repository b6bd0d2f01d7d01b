"""`kimi-pretrain verify resume` as a user runs it: it passes correct runs and finds every fault."""

import json
import subprocess

import pytest

from tests import fork_server
from tests.dist.jobs import SMALL, layout, read_metrics

pytestmark = [pytest.mark.dist, pytest.mark.timeout(600)]

GATE = "language_model.model.layers.1.mlp.gate"
# Fault -> its signature at the moment of the resume (state, tensors), the first number to differ in
# the next step, and a word of the suggestion.
SIGNS = {
    "unsaved-rng": (None, None, "loss", "random number"),
    "loader-off-by-one": ("loader.", None, "samples", "loader"),
    "lost-momentum": (None, f"optim.momentum.{GATE}.weight", "update_rms.router", "momentum"),
    "lost-expert-bias": (None, f"{GATE}.e_score_correction_bias", "loss", "routing biases"),
    "lost-step-count": ("optimizer_steps", "optim.step", "lr", "learning rate"),
    "swapped-states": (None, "optim.momentum.", "update_rms.experts", "momentum"),
}


def verify(*arguments: str) -> subprocess.CompletedProcess:
    return fork_server.run(["-m", "launch.cli", "verify", "resume", "--json", *arguments], 560)


def told(done: subprocess.CompletedProcess) -> dict:
    assert done.stdout, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("verify") / "kept"


@pytest.fixture(scope="module")
def self_test(data_root, kept):
    return verify(
        "--config", "tiny_cpu", "--self-test", "--keep", str(kept),
        *SMALL, f"data.root={data_root}", *layout(dp=2), "train.rows_per_microbatch=2",
        "data.heldout={words_heldout: 1}", "data.heldout_tokens=99", "train.validate_every=9",
    )  # fmt: skip


def test_a_resumed_run_is_the_run_that_was_not_stopped(self_test, kept):
    assert self_test.returncode == 0, self_test.stdout + self_test.stderr
    result = told(self_test)
    assert result["passed"]
    comparison = result["comparison"]
    assert comparison["differences"] == []
    assert comparison["steps"] == 2
    assert comparison["numbers"] > 80
    validated = (kept / "stopped" / "heldout.jsonl").read_text().splitlines()
    # The last validation is compared.
    assert [json.loads(line)["step"] for line in validated] == [0, 4]
    assert comparison["tensors"] > 300
    assert comparison["restored_tensors"] == []  # they were checked
    assert json.loads((kept / "result.json").read_text()) == result


def test_the_stop_was_a_real_one(self_test, kept):
    """One folder has the lines of both processes; only the stop causes the extra save."""
    assert self_test.returncode == 0
    assert [line["step"] for line in read_metrics(kept / "stopped")] == [1, 2, 3, 4]
    saved = {"stopped": ["step_00000002", "step_00000004"], "straight": ["step_00000004"]}
    for run, steps in saved.items():
        manifests = (kept / "checkpoints" / run).glob("step_*/manifest.json")
        assert sorted(manifest.parent.name for manifest in manifests) == steps
    watched = (kept / "stopped" / "watched.jsonl").read_text().splitlines()
    assert [json.loads(line)["began"] for line in watched] == [0, 0, 2, 2]


@pytest.mark.parametrize("fault", SIGNS)
def test_a_planted_fault_is_found(fault, self_test):
    found = told(self_test)["faults"][fault]
    state, tensor, number, suggestion = SIGNS[fault]
    assert found["found"]
    comparison = found["comparison"]
    restored = [one["name"] for one in comparison["restored"]]
    assert all(name.startswith(state or "-") for name in restored)
    assert bool(restored) == (state is not None)
    assert all(name.startswith(tensor or "-") for name in comparison["restored_tensors"])
    assert bool(comparison["restored_tensors"]) == (tensor is not None)
    # A comparison of the steps alone also shows it.
    first = comparison["after"][0]
    assert (first["step"], first["name"]) == (3, number)
    assert not comparison["before"]
    assert len(comparison["end_tensors"]) > 300
    assert comparison["first"]["largest"] > 0
    assert suggestion in comparison["suggestion"]


def test_a_fault_that_is_there_throughout_is_judged_by_its_own_run(self_test, kept):
    """Its reference is an uninterrupted run that has the same fault."""
    own = read_metrics(kept / "faults" / "unsaved-rng-uninterrupted")
    clean = read_metrics(kept / "straight")
    assert own[0]["loss"] != clean[0]["loss"]
    comparison = told(self_test)["faults"]["unsaved-rng"]["comparison"]
    assert comparison["after"][0]["wanted"] == own[2]["loss"] != clean[2]["loss"]


def test_a_fault_that_cannot_be_had_is_an_obstacle(self_test):
    assert "float32" in told(self_test)["faults"]["lost-master"]["obstacle"]


@pytest.mark.slow
def test_in_another_layout_it_reads_the_same(data_root):
    done = verify(
        "--config", "tiny_cpu", "--layouts", "--steps", "5", "--stop-after", "3",
        *SMALL, f"data.root={data_root}", *layout(pp=2, vpp=2, dp=2, ep=2),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    elsewhere = told(done)["elsewhere"]
    assert elsewhere["steps"] == 2
    assert elsewhere["layout"]["pp"] == elsewhere["layout"]["dp"] == 1
    assert elsewhere["after"] == []
    assert max(elsewhere["loss_errors"]) < 1e-4
    assert 0 < max(elsewhere["norm_errors"]) < 1e-4


@pytest.mark.slow
def test_a_small_copy_with_a_fault_fails(data_root):
    """bfloat16 has masters to lose; saves run without a background writer."""
    done = verify(
        "--config", "tiny_cpu", "--plant", "lost-master", *SMALL, f"data.root={data_root}",
        *layout(), "train.dtype=bfloat16", "checkpoint.asynchronous=false",
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    result = told(done)
    assert (result["passed"], result["planted"]) == (False, "lost-master")
    comparison = result["comparison"]
    assert all(name.startswith("optim.master.") for name in comparison["restored_tensors"])
    assert "fp32 masters" in comparison["suggestion"]
    assert comparison["after"]
