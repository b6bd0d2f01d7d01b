"""Kimi-VL's objective in training: any number of ranks, resume, DeepSpeed, refused settings.

Items are encoded by the ranks that hold their rows (`dep.assign: owner`), or spread over all.
`test_captions` checks that one step is correct.
"""

import numpy as np
import pytest
import torch

from kimi_pretrain.config import ConfigError, load_config
from kimi_pretrain.memory.states import Sizes
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.weights.planned import planned_weights
from kimi_pretrain.weights.weight_reader import open_weights
from tests.dist.jobs import SMALL, layout, read_metrics, run_jobs, train
from tests.dist.test_captions import PAIRS
from tests.dist.test_deepspeed import worst

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

STEPS = 4
COMMON = (
    *PAIRS, "optim.matrices=adamw", "optim.qk_clip_threshold=null",
    "train.frozen=[language_model]", f"train.steps={STEPS}", "train.seed=1",
    "data.rows_per_step=4", "optim.bucket_elements=5000",
)  # fmt: skip
TOLERANCE = {"float64": (1e-12, 1e-12), "float32": (1e-6, 5e-6)}
"""Of losses and of gradients; the gradients of the texts' attention nearly cancel."""
OWNER = "dep.assign=owner"
# Settings that change how the work is done, but not its result.
VARIANTS = {
    "kept": ("dep.keep_activations=auto", "dep.memory_limit_gib=1.0", "dep.check_recompute=true"),
    "another order": ("data.order_rows=light_ends",),
    "small chunks": ("dep.max_patches_per_chunk=300", "dep.check_recompute=true"),
}


def jobs(data_root, world: int, *more: str) -> dict:
    """Return jobs for a step's gradients in both precisions, items at their owners and spread."""
    common = (*COMMON, f"data.root={data_root}", *more)
    whole = {
        f"{dtype} {assign}": ("siglip_step", (f"train.dtype={dtype}", f"dep.assign={assign}"))
        for dtype in TOLERANCE
        for assign in ("owner", "round_robin")
    }
    return {n: (action, (*common, *own, *layout(dp=world))) for n, (action, own) in whole.items()}


@pytest.fixture(scope="module")
def one(data_root, tmp_path_factory):
    """Results of one process, which also trains some steps and saves half-way."""
    folder = tmp_path_factory.mktemp("one")
    common = (*COMMON, f"data.root={data_root}", *layout(), f"checkpoint.place={folder / 'half'}")
    todo = {"trained": ("zero_trained", common), "again": ("zero_trained", common)}
    for name, more in VARIANTS.items():
        todo[name] = "siglip_step", (*common[:-1], "train.dtype=float64", OWNER, *more)
    return folder, run_jobs({**jobs(data_root, 1), **todo}, folder, 1, timeout=200)


@pytest.fixture(scope="module")
def two(one, data_root, tmp_path_factory):
    """Results of two processes, also resumed from one process's checkpoint and under DeepSpeed."""
    folder = tmp_path_factory.mktemp("two")
    common = (*COMMON, f"data.root={data_root}", *layout(dp=2), OWNER)
    zero = (*common, "optim.deepspeed=zero1", f"checkpoint.place={folder / 'zero'}")
    pipeline = (*COMMON, f"data.root={data_root}", *layout(pp=2))
    todo = {
        **jobs(data_root, 2),
        "pipeline": ("siglip_step", (*pipeline, "train.dtype=float64", "dep.assign=round_robin")),
        "own": ("zero_trained", common),
        "zero": ("zero_trained", zero),
        "zero again": ("zero_trained", zero),
    }
    return run_jobs(todo, folder, 2, timeout=280)


def same(found: dict, wanted: dict, dtype: str) -> None:
    limit, of_gradients = TOLERANCE[dtype]
    assert found["siglip"] == (pytest.approx(wanted["siglip"][0], rel=limit), *wanted["siglip"][1:])
    assert found["loss"] == pytest.approx(wanted["loss"], rel=limit)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, target in wanted["gradients"].items():
        scale = wanted["gradients"][name.replace("k_proj.bias", "k_proj.weight")].norm()
        assert (found["gradients"][name] - target).norm() <= of_gradients * scale, name


