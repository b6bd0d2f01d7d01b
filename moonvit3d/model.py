"""MoonViT-3D and its projector: maps packed patches of images and video chunks to tokens.

    patches [L, 3, 14, 14] -> PatchEmbed -> Encoder -> sd2_tpool -> Projector -> [T, out_width]

Kimi K2.5 report, section 4.2. `VisionEncoder` is the complete model; read the file from the bottom
up. Items of any size, with one to four frames each, are packed one after the other; attention spans
an item's patches in space and time. The maths is for a single device; with `share`, several devices
encode one large item. Parameter names are those of the released checkpoint. Weights are undefined
until `initialise` or a checkpoint fills them.

Shape suffixes: L packed patches, K numbers of a patch, C width, T tokens, P rotary pairs.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from moonvit3d import rows
from moonvit3d.attention import Attend, Segments, attend
from moonvit3d.block import Block
from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import MERGE, PATCH, num_tokens
from moonvit3d.grids import Grids, checked_grids
from moonvit3d.merge import sd2_tpool
from moonvit3d.packing import chunks
from moonvit3d.positions import Grid, Positions, rotary_angles, working_dtype
from moonvit3d.projector import Projector
from moonvit3d.share import Share


def normalise(patches: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert bytes to floats in [-1, 1]: `(px / 255 - 0.5) / 0.5`.

    Args:
        patches: uint8, any shape.
        dtype: of the result; computed in float32, or in float64 for float64.
    """
    pixels = patches.to(working_dtype(dtype))
    return ((pixels / 255 - 0.5) / 0.5).to(dtype)


class PatchEmbed(nn.Module):
    """Maps patches [L, 3, 14, 14] to embeddings [L, C] and adds their positions."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        # A convolution whose stride is its kernel is a linear map of the flattened patch; the
        # module exists for the checkpoint's names and shapes.
        self.proj = nn.Conv2d(3, config.width, kernel_size=PATCH, stride=PATCH)
        self.pos_emb = Positions(config.pos_grid, config.width)

    def forward(self, patches: Tensor, grids: Sequence[Grid], share: Share | None = None) -> Tensor:
        """Embed normalised patches [L + padding, 3, 14, 14]; return [L + padding, C]."""
        flat_LK = rearrange(patches, "l c p q -> l (c p q)")
        weight_CK = rearrange(self.proj.weight, "c k p q -> c (k p q)")
        x_LC = F.linear(flat_LK, weight_CK, self.proj.bias)
        positions_LC = self.pos_emb(grids, share).to(x_LC.dtype)
        return x_LC + rows.pad(positions_LC, len(x_LC) - len(positions_LC))


class Encoder(nn.Module):
    """Stack of blocks and the final norm."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.final_layernorm = nn.LayerNorm(config.width, eps=config.norm_eps)

    def forward(
        self,
        x_LC: Tensor,
        rotary_LP: Tensor,
        segments: Segments,
        attend: Attend = attend,
        some: range | None = None,
    ) -> Tensor:
        """Apply blocks, [L, C] to [L, C]; arguments as for `Block`.

        `some`: range of blocks to apply; None: all. The norm follows if the range includes the last
        block.
        """
        some = range(len(self.blocks)) if some is None else some
        for block in self.blocks[some.start : some.stop]:
            x_LC = block(x_LC, rotary_LP, segments, attend)
        return self.final_layernorm(x_LC) if some.stop == len(self.blocks) else x_LC


class Packed(NamedTuple):
    """Metadata of embedded patches; see `Block`.

    Attributes:
        patches: their number without the padding.
        grids: (t, h, w) of each item, or of this device's part of a single item.
    """

    rotary_LP: Tensor
    segments: Segments
    attend: Attend
    patches: int
    grids: Sequence[Grid]


class MoonViT3D(nn.Module):
    """The tower: maps one pack of items to merged tokens."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbed(config)
        self.encoder = Encoder(config)

    def forward(self, patches: Tensor, grids: Grids, share: Share | None = None) -> Tensor:
        """Encode a pack, or this device's share of one item.

        On CPU the pack is padded with empty rows that attend to themselves (`rows.padding`).

        Args:
            patches: [L, 3, 14, 14], uint8 pixels or normalised floats.
            grids: (t, h, w) of each item, or integers [items, 3]; may be empty.
            share: share of the only item; `patches` are then the share's patches, in its order.

        Returns:
            [T, 4, C] in the parameters' dtype; with a share, only its tokens.

        Raises:
            ValueError: patches and grids do not match.
        """
        grids = checked_grids(patches, grids, share)
        if not grids:
            weight = self.patch_embed.proj.weight
            return weight.new_zeros(0, MERGE * MERGE, self.config.width)
        x_LC, pack = self.embed(patches, grids, share)
        return self.merge(self.encoder(x_LC, pack.rotary_LP, pack.segments, pack.attend), pack)

    def embed(
        self, patches: Tensor, grids: Sequence[Grid], share: Share | None = None
    ) -> tuple[Tensor, Packed]:
        """Return the input of the blocks [L + padding, C], and its metadata."""
        weight = self.patch_embed.proj.weight
        if patches.dtype == torch.uint8:
            patches = normalise(patches, weight.dtype)
        padding = rows.padding(len(patches), weight.device)
        x_LC = self.patch_embed(rows.pad(patches.to(weight.dtype), padding), grids, share)
        cos_LP, sin_LP = rotary_angles(
            grids,
            self.config.head_dim,
            self.config.rope_theta,
            working_dtype(weight.dtype),
            weight.device,
        )
        rotary_LP, held, attend_fn = torch.complex(cos_LP, sin_LP), grids, attend
        if share is not None:
            rotary_LP, held = rotary_LP[torch.from_numpy(share.rows)], [share.strip]
            attend_fn = share.attend
        lengths = [t * h * w for t, h, w in held] + rows.padding_lengths(padding)
        segments = Segments.of(lengths, weight.device)
        return x_LC, Packed(rows.pad(rotary_LP, padding), segments, attend_fn, len(patches), held)

    def merge(self, x_LC: Tensor, pack: Packed) -> Tensor:
        """Return the blocks' output [L + padding, C] as tokens [T, 4, C]."""
        return sd2_tpool(x_LC[: pack.patches], pack.grids)


