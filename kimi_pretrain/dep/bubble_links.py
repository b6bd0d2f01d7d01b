"""Point-to-point messages between encoding ranks and first stages while the pipeline runs.

Each pair of unit and first-stage rank has one message: embeddings go "over", gradients come "back".
The messages have no tags. Sender and receiver use the same order to match them, as NCCL requires.

Each direction has separate process groups, so that a receive of one direction never blocks a send
of the other. If two first-stage ranks may encode for each other, the groups also differ by whether
the message goes to a higher or a lower rank.
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
    """Connections of this rank. Every rank of the job constructs one, with the same arguments.

    The constructor opens all connections in one fixed order. NCCL opens a connection at its first
    message and makes both sides wait for each other, which would deadlock inside a schedule.

    Args:
        scopes: ranks of each group that shares its media.
        first_stage: all ranks of first stages.
        timeout_seconds: time limit for a message to arrive.
        device: device of the messages.
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
                    if isinstance(group, dist.ProcessGroup):  # a non-member gets a number instead
                        self._groups[way, rising] = group
            if self.rank in ranks:
                self._open(ranks, dests, device)

    def send(self, way: str, rows: Tensor, to: int) -> Work:
        """Start a send; the tensor must not change until the returned work is done."""
        work = dist.isend(rows, to, group=self._groups[way, to > self.rank])
        assert work is not None
        return work

    def receive(self, way: str, rows: Tensor, of: int) -> Work:
        """Start a receive into a tensor."""
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
