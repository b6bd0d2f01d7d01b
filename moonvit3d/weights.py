"""Loads, saves, converts and inspects safetensors checkpoints of the encoder.

`load` reads a file, or only the encoder's tensors of a sharded Kimi K2.5 checkpoint, in any layout
that `layouts` knows; `save` writes the released names. Everything is checked before the first
parameter changes. Files are memory-mapped, and one parameter is processed at a time.

    python -m moonvit3d.weights inspect kimi-k2.5/
    python -m moonvit3d.weights convert kimi-k2.5/ encoder.safetensors
    python -m moonvit3d.weights convert siglip-so400m-patch14-384/ tower.safetensors
    python -m moonvit3d.weights convert encoder.safetensors kimi_k25.safetensors --to transformers
"""

import argparse
import math
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from moonvit3d import layouts
from moonvit3d.config import MoonViTConfig
from moonvit3d.files import CONSTANTS, opened, write
from moonvit3d.layouts import Part
from moonvit3d.model import VisionEncoder

TOWER_SIZES = ("width", "depth", "heads", "mlp_width", "pos_grid")
PROJECTOR_SIZES = ("projector_width", "out_width")


def load(
    encoder: VisionEncoder,
    path: str | os.PathLike[str],
    *,
    part: Part | None = None,
    rounding: bool = False,
) -> list[str]:
    """Fill an encoder's parameters in place; all selected parameters change, or none.

    Args:
        encoder: on any device except meta, in any floating-point dtype.
        path: a .safetensors file, the index of a sharded checkpoint, or a folder with either
            `model.safetensors` or `model.safetensors.index.json`.
        part: fill only the `vision_tower` or the `mm_projector`. None fills both, except from
            SigLIP, which has no projector; the projector then stays unchanged.
        rounding: allow values to change if the encoder's dtype cannot represent them. Without it
            only exact conversions are allowed, such as widening bfloat16 to float32.

    Returns:
        Names of the filled parameters.

    Raises:
        FileNotFoundError: the checkpoint, or a shard that its index names, does not exist.
        ValueError: a file is damaged; a tensor is missing, unexpected, of a wrong shape or dtype,
            or not finite; the encoder's dtype cannot represent a value; or heads, norm_eps or
            rope_theta differ from those in the file. The message names file, tensor and value.
    """
    parameters = _parameters(encoder)
    if any(parameter.is_meta for parameter in parameters.values()):
        raise ValueError("the encoder is on the meta device: give it memory with to_empty() first")
    with opened(Path(path)) as checkpoint:
        makings = checkpoint.plan(encoder.config, part)
        for name, sources in makings.items():
            value = checkpoint.read(name, sources, encoder.config)
            where = f"{checkpoint.files[sources[0]]}: {name}"
            _check_fits(value, parameters[name].dtype, rounding, where)
        with torch.no_grad():
            for name, sources in makings.items():
                parameters[name].copy_(checkpoint.read(name, sources, encoder.config))
    return list(makings)


def check(path: str | os.PathLike[str], config: MoonViTConfig, part: Part | None = None) -> None:
    """Raise the errors of `load` for names, shapes, dtypes and sizes; reads only headers."""
    with opened(Path(path)) as checkpoint:
        checkpoint.plan(config, part)


