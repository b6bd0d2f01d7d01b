"""DEP's encoder with SigLIP's heads: a rank pools the items that it encodes, where they form pairs.

    phase 2   the tower's patches of a pair -> pooling head -> embedding, kept
    phase 6   text tower without a graph -> loss of all pairs -> gradients of embeddings;
              texts again with graph, chunk by chunk; then the encoder's chunks, whose backward
              pass begins at both ends: at the tokens, from the backbone, and at the embeddings

Gradients are sums that one divisor, the loss tokens T, ends: so those of the caption loss are
multiplied by its weight, those of the pairs by T / B, and together they are
g_siglip / B + weight g_caption / T. The language model is frozen: the weight reaches the encoder
alone.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_pretrain.dep.encoder import DecoupledEncoder, EncoderPass, Pixels, hash_of
from kimi_pretrain.dep.vision_plan import Shares
from kimi_pretrain.siglip.config import SiglipConfig
from kimi_pretrain.siglip.heads import HeadSizes, SiglipHeads, initialise_heads
from kimi_pretrain.siglip.pair_loss import pair_loss
from kimi_pretrain.siglip.pairs import Pairs
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder


class PairEncoder(DecoupledEncoder):
    """`DecoupledEncoder` whose module has the heads, as `siglip`; whole items, a trained tower.

    Attributes:
        pairs: of the step that is about to be trained; None: the objective has no part in it.
    """

    def __init__(self, config: MoonViTConfig, *args: Any, siglip: SiglipConfig, **kwargs: Any):
        self.siglip = siglip
        self.pairs: Pairs | None = None
        super().__init__(config, *args, **kwargs)
        self._features: Tensor | None = None
        # The tower gives its patches away merged; the head wants them as SigLIP's does.
        self.module.vision_tower.encoder.register_forward_hook(self._keep)

    @property
    def heads(self) -> SiglipHeads:
        """Pooling head, text tower, scale and bias."""
        return self.module.get_submodule("siglip")  # pyright: ignore[reportReturnType]

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters that are trained; the heads first, whose gradients leave last.

        The tower's leave during the last chunk's backward pass, which those of the texts are not
        in.
        """
        found = super().trained()
        ours = {name: one for name, one in found.items() if name.startswith("siglip.")}
        return ours | found

    def begin(
        self, shares: Shares, grids: NDArray[np.int64], pixels: Pixels, room_bytes: int = 0
    ) -> EncoderPass:
        """See `DecoupledEncoder`; with pairs if there are any."""
        plain = super().begin(shares, grids, pixels, room_bytes)
        return PairPass(self, plain.chunks, pixels) if self.pairs is not None else plain

    def take_features(self) -> Tensor:
        """Return the patches of the chunk that was just encoded, [patches and padding, width]."""
        found, self._features = self._features, None
        assert found is not None
        return found

    def _keep(self, module: Any, args: Any, output: Tensor) -> None:
        self._features = output if self.pairs is not None else None

    def _build(self, config: MoonViTConfig, seed: int) -> VisionEncoder:
        module = super()._build(config, seed)
        heads = SiglipHeads(HeadSizes.of(self.siglip, config.width))
        initialise_heads(heads, seed)
        module.add_module("siglip", heads)
        return module


class PairPass(EncoderPass):
    """`EncoderPass` of a step with pairs. `backward` is collective: every rank calls it."""

    def __init__(self, encoder: PairEncoder, chunks: Any, pixels: Pixels):
        super().__init__(encoder, chunks, pixels)
        self._own = encoder
        assert encoder.pairs is not None
        self._pairs, self._late = encoder.pairs, dict[int, _Late]()
        self._known = set(self._pairs.items.tolist())

    def backward(self, gradients: Tensor) -> None:
        """Compute the loss of all pairs and its gradients, then backpropagate through each chunk.

        Args:
            gradients: of the caption loss, [tokens, hidden].
        """
        self._contrast()
        super().backward(gradients * self._own.siglip.caption_weight)

    def _encode(self, chunk: Any) -> Tensor:
        output = super()._encode(chunk)
        features = self._own.take_features()
        places = self._places(chunk.items)
        if not len(places):
            return output
        lengths = [t * h * w for t, h, w in chunk.grids]
        parts = features[: sum(lengths)].split(lengths)
        mine = [place for place, item in enumerate(chunk.items) if item in self._known]
        embedded = self._own.heads.images(
            torch.cat([parts[place] for place in mine]), [lengths[place] for place in mine]
        )
        late = self._late.setdefault(chunk.items[0], _Late(embedded.detach()))
        if self._own.check_recompute and hash_of(embedded) != hash_of(late.embedded):
            raise RuntimeError(f"the recomputed embeddings of pairs {chunk.items} differ")
        return _Joined.apply(output, embedded, late) if torch.is_grad_enabled() else output

    def _places(self, items: Sequence[int]) -> NDArray[np.int64]:
        """Return which pairs of the step some items are, in their order."""
        ours = [item for item in items if item in self._known]
        return np.searchsorted(self._pairs.items, ours)

    def _contrast(self) -> None:
        """The loss of this rank's images with all texts, and the gradients of what it holds."""
        pairs, heads = self._pairs, self._own.heads
        if not len(pairs.items):
            return
        chunks = [chunk for chunk in self.chunks if len(self._places(chunk.items))]
        places = [torch.from_numpy(self._places(chunk.items)) for chunk in chunks]
        width = heads.sizes.width
        wide = torch.promote_types(self._own.dtype, torch.float32)
        none = torch.empty(0, width, dtype=wide, device=self._own.device)
        waiting = [self._late[chunk.items[0]] for chunk in chunks]
        images = torch.cat([none, *(late.embedded for late in waiting)]).requires_grad_()
        parts = pairs.ids.split(self._own.siglip.texts_per_chunk) if len(pairs.ids) else ()
        with torch.no_grad():
            texts = torch.cat([none, *(heads.texts(part) for part in parts)]).requires_grad_()
        where = torch.cat([torch.empty(0, dtype=torch.int64), *places]).to(images.device)
        loss = pair_loss(
            images, texts, heads.logit_scale, heads.logit_bias, pairs.counts, places=where
        )
        (loss * pairs.factor).backward()
        pairs.loss = loss.detach()
        assert images.grad is not None
        assert texts.grad is not None
        for late, gradient in zip(waiting, images.grad.split([len(one) for one in places])):
            late.gradient = gradient
        for part, gradient in zip(parts, texts.grad.split(self._own.siglip.texts_per_chunk)):
            torch.autograd.backward(heads.texts(part), gradient)


class _Late:
    """Embeddings of a chunk's pairs, and their gradient, which is known after the forward pass."""

    def __init__(self, embedded: Tensor):
        self.embedded, self.gradient = embedded, torch.zeros(0)


class _Joined(torch.autograd.Function):
    """The chunk's output as it is; its backward pass begins at the embeddings as well."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, embedded: Tensor, late: _Late) -> Tensor:
        ctx.late = late
        return output.view_as(output)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.late.gradient, None
