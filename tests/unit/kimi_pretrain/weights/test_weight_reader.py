"""Tests reading untrusted safetensors folders: damage, pickles, and names that leave the folder."""

import json
import os
import pickle
import re
import threading

import pytest
import torch
from safetensors.torch import save_file

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.weights import hf_import
from kimi_pretrain.weights.compatibility import open_compatible
from kimi_pretrain.weights.initial_weights import open_initial_weights
from kimi_pretrain.weights.weight_reader import open_weights
from tests.unit.kimi_pretrain.weights.weight_folders import (
    language_alone,
    random_weights,
    small_config,
    with_int4,
    write_folder,
)

CONFIG = small_config()
WEIGHTS = random_weights(CONFIG)
INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("files", [1, 3])
def test_tensors_are_read_as_they_were_written(tmp_path, files):
    stored = open_weights(write_folder(tmp_path / "hf", WEIGHTS, files))
    assert list(stored.headers) == sorted(WEIGHTS)
    assert all(torch.equal(stored.read(name), tensor) for name, tensor in WEIGHTS.items())


@pytest.mark.parametrize("where", ["folder", "memory://weights/sent"])
def test_what_one_rank_has_found_the_others_read(tmp_path, where):
    """A job reads headers once; each rank reads the tensors it needs."""
    from data_pipeline.store.open import open_store

    folder = write_folder(tmp_path / "hf", WEIGHTS, 3)
    if where != "folder":
        for file in folder.iterdir():
            open_store(where).put(file.name, file.read_bytes())
    found = open_compatible(folder if where == "folder" else where, CONFIG.model)
    name = "language_model.lm_head.weight"
    found[0].read(name, torch.float32)  # opens its files
    weights, settings = pickle.loads(pickle.dumps(found))
    assert settings == found[1]
    assert weights.reader == found[0].reader
    for name, tensor in WEIGHTS.items():
        assert torch.equal(weights.read(name, torch.float32), tensor.float())


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_unread(tmp_path, name):
    """The file is not even a pickle, so an attempt to load it would fail differently."""
    (tmp_path / name).write_bytes(b"not a pickle")
    with pytest.raises(ValueError, match=f"{name}: pickled weights can run any code"):
        open_weights(tmp_path)


