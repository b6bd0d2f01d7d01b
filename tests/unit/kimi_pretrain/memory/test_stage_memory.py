"""Tests the memory plan: the schedule's arithmetic, refusals by a limit, and a lower peak."""

import re
from math import prod

import numpy as np
import pytest

from data_pipeline.config import share_of
from data_pipeline.plan.blend import SourceTotals, weights_for_ratio
from kimi_pretrain.config import ConfigError, load_config
from kimi_pretrain.memory.kept import layer_tensors, row_bytes
from kimi_pretrain.memory.limits import check_memory_limit
from kimi_pretrain.memory.plan import (
    GIB,
    media_share,
    microbatches_in_flight,
    plan_memory,
)
from kimi_pretrain.memory.states import divide_config
from kimi_pretrain.memory.switches import EVERYTHING, switches
from kimi_pretrain.reliability.preflight import check_start
from kimi_pretrain.tools.memory_report import lines, report
from kimi_pretrain.weights.shapes import language_shapes
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits, grids
from moonvit3d.layouts import released_shapes
from moonvit3d.memory import activation_bytes, most_patches
from tests.dist.jobs import SMALL


@pytest.mark.parametrize(
    ("layout", "stage", "held"),
    [
        # PP16 x VPP2: 2 x 15 + 16 warm-up forward passes, and one more.
        ((16, 2, False), 0, 47),
        ((16, 2, True), 0, 48),
        ((16, 2, False), 15, 17),
        ((16, 4, False), 0, 79),
        ((16, 1, False), 3, 13),
        ((1, 1, False), 0, 1),
    ],
)
def test_microbatches_in_flight(layout, stage, held):
    pp, vpp, overlapped = layout
    config = load_config("kimi_k25_1t")
    layout = config.layout.model_copy(
        update={"pp": pp, "vpp": vpp, "overlap_experts": overlapped, "stages": None}
    )
    config = config.model_copy(update={"layout": layout})
    assert sum(microbatches_in_flight(config, stage, [1] * vpp)) == held


def test_a_short_step_holds_no_more_than_there_are():
    config = load_config("tiny_cpu", ["data.rows_per_step=8"])  # two microbatches, two chunks
    assert config.num_microbatches() == 2
    assert microbatches_in_flight(config, 0, [1, 1]) == (2, 2)
    assert microbatches_in_flight(config, 1, [1, 1]) == (2, 1)


def test_bytes_of_a_k2_layer_at_real_widths():
    """Compares bytes per token in bf16; the prototype measured 380, 245 and 154 KB."""
    found = {}
    for name, settings in {
        "none": ["train.recompute=[]", "train.fp8_storage=false"],
        "recompute": [f"train.recompute={EVERYTHING}", "train.fp8_storage=false"],
        "fp8": [f"train.recompute={EVERYTHING}", "train.fp8_storage=true"],
    }.items():
        config = load_config("kimi_k25_1t", settings)
        size = sum(tensor.size for tensor in layer_tensors(config, dense=False))
        found[name] = round(size / config.data.seq_len / 1000)
    assert found == {"none": 377, "recompute": 242, "fp8": 151}


def limited(gib: float, *more: str):
    encoder = "dep.memory_limit_gib=1e-4", "dep.exchange_budget_mib=1"
    small = [*SMALL, *encoder, "data.root=/nowhere", f"train.memory_limit_gib={gib}", *more]
    return load_config("tiny_cpu", small)


def test_a_run_over_the_limit_is_refused_before_data_are_opened():
    config = limited(100.0)
    plan = plan_memory(config)
    most = plan.fullest
    check_memory_limit(config)  # fits
    enough = plan.switches[0]
    between = (enough.peak + most.peak) / 2 / GIB
    with pytest.raises(ConfigError) as error:
        check_start(limited(between))
    told = str(error.value)
    for part in (f"rank {most.rank} ", "train.memory_limit_gib=", f"{enough.setting} alone"):
        assert part in told
    check_memory_limit(limited(most.peak / GIB))  # fits exactly
    with pytest.raises(ConfigError):
        check_memory_limit(limited((most.peak - 1) / GIB))
    with pytest.raises(ConfigError, match="no single switch suffices; "):
        check_start(limited(most.lasting / 2 / GIB))


