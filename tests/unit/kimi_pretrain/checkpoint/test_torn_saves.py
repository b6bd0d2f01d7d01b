"""Tests saves killed at random moments: complete ones are sound, incomplete ones never loaded."""

import os
import random
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

import pytest
import torch

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_place
from tests import fork_server
from tests.unit.kimi_pretrain.checkpoint import ranks, saving_run


def start(folder: Path, steps: int) -> tuple[fork_server.Fork, IO[str]]:
    """Start a run; return it and its output."""
    read, write = os.pipe()
    with open(write, "w") as output:
        run = fork_server.start(
            ["-m", saving_run.__name__, str(folder), str(steps)], output, sys.__stderr__
        )
    said = os.fdopen(read)
    assert int(said.readline()) != run.pid  # the pid of its writer
    return run, said


def check(folder: Path, said: list[str]) -> int:
    """Check that complete checkpoints are sound and reported ones exist; return the newest step."""
    place = open_place(folder)
    steps = place.steps()
    told = [int(line) for line in said if line.strip().isdigit()]
    assert max(steps, default=0) >= max(told, default=0)
    for step in steps:
        found = place.checkpoint(step)
        assert found.verify() == [], step
        assert found.step == step
    newest = find("latest", place, ranks.config(), None)
    if newest is None:
        return 0
    for name, tensor in ranks.tensors(newest.step, saving_run.SIZE).items():
        assert torch.equal(newest.tensor(name), tensor), name
    return newest.step


def kill_runs(folder: Path, kills: int, seed: int) -> None:
    draw, newest = random.Random(seed), 0
    for _ in range(kills):
        run, output = start(folder, 1000)
        with output:
            said = [output.readline()]  # at least one save, however busy the machine is
            time.sleep(draw.uniform(0.0, 0.15))
            os.kill(run.pid, signal.SIGKILL)
            said += output.readlines()
        assert run.wait(60) == -signal.SIGKILL
        found = check(folder, said)
        assert found > newest
        newest = found
    run, output = start(folder, 1)  # the next run removes the leftovers
    with output:
        assert run.wait(200) == 0
    left = sorted(entry.name for entry in folder.iterdir())
    assert left == [f"step_{step:08d}" for step in (newest, newest + 1)]


def kill_writers(folder: Path, kills: int, seed: int) -> None:
    """Kill only the writer while the run continues, at least `kills` times and once during a save.

    On a busy machine a save may be faster than the kill.
    """
    draw, complete, newest, step = random.Random(seed), 0, 0, 0
    saver = CheckpointSaver(
        open_place(folder), ranks.config("checkpoint.keep_last=2"), ranks.alone()
    )  # type: ignore
    while step < kills or complete == step:
        step += 1
        assert step < kills + 100, "every save was complete before it was killed"
        saver.begin(ranks.tensors(step, saving_run.SIZE), ranks.state(step, step))
        assert saver._writer is not None
        while saver.progress(0.001).phase == "writing":  # type: ignore[union-attr]
            if (folder / f"step_{step:08d}.partial").exists():
                break
        time.sleep(draw.uniform(0.0, 0.04))
        os.kill(saver._writer.pid, signal.SIGKILL)
        with suppress(CheckpointError):
            saver.finish()
            complete += 1
            assert check(folder, []) == step
        saver._failures = 0
        found = check(folder, [])
        assert found >= newest
        newest = found
    step += 1
    saver.begin(ranks.tensors(step, saving_run.SIZE), ranks.state(step, step))
    saver.finish()
    saver.close()
    assert check(folder, []) == step
    assert not list(folder.glob("step_*.*"))


@pytest.mark.timeout(240)  # starts processes with torch
def test_a_run_that_is_killed_in_a_save_leaves_nothing_that_is_taken(tmp_path):
    kill_runs(tmp_path, 2, seed=0)


def test_a_writer_that_is_killed_leaves_nothing_that_is_taken(tmp_path):
    kill_writers(tmp_path, 8, seed=0)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(4))
def test_many_saves_that_are_killed(seed, tmp_path):
    kill_runs(tmp_path / "runs", 15, seed)
    kill_writers(tmp_path / "writers", 40, seed)


def test_what_killed_runs_have_left_is_removed_by_the_next_save(tmp_path):
    ranks.save(tmp_path, 1, 2)
    for name in ("step_00000007.partial", "step_00000001.leaving", "step_00000002.replaced"):
        shutil.copytree(tmp_path / "step_00000001", tmp_path / name)
    shutil.copytree(tmp_path / "step_00000002", tmp_path / "step_00000003.partial")
    (tmp_path / "step_00000003.partial" / "rank_00009_000.safetensors").write_text("of others")
    (tmp_path / "step_by_step.partial").mkdir()  # not a checkpoint, so it stays
    ranks.save(tmp_path, 3)
    left = sorted(entry.name for entry in tmp_path.iterdir())
    assert left == [*(f"step_0000000{n}" for n in (1, 2, 3)), "step_by_step.partial"]
    files = {entry.name for entry in (tmp_path / "step_00000003").iterdir()}
    assert files == {"index.json", "manifest.json", "rank_00000_000.safetensors"}
    assert open_place(tmp_path).checkpoint(3).verify() == []
