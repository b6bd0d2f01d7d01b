"""The ranks of one replica group, and what they tell each other before they exchange any tensor."""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.groups import NamedTensor


@dataclass(frozen=True)
class ReplicaGroup:
    """The ranks that hold identical copies of some tensors; a process alone has no group.

    Attributes:
        group: None for a process alone.
        ranks: in the whole job, in the group's order.
        index: of this rank in `ranks`.
    """

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    index: int

    @staticmethod
    def of(group: ProcessGroup | None) -> "ReplicaGroup":
        """Return the members of a process group."""
        if group is None:
            return ReplicaGroup(None, (0,), 0)
        return ReplicaGroup(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))

    def gather(self, value: Any) -> list[Any]:
        """Return every member's (small) value, in the group's order; all members call it."""
        found: list[Any] = [value] * len(self.ranks)
        if len(self.ranks) > 1:
            dist.all_gather_object(found, value, group=self.group)
        return found

    def check_agreement(self, name: str, tensors: Sequence[NamedTensor]) -> None:
        """Refuse members with different tensors, or in another order: they would add up different
        things, or wait for each other for ever.

        Raises:
            ValueError: names the group, and what each rank holds.
        """
        lines = [f"{t.name} {tuple(t.data.shape)} {t.data.dtype}" for t in tensors]
        digest = blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()
        found = self.gather((len(lines), digest))
        if len(set(found)) > 1:
            raise ValueError(
                f"optimizer: the ranks of replica group '{name}' hold different tensors; "
                f"(count, digest) by rank: {dict(zip(self.ranks, found))}"
            )