def test_phases_follow_each_other():
    """The fullest phase counts; data kept from one phase for a later one counts in all between."""
    (plain,) = {stage.fullest_phase for stage in plan_memory(limited(100.0)).stages}
    assert plain == "backbone"
    tight = ("dep.exchange_budget_mib=1", "data.vision_token_ratio=0.9")
    for settings, phase in (
        (("dep.max_patches_per_chunk=65536",), "encoder"),
        (("dep.exchange_budget_mib=512",), "exchange"),
    ):
        found = plan_memory(load_config("tiny_cpu", [*SMALL, *tight, *settings])).fullest
        assert found.fullest_phase == phase
        assert found.peak == found.lasting + found.phases[phase]
        assert found.phases[phase] == max(found.phases.values()) < sum(found.phases.values())
    first, last = plan_memory(load_config("tiny_cpu", [*SMALL, *tight])).stages
    arrived = 0.9 * 4 * 128 * 64 * 4 / 2  # tokens of a step, at each of two replicas, float32
    assert first.exchange - last.exchange == pytest.approx(arrived, rel=0.01)
    kept = ("dep.keep_activations=auto", "dep.memory_limit_gib=0.5")
    before = plan_memory(limited(100.0)).fullest
    after = plan_memory(limited(100.0, *kept)).fullest
    assert after.phases["backbone"] == before.phases["backbone"] + GIB // 2
    assert after.encoder == GIB // 2  # the kept ones and the largest chunk together


