"""QK-Clip: scales down the query and key weights of heads with too large attention logits.

After the optimizer step, a head whose largest logit S in that step exceeded tau gets the factor
gamma = tau/S (Kimi K2, arXiv:2507.20534, 2.1 and appendix D). A logit is q_nope . k_nope +
q_rope . k_rope, and all heads share k_rope. The content rows of query and key are therefore scaled
by sqrt(gamma) each and the rotary rows of the query by gamma, while the shared k_rope and the
values do not change. This multiplies every logit of the head by gamma and changes no other head.

Maxima of an unhealthy step never change the weights: -inf (a head that saw no token), +inf and NaN
all give a factor of exactly 1.
"""

import math
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor


def table_of_maxima(found: Mapping[int, Tensor], layers: int, heads: int) -> Tensor:
    """Return a rank's maxima as one table, so that one reduction covers all layers.

    Args:
        found: layer (from 0) -> largest logit of each head [heads], -inf for a head that saw no
            token on this rank.
        layers, heads: numbers of layers and heads of the whole model.

    Returns:
        [layers, heads] fp64 on the maxima's device; -inf for layers of other ranks. NaN becomes
        +inf: both mean that there is no factor, but a MAX reduction may drop a NaN on some devices.
    """
    device = next((maxima.device for maxima in found.values()), torch.device("cpu"))
    absent = torch.full((heads,), -math.inf, dtype=torch.float64, device=device)
    table = torch.stack([found.get(layer, absent).double() for layer in range(layers)])
    return table.masked_fill(table.isnan(), math.inf)


def factors(max_logits: Tensor, threshold: float) -> Tensor:
    """Return gamma of each head.

    Args:
        max_logits: [heads] largest softmax input (scaled, signed) of each head over all
            microbatches and ranks; -inf for a head that saw no token.
        threshold: tau.

    Returns:
        [heads] tau / S where S > tau, and exactly 1 elsewhere. A maximum of +inf or NaN also gives
        1, because it defines no factor and the step's loss is not finite anyway.
    """
    over = (max_logits > threshold) & torch.isfinite(max_logits)
    # All other heads compute threshold / threshold = 1. Dividing by a zero or negative maximum led
    # to NaN in Megatron-LM (Megatron-LM#7517).
    return threshold / torch.where(over, max_logits, threshold)


@torch.no_grad()
def scale_heads_(
    weight: Tensor, content: Tensor, other_rows: int = 0, other: Tensor | None = None
) -> None:
    """Scale the rows of each head in place.

    Args:
        weight: [heads * rows, in], any floating dtype.
        content: [heads] factors of each head's rows except the last `other_rows`.
        other_rows: number of rows at the end of each head that use `other`.
        other: [heads] factors of these rows; None does not change them.

    Raises:
        ValueError: the rows do not divide into the heads, or a head has fewer than `other_rows`.
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
