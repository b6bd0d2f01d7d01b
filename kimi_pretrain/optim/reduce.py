"""Each gradient is summed to its owner alone, while the last backward pass is still running.

The owner of a tensor is the only rank that updates it, so nobody else needs its gradient. A
reduction to one member moves n - 1 times the bytes over a group of n, as ZeRO-1's reduce-scatter
of the same gradients does, and half of what an all-reduce does.

    cut       the tensors, in the order in which a backward pass completes them, into segments; the
              tensors of a segment that have the same owner travel together, as a bucket
    launch    a segment's buckets as soon as all its gradients are complete, without waiting
    finish    launch what is left, wait for everything

No rank can wait for ever for another:

- Segments are cut by names, shapes and groups, which are the same on all ranks of a pipeline stage;
  owners are not (each slice of the experts has its own). In a segment the buckets go by group, then
  by owner. So all ranks launch in one order of (segment, group, bucket), and of the reductions that
  are not complete, the first in this order is one that all its members come to.
- Nothing here waits inside a backward pass. All-to-alls of experts and collectives of shared rows
  need their own peers to come to them, and these do, whatever reductions are on their way.
- A tensor may stay without a gradient on one rank. Its segment, and those after it, then leave that
  rank at the end, in the same order.

The sums are made in place where a bucket lies in one piece of memory, as a large tensor alone
does, and else in a copy of the bucket's size, which goes as soon as its sum is seen to be complete.
A gradient is valid on its owner only.
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
    """Gradients that travel together: of one replica group, one dtype and one owner.

    Attributes:
        replicas: name of the group.
        owner: rank in the whole job that needs the sum; None: every member does.
        tensors: in the order of the backward pass.
    """

    replicas: str
    owner: int | None
    tensors: tuple[NamedTensor, ...]


def cut_segments(tensors: Sequence[NamedTensor], limit: int) -> list[list[NamedTensor]]:
    """Cut tensors into runs of at most `limit` elements, or of one larger tensor."""
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
        owners: name -> rank in the whole job; None: the sums go to every member.
    """

    def key(tensor: NamedTensor) -> tuple[str, int, str]:
        owner = -1 if owners is None else owners[tensor.name]
        return tensor.replicas, owner, str(tensor.data.dtype)

    return [
        GradientBucket(replicas, None if owners is None else owner, tuple(run))
        for (replicas, owner, _), run in groupby(sorted(segment, key=key), key=key)
    ]


class GradientReduction:
    """The sums of one rank's gradients over its replicas, once a step.

    Args:
        tensors: in the order in which a backward pass completes their gradients; the same order,
            but for the names of experts, on all ranks of a pipeline stage.
        owners: name -> rank in the whole job that needs the sum; None: every rank does.
        groups: name in `NamedTensor.replicas` -> the ranks whose gradients make up the sum. It may
            be a part of the ranks that hold a copy (of tensor-parallel ranks, each of which has the
            whole gradient, one is enough): a sum whose owner is not among them is not made here.
        bucket_elements: at most so many elements travel together, but for a larger tensor.

    Attributes:
        early_buckets: of the last step, buckets that left before `launch_rest`.
        bytes_moved: of the last step, what the sums to this rank took over the network: n - 1 times
            their size. Over all ranks: what the job moved.
    """

    def __init__(
        self,
        tensors: Sequence[NamedTensor],
        owners: Mapping[str, int] | None,
        groups: Mapping[str, ProcessGroup | None],
        bucket_elements: int,
    ):
        self._members = {name: ReplicaGroup.of(group) for name, group in sorted(groups.items())}
        segments = cut_segments(tensors, bucket_elements)
        self._names = [frozenset(tensor.name for tensor in segment) for segment in segments]
        self._segment_of = {name: k for k, names in enumerate(self._names) for name in names}
        self._buckets = [
            [bucket for bucket in buckets_of(segment, owners) if self._takes_part(bucket)]
            for segment in segments
        ]
        self.early_buckets = self.bytes_moved = 0
        self._start_again()

    def ready(self, name: str) -> None:
        """Say that a gradient is complete on this rank, in the order in which it happens.

        Launches whatever can leave now. Not to be called before the step's last backward pass.
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
        """Launch what is left, also gradients that were never said to be ready."""
        while self._launched < len(self._names):
            self._launch_segment()

    def finish(self) -> None:
        """Wait until every sum that this rank owns is in the gradient's own memory."""
        self.launch_rest()
        for parcel in self._parcels:
            parcel.finish()
        self.early_buckets, self.bytes_moved = self._early, self._moved
        self._start_again()

    def _start_again(self) -> None:
        self._missing = [set(names) for names in self._names]
        self._launched = self._early = self._sent = self._moved = 0
        self._parcels: list[Transfer] = []  # on their way

    def _takes_part(self, bucket: GradientBucket) -> bool:
        ranks = self._members[bucket.replicas].ranks
        return len(ranks) > 1 and (bucket.owner is None or bucket.owner in ranks)

    def _launch_segment(self) -> None:
        self._let_go()
        for bucket in self._buckets[self._launched]:
            parcel, moved = _launch(bucket, self._members[bucket.replicas])
            self._parcels.append(parcel)
            self._moved += moved
            self._sent += 1
        self._launched += 1

    def _let_go(self) -> None:
        """Give back the copies of sums that are complete; waits for none."""
        waiting = []
        for parcel in self._parcels:
            if parcel.work.is_completed():
                parcel.finish()
            else:
                waiting.append(parcel)
        self._parcels = waiting


@torch.no_grad()
def _launch(bucket: GradientBucket, members: ReplicaGroup) -> tuple[Transfer, int]:
    """Start to sum a bucket, and return what is on its way and how many bytes; nobody waits."""
    gradients = [tensor.grad() for tensor in bucket.tensors]
    flat = _in_one_piece(gradients)
    staged = flat is None
    if flat is None:
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
    others = len(members.ranks) - 1
    if bucket.owner is None:
        work = dist.all_reduce(flat, group=members.group, async_op=True)
        mine, moved = True, 2 * others * flat.nbytes // len(members.ranks)
    else:
        work = dist.reduce(flat, bucket.owner, group=members.group, async_op=True)
        mine = bucket.owner == members.ranks[members.index]
        moved = others * flat.nbytes if mine else 0
    assert work is not None  # async_op gives a handle to every member
    return Transfer(work, flat, gradients if staged and mine else []), moved


def _in_one_piece(tensors: Sequence[Tensor]) -> Tensor | None:
    """Return a flat view over tensors that lie one after the other in memory, or None."""
    if not all(tensor.is_contiguous() for tensor in tensors):
        return None
    for before, after in pairwise(tensors):
        if before.data_ptr() + before.nbytes != after.data_ptr():
            return None
        if before.untyped_storage().data_ptr() != after.untyped_storage().data_ptr():
            return None  # neighbours by chance, of two allocations
    return tensors[0].as_strided((sum(tensor.numel() for tensor in tensors),), (1,))
