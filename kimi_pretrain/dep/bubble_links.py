"""Messages between ranks that encode and first stages, while a pipeline runs.

One message for each item and first-stage rank that needs some of it, embeddings "over" and their
gradients "back". There are no tags: sender and receiver have the same order, and it alone says what
is what, as NCCL wants it.

Each way has groups of its own, so that a receive of one never stands in front of a send of the
other; and where two first-stage ranks may encode for each other, each direction has, too.
"""

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import Work

from kimi_pretrain.dep.vision_plan import Ints

WAYS = ("over", "back")


class Links:
    """The connections of this rank. Every rank of the job makes one, with the same arguments.

    All of them are opened here, in one order: NCCL opens a connection at its first message, and has
    both sides wait for each other there, which inside a schedule they could not.

    Args:
        scopes: ranks of each group that shares its media.
        first_stage: all ranks of first stages.
        timeout_seconds: for a message to arrive.
        device: of the messages.
    """

    def __init__(
        self,
        scopes: Sequence[Ints],
        first_stage: NDArray,
        timeout_seconds: float,
        device: torch.device,
    ):
        self.rank = dist.get_rank()
        self._groups: dict[tuple[str, bool], dist.ProcessGroup] = {}
        first = set(first_stage.flatten().tolist())
        for ranks in (scope.tolist() for scope in scopes):
            dests = [rank for rank in ranks if rank in first]
            for way in WAYS:
                timeout = timedelta(seconds=timeout_seconds)
                groups = [dist.new_group(ranks, timeout=timeout) for _ in dests[:2]]
                for rising, group in ((False, groups[0]), (True, groups[-1])):
                    if isinstance(group, dist.ProcessGroup):  # a number where it has no part in it
                        self._groups[way, rising] = group
            if self.rank in ranks:
                self._open(ranks, dests, device)

    def send(self, way: str, rows: Tensor, to: int) -> Work:
        """Begin to send; the tensor stays as it is until the work is done."""
        work = dist.isend(rows, to, group=self._groups[way, to > self.rank])
        assert work is not None
        return work

    def receive(self, way: str, rows: Tensor, of: int) -> Work:
        """Begin to receive into a tensor."""
        work = dist.irecv(rows, of, group=self._groups[way, self.rank > of])
        assert work is not None
        return work

    def _open(self, ranks: Sequence[int], dests: Sequence[int], device: torch.device) -> None:
        for dest in dests:
            for source in ranks:
                if source == dest or self.rank not in (source, dest):
                    continue
                one = torch.zeros(1, device=device)
                if self.rank == source:
                    self.send("over", one, dest).wait()
                    self.receive("back", one, dest).wait()
                else:
                    self.receive("over", one, source).wait()
                    self.send("back", one, source).wait()
