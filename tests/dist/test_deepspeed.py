"""DeepSpeed's ZeRO-1 and ZeRO-2 against our own optimizer with AdamW, on the encoder alone.

The ranks that hold an item's row encode it (`dep.assign: owner`), so that ranks have uneven numbers
of items, including none.
"""

import json
import os
from importlib import metadata

import pytest
import torch

from kimi_pretrain.config import ConfigError, load_config
from kimi_pretrain.memory.plan import plan_memory
from kimi_pretrain.optim import deepspeed_zero
from kimi_pretrain.optim.step_stats import merge_figures
from kimi_pretrain.reliability.status import read_status
from kimi_pretrain.weights.matching import MASTER
from tests.dist.jobs import SMALL, layout, read_metrics, run_jobs, train

pytestmark = [pytest.mark.dist, pytest.mark.timeout(300)]

STEPS, FEW = 8, 4
COMMON = (
    "optim.matrices=adamw", "optim.qk_clip_threshold=null", "train.frozen=[language_model]",
    "dep.assign=owner", f"train.steps={STEPS}", "optim.warmup_steps=2", "train.seed=1",
    "optim.groups={vision_tower: {lr_scale: 0.5, weight_decay: 0.02}}",
    "data.vision_token_ratio=0.1", "model.language.num_layers=2", "model.language.num_experts=4",
    # Several buckets, and tensors larger than one bucket.
    "optim.bucket_elements=5000",
)  # fmt: skip


def jobs(data_root, world: int, **more):
    """Return jobs for our own optimizer and both stages, in `world` processes."""
    common = (*COMMON, *layout(dp=world), f"data.root={data_root}")
    stages = {"own": "null", "zero1": "zero1", "zero2": "zero2"}
    return {
        name: ("zero_trained", (*common, f"optim.deepspeed={stage}", *more.get(name, ())))
        for name, stage in stages.items()
    }


