"""A chain of dependent jobs, ended inside a stage and resubmitted, equals a local run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from kimi_pretrain.reliability.run_history import BEGAN, latest_in
from tests import fork_server
from tests.dist.jobs import SMALL, layout
from tests.slurm import jobs

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(1200)]

STAGES = [
    {"stage": "text", "set": {"train.steps": 6, "data.sources": {"words": 1.0},
                              "data.vision_token_ratio": None,
                              "train.frozen": ["vision_tower", "projector"]}},
    {"stage": "joint", "take": {"weights": "text"}, "set": {"train.steps": 40}},
    {"stage": "long", "take": {"weights": "joint", "optimizer": "keep"},
     "set": {"train.steps": 46, "data.seq_len": 256, "data.rows_per_step": 4}},
]  # fmt: skip


def write(folder: Path, data_root: Path) -> Path:
    """Write the chain into a folder, which also holds its run_dir."""
    pairs = (text.partition("=") for text in (*SMALL, *layout(pp=2)))
    small = {key: yaml.safe_load(value) for key, _, value in pairs}
    chain = {
        "run_dir": str(folder / "runs"),
        "set": small | {"data.root": str(data_root), "checkpoint.every": 5},
        "slurm": {"gpus_per_node": 0, "tasks_per_node": 1, "cpus_per_task": 1},
        "stages": [{"config": "tiny_cpu", **stage} for stage in STAGES],
    }
    folder.mkdir()
    file = folder / "stages.yaml"
    file.write_text(yaml.safe_dump(chain, sort_keys=False))
    return file


def submit(lab, file: Path) -> tuple[dict[str, int], str]:
    """Submit a chain; return the job ids by stage, and the output."""
    done = subprocess.run(
        [sys.executable, "-m", "launch.cli", "chain", str(file), "--submit"],
        env=jobs.environment(lab), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"^stage \d of \d (\w+): job (\d+);", done.stdout, re.MULTILINE)
    return {name: int(number) for name, number in found}, done.stdout


def test_a_chain_of_jobs(lab, data_root, tmp_path):
    file = write(tmp_path / "slurm", data_root)
    runs = tmp_path / "slurm" / "runs"
    first, _ = submit(lab, file)
    assert [*first] == ["text", "joint", "long"]
    assert jobs.state(lab, first["long"]).reason == "Dependency"
    jobs.wait_steps(lab, first["joint"], runs / "joint", 2)
    lab.run("scancel", str(first["joint"]))
    for name, ends in (("text", "COMPLETED"), ("joint", "CANCELLED"), ("long", "CANCELLED")):
        assert jobs.wait_end(lab, first[name]).state == ends, jobs.log_of(lab, first[name])
    assert jobs.status(runs / "joint")["state"] == "stopped"
    assert not (runs / "long" / "metrics.jsonl").exists()

    again, told = submit(lab, file)
    assert [*again] == ["joint", "long"]
    assert f"stage 1 of 3 text: finished after step 6: {runs}/text\n" in told
    for name in again:
        end = jobs.wait_end(lab, again[name])
        assert (end.state, end.restarts) == ("COMPLETED", 0), jobs.log_of(lab, again[name])
    _, told = submit(lab, file)
    assert told.count("finished after step") == 3

    here = write(tmp_path / "here", data_root)
    done = fork_server.run(["-m", "launch.cli", "chain", str(here)], 600.0)
    assert done.returncode == 0, done.stdout + done.stderr
    for stage in STAGES:
        folders = [folder / "runs" / stage["stage"] for folder in (file.parent, here.parent)]
        assert jobs.result(folders[0]) == jobs.result(folders[1]), stage["stage"]
    # Each job resolves its source when it starts, because nothing existed at submission.
    for name, source in (("joint", "text"), ("long", "joint")):
        assert latest_in(runs / source) in (runs / name / BEGAN).read_text()