class VisionEncoder(nn.Module):
    """Tower and projector: maps images and video chunks to the language model's embeddings."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.config = config
        self.vision_tower = MoonViT3D(config)
        self.mm_projector = Projector(config)

    def forward(
        self,
        patches: Tensor,
        grids: Grids,
        max_patches_per_chunk: int | None = None,
    ) -> Tensor:
        """Encode items into language-model embeddings.

        On CPU an item's output has the same bits whatever it is packed with, and so for every
        `max_patches_per_chunk`; on an accelerator the last bits may differ.

        Args:
            patches: [L, 3, 14, 14] of all items in order, uint8 pixels or normalised floats.
            grids: (t, h, w) of each item, 1 <= t <= 4, h and w even, or integers [items, 3]; may be
                empty.
            max_patches_per_chunk: run packs of at most this many patches, one after the other;
                under `no_grad` this bounds the memory. None runs everything at once.

        Returns:
            [T, out_width] in the parameters' dtype, T = sum of h * w / 4.

        Raises:
            ValueError: patches and grids do not match, a pixel is not finite, or an item exceeds
                `max_patches_per_chunk`.
        """
        grids = checked_grids(patches, grids)
        if max_patches_per_chunk is None or not grids:
            return self._encode(patches, grids)
        sizes = [t * h * w for t, h, w in grids]
        runs = chunks(sizes, max_patches_per_chunk)
        packs = patches.split([sum(sizes[run]) for run in runs])
        return torch.cat([self._encode(pack, grids[run]) for pack, run in zip(packs, runs)])

    def forward_share(self, patches: Tensor, share: Share) -> Tensor:
        """Encode this device's share of an item that several devices encode together.

        Args:
            patches: [L, 3, 14, 14] of the share, in its order, uint8 pixels or normalised floats.

        Returns:
            [tokens of the share, out_width] in the parameters' dtype. Gradients cover only the work
            on these tokens and patches; their sum over the devices is the gradient of the whole
            item.
        """
        x_T4C = self.vision_tower(patches, [share.grid], share)
        return self.mm_projector(x_T4C, [len(share.tokens)])

    def _encode(self, patches: Tensor, grids: Sequence[Grid]) -> Tensor:
        return self.mm_projector(self.vision_tower(patches, grids), [num_tokens(*g) for g in grids])


@torch.no_grad()
def initialise(encoder: VisionEncoder, seed: int) -> VisionEncoder:
    """Fill every parameter in place, identically on every rank and in any order of construction.

    Each parameter draws from its own generator, keyed by (seed, name), in float32 on the CPU, so
    device and dtype do not matter either. Biases are 0; norms have weight 1 and bias 0. Linear
    weights are truncated normals with Glorot's std sqrt(2 / (fan_in + fan_out)); q, k and v count
    as three matrices. The std is 0.029 at Kimi's width. In a small config, a fixed std of 0.02
    would make the signal ten times too small. The patch embedding uses 1 / sqrt(fan_in), and the
    position grid `config.pos_init_std`.
    """
    for name, parameter in encoder.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif "norm" in name.rsplit(".", 2)[-2]:
            parameter.fill_(1.0)
        else:
            parameter.copy_(_draw(name, parameter.shape, encoder.config.pos_init_std, seed))
    return encoder


def _draw(name: str, shape: torch.Size, pos_std: float, seed: int) -> Tensor:
    """Return float32 weights of one parameter, a function of its name, shape and the seed only."""
    digest = hashlib.blake2b(f"moonvit3d/{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    if name.endswith("pos_emb.weight"):
        return torch.randn(shape, generator=generator, device="cpu") * pos_std
    fan_in = math.prod(shape[1:])
    if name.endswith("patch_embed.proj.weight"):
        std = fan_in**-0.5
    else:
        fan_out = shape[0] // 3 if name.endswith("wqkv.weight") else shape[0]
        std = math.sqrt(2 / (fan_in + fan_out))
    weight = torch.empty(shape, device="cpu")
    return nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=generator)
