"""Tests the initial weights of an encoder: each kind of source, each part, and each refusal."""

import json
import pickle
import re

import pytest
import torch
from safetensors.torch import save_file

from data_pipeline.store.open import open_store
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.config import ConfigError
from kimi_pretrain.weights import hf_import
from kimi_pretrain.weights.initial_weights import open_initial_weights
from moonvit3d.layouts import released_shapes, to_transformers
from moonvit3d.model import VisionEncoder
from moonvit3d.weights import save
from tests.unit.kimi_pretrain.weights.weight_folders import (
    language_alone,
    random_weights,
    small_config,
    write_folder,
)

CONFIG = small_config()
WEIGHTS = random_weights(CONFIG)
TOWER = {name: tensor for name, tensor in WEIGHTS.items() if name.startswith("vision_tower.")}
PROJECTOR = {name: tensor for name, tensor in WEIGHTS.items() if name.startswith("mm_projector.")}
# Language model of another width: only the projector's last layer has other shapes.
WIDER = ("model.language.hidden_size=96", "model.vision.out_width=96")


class Alone:
    """Mesh of one process."""

    rank, world_size, device = 0, 1, torch.device("cpu")

    def all_gather_object(self, value):
        return [value]

    def broadcast_from_rank0(self, make):
        return make()

    def index_in(self, group):
        return 0, 1

    def broadcast_copies(self, group, tensors):
        pass


def opened(*overrides):
    start = open_initial_weights(small_config(*overrides))
    assert start is not None
    return start


def filled(*overrides):
    """Return the initial tensors of a run; tensors without a source are zero."""
    config = small_config(*overrides)
    shapes = released_shapes(config.model.vision)
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    start = pickle.loads(pickle.dumps(open_initial_weights(config)))  # as ranks other than 0 get it
    assert start is not None
    start.fill(Alone(), tensors, {})  # type: ignore[arg-type]
    return tensors


def source(kind, folder):
    """Write the same encoder in one of the supported formats; return its URI."""
    if kind == "hugging face":
        return write_folder(folder / "hf", WEIGHTS, 3)
    if kind == "index":
        return write_folder(folder / "hf", WEIGHTS, 3) / "model.safetensors.index.json"
    if kind == "language files are elsewhere":
        hf = write_folder(folder / "hf", WEIGHTS, len(WEIGHTS))
        text = (hf / "model.safetensors.index.json").read_text()
        for file in re.findall(r'"language_model[^"]+": "([^"]+)"', text):
            (hf / file).unlink()
        return hf
    if kind in ("checkpoint", "run"):
        hf = write_folder(folder / "hf", WEIGHTS)
        place = folder / "run" / "checkpoints"
        uri = hf_import.write(hf_import.plan(hf, CONFIG), str(place))
        return uri if kind == "checkpoint" else folder / "run"
    if kind == "memory":
        uri = f"memory://{folder.name}"
        for file in write_folder(folder / "hf", WEIGHTS, 3).iterdir():
            open_store(uri).put(file.name, file.read_bytes())
        return uri
    encoder = VisionEncoder(CONFIG.model.vision)
    with torch.no_grad():
        for name, tensor in (TOWER | PROJECTOR).items():
            encoder.get_parameter(name).copy_(tensor)
    save(encoder, folder / "encoder.safetensors")
    return folder / "encoder.safetensors"


KINDS = (
    "hugging face",
    "index",
    "language files are elsewhere",
    "checkpoint",
    "run",
    "memory",
    "file",
)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_source_gives_the_same_numbers(kind, tmp_path):
    found = filled(f"train.vision_weights={source(kind, tmp_path)}")
    assert found.keys() == (TOWER | PROJECTOR).keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, WEIGHTS[name]), name


