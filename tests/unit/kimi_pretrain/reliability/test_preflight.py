"""Tests the checks before the first step, and the reaction to too many unusable samples."""

from contextlib import nullcontext
from pathlib import Path
from shutil import copytree
from types import SimpleNamespace

import pytest

from data_pipeline.ingest.ingest import CrudeSample, TextSegment, ingest
from data_pipeline.plan.budget import budget_end
from data_pipeline.plan.planner import Planner, TooManyUnusable
from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer
from kimi_pretrain.checkpoint.manifest import INDEX, MANIFEST, Fingerprint, RunState, manifest_of
from kimi_pretrain.checkpoint.scheduler import CheckpointScheduler
from kimi_pretrain.config import GIB, ConfigError, load_config
from kimi_pretrain.memory.plan import plan_memory
from kimi_pretrain.reliability.preflight import check_node, check_start, unsaved
from tests.dist.jobs import SMALL


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


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["train.validate_every=5"], "train.validate_every=5 with no source in data.heldout"),
        (["data.heldout={words: 1}"], "heldout names words, which training draws from"),
        (["data.heldout={words_heldout: 0}"], "'words_heldout' is 0"),
    ],
)
def test_held_out_sources_that_cannot_be_are_refused(keys, told):
    with pytest.raises(ConfigError, match=told):
        load_config("tiny_cpu", [*SMALL, *keys])


def test_a_source_of_training_under_another_name_is_no_held_out_one(data_root: Path, tmp_path):
    """The same samples, ingested under two names, are found by their content."""
    root = tmp_path / "corpus"
    copytree(data_root, root)
    store = open_store(str(root))
    tokenizer = Tokenizer.from_store(store, "tokenizer.tiktoken")
    for name in ("words_again", "words_new"):
        text = "it rained" if name == "words_new" else "the cat sat"
        samples = [CrudeSample("w", [TextSegment(text)], {})]
        ingest(samples, store, name, tokenizer)
    keys = (f"data.root={root}", "data.vision_token_ratio=null", "train.validate_every=5")
    ingest([CrudeSample("w", [TextSegment("the cat sat")], {})], store, "cats", tokenizer)
    cats = "data.sources={cats: 1}"
    one = ("layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1")
    check_start(load_config("tiny_cpu", [*SMALL, *keys, cats, *one, "data.heldout={words_new: 1}"]))
    same = load_config("tiny_cpu", [*SMALL, *keys, cats, *one, "data.heldout={words_again: 1}"])
    with pytest.raises(ConfigError, match=r"data.heldout.words_again holds the samples of .*cats"):
        check_start(same)


ONE = ("layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.ep=1")


def test_held_out_media_that_do_not_fit_are_refused_before_a_process_is_started(data_root):
    """The training media fit, but the held-out media are larger in a batch and do not."""
    keys = (f"data.root={data_root}", "data.sources={words: 1}", "data.vision_token_ratio=null")
    held = ("data.heldout={pictures_heldout: 1}", "train.validate_every=5")
    limit = "dep.memory_limit_gib=1.0e-6"
    check_start(load_config("tiny_cpu", [*SMALL, *keys, *ONE, limit]))
    check_start(load_config("tiny_cpu", [*SMALL, *keys, *ONE, *held]))
    with pytest.raises(ConfigError, match=r"^data.heldout \(pictures_heldout\), batch 1: .*memory"):
        check_start(load_config("tiny_cpu", [*SMALL, *keys, *ONE, *held, limit]))


def test_embeddings_count_in_the_memory_limit_where_only_the_sources_tell_their_share(data_root):
    keys = [*SMALL, *ONE, f"data.root={data_root}", "data.sources={pictures: 1}"]
    config, with_all = (
        load_config("tiny_cpu", [*keys, f"data.vision_token_ratio={ratio}"])
        for ratio in ("null", "0.9")
    )
    without, most = plan_memory(config).fullest.peak, plan_memory(with_all).fullest.peak
    assert without < most
    for size, fits in ((without, False), (most, True)):
        limits = ["data.vision_token_ratio=null", f"train.memory_limit_gib={(size + 1) / GIB}"]
        refused = pytest.raises(ConfigError, match="^train.memory_limit_gib")
        with nullcontext() if fits else refused:
            check_start(load_config("tiny_cpu", [*keys, *limits]))


def test_a_kept_stage_counts_its_budget_before_a_process_is_started(data_root, tmp_path):
    """The data order continues, so data of the stage before counts and may be the whole budget."""
    keys = [*SMALL, *ONE, f"data.root={data_root}", "data.budget={text: 3000}"]
    config = load_config("tiny_cpu", keys)
    planner = Planner(check_start(config).indices, config.data)
    ends = budget_end(planner)
    for step in (2, ends.step):
        folder = tmp_path / f"step_{step:08d}"
        folder.mkdir()
        state = RunState(step, step, planner.state_at(step))
        files = {INDEX: Fingerprint(2, "0" * 64)}
        (folder / MANIFEST).write_text(manifest_of(config, state, files, {}).text())
    keep = ("train.steps=99", "train.start_optimizer=keep", f"train.start_from={tmp_path}")
    with pytest.raises(ConfigError, match=r"^train.start_from: .*data.budget.text=3,000 .*raise"):
        check_start(load_config("tiny_cpu", [*keys, *keep]))
    (two,) = keep[2:]
    found = check_start(load_config("tiny_cpu", [*keys, *keep[:2], f"{two}/step_00000002"]))
    assert found.plans[0].step == 2
    told, rate = found.notices
    assert f"ends after {ends.step} steps" in told
    assert f"ends the run after {ends.step} steps with a learning rate of 0.003; " in rate
    assert rate.endswith("optim's schedule comes to 0.0003 at step 202")
    falls = f"{{steps: 1, lr: 0.01, shape: linear}}, {{steps: {ends.step - 1}, lr: 0.001"
    for schedule in (f"[{falls}, shape: linear}}]", "[{steps: 1, lr: 0.01, shape: linear}]"):
        kept = [*keys, *keep[:2], f"{two}/step_00000002", f"optim={{schedule: {schedule}}}"]
        assert len(check_start(load_config("tiny_cpu", kept)).notices) == 1
    assert "those of earlier steps, {:,} and {:,}".format(*planner.state_at(2)["tokens"]) in told
    check_start(load_config("tiny_cpu", [*keys, *keep]), steps=0)  # resumed: uses its own counts
    to_come = f"{two}/to_come"  # in a chain, the stage before has not begun
    assert check_start(load_config("tiny_cpu", [*keys, *keep[:2], to_come])).plans[0].step == 0


def test_media_of_samples_that_are_not_chosen_may_be_too_large(data_root):
    """Media outside a source's bounds are never encoded; a source left without samples is named."""
    keys = (f"data.root={data_root}", "data.vision_token_ratio=null", "train.steps=1")
    small = "dep.max_patches_per_chunk=160"
    with pytest.raises(ConfigError, match="'pictures', sample .* over dep.max_patches_per_chunk"):
        check_start(load_config("tiny_cpu", [*SMALL, *keys, *ONE, small]))
    bounds = "data.sources={words: 1, pictures: {share: 1, max_tokens: 40}}"
    found = check_start(load_config("tiny_cpu", [*SMALL, *keys, *ONE, small, bounds]))
    assert any("are chosen by max_tokens=40" in notice for notice in found.notices)
    none = "data.sources={words: {share: 1, min_tokens: 9999}}"
    with pytest.raises(ValueError, match="^data.sources.words: none of its 200 samples is chosen"):
        check_start(load_config("tiny_cpu", [*SMALL, *keys, *ONE, none]))
