"""Compares replicas of tensors during training, to detect a wrong bit on one rank.

Each check covers one tensor of each kind of replica group (dense, expert, encoder), in rotation.
Every rank hashes its copy before the step's update changes anything; the hashes are all-gathered
with the per-rank reports and compared within each group. The cost is reading one tensor per kind.

The check detects a copy that differs in the step that checks its tensor. With `optim.shard_state`
each update overwrites all copies with the owner's values. A difference then lasts for one step,
which trains with wrong gradients, and it is detected only if that step checks the tensor. An error
in the owner's state spreads to all copies, so no comparison can detect it. Tensors that no update
overwrites (frozen tensors, routing biases; without `shard_state` all tensors) stay different until
their check. Under tensor parallelism the whole tensors are hashed, not the slices that each step
takes from them. At the start all tensors are compared (`Update.check_replicas`).
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

_ROW = 1024  # numbers that are summed before they are weighted by position
_BLOCK = 1 << 16  # words that are weighted at a time: bounds the temporary memory
_GOLDEN, _MIX = -7046029254386353131, -4658895280553007687  # splitmix64 constants, as signed
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class CopyHash:
    """Hash of one rank's copy of a tensor; `holders` is the lowest rank of its replica group."""

    holders: int
    name: str
    hash: int


class Replicas:
    """Hashes this rank's copies of tensors, in rotation.

    Args:
        tensors: the model's tensors on this rank, by checkpoint name, as views of its memory.
            Creating the views in each step would cost more than the hashes.
        mesh: the position of this rank in the parallel layout.
        every: steps between comparisons; None disables them.
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
        """Return the hashes that a step (counted from 1) compares. Waits for the device."""
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
    """Return a hash of a tensor's bits that any single-bit error changes; reads the tensor once.

    The arithmetic is modulo 2^64: the result is the same on every device and in any summation
    order.

    Returns:
        0-d int64 on the tensor's device; the call does not wait for the device.
    """
    flat = _words(tensor)
    whole = len(flat) - len(flat) % _ROW
    rows = flat[:whole].view(-1, _ROW).sum(1, dtype=torch.int64)
    rest = flat[whole:].sum(dtype=torch.int64)
    # Odd factors are invertible modulo 2^64, so no single-bit error is lost.
    odd = torch.arange(3, 2 * len(rows) + 3, 2, device=flat.device)
    return (rows * odd).sum() + rest


@torch.no_grad()
def hash_order(tensor: Tensor) -> Tensor:
    """Return a hash of a tensor's bits and of their order; slower, used at the start of a run.

    `hash_bits` misses values that swap positions within a row of its sums, and an even number of
    flipped signs in fp64. Here each word has an odd weight for its position in a block. The upper
    half of a word is folded onto the lower half: otherwise the weight of a sign bit would be 2^63
    at every position.

    Returns:
        0-d int64 on the tensor's device; the same value on every device.
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
    """Return a tensor's bits as integers [n], in 8-byte words if the size is a multiple of 8."""
    flat = tensor.detach().reshape(-1).contiguous()
    if flat.nbytes % 8 == 0:  # several times faster; shape and dtype decide alike on all ranks
        misplaced = flat.storage_offset() * flat.element_size() % 8
        return (flat.clone() if misplaced else flat).view(torch.int64)
    return flat.view(_INTEGERS[flat.element_size()])


def check_copies(step: int, everyone: Sequence[tuple[CopyHash, ...]]) -> None:
    """Check that the hashes from `Replicas.hashes` agree between copies; all ranks decide alike.

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