def test_in_bubbles_an_item_is_encoded_beside_the_microbatches_that_wait():
    plans = {}
    alone = ("dep.bubbles=all", "layout.pp=1", "layout.vpp=1")
    for settings in ((), ("dep.bubbles=all",), alone):
        config = load_config("tiny_cpu", [*SMALL, "dep.max_patches_per_chunk=65536", *settings])
        plans[settings] = plan_memory(config).stages[0], config
    (plain, _), (bubbles, config), (alone, _) = plans.values()
    # One block runs at a time, next to the inputs of all blocks of a rank's media; each token is of
    # at most four frames.
    vision = config.model.vision
    grid = (1, 2, most_patches(config.data.limits) // 2)
    (item,) = activation_bytes([grid], vision.replace(depth=1), 4)
    patches = -(-int(0.2 * config.tokens_per_step()) // 4) * 4 * 4
    item += vision.depth * vision.width * 4 * patches
    assert 0 < item < plain.encoder
    assert bubbles.phases["backbone"] == plain.phases["backbone"] + item
    assert bubbles.encoder == item
    assert alone.waiting == 0


def test_a_frozen_part_keeps_what_gradients_pass_through():
    """A frozen tower passes its patches to a trained projector.

    Products of a frozen language model keep no input.
    """
    plans = {}
    for name in ("", "vision_tower", "language_model", "vision_tower, projector"):
        changes = ["data.vision_token_ratio=0.5", f"train.frozen=[{name}]"]
        plans[name] = plan_memory(load_config("projector_kimi_k25", changes)).stages[0]
    whole, tower = plans[""], plans["vision_tower"]
    patches = 1024 * 4096 // 2 // 256 * 4  # of a step's patches, on each rank
    assert tower.waiting == patches * 1152 * 2
    assert tower.encoder < whole.encoder / 10
    assert plans["vision_tower, projector"].waiting == whole.waiting == 0
    kinds = set(whole.activations) - set(plans["language_model"].activations)
    assert kinds == {"dispatched tokens"}


def test_the_larger_of_media_and_texts_counts():
    asked = "train.siglip={tokenizer: a, texts_per_chunk: %d}"
    one, few, many = (
        plan_memory(load_config("captions_moonlight", more)).stages[0].encoder
        for more in ([], [asked % 64], [asked % 2048])
    )
    assert 1 < few / one < 1.05  # the share of the pooling head
    assert many > 2 * one


def test_every_switch_of_the_plan_is_one_that_can_be_set():
    """With the setting applied, the plan has the peak that the switch promised."""
    config = limited(100.0)
    plan = plan_memory(config)
    assert len(plan.switches) >= 2
    for switch in plan.switches:
        changed = limited(100.0, switch.setting)
        assert plan_memory(changed, divide_config(config)).fullest.peak == switch.peak


LONG = {"kimi_k25_long_32k": 32_768, "kimi_k25_long_256k": 262_144}


@pytest.mark.parametrize(("preset", "length"), LONG.items())
def test_the_long_presets_take_the_batch_of_before(preset, length):
    config, before = load_config(preset), load_config("kimi_k25_1t")
    assert config.data.seq_len == length
    assert config.tokens_per_step() == before.tokens_per_step() == 1 << 26
    assert config.data.seq_len // config.layout.cp == before.data.seq_len
    yarn = config.model.language.yarn
    assert yarn.factor * yarn.original_max_position == 262_144
    changed = {"yarn": None}
    assert config.model.language.model_copy(update=changed) == before.model.language


@pytest.mark.parametrize("preset", LONG)
@pytest.mark.parametrize(("media", "share"), [(0.3, 0.21), (0.5, 0.25), (1.0, 0.28)])
def test_the_long_presets_draw_a_quarter_of_long_documents(preset, media, share):
    data = load_config(preset).data
    totals = [
        SourceTotals(name, samples, tokens, int(tokens * media) * (name == "multimodal"))
        for name, samples, tokens in (("long", 10, 400_000), ("multimodal", 500, 500_000),
                                      ("text", 1000, 1_000_000))
    ]  # fmt: skip
    shares = [share_of(data.sources[total.name]) for total in totals]
    weights = weights_for_ratio(totals, shares, data.vision_token_ratio)
    tokens = [w * t.tokens / t.samples for w, t in zip(weights, totals, strict=True)]
    assert tokens[0] / sum(tokens) == pytest.approx(share, abs=0.005)
    assert media * tokens[1] / sum(tokens) == pytest.approx(0.1, abs=0.001)


SIZES = [
    PatchLimits(), PatchLimits(image=256, frame=64, side=32),
    PatchLimits(image=1000, frame=100, side=20), PatchLimits(image=1, frame=1, side=4),
]  # fmt: skip


@pytest.mark.parametrize("limits", SIZES)
def test_no_medium_is_padded_to_more_than_the_bound(limits):
    """Covers sizes of all shapes and the patch counts closest to a limit."""
    rng = np.random.default_rng(2)
    whole = np.stack(np.meshgrid(np.arange(1, 1500), np.arange(1, 150)), -1).reshape(-1, 2)
    sizes = np.concatenate(
        [
            np.exp(rng.uniform(0, np.log(40000), (4000, 2))).astype(np.int64),
            14 * whole + 13,
            14 * whole + 1,
        ]
    )
    found = max(
        grids([kind] * len(sizes), [frames] * len(sizes), sizes[:, 0], sizes[:, 1], limits)
        .prod(1).max()
        for kind, frames in ((KIND_IMAGE, 1), (KIND_VIDEO, 4))
    )  # fmt: skip
    assert found <= most_patches(limits)
    if limits == PatchLimits():
        assert (found, most_patches(limits)) == (21_408, 21_984)


def test_a_smaller_chunk_still_holds_any_medium():
    levels = next(switches(load_config("kimi_k25_1t")))
    assert [change.value for change in levels] == [32_768, 22_016]
    assert levels[-1].value >= most_patches(load_config("kimi_k25_1t").data.limits)


def test_a_shared_row_leaves_nothing_that_grows_with_it():
    """Holds with `mla_up`; without it the gathered latents take 2,304 bytes a token of the row."""
    found = {}
    for settings in ([], ["train.recompute=[norms, swiglu]"]):
        sizes = []
        for preset in ("kimi_k25_1t", *LONG):
            config = load_config(preset, settings)
            sizes.append(sum(tensor.size for tensor in layer_tensors(config, dense=False)))
        found[not settings] = sizes
    assert found[True][0] == found[True][1] == found[True][2]
    assert found[False][2] - found[False][1] == (262_144 - 32_768) * 2_304


def elements_of(config, stage):
    """Count a rank's elements by name: its own parameters and whole tensors next to slices.

    For the encoder, count all elements and the trained ones.
    """
    layout, frozen = config.layout, config.train.frozen
    cut = ("embed_tokens", "lm_head", "q_proj", "q_b_proj", "kv_b_proj", "o_proj", "gate_proj",
           "up_proj", "down_proj")  # fmt: skip
    own = whole = 0
    for name, shape in language_shapes(config.model.language).items():
        layer = re.search(r"\.layers\.(\d+)\.", name)
        if layer is not None:
            chunk = next(n for n, (some, _) in enumerate(config.chunks()) if int(layer[1]) in some)
            home = chunk % layout.pp
        else:
            home = 0 if "embed_tokens" in name else layout.pp - 1
        if home != stage or name.endswith("e_score_correction_bias"):
            continue
        if ".mlp.experts." in name:
            own += prod(shape) // layout.ep
        elif name.split(".")[-2] in cut:
            own += prod(shape) // layout.tp
            whole += prod(shape) if layout.tp > 1 else 0
        else:
            own += prod(shape)
    encoder = released_shapes(config.model.vision)
    parts = {"vision_tower": "vision_tower.", "projector": "mm_projector."}
    still = tuple(prefix for part, prefix in parts.items() if part in frozen)
    trained = {name: shape for name, shape in encoder.items() if not name.startswith(still)}
    return own + whole, *(sum(map(prod, some.values())) for some in (encoder, trained))


@pytest.mark.parametrize(
    "settings",
    [
        ("train.dtype=bfloat16",),
        ("train.dtype=float64", "layout.vpp=1"),
        ("train.dtype=float32", "layout.tp=2", "data.rows_per_step=8"),
        ("train.dtype=bfloat16", "train.frozen=[language_model]"),
        ("train.dtype=bfloat16", "train.frozen=[vision_tower]", "layout.vpp=1"),
    ],
    ids=str,
)
def test_weights_and_gradients_are_counted_name_by_name(settings):
    config = load_config("tiny_cpu", [*SMALL, *settings])
    item = {"bfloat16": 2, "float32": 4, "float64": 8}[config.train.dtype]
    plan = plan_memory(config)
    per_stage = config.layout.world_size() // config.layout.pp
    for number, stage in enumerate(plan.stages):
        own, encoder, trained = elements_of(config, number)
        assert stage.rank in range(number * per_stage, (number + 1) * per_stage)
        assert stage.weights == item * (own + encoder)
        language = 0 if "language_model" in config.train.frozen else own
        assert stage.gradients == max(4, item) * (language + trained)
        assert stage.lasting == stage.weights + stage.gradients + stage.optimizer
        assert stage.phases == {
            "backbone": stage.embeddings + stage.activations.total() + stage.passing
            + stage.waiting,
            "encoder": stage.embeddings + stage.encoder,
            "exchange": stage.embeddings + stage.exchange + stage.waiting,
            "update": stage.update,
        }  # fmt: skip


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_what_the_loss_makes_and_drops(dtype):
    """Counts the logits in the model's type and their gradient in both types."""
    config = load_config(
        "tiny_cpu", [*SMALL, f"train.dtype={dtype}", "model.language.vocab_size=65536"]
    )
    item, tokens = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype], 128
    assert plan_memory(config).stages[-1].passing == tokens * 65536 * (2 * item + max(4, item))
    assert plan_memory(config).stages[0].passing < tokens * 65536


def test_media_of_a_step_are_spread_over_the_ranks():
    """Encoded embeddings wait on every rank, received ones with gradients on first stages."""
    config = load_config("tiny_cpu", [*SMALL, "data.vision_token_ratio=0.3"])
    tokens = int(0.3 * 4 * 128)
    assert (config.layout.world_size(), config.layout.pp) == (4, 2)
    encoded, received = (-(-tokens // ranks) * 64 * 4 for ranks in (4, 2))
    first, last = plan_memory(config).stages
    buffers = 2 * config.dep.exchange_budget_mib * 2**20
    assert (first.embeddings, last.embeddings) == (2 * received + encoded, encoded)
    assert (first.exchange, last.exchange) == (encoded + received + buffers, encoded + buffers)
    assert first.waiting == last.waiting == 0


@pytest.mark.parametrize(
    ("dtype", "attention", "wide"),
    [
        ("bfloat16", "portable", 2 + 4), ("float32", "portable", 4 + 4), ("float32", "flex", 4),
        ("bfloat16", "flex", 2), ("float64", "portable", 8 + 8),
    ],
)  # fmt: skip
def test_what_exists_of_a_shared_row_for_a_moment(dtype, attention, wide):
    """Counts four heads at a time; `wide` is the bytes of a gradient and of its sum, if any."""
    config = load_config(
        "tiny_cpu",
        [*SMALL, "layout.cp=2", "layout.dp=1", "model.language.num_heads=6", f"train.dtype={dtype}",
         f"train.attention={attention}"],
    )  # fmt: skip
    nope, rope, value, latent, tokens = 12, 4, 12, 16, 128
    item = {"bfloat16": 2, "float32": 4, "float64": 8}[dtype]
    projected = 4 * (nope + value) * item
    keys_and_values = 4 * (nope + rope + value) * item
    gradients = 4 * (nope + rope + value) * wide
    latents = (latent + rope) * max(4, item)
    if dtype == "bfloat16":  # of a few heads: a copy, its gradient, and the gradient in the sum
        latents += (latent + rope) * (2 + 2 + 4)
    assert row_bytes(config) == tokens * (projected + keys_and_values + gradients + latents)
    layout = config.layout.replace(cp=1, ep=1)
    assert row_bytes(config.replace(layout=layout)) == 0


@pytest.mark.slow
@pytest.mark.parametrize("preset", LONG)
def test_the_long_presets_fit_an_h200(preset):
    plan = plan_memory(load_config(preset))
    assert plan.fullest.peak < 120e9


def test_the_largest_share_of_media_counts_and_a_missing_one_is_told():
    stage = "data.schedule=[{after_tokens: 9, sources: {prose: 1}, vision_token_ratio: 0.5}]"
    few, later, unknown = (
        limited(100.0, "data.vision_token_ratio=" + ratio, schedule)
        for ratio, schedule in (
            ("0.25", "data.schedule=[]"),
            ("0.25", stage),
            ("null", "data.schedule=[]"),
        )
    )
    assert [media_share(config) for config in (few, later, unknown)] == [0.25, 0.5, None]
    embeddings = [plan_memory(config).stages[0].embeddings for config in (few, later, unknown)]
    assert embeddings == [embeddings[0], 2 * embeddings[0], 0]
    told = "\n".join(lines(report(unknown)))
    assert "not counted: vision embeddings, of which data.vision_token_ratio=null" in told
    assert "not counted: vision" not in "\n".join(lines(report(few)))
