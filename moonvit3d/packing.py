"""Cuts a batch of items into packs of bounded size. Plain integers, no torch."""

from collections.abc import Iterable


def chunks(sizes: Iterable[int], max_patches_per_chunk: int) -> list[slice]:
    """Cut items of these sizes, in order, into runs of at most `max_patches_per_chunk` patches.

    No item is divided, and no run is empty.

    Raises:
        ValueError: a single item exceeds the budget.
    """
    runs: list[slice] = []
    start = end = filled = 0
    for item, size in enumerate(sizes):
        if size > max_patches_per_chunk:
            raise ValueError(
                f"item {item} has {size} patches, over max_patches_per_chunk="
                f"{max_patches_per_chunk}; raise it, or lower the patch limits so that images "
                "are shrunk"
            )
        if filled + size > max_patches_per_chunk:
            runs.append(slice(start, end))
            start, filled = item, 0
        end = item + 1
        filled += size
    return [*runs, slice(start, end)] if end else []
