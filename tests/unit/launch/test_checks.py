"""Tests that every command reports errors in indices and configuration before it starts ranks."""

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.preflight import check_start
from launch.cli.main import app
from launch.local import supervise
from tests import ROOT, fork_server
from tests.dist.jobs import SMALL, layout

COMMANDS = {
    "check": ["config", "check"],
    "train": ["train"],
    "dry run": ["train", "--dry-run"],
    "verify dep": ["verify", "dep"],
    "verify dep, small": ["verify", "dep", "--shrink", "--processes", "2"],
    "verify resume": ["verify", "resume"],
    "plan": ["plan"],
    "submit": ["submit", "--gpus-per-node=0", "--tasks-per-node=1"],
}
WRONG = {
    "ratio": (["data.vision_token_ratio=0.99"], "vision"),
    "root": (["data.root=/nowhere/corpus"], "/nowhere/corpus"),
    "source": (["data.sources={pictures: 1.0, wordz: 1.0}"], "wordz: no manifest.json"),
    "tokenizer": (["data.tokenizer=other.tiktoken"], "other.tiktoken"),
    "vocabulary": (["model.language.vocab_size=256"], "model.language.vocab_size is 256"),
    "epochs": (["data.max_epochs={pictures: 0.01}"], "max_epochs"),
    "size": (["dep.max_patches_per_chunk=40"], "over dep.max_patches_per_chunk=40"),
    "memory": (["dep.memory_limit_gib=0.00001"], "dep.memory_limit_gib"),
    "place": (["checkpoint.place=/dev/null/a"], "/dev/null"),
    "media": (["data.sources={words: 1.0}", "data.vision_token_ratio=null"], "holds no media"),
}
# `plan` shows sizes that are too large in its table; `--shrink` changes these values.
SIZES = {"size", "memory", "place"}
SAID_BY = {
    "check": set(WRONG) - {"media"},
    "train": set(WRONG) - {"media"},
    "dry run": set(WRONG) - {"media", "root"},  # a dry run may run where the data are absent
    "verify dep": set(WRONG),
    "verify dep, small": {"root", "source", "tokenizer", "media"},
    "verify resume": set(WRONG) - {"media"},
    "plan": set(WRONG) - SIZES - {"media"},
    "submit": set(WRONG) - {"media"},
}


@pytest.fixture
def nothing_starts(tmp_path, monkeypatch):
    """Put a stand-in for sbatch on PATH and fail the test if a command starts processes."""
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\ntouch {tmp_path}/submitted\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")

    def trap(*args: object, **options: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(supervise, "run", trap)
    yield
    assert not (tmp_path / "submitted").exists()


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_wrong_with_the_data_is_told_at_once(command, root, nothing_starts, tmp_path):
    keeps = command in ("train", "dry run", "submit")
    folder = ["--run-dir", str(tmp_path / "run")] if keeps else []
    for name in sorted(SAID_BY[command]):
        overrides, part = WRONG[name]
        given = [*COMMANDS[command], *folder, "--config", "tiny_cpu", *SMALL, *layout(dp=2)]
        told = CliRunner().invoke(app, [*given, f"data.root={root}", *overrides])
        assert told.exit_code == 2, (name, told.output, told.exception)
        (line,) = told.stderr.splitlines()
        assert part in line, name
        assert not (tmp_path / "run" / "job.sbatch").exists()


def test_a_login_node_may_not_reach_the_data(nothing_starts, tmp_path):
    given = [*COMMANDS["submit"], "--run-dir", str(tmp_path / "run"), "--config", "tiny_cpu"]
    given += [*SMALL, *layout(dp=2), f"data.root={tmp_path}/elsewhere"]
    told = CliRunner().invoke(app, given)
    assert told.exit_code == 2
    assert "add --unchecked" in told.stderr
    # A dry run builds the model with the engine, so it needs a separate process.
    command = ["-m", "launch.cli", "train", "--dry-run", "--config", "tiny_cpu", given[-1]]
    done = fork_server.run(command, 50)
    assert done.returncode == 0, done.stderr
    assert f"data.root={tmp_path}/elsewhere is not on this machine" in done.stdout + done.stderr


def test_what_is_right_is_planned_as_the_run_will(root):
    config = load_config("tiny_cpu", [*SMALL, f"data.root={root}"])
    plans = check_start(config, steps=3).plans
    assert [plan.step for plan in plans] == [0, 1, 2]
    assert check_start(config, steps=0).plans == []


def test_looking_loads_no_torch(root):
    code = f"""
import sys
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.config import load_config
check_start(load_config("tiny_cpu", {[*SMALL, f"data.root={root}"]}))
print("torch" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout == "False\n"
