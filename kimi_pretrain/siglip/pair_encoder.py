"""DEP's encoder with SigLIP's heads: a rank pools the items it encodes, if they belong to pairs.

    phase 2   the tower's patches of a pair -> pooling head -> embedding, kept
    phase 6   text tower without a graph -> loss over all pairs -> gradients of embeddings; texts
              again with graph, chunk by chunk; then the encoder's chunks, whose backward pass
              starts from the tokens (backbone gradients) and from the embeddings (pair gradients)

Gradients are sums that phase 7 divides by the loss tokens T. So caption gradients are multiplied by
their weight and pair gradients by T / B, which gives g_siglip / B + weight g_caption / T after the
division. The language model is frozen, so the weight only affects the encoder.
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
    """`DecoupledEncoder` with the heads as submodule `siglip`, for whole items and a trained tower.

    Attributes:
        pairs: pairs of the next step to train; None: the step does not use the pair objective.
    """

    def __init__(self, config: MoonViTConfig, *args: Any, siglip: SiglipConfig, **kwargs: Any):
        self.siglip = siglip
        self.pairs: Pairs | None = None
        super().__init__(config, *args, **kwargs)
        self._features: Tensor | None = None
        # The tower returns merged patches, but the pooling head needs them unmerged, as in SigLIP.
        self.module.vision_tower.encoder.register_forward_hook(self._keep)

    @property
    def heads(self) -> SiglipHeads:
        """Pooling head, text tower, scale and bias."""
        return self.module.get_submodule("siglip")  # pyright: ignore[reportReturnType]

    def trained(self) -> dict[str, torch.nn.Parameter]:
        """Return the trained parameters; the heads come first, so their gradients are sent last.

        The tower's gradients are sent during the last chunk's backward pass, which does not include
        the texts.
        """
        found = super().trained()
        ours = {name: one for name, one in found.items() if name.startswith("siglip.")}
        return ours | found

    def begin(
        self, shares: Shares, grids: NDArray[np.int64], pixels: Pixels, room_bytes: int = 0
    ) -> EncoderPass:
        """Begin a pass as in `DecoupledEncoder`, with pairs if the step has any."""
        plain = super().begin(shares, grids, pixels, room_bytes)
        return PairPass(self, plain.chunks, pixels) if self.pairs is not None else plain

    def take_features(self) -> Tensor:
        """Return the patches of the latest encoded chunk, [patches and padding, width]."""
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
    """`EncoderPass` of a step with pairs. `backward` is collective and must run on every rank."""

    def __init__(self, encoder: PairEncoder, chunks: Any, pixels: Pixels):
        super().__init__(encoder, chunks, pixels)
        self._own = encoder
        assert encoder.pairs is not None
        self._pairs, self._late = encoder.pairs, dict[int, _Late]()
        self._known = set(self._pairs.items.tolist())

    def backward(self, gradients: Tensor) -> None:
        """Compute the loss over all pairs and its gradients, then backpropagate each chunk.

        Args:
            gradients: gradients of the caption loss, [tokens, hidden].
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
        """Return the indices, among the pairs of the step, of the items that form pairs."""
        ours = [item for item in items if item in self._known]
        return np.searchsorted(self._pairs.items, ours)

    def _contrast(self) -> None:
        """Compute the loss of this rank's images against all texts, and this rank's gradients."""
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
    """Embeddings of a chunk's pairs, and their gradient, set after the forward pass."""

    def __init__(self, embedded: Tensor):
        self.embedded, self.gradient = embedded, torch.zeros(0)


class _Joined(torch.autograd.Function):
    """Identity of the chunk's output whose backward also starts from the embeddings."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, embedded: Tensor, late: _Late) -> Tensor:
        ctx.late = late
        return output.view_as(output)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        return grads[0], ctx.late.gradient, None
