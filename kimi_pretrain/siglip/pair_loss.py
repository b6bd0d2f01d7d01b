"""Sigmoid loss of all images against all texts of the global batch (SigLIP, sections 3.2 and 3.3).

    L = -1/B sum_i sum_j log sigmoid(z_ij (t x_i . y_j + b)),    z_ij = 1 if i = j, else -1

The plan gives each rank any number of pairs, including none. Texts are gathered and images stay on
their rank, so a rank computes the logits [its images, all texts]. The function returns a SUM, and
the caller divides it by the pairs of the global batch, a number that the plan contains. A caption
loss has another divisor: the gradients of both losses add up to g_siglip / pairs + 2 g_caption /
loss tokens.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional as F


def pair_loss(
    images_PC: Tensor,
    texts_PC: Tensor,
    log_scale: Tensor,
    bias: Tensor,
    counts: Sequence[int],
    group: dist.ProcessGroup | None = None,
    places: Tensor | None = None,
) -> Tensor:
    """Return the undivided sum over this rank's images and the texts of all ranks. Collective.

    The backward pass is collective, too, and includes ranks without pairs. Gradients of replicated
    parameters (towers, scale, bias) are this rank's part; the sum over the group is the full
    gradient. The computation uses float32, or float64 for float64 inputs.

    Args:
        images_PC, texts_PC: unit-length embeddings of this rank's pairs, in order; with `places`
            the images may belong to other pairs and have another number.
        log_scale, bias: learned scalars, the same on all ranks.
        counts: number of texts of each rank of the group; the numbers may differ.
        places: for each image the index of its text among the texts of all ranks, concatenated by
            rank, int64 [images]. None: image i belongs to this rank's text i.

    Raises:
        ValueError: the pairs do not match the plan.
    """
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    if len(counts) != ranks:
        raise ValueError(f"pairs of {len(counts)} ranks, in a group of {ranks}")
    rank = dist.get_rank(group) if ranks > 1 else 0
    images = len(texts_PC) if places is None else len(places)
    if len(images_PC) != images or len(texts_PC) != counts[rank]:
        raise ValueError(
            f"rank {rank} has {len(images_PC)} images and {len(texts_PC)} texts: the plan says "
            f"{counts[rank]} pairs"
        )
    wide = torch.promote_types(images_PC.dtype, torch.float32)
    images_PC, texts_PC = images_PC.to(wide), texts_PC.to(wide)
    texts_BC = texts_PC
    if len(counts) > 1:
        anchor = texts_PC.new_zeros((), requires_grad=True)
        texts_BC = _Gather.apply(texts_PC, anchor, list(counts), rank, group)
    with torch.autocast(images_PC.device.type, enabled=False):
        cosines_PB = images_PC @ texts_BC.T
    z_PB = log_scale.to(wide).exp() * cosines_PB + bias.to(wide)
    sign_PB = torch.full_like(z_PB, -1.0)
    mine = torch.arange(len(images_PC), device=z_PB.device)
    sign_PB[mine, mine + sum(counts[:rank]) if places is None else places] = 1.0
    return -F.logsigmoid(sign_PB * z_PB).sum()


class _Gather(torch.autograd.Function):
    """Gathers the texts of all ranks in rank order; sums the gradient of a text over all ranks.

    `anchor` is a tensor that needs a gradient on every rank. Without it, a rank whose texts need no
    gradient would skip the backward pass, and the others would wait for it.
    """

    @staticmethod
    def forward(
        ctx: Any, texts: Tensor, anchor: Tensor, counts: list[int], rank: int, group: Any
    ) -> Tensor:
        ctx.counts, ctx.rank, ctx.group = counts, rank, group
        padded = texts.new_zeros(max(counts), texts.shape[1])
        padded[: len(texts)] = texts
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        mine = total.split(ctx.counts)[ctx.rank]
        return (mine if ctx.needs_input_grad[0] else None), None, None, None, None
