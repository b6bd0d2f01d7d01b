"""Maps the tensors of a checkpoint to parameters: names, shapes and row orders. No file access.

Four layouts are known. `released` is Kimi K2.5's checkpoint, whose names are also this package's
parameter names. `transformers` has the module names of transformers 5.23.0's `Kimi_K25Model`: q, k
and v are separate, and the rows of q and k are reordered, because that code rotates channel i with
channel i + head_dim / 2, and the checkpoint (and this package) rotate neighbours.
`transformers-saved` is the output of its `save_pretrained`: the released layout with q and k in
their original order and two modules misnamed. `siglip` is `SiglipModel` or `SiglipVisionModel`
(google/siglip-so400m-patch14-384), which initialised Kimi-VL's tower (its report, 2.1).

Shape suffixes: G side of the stored position grid, S side of the target grid, C width.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from einops import rearrange
from torch import Tensor

from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder
from moonvit3d.positions import resample, working_dtype

Part = Literal["vision_tower", "mm_projector"]

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
POSITIONS = "vision_tower.patch_embed.pos_emb.weight"


class TensorHeader(NamedTuple):
    """Shape and dtype of a stored tensor; a dtype unknown to torch stays a string."""

    shape: tuple[int, ...]
    dtype: torch.dtype | str


@dataclass(frozen=True)
class NameScheme:
    """Tensor names of one kind of checkpoint.

    Args:
        name: for people and messages.
        renamed: released module (or tensor) -> its name in this layout. `{i}` is the block number;
            `{qkv}` stands for three tensors stacked on the first axis. Unlisted names stay as
            released.
        prefixes: possible prefixes of all names, tried in this order.
        parts: parts that such a checkpoint can fill.
        skipped: prefixes of names that have no counterpart here.
    """

    name: str
    renamed: Mapping[str, str]
    prefixes: tuple[str, ...] = ("",)
    parts: tuple[Part, ...] = ("vision_tower", "mm_projector")
    skipped: tuple[str, ...] = ("language_model.", "model.language_model.", "lm_head.")

    def sources(self, released: str) -> tuple[str, ...]:
        """Return the names, without prefix, of the tensors that form `released`; `{i}` may stay."""
        block = re.search(r"\.blocks\.(\d+)\.", released)
        index = block.group(1) if block else "{i}"
        template = released.replace(f".blocks.{index}.", ".blocks.{i}.")
        module, kind = template.rsplit(".", 1)
        name = self.renamed.get(template) or f"{self.renamed.get(module, module)}.{kind}"
        name = name.replace("{i}", index)
        return tuple(dict.fromkeys(name.replace("{qkv}", x) for x in "qkv"))


_BLOCK = "vision_tower.encoder.blocks.{i}."
_LAYER = "vision_tower.layers.{i}."

RELEASED = NameScheme("released", {})

SAVED = NameScheme(
    "transformers-saved",
    {
        "vision_tower.patch_embed.proj": "vision_tower.encoder.patch_embed.proj",
        "mm_projector.pre_norm": "model.mm_projector.pre_norm",
    },
)

TRANSFORMERS = NameScheme(
    "transformers",
    {
        POSITIONS: "vision_tower.patch_embed.pos_emb.position_embeddings",
        f"{_BLOCK}norm0": f"{_LAYER}norm1",
        f"{_BLOCK}norm1": f"{_LAYER}norm2",
        f"{_BLOCK}wqkv": f"{_LAYER}attn.{{qkv}}_proj",
        f"{_BLOCK}wo": f"{_LAYER}attn.proj",
        f"{_BLOCK}mlp.fc0": f"{_LAYER}mlp.fc1",
        f"{_BLOCK}mlp.fc1": f"{_LAYER}mlp.fc2",
        "vision_tower.encoder.final_layernorm": "vision_tower.final_layernorm",
        "mm_projector.proj.0": "mm_projector.in_proj",
        "mm_projector.proj.2": "mm_projector.out_proj",
    },
    prefixes=("model.", ""),
)

SIGLIP = NameScheme(
    "siglip",
    {
        "vision_tower.patch_embed.proj": "embeddings.patch_embedding",
        "vision_tower.patch_embed.pos_emb": "embeddings.position_embedding",
        f"{_BLOCK}norm0": "encoder.layers.{i}.layer_norm1",
        f"{_BLOCK}norm1": "encoder.layers.{i}.layer_norm2",
        f"{_BLOCK}wqkv": "encoder.layers.{i}.self_attn.{qkv}_proj",
        f"{_BLOCK}wo": "encoder.layers.{i}.self_attn.out_proj",
        f"{_BLOCK}mlp.fc0": "encoder.layers.{i}.mlp.fc1",
        f"{_BLOCK}mlp.fc1": "encoder.layers.{i}.mlp.fc2",
        "vision_tower.encoder.final_layernorm": "post_layernorm",
    },
    prefixes=("vision_model.", ""),
    parts=("vision_tower",),
    skipped=("vision_model.head.", "head.", "text_model.", "logit_scale", "logit_bias"),
)

LAYOUTS = (RELEASED, SAVED, TRANSFORMERS, SIGLIP)


def released_shapes(config: MoonViTConfig) -> dict[str, tuple[int, ...]]:
    """Return released name -> shape of every parameter of an encoder of these sizes."""
    with torch.device("meta"):
        encoder = VisionEncoder(config)
    return {name: tuple(p.shape) for name, p in encoder.named_parameters()}


def part_of(released: str) -> Part:
    """Return the part of the encoder that a released name belongs to."""
    return "mm_projector" if released.startswith("mm_projector.") else "vision_tower"


@lru_cache(maxsize=1)
def _templates() -> tuple[str, ...]:
    """Return every released name once, with `{i}` for the block number."""
    tiny = MoonViTConfig(width=4, depth=1, heads=1, mlp_width=1, pos_grid=1, out_width=1)
    return tuple(name.replace(".blocks.0.", ".blocks.{i}.") for name in released_shapes(tiny))


def recognise(names: Iterable[str]) -> tuple[NameScheme, str]:
    """Return the layout and prefix that explain most of the names.

    Raises:
        ValueError: no name is known.
    """
    plain = [re.sub(r"\.(blocks|layers)\.\d+\.", r".\1.{i}.", name) for name in names]
    best, most = (RELEASED, ""), 0
    for layout in LAYOUTS:
        known = [s for t in _templates() if part_of(t) in layout.parts for s in layout.sources(t)]
        for prefix in layout.prefixes:
            count = len({prefix + name for name in known}.intersection(plain))
            if count > most:
                best, most = (layout, prefix), count
    if not most:
        known = ", ".join(layout.name for layout in LAYOUTS)
        raise ValueError(f"no tensor of a known layout ({known}) among {_some(sorted(plain))}")
    return best


def plan(
    headers: Mapping[str, TensorHeader], config: MoonViTConfig, part: Part | None = None
) -> tuple[NameScheme, dict[str, tuple[str, ...]]]:
    """Match a checkpoint's tensors one to one with the encoder's.

    Args:
        headers: every tensor of the checkpoint.
        part: part to fill; None: all parts of the layout (for SigLIP, the tower).

    Returns:
        The layout, and released name -> names of the tensors that form it.

    Raises:
        ValueError: a tensor is missing, unexpected, of another shape, or not floating-point.
    """
    layout, prefix = recognise(headers)
    if part and part not in layout.parts:
        raise ValueError(f"a checkpoint of layout {layout.name} has no {part}")
    shapes = {n: s for n, s in released_shapes(config).items() if part_of(n) in layout.parts}
    makings = {n: tuple(prefix + source for source in layout.sources(n)) for n in shapes}
    known = {source for sources in makings.values() for source in sources}
    extra = [n for n in headers if n not in known and not n.startswith(layout.skipped)]
    if extra:
        raise ValueError(
            f"unexpected {_some(sorted(extra))}: an encoder of depth {config.depth} has no such "
            f"tensors in layout {layout.name}"
        )
    wanted = {n: s for n, s in makings.items() if part is None or part_of(n) == part}
    _check_missing(wanted, headers, layout)
    for name, sources in wanted.items():
        for source in sources:
            _check_header(source, headers[source], name, shapes[name], len(sources), layout)
    return layout, wanted


def _check_missing(
    wanted: Mapping[str, tuple[str, ...]], headers: Mapping[str, TensorHeader], layout: NameScheme
) -> None:
    for part in layout.parts:
        sources = [s for name in wanted if part_of(name) == part for s in wanted[name]]
        missing = [source for source in sources if source not in headers]
        if missing and len(missing) == len(sources) and len(layout.parts) > 1:
            (other,) = set(layout.parts) - {part}
            raise ValueError(f"no tensor of {part}: part={other!r} takes the {other} alone")
        if missing:
            raise ValueError(f"missing {_some(missing)} of layout {layout.name}")


def _check_header(
    source: str,
    header: TensorHeader,
    name: str,
    shape: tuple[int, ...],
    pieces: int,
    layout: NameScheme,
) -> None:
    want: tuple[int | str, ...] = (shape[0] // pieces, *shape[1:])
    right = header.shape == want
    if layout == SIGLIP and name == POSITIONS:  # any square grid, because it is resampled
        want = ("side * side", shape[-1])
        cells = header.shape[0] if header.shape else 0
        right = header.shape[1:] == want[1:] and cells > 0 and math.isqrt(cells) ** 2 == cells
    if not right:
        raise ValueError(f"{source} has shape {list(header.shape)}: want {list(want)}")
    if header.dtype not in FLOATS:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATS)
        raise ValueError(f"{source} is of type {header.dtype}: want one of {known}")


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# Row orders ------------------------------------------------------------------------------------


def neighbours(rows: Tensor, heads: int) -> Tensor:
    """Reorder rows of q or k: transformers' pairs, half a head apart, become adjacent.

    Accepts weights and biases.
    """
    return rearrange(rows, "(n two p) ... -> (n p two) ...", n=heads, two=2)


def halves(rows: Tensor, heads: int) -> Tensor:
    """Apply the inverse of `neighbours`."""
    return rearrange(rows, "(n p two) ... -> (n two p) ...", n=heads, two=2)


def resize_grid(table: Tensor, side: int) -> Tensor:
    """Return SigLIP's position table [G * G, C] as a grid [S, S, C].

    Uses the bicubic rule by which `positions.Positions` samples its grid. At its own size, the grid
    keeps its bits and dtype; otherwise it is float32, or float64 for a float64 table.
    """
    stored = math.isqrt(len(table))
    grid_GGC = rearrange(table, "(h w) c -> h w c", h=stored)
    if stored == side:
        return grid_GGC
    wide_GGC = grid_GGC.to(working_dtype(table.dtype))
    return rearrange(resample(wide_GGC, side, side), "(h w) c -> h w c", h=side)


def assemble(layout: NameScheme, name: str, pieces: list[Tensor], config: MoonViTConfig) -> Tensor:
    """Return one released tensor from the tensors that `plan` lists for it."""
    if layout == SIGLIP and name == POSITIONS:
        return resize_grid(pieces[0], config.pos_grid)
    if len(pieces) == 1:
        return pieces[0]
    q, k, v = pieces
    # SigLIP has no rotary embedding, so its channel order within a head is arbitrary and is kept.
    if layout == TRANSFORMERS:
        q, k = neighbours(q, config.heads), neighbours(k, config.heads)
    return torch.cat([q, k, v])


# Whole dictionaries ----------------------------------------------------------------------------


def from_transformers(
    tensors: Mapping[str, Tensor], config: MoonViTConfig, part: Part | None = None
) -> dict[str, Tensor]:
    """Return a Kimi_K25 model's tensors under released names and in released order.

    Args:
        tensors: `Kimi_K25Model.state_dict()`, that of an enclosing model (names start with
            `model.`), or the output of `save_pretrained`. The language model is skipped.
        config: sizes; the number of heads determines the order of rows.

    Returns:
        Released name -> tensor; unchanged tensors are not copied.

    Raises:
        ValueError: as in `plan`, or the tensors have another layout.
    """
    return _released(tensors, config, part, (TRANSFORMERS, SAVED))


def from_siglip(tensors: Mapping[str, Tensor], config: MoonViTConfig) -> dict[str, Tensor]:
    """Return SigLIP's vision tower under released names; see `from_transformers`.

    Args:
        tensors: state dict of `SiglipModel` or `SiglipVisionModel`.
        config: sizes; the position grid is resampled to `pos_grid`.
    """
    return _released(tensors, config, "vision_tower", (SIGLIP,))


def to_transformers(
    tensors: Mapping[str, Tensor], config: MoonViTConfig, part: Part | None = None
) -> dict[str, Tensor]:
    """Return tensors under `Kimi_K25Model.state_dict()`'s names; inverse of `from_transformers`.

    The names lack the prefix `model.` of an enclosing model.
    """
    out = {}
    for name, tensor in _released(tensors, config, part, (RELEASED,)).items():
        names = TRANSFORMERS.sources(name)
        pieces = list(tensor.chunk(len(names)))
        if len(names) > 1:
            pieces[:2] = [halves(rows, config.heads) for rows in pieces[:2]]
        out.update(zip(names, pieces))
    return out


def _released(
    tensors: Mapping[str, Tensor],
    config: MoonViTConfig,
    part: Part | None,
    layouts: tuple[NameScheme, ...],
) -> dict[str, Tensor]:
    headers = {name: TensorHeader(tuple(t.shape), t.dtype) for name, t in tensors.items()}
    found, _ = recognise(headers)
    if found not in layouts:
        wanted = " or ".join(layout.name for layout in layouts)
        raise ValueError(f"tensors of layout {found.name}: want {wanted}")
    layout, makings = plan(headers, config, part)
    return {
        name: assemble(layout, name, [tensors[source] for source in sources], config)
        for name, sources in makings.items()
    }
