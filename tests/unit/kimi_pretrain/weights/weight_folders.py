"""Small Hugging Face model folders with random weights, made without the code under test."""

import json
import re
from pathlib import Path

import torch
from safetensors.torch import save_file

from kimi_pretrain.config import load_config
from kimi_pretrain.weights.shapes import BIAS, LANGUAGE, model_shapes

SMALL = (
    "model.vision={width: 32, depth: 2, heads: 2, mlp_width: 48, pos_grid: 4, out_width: 64}",
    *("model.language.hidden_size=64", "model.language.num_layers=3"),
    *("model.language.dense_ffn_size=96", "model.language.expert_ffn_size=32"),
    *("model.language.q_lora_rank=24", "model.language.kv_lora_rank=16"),
    *("model.language.qk_nope_dim=12", "model.language.qk_rope_dim=4", "model.language.v_dim=12"),
    *("model.language.num_experts=4", "model.language.vocab_size=300"),
    *("layout={}", "checkpoint.file_mib=1"),
)


def small_config(*overrides):
    return load_config("tiny_cpu", [*SMALL, *overrides])


def random_weights(config, dtype=torch.float32, seed=0):
    """Return every tensor of a model by its name in K2.5's checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).to(
            torch.float32 if name.endswith(BIAS) else dtype
        )
        for name, shape in model_shapes(config.model).items()
    }


def language_alone(weights):
    """Return the language model under the names of K2 and Moonlight."""
    return {n.removeprefix(LANGUAGE): t for n, t in weights.items() if n.startswith(LANGUAGE)}


def write_folder(folder: Path, weights, files=1, config=None) -> Path:
    """Write one file, or several with an index, with tensors divided in name order."""
    folder.mkdir(parents=True)
    names = sorted(weights)
    shares = [names[i::files] for i in range(files)]
    if files == 1:
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
    else:
        places = {}
        for number, share in enumerate(shares, 1):
            name = f"model-{number:05d}-of-{files:05d}.safetensors"
            save_file({n: weights[n] for n in share}, folder / name, {"format": "pt"})
            places |= dict.fromkeys(share, name)
        index = {"metadata": {}, "weight_map": places}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def dequantized_by_hand(packed, scale):
    """Decode INT4 of compressed-tensors number by number, from its documented layout."""
    rows, words = packed.shape
    out = torch.empty(rows, words * 8, dtype=scale.dtype)
    for row in range(rows):
        for column in range(words * 8):
            word = int(packed[row, column // 8]) & 0xFFFFFFFF
            number = (word >> (4 * (column % 8))) % 16 - 8
            out[row, column] = torch.tensor(number).to(scale.dtype) * scale[row, column // 32]
    return out


def with_int4(weights, seed=1):
    """Return routed experts as random INT4: the stored tensors, and the values they stand for."""
    generator = torch.Generator().manual_seed(seed)
    stored, meant = {}, {}
    for name, tensor in weights.items():
        if not re.search(r"\.mlp\.experts\.", name):
            stored[name] = meant[name] = tensor
            continue
        rows, width = tensor.shape
        packed = torch.randint(
            -(2**31), 2**31 - 1, (rows, width // 8), dtype=torch.int64, generator=generator
        ).to(torch.int32)
        scale = torch.randn(rows, width // 32, generator=generator).to(torch.bfloat16)
        base = name.removesuffix("weight")
        stored[f"{base}weight_packed"], stored[f"{base}weight_scale"] = packed, scale
        stored[f"{base}weight_shape"] = torch.tensor([rows, width], dtype=torch.int32)
        meant[name] = dequantized_by_hand(packed, scale)
    return stored, meant
