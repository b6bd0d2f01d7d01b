"""Weights in files: load, save, convert and inspect safetensors checkpoints of the encoder.

`load` reads a file, or of a whole sharded Kimi K2.5 checkpoint only the encoder's tensors, in
any layout that `layouts` knows; `save` writes the released names. Everything is checked before
the first parameter changes. Files are mapped, not read, and tensors pass one parameter at a time.

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
    """Fill an encoder's parameters in place; all that are meant change, or none.

    Args:
        encoder: on any device but meta, in any floating type.
        path: a .safetensors file, the index of a sharded checkpoint, or a folder with either
            `model.safetensors` or `model.safetensors.index.json`.
        part: fill the `vision_tower` or the `mm_projector` alone. None fills both, except from
            SigLIP, which has no projector: that one stays as it was.
        rounding: let numbers change where the encoder's type cannot hold them. Without it only
            what is exact is done, such as widening bfloat16 to float32.

    Returns:
        Names of the parameters that were filled.

    Raises:
        FileNotFoundError: no checkpoint there, or a shard that its index names is missing.
        ValueError: a damaged file; a tensor missing, unexpected, of a wrong shape or type, or not
            finite; a number that the encoder's type cannot hold; other heads, norm_eps or
            rope_theta than the file states. The message names file, tensor and value.
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
    """Raise what `load` would raise for names, shapes, types and sizes; only headers are read."""
    with opened(Path(path)) as checkpoint:
        checkpoint.plan(config, part)


def save(encoder: VisionEncoder, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write every parameter under its released name, with the sizes as metadata.

    The file appears whole or not at all, and equal weights give equal bytes. Numbers are not
    judged: weights that are not finite can be saved for a look at them, but not loaded.

    Args:
        encoder: on any device, in float64, float32, bfloat16 or float16.

    Raises:
        FileExistsError: there is a file, and `overwrite` is not set.
        FileNotFoundError: there is no such folder.
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
    """Write a checkpoint's vision tensors in another layout; no number changes, types stay.

    Only a resampled SigLIP grid is computed, in float32 (float64 where it is float64).

    Args:
        destination: the file to write; its folder must exist.
        to: `released`, or `transformers` for the names of `Kimi_K25Model.state_dict()`.
        part: as for `load`.
        heads: attention heads; None takes what the file states, else width / 72.
        pos_grid: side that a SigLIP position grid is resampled to; None is 64.

    Returns:
        Names of the tensors that were written. Errors are those of `load` and `save`.
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
    """Layout, sizes as far as shapes tell, and counts of a checkpoint's vision tensors, as text.

    Only headers are read. Errors are those of `load`, or of a tensor that a size is read from.
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
    """Parameters by released name, which a compiled encoder does not list but still finds."""
    return {name: encoder.get_parameter(name) for name in layouts.released_shapes(encoder.config)}


def _check_fits(value: Tensor, dtype: torch.dtype, rounding: bool, where: str) -> None:
    """Raise ValueError where `dtype` cannot hold a number, or not exactly without rounding."""
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
    """What to state in a file that holds these released tensors."""
    names = [*TOWER_SIZES, *constants]
    if any(layouts.part_of(name) == "mm_projector" for name in tensors):
        names += PROJECTOR_SIZES
    return {name: getattr(config, name) for name in names}


# Command ---------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> None:
    """The command; see `--help`."""
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
