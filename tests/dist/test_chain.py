"""A chain that is killed in its stages and resumed ends like an uninterrupted one."""

import hashlib
import json
import os
import signal
import time
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
import yaml

from kimi_pretrain.checkpoint.manifest import MANIFEST
from kimi_pretrain.reliability.run_history import BEGAN, latest_in
from kimi_pretrain.reliability.status import read_status
from kimi_pretrain.weights.planned import planned_weights
from kimi_pretrain.weights.weight_reader import open_weights
from launch.chain.stages_file import read_stages
from tests import fork_server
from tests.dist.jobs import SMALL
from tests.dist.live import steps_of

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

NARROW = {
    "model.vision.out_width": 32, "model.language.hidden_size": 32,
    "model.language.num_layers": 2,
}  # fmt: skip
NO_ENCODER = {"train.frozen": ["vision_tower", "projector"]}
TEXT = {"data.sources": {"words": 1.0}, "data.vision_token_ratio": None}
STAGES: list[dict[str, Any]] = [
    {"stage": "narrow", "set": {**NARROW, **TEXT, **NO_ENCODER, "train.steps": 8}},
    {"stage": "captions", "take": {"weights": "narrow"},
     "set": {**NARROW, "train.frozen": ["language_model"], "train.steps": 8,
             "checkpoint.every": 8}},
    {"stage": "wide", "set": {**TEXT, **NO_ENCODER, "train.steps": 8}},
    {"stage": "projector", "take": {"weights": "wide", "vision": "captions", "part": "tower"},
     "set": {"train.frozen": ["vision_tower", "language_model"], "train.steps": 8}},
    {"stage": "joint", "take": {"weights": "projector"},
     "set": {"train.steps": 8, "train.dtype": "bfloat16", "layout.dp": 2, "layout.ep": 2}},
    {"stage": "long", "take": {"weights": "joint", "optimizer": "keep"},
     "set": {"train.steps": 16, "train.dtype": "bfloat16", "data.seq_len": 512,
             "data.rows_per_step": 2, "checkpoint.every": 16,
             "model.language.yarn": {"factor": 4.0, "original_max_position": 128}}},
]  # fmt: skip
UNSAVED = ("captions", "long")  # not saved before their end
FROZEN = {"vision_tower": "vision_tower.", "projector": "mm_projector.",
          "language_model": "language_model."}  # fmt: skip


# Covers masters, a frozen tower, and an optimizer that continues with longer rows.
SHORT: list[dict[str, Any]] = [
    {"stage": "joint",
     "set": {"train.steps": 2, "train.dtype": "bfloat16", "train.frozen": ["vision_tower"]}},
    {"stage": "longer", "take": {"weights": "joint", "optimizer": "keep"},
     "set": {"train.steps": 6, "train.dtype": "bfloat16", "train.frozen": ["vision_tower"],
             "data.seq_len": 256, "data.rows_per_step": 4,
             "model.language.yarn": {"factor": 2.0, "original_max_position": 128}}},
]  # fmt: skip


