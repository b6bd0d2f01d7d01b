"""The same rows, losses and gradients in every layout: guards the host backend (I2, I4, I5)."""

import pytest
import torch

from tests.dist.jobs import layout, run_job

pytestmark = [pytest.mark.dist, pytest.mark.timeout(240)]

# A threshold this low makes QK-Clip act in every step, so that it too is compared.
CLIP = "optim.qk_clip_threshold=0.05"
LAYOUTS = [
    ("PP2", dict(pp=2)),
    ("PP2 with VPP2", dict(pp=2, vpp=2)),
    ("EP2", dict(dp=2, ep=2)),
    ("PP2 x EP2", dict(pp=2, dp=2, ep=2)),
    ("PP2 with VPP2 x EP2", dict(pp=2, vpp=2, dp=2, ep=2)),
    ("DP2, optimizer sharded", dict(dp=2)),
    ("DP4 with EP2, experts in two copies", dict(dp=4, ep=2)),
]


def steps_of(out, data_root, axes, *overrides) -> list[dict]:
    processes = axes.get("pp", 1) * axes.get("dp", 1)
    common = (f"data.root={data_root}", "train.steps=5", CLIP)
    return run_job("losses", out, processes, *common, *layout(**axes), *overrides)


@pytest.fixture(scope="module")
def one_process(data_root, tmp_path_factory):
    return steps_of(tmp_path_factory.mktemp("one"), data_root, {})


def assert_same(steps, expected, rel=1e-5):
    for step, wanted in zip(steps, expected, strict=True):
        for count in ("vision_tokens", "loss_tokens", "items"):
            assert step[count] == wanted[count]
        for number in ("loss", "grad_norm", "max_logit"):
            assert step[number] == pytest.approx(wanted[number], rel=rel), number


@pytest.mark.parametrize(("name", "axes"), LAYOUTS, ids=[name for name, _ in LAYOUTS])
def test_losses_equal_one_process(name, axes, one_process, data_root, tmp_path):
    steps = steps_of(tmp_path, data_root, axes)
    assert_same(steps, one_process)
    assert all(step["vision_tokens"] > 0 for step in steps)
    assert [s["clipped_heads"] for s in steps] == [s["clipped_heads"] for s in one_process]
    assert sum(step["clipped_heads"] for step in steps) > 0


def test_the_weights_move(one_process, data_root, tmp_path):
    """The control of the test above: without updates the later losses are other ones."""
    frozen = steps_of(tmp_path, data_root, {}, "optim.lr=1e-12", "optim.min_lr=0")
    assert frozen[0]["loss"] == one_process[0]["loss"]
    for step, moved in zip(frozen[2:], one_process[2:], strict=True):
        assert abs(step["loss"] - moved["loss"]) > 1e-3


# Steps without media, and steps with fewer items than ranks (so media in some replicas only).
SPARSE = {
    "no media at all": ("data.sources={words: 1.0}", "data.vision_token_ratio=null"),
    "an item now and then": ("data.vision_token_ratio=0.01",),
}


@pytest.mark.parametrize("overrides", SPARSE.values(), ids=SPARSE.keys())
def test_steps_with_little_or_no_media(overrides, data_root, tmp_path):
    one = steps_of(tmp_path / "one", data_root, {}, *overrides)
    four = steps_of(tmp_path / "four", data_root, dict(pp=2, vpp=2, dp=2, ep=2), *overrides)
    assert min(step["items"] for step in one) < 4
    assert_same(four, one)


def test_rows_of_a_microbatch_do_not_meet(data_root, tmp_path):
    """One row or two in a microbatch: the same numbers, but for the routers' balance loss."""
    off = "model.language.aux_loss_coeff=0.0"
    one = steps_of(tmp_path / "one", data_root, {}, off)
    two = steps_of(tmp_path / "two", data_root, {}, off, "train.rows_per_microbatch=2")
    assert_same(two, one)


def test_bf16_follows_fp32(one_process, data_root, tmp_path):
    axes = dict(pp=2, vpp=2, dp=2, ep=2)
    steps = steps_of(tmp_path, data_root, axes, "train.dtype=bfloat16")
    for step, wanted in zip(steps, one_process, strict=True):
        assert step["loss"] == pytest.approx(wanted["loss"], rel=1e-2)
        assert step["grad_norm"] == pytest.approx(wanted["grad_norm"], rel=5e-2)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("float64", 1e-10)])
def test_dep_gradients_equal_colocated_encoder(dtype, tolerance, data_root, tmp_path):
    """DEP in PP2 x EP2 against the encoder in the graph in one process, every parameter."""
    common = (f"data.root={data_root}", f"train.dtype={dtype}", "train.steps=1")
    expected = run_job("colocated_gradients", tmp_path / "one", 1, *common, *layout())
    axes = layout(pp=2, dp=2, ep=2)
    found = run_job("dep_gradients", tmp_path / "four", 4, *common, *axes)
    assert sorted(found) == sorted(expected)
    for name, gradient in expected.items():
        scale = gradient.double().norm()
        difference = (found[name].double() - gradient.double()).norm()
        assert difference <= tolerance * scale, (name, float(difference / scale))
        assert torch.isfinite(gradient).all()
    silent = [name for name, gradient in expected.items() if not gradient.any()]
    assert all(".mlp.experts." in name for name in silent), silent


def test_a_skipped_sample_loses_its_whole_loss_and_no_other(data_root, tmp_path):
    common = (f"data.root={data_root}", "train.rows_per_microbatch=2", *layout())
    found = run_job("skipped_mask", tmp_path, 1, *common)
    assert found["equal"]
    assert found["lost"] > 50


def test_copies_that_differ_at_the_start_are_named(data_root, tmp_path):
    told = run_job("planted_replica", tmp_path, 2, f"data.root={data_root}", *layout(pp=2))
    assert told.startswith("vision_tower.patch_embed.")


def test_a_step_that_is_not_finite_changes_nothing(data_root, tmp_path):
    axes = layout(pp=2, dp=2, ep=2)
    changed = run_job(
        "planted_infinity", tmp_path, 4, f"data.root={data_root}", "train.steps=1", *axes
    )
    assert changed == {"finite step": True, "infinite step": False, "applied": False}
