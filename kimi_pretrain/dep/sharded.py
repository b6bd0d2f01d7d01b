"""Encodes one large item on a block of 2, 4, 8 or 16 ranks together.

The sequence is divided outside attention and the heads inside it, as in DeepSpeed-Ulysses (arXiv
2309.14509). A member holds a contiguous range of the item's tokens with all their patches
(`moonvit3d/share.py`), and computes embedding, positions, norms, MLPs, merging and projection
locally. Two all-to-alls surround the attention of each layer; the second undoes the first:

    queries, keys, values   [own patches, all heads]  ->  [all patches, own heads]
    the result              [all patches, own heads]  ->  [own patches, all heads]

Their gradients take the reverse paths. Every collective depends on the previous one, forward and
backward, so all members issue them in one order, whatever else autograd schedules. A member
computes weight gradients of its own patches; their sum over the members is the whole item's
gradient, without a divisor.

Shape suffixes: L patches of the item, J patches of one member, N heads, M heads of one member,
H head width, m members.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from einops import rearrange
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_pretrain.dep.places import token_border
from moonvit3d import rows
from moonvit3d.attention import Segments, attend
from moonvit3d.geometry import MERGE, PATCH, num_tokens
from moonvit3d.model import VisionEncoder
from moonvit3d.share import Grid, Share, patch_rows

__all__ = [
    "BlockAttention",
    "blocks",
    "encode",
    "patch_rows",
    "scatter_patches",
    "token_range",
]


# Ranges of members -------------------------------------------------------------------------------


def token_range(tokens: int, parts: int, member: int) -> range:
    """Return the consecutive tokens that a member holds; all members hold nearly equal numbers.

    Args:
        tokens: tokens of the item; if there are fewer tokens than members, some members hold none.
        parts: number of members of the block.
        member: 0 to parts - 1.
    """
    if not 0 <= member < parts:
        raise ValueError(f"member {member} of a block of {parts}: want 0 to {parts - 1}")
    return range(token_border(tokens, parts, member), token_border(tokens, parts, member + 1))


def patches_per_member(grid: Grid, parts: int) -> list[int]:
    """Return the number of an item's patches that each member of a block holds."""
    ranges = (token_range(num_tokens(*grid), parts, member) for member in range(parts))
    return [MERGE * MERGE * grid[0] * len(tokens) for tokens in ranges]


# Groups ------------------------------------------------------------------------------------------


def blocks(
    scopes: Sequence[Sequence[int]], max_split: int, timeout_seconds: float
) -> dict[int, dist.ProcessGroup]:
    """Make the process groups of all aligned blocks of 2, 4, ... max_split ranks.

    Every rank of the job calls this with equal arguments. For a block without this rank, the call
    only increments a counter: there is no barrier and no message. The 3,840 blocks of 4,096 ranks
    take 20 ms per rank. Gloo connects the members of a block here; NCCL creates a communicator at
    the block's first collective. Do not bind the default group to a device
    (`init_process_group(device_id=...)`): NCCL would then split it for each block, and all ranks
    would take part in every split.

    `use_local_synchronization=True`, with which only members would call, does not work here. It
    names a group by the number of groups that a rank is already in, and Megatron-Core puts the
    ranks of some stages into more groups than others. Members would then wait for each other under
    different names, and time out.

    Args:
        scopes: global ranks of each group that shares the encoding, in rising order. Blocks are
            aligned inside the list of their scope.
        max_split: 1 or a power of two.
        timeout_seconds: time limit of each collective of a block.

    Returns:
        size -> the block of that size with this rank. A size is missing if the scope ends before
        the block is full.

    Raises:
        ValueError: max_split is no power of two, ranks are out of order or in two scopes.
    """
    _check_scopes(scopes, max_split)
    mine: dict[int, dist.ProcessGroup] = {}
    for size in (2**power for power in range(1, max_split.bit_length())):
        for scope in scopes:
            for start in range(0, len(scope) - size + 1, size):
                members = [int(rank) for rank in scope[start : start + size]]
                group = dist.new_group(members, timeout=timedelta(seconds=timeout_seconds))
                if isinstance(group, dist.ProcessGroup):  # a non-member gets a number instead
                    mine[size] = group
    return mine


def _check_scopes(scopes: Sequence[Sequence[int]], max_split: int) -> None:
    if max_split < 1 or max_split & (max_split - 1):
        raise ValueError(f"max_split = {max_split}: want 1, 2, 4, 8 or 16")
    for scope in scopes:
        if list(scope) != sorted(set(scope)):
            raise ValueError(f"scope {list(scope)}: want each rank once, in rising order")
    ranks = [rank for scope in scopes for rank in scope]
    if len(ranks) != len(set(ranks)):
        raise ValueError("two scopes share a rank: want each rank in one scope")


# Pixels ------------------------------------------------------------------------------------------


