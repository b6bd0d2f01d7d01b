"""Tests small copies of configurations, which keep every mechanism, and their two jobs."""

import pytest
import yaml

from kimi_pretrain.config import load_config
from kimi_pretrain.parallel.layout import LayoutConfig
from kimi_pretrain.verify import configs
from kimi_pretrain.verify.shrink import shrink

PRESETS = ("kimi_k25_1t", "moonlight_16b_a3b", "tiny_cpu")
CASES = {
    "vpp": ["layout.pp=8", "layout.vpp=4", "layout.dp=1", "layout.ep=1", "layout.stages=null",
            "layout.overlap_experts=false", "model.language.num_layers=64"],
    "cp": ["layout.pp=1", "layout.vpp=1", "layout.dp=4", "layout.cp=4", "layout.ep=16",
           "layout.stages=null"],
    "tp": ["layout.pp=1", "layout.vpp=1", "layout.dp=1", "layout.tp=8", "layout.ep=8",
           "layout.stages=null"],
    "split": ["dep.max_split=16", "dep.scope=4", "dep.keep_activations=auto",
              "dep.memory_limit_gib=20.0", "dep.exchange_dtype=bfloat16"],
    "wide rows": ["train.rows_per_microbatch=8", "train.dtype=float64", "train.fp8_storage=false"],
    "no dense layer": ["model.language.num_dense_layers=0"],
}  # fmt: skip


def axes(layout: LayoutConfig) -> tuple[int, ...]:
    return (layout.pp, layout.vpp, layout.dp, layout.ep, layout.cp, layout.tp)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("preset", PRESETS)
def test_presets_fit_the_processes(preset, processes):
    config = shrink(load_config(preset), processes).config
    assert config.layout.world_size() <= processes
    assert config.num_microbatches() >= 2
    language = config.model.language
    assert 0 < language.num_dense_layers < language.num_layers <= 4
    assert language.hidden_size <= 128
    assert config.model.vision.width <= 128
    assert config.train.dtype == "float32"


def test_axes_that_were_there_stay():
    kimi = load_config("kimi_k25_1t")
    assert axes(shrink(kimi).config.layout) == (2, 2, 2, 2, 1, 1)
    assert axes(shrink(kimi, 2).config.layout) == (2, 2, 1, 1, 1, 1)
    assert axes(shrink(kimi, 1).config.layout) == (1, 1, 1, 1, 1, 1)
    assert axes(shrink(load_config("moonlight_16b_a3b")).config.layout) == (2, 1, 2, 2, 1, 1)
    assert axes(shrink(load_config("kimi_k25_1t", CASES["vpp"])).config.layout)[:2] == (2, 2)
    assert axes(shrink(load_config("kimi_k25_1t", CASES["cp"])).config.layout) == (1, 1, 2, 2, 2, 1)
    assert axes(shrink(load_config("kimi_k25_1t", CASES["tp"])).config.layout) == (1, 1, 1, 2, 1, 2)


def test_a_layout_that_fits_stays():
    layout = ["layout.pp=3", "layout.vpp=1", "layout.dp=1", "layout.ep=1"]
    config = load_config("tiny_cpu", [*layout, "layout.stages=Et|tt|tL"])
    assert axes(shrink(config, 3).config.layout) == (3, 1, 1, 1, 1, 1)
    assert axes(shrink(config, 2).config.layout) == (2, 1, 1, 1, 1, 1)


@pytest.mark.parametrize("overrides", [[], *CASES.values()], ids=["as it is", *CASES])
@pytest.mark.parametrize("processes", [2, 4, 8])
def test_what_is_told_is_what_was_changed(overrides, processes):
    """All changes, as overrides of the original, give the small configuration."""
    config = load_config("kimi_k25_1t", overrides)
    found = shrink(config, processes, tokenizer_size=1000)
    told = [f"{change.key}={yaml.safe_dump(change.new)}" for change in found.changes]
    told = [line.removesuffix("\n").removesuffix("\n...") for line in told]
    assert load_config("kimi_k25_1t", [*overrides, *told]) == found.config
    before, after = config.model_dump(mode="json"), found.config.model_dump(mode="json")
    for change in found.changes:
        old, new = before, after
        for key in change.key.split("."):
            old, new = old[key], new[key]
        assert (old, new) == (change.old, change.new)
        assert old != new


def test_special_cases_shrink_soundly():
    split = shrink(load_config("kimi_k25_1t", CASES["split"])).config
    assert (split.dep.max_split, split.dep.scope) == (4, 2)
    assert (split.dep.keep_activations, split.dep.exchange_dtype) == ("auto", "model")
    rows = shrink(load_config("kimi_k25_1t", CASES["wide rows"])).config
    assert rows.train.rows_per_microbatch == 2
    assert rows.train.dtype == "float64"
    assert (
        shrink(
            load_config("kimi_k25_1t", CASES["no dense layer"])
        ).config.model.language.num_dense_layers
        == 0
    )


def test_the_vocabulary_holds_the_tokenizer():
    kimi = load_config("kimi_k25_1t")
    assert shrink(kimi).config.model.language.vocab_size == 163_840
    assert shrink(kimi, tokenizer_size=1_000).config.model.language.vocab_size == 1_024
    assert shrink(kimi, tokenizer_size=163_840).config.model.language.vocab_size == 163_840


@pytest.mark.parametrize("preset", PRESETS)
def test_any_picture_fits_a_chunk(preset):
    """Covers sizes of images and video frames up to the limits and well beyond."""
    import numpy as np

    from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, grids

    config = shrink(load_config(preset)).config
    sides = np.unique(np.geomspace(1, 20_000, 120).astype(np.int64))
    height, width = (a.ravel() for a in np.meshgrid(sides, sides))
    for kind, frames in ((KIND_IMAGE, 1), (KIND_VIDEO, 4)):
        kinds, count = np.full(len(height), kind), np.full(len(height), frames)
        sizes = grids(kinds, count, height, width, config.data.limits).prod(axis=1)
        assert sizes.max() <= config.dep.max_patches_per_chunk
        assert sizes.max() / 4 / frames < config.data.seq_len / 2


def test_small_configurations_stay_what_they_are():
    tiny = shrink(load_config("tiny_cpu"))
    assert {change.key for change in tiny.changes} <= {
        "data.limits.image", "data.limits.frame", "data.limits.side", "data.cache",
        "dep.max_patches_per_chunk", "dep.exchange_budget_mib", "train.rows_per_microbatch",
        "data.vision_token_ratio", "data.schedule",
    }  # fmt: skip
    again = shrink(tiny.config)
    assert again.config == tiny.config
    assert again.changes == ()


def test_the_reference_is_one_process_without_dep():
    config = load_config("tiny_cpu", ["dep.max_split=2", "data.workers=2", "dep.scope=replica"])
    with_dep, without = configs.decoupled(config), configs.reference(config)
    assert with_dep.layout == config.layout
    assert with_dep.dep == config.dep
    assert without.layout == LayoutConfig()
    assert without.dep.placement == "colocated"
    assert without.dep.max_split == 1
    for name in ("model", "optim", "data", "train"):  # the same step of the same model
        assert getattr(with_dep, name) == getattr(without, name)
    assert with_dep.model == config.model
    assert with_dep.data.rows_per_step == config.data.rows_per_step
    colocated = load_config("tiny_cpu", ["dep.placement=colocated", "dep.bubbles=none"])
    assert configs.decoupled(colocated).dep.placement == "decoupled"
