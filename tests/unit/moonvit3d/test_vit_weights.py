"""Checkpoints: round trips, transformers' and SigLIP's layouts against the models, refusals."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from moonvit3d import files, layouts, model, weights
from moonvit3d.config import MoonViTConfig
from moonvit3d.layouts import from_siglip, from_transformers, to_transformers
from moonvit3d.model import VisionEncoder, normalise
from moonvit3d.weights import convert, inspect, load, save
from tests.later import Later

transformers = Later("transformers")

TOLERANCE = 2e-5  # as in test_vit_oracle


def randomise(module, seed=0):
    """Fill every tensor with random values at a scale where no activation saturates."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            flat = parameter.ndim == 1
            parameter.copy_(1 + 0.2 * noise if flat else noise / parameter[0].numel() ** 0.5)
    return module


def blank(config, dtype=torch.float32):
    """Return an encoder of NaNs, in which unwritten values stay visible."""
    encoder = VisionEncoder(config).to(dtype)
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.fill_(float("nan"))
    return encoder


def untouched(encoder):
    return all(bool(p.isnan().all()) for p in encoder.parameters())


def same(one, other):
    """Return whether names, types and bits are equal."""
    assert one.keys() == other.keys()
    return all(one[n].dtype == other[n].dtype and torch.equal(one[n], other[n]) for n in one)


@pytest.fixture
def tensors(encoder):
    return {name: p.detach().clone() for name, p in encoder.named_parameters()}


