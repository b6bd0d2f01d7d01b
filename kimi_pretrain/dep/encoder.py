"""Phases 2 and 6: the vision encoder's forward without a graph, and its recompute with backward.

Both passes run the same items in the same chunks through the same kernels, so the recomputed
outputs equal the embeddings that the backbone has seen. Peak memory is one chunk's activations
(K2.5 report, section 4.5.1: only the final outputs are kept). If memory allows, further chunks keep
their activations and are not recomputed.
"""

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from kimi_pretrain.dep import sharded
from kimi_pretrain.dep.memory_limit import cut, kept_chunks
from kimi_pretrain.dep.reduce import GradientSum
from kimi_pretrain.dep.vision_plan import Shares
from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import num_tokens
from moonvit3d.memory import activation_bytes
from moonvit3d.model import VisionEncoder, initialise

Grid = tuple[int, int, int]
Pixels = Mapping[int, NDArray[np.uint8]]


class DecoupledEncoder:
    """The encoder, its gradient buffer, and the two passes of a step.

    Gradients accumulate over chunks in one flat buffer, fp32 (fp64 for fp64 parameters), as
    undivided sums over tokens. On CPU the result of an item is bit-identical in every chunk.

    Args:
        budget: most patches of a chunk.
        frozen: parts that are not trained: "vision_tower", "projector".
        blocks: block size -> process group of this rank's block of that size, whose ranks share
            large items.
        check_recompute: compare a hash of every recomputed output with that of the forward pass.
    """

    def __init__(
        self,
        config: MoonViTConfig,
        budget: int,
        seed: int,
        dtype: torch.dtype,
        device: torch.device,
        *,
        frozen: Sequence[str] = (),
        blocks: Mapping[int, dist.ProcessGroup] | None = None,
        check_recompute: bool = False,
    ):
        self.config, self.budget, self.dtype = config, budget, dtype
        self.blocks, self.check_recompute = dict(blocks or {}), check_recompute
        self.module = self._build(config, seed)
        self.module.to(device=device, dtype=dtype)
        self.module.vision_tower.requires_grad_("vision_tower" not in frozen)
        self.module.mm_projector.requires_grad_("projector" not in frozen)
        self.sums = GradientSum(self.trained(), dtype, device)
        self.device = device

    @property
    def trainable(self) -> bool:
        """True if any part is trained."""
        return bool(self.sums.views)

    @property
    def tower_is_trained(self) -> bool:
        """True if gradients go through the tower; if not, its outputs are kept instead."""
        return next(self.module.vision_tower.parameters()).requires_grad

    def _build(self, config: MoonViTConfig, seed: int) -> VisionEncoder:
        """Return the module with its initial weights."""
        return initialise(VisionEncoder(config), seed)

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters by checkpoint name."""
        return {n: p for n, p in self.module.named_parameters() if p.requires_grad}

    def begin(
        self, shares: Shares, grids: NDArray[np.int64], pixels: Pixels, room_bytes: int = 0
    ) -> "EncoderPass":
        """Cut a step's work on this rank into chunks.

        Args:
            shares: shares that this rank encodes, in order; shared items come first.
            grids: patch grids (frames, height, width) of all items of the step, [items, 3].
            pixels: item -> uint8 [patches, 3, 14, 14], for items that this rank has fetched.
            room_bytes: bytes for activations, including the largest chunk's; 0 keeps none.
        """
        mine = grids[shares.item]
        table: list[Grid] = [(int(t), int(h), int(w)) for t, h, w in mine]
        cuts = cut(shares, [t * h * w for t, h, w in table], self.budget)
        activations = activation_bytes(mine, self.config, self.dtype.itemsize) / shares.parts
        sizes = [int(activations[one].sum()) for one in cuts]
        # Each rank only knows its own memory, but either all ranks of a shared item recompute it or
        # none, or some would wait in an all-to-all. So the graph of a shared item is never kept.
        shared = int((shares.parts > 1).sum())
        kept = kept_chunks(sizes, room_bytes if self.trainable else 0, shared)
        chunks = []
        for one, keep in zip(cuts, kept, strict=True):
            items, parts = shares.item[one].tolist(), int(shares.parts[one.start])
            chunks.append(_Chunk(items, table[one], parts, keep))
        return EncoderPass(self, chunks, pixels)

    def encode(self, pixels: list[NDArray[np.uint8]], grids: list[Grid]) -> Tensor:
        """Encode whole items inside the graph, in chunks, for the co-located baseline."""
        return self.module(self.tensor(pixels), grids, self.budget)

    def tensor(self, pixels: Sequence[NDArray[np.uint8]]) -> Tensor:
        """Return the patches of several items as one tensor on the device, uint8."""
        return torch.from_numpy(np.concatenate(pixels)).to(self.device)


@dataclass
class _Chunk:
    """Whole items, or this rank's part of a shared item, and state kept until the backward pass."""

    items: list[int]
    grids: list[Grid]
    parts: int
    keep: bool
    pixels: Tensor | None = None
    features: Tensor | None = None
    output: Tensor | None = None
    tokens: int = 0
    hash: int = 0