@pytest.mark.parametrize("kind", ["run", "file", "memory"])
def test_the_tower_goes_to_a_projector_of_another_width(kind, tmp_path):
    uri = f"train.vision_weights={source(kind, tmp_path)}"
    with pytest.raises(ValueError, match=r"train\.vision_weights: .*mm_projector\.proj\.2") as told:
        opened(uri, *WIDER)
    assert "[64, 128]: want [96, 128]" in str(told.value)
    assert "train.vision_part=tower takes the tower alone" in str(told.value)
    assert "\n" not in str(told.value)
    found = filled(uri, "train.vision_part=tower", *WIDER)
    for name, tensor in found.items():
        wanted = TOWER.get(name, torch.zeros_like(tensor))
        assert torch.equal(tensor, wanted), name


def test_one_part_alone(tmp_path):
    for part, wanted in (("tower", TOWER), ("projector", PROJECTOR)):
        folder = write_folder(tmp_path / part, wanted)
        found = filled(f"train.vision_weights={folder}", f"train.vision_part={part}")
        assert {name for name, tensor in found.items() if tensor.any()} == wanted.keys()
        for other in ("both", "null"):
            with pytest.raises(CheckpointError, match=r"train\.vision_weights: .*no tensor of"):
                opened(f"train.vision_weights={folder}", f"train.vision_part={other}")
    with pytest.raises(CheckpointError, match="train.vision_part=tower takes the tower alone"):
        opened(f"train.vision_weights={tmp_path / 'tower'}", "train.vision_part=both")


def siglip(tensors):
    """Return the tower under SigLIP's names, with SigLIP's other tensors, without our code."""
    out = {"logit_scale": torch.zeros(1), "text_model.head.weight": torch.zeros(2, 2)}
    names = {"norm0": "layer_norm1", "norm1": "layer_norm2", "wo": "self_attn.out_proj"}
    names |= {"mlp.fc0": "mlp.fc1", "mlp.fc1": "mlp.fc2"}
    outside = {
        "patch_embed.proj": "embeddings.patch_embedding",
        "encoder.final_layernorm": "post_layernorm",
    }
    for name, tensor in tensors.items():
        name = name.removeprefix("vision_tower.")
        if name == "patch_embed.pos_emb.weight":
            out["vision_model.embeddings.position_embedding.weight"] = tensor.flatten(0, 1)
            continue
        module, kind = name.rsplit(".", 1)
        if module in outside:
            out[f"vision_model.{outside[module]}.{kind}"] = tensor
            continue
        _, _, block, inside = module.split(".", 3)
        layer = f"vision_model.encoder.layers.{block}."
        if inside == "wqkv":
            for one, part in zip("qkv", tensor.chunk(3), strict=True):
                out[f"{layer}self_attn.{one}_proj.{kind}"] = part.clone()
        else:
            out[f"{layer}{names[inside]}.{kind}"] = tensor
    return out


def test_siglip_gives_the_tower_and_start_from_the_rest(tmp_path):
    """The caption stage starts like this; q, k and v are separate there and one tensor here."""
    folder = write_folder(tmp_path / "siglip", siglip(TOWER))
    uri = f"train.vision_weights={folder}"
    language = f"train.start_from={write_folder(tmp_path / 'k2', language_alone(WEIGHTS))}"
    start = opened(uri, language)
    assert start.lines()[1:] == [
        f"the vision_tower from safetensors, {folder}", "the mm_projector from the seed: not there",
    ]  # fmt: skip
    found = filled(uri)
    assert all(torch.equal(found[name], tensor) for name, tensor in TOWER.items())
    assert not any(found[name].any() for name in PROJECTOR)
    other = {name: tensor + 1 for name, tensor in WEIGHTS.items()}
    whole = f"train.start_from={write_folder(tmp_path / 'whole', other)}"
    found = filled(uri, whole)
    assert all(torch.equal(found[name], tensor) for name, tensor in TOWER.items())
    assert all(torch.equal(found[name], other[name]) for name in PROJECTOR)
    with pytest.raises(CheckpointError, match="no projector in layout siglip"):
        opened(uri, "train.vision_part=both")


