"""The updated weights, from their owners to all copies, in buckets that travel under the next work.

See `distributed` for the round of launch, compute and finish.
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
    """Tensors of one owner that are updated, then sent, together; all of one dtype."""

    replicas: str
    owner: int
    tensors: list[NamedTensor]

    @property
    def elements(self) -> int:
        """Numbers in it."""
        return sum(tensor.data.numel() for tensor in self.tensors)


@dataclass(frozen=True)
class Transfer:
    """Tensors on their way, as one. `unpack` are those into which it still has to be copied."""

    work: Work
    flat: Tensor
    unpack: Sequence[Tensor]

    def finish(self) -> None:
        """Wait for it, and copy what came in to its places."""
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
    """Round k of a group and dtype holds the k-th bucket of each owner, in the owners' order.

    Inside an owner, equal shapes lie side by side so that they share a Newton-Schulz call.

    Args:
        limits: most elements of a bucket, by replica group; a larger tensor goes alone.
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


def launch(bucket: WeightBucket, members: ReplicaGroup) -> Transfer:
    """Start to send (owner) or to receive (others) a bucket."""
    mine = bucket.owner == members.index
    data = [tensor.data.detach() for tensor in bucket.tensors]
    in_place = len(data) == 1 and data[0].is_contiguous()
    if in_place:  # a large tensor: no staging memory, no copies
        flat = data[0].view(-1)
    elif mine:
        flat = torch.cat([x.reshape(-1) for x in data])
    else:
        flat = data[0].new_empty(bucket.elements)
    source = members.ranks[bucket.owner]
    work = dist.broadcast(flat, source, group=members.group, async_op=True)
    assert work is not None  # async_op gives a handle to every member
    return Transfer(work, flat, [] if mine or in_place else data)


def finish(parcels: Sequence[Transfer]) -> None:
    """Wait for a round and copy what came in into the model."""
    for parcel in parcels:
        parcel.finish()
