"""What a rank says before the first step, and what it does when too many samples are unusable."""

from types import SimpleNamespace

import pytest

from data_pipeline.plan.planner import TooManyUnusable
from kimi_pretrain.checkpoint.scheduler import CheckpointScheduler
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.preflight import check_node, unsaved


@pytest.mark.parametrize(
    ("rank", "local_rank", "here", "told"),
    [(0, 0, 4, 0), (0, 0, 2, 1), (2, 0, 2, 1), (3, 1, 2, 0)],
)
def test_the_first_process_of_each_machine_compares_its_size(
    rank, local_rank, here, told, monkeypatch, caplog
):
    config = load_config("tiny_cpu", ["dep.ranks_per_node=8"])  # of four processes
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setenv("LOCAL_RANK", str(local_rank))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(here))
    check_node(config)
    assert len(caplog.records) == told
    assert all(f"set it to {here}" in record.getMessage() for record in caplog.records)


def test_a_run_that_would_end_without_a_checkpoint_says_which_key_to_set():
    told = unsaved(load_config("tiny_cpu", ["checkpoint.every=null", "train.steps=70"]))
    assert told is not None
    assert "checkpoint.every=70 " in told
    assert unsaved(load_config("tiny_cpu", ["checkpoint.every=50"])) is None


def test_one_unusable_sample_too_many_saves_what_was_trained():
    saved: list[int] = []
    run = SimpleNamespace(config=load_config("tiny_cpu", ["checkpoint.every=null"]), step=7)
    checkpoints = CheckpointScheduler(None, None, run, lambda _: None)
    checkpoints.now = lambda: saved.append(run.step)
    with pytest.raises(TooManyUnusable), checkpoints.saving_before(TooManyUnusable):
        raise TooManyUnusable("1,001 of them")
    assert saved == [7]