def shard(folder, tensors, place):
    """Write tensors into the files chosen by `place(name)`, with an index."""
    places = {name: place(name) for name in tensors}
    for file in set(places.values()):
        save_file({n: tensors[n].contiguous() for n in tensors if places[n] == file}, folder / file)
    (folder / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


# Round trips ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", layouts.FLOATS, ids=str)
def test_a_round_trip_changes_no_bit(encoder, small, tmp_path, dtype):
    encoder = encoder.to(dtype)
    path = tmp_path / "encoder.safetensors"
    save(encoder, path)
    other = blank(small, dtype)
    assert load(other, path) == [name for name, _ in encoder.named_parameters()]
    assert same(dict(other.named_parameters()), dict(encoder.named_parameters()))
    save(other, tmp_path / "again.safetensors")
    assert path.read_bytes() == (tmp_path / "again.safetensors").read_bytes()
    assert same(load_file(path), encoder.state_dict())  # the library reads our files
    with safe_open(path, "pt") as file:
        assert file.metadata()["format"] == "pt"
        stated = json.loads(file.metadata()["moonvit3d"])
    assert MoonViTConfig(**stated, pos_init_std=small.pos_init_std) == small


def test_mixed_types_round_trip(tmp_path):
    config = MoonViTConfig(width=4, depth=1, heads=1, mlp_width=1, pos_grid=1, out_width=1)
    encoder, other = randomise(VisionEncoder(config)), blank(config)
    for either in (encoder, other):
        either.bfloat16()
        either.mm_projector.double()
    save(encoder, tmp_path / "mixed.safetensors")
    load(other, tmp_path / "mixed.safetensors")
    assert same(dict(other.named_parameters()), dict(encoder.named_parameters()))


@pytest.mark.filterwarnings("ignore:.*script_method:DeprecationWarning")
def test_a_compiled_encoder_has_the_same_names(encoder, small, tmp_path):
    save(torch.compile(encoder), tmp_path / "a.safetensors")
    load(torch.compile(other := blank(small)), tmp_path / "a.safetensors")
    assert same(dict(other.named_parameters()), dict(encoder.named_parameters()))


def test_a_parameter_that_is_not_contiguous_is_saved_in_its_order(encoder, small, tmp_path):
    weight = encoder.mm_projector.proj[2].weight
    with torch.no_grad():
        weight.set_(weight.T.contiguous().T)
    save(encoder, tmp_path / "a.safetensors")
    load(other := blank(small), tmp_path / "a.safetensors")
    assert torch.equal(other.mm_projector.proj[2].weight, weight)


def test_saving_replaces_nothing_unasked_and_nothing_by_half(encoder, tmp_path, monkeypatch):
    path = tmp_path / "encoder.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(FileExistsError, match="encoder.safetensors exists: overwrite=True"):
        save(encoder, path)

    def broken(_):
        raise OSError("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", broken)
        with pytest.raises(OSError, match="disk full"):
            save(encoder, path, overwrite=True)
    assert path.read_bytes() == b"precious"
    assert os.listdir(tmp_path) == ["encoder.safetensors"]
    save(encoder, path, overwrite=True)
    assert same(load_file(path), encoder.state_dict())
    assert path.stat().st_mode & 0o044  # readable like any other file, not private
    with pytest.raises(FileNotFoundError):
        save(encoder, tmp_path / "nowhere" / "encoder.safetensors")


# Precision --------------------------------------------------------------------------------------


def test_widening_is_silent_and_exact(encoder, small, tmp_path):
    save(encoder.bfloat16(), tmp_path / "a.safetensors")
    for dtype in (torch.float32, torch.float64):
        load(other := blank(small, dtype), tmp_path / "a.safetensors")
        wide = {n: p.to(dtype) for n, p in encoder.named_parameters()}
        assert same(dict(other.named_parameters()), wide)


def test_narrowing_needs_leave(encoder, small, tmp_path):
    path = tmp_path / "a.safetensors"
    save(encoder, path)
    other = blank(small, torch.bfloat16)
    message = (
        r"a.safetensors: vision_tower.*\[0, 0, 0, 0\]: .* would become .*bfloat16; rounding=True"
    )
    with pytest.raises(ValueError, match=message):
        load(other, path)
    assert untouched(other)
    load(other, path, rounding=True)
    rounded = {n: p.bfloat16() for n, p in encoder.named_parameters()}
    assert same(dict(other.named_parameters()), rounded)


def test_narrowing_that_changes_nothing_needs_no_leave(encoder, small, tmp_path):
    save(encoder.bfloat16().double(), tmp_path / "a.safetensors")
    load(other := blank(small, torch.bfloat16), tmp_path / "a.safetensors")
    assert same(dict(other.double().named_parameters()), dict(encoder.named_parameters()))


def test_bfloat16_and_float16_hold_different_numbers(encoder, small, tmp_path):
    """Neither type is wider: values that both hold pass, other values do not."""
    encoder = encoder.half().bfloat16()
    with torch.no_grad():
        encoder.mm_projector.proj[2].bias[3] = 2.0**-30
    save(encoder, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match=r"proj.2.bias\[3\]: 9.3.*e-10 would become 0.0"):
        load(blank(small, torch.float16), tmp_path / "a.safetensors")


def test_rounding_does_not_make_infinity(encoder, small, tmp_path):
    with torch.no_grad():
        encoder.mm_projector.proj[2].bias[3] = 70000.0
    save(encoder, tmp_path / "a.safetensors")
    other = blank(small, torch.float16)
    with pytest.raises(ValueError, match=r"proj.2.bias\[3\]: 70000.0 would become inf"):
        load(other, tmp_path / "a.safetensors", rounding=True)
    assert untouched(other)


# Refusals ---------------------------------------------------------------------------------------

BIAS = "vision_tower.encoder.blocks.1.wqkv.bias"
LAST = "mm_projector.proj.2.bias"


def store(name, value):
    return lambda tensors: tensors.update({name: value(tensors)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(BIAS), f"a.safetensors: missing {BIAS} of layout released"),
        (
            store("mm_projector.proj.4.bias", lambda t: t[LAST] + 1),
            "unexpected mm_projector.proj.4",
        ),
        (
            store(BIAS.replace("1", "2"), lambda t: t[BIAS] + 1),
            "blocks.2.wqkv.bias: .* depth 2 has",
        ),
        (store("decoder.weight", lambda t: t[LAST] + 1), "unexpected decoder.weight"),
        (store(BIAS, lambda t: t[BIAS][1:]), rf"{BIAS} has shape \[143\]: want \[144\]"),
        (store(BIAS, lambda t: t[BIAS][None]), r"shape \[1, 144\]: want \[144\]"),
        (store(BIAS, lambda t: t[BIAS][0]), r"shape \[\]: want \[144\]"),
        (store(LAST, lambda t: t[LAST].int()), f"{LAST} is of type I32: want one of float64"),
        (store(LAST, lambda t: t[LAST].to(torch.float8_e4m3fn)), "of type F8_E4M3"),
        (lambda t: t[LAST][5:].fill_(torch.nan), rf"a.safetensors: {LAST}\[5\] is nan: want"),
        (lambda t: t[LAST][7:].fill_(-torch.inf), rf"{LAST}\[7\] is -inf"),
    ],
)
def test_unsound_tensors_are_refused(tensors, small, tmp_path, change, message):
    change(tensors)
    save_file(tensors, tmp_path / "a.safetensors")
    other = blank(small)
    with pytest.raises(ValueError, match=message):
        load(other, tmp_path / "a.safetensors")
    assert untouched(other)