def save(encoder: VisionEncoder, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write every parameter under its released name, with the sizes as metadata.

    The file is written atomically, and equal weights give equal bytes. Values are not checked:
    non-finite weights can be saved for inspection, but not loaded.

    Args:
        encoder: on any device, in float64, float32, bfloat16 or float16.

    Raises:
        FileExistsError: the file exists, and `overwrite` is not set.
        FileNotFoundError: the folder does not exist.
    """
    tensors = {name: parameter.detach() for name, parameter in _parameters(encoder).items()}
    write(Path(path), tensors, _sizes(encoder.config, tensors, CONSTANTS), overwrite)


def convert(
    source: str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    to: Literal["released", "transformers"] = "released",
    part: Part | None = None,
    heads: int | None = None,
    pos_grid: int | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Write a checkpoint's vision tensors in another layout; values and dtypes stay unchanged.

    The only exception is a resampled SigLIP grid, computed in float32 (float64 for a float64 grid).

    Args:
        destination: the file to write; its folder must exist.
        to: `released`, or `transformers` for the names of `Kimi_K25Model.state_dict()`.
        part: as for `load`.
        heads: attention heads; None uses the value in the file, else width / 72.
        pos_grid: side to which a SigLIP position grid is resampled; None is 64.

    Returns:
        Names of the written tensors. Errors are those of `load` and `save`.
    """
    with opened(Path(source)) as checkpoint:
        config = checkpoint.config(heads, pos_grid)
        makings = checkpoint.plan(config, part)
        tensors = {
            name: checkpoint.read(name, made_of, config) for name, made_of in makings.items()
        }
        constants = [name for name in CONSTANTS if name in checkpoint.stated]
        sizes = _sizes(config, tensors, constants)
        if to == "transformers":
            parts: set[Part] = {layouts.part_of(name) for name in tensors}
            one = parts.pop() if len(parts) == 1 else None
            tensors = layouts.to_transformers(tensors, config, one)
        write(Path(destination), tensors, sizes, overwrite)
    return list(tensors)


def inspect(path: str | os.PathLike[str]) -> str:
    """Return layout, sizes (as far as shapes show them) and tensor counts of a checkpoint as text.

    Reads only headers. Errors are those of `load`, or concern a tensor that a size is read from.
    """
    with opened(Path(path)) as checkpoint:
        lines = [f"{checkpoint.path}: layout {checkpoint.layout.name}"]
        sizes = {"heads": "not stated", **checkpoint.shape_sizes(), **checkpoint.stated}
        lines.append(", ".join(f"{name} {value}" for name, value in sizes.items()))
        for part in checkpoint.layout.parts:
            inside = checkpoint.of_part(part)
            count = sum(math.prod(header.shape) for header in inside)
            types = sorted({str(header.dtype).removeprefix("torch.") for header in inside})
            lines.append(f"{part}: {len(inside)} tensors, {count:,} numbers {' '.join(types)}")
        skipped = len(checkpoint.files) - len(checkpoint.headers)
        lines.append(f"skipped: {skipped} tensors with no counterpart here")
        return "\n".join(lines)


def _parameters(encoder: VisionEncoder) -> dict[str, Tensor]:
    """Return parameters by released name, which a compiled encoder finds but does not list."""
    return {name: encoder.get_parameter(name) for name in layouts.released_shapes(encoder.config)}


def _check_fits(value: Tensor, dtype: torch.dtype, rounding: bool, where: str) -> None:
    """Raise ValueError if `dtype` cannot represent a value, or not exactly without `rounding`."""
    if torch.promote_types(value.dtype, dtype) == dtype:
        return  # widening
    rounded = value.to(dtype)
    bad = ~torch.isfinite(rounded) if rounding else rounded.to(value.dtype) != value
    if bad.any():
        place = tuple(bad.nonzero()[0].tolist())
        advice = "" if rounding else "; rounding=True allows the change"
        before, after = value[place].item(), rounded[place].item()
        raise ValueError(
            f"{where}{list(place)}: {before!r} would become {after!r} in the encoder's "
            f"{dtype}{advice}"
        )


def _sizes(
    config: MoonViTConfig, tensors: Iterable[str], constants: Iterable[str]
) -> dict[str, Any]:
    """Return the sizes to record in a file with these released tensors."""
    names = [*TOWER_SIZES, *constants]
    if any(layouts.part_of(name) == "mm_projector" for name in tensors):
        names += PROJECTOR_SIZES
    return {name: getattr(config, name) for name in names}


# Command ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command; see `--help`."""
    parser = argparse.ArgumentParser(
        prog="python -m moonvit3d.weights",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("inspect", help="layout, sizes and counts")
    change = commands.add_parser("convert", help="write the vision tensors in another layout")
    for command in (show, change):
        command.add_argument("source", help="a .safetensors file, an index, or a folder")
    change.add_argument("destination", help="the .safetensors file to write")
    change.add_argument("--to", choices=["released", "transformers"], default="released")
    change.add_argument("--part", choices=["vision_tower", "mm_projector"], help="this part alone")
    change.add_argument("--heads", type=int, help="attention heads (width / 72)")
    change.add_argument("--pos-grid", type=int, help="side of the position grid, SigLIP only (64)")
    change.add_argument("--overwrite", action="store_true", help="replace the destination")
    options = vars(parser.parse_args(arguments))
    try:
        if options.pop("command") == "inspect":
            print(inspect(options["source"]))
        else:
            print(f"{options['destination']}: {len(convert(**options))} tensors written")
    except (OSError, ValueError) as error:
        sys.exit(f"moonvit3d.weights: {error}")


if __name__ == "__main__":
    main()