def scatter_patches(
    patches: NDArray[np.uint8] | None, grid: Grid, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Send each member its patches of an item that the block's first rank holds.

    Args:
        patches: uint8 [patches of the item, 3, 14, 14] on the first rank, None on the others.
        grid: (t, h, w) of the whole item.
        group: process group of the block; every member calls.

    Returns:
        uint8 [own patches, 3, 14, 14] in the order of `patch_rows`.

    Raises:
        ValueError: another rank than the first has patches, or the patches do not match the grid.
    """
    held, member = patches_per_member(grid, group.size()), group.rank()
    shape = (3, PATCH, PATCH)
    if member:
        if patches is not None:
            raise ValueError(f"member {member} brings patches of {grid}: the first rank alone may")
        sent = torch.empty(0, *shape, dtype=torch.uint8, device=device)
        counts = [0] * len(held)
    else:
        sent = torch.from_numpy(_in_order_of_members(patches, grid, len(held))).to(device)
        counts = held
    own = torch.empty(held[member], *shape, dtype=torch.uint8, device=device)
    from_first = [held[member]] + [0] * (len(held) - 1)
    dist.all_to_all_single(own, sent, from_first, counts, group=group)
    return own


def _in_order_of_members(
    patches: NDArray[np.uint8] | None, grid: Grid, parts: int
) -> NDArray[np.uint8]:
    t, h, w = grid
    wanted = (t * h * w, 3, PATCH, PATCH)
    if patches is None or patches.dtype != np.uint8 or patches.shape != wanted:
        found = "nothing" if patches is None else f"{patches.dtype} {patches.shape}"
        raise ValueError(
            f"patches of grid {grid} on the first rank: found {found}, want uint8 {wanted}"
        )
    ranges = (token_range(num_tokens(*grid), parts, member) for member in range(parts))
    return patches[np.concatenate([patch_rows(grid, tokens) for tokens in ranges])]


# Encoding ----------------------------------------------------------------------------------------


def encode(module: VisionEncoder, patches: Tensor, grid: Grid, group: dist.ProcessGroup) -> Tensor:
    """Encode this member's tokens of an item, together with the other members of its block.

    Every member must call it. If it was called with a graph, every member must also call backward
    on the result, even a member without tokens, because both passes communicate.

    Args:
        module: encoder with the same weights on every member.
        patches: this member's patches from `scatter_patches`: uint8 pixels or normalised floats.
        grid: (t, h, w) of the whole item.
        group: process group of the block; a rank's index in it is its member number.

    Returns:
        [tokens of `token_range`, out_width] in the parameters' dtype.

    Raises:
        ValueError: the heads do not divide among the members, or the patches have a wrong number.
    """
    parts, heads = group.size(), module.config.heads
    if heads % parts:
        raise ValueError(
            f"a block of {parts} ranks cannot share {heads} attention heads "
            f"(model.vision.heads = {heads}); lower dep.max_split to a divisor of the heads"
        )
    held = tuple(patches_per_member(grid, parts))
    attention = BlockAttention(group, held, Segments.of([sum(held)], patches.device))
    tokens = token_range(num_tokens(*grid), parts, group.rank())
    return module.forward_share(patches, Share(grid, tokens, attention))


@dataclass(frozen=True)
class BlockAttention:
    """Attention over an item whose patches are spread over a block: the `attend` of a `Share`.

    Args:
        held: number of patches of each member.
        whole: the item as one segment.
    """

    group: dist.ProcessGroup
    held: tuple[int, ...]
    whole: Segments

    def __call__(self, q_JNH: Tensor, k_JNH: Tensor, v_JNH: Tensor, segments: Segments) -> Tensor:
        """Attend from the member's own rows to the whole item; padding rows return zeros."""
        members, own = len(self.held), segments.lengths[0]
        evenly = (own,) * members
        parts = [
            rearrange(x_JNH[:own], "j (m n) h -> m j n h", m=members)
            for x_JNH in (q_JNH, k_JNH, v_JNH)
        ]
        sent = torch.stack(parts, dim=2).flatten(0, 1)  # one copy: [members * own, 3, M, H]
        q_LMH, k_LMH, v_LMH = _exchange(sent, evenly, self.held, self.group).unbind(1)
        mixed_LMH = attend(q_LMH, k_LMH, v_LMH, self.whole)
        back = _exchange(mixed_LMH, self.held, evenly, self.group)
        mixed_JNH = rearrange(back, "(m j) n h -> j (m n) h", m=members)
        return rows.pad(mixed_JNH, len(q_JNH) - own)


def _exchange(
    x: Tensor, to: Sequence[int], from_: Sequence[int], group: dist.ProcessGroup
) -> Tensor:
    """Send `to[i]` rows of `x` to member i, in order, and receive `from_[i]` rows from it."""
    return _AllToAll.apply(x, list(to), list(from_), group)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, to: list[int], from_: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.to, ctx.from_, ctx.group = to, from_, group
        received = x.new_empty(sum(from_), *x.shape[1:])
        dist.all_to_all_single(received, x.contiguous(), from_, to, group=group)
        return received

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.from_, ctx.to, ctx.group), None, None, None
