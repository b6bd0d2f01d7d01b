"""Tests export and import: equal bits, the content of config.json, and bounded memory."""

import hashlib
import json

import pytest
import torch
from safetensors import safe_open

from kimi_pretrain.checkpoint.storage_read import open_checkpoint
from kimi_pretrain.config import load_config
from kimi_pretrain.weights import hf_export, hf_import, weight_writer
from kimi_pretrain.weights.hf_config import SpecialIds, config_json, differences
from kimi_pretrain.weights.shapes import BIAS, model_shapes, part_of
from kimi_pretrain.weights.weight_reader import open_weights
from kimi_pretrain.weights.weight_writer import OutputTensor
from moonvit3d.safetensors_io import TensorEntry
from tests.unit.kimi_pretrain.checkpoint.ranks import change_manifest
from tests.unit.kimi_pretrain.weights.weight_folders import (
    dequantized_by_hand,
    language_alone,
    random_weights,
    small_config,
    with_int4,
    write_folder,
)


def imported(tmp_path, config, weights, **written):
    """Return a checkpoint that an import makes of the weights."""
    folder = write_folder(tmp_path / "hf", weights, **written)
    return hf_import.write(hf_import.plan(folder, config), str(tmp_path / "checkpoints"))


def exported(source, out, kind="kimi_k25", **options):
    chosen = hf_export.ExportOptions(kind, max_positions=128, **options)
    found = hf_export.plan(source, chosen)
    hf_export.export(found, out, chosen)
    return found


def read_all(folder):
    """Read every tensor with the safetensors library."""
    return {
        name: file.get_tensor(name)
        for path in sorted(folder.glob("*.safetensors"))
        for file in [safe_open(path, framework="pt")]
        for name in file.keys()  # noqa: SIM118
    }


def equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("files", [1, 3])
def test_import_then_export_changes_no_bit(tmp_path, dtype, files):
    config = small_config(f"train.dtype={dtype}")
    weights = random_weights(config, getattr(torch, dtype))
    source = imported(tmp_path, config, weights, files=files)
    assert open_checkpoint(source).verify() == []
    equal(read_all(tmp_path / "checkpoints" / "step_00000000"), weights)
    exported(source, tmp_path / "out", file_bytes=50_000)
    equal(read_all(tmp_path / "out"), weights)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 4
    again = hf_import.plan(tmp_path / "out", config)
    folder = hf_import.write(again, str(tmp_path / "again"))
    assert open_checkpoint(folder).manifest().contents == "weights"
    equal(read_all(tmp_path / "again" / "step_00000000"), weights)


def test_the_language_model_alone_goes_out_and_in(tmp_path):
    config = small_config("model.language.q_lora_rank=null", "train.dtype=bfloat16")
    weights = random_weights(config, torch.bfloat16)
    source = imported(tmp_path, config, weights)
    exported(source, tmp_path / "out", "deepseek_v3")
    equal(read_all(tmp_path / "out"), language_alone(weights))
    encoder = hf_import.plan(tmp_path / "out", config, vision=str(tmp_path / "hf"))
    hf_import.write(encoder, str(tmp_path / "again"))
    equal(read_all(tmp_path / "again" / "step_00000000"), weights)
    alone = hf_import.plan(tmp_path / "out", config)
    assert alone.absent == ("vision_tower", "mm_projector")
    hf_import.write(alone, str(tmp_path / "alone"))
    with pytest.raises(ValueError, match="holds no vision_tower: kimi_k25 is the whole model"):
        exported(tmp_path / "alone", tmp_path / "whole")


def test_int4_goes_out_and_comes_in_as_what_it_stands_for(tmp_path):
    config = small_config("train.dtype=bfloat16")
    weights = random_weights(config, torch.bfloat16)
    source = imported(tmp_path, config, weights)
    exported(source, tmp_path / "out", int4=True, file_bytes=30_000)
    stored = read_all(tmp_path / "out")
    assert stored["language_model.lm_head.weight"].dtype == torch.bfloat16
    folder = hf_import.write(hf_import.plan(tmp_path / "out", config), str(tmp_path / "again"))
    found = open_weights(folder)
    for name, tensor in weights.items():
        base = name.removesuffix(".weight")
        if ".mlp.experts." in name:
            packed, scale = (stored[f"{base}.weight_{part}"] for part in ("packed", "scale"))
            tensor = dequantized_by_hand(packed, scale)
            assert stored[f"{base}.weight_shape"].tolist() == list(tensor.shape)
        assert torch.equal(found.read(name), tensor), name


