"""Groups of ranks that hold identical copies of tensors, and the check that these agree."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.groups import NamedTensor


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks that hold identical copies of a set of tensors.

    Attributes:
        group: process group; None for a single process.
        ranks: global ranks, in the group's order.
        index: index of this rank in `ranks`.
    """

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    index: int

    @staticmethod
    def of(group: ProcessGroup | None) -> "ReplicaGroup":
        """Return the ranks of a process group."""
        if group is None:
            return ReplicaGroup(None, (0,), 0)
        ranks = tuple(dist.get_process_group_ranks(group))
        return ReplicaGroup(group, ranks, dist.get_rank(group))

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the (small) values of all ranks, in the group's order; a collective call."""
        found: list[Any] = [value] * len(self.ranks)
        if len(self.ranks) > 1:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def gather_object(self, value: Any, index: int) -> list[Any] | None:
        """Return all ranks' values on one rank of the group, None elsewhere; a collective call."""
        if len(self.ranks) == 1:
            return [value]
        found: list[Any] | None = [None] * len(self.ranks) if index == self.index else None
        dist.gather_object(value, found, self.ranks[index], group=self.group)
        return found

    def maximum(self, x: Tensor) -> Tensor:
        """Return the elementwise maximum over the ranks; a collective call."""
        if len(self.ranks) > 1:
            x = x.clone()
            dist.all_reduce(x, dist.ReduceOp.MAX, group=self.group)
        return x

    def check_agreement(self, name: str, tensors: Sequence[NamedTensor]) -> None:
        """Check that all ranks hold the same tensors in the same order; a collective call.

        Otherwise ranks would sum different tensors, or wait for each other forever.

        Raises:
            ValueError: ranks differ; the message names the group, and the count and digest of each
                rank's tensors.
        """
        lines = [f"{t.name} {tuple(t.data.shape)} {t.data.dtype}" for t in tensors]
        digest = blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
        found = self.all_gather_object((len(lines), digest))
        if len(set(found)) > 1:
            raise ValueError(
                f"optimizer: the ranks of replica group '{name}' hold different tensors; "
                f"(count, digest) by rank: {dict(zip(self.ranks, found))}"
            )
