"""The hand-over: one uneven all-to-all each way between encoding ranks and first stages."""

import torch
import torch.distributed as dist
from torch import Tensor

from kimi_pretrain.dep.assign import VisionPlan


def hand_over(embeddings: Tensor, plan: VisionPlan, rank: int) -> Tensor:
    """Send each item's embeddings to the first stage that owns its row.

    Args:
        embeddings: [tokens this rank encoded, hidden], items in `plan.encoded_by(rank)` order.

    Returns:
        [tokens this rank owns, hidden], items in `plan.received_by(rank)` order.
    """
    return _all_to_all(embeddings, plan.tokens_to(rank), plan.tokens_from(rank))


def hand_back(gradients: Tensor, plan: VisionPlan, rank: int) -> Tensor:
    """Send the gradients of received embeddings back to the ranks that encoded them.

    Args:
        gradients: [tokens this rank owns, hidden], items in `plan.received_by(rank)` order.

    Returns:
        [tokens this rank encoded, hidden], items in `plan.encoded_by(rank)` order.
    """
    return _all_to_all(gradients, plan.tokens_from(rank), plan.tokens_to(rank))


def _all_to_all(rows: Tensor, to: list[int], from_: list[int]) -> Tensor:
    received = torch.empty(sum(from_), rows.shape[1], dtype=rows.dtype, device=rows.device)
    dist.all_to_all_single(received, rows.contiguous(), from_, to)
    return received