@dataclass
class EncoderPass:
    """Encoder work of one step on this rank: `forward`, then `backward`, chunk by chunk."""

    encoder: DecoupledEncoder
    chunks: list[_Chunk]
    pixels: Pixels

    @property
    def kept_patches(self) -> int:
        """Patches of items whose activations are kept from the forward to the backward pass."""
        return sum(t * h * w for chunk in self.chunks if chunk.keep for t, h, w in chunk.grids)

    def forward(self) -> Tensor:
        """Encode all chunks, keeping graphs where memory allows and else only outputs (phase 2).

        Returns:
            [tokens, hidden]: embeddings of the shares, concatenated.
        """
        like = {"dtype": self.encoder.dtype, "device": self.encoder.device}
        outputs = [torch.empty(0, self.encoder.config.out_width, **like)]
        for chunk in self.chunks:
            with torch.set_grad_enabled(chunk.keep):
                output = self._encode(chunk)
            chunk.output, chunk.tokens = (output if chunk.keep else None), len(output)
            if self.encoder.check_recompute:
                chunk.hash = hash_of(output)
            outputs.append(output.detach())
        return torch.cat(outputs)

    def backward(self, gradients: Tensor) -> None:
        """Backpropagate through each chunk, recomputed unless its graph was kept (phase 6).

        The sum over all ranks starts during the last chunk; see `GradientSum.finish`.

        Args:
            gradients: [tokens, hidden], gradient of the loss with respect to the forward's output.
        """
        start = 0
        for number, chunk in enumerate(self.chunks):
            output = self._encode(chunk) if chunk.output is None else chunk.output
            if self.encoder.check_recompute:
                self._check(chunk, output)
            # Ranks that share an item communicate in every layer. The sum starts after that, or
            # ranks could deadlock between two groups.
            last = number == len(self.chunks) - 1 and chunk.parts == 1
            with self.encoder.sums.last() if last else nullcontext():
                torch.autograd.backward(output, gradients[start : start + chunk.tokens])
            start += chunk.tokens
            chunk.output = chunk.features = chunk.pixels = None
        assert start == len(gradients), (start, gradients.shape)

    def _encode(self, chunk: _Chunk) -> Tensor:
        module = self.encoder.module
        if chunk.parts > 1:
            group, grid = self.encoder.blocks[chunk.parts], chunk.grids[0]
            if chunk.pixels is None:
                mine = self.pixels.get(chunk.items[0])
                chunk.pixels = sharded.scatter_patches(mine, grid, group, self.encoder.device)
            return sharded.encode(module, chunk.pixels, grid, group)
        if self.encoder.tower_is_trained or not self.encoder.trainable:
            return module(self._packed(chunk), chunk.grids)
        if chunk.features is None:  # a frozen tower's output is final and smaller than activations
            with torch.no_grad():
                chunk.features = module.vision_tower(self._packed(chunk), chunk.grids)
        return module.mm_projector(chunk.features, [num_tokens(*grid) for grid in chunk.grids])

    def _packed(self, chunk: _Chunk) -> Tensor:
        return self.encoder.tensor([self.pixels[item] for item in chunk.items])

    def _check(self, chunk: _Chunk, output: Tensor) -> None:
        if hash_of(output) != chunk.hash:
            raise RuntimeError(
                f"the recomputed embeddings of items {chunk.items} differ from those of the "
                "forward pass, which the backbone has seen: a kernel whose result is not "
                "repeatable, or weights that were changed inside the step"
            )


def hash_of(x: Tensor) -> int:
    """Return a 64-bit sum of a tensor's bits weighted by position: cheap, not cryptographic."""
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize]
    bits = x.detach().contiguous().view(kind).flatten().to(torch.int64)
    weights = torch.arange(1, 2 * len(bits) + 1, 2, device=x.device)
    return int((bits * weights).sum())
