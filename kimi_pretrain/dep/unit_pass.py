"""Runs the encoder on a few items in pieces; it can stop between blocks, forward and backward.

A piece is a range of blocks. The first piece also embeds the patches, and the last one merges and
projects. The forward pass saves the input of each piece. The backward pass recomputes a piece from
this input, with a graph that ends at the border of the piece, and runs its backward immediately, so
that only one piece's activations are in memory. The backward pass begins with the last pieces,
whose graphs may be kept from the forward pass. Kernels and their order equal those of an
uninterrupted pass, so results are bit-identical.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_pretrain.dep.encoder import DecoupledEncoder, hash_of
from moonvit3d.geometry import num_tokens
from moonvit3d.model import Packed

Grid = tuple[int, int, int]


class UnitPass:
    """Encodes whole items in one pack, and runs the backward pass through it.

    Args:
        encoder: encoder whose weights are used and whose gradient buffer accumulates.
        pixels: pixels of each item, uint8 [patches, 3, 14, 14].
        grids: (frames, height, width) of each item, in patches.
        pieces: number of pieces of the forward pass, and of the backward pass.
        kept: number of last pieces whose graph is kept from the forward pass, without recompute.
    """

    def __init__(
        self,
        encoder: DecoupledEncoder,
        pixels: Sequence[NDArray[np.uint8]],
        grids: Sequence[Grid],
        pieces: int,
        *,
        kept: int,
    ):
        self.encoder, self.grids, self.pieces, self.kept = encoder, grids, pieces, kept
        self._pixels: Sequence[NDArray[np.uint8]] | None = pixels
        self._features: Tensor | None = None  # output of a frozen tower, smaller than activations
        self._pack: Packed | None = None
        self._x: Tensor | None = None  # output of the latest piece
        self._inputs: list[Tensor | None] = []  # inputs of the pieces to recompute
        self._hashes: list[int] = []  # hashes of their outputs
        self._graph: list[tuple[Tensor | None, Tensor]] = []  # (input, output) of pieces
        self._gradient: Tensor | None = None

    def forward(self, piece: int) -> Tensor | None:
        """Run the next piece of the forward pass; the last one returns the output [tokens, hidden].

        If nothing is trained, no state is kept after the last piece.
        """
        trainable, last = self.encoder.trainable, piece == self.pieces - 1
        keep, blocks = trainable and piece >= self.pieces - self.kept, self.encoder.tower_is_trained
        if trainable and not keep:
            self._inputs.append(self._x if blocks else None)
        with torch.set_grad_enabled(keep):
            self._piece(piece, self._x)
        assert self._x is not None
        if trainable and not keep and self.encoder.check_recompute and (blocks or last):
            self._hashes.append(hash_of(self._x))
        if not last:
            return None
        output, self._x = self._x, None
        if not trainable:
            self._pixels = self._pack = None
        return output

    def again(self, piece: int) -> None:
        """Recompute the piece whose backward comes next, unless its graph was kept.

        Args:
            piece: index in the backward pass.
        """
        number = self.pieces - 1 - piece
        if number >= self.pieces - self.kept:
            return
        with torch.enable_grad():
            self._piece(number, self._inputs.pop())
        output, self._x = self._x, None
        assert output is not None
        if self._hashes and hash_of(output) != self._hashes.pop():
            raise RuntimeError(
                "the recomputed embeddings of items differ from those of the forward pass, which "
                "the backbone has seen: a kernel whose result is not repeatable, or weights that "
                "were changed inside the step"
            )

    def backward(self, gradient: Tensor | None = None) -> None:
        """Run the backward of the next piece.

        Args:
            gradient: gradient of the output, [tokens, hidden], for the first piece.
        """
        if gradient is not None:
            self._gradient = gradient
        x, y = self._graph.pop()
        if y.requires_grad:  # the pieces before a trained projector have no gradient
            torch.autograd.backward(y, self._gradient)
        self._gradient = None if x is None else x.grad
        if not self._graph and not self._inputs:
            self._pixels = self._features = self._pack = None

    def _piece(self, number: int, x: Tensor | None) -> None:
        """Run blocks on their input; if gradients are enabled, record a graph that begins here."""
        x = None if x is None else x.detach()
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_(self.encoder.tower_is_trained)
        y = self._blocks(number, x)
        if torch.is_grad_enabled():
            self._graph.append((x, y))
        self._x = y.detach()

    def _blocks(self, number: int, x: Tensor | None) -> Tensor:
        module, last = self.encoder.module, number == self.pieces - 1
        frozen = self.encoder.trainable and not self.encoder.tower_is_trained
        if frozen and self._features is not None:  # recompute only the projector
            return self._project(self._features) if last else self._features
        with torch.set_grad_enabled(torch.is_grad_enabled() and not frozen):
            tower = module.vision_tower
            if x is None:
                assert self._pixels is not None
                x, self._pack = tower.embed(self.encoder.tensor(self._pixels), self.grids)
            assert self._pack is not None
            rotary, segments, attend = self._pack[:3]
            y: Tensor = tower.encoder(x, rotary, segments, attend, self._range(number))
            if not last:
                return y
            features = tower.merge(y, self._pack)
        if frozen:
            self._features, self._pixels = features, None
        return self._project(features)

    def _range(self, number: int) -> range:
        depth = self.encoder.config.depth
        return range(number * depth // self.pieces, (number + 1) * depth // self.pieces)

    def _project(self, features: Tensor) -> Tensor:
        tokens = [num_tokens(*grid) for grid in self.grids]
        return self.encoder.module.mm_projector(features, tokens)
