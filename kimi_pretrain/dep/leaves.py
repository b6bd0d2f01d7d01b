"""Attaches received embeddings to microbatches as leaf tensors, and collects their gradients.

Each microbatch with media has its own leaf. With a single leaf for all, every microbatch would cost
a gradient of full size.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kimi_pretrain.dep.vision_plan import Spans, runs
from kimi_pretrain.engine.microbatch import Microbatch


def attach_leaves(
    microbatches: Sequence[Microbatch],
    embeddings: Tensor,
    received: Spans,
    *,
    requires_grad: bool = True,
    offload: bool = False,
) -> list[Tensor | None]:
    """Attach its vision embeddings to each microbatch as a fresh leaf.

    Args:
        embeddings: received by this first-stage rank, in the order of the spans, [tokens, hidden].
        received: destination of each token.
        requires_grad: False if no part of the encoder is trained.
        offload: keep leaves and their gradients in host memory until their microbatch runs.

    Returns:
        for each microbatch the rows of `embeddings` in its leaf, int64, or None without media.
        `leaf_gradients` uses them to restore the received order.
    """
    microbatch = np.repeat(received.microbatch, received.count)
    place = runs(received.position, received.count)
    order = np.argsort(microbatch, kind="stable")
    ends = np.searchsorted(microbatch[order], np.arange(len(microbatches) + 1))
    taken: list[Tensor | None] = []
    for number, one in enumerate(microbatches):
        rows = order[ends[number] : ends[number + 1]]
        if not len(rows):
            taken.append(None)
            continue
        source = torch.from_numpy(rows).to(embeddings.device)
        leaf = embeddings.index_select(0, source)
        one.leaf = (_to_host(leaf) if offload else leaf).requires_grad_(requires_grad)
        one.leaf_positions = torch.from_numpy(place[rows]).to(embeddings.device)
        taken.append(source)
    return taken


def leaf_gradients(
    microbatches: Sequence[Microbatch], taken: Sequence[Tensor | None], zeros: Tensor
) -> Tensor:
    """Return the gradients of the received embeddings, in received order; frees the leaves.

    Args:
        taken: result of `attach_leaves`; empty outside the first stage.
        zeros: tensor like the received embeddings; filled and returned.
    """
    for microbatch, source in zip(microbatches, taken):
        if source is not None:
            assert microbatch.leaf is not None
            assert microbatch.leaf.grad is not None
            zeros.index_copy_(0, source, microbatch.leaf.grad.to(zeros))
            microbatch.leaf = None
    return zeros


def _to_host(leaf: Tensor) -> Tensor:
    """Copy to pinned host memory, so that the copy back can overlap with computation."""
    pin = leaf.device.type == "cuda"
    host = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=pin)
    return host.copy_(leaf)