def test_int4_comes_in_under_kimis_names_and_moonlights(tmp_path):
    config = small_config()
    stored, meant = with_int4(random_weights(config))
    for prefix, tensors in (("k25", stored), ("alone", language_alone(stored))):
        found = hf_import.plan(write_folder(tmp_path / prefix, tensors, 2), config)
        assert found.weights.quantized == "INT4"
        for name, tensor in meant.items():
            if name in found.sizes:
                assert torch.equal(found.read(name), tensor.float()), name


def test_float32_of_a_run_in_bfloat16_is_its_masters(tmp_path):
    config = small_config("train.dtype=bfloat16")
    wide = random_weights(config)
    # They differ from the masters by more than rounding, so the two cannot be confused.
    weights = {n: t if n.endswith(BIAS) else (1.1 * t).bfloat16() for n, t in wide.items()}
    source = imported(tmp_path, config, weights)
    found = exported(source, tmp_path / "widened", dtype="float32")
    assert found.widened
    assert found.from_masters == 0
    equal(read_all(tmp_path / "widened"), {n: t.float() for n, t in weights.items()})
    _add_masters(tmp_path / "checkpoints" / "step_00000000", wide)
    found = exported(source, tmp_path / "out", dtype="float32")
    assert not found.widened
    assert found.from_masters == len(wide) - 2  # two routing biases have no masters
    equal(read_all(tmp_path / "out"), wide)
    exported(source, tmp_path / "narrow", dtype="bfloat16")  # the model's own, not rounded masters
    equal(read_all(tmp_path / "narrow"), weights)


def _add_masters(folder, wide):
    """Add the optimizer's masters to a checkpoint, as a run would."""
    from safetensors.torch import save_file

    masters = {f"optim.master.{n}": t for n, t in wide.items() if not n.endswith(BIAS)}
    save_file(masters, folder / "rank_00001_000.safetensors")
    index = json.loads((folder / "index.json").read_text())
    index["weight_map"] |= dict.fromkeys(masters, "rank_00001_000.safetensors")
    (folder / "index.json").write_text(json.dumps(index))
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name in ("rank_00001_000.safetensors", "index.json")
        for data in [(folder / name).read_bytes()]
    }
    change_manifest(folder, lambda values: values["files"].update(listed))


def test_an_interrupted_export_leaves_nothing(tmp_path):
    config = small_config()
    weights = random_weights(config)
    weights["language_model.lm_head.weight"][0, 0] = torch.inf
    save = tmp_path / "hf"
    with pytest.raises(ValueError, match=r"lm_head\.weight\[0, 0\] is inf"):
        imported(tmp_path, config, weights)
    assert [p.name for p in (tmp_path / "checkpoints").glob("*")] == []
    good = write_folder(tmp_path / "good", random_weights(config))
    source = hf_import.write(hf_import.plan(good, config), str(tmp_path / "place"))
    chosen = hf_export.ExportOptions("kimi_k25", max_positions=1)
    found = hf_export.plan(source, chosen)

    def fail(count):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        hf_export.export(found, tmp_path / "out", chosen, fail)
    assert not list(tmp_path.glob("out*"))
    assert save.exists()
    for taken, call in (
        (tmp_path / "out.partial", lambda: hf_export.export(found, tmp_path / "out", chosen)),
        (
            tmp_path / "new" / "step_00000000.partial",
            lambda: hf_import.write(hf_import.plan(good, config), str(tmp_path / "new")),
        ),
    ):
        taken.mkdir(parents=True)
        (taken / "mine").touch()
        with pytest.raises(ValueError, match=rf"{taken} is there already.*remove it"):
            call()
        assert [file.name for file in taken.iterdir()] == ["mine"]


def test_nothing_is_written_over(tmp_path):
    config = small_config()
    source = imported(tmp_path, config, random_weights(config))
    with pytest.raises(ValueError, match="holds checkpoints already"):
        hf_import.write(hf_import.plan(tmp_path / "hf", config), str(tmp_path / "checkpoints"))
    with pytest.raises(ValueError, match="is there already"):
        exported(source, tmp_path / "hf")
    with pytest.raises(ValueError, match="is a checkpoint already"):
        hf_import.plan(source, config)
    with pytest.raises(ValueError, match="no checkpoint of ours"):
        hf_export.plan(tmp_path / "hf", hf_export.ExportOptions("kimi_k25"))


def test_an_import_agrees_with_config_json(tmp_path):
    config = small_config()
    folder = write_folder(tmp_path / "hf", random_weights(config), config={"rms_norm_eps": 1e-6})
    with pytest.raises(ValueError, match=r"norm_eps is 1e-05: set the configuration's keys"):
        hf_import.plan(folder, config)
    hf_import.plan(folder, small_config("model.language.norm_eps=1e-6"))


