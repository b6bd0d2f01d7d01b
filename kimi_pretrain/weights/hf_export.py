"""Exports a checkpoint as a Hugging Face folder: files, index and config.json.

One tensor at a time is in memory, regardless of the model's size.
"""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.config import GIB
from kimi_pretrain.reliability.run_history import latest_in
from kimi_pretrain.weights import int4
from kimi_pretrain.weights.hf_config import Kind, SpecialIds, config_json
from kimi_pretrain.weights.matching import Weights, match
from kimi_pretrain.weights.model_config import ModelConfig
from kimi_pretrain.weights.report import seq_len
from kimi_pretrain.weights.shapes import BIAS, LANGUAGE, is_routed_expert, model_shapes
from kimi_pretrain.weights.weight_reader import CONFIG, open_weights
from kimi_pretrain.weights.weight_writer import OutputTensor, new_folder, write, write_json
from moonvit3d.safetensors_io import entry_of

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export.

    Attributes:
        kind: tensor names, and architecture in `config.json`.
        dtype: dtype of all tensors except the routing biases; None: as trained, float32 for a run
            in float64.
        int4: quantise the routed experts to INT4.
        file_bytes: largest size of a file.
        max_positions: longest sequence, for config.json; None: from YaRN, or the row length of
            training.
        ids: special ids of the tokenizer; None: the last 256 ids of the vocabulary.
    """

    kind: Kind
    dtype: str | None = None
    int4: bool = False
    file_bytes: int = 5 * GIB
    max_positions: int | None = None
    ids: SpecialIds | None = None


@dataclass(frozen=True)
class ExportPlan:
    """Plan of an export that has passed all checks.

    Attributes:
        config: content of config.json.
        from_masters: number of tensors that are made from the optimizer's master copies.
        widened: True if the export dtype is wider than any stored copy of the weights.
        first_special_id: the special id from which config.json counts.
    """

    weights: Weights
    tensors: tuple[OutputTensor, ...]
    config: Mapping[str, object]
    dtype: str
    from_masters: int
    widened: bool
    first_special_id: int


def plan(uri: str | os.PathLike[str], options: ExportOptions) -> ExportPlan:
    """Check an export for all possible errors; only headers are read.

    Args:
        uri: a checkpoint, or a run's folder for its latest checkpoint.

    Raises:
        FileNotFoundError, ValueError: the URI holds no checkpoint of this project or a damaged one,
            or the options conflict.
    """
    reader = open_weights(latest_in(uri))
    if reader.manifest is None:
        raise CheckpointError(f"{reader.where}: no checkpoint of ours: there is no manifest.json")
    model = ModelConfig.model_validate(reader.manifest.model)
    weights = match(reader, model_shapes(model))
    dtype = options.dtype or {"bfloat16": "bfloat16"}.get(reader.manifest.dtype, "float32")
    if options.int4 and dtype != "bfloat16":
        raise ValueError(f"--int4 with --dtype {dtype}: what is not INT4 is bfloat16 then")
    if options.kind == "kimi_k25" and weights.absent:
        raise ValueError(
            f"{reader.where} holds no {weights.absent[0]}: kimi_k25 is the whole model; export the "
            "language model with --as deepseek_v3"
        )
    names = [n for n in weights.sources if options.kind == "kimi_k25" or n.startswith(LANGUAGE)]
    shapes, wide = model_shapes(model), DTYPES[dtype]
    outputs = [out for name in names for out in _outputs(name, shapes[name], wide, options)]
    masters = [name for name in names if weights.from_master(name, _dtype_of(name, wide))]
    types = {reader.headers[name].dtype for name in names if not name.endswith(BIAS)}
    narrow = any(torch.promote_types(wide, found) != found for found in types)
    ids = options.ids or SpecialIds(model.language.vocab_size - 256)
    return ExportPlan(
        weights,
        tuple(outputs),
        config_json(
            model,
            options.kind,
            dtype=dtype,
            max_positions=options.max_positions or _positions(model, seq_len(reader)),
            ids=ids,
            quantized=options.int4,
        ),
        dtype,
        len(masters),
        narrow and not masters,
        ids.base,
    )


def export(
    found: ExportPlan,
    out: Path,
    options: ExportOptions,
    progress: Callable[[int], object] = lambda _: None,
    extra: Mapping[str, bytes] | None = None,
) -> None:
    """Write the planned export with the same options. The folder is renamed once complete.

    Args:
        progress: called with the number of bytes just written.
        extra: additional files, name -> content.

    Raises:
        ValueError: the output exists already, or a number is not finite.
    """
    wide = DTYPES[found.dtype]

    def make(name: str) -> dict[str, Tensor]:
        tensor = found.weights.read(name, _dtype_of(name, wide))
        out_name = _out_name(name, options.kind)
        if not _is_int4(name, options):
            return {out_name: tensor}
        packed, scale = int4.quantize(tensor)
        shape = torch.tensor(tensor.shape, dtype=torch.int32)
        base = out_name.removesuffix(".weight")
        parts = zip(int4.PARTS, (packed, scale, shape), strict=True)
        return {f"{base}.{part}": made for part, made in parts}

    with new_folder(out) as folder:
        write(folder, found.tensors, make, options.file_bytes, progress)
        write_json(folder / CONFIG, found.config)
        for name, content in (extra or {}).items():
            (folder / name).write_bytes(content)


def _outputs(
    name: str, shape: tuple[int, ...], wide: torch.dtype, options: ExportOptions
) -> list[OutputTensor]:
    out_name = _out_name(name, options.kind)
    if not _is_int4(name, options):
        return [OutputTensor(out_name, name, entry_of(name, shape, _dtype_of(name, wide)))]
    try:
        shapes = int4.packed_shapes(shape)
    except ValueError as error:
        raise ValueError(f"--int4: {name}: {error}") from None
    types = (torch.int32, torch.bfloat16, torch.int32)
    base = out_name.removesuffix(".weight")
    return [
        OutputTensor(f"{base}.{part}", name, entry_of(name, shapes[part], dtype))
        for part, dtype in zip(int4.PARTS, types, strict=True)
    ]


def _is_int4(name: str, options: ExportOptions) -> bool:
    return options.int4 and is_routed_expert(name)


def _out_name(name: str, kind: Kind) -> str:
    return name if kind == "kimi_k25" else name.removeprefix(LANGUAGE)


def _dtype_of(name: str, wide: torch.dtype) -> torch.dtype:
    return torch.float32 if name.endswith(BIAS) else wide


def _positions(model: ModelConfig, rows: int | None) -> int:
    yarn = model.language.yarn
    if yarn is not None:
        return round(yarn.factor * yarn.original_max_position)
    if rows is None:
        raise ValueError(
            "without YaRN, weights alone do not tell how long a sequence may be: give "
            "--max-positions, the data.seq_len that they were trained with"
        )
    return rows
