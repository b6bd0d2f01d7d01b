"""QK-Clip: shrink the query and key weights of heads whose attention logits grew too large.

After the optimizer step, a head whose largest logit S of that step exceeded tau gets gamma = tau/S
(Kimi K2, arXiv:2507.20534, 2.1 and appendix D). A logit is q_nope . k_nope + q_rope . k_rope, and
k_rope is shared by all heads, so the content rows of query and key take sqrt(gamma) each, the
rotary rows of the query take gamma, and shared k_rope and values stay: every logit of the head
becomes gamma times what it was, no logit of another head changes.

Maxima of an unhealthy step never reach the weights: -inf (a head that saw no token), +inf and NaN
all give a factor of exactly 1.
"""

import math
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor


def table_of_maxima(found: Mapping[int, Tensor], layers: int, heads: int) -> Tensor:
    """Lay a rank's maxima out as one table, so that all layers travel in one reduction.

    Args:
        found: layer (from 0) -> largest logit of each head [heads], -inf for a head that saw no
            token here.
        layers, heads: of the whole model.

    Returns:
        [layers, heads] fp64 on the maxima's device; -inf for layers of other ranks. NaN becomes
        +inf: both say that there is no factor, and a reduction to the maximum may drop a NaN on
        one kind of device and keep it on another.
    """
    device = next((maxima.device for maxima in found.values()), torch.device("cpu"))
    absent = torch.full((heads,), -math.inf, dtype=torch.float64, device=device)
    table = torch.stack([found.get(layer, absent).double() for layer in range(layers)])
    return table.masked_fill(table.isnan(), math.inf)


def factors(max_logits: Tensor, threshold: float) -> Tensor:
    """Gamma of each head.

    Args:
        max_logits: [heads] largest softmax input of each head over all micro-batches and ranks, as
            it enters the softmax (scaled, signed). -inf says that the head saw no token.

    Returns:
        [heads] tau / S where S > tau, and exactly 1 elsewhere. A head with a maximum of +inf or NaN
        is left alone: there is no factor to derive, and the step's loss is lost anyway.
    """
    over = (max_logits > threshold) & torch.isfinite(max_logits)
    # The other heads divide by 1, not by their maximum: a ratio of a zero or negative maximum is
    # what turned into NaN elsewhere (Megatron-LM#7517).
    return threshold / torch.where(over, max_logits, threshold)


@torch.no_grad()
def scale_heads_(
    weight: Tensor, content: Tensor, other_rows: int = 0, other: Tensor | None = None
) -> None:
    """Scale the rows of each head in place.

    Args:
        weight: [heads * rows, in], any floating dtype.
        content: [heads] factors of each head's rows but the last `other_rows`.
        other: [heads] their factors; None leaves them as they are.

    Raises:
        ValueError: the heads do not divide the rows, or have fewer than `other_rows`.
    """
    heads = len(content)
    rows = weight.shape[0] // heads
    if weight.shape[0] != heads * rows or other_rows > rows:
        raise ValueError(
            f"qk-clip: weight {tuple(weight.shape)} is not {heads} heads of equal size, "
            f"{other_rows} rows at least"
        )
    head = rearrange(weight, "(n r) d -> n r d", n=heads)  # a view: splitting an axis never copies
    head[:, : rows - other_rows].mul_(content[:, None, None])
    if other is not None:
        head[:, rows - other_rows :].mul_(other[:, None, None])