def test_damaged_files_are_refused(encoder, small, tmp_path):
    path, other = tmp_path / "a.safetensors", blank(small)
    save(encoder, path)
    whole = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
    for damaged in (whole[:-1], whole[:1000], whole[:8], b"", whole + b"\0", pointer):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match="a.safetensors: not a whole safetensors file"):
            load(other, path)
    assert untouched(other)


def test_a_checkpoint_of_something_else_is_refused(small, tmp_path):
    save_file({"wte.weight": torch.zeros(2)}, tmp_path / "a.safetensors")
    message = r"a.safetensors: no tensor of a known layout \(released, .*siglip\) among wte.weight"
    with pytest.raises(ValueError, match=message):
        load(blank(small), tmp_path / "a.safetensors")


def test_paths_that_hold_no_checkpoint_are_refused(encoder, small, tmp_path):
    other = blank(small)
    with pytest.raises(FileNotFoundError, match="nowhere: no such file or folder"):
        load(other, tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="holds neither model.safetensors.index.json nor"):
        load(other, tmp_path)
    save(encoder, tmp_path / files.SINGLE)
    (tmp_path / files.INDEX).write_text("{}")
    with pytest.raises(ValueError, match="holds both"):
        load(other, tmp_path)
    for text in ("{}", "[1]", '{"weight_map": 3}', '{"weight_map": {"a": 1}}', "{", ""):
        (tmp_path / files.INDEX).write_text(text)
        with pytest.raises(ValueError, match="index.json: want JSON whose weight_map names"):
            load(other, tmp_path / files.INDEX)
    assert untouched(other)


def test_what_no_shape_shows_is_checked_against_the_file(encoder, small, tmp_path):
    path = tmp_path / "a.safetensors"
    save(encoder, path)
    sizes = vars(small)
    for change in ({"heads": 2}, {"norm_eps": 1e-6}, {"rope_theta": 500.0}):
        (name,) = change
        message = rf"a.safetensors was written with {name} = {sizes[name]}: the config has"
        with pytest.raises(ValueError, match=message):
            load(blank(MoonViTConfig(**{**sizes, **change})), path)
    for text in ("[1]", "{"):
        save_file(load_file(path), path, {"moonvit3d": text})
        with pytest.raises(ValueError, match="metadata moonvit3d = '.*': want JSON sizes"):
            load(blank(small), path)
    save_file(load_file(path), path)  # files of other writers have no such metadata
    load(blank(MoonViTConfig(**{**sizes, "heads": 2})), path)


def test_an_encoder_without_memory_is_refused(encoder, small, tmp_path):
    save(encoder, tmp_path / "a.safetensors")
    with torch.device("meta"):
        other = VisionEncoder(small)
    with pytest.raises(ValueError, match="meta device"):
        load(other, tmp_path / "a.safetensors")


# Parts and shards -------------------------------------------------------------------------------


def test_parts_load_alone(encoder, small, tensors, tmp_path):
    path, other = tmp_path / "a.safetensors", blank(small)
    tower = {n: t for n, t in tensors.items() if n.startswith("vision_tower.")}
    save_file(tower, path)
    with pytest.raises(ValueError, match="no tensor of mm_projector: part='vision_tower' takes"):
        load(other, path)
    assert untouched(other)
    assert set(load(other, path, part="vision_tower")) == set(tower)
    assert untouched(other.mm_projector)
    with pytest.raises(ValueError, match="no tensor of mm_projector"):
        load(other, path, part="mm_projector")
    with pytest.raises(ValueError, match="layout released has no tower"):
        load(other, path, part="tower")
    save_file(tensors, path)
    load(other, path, part="mm_projector")
    assert same(dict(other.named_parameters()), dict(encoder.named_parameters()))