@pytest.mark.parametrize("assign", ["owner", "round_robin"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_ranks_have_the_gradients_of_one(one, two, dtype, assign):
    wanted = one[1][f"{dtype} {assign}"]
    assert wanted["siglip"][1] > 3
    same(two[f"{dtype} {assign}"], wanted, dtype)
    assert len(set(two[f"{dtype} owner"]["counts"][0])) == 2  # uneven


def test_a_stage_without_rows_encodes_images_of_captions_elsewhere(one, two):
    same(two["pipeline"], one[1]["float64 round_robin"], "float64")
    images, texts = two["pipeline"]["counts"]
    assert texts[1] == 0 < images[1]


@pytest.mark.parametrize("name", VARIANTS)
def test_order_chunks_and_kept_graphs_change_nothing(one, name):
    same(one[1][name], one[1]["float64 owner"], "float64")


def test_four_ranks_have_the_gradients_of_one(one, data_root, tmp_path):
    """Some ranks have no pair, or images whose captions are on other ranks."""
    todo = {name: job for name, job in jobs(data_root, 4).items() if "float64" in name}
    found = run_jobs(todo, tmp_path, 4, timeout=280)
    for name in found:
        same(found[name], one[1][name], "float64")
    assert 0 in found["float64 owner"]["counts"][0]
    images, texts = found["float64 round_robin"]["counts"]
    assert images != texts


def test_it_learns_and_resumes_with_the_same_bits(one):
    _, found = one
    straight, resumed = found["trained"], found["again"]
    assert resumed["lines"] == straight["lines"][STEPS // 2 :]
    for kind in ("weights", "state"):
        assert resumed[kind].keys() == straight[kind].keys()
        assert all(torch.equal(value, straight[kind][n]) for n, value in resumed[kind].items())
    names = [name for name in straight["weights"] if name.startswith("siglip.")]
    assert {"siglip.logit_scale", "siglip.logit_bias"} < set(names)
    assert all(f"optim.exp_avg.{name}" in straight["state"] for name in names)


def test_deepspeed_trains_the_heads_as_well(two):
    own, zero, again = two["own"], two["zero"], two["zero again"]
    assert worst(zero["weights"], own["weights"]) <= 1e-6
    assert zero["equal"]
    assert again["lines"] == zero["lines"][STEPS // 2 :]
    assert all(torch.equal(value, zero["weights"][n]) for n, value in again["weights"].items())


def test_the_plan_of_memory_counts_them(one):
    config = load_config("tiny_cpu", [*SMALL, *COMMON, *layout()])
    held = sum(value.numel() for value in one[1]["trained"]["weights"].values())
    assert Sizes.of(config).encoder == (held, held)


def test_the_command_trains_tells_the_loss_and_refuses_another_objective(data_root, tmp_path):
    common = (*COMMON, f"data.root={data_root}", *layout(), "train.steps=2", "checkpoint.every=1")
    held = ("data.heldout={pictures_heldout: 1.0}", "train.validate_every=1")
    done = train(tmp_path / "run", *common, *held)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in read_metrics(tmp_path / "run"):
        assert line["pairs"] > 0
        assert 0 < line["siglip_loss"] < 100
    off = [one for one in common if not one.startswith("train.siglip")]
    first = tmp_path / "run" / "checkpoints" / "step_00000001"
    done = train(tmp_path / "other", *off, resume=first)
    assert done.returncode != 0
    told = (done.stdout + done.stderr).replace("\n", " ")
    assert "train.siglip=" in told
    written, config = open_weights(latest_in(tmp_path / "run")), tmp_path / "run" / "config.yaml"
    planned = planned_weights(load_config(config), "run")  # for the next stage of a chain
    assert {n: (one.shape, one.dtype) for n, one in planned.headers.items()} == {
        n: (one.shape, one.dtype) for n, one in written.headers.items()
    }
    # A stage without SigLIP can start from this one, and a stage with it takes over the heads.
    done = train(tmp_path / "next", *off, f"train.start_from={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    taken = common[0].replace("{", f"{{weights: {tmp_path / 'run'}, ")
    done = train(tmp_path / "third", taken, *common[1:], f"train.vision_weights={tmp_path / 'run'}")
    assert done.returncode == 0, done.stdout + done.stderr
    told = "".join(file.read_text() for file in (tmp_path / "third").rglob("*.log"))
    assert "SigLIP's heads and text tower from the checkpoint of step 2" in told
    assert not any("pairs" in line for line in read_metrics(tmp_path / "next"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("train.frozen=[]", r"train.siglip with train.frozen=\[\]: it trains the vision tower"),
        ("train.frozen=[language_model, vision_tower]", "leave vision_tower out"),
        ("dep.placement=colocated", "dep.placement=colocated: the decoupled encoder has it"),
        ("dep.max_split=2", "set dep.max_split=1"),
        ("layout.cp=2", "layout.cp=2, layout.tp=1: captions are read from whole rows"),
        ("train.siglip={tokenizer: a, heads: 5}", "heads=5 do not divide model.vision.width=32"),
        ("train.siglip={tokenizer: a, caption_weight: 0.0}", "caption_weight"),
        ("train.siglip={heads: 2}", "train.siglip.tokenizer"),
    ],
)
def test_what_it_is_not_trained_with_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_cpu", [*SMALL, *COMMON, *layout(), change])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("text_tokenizer.json", "absent.json"), "train.siglip.tokenizer: .*absent.json: no such"),
        (("text_tokenizer.json", "tokenizer.tiktoken"), "tokenizer.tiktoken: no tokenizer.json"),
        (("vocabulary: 60", "vocabulary: 20"), "has 3. tokens, train.siglip.vocabulary is 20"),
        (("", ""), "no sample of words has one medium"),
    ],
)
def test_what_the_data_lack_is_told_before_anything_starts(data_root, change, message):
    asked = [PAIRS[0].replace(*change) if change[0] else PAIRS[0], *COMMON[1:]]
    if not change[0]:
        asked += ["data.sources={words: 1.0}", "data.vision_token_ratio=null"]
    config = load_config("tiny_cpu", [*SMALL, *asked, *layout(), f"data.root={data_root}"])
    with pytest.raises((ValueError, OSError), match=message) as error:
        check_start(config)
    assert "\n" not in str(error.value)


def test_captions_are_what_counts_behind_a_single_medium(one):
    """Every such text is a caption; skipped samples have none."""
    found = one[1]["float64 owner"]
    assert found["captions"]
    assert all(text for text in found["captions"].values())
    skipped = found["without the first"]
    assert [*skipped] == [*found["captions"]][1:]
    assert np.all([skipped[item] == found["captions"][item] for item in skipped])
