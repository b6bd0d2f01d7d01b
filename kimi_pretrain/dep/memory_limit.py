"""Computes the memory of a vision plan and the chunks that may keep activations. Pure functions."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import GIB
from kimi_pretrain.dep.vision_plan import Shares, VisionPlan
from moonvit3d.config import MoonViTConfig
from moonvit3d.memory import activation_bytes
from moonvit3d.packing import chunks


def vision_bytes(
    plan: VisionPlan,
    grids: NDArray[np.int64],
    config: MoonViTConfig,
    itemsize: int,
    max_patches_per_chunk: int,
) -> NDArray[np.int64]:
    """Return an upper bound on the memory of a step's media on each rank, int64 [ranks], in bytes.

    It counts the embeddings that the rank holds (`VisionPlan.tokens_held`) and the activations of
    its largest possible chunk. The exact chunks depend on the order of items.

    Args:
        grids: patch grids (frames, height, width) of the items, [items, 3].
        itemsize: bytes per number.
    """
    shares = plan.shares
    part = (shares.end - shares.begin) / np.maximum(1, plan.tokens[shares.item])
    patches = plan.patches[shares.item] * part
    activations = activation_bytes(grids, config, itemsize)[shares.item] * part
    ranks = plan.num_ranks
    total = np.bincount(shares.rank, activations, ranks)
    per_patch = np.zeros(ranks)
    np.maximum.at(per_patch, shares.rank, activations / np.maximum(1.0, patches))
    load = np.bincount(shares.rank, patches, ranks)
    chunk = np.minimum(total, np.minimum(load, max_patches_per_chunk) * per_patch)
    return np.ceil(chunk).astype(np.int64) + plan.tokens_held() * config.out_width * itemsize


class TooMuchMemory(ValueError):
    """A step's media do not fit; the message names the rank and both sizes."""


def check_memory(needed: NDArray[np.int64], limit_bytes: int) -> None:
    """Refuse a plan that does not fit into memory.

    Raises:
        TooMuchMemory: some rank needs more than `limit_bytes`.
    """
    worst = int(needed.argmax())
    if needed[worst] > limit_bytes:
        raise TooMuchMemory(
            f"the media of rank {worst} would take {needed[worst] / GIB:.2f} GiB, over "
            f"dep.memory_limit_gib={limit_bytes / GIB:g}; lower dep.max_patches_per_chunk or "
            "data.limits, or raise the limit"
        )


def cut(shares: Shares, patches: Sequence[int], budget: int) -> list[slice]:
    """Cut a rank's work into chunks: one per shared item, then several whole items each.

    Args:
        shares: shares of one rank, shared items first (`VisionPlan.encoded_by`).
        patches: patches of each share's item.
        budget: most patches in a chunk of whole items.

    Returns:
        Consecutive ranges of shares.
    """
    shared = int((shares.parts > 1).sum())
    whole = chunks(patches[shared:], budget)
    return [slice(n, n + 1) for n in range(shared)] + [
        slice(run.start + shared, run.stop + shared) for run in whole
    ]


def kept_chunks(activations: Sequence[int], room: int, first: int = 0) -> list[bool]:
    """Return which chunks keep their activations from the forward to the backward pass.

    A chunk is kept if it fits next to the chunks already kept and the largest chunk that is
    recomputed, because the recompute happens while the kept ones are in memory.

    Args:
        activations: bytes of each chunk.
        room: bytes available at any time.
        first: index of the first chunk that may be kept; earlier ones are always recomputed.
    """
    kept = [False] * len(activations)
    while (found := _fits(activations, kept, room, first)) is not None:
        kept[found] = True
    return kept


def _fits(activations: Sequence[int], kept: Sequence[bool], room: int, first: int) -> int | None:
    """Return the first chunk, from `first` on, that fits next to the chunks already kept."""
    held = sum(size for size, keep in zip(activations, kept, strict=True) if keep)
    for number, size in enumerate(activations[first:], first):
        others = (s for n, s in enumerate(activations) if not kept[n] and n != number)
        if not kept[number] and held + size + max(others, default=0) <= room:
            return number
    return None