@pytest.mark.parametrize("names", [dict, "transformers"])
def test_of_a_whole_checkpoint_only_the_needed_shards_are_read(small, tensors, tmp_path, names):
    """The language model's shard does not exist; a block's q, k and v are in two shards."""
    stored = dict(tensors)
    if names == "transformers":
        stored = {f"model.{n}": t for n, t in to_transformers(tensors, small).items()}
    order = {name: i for i, name in enumerate(stored)}
    shard(tmp_path, stored, lambda name: f"model-{order[name] % 2}.safetensors")
    index = json.loads((tmp_path / files.INDEX).read_text())
    foreign = ["language_model.model.layers.0.mlp.gate.weight", "lm_head.weight"]
    index["weight_map"] |= dict.fromkeys(foreign, "model-9.safetensors")
    (tmp_path / files.INDEX).write_text(json.dumps(index))
    for path in (tmp_path, tmp_path / files.INDEX):
        load(other := blank(small), path)
        assert same(dict(other.named_parameters()), tensors)
    (tmp_path / "model-1.safetensors").rename(tmp_path / "away")
    other = blank(small)
    with pytest.raises(
        FileNotFoundError, match=r"places .* in .*model-1.safetensors, which is miss"
    ):
        load(other, tmp_path)
    one = next(name for name in stored if order[name] % 2)
    save_file(
        {n: stored[n] for n in stored if order[n] % 2 and n != one},
        tmp_path / "model-1.safetensors",
    )
    with pytest.raises(
        ValueError, match=f"model-1.safetensors: no {one}, which .*index.json places"
    ):
        load(other, tmp_path)
    assert untouched(other)


# transformers' layout ---------------------------------------------------------------------------

TEXT = dict(
    model_type="deepseek_v3", intermediate_size=8, moe_intermediate_size=8, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=2, n_routed_experts=2, num_experts_per_tok=1,
    n_shared_experts=1, q_lora_rank=4, kv_lora_rank=4, qk_rope_head_dim=4, qk_nope_head_dim=4,
    v_head_dim=4, vocab_size=16, n_group=1, topk_group=1, first_k_dense_replace=1,
)  # fmt: skip
SIZES = [  # width, heads, depth: several heads, one head, head_dim 72, two pairs a head
    (48, 4, 2),
    (32, 1, 1),
    (144, 2, 1),
    (32, 8, 1),
]


def kimi(width, heads, depth):
    """Return a small random Kimi_K25 model of transformers and the config of our encoder."""
    sizes = transformers.Kimi_K25Config(
        text_config=dict(TEXT, hidden_size=16), projection_hidden_size=width,
        vision_config=dict(pos_emb_height=6, pos_emb_width=6, num_attention_heads=heads,
                           num_hidden_layers=depth, hidden_size=width, intermediate_size=40),
        tie_word_embeddings=False,
    )  # fmt: skip
    config = MoonViTConfig(
        width=width, depth=depth, heads=heads, mlp_width=40, pos_grid=6, out_width=16
    )
    return randomise(transformers.Kimi_K25ForConditionalGeneration(sizes).eval()), config


def vision(state):
    """Return the vision tensors of a state dict, without a model's prefix."""
    plain = {name.removeprefix("model."): value for name, value in state.items()}
    return {n: v for n, v in plain.items() if n.startswith(("vision_tower.", "mm_projector."))}


def assert_same_outputs(encoder, theirs, make_patches):
    for grid in [(1, 4, 6), (3, 2, 4), (1, 6, 6)]:
        patches = make_patches([grid])
        with torch.no_grad():
            merged = theirs.vision_tower(normalise(patches), torch.tensor([grid])).pooler_output
            want = theirs.mm_projector(merged).flatten(0, 1)
            got = encoder(patches, [grid])
        torch.testing.assert_close(got, want, rtol=0, atol=TOLERANCE)
        assert want.std() > 0.1


