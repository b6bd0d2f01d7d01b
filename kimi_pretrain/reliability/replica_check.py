"""Compares replicas of tensors while training: a wrong bit on one rank shows in no other way.

In turn, one tensor of each kind of replica group (dense, expert, encoder): every rank hashes its
copy before the step's update changes anything; the hashes are all-gathered with the per-rank
reports and compared within each group. The cost is reading one tensor of each kind.

What is found is a copy that differs in a step in which its turn comes. With `optim.shard_state`
each update writes what the owner holds over all copies: a difference lasts for one step, which
trains with wrong gradients, and is found only if that step is the tensor's turn. What was wrong in
the owner's state is then equal, and wrong, in all, and no comparison finds it. What no update
writes over (frozen tensors, routing biases; without `shard_state` everything) stays different and
is found when its turn comes. Under tensor parallelism the whole tensors are hashed, not the slices
that each step takes from them. At the start all are compared (`Update.check_replicas`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kimi_pretrain.optim.groups import replicas_of
from kimi_pretrain.optim.replica_group import ReplicaGroup
from kimi_pretrain.reliability.watchdog import named

if TYPE_CHECKING:
    from kimi_pretrain.engine.mesh import Mesh

_ROW = 1024  # numbers that are summed before they are weighted by their place
_BLOCK = 1 << 16  # words that are weighted at a time: bounds what is held beside the tensor
_GOLDEN, _MIX = -7046029254386353131, -4658895280553007687  # of splitmix64, as signed
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class CopyHash:
    """Hash of one rank's copy of a tensor; `holders` is the first rank that holds one."""

    holders: int
    name: str
    hash: int


class Replicas:
    """Hashes the copies that this rank holds, in turn.

    Args:
        tensors: the model's that this rank holds, by checkpoint name, as views of its memory. To
            make them anew in each step would cost more than the hashes.
        mesh: where this rank stands.
        every: steps from one comparison to the next; None: none is made.
    """

    def __init__(self, tensors: Mapping[str, Tensor], mesh: "Mesh", every: int | None):
        self._every = every
        self._kinds: list[tuple[int, list[tuple[str, Tensor]]]] = []
        for kind, group in sorted(mesh.groups.items()) if every else ():
            ranks = ReplicaGroup.of(group).ranks
            held = [(name, tensors[name]) for name in sorted(tensors) if replicas_of(name) == kind]
            if held and len(ranks) > 1:
                self._kinds.append((min(ranks), held))

    def hashes(self, step: int) -> tuple[CopyHash, ...]:
        """Return the hashes whose turn it is in a step, counted from 1. Waits for the device."""
        if not self._kinds or not self._every or step % self._every:
            return ()
        turn = step // self._every
        chosen = [(holders, *held[turn % len(held)]) for holders, held in self._kinds]
        hashes = torch.stack([hash_bits(tensor) for _, _, tensor in chosen]).tolist()
        return tuple(
            CopyHash(holders, name, found)
            for (holders, name, _), found in zip(chosen, hashes, strict=True)
        )


@torch.no_grad()
def hash_bits(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits that any single wrong bit changes; it reads them once.

    Integer arithmetic modulo 2^64: the same on every device, in whatever order it is summed.

    Returns:
        0-d int64, on the tensor's device; nothing waits for it.
    """
    flat = _words(tensor)
    whole = len(flat) - len(flat) % _ROW
    rows = flat[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    rest = flat[whole:].sum(dtype=torch.int64)
    # Odd factors have an inverse: no wrong bit is lost.
    odd = torch.arange(3, 2 * len(rows) + 3, 2, device=flat.device)
    return (rows * odd).sum() + rest


@torch.no_grad()
def hash_order(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits and of their order: slower, for the start of a run.

    `hash_bits` does not see numbers that change places within a row of its sums, nor an even number
    of flipped signs in fp64. Here each word has an odd weight of its own place in a block, and its
    upper half is folded onto the lower: the weight of a sign would be 2^63, whatever the place.

    Returns:
        0-d int64, on the tensor's device; the same on every device.
    """
    flat = _words(tensor)
    place = torch.arange(1, min(len(flat), _BLOCK) + 1, device=flat.device) * _GOLDEN
    weights = ((place ^ (place >> 29)) * _MIX) | 1
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for number, block in enumerate(flat.split(_BLOCK)):
        words = block.to(torch.int64)
        total += ((words ^ (words >> 32)) * weights[: len(block)]).sum() * (2 * number + 1)
    return total


def _words(tensor: Tensor) -> Tensor:
    """Return a tensor's bits as integers, [n]: of 8 bytes if they fill such."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.nbytes % 8 == 0:  # several times faster; by shape and type alone, as on the other ranks
        misplaced = flat.storage_offset() * flat.element_size() % 8
        return (flat.clone() if misplaced else flat).view(torch.int64)
    return flat.view(_INTEGERS[flat.element_size()])


def check_copies(step: int, everyone: Sequence[tuple[CopyHash, ...]]) -> None:
    """Check that what `Replicas.hashes` returned is equal for all copies; alike on all ranks.

    Raises:
        RuntimeError: names a tensor that differs, and the ranks.
    """
    found: dict[tuple[int, str], dict[int, list[int]]] = {}
    for rank, hashes in enumerate(everyone):
        for copy in hashes:
            parties = found.setdefault((copy.holders, copy.name), {})
            parties.setdefault(copy.hash, []).append(rank)
    for (_, name), parties in sorted(found.items()):
        if len(parties) > 1:
            by_size = sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))
            told = ", another on ".join(named(ranks) for ranks in by_size)
            raise RuntimeError(
                f"step {step}: {name} is one on {told}: copies must be equal bit for bit; the "
                "memory, the device or the network of the fewer is at fault as a rule: take their "
                "machine out and go on from the last checkpoint (--resume latest)"
            )
