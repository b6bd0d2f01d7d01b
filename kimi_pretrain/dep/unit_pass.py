"""The encoder's work on a few items, in pieces: it can stop between its blocks, both ways.

A piece is a run of blocks; the first one embeds the patches, too, and the last one merges and
projects. Forward without a graph only the hidden state lies between two pieces. What is recomputed
is recomputed piece by piece with a graph that ends at each border, where the backward pass puts the
gradient on. The kernels and their order are those of a pass that does not stop, so the bits are.
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
    """Encodes whole items in one pack, and goes backward through it.

    Args:
        encoder: whose weights are used, and whose gradient buffer is added to.
        pixels: of each item, uint8 [patches, 3, 14, 14].
        grids: (frames, height, width) in patches, of each.
        pieces: of the forward pass, and of what comes later.
        keep: the graph is kept from the forward pass on, and nothing is computed again.
    """

    def __init__(
        self,
        encoder: DecoupledEncoder,
        pixels: Sequence[NDArray[np.uint8]],
        grids: Sequence[Grid],
        pieces: int,
        *,
        keep: bool,
    ):
        self.encoder, self.grids, self.pieces, self.keep = encoder, grids, pieces, keep
        self._pixels: Sequence[NDArray[np.uint8]] | None = pixels
        self._features: Tensor | None = None  # of a frozen tower: final, and smaller
        self._pack: Packed | None = None
        self._x: Tensor | None = None  # what the last piece left
        self._graph: list[tuple[Tensor | None, Tensor]] = []  # of each piece: input, output
        self._gradient: Tensor | None = None
        self._hash = 0

    @property
    def later(self) -> int:
        """Pieces behind the forward pass: those of the recompute, if there is one, come first."""
        return self.pieces * (1 if self.keep else 2)

    def forward(self, piece: int) -> Tensor | None:
        """Do the next piece of the forward pass; returns the output [tokens, hidden] with the last.

        Where nothing is trained, nothing is held after it.
        """
        with torch.set_grad_enabled(self.keep and self.encoder.trainable):
            self._piece(piece)
        if piece < self.pieces - 1:
            return None
        assert self._x is not None
        output, self._x, self._pack = self._x, None, None
        if self.encoder.check_recompute:
            self._hash = hash_of(output)
        if not self.encoder.trainable:
            self._pixels = None
        return output

    def needs_gradient(self, piece: int) -> bool:
        """Whether a piece behind the forward pass is the first to need the output's gradient."""
        return piece == self.later - self.pieces

    def backward(self, piece: int, gradient: Tensor | None = None) -> None:
        """Do the next piece behind the forward pass: of the recompute, or of the backward pass.

        Args:
            gradient: [tokens, hidden], where `needs_gradient` says so.
        """
        if piece < self.later - self.pieces:
            with torch.enable_grad():
                self._piece(piece)
            if piece == self.pieces - 1:
                self._recomputed()
            return
        if gradient is not None:
            self._gradient = gradient
        x, y = self._graph.pop()
        if y.requires_grad:  # nothing is before a trained projector
            torch.autograd.backward(y, self._gradient)
        self._gradient = None if x is None else x.grad
        if not self._graph:
            self._pixels = self._features = None

    def _piece(self, number: int) -> None:
        """Run blocks on what the piece before left; with a graph, one that begins here."""
        x = None if self._x is None else self._x.detach()
        if x is not None and torch.is_grad_enabled():
            x.requires_grad_(self.encoder.tower_is_trained)
        y = self._blocks(number, x)
        if torch.is_grad_enabled():
            self._graph.append((x, y))
        self._x = y.detach()

    def _blocks(self, number: int, x: Tensor | None) -> Tensor:
        module, last = self.encoder.module, number == self.pieces - 1
        frozen = self.encoder.trainable and not self.encoder.tower_is_trained
        if frozen and self._features is not None:  # computed again: the projector alone
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

    def _recomputed(self) -> None:
        """The last piece of the recompute is done: its output is known from the forward pass."""
        output, self._x, self._pack = self._x, None, None
        assert output is not None
        if self.encoder.check_recompute and hash_of(output) != self._hash:
            raise RuntimeError(
                "the recomputed embeddings of items differ from those of the forward pass, which "
                "the backbone has seen: a kernel whose result is not repeatable, or weights that "
                "were changed inside the step"
            )