@pytest.mark.parametrize(("width", "heads", "depth"), SIZES)
def test_transformers_models_load(width, heads, depth, tmp_path, make_patches):
    theirs, config = kimi(width, heads, depth)
    state = theirs.state_dict()
    released = from_transformers(state, config)
    assert same(to_transformers(released, config), vision(state))
    assert same(from_transformers(to_transformers(released, config), config), released)
    assert list(released) == list(VisionEncoder(config).state_dict())
    theirs.save_pretrained(tmp_path / "saved", max_shard_size="60KB")
    assert (tmp_path / "saved" / files.INDEX).exists()
    save_file(state, tmp_path / "state.safetensors")
    save_file(theirs.model.state_dict(), tmp_path / "inner.safetensors")
    for source in ("saved", "state.safetensors", "inner.safetensors"):
        load(encoder := blank(config), tmp_path / source)
        assert same(dict(encoder.named_parameters()), released)
    assert_same_outputs(encoder, theirs.model, make_patches)


def test_transformers_reads_what_we_save(tmp_path):
    """Our file next to a language model's tensors is a whole checkpoint to its loader."""
    theirs, config = kimi(*SIZES[0])
    encoder = randomise(VisionEncoder(config), seed=9)
    save(encoder, tmp_path / "vision.safetensors")
    text = {
        name.replace("model.language_model.", "language_model.model.", 1)
        if name.startswith("model.")
        else f"language_model.{name}": value
        for name, value in theirs.state_dict().items()
        if "language_model." in name or name.startswith("lm_head.")
    }
    save_file(text, tmp_path / "text.safetensors", {"format": "pt"})
    places = dict.fromkeys(text, "text.safetensors")
    places |= dict.fromkeys(dict(encoder.named_parameters()), "vision.safetensors")
    (tmp_path / files.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))
    theirs.config.save_pretrained(tmp_path)
    read, report = transformers.Kimi_K25ForConditionalGeneration.from_pretrained(
        tmp_path, output_loading_info=True
    )
    assert not any(report.values())
    ours = dict(encoder.named_parameters())
    assert same(vision(read.state_dict()), to_transformers(ours, config))
    load(other := blank(config), tmp_path)
    assert same(dict(other.named_parameters()), ours)


def test_the_order_of_rows_by_hand():
    rows = torch.arange(12)  # two heads of six channels: pairs (0, 1), (2, 3), (4, 5)
    assert layouts.halves(rows, 2).tolist() == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
    assert torch.equal(layouts.neighbours(layouts.halves(rows, 2), 2), rows)


def test_dictionaries_of_another_layout_are_refused(tensors, small):
    with pytest.raises(ValueError, match="tensors of layout released: want transformers or"):
        from_transformers(tensors, small)
    with pytest.raises(ValueError, match="tensors of layout transformers: want released"):
        to_transformers(to_transformers(tensors, small), small)
    with pytest.raises(ValueError, match="layout released: want siglip"):
        from_siglip(tensors, small)
    with pytest.raises(ValueError, match=rf"{BIAS} is of type torch.int64"):
        to_transformers({**tensors, BIAS: tensors[BIAS].long()}, small)


def test_dictionaries_of_one_part(tensors, small):
    tower = {n: t for n, t in tensors.items() if n.startswith("vision_tower.")}
    theirs = to_transformers(tower, small, "vision_tower")
    assert same(from_transformers(theirs, small, "vision_tower"), tower)
    with pytest.raises(ValueError, match="no tensor of mm_projector"):
        to_transformers(tower, small)


# SigLIP -----------------------------------------------------------------------------------------

SIGLIP = dict(
    hidden_size=48, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
    image_size=84, patch_size=14,
)  # fmt: skip


def siglip_config(**changes):
    sizes = dict(width=48, depth=2, heads=4, mlp_width=40, pos_grid=6, out_width=8, norm_eps=1e-6)
    return MoonViTConfig(**{**sizes, **changes})


@pytest.fixture(scope="module")
def siglip():
    """Return a small random SiglipVisionModel; SO400M has the same parts."""
    config = transformers.SiglipVisionConfig(**SIGLIP)
    return randomise(transformers.SiglipVisionModel(config).eval())


