"""How much memory a vision plan needs, and which chunks may keep their activations. Pure."""

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
    """Return the most memory that a step's media take on each rank, int64 [ranks], in bytes.

    The embeddings that it holds (`VisionPlan.tokens_held`), and the activations of the largest
    chunk that it may run: a bound, because where chunks are cut depends on the order of items.

    Args:
        grids: patch grids (frames, height, width) of the items, [items, 3].
        itemsize: bytes of a number.
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
    """Refuse a plan that does not fit.

    Raises:
        TooMuchMemory: they are more than `limit_bytes` on some rank.
    """
    worst = int(needed.argmax())
    if needed[worst] > limit_bytes:
        raise TooMuchMemory(
            f"the media of rank {worst} would take {needed[worst] / GIB:.2f} GiB, over "
            f"dep.memory_limit_gib={limit_bytes / GIB:g}; lower dep.max_patches_per_chunk or "
            "data.limits, or raise the limit"
        )


def cut(shares: Shares, patches: Sequence[int], budget: int) -> list[slice]:
    """Cut what a rank encodes into chunks: each shared item alone, then whole ones together.

    Args:
        shares: of one rank, shared items first (`VisionPlan.encoded_by`).
        patches: of the item of each share.
        budget: most patches of a chunk of whole items.

    Returns:
        Ranges of shares, that follow each other.
    """
    shared = int((shares.parts > 1).sum())
    whole = chunks(patches[shared:], budget)
    return [slice(n, n + 1) for n in range(shared)] + [
        slice(run.start + shared, run.stop + shared) for run in whole
    ]


def kept_chunks(activations: Sequence[int], room: int, first: int = 0) -> list[bool]:
    """Return which chunks keep their activations from the forward to the backward pass.

    One after the other is kept, as long as it fits beside those that are and the largest of the
    others, which will be computed again while all of these are there.

    Args:
        activations: bytes of each chunk.
        room: bytes for all that is there at one time.
        first: that may be kept; the chunks before it are always computed again.
    """
    kept = [False] * len(activations)
    while (found := _fits(activations, kept, room, first)) is not None:
        kept[found] = True
    return kept


def _fits(activations: Sequence[int], kept: Sequence[bool], room: int, first: int) -> int | None:
    """Return the first chunk, from `first` on, that can be kept beside those that are."""
    held = sum(size for size, keep in zip(activations, kept, strict=True) if keep)
    for number, size in enumerate(activations[first:], first):
        others = (s for n, s in enumerate(activations) if not kept[n] and n != number)
        if not kept[number] and held + size + max(others, default=0) <= room:
            return number
    return None