def test_one_tensor_at_a_time_is_asked_for(tmp_path):
    """The writer starts a file before its last tensor is made, so it never holds a whole file."""
    entry = TensorEntry("F32", (1000,))
    outputs = [OutputTensor(f"t{i}", f"s{i}", entry) for i in range(10)]
    events = []

    def make(source):
        events.append(source)
        return {f"t{source[1:]}": torch.full((1000,), float(source[1:]))}

    weight_writer.write(tmp_path, outputs, make, 12_000, lambda count: events.append(count))
    assert events == [event for i in range(10) for event in (f"s{i}", 4000)]
    found = read_all(tmp_path)
    assert all(found[f"t{i}"].eq(i).all() for i in range(10))
    assert len(list(tmp_path.glob("*.safetensors"))) == 4


# config.json -----------------------------------------------------------------------------------


def test_config_json_of_the_released_models():
    """Checks keys and values of the config.json files of Kimi K2.5 and Moonlight."""
    config = load_config("kimi_k25_1t")
    options = dict(dtype="bfloat16", max_positions=262144, ids=SpecialIds(163584))
    whole = config_json(config.model, "kimi_k25", **options, quantized=True)
    text = whole["text_config"]
    assert (text["bos_token_id"], text["eos_token_id"], text["pad_token_id"]) == (
        163584,
        163585,
        163839,
    )
    assert whole["media_placeholder_token_id"] == 163605
    assert (text["num_hidden_layers"], text["first_k_dense_replace"]) == (61, 1)
    assert (text["n_routed_experts"], text["num_experts_per_tok"]) == (384, 8)
    assert (text["routed_scaling_factor"], text["scoring_func"]) == (2.827, "sigmoid")
    assert (text["topk_method"], text["norm_topk_prob"]) == ("noaux_tc", True)
    assert text["quantization_config"]["format"] == "pack-quantized"
    vision = whole["vision_config"]
    assert (vision["vt_hidden_size"], vision["vt_num_hidden_layers"]) == (1152, 27)
    moonlight = load_config("moonlight_16b_a3b")
    text = config_json(moonlight.model, "deepseek_v3", **options)
    assert text["q_lora_rank"] is None
    assert text["rope_scaling"] is None
    assert (text["n_shared_experts"], text["rms_norm_eps"]) == (2, 1e-5)


@pytest.mark.parametrize("preset", ["kimi_k25_1t", "moonlight_16b_a3b", "tiny_cpu"])
@pytest.mark.parametrize("kind", ["kimi_k25", "deepseek_v3"])
def test_what_is_written_agrees_with_what_it_was_written_for(preset, kind):
    model = load_config(preset).model
    options = dict(dtype="bfloat16", max_positions=1, ids=SpecialIds(0))
    found = differences(json.loads(json.dumps(config_json(model, kind, **options))), model)
    assert found.sizes == found.settings == ()


def test_an_encoder_that_kimis_architecture_cannot_state():
    model = small_config("model.vision.rope_theta=100.0").model
    options = dict(dtype="bfloat16", max_positions=1, ids=SpecialIds(0))
    config_json(model, "deepseek_v3", **options)
    with pytest.raises(ValueError, match=r"model\.vision\.rope_theta=100\.0"):
        config_json(model, "kimi_k25", **options)


def test_int4_and_float32_do_not_go_together(tmp_path):
    config = small_config()
    source = imported(tmp_path, config, random_weights(config))
    with pytest.raises(ValueError, match="--int4 with --dtype float32"):
        exported(source, tmp_path / "out", int4=True)
    with pytest.raises(ValueError, match="give --max-positions"):
        hf_export.plan(source, hf_export.ExportOptions("kimi_k25"))


def test_the_released_checkpoint_has_so_many_tensors():
    """Kimi K2.5 has 208,550 tensors, three for each routed expert matrix."""
    shapes = model_shapes(load_config("kimi_k25_1t").model)
    routed = sum(part_of(name) == "routed experts" for name in shapes)
    assert len(shapes) + 2 * routed == 208_550
    assert shapes["language_model.model.layers.60.self_attn.kv_b_proj.weight"] == (16384, 512)


def test_a_store_of_objects_takes_an_import_and_gives_an_export(tmp_path):
    config = small_config()
    weights = random_weights(config)
    folder = write_folder(tmp_path / "hf", weights)
    uri = hf_import.write(hf_import.plan(folder, config), "memory://weights/place")
    assert uri == "memory://weights/place/step_00000000"
    assert open_checkpoint(uri).verify() == []
    exported("memory://weights/place", tmp_path / "out")  # its newest checkpoint
    equal(read_all(tmp_path / "out"), weights)
