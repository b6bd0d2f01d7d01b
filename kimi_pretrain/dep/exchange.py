"""Phases 3 and 5: one all-to-all in each direction between encoding ranks and first stages.

The bytes in flight are bounded: a large exchange runs in rounds, each with some columns of all
embeddings. The rounds only move numbers, so they do not change results.
"""

from collections.abc import Sequence
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from kimi_pretrain.dep.vision_plan import Spans, VisionPlan, runs

Ints = NDArray[np.int64]


class Exchange:
    """Moves embeddings to the rows they belong to, and their gradients back.

    Args:
        group: process group of the ranks that share their media.
        ranks: global ranks of the group, in its order.
        budget_bytes: most bytes that one rank sends, or receives, in one round.
        dtype: dtype in transit; None: that of the tensors.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        ranks: Sequence[int],
        budget_bytes: int,
        dtype: torch.dtype | None = None,
    ):
        self.group, self.ranks = group, np.array(ranks, dtype=np.int64)
        self.budget_bytes, self.dtype = budget_bytes, dtype

    def hand_over(self, embeddings: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        """Send each token's embedding to the first-stage rank that holds its position.

        `rank` is this process's global rank, here and below.

        Args:
            embeddings: [tokens this rank encoded, hidden], in `plan.encoded_by(rank)` order.

        Returns:
            [tokens this rank receives, hidden], in `plan.received_by(rank)` order.
        """
        order = _sending_order(plan, rank)
        to, of = self._counts(plan.sent_by(rank), plan.received_by(rank))
        return self._move(_reordered(embeddings, order), to, of, self._rounds(embeddings, plan))

    def hand_back(self, gradients: Tensor, plan: VisionPlan, rank: int) -> Tensor:
        """Send the gradients of received embeddings back to the ranks that encoded them.

        Args:
            gradients: [tokens this rank received, hidden], in `plan.received_by(rank)` order.

        Returns:
            [tokens this rank encoded, hidden], in `plan.encoded_by(rank)` order.
        """
        to, of = self._counts(plan.sent_by(rank), plan.received_by(rank))
        arrived = self._move(gradients, of, to, self._rounds(gradients, plan))
        return _reordered(arrived, np.argsort(_sending_order(plan, rank)))

    def bytes_sent(self, plan: VisionPlan, rank: int, hidden: int, itemsize: int) -> dict[str, int]:
        """Return the bytes that this rank sends to others in a step, "over" and "back"."""
        size = hidden * (self.dtype.itemsize if self.dtype else itemsize)
        sent, received = plan.tokens_away()
        return {"over": int(sent[rank]) * size, "back": int(received[rank]) * size}

    def _counts(self, sent: Spans, received: Spans) -> tuple[list[int], list[int]]:
        """Return the tokens to send to, and to receive from, each rank of the group."""
        to = np.bincount(np.searchsorted(self.ranks, sent.dest), sent.count, len(self.ranks))
        of = np.bincount(
            np.searchsorted(self.ranks, received.source), received.count, len(self.ranks)
        )
        return to.astype(np.int64).tolist(), of.astype(np.int64).tolist()

    def _rounds(self, rows: Tensor, plan: VisionPlan) -> int:
        """Return the number of rounds that keeps every rank of the group within the budget.

        All ranks compute the same number. A round moves at least one column.
        """
        busiest = max(
            plan.tokens_sent()[self.ranks].max(), plan.tokens_received()[self.ranks].max()
        )
        hidden, column = rows.shape[1], int(busiest) * (self.dtype or rows.dtype).itemsize
        if column * hidden <= self.budget_bytes:
            return 1
        return -(-hidden // max(1, self.budget_bytes // column))

    def _move(self, rows: Tensor, to: list[int], of: list[int], rounds: int) -> Tensor:
        hidden = rows.shape[1]
        if rounds == 1:
            return self._round(rows, to, of).to(rows.dtype)
        arrived = rows.new_empty(sum(of), hidden)
        for columns in torch.arange(hidden).tensor_split(rounds):
            some = slice(int(columns[0]), int(columns[-1]) + 1)
            arrived[:, some] = self._round(rows[:, some], to, of)
        return arrived

    def _round(self, rows: Tensor, to: list[int], of: list[int]) -> Tensor:
        wire = rows.to(self.dtype or rows.dtype).contiguous()
        landed = wire.new_empty(sum(of), wire.shape[1])
        dist.all_to_all_single(landed, wire, of, to, group=self.group)
        return landed


def _sending_order(plan: VisionPlan, rank: int) -> Ints:
    """Return the row of each sent token among the tokens that this rank encoded, int64 [tokens]."""
    shares, sent = plan.encoded_by(rank), plan.sent_by(rank)
    sizes = shares.end - shares.begin
    row = np.full(len(plan.rank), -1)
    row[shares.item] = np.cumsum(sizes) - sizes - shares.begin  # row of the item's token 0
    return runs(row[sent.item] + sent.begin, sent.count)


def _reordered(rows: Tensor, order: Ints) -> Tensor:
    if np.array_equal(order, np.arange(len(order))):
        return rows  # the order is the identity if no item is shared and each row is on one rank
    return rows.index_select(0, torch.from_numpy(order).to(rows.device))


def scope_group(
    scopes: Sequence[Sequence[int]], timeout_seconds: float
) -> dist.ProcessGroup | None:
    """Return the group of the ranks that share their media with this rank.

    Every rank of the job calls it with the same arguments; `sharded.blocks` explains the reason.

    Args:
        scopes: ranks of each group, in rising order; together they are all ranks.

    Returns:
        None, which stands for all ranks, if there is a single scope.
    """
    if len(scopes) == 1:
        return None
    found = None
    for ranks in scopes:
        group = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_seconds))
        if isinstance(group, dist.ProcessGroup):  # a non-member gets a number instead
            found = group
    return found
