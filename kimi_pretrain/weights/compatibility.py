"""Checks weights against the configured model from headers and config.json, before any are read.

Different sizes are an error, such as a different shape or number of heads. Different settings that
only change the computation are reported, because a later training stage may change YaRN on purpose.
"""

import os
from collections.abc import Mapping
from typing import Any

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.weights import fp8, int4
from kimi_pretrain.weights.hf_config import Differences, differences
from kimi_pretrain.weights.matching import Weights, match
from kimi_pretrain.weights.model_config import ModelConfig
from kimi_pretrain.weights.shapes import model_shapes
from kimi_pretrain.weights.weight_reader import WeightReader, and_more, open_weights

# Config keys that are sizes, although not every one shows in a shape, ...
_HEADS = (
    *("language.num_heads", "language.qk_nope_dim", "language.qk_rope_dim", "language.v_dim"),
    "vision.heads",
)
# ... and settings that change the computation.
_SETTINGS = (
    *("language.experts_per_token", "language.routed_scaling_factor", "language.norm_eps"),
    *("language.rope_theta", "language.yarn", "vision.norm_eps", "vision.rope_theta"),
)


def open_compatible(
    uri: str | os.PathLike[str], model: ModelConfig
) -> tuple[Weights, tuple[str, ...]]:
    """Open weights and match them with a model; only headers are read.

    Args:
        uri: folder or s3:// URI of a checkpoint, of a run or of Hugging Face safetensors.

    Raises:
        FileNotFoundError: there is nothing at the URI.
        CheckpointError: as `match_compatible`.
    """
    return match_compatible(open_weights(latest_in(uri)), model)


def match_compatible(reader: WeightReader, model: ModelConfig) -> tuple[Weights, tuple[str, ...]]:
    """Match weights with a model by their headers.

    Returns:
        the weights, and messages about settings that differ in their source.

    Raises:
        CheckpointError: the weights do not fit; one message with the first problem and the number
            of further problems.
    """
    found = _differences(reader, model)
    if found.sizes:
        raise CheckpointError(
            f"{reader.where} is of another model: {found.sizes[0]}{and_more(len(found.sizes) - 1)}"
        )
    return match(reader, model_shapes(model)), found.settings


def _differences(reader: WeightReader, model: ModelConfig) -> Differences:
    if reader.manifest is not None:
        return compare_models(reader.manifest.model, model)
    if reader.config is None:
        return Differences((), ())
    where = f"{reader.where}/config.json"
    text = reader.config.get("text_config") or reader.config
    quantized = text.get("quantization_config") or reader.config.get("quantization_config")
    if quantized:
        check_scheme(quantized, where)
    found = differences(reader.config, model)
    return Differences(
        *(tuple(f"{where}: {text}" for text in x) for x in (found.sizes, found.settings))
    )


def check_scheme(found: Any, where: str) -> None:
    """Refuse an unsupported quantisation scheme.

    Args:
        found: `quantization_config` of a config.json.

    Raises:
        ValueError: names the unsupported property.
    """
    stated = dict(found) if isinstance(found, dict) else {}
    if stated.get("quant_method") == "fp8":
        stated, wanted = {"fmt": "e4m3"} | stated, fp8.SCHEME
    else:
        groups = list(dict(stated.get("config_groups") or {}).values())
        weights = dict(groups[0].get("weights") or {}) if len(groups) == 1 else {}
        stated, wanted = weights | stated, int4.SCHEME
    for key, value in wanted.items():
        if stated.get(key) != value:
            raise ValueError(
                f"{where}: quantised with {key} {stated.get(key)!r}, expected {value!r}; what is "
                "read is bfloat16, float32, float16, FP8 in e4m3 with one float32 scale for a "
                f"block of {fp8.BLOCK} x {fp8.BLOCK}, and compressed-tensors "
                f'"pack-quantized" of 4 bits, int, symmetric, group_size {int4.GROUP}'
            )


def compare_models(found: Mapping[str, Any], model: ModelConfig) -> Differences:
    """Compare the `model` of a manifest with the config, apart from shapes."""
    wanted = model.model_dump(mode="json")
    return Differences(
        tuple(_unequal(found, wanted, _HEADS)), tuple(_unequal(found, wanted, _SETTINGS))
    )


def _unequal(found: Mapping[str, Any], wanted: Mapping[str, Any], keys: tuple[str, ...]):
    for key in keys:
        section, name = key.split(".")
        there, here = (values.get(section, {}).get(name) for values in (found, wanted))
        if there != here:
            yield f"model.{key} was {there!r}, here it is {here!r}"