def write(folder: Path, data_root: Path, stages: list[dict[str, Any]]) -> Path:
    """Write a chain into a folder, which is also its run_dir."""
    pairs = (text.partition("=") for text in SMALL)
    small = {key: yaml.safe_load(value) for key, _, value in pairs}
    chain = {
        "run_dir": str(folder),
        "set": small | {
            "data.root": str(data_root), "checkpoint.every": 1,
            "checkpoint.asynchronous": False, "layout": {},
        },
        "stages": [{"config": "tiny_cpu", **stage} for stage in stages],
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "stages.yaml"
    file.write_text(yaml.safe_dump(chain, sort_keys=False))
    return file


def run(file: Path, *arguments: str) -> str:
    done = fork_server.run(["-m", "launch.cli", "chain", str(file), *arguments], 200.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def hashes(folder: Path, stage: str) -> dict[str, Any]:
    return json.loads((folder / stage / "state_hashes.json").read_text())


def ended_in(file: Path, stage: str, number: signal.Signals) -> None:
    """Run the chain until a stage has done two steps in this start, and end it there."""
    folder = file.parent / stage
    with TemporaryFile("w+") as told:
        fork = fork_server.start(["-m", "launch.cli", "chain", str(file)], told, told)
        before, end = steps_of(folder), time.monotonic() + 150
        while steps_of(folder) < before + 2:
            if (code := fork.wait(0.02)) is not None or time.monotonic() > end:
                fork.kill()
                told.seek(0)
                raise AssertionError(f"{code}: {told.read()}")
        if number == signal.SIGKILL:
            fork.kill()  # all its processes at once
        else:
            os.kill(fork.pid, number)
            assert fork.wait(100.0) == 75  # jobs that depend on the chain must not start
            told.seek(0)
            assert f"{stage}: not finished; the same command goes on with it" in told.read()
    status = read_status(folder)
    assert status is not None
    assert status.state == ("running" if number == signal.SIGKILL else "stopped")
    if stage in UNSAVED:
        assert not [*folder.glob(f"checkpoints/step_*/{MANIFEST}")]


def check_frozen(file: Path) -> int:
    """Compare frozen tensors with those of their source stages; return their number."""
    count, after = 0, {}
    for stage in read_stages(file):
        after[stage.name] = hashes(file.parent, stage.name)["per_tensor"]
        for part in stage.config.train.frozen:
            encoder = stage.sources.get("train.vision_weights")
            source = encoder if part == "vision_tower" and encoder else None
            source = source or stage.sources.get("train.start_from")
            if source is None:
                continue
            names = [name for name in after[stage.name] if name.startswith(FROZEN[part])]
            assert names
            for name in names:
                assert after[stage.name][name] == after[source][name], (stage.name, name)
            count += len(names)
    return count


def check_planned(file: Path) -> None:
    """Compare the planned checkpoint of each stage with the written one."""
    for stage in read_stages(file):
        written = open_weights(latest_in(stage.folder))
        planned = planned_weights(stage.config, str(stage.folder))
        for reader in (written, planned):
            assert reader.manifest is not None
        assert {n: (h.shape, h.dtype) for n, h in planned.headers.items()} == {
            n: (h.shape, h.dtype) for n, h in written.headers.items()
        }
        for name in ("model", "dtype", "contents", "training"):
            assert getattr(planned.manifest, name) == getattr(written.manifest, name), name
        assert planned.manifest.state.step == written.manifest.state.step  # type: ignore[union-attr]


def test_a_stage_that_keeps_the_optimizer_is_killed_and_goes_on(data_root, tmp_path):
    file = write(tmp_path, data_root, SHORT)
    told = run(file)
    assert f"stage 1 of 2 joint: {tmp_path}/joint\n" in told
    assert check_frozen(file) > 10
    check_planned(file)
    taken = latest_in(tmp_path / "joint")
    sha256 = hashlib.sha256((Path(taken) / MANIFEST).read_bytes()).hexdigest()
    assert json.loads((tmp_path / "longer" / BEGAN).read_text()) == {
        "train.start_from": {"checkpoint": taken, "manifest_sha256": sha256}
    }
    assert not (tmp_path / "joint" / BEGAN).exists()
    unbroken = hashes(tmp_path, "longer")
    (tmp_path / "longer").rename(tmp_path / "unbroken")
    ended_in(file, "longer", signal.SIGKILL)
    told = run(file)
    assert f"stage 1 of 2 joint: finished after step 2: {tmp_path}/joint\n" in told
    assert "stage 2 of 2 longer: running after step " in told
    assert hashes(tmp_path, "longer") == unbroken
    assert [line for line in run(file).splitlines() if line.startswith("stage ")] == [
        f"stage 1 of 2 joint: finished after step 2: {tmp_path}/joint",
        f"stage 2 of 2 longer: finished after step 6: {tmp_path}/longer",
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_in_every_stage(data_root, tmp_path):
    """Each stage is killed once, two before their first save, and one of these keeps the optimizer.

    One stage is also resumed and then told to stop.
    """
    whole, broken = (write(tmp_path / name, data_root, STAGES) for name in ("whole", "broken"))
    run(whole)
    assert check_frozen(whole) > 60
    check_planned(whole)
    for stage in STAGES:
        ended_in(broken, stage["stage"], signal.SIGKILL)
        if stage["stage"] == "joint":
            ended_in(broken, "joint", signal.SIGTERM)
    told = run(broken)
    assert "stage 5 of 6 joint: finished after step 8: " in told
    assert "stage 6 of 6 long: running after step " in told
    for stage in STAGES:
        name = stage["stage"]
        assert hashes(tmp_path / "broken", name) == hashes(tmp_path / "whole", name), name
    told = run(broken)
    assert told.count("finished after step") == len(STAGES)


def test_nothing_starts_where_a_later_stage_could_not(data_root, tmp_path):
    file = write(tmp_path, data_root, STAGES[:2])
    command = ["-m", "launch.cli", "chain", str(file)]
    done = fork_server.run([*command, "data.sources={pictures: 1.0, wordz: 1.0}"], 200.0)
    assert done.returncode == 2
    assert done.stderr.startswith("error: stage narrow: ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["stages.yaml"]
