"""Broadcasts updated weights from their owners in buckets, overlapped with the next update.

See `muonclip` for the phases of a round: compute, launch and finish.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import Work

from kimi_pretrain.optim.groups import NamedTensor, Rule
from kimi_pretrain.optim.replica_group import ReplicaGroup


@dataclass
class WeightBucket:
    """Tensors of one owner and one dtype that are updated and broadcast together."""

    replicas: str
    owner: int
    tensors: list[NamedTensor]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return sum(tensor.data.numel() for tensor in self.tensors)


@dataclass(frozen=True)
class Transfer:
    """A collective in flight on a flat tensor, whose parts `finish` copies to `unpack`."""

    work: Work
    flat: Tensor
    unpack: Sequence[Tensor]

    def finish(self) -> None:
        """Wait for the collective and copy the result to its destinations."""
        self.work.wait()
        sizes = [tensor.numel() for tensor in self.unpack]
        for tensor, part in zip(self.unpack, self.flat.split(sizes) if sizes else ()):
            tensor.copy_(part.view_as(tensor))


def cut_rounds(
    named: Sequence[NamedTensor],
    rules: Mapping[str, Rule],
    owners: Mapping[str, int],
    limits: Mapping[str, int],
) -> list[list[WeightBucket]]:
    """Cut the tensors into rounds of buckets.

    Round k of a group and dtype holds the k-th bucket of each owner, in the owners' order. Within
    an owner, tensors of equal shape are adjacent so that they share a Newton-Schulz call.

    Args:
        named: tensors of this rank.
        rules: name -> rule.
        owners: name -> index of the owner in its replica group.
        limits: replica group -> maximum elements of a bucket; a larger tensor has its own bucket.
    """
    lanes: dict[tuple[str, str], dict[int, list[WeightBucket]]] = {}
    for t in sorted(named, key=lambda t: (rules[t.name].kind, tuple(t.data.shape), t.name)):
        lane = lanes.setdefault((t.replicas, str(t.data.dtype)), {})
        buckets = lane.setdefault(owners[t.name], [])
        if not buckets or buckets[-1].elements + t.data.numel() > limits[t.replicas]:
            buckets.append(WeightBucket(t.replicas, owners[t.name], []))
        buckets[-1].tensors.append(t)
    rounds = []
    for _, lane in sorted(lanes.items()):
        for k in range(max(len(buckets) for buckets in lane.values())):
            rounds.append([lane[owner][k] for owner in sorted(lane) if k < len(lane[owner])])
    return rounds


def launch(bucket: WeightBucket, group: ReplicaGroup) -> Transfer:
    """Start the broadcast of a bucket from its owner without waiting for it."""
    mine = bucket.owner == group.index
    data = [tensor.data.detach() for tensor in bucket.tensors]
    in_place = len(data) == 1 and data[0].is_contiguous()
    if in_place:  # a large tensor needs no staging memory and no copies
        flat = data[0].view(-1)
    elif mine:
        flat = torch.cat([x.reshape(-1) for x in data])
    else:
        flat = data[0].new_empty(bucket.elements)
    source = group.ranks[bucket.owner]
    work = dist.broadcast(flat, source, group=group.group, async_op=True)
    assert work is not None  # async_op returns a handle on every rank of the group
    return Transfer(work, flat, [] if mine or in_place else data)


def finish(transfers: Sequence[Transfer]) -> None:
    """Wait for a round and copy received weights into the model."""
    for transfer in transfers:
        transfer.finish()