def test_siglip_tower_computes_the_same(siglip, tmp_path, monkeypatch):
    """Compare before merging, with its grid and epsilon, no rotation, on an image of its size."""
    save_file(siglip.state_dict(), tmp_path / files.SINGLE)
    config = siglip_config()
    encoder = randomise(VisionEncoder(config), seed=3)
    projector = {n: p.clone() for n, p in encoder.mm_projector.named_parameters()}
    filled = load(encoder, tmp_path)
    assert filled == [f"vision_tower.{n}" for n, _ in encoder.vision_tower.named_parameters()]
    assert same(dict(encoder.mm_projector.named_parameters()), projector)

    def still(grids, head_dim, theta, dtype, device):
        shape = (sum(t * h * w for t, h, w in grids), head_dim // 2)
        return torch.ones(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)

    monkeypatch.setattr(model, "rotary_angles", still)
    pixels = torch.randn(1, 3, 84, 84, generator=torch.Generator().manual_seed(2))
    patches = F.unfold(pixels, 14, stride=14)[0].T.reshape(36, 3, 14, 14)
    with torch.no_grad():
        want = siglip(pixels).last_hidden_state[0]
        merged = encoder.vision_tower(patches, [(1, 6, 6)])
    # Undo the 2x2 merge: tokens [3 * 3, 2 * 2] back to rows of patches.
    got = merged.reshape(3, 3, 2, 2, 48).transpose(1, 2).reshape(36, 48)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert want.std() > 0.1


def test_siglip_in_all_its_files(siglip, tmp_path):
    """Files of SiglipModel with its text tower, and of the vision model with and without prefix."""
    full = transformers.SiglipModel(
        transformers.SiglipConfig(
            vision_config=SIGLIP,
            text_config=dict(
                hidden_size=48, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                vocab_size=8, bos_token_id=1, eos_token_id=2,
            ),
        )
    )  # fmt: skip
    full.vision_model.load_state_dict(siglip.state_dict())
    prefixed = {f"vision_model.{n}": t for n, t in siglip.state_dict().items()}
    wanted = from_siglip(siglip.state_dict(), siglip_config())
    layer = "encoder.layers.1.self_attn"
    q, k, v = (siglip.get_parameter(f"{layer}.{x}_proj.bias") for x in "qkv")
    assert torch.equal(wanted["vision_tower.encoder.blocks.1.wqkv.bias"], torch.cat([q, k, v]))
    full.save_pretrained(tmp_path / "full")
    save_file(prefixed, tmp_path / "prefixed.safetensors")
    for source in ("full", "prefixed.safetensors"):
        load(encoder := blank(siglip_config()), tmp_path / source)
        assert same({n: p for n, p in encoder.named_parameters() if n in wanted}, wanted)
        assert untouched(encoder.mm_projector)
    with pytest.raises(ValueError, match="layout siglip has no mm_projector"):
        load(encoder, tmp_path / "full", part="mm_projector")
    with pytest.raises(ValueError, match="unexpected classifier.weight"):
        from_siglip({**prefixed, "classifier.weight": torch.zeros(2, 48)}, siglip_config())


@pytest.mark.parametrize("side", [2, 5, 6, 9, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_siglip_positions_are_resampled(siglip, side, dtype):
    state = {n: t.to(dtype) for n, t in siglip.state_dict().items()}
    table = state["embeddings.position_embedding.weight"]
    got = from_siglip(state, siglip_config(pos_grid=side))[layouts.POSITIONS]
    if side == 6:
        assert got.dtype == dtype
        assert torch.equal(got, table.reshape(6, 6, 48))
        return
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    image = table.to(wide).T.reshape(1, 48, 6, 6)
    want = F.interpolate(image, (side, side), mode="bicubic", align_corners=False)[0]
    assert got.dtype == wide
    torch.testing.assert_close(got, want.permute(1, 2, 0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("shape", [(35, 48), (36, 40), (36,), (0, 48), (6, 6, 48)])
def test_a_position_table_that_is_no_square_is_refused(siglip, shape):
    state = {**siglip.state_dict(), "embeddings.position_embedding.weight": torch.zeros(shape)}
    message = r"position_embedding.weight has shape .*: want \['side \* side', 48\]"
    with pytest.raises(ValueError, match=message):
        from_siglip(state, siglip_config())


# Command ----------------------------------------------------------------------------------------


def run(*arguments):
    weights.main([str(argument) for argument in arguments])


def test_conversion_there_and_back(small, tmp_path, capsys):
    small = MoonViTConfig(**{**vars(small), "norm_eps": 1e-6, "rope_theta": 500.0})
    encoder = randomise(VisionEncoder(small))
    first, theirs, last = (tmp_path / f"{x}.safetensors" for x in "abc")
    save(encoder, first)
    run("convert", first, theirs, "--to", "transformers")
    assert same(load_file(theirs), to_transformers(encoder.state_dict(), small))
    run("convert", theirs, last)
    assert first.read_bytes() == last.read_bytes()
    out = capsys.readouterr().out
    assert f"{last}: {len(encoder.state_dict())} tensors written" in out
    load(other := blank(small), theirs)
    assert same(dict(other.named_parameters()), dict(encoder.named_parameters()))
    with pytest.raises(SystemExit, match="c.safetensors exists: overwrite=True .--overwrite"):
        run("convert", theirs, last)
    run("convert", theirs, last, "--overwrite", "--part", "mm_projector")
    assert set(load_file(last)) == {n for n in encoder.state_dict() if n.startswith("mm_")}


def test_conversion_of_a_whole_checkpoint_keeps_the_vision(tmp_path):
    theirs, config = kimi(144, 2, 1)
    theirs.save_pretrained(tmp_path)
    convert(tmp_path, tmp_path / "vision.safetensors")  # 144 / 72 = 2 heads, by the rule
    released = from_transformers(theirs.state_dict(), config)
    assert same(load_file(tmp_path / "vision.safetensors"), released)
    # constants that the file does not state are free
    load(blank(config), tmp_path / "vision.safetensors")
    load(
        blank(MoonViTConfig(**{**vars(config), "norm_eps": 1e-6})), tmp_path / "vision.safetensors"
    )


def test_conversion_from_siglip(siglip, tmp_path):
    save_file(siglip.state_dict(), tmp_path / files.SINGLE)
    tower = tmp_path / "tower.safetensors"
    with pytest.raises(SystemExit, match="width 48 is no multiple of 72.*give --heads"):
        run("convert", tmp_path, tower)
    run("convert", tmp_path, tower, "--heads", 4, "--pos-grid", 8)
    assert same(load_file(tower), from_siglip(siglip.state_dict(), siglip_config(pos_grid=8)))
    load(blank(siglip_config(pos_grid=8)), tower, part="vision_tower")
    with safe_open(tower, "pt") as file:
        stated = json.loads(file.metadata()["moonvit3d"])
    assert stated == dict(width=48, depth=2, heads=4, mlp_width=40, pos_grid=8)
    with pytest.raises(SystemExit, match="pos_grid = 9, but layout released keeps its grid of 8"):
        run("convert", tower, tmp_path / "b", "--part", "vision_tower", "--pos-grid", 9)
    with pytest.raises(SystemExit, match="written with heads = 4: the config has 2"):
        run("convert", tower, tmp_path / "b", "--part", "vision_tower", "--heads", 2)
    theirs = tmp_path / "theirs.safetensors"
    run("convert", tmp_path, theirs, "--heads", 4, "--to", "transformers")
    config = siglip_config(pos_grid=64)  # Kimi's grid by default
    wanted = to_transformers(from_siglip(siglip.state_dict(), config), config, "vision_tower")
    assert same(load_file(theirs), wanted)


def test_inspection(encoder, siglip, tmp_path, capsys):
    save(encoder.bfloat16(), tmp_path / "a.safetensors")
    run("inspect", tmp_path / "a.safetensors")
    tower = sum(p.numel() for p in encoder.vision_tower.parameters())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("a.safetensors: layout released")
    assert lines[1].startswith("heads 4, width 48, depth 2, mlp_width 80, pos_grid 6, ")
    assert "projector_width 192, out_width 40, norm_eps 1e-05" in lines[1]
    assert f"vision_tower: 29 tensors, {tower:,} numbers bfloat16" in lines
    assert lines[-1] == "skipped: 0 tensors with no counterpart here"
    save_file({f"vision_model.{n}": t for n, t in siglip.state_dict().items()}, tmp_path / "s")
    text = inspect(tmp_path / "s")
    assert "layout siglip\nheads not stated, width 48, depth 2, mlp_width 40, pos_grid 6\n" in text
    assert text.endswith("float32\nskipped: 11 tensors with no counterpart here")
    state = {n: t for n, t in siglip.state_dict().items() if "position" not in n}
    save_file(state, tmp_path / "s")
    with pytest.raises(ValueError, match="no embeddings.position_embedding.weight to read a size"):
        inspect(tmp_path / "s")