def test_an_index_that_names_pickles_is_refused(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "a.bin"}}))
    with pytest.raises(ValueError, match="only safetensors are read, never pickles"):
        open_weights(tmp_path)


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", 7])
def test_an_index_leads_nowhere_else(tmp_path, file):
    save_file({"a": torch.zeros(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "hf"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="is no file name"):
        open_weights(folder)


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": []}', "{}", "[" * 100_000])
def test_a_damaged_index_is_named(tmp_path, text):
    (tmp_path / INDEX).write_text(text)
    with pytest.raises(ValueError, match=re.escape(str(tmp_path / INDEX))):
        open_weights(tmp_path)


def test_a_pipe_in_place_of_a_file_is_refused_and_not_waited_for(tmp_path):
    folder, told = write_folder(tmp_path / "hf", WEIGHTS, 1), []
    (folder / "config.json").unlink(missing_ok=True)
    os.mkfifo(folder / "config.json")

    def read():
        with pytest.raises(CheckpointError, match=r"config\.json: is a pipe, socket or device"):
            open_weights(folder)
        told.append("refused")

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert told == ["refused"]


def test_missing_and_cut_files_are_named(tmp_path):
    folder = write_folder(tmp_path / "hf", WEIGHTS, 2)
    file = folder / "model-00002-of-00002.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:-5])
    with pytest.raises(ValueError, match=re.escape(str(file))):
        open_weights(folder)
    file.unlink()
    with pytest.raises(ValueError, match=f"{re.escape(str(file))}: missing"):
        open_weights(folder)


def test_a_tensor_that_is_not_where_the_index_says(tmp_path):
    folder = write_folder(tmp_path / "hf", WEIGHTS, 2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["language_model.extra"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no tensor 'language_model.extra', where"):
        open_weights(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_weights(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match=r"no weights: expected .*found 0 other files"):
        open_weights(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match="found 1 .safetensors without an index"):
        open_weights(tmp_path)


# Against a model -------------------------------------------------------------------------------


def problem(tmp_path, weights, **written):
    folder = write_folder(tmp_path / "hf", weights, **written)
    with pytest.raises(ValueError) as error:
        open_compatible(folder, CONFIG.model)
    assert str(folder) in str(error.value)
    return str(error.value)


def test_everything_wrong_is_told_in_one_error(tmp_path):
    weights = dict(WEIGHTS)
    for name in ("language_model.lm_head.weight", "language_model.model.norm.weight"):
        del weights[name]
    weights["language_model.model.layers.9.mlp.gate.weight"] = torch.zeros(1)
    router = "language_model.model.layers.1.mlp.gate.weight"
    weights[router] = torch.zeros(5, 64)
    bias = "language_model.model.layers.2.mlp.gate.e_score_correction_bias"
    weights[bias] = torch.zeros(4, dtype=torch.int32)
    told = problem(tmp_path, weights)
    for piece in (
        "2 tensors missing, first 'language_model.model.norm.weight'",
        "1 tensor unexpected, first 'language_model.model.layers.9.mlp.gate.weight'",
        f"'{router}' has shape [5, 64], expected [4, 64] (and 1 more)",
    ):
        assert piece in told


@pytest.mark.parametrize(
    ("removed", "told"),
    [("weight_scale", "is missing beside"), ("weight_shape", "is missing beside")],
)
def test_a_part_of_an_int4_matrix_is_missing(tmp_path, removed, told):
    stored, _ = with_int4(WEIGHTS)
    name = f"language_model.model.layers.1.mlp.experts.2.up_proj.{removed}"
    del stored[name]
    assert f"{name!r} {told}" in problem(tmp_path, stored)


def test_an_int4_matrix_that_states_another_shape(tmp_path):
    stored, _ = with_int4(WEIGHTS)
    base = "language_model.model.layers.1.mlp.experts.2.up_proj.weight"
    stored[f"{base}_shape"] = torch.tensor([64, 32], dtype=torch.int32)
    weights, _ = open_compatible(write_folder(tmp_path / "hf", stored), CONFIG.model)
    with pytest.raises(ValueError, match=r"weight_shape is \[64, 32\].*holds \[32, 64\]"):
        weights.read(base, torch.float32)


def test_a_number_that_is_not_finite_is_named(tmp_path):
    weights = dict(WEIGHTS)
    name = "language_model.model.norm.weight"
    weights[name] = WEIGHTS[name].clone()
    weights[name][7] = torch.nan
    found, _ = open_compatible(write_folder(tmp_path / "hf", weights), CONFIG.model)
    with pytest.raises(ValueError, match=re.escape(f"{name}[7] is nan: expected finite")):
        found.read(name, torch.float32)


def test_a_number_too_large_for_the_type_is_named(tmp_path):
    name = "language_model.model.norm.weight"
    weights = WEIGHTS | {name: torch.full((64,), 3.4e38)}
    found, _ = open_compatible(write_folder(tmp_path / "hf", weights), CONFIG.model)
    with pytest.raises(ValueError, match=re.escape(f"{name}[0] is inf")):
        found.read(name, torch.bfloat16)


def test_the_language_model_alone_has_the_same_names_without_a_prefix(tmp_path):
    alone = language_alone(WEIGHTS)
    alone["model.layers.1.self_attn.rotary_emb.inv_freq"] = torch.zeros(2)  # some releases have it
    weights, _ = open_compatible(write_folder(tmp_path / "hf", alone), CONFIG.model)
    assert weights.absent == ("vision_tower", "mm_projector")
    name = "language_model.model.layers.1.mlp.experts.3.down_proj.weight"
    assert torch.equal(weights.read(name, torch.float32), WEIGHTS[name])


def test_half_an_encoder_is_refused(tmp_path):
    weights = {n: t for n, t in WEIGHTS.items() if not n.startswith("mm_projector.")}
    assert "6 tensors missing, first 'mm_projector.pre_norm.weight'" in problem(tmp_path, weights)


def test_names_that_transformers_saves_wrong_are_called_so(tmp_path):
    weights = {n.replace("model.layers", "model.blocks"): t for n, t in WEIGHTS.items()}
    assert "save_pretrained of transformers' Kimi K2.5 class gets wrong" in problem(
        tmp_path, weights
    )


# config.json -----------------------------------------------------------------------------------


def test_other_sizes_in_config_json_are_told_before_shapes(tmp_path):
    config = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 300}
    told = problem(tmp_path, WEIGHTS, config=config)
    assert "hidden_size is 7168, model.language.hidden_size is 64 (and 1 more)" in told


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("scoring_func", "softmax", "scoring_func is 'softmax'"),
        ("tie_word_embeddings", True, "tie_word_embeddings is True"),
        ("n_group", 8, "n_group is 8"),
        ("num_attention_heads", 2, "num_attention_heads is 2, model.language.num_heads is 4"),
        ("qk_rope_head_dim", 8, "qk_rope_head_dim is 8"),
    ],
)
def test_another_architecture_is_refused(tmp_path, key, value, told):
    """Every shape fits, but the model would differ."""
    folder = write_folder(tmp_path / "hf", WEIGHTS, config={"text_config": {key: value}})
    with pytest.raises(ValueError, match=re.escape(told)):
        open_compatible(folder, CONFIG.model)


def test_other_settings_are_told_and_allowed(tmp_path):
    scaling = {"type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    stated = {"rope_theta": 50000.0, "rms_norm_eps": 1e-6, "rope_scaling": scaling}
    folder = write_folder(tmp_path / "hf", WEIGHTS, config=stated)
    _, settings = open_compatible(folder, CONFIG.model)
    assert [told.split(": ")[1].split(" is ")[0] for told in settings] == [
        "rms_norm_eps",
        "rope_theta",
        "rope_scaling",
    ]


# train.start_from ------------------------------------------------------------------------------


def test_start_from_says_where_and_why(tmp_path):
    config = load_config("tiny_cpu", [f"train.start_from={tmp_path / 'none'}"])
    with pytest.raises(FileNotFoundError, match=r"train\.start_from: .*no such folder"):
        open_initial_weights(config)
    assert open_initial_weights(load_config("tiny_cpu")) is None


def test_a_checkpoint_of_other_heads_is_refused_and_of_another_yarn_told(tmp_path):
    """Most shapes do not show how a head is divided."""
    folder = write_folder(tmp_path / "hf", WEIGHTS)
    place = hf_import.write(hf_import.plan(folder, CONFIG), str(tmp_path / "place"))
    swapped = ("model.language.qk_nope_dim=8", "model.language.qk_rope_dim=8")
    with pytest.raises(ValueError, match=r"model\.language\.qk_nope_dim was 12, here it is 8"):
        open_compatible(place, small_config(*swapped, "model.language.v_dim=16").model)
    config = small_config(f"train.start_from={place}", "model.language.yarn={factor: 4.0}")
    start = open_initial_weights(config)
    assert start is not None
    assert "set otherwise than there: model.language.yarn was None" in start.lines()[-1]


def test_start_from_tells_what_the_encoder_starts_from(tmp_path):
    folder = write_folder(tmp_path / "hf", language_alone(WEIGHTS))
    start = open_initial_weights(small_config(f"train.start_from={folder}"))
    assert start is not None
    assert "the vision_tower and mm_projector from the seed: not there" in start.lines()
    whole = write_folder(tmp_path / "whole", WEIGHTS)
    vision = f"train.vision_weights={whole}"
    start = open_initial_weights(small_config(f"train.start_from={folder}", vision))
    assert start is not None
    assert f"the vision_tower and mm_projector from safetensors, {whole}" in start.lines()
    start = open_initial_weights(small_config(vision, "train.vision_part=tower"))
    assert start is not None
    assert "the mm_projector from the seed: not there" in start.lines()


def test_the_latest_of_a_run_is_taken(tmp_path):
    for step, complete in ((8, True), (20, True), (30, False)):
        folder = tmp_path / "run" / "checkpoints" / f"step_{step:08d}"
        folder.mkdir(parents=True)
        if complete:
            (folder / "manifest.json").write_text("{}")
    assert latest_in(tmp_path / "run").endswith("run/checkpoints/step_00000020")
    assert latest_in(tmp_path / "run" / "checkpoints").endswith("checkpoints/step_00000020")
    assert latest_in(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")
