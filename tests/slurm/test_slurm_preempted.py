"""A two-node job that is preempted and requeued equals an undisturbed one."""

import pytest

from tests.slurm import jobs

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(600)]


def test_a_preempted_job_equals_an_uninterrupted_one(lab, data_root, tmp_path):
    overrides = (f"data.root={data_root}", "train.steps=8")
    preempted = jobs.submit(lab, tmp_path / "preempted", *overrides)
    # Run both at once, because a requeue and a start are mostly waiting.
    straight = jobs.submit(lab, tmp_path / "straight", *overrides)
    jobs.preempt(lab, preempted, tmp_path / "preempted")

    for job in (preempted, straight):
        end = jobs.wait_end(lab, job)
        assert (end.state, end.exit_code) == ("COMPLETED", 0), jobs.log_of(lab, job)
    assert jobs.state(lab, preempted).restarts == 1
    assert jobs.state(lab, straight).restarts == 0
    said = jobs.log_of(lab, preempted)
    for line in (
        "start 0 on n[1-2]", "got USR1", "told to make room: back into the queue",
        "start 1 on n[1-2]", "finished",
    ):  # fmt: skip
        assert said.count(f": {line}") == 1, said
    saved = sorted(int(f.name[-8:]) for f in (tmp_path / "preempted/checkpoints").glob("step_*"))
    assert len(saved) == 1, saved  # checkpoint.every is null, so only the signal saved
    assert 1 <= saved[0] < 8

    numbers, hashes = jobs.result(tmp_path / "preempted")
    assert [step for step, *_ in numbers] == list(range(1, 9))
    assert (numbers, hashes) == jobs.result(tmp_path / "straight")
    assert hashes["tensors"] > 200
