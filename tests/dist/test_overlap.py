"""Overlapped experts (`layout.overlap_experts`) change no bit."""

import pytest

from kimi_pretrain.config import ConfigError, load_config
from tests.dist.jobs import run_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(400)]

# The balance loss is large enough to matter, and each rank runs one microbatch forward while
# another runs backward.
COMMON = ("train.steps=2", "model.language.aux_loss_coeff=0.1", "data.rows_per_step=8")
PIPELINE = dict(pp=2, vpp=2, dp=2, ep=2)
BFLOAT16 = ("train.dtype=bfloat16",)
HELDOUT = (
    "data.heldout={pictures_heldout: 1}", "data.heldout_tokens=600", "train.validate_every=1",
)  # fmt: skip
FIRST, ALONE = "PP2 x VPP2 x EP2", "EP2, two copies, bfloat16"
# Name -> layout, and other settings. One chunk of the first has no layers, only the loss.
TRAINED = {
    FIRST: (PIPELINE, ("layout.stages=Et|t|tt|L",)),
    ALONE: (dict(dp=4, ep=2), BFLOAT16),
}
# Shared rows, with keys and values of four of six heads at a time, recomputed in the backward pass
# like everything else.
REMADE = (
    "train.recompute=[norms, swiglu, mla_up]", "train.fp8_storage=true",
    "model.language.num_heads=6", "data.rows_per_step=4",
)  # fmt: skip
CASES = TRAINED | {"EP2 over CP2": (PIPELINE | dict(dp=1, cp=2), (*BFLOAT16, *REMADE))}
SLOW = {
    "bfloat16": (PIPELINE, BFLOAT16),
    "float64": (PIPELINE, ("train.dtype=float64",)),
    "frozen language model": (PIPELINE, ("train.frozen=[language_model]",)),
    "fewer microbatches than warm-up": (PIPELINE, ("train.rows_per_microbatch=2",)),
    "EP2 over TP2": (PIPELINE | dict(dp=1, tp=2), ()),
    "CP2 x TP2, EP4": (dict(cp=2, tp=2, ep=4), ()),
    "one expert a rank": (dict(dp=4, ep=4), ("model.language.num_experts=4",)),
    "EP2, two copies": (dict(dp=4, ep=2), ()),
}


def jobs_of(cases, data_root):
    for name, (axes, settings) in cases.items():
        layout = {"pp": 1, "vpp": 1, "dp": 1, "ep": 1, "cp": 1, "tp": 1} | axes
        overrides = [f"layout.{axis}={size}" for axis, size in layout.items()]
        yield name, ("overlap", (f"data.root={data_root}", *COMMON, *overrides, *settings))


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    jobs = dict(jobs_of(CASES, data_root))
    _, pipeline = jobs[FIRST]
    jobs["without the cure"] = "overlap_uncured", pipeline
    # A whole training: encoder, sums to owners in the order of completion, updates, QK-Clip.
    jobs |= trainings(FIRST, pipeline)
    return run_jobs(jobs, tmp_path_factory.mktemp("overlap"), 4, timeout=200.0)


def trainings(layout, settings):
    return {
        f"training, {layout}, {name}": (
            "losses",
            (*settings, "optim.qk_clip_threshold=0.05", f"layout.overlap_experts={name}", *HELDOUT),
        )
        for name in ("false", "true")
    }


@pytest.fixture(scope="module")
def slow(data_root, tmp_path_factory):
    jobs = dict(jobs_of(SLOW, data_root))
    # Without a pipeline, Megatron-Core uses another schedule; `CASES` covers that its steps are
    # equal.
    jobs |= trainings(ALONE, dict(jobs_of(CASES, data_root))[ALONE][1])
    return run_jobs(jobs, tmp_path_factory.mktemp("overlap_slow"), 4, timeout=300.0)


def check(result, trained=True):
    assert result["differs"] == []
    assert result["padding"] > 0
    assert result["masks"] == 0
    assert result["accepted"] == []
    assert result["held"] == 0
    assert result["complete"]
    assert result["orders"] == 1
    assert result["compared"]["leaf"] > 0
    assert result["compared"]["loss"] == 2
    assert (result["compared"]["gradient"] > 30) == trained


@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_as_without(name, found):
    check(found[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", SLOW)
def test_every_bit_is_as_without_in_other_settings(name, slow):
    check(slow[name], trained="frozen" not in name)


def test_without_the_cure_routers_count_padding(found):
    """Control: Megatron-Core's own plan silently gives the routers no padding mask."""
    differs = found["without the cure"]
    assert any(name.endswith("mlp.gate.weight") for name in differs)
    assert any(name.startswith("bias") for name in differs)


@pytest.mark.parametrize("layout", [FIRST, pytest.param(ALONE, marks=pytest.mark.slow)])
def test_a_training_is_the_same(layout, request):
    found = request.getfixturevalue("found" if layout == FIRST else "slow")
    steps = found[f"training, {layout}, true"]
    assert steps == found[f"training, {layout}, false"]
    assert all(step["vision_tokens"] > 0 for step in steps)
    assert steps[0]["kind"] == "heldout"


REFUSED = {
    "no virtual stages": (["layout.vpp=1"], ("layout.pp=2", "layout.vpp=1")),
    "experts in one place": (["layout.ep=1"], ("layout.ep=1",)),
    "no experts": (["model.language.num_dense_layers=4"], ("num_dense_layers=4 of 4",)),
}


@pytest.mark.parametrize(("overrides", "named"), REFUSED.values(), ids=REFUSED.keys())
def test_what_cannot_overlap_is_refused(overrides, named):
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [*overrides, "layout.overlap_experts=true"])
    assert all(part in str(error.value) for part in ("layout.overlap_experts=true", *named))
