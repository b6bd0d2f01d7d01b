"""Reduces each gradient to its owner, overlapped with the last backward pass.

Only the owner of a tensor updates it, so no other rank needs the sum. A reduction to one rank moves
n - 1 times the bytes over a group of n, like the reduce-scatter of ZeRO-1 and half as much as an
all-reduce. The phases are:

    cut       divide tensors, in the order in which a backward pass completes their gradients, into
              segments; tensors of a segment with the same owner form a bucket
    launch    start the buckets of a segment as soon as all its gradients are complete
    finish    launch the remaining buckets and wait for all of them

Deadlock is impossible:

- Segments depend on names, shapes and groups, which are the same on all ranks of a pipeline stage;
  owners differ, because each slice of the experts has different owners. Within a segment, buckets
  are ordered by group, then by owner. All ranks therefore launch in the same order of (segment,
  group, bucket), and all ranks of the first incomplete reduction in this order reach it.
- No reduction waits inside a backward pass. The expert all-to-alls and other collectives of the
  backward pass only need their own peers, which reach them whatever reductions are in flight.
- A tensor may have no gradient on one rank. This rank launches the tensor's segment and all later
  segments at the end, in the same order.

A bucket is summed in place if it is contiguous in memory, for example a single large tensor.
Otherwise it is summed in a copy, which is freed once its sum is complete. A gradient is valid only
on its owner.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.broadcast import Transfer
from kimi_pretrain.optim.groups import NamedTensor
from kimi_pretrain.optim.replica_group import ReplicaGroup


@dataclass(frozen=True)
class GradientBucket:
    """Gradients of one group and dtype that are reduced together, in backward order.

    `owner` is the global rank that needs the sum; None for all ranks of the group.
    """

    replicas: str
    owner: int | None
    tensors: tuple[NamedTensor, ...]


def cut_segments(tensors: Sequence[NamedTensor], limit: int) -> list[list[NamedTensor]]:
    """Cut tensors into runs of at most `limit` elements; a larger tensor has its own run."""
    segments: list[list[NamedTensor]] = []
    filled = limit
    for tensor in tensors:
        size = tensor.data.numel()
        if filled + size > limit:
            segments.append([])
            filled = 0
        segments[-1].append(tensor)
        filled += size
    return segments


def buckets_of(
    segment: Sequence[NamedTensor], owners: Mapping[str, int] | None
) -> list[GradientBucket]:
    """Divide a segment among its groups and owners, in their order.

    Args:
        segment: tensors in the order of the backward pass.
        owners: name -> global rank; None if all ranks of a group receive the sums.
    """

    def key(tensor: NamedTensor) -> tuple[str, int, str]:
        owner = -1 if owners is None else owners[tensor.name]
        return tensor.replicas, owner, str(tensor.data.dtype)

    return [
        GradientBucket(replicas, None if owners is None else owner, tuple(run))
        for (replicas, owner, _), run in groupby(sorted(segment, key=key), key=key)
    ]


class GradientReduction:
    """Sum of the gradients of one rank over its replica groups, once per step.

    Args:
        tensors: tensors in the order in which a backward pass completes their gradients. Except for
            the names of experts, this order is the same on all ranks of a pipeline stage.
        owners: name -> global rank that needs the sum; None if every rank does.
        groups: name in `NamedTensor.replicas` -> the ranks whose gradients are summed. These may be
            fewer than the ranks that hold a copy: each tensor-parallel rank has the full gradient,
            so one of them suffices. If the owner is not in the group, this rank skips the sum.
        bucket_elements: maximum elements of a bucket; a larger tensor has its own bucket.

    Attributes:
        early_buckets: number of buckets of the last step that were launched before `launch_rest`.
        bytes_moved: bytes of the last step's sums to this rank, n - 1 times their size. The sum
            over ranks is the traffic of the job.
    """

    def __init__(
        self,
        tensors: Sequence[NamedTensor],
        owners: Mapping[str, int] | None,
        groups: Mapping[str, ProcessGroup | None],
        bucket_elements: int,
    ):
        self._groups = {name: ReplicaGroup.of(group) for name, group in sorted(groups.items())}
        segments = cut_segments(tensors, bucket_elements)
        self._names = [frozenset(tensor.name for tensor in segment) for segment in segments]
        self._segment_of = {name: k for k, names in enumerate(self._names) for name in names}
        self._buckets = [
            [bucket for bucket in buckets_of(segment, owners) if self._takes_part(bucket)]
            for segment in segments
        ]
        self.early_buckets = self.bytes_moved = 0
        self._reset()

    def ready(self, name: str) -> None:
        """Mark a gradient as complete on this rank, and launch every complete segment.

        Call this only in the last backward pass of a step, because gradients accumulate until then.

        Raises:
            RuntimeError: the gradient was already marked in this step.
        """
        segment = self._segment_of[name]
        if name not in self._missing[segment]:
            raise RuntimeError(
                f"the gradient of '{name}' was said to be complete twice: the first time, when it "
                "may have left, it was not"
            )
        self._missing[segment].remove(name)
        while self._launched < len(self._names) and not self._missing[self._launched]:
            self._launch_segment()
        self._early = self._sent

    def launch_rest(self) -> None:
        """Launch the remaining buckets; called once all gradients are complete."""
        while self._launched < len(self._names):
            self._launch_segment()

    def finish(self) -> None:
        """Wait until every sum that this rank owns is in the memory of the gradient."""
        self.launch_rest()
        for transfer in self._transfers:
            transfer.finish()
        self.early_buckets, self.bytes_moved = self._early, self._moved
        self._reset()

    def _reset(self) -> None:
        self._missing = [set(names) for names in self._names]
        self._launched = self._early = self._sent = self._moved = 0
        self._transfers: list[Transfer] = []  # in flight

    def _takes_part(self, bucket: GradientBucket) -> bool:
        ranks = self._groups[bucket.replicas].ranks
        return len(ranks) > 1 and (bucket.owner is None or bucket.owner in ranks)

    def _launch_segment(self) -> None:
        self._free_completed()
        for bucket in self._buckets[self._launched]:
            transfer, moved = _launch(bucket, self._groups[bucket.replicas])
            self._transfers.append(transfer)
            self._moved += moved
            self._sent += 1
        self._launched += 1

    def _free_completed(self) -> None:
        """Copy back and free complete sums, without waiting for others."""
        waiting = []
        for transfer in self._transfers:
            if transfer.work.is_completed():
                transfer.finish()
            else:
                waiting.append(transfer)
        self._transfers = waiting


@torch.no_grad()
def _launch(bucket: GradientBucket, group: ReplicaGroup) -> tuple[Transfer, int]:
    """Start the sum of a bucket; return the transfer and the bytes it moves to this rank."""
    gradients = [tensor.grad() for tensor in bucket.tensors]
    flat = _in_one_piece(gradients)
    staged = flat is None
    if flat is None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    others = len(group.ranks) - 1
    if bucket.owner is None:
        work = dist.all_reduce(flat, group=group.group, async_op=True)
        mine, moved = True, 2 * others * flat.nbytes // len(group.ranks)
    else:
        work = dist.reduce(flat, bucket.owner, group=group.group, async_op=True)
        mine = bucket.owner == group.ranks[group.index]
        moved = others * flat.nbytes if mine else 0
    assert work is not None  # async_op returns a handle on every rank of the group
    return Transfer(work, flat, gradients if staged and mine else []), moved


def _in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a flat view over tensors that are adjacent in memory, or None if they are not."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    for before, after in pairwise(tensors):
        if before.data_ptr() + before.nbytes != after.data_ptr():
            return None
        if before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
            return None  # separate allocations that happen to be adjacent
    return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