def worst(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(
        float((found[name].double() - one.double()).abs().max() / one.abs().max().clamp(min=1e-30))
        for name, one in wanted.items()
    )


def check_equal(found: dict, own: dict, limit: float = 1e-6) -> None:
    """Check losses to 1e-6 and final weights to `limit`; the state to a hundred times that."""
    for (loss, norm, items), (own_loss, own_norm, own_items) in zip(found["lines"], own["lines"]):
        assert items == own_items
        assert abs(loss - own_loss) <= 1e-6 * own_loss
        assert abs(norm - own_norm) <= 1e-5 * own_norm
    assert found["equal"]
    assert worst(found["weights"], own["weights"]) <= limit
    assert found["state"].keys() == own["state"].keys()
    assert worst(found["state"], own["state"]) <= 100 * limit
    assert merge_figures(found["rms"]).elements == merge_figures(own["rms"]).elements
    wanted = merge_figures(own["rms"]).update_rms
    assert merge_figures(found["rms"]).update_rms == pytest.approx(wanted, rel=1e-5)


@pytest.fixture(scope="module")
def two(data_root, tmp_path_factory):
    """Two ranks; each run repeats its second half from a checkpoint."""
    folder = tmp_path_factory.mktemp("two")
    places = {name: (f"checkpoint.place={folder / name}",) for name in ("own", "zero1", "zero2")}
    first = jobs(data_root, 2, **places)
    again = {f"{name} again": first[name] for name in ("zero1", "zero2")}
    bad = {f"{name} infinity": ("zero_infinity", first[name][1]) for name in first}
    few = ("train.dtype=bfloat16", f"train.steps={FEW}")
    masters = {
        f"{name} masters{again}": (
            "zero_trained", (*first[name][1], *few, f"checkpoint.place={folder / name / 'few'}")
        )
        for name, again in (("own", ""), ("zero1", ""), ("zero1", " again"))
    }  # fmt: skip
    found = run_jobs({**first, **again, **bad, **masters}, folder, 2, timeout=280)
    return folder, found


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_two_ranks_are_our_own_engine(two, stage):
    _, found = two
    check_equal(found[stage], found["own"])
    start = load_config("tiny_cpu", [*SMALL, *COMMON, *layout()])
    assert start.optim.deepspeed is None  # the default
    moved = [line[0] for line in found["own"]["lines"]]
    assert moved[-1] < moved[0]
    assert any(0 in items for _, _, items in found["own"]["lines"])  # some rank has no media


def test_the_plan_of_memory_counts_what_deepspeed_holds(two):
    _, found = two
    config = load_config("tiny_cpu", [*SMALL, *COMMON, *layout(dp=2), "train.dtype=float32"])
    plain, sharded = (
        plan_memory(config.replace(optim=config.optim.replace(deepspeed=stage))).stages[0].optimizer
        for stage in (None, "zero1")
    )
    elements = sum(one.numel() for one in found["own"]["weights"].values())
    gradients = 2 * 4 * elements // 2  # of a shard, as received and as used
    lasting = sharded - plain - gradients
    for stage in ("zero1", "zero2"):  # two groups, each padded
        assert 0 <= found[stage]["bytes"] - lasting <= 200


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_resumed_run_has_the_same_bits(two, stage):
    _, found = two
    straight, resumed = found[stage], found[f"{stage} again"]
    assert resumed["lines"] == straight["lines"][STEPS // 2 :]
    for kind in ("weights", "state"):
        assert all(torch.equal(one, straight[kind][n]) for n, one in resumed[kind].items())
        assert resumed[kind].keys() == straight[kind].keys()


@pytest.mark.parametrize("stage", ["zero1", "zero2"])
def test_a_step_that_is_not_finite_changes_nothing(two, stage):
    _, found = two
    bad, own = found[f"{stage} infinity"], found["own infinity"]
    for one in (bad, own):
        assert (one["applied"], one["same"], one["updates"]) == ((False, True), True, 1)
    assert worst(bad["weights"], own["weights"]) <= 1e-6


def test_masters_of_bfloat16_are_our_own_engine_s(two):
    """Covers the dtype of all real runs: fp32 masters in DeepSpeed's shards, rounded weights."""
    _, found = two
    zero, own, again = (
        found[name] for name in ("zero1 masters", "own masters", "zero1 masters again")
    )
    assert zero["equal"]
    masters = [name for name in own["state"] if name.startswith(MASTER)]
    assert len(masters) == len(own["weights"])
    assert {one.dtype for one in zero["weights"].values()} == {torch.bfloat16}
    assert zero["state"].keys() == own["state"].keys()
    assert worst(zero["state"], own["state"]) <= 1e-5
    assert worst(zero["weights"], own["weights"]) <= 2**-8
    assert again["lines"] == zero["lines"][FEW // 2 :]
    for kind in ("weights", "state"):
        assert all(torch.equal(one, zero[kind][name]) for name, one in again[kind].items())


def test_one_process_goes_on_from_two_under_any_engine(two, data_root, tmp_path):
    """Agree to 1e-6, and with two ranks as closely as AdamW allows for another order of sums."""
    folder, found = two
    place = (f"checkpoint.place={folder / 'zero2'}",)
    resumed = jobs(data_root, 1, own=place, zero1=place)
    done = run_jobs({name: resumed[name] for name in ("own", "zero1")}, tmp_path, 1, timeout=280)
    check_equal(done["zero1"], done["own"])
    assert worst(done["own"]["weights"], found["own"]["weights"]) <= 1e-4
    assert done["own"]["state"].keys() == found["own"]["state"].keys()


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_the_first_moments_are_our_own_engine_s(data_root, tmp_path, world):
    """The first moments equal a step's gradient to rounding, before AdamW divides by anything.

    With three ranks, DeepSpeed's division and our multiplication by 1/3 differ in bits.
    """
    first = ("train.steps=1", f"data.rows_per_step={2 * world}")
    done = run_jobs(
        jobs(data_root, world, own=first, zero1=first, zero2=first), tmp_path, world, timeout=280
    )
    for stage in ("zero1", "zero2"):
        assert worst(done[stage]["state"], done["own"]["state"]) <= 1e-5
        (norm,), (own_norm,) = ([line[1] for line in done[n]["lines"]] for n in (stage, "own"))
        assert abs(norm - own_norm) <= 1e-6 * own_norm


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
def test_any_number_of_ranks_is_our_own_engine(two, data_root, tmp_path, world):
    """Full runs that include steps without media, and resumes from a checkpoint of two ranks.

    Four ranks sum gradients in another order for one owner than for all. Our own optimizer against
    its plain twin, which sums for all, measures the effect of this order.
    """
    folder, _ = two
    place = (f"checkpoint.place={folder / 'zero1'}",)
    few, todo = ("data.vision_token_ratio=0.05", "train.steps=20"), {}
    for end, more in (("resumed", place), ("whole", few)):
        some = jobs(data_root, world, own=more, zero1=more, zero2=more)
        some["twin"] = ("zero_trained", (*some["own"][1], "optim.shard_state=false"))
        todo |= {f"{name} {end}": job for name, job in some.items()}
    done = run_jobs(todo, tmp_path, world, timeout=280)
    for end in ("resumed", "whole"):
        own = done[f"own {end}"]
        order = worst(done[f"twin {end}"]["weights"], own["weights"])
        assert order <= (0 if world == 1 else 3e-4)
        for stage in ("zero1", "zero2"):
            check_equal(done[f"{stage} {end}"], own, max(1e-6, 3 * order))
    assert any(sum(items) == 0 for _, _, items in done["own whole"]["lines"])


@pytest.mark.slow
def test_the_command_saves_and_goes_on(data_root, tmp_path, monkeypatch):
    """Command, run folder and resume are unchanged, and nothing is compiled."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "compiled"))
    common = (
        *COMMON, *layout(dp=2), f"data.root={data_root}", "optim.deepspeed=zero2",
        "train.steps=4", "checkpoint.every=2",
    )  # fmt: skip
    done = train(tmp_path / "whole", *common)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "untested" not in done.stdout + done.stderr
    first = tmp_path / "whole" / "checkpoints" / "step_00000002"
    done = train(tmp_path / "resumed", *common, resume=first)
    assert done.returncode == 0, done.stdout + done.stderr
    whole, resumed = (
        json.loads((tmp_path / name / "state_hashes.json").read_text())
        for name in ("whole", "resumed")
    )
    assert whole == resumed
    assert not (tmp_path / "compiled").exists()
    assert read_status(tmp_path / "resumed").state == "finished"
    assert [line["loss"] for line in read_metrics(tmp_path / "whole")[2:]] == [
        line["loss"] for line in read_metrics(tmp_path / "resumed")
    ]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("optim.matrices=muon", "Newton-Schulz needs them whole; set optim.matrices=adamw"),
        ("train.frozen=[]", "add language_model"),
        ("layout.ep=2", "layout.ep=2: it is the data-parallel way"),
        ("train.dtype=float64", "ZeRO's shards are float32"),
        ("optim.shard_state=false", "ZeRO shards it; leave it true"),
        ("optim.deepspeed=zero3", "zero3"),
    ],
)
def test_what_zero_does_not_train_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        load_config("tiny_cpu", [*SMALL, *COMMON, *layout(dp=2), "optim.deepspeed=zero1", change])


def test_a_host_without_deepspeed_is_told_what_to_install(monkeypatch):
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    for version, told in ((missing, "is not installed"), (lambda name: "0.1", "is version 0.1")):
        monkeypatch.setattr(deepspeed_zero.metadata, "version", version)
        with pytest.raises(ValueError, match=f"optim.deepspeed=zero1: DeepSpeed {told}, want 0.19"):
            deepspeed_zero.check_installed("optim.deepspeed=zero1")
    assert "DS_ACCELERATOR" not in os.environ  # nothing was imported