def test_transformers_rows_are_put_back_in_order(tmp_path):
    """transformers rotates halves of q and k and stores them as separate tensors."""
    stored = to_transformers(TOWER | PROJECTOR, CONFIG.model.vision)
    assert not torch.equal(
        stored["vision_tower.layers.0.attn.q_proj.weight"],
        TOWER["vision_tower.encoder.blocks.0.wqkv.weight"][:32],
    )
    folder = write_folder(tmp_path / "hf", {n: t.contiguous() for n, t in stored.items()})
    for name, tensor in filled(f"train.vision_weights={folder}").items():
        assert torch.equal(tensor, WEIGHTS[name]), name


REFUSED = {
    "another width": (("model.vision.width=64",), "vision_tower.patch_embed.proj.weight has shape"),
    "another depth": (("model.vision.depth=3",), "missing vision_tower.encoder.blocks.2."),
    "other heads": (("model.vision.heads=4",), "heads = 2, model.vision.heads is 4"),
}


@pytest.mark.parametrize("kind", ["run", "file"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_one_line_with_the_key(kind, name, tmp_path):
    overrides, told = REFUSED[name]
    uri = source(kind, tmp_path)
    with pytest.raises(ValueError, match=r"^train\.vision_weights: ") as error:
        opened(f"train.vision_weights={uri}", *overrides)
    assert told in str(error.value)
    assert str(uri) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_folder_s_config_json_tells_what_shapes_do_not(tmp_path):
    """Two heads of 32 and four of 16 have the same tensors but are different encoders."""
    folder = write_folder(tmp_path / "hf", WEIGHTS)
    uri = f"train.vision_weights={folder}"
    config = folder / "config.json"
    config.write_text(json.dumps({"vision_config": {"vt_num_attention_heads": 2}}))
    opened(uri)
    config.write_text(json.dumps({"vision_config": {"vt_num_attention_heads": 4}}))
    told = r"/config\.json: vt_num_attention_heads is 4, model\.vision\.heads is 2$"
    with pytest.raises(CheckpointError, match=told):
        opened(uri)


def test_nothing_there_and_damage(tmp_path):
    for gone, told in (
        (tmp_path / "none", "no such folder"),
        (tmp_path / "a.safetensors", "no such file"),
    ):
        with pytest.raises(FileNotFoundError, match=rf"^train\.vision_weights: .*{told}"):
            opened(f"train.vision_weights={tmp_path / gone}")
    k2 = write_folder(tmp_path / "k2", language_alone(WEIGHTS))
    with pytest.raises(ValueError, match=r"^train\.vision_weights: .*no tensor of a known layout"):
        opened(f"train.vision_weights={k2}")
    run = source("checkpoint", tmp_path)
    start = opened(f"train.vision_weights={run}")
    file = next(path for path in (tmp_path / "run").rglob("rank_*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    tensors = {name: torch.zeros_like(tensor) for name, tensor in (TOWER | PROJECTOR).items()}
    with pytest.raises(CheckpointError, match=r"train\.vision_weights: .*sha256"):
        start.fill(Alone(), tensors, {})  # type: ignore[arg-type]
    assert not any(tensor.any() for tensor in tensors.values())


def test_a_damaged_note_of_sizes_is_named(tmp_path):
    file = tmp_path / "v.safetensors"
    save_file(TOWER | PROJECTOR, file, {"moonvit3d": "[]"})
    with pytest.raises(CheckpointError, match=f"{re.escape(str(file))}.*moonvit3d"):
        opened(f"train.vision_weights={file}")


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (("train.vision_part=tower",), "train.vision_part=tower without train.vision_weights"),
        (("train.start_optimizer=keep",), "train.start_from=None"),
        (("train.start_optimizer=keep", "train.start_from=a", "train.vision_weights=b"), "=b:"),
    ],
)
def test_keys_that_mean_nothing_together(overrides, told):
    with pytest.raises(ConfigError) as error:
        small_config(*overrides)
    assert told in str(error.value)


@pytest.mark.parametrize("kind", ["hugging face", "checkpoint"])
def test_weights_alone_have_no_optimizer_to_keep(kind, tmp_path):
    uri = source(kind, tmp_path)
    told = r"^train\.start_from: .* holds weights alone, .* set train\.start_optimizer=fresh$"
    with pytest.raises(CheckpointError, match=told):
        opened(f"train.start_from={uri}", "train.start_optimizer=keep")
