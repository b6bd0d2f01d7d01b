"""Synthetic source indices for benchmarks and tests of planning."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_pipeline.index.columns import (
    GROUPS,
    PIECE_ITEM,
    PIECE_TEXT,
    SAMPLE_COLUMNS,
    ShardInfo,
    SourceIndex,
)


def synthetic_index(
    name: str,
    text_tokens: ArrayLike,
    *,
    category: str = "text",
    key: Sequence[str] | None = None,
    shards: Sequence[ShardInfo] | None = None,
    item_ptr: ArrayLike | None = None,
    item_text_before: ArrayLike | None = None,
    item_prefix: ArrayLike | None = None,
    tokenizer_name: str = "none",
    tokenizer_hash: str = "",
    **columns: ArrayLike,
) -> SourceIndex:
    """Build an index of texts and items from plain arrays. Omitted columns are zero.

    Args:
        text_tokens: [N] text tokens of each sample.
        item_ptr: [N+1] offsets of the samples' items; None means no items.
        item_text_before: [M] text tokens of the sample that precede the item.
        item_prefix: [M] tokens before the item's pads.
        shards: None creates one empty shard for each number in the `shard` column.
        columns: sample and item columns by name (`item_frames` defaults to 1).
    """
    text = np.asarray(text_tokens, np.int64)
    known = {**SAMPLE_COLUMNS, **GROUPS["item"]}
    if unknown := sorted(set(columns) - set(known)):
        raise ValueError(f"source {name!r}: unknown columns {unknown}")
    pointer = np.zeros(len(text) + 1, np.int64) if item_ptr is None else np.array(item_ptr)
    lengths = dict.fromkeys(known, int(pointer[-1])) | dict.fromkeys(SAMPLE_COLUMNS, len(text))
    columns = {"item_frames": np.ones(pointer[-1]), **columns}
    filled = {
        column: np.array(columns.get(column, np.zeros(lengths[column])), dtype=kind)
        for column, kind in known.items()
    }
    if shards is None:
        counts = np.bincount(filled["shard"]) if len(text) else np.zeros(0, int)
        shards = [
            ShardInfo(f"{name}/{i:06d}.tar", 0, "0" * 64, int(c)) for i, c in enumerate(counts)
        ]
    zeros = np.zeros(pointer[-1], np.int64)
    before = zeros if item_text_before is None else np.asarray(item_text_before)
    prefix = zeros if item_prefix is None else np.asarray(item_prefix)
    pieces = _pieces(text, pointer.astype(np.int64), before, prefix)
    empty: dict[str, Any] = {
        column: np.zeros(0, kind)
        for group in ("variant", "region", "point")
        for column, kind in GROUPS[group].items()
    }
    none: dict[str, Any] = {f"{group}_ptr": np.zeros(len(text) + 1, np.int64) for group in
            ("variant", "region", "point")}  # fmt: skip
    return SourceIndex(
        name=name,
        category=category,
        shards=tuple(shards),
        key=[f"{i:06d}" for i in range(len(text))] if key is None else key,
        item_ptr=pointer.astype(np.int64),
        tokenizer_name=tokenizer_name,
        tokenizer_hash=tokenizer_hash,
        **filled,
        **pieces,
        **empty,
        **none,
    )


def _pieces(
    text: NDArray[np.int64],
    item_ptr: NDArray[np.int64],
    before: NDArray[np.int64],
    prefix: NDArray[np.int64],
) -> dict[str, Any]:
    """Return the piece columns of samples laid out as text, item, text, item, ... text."""
    items = np.diff(item_ptr)
    pointer = np.concatenate([[0], np.cumsum(2 * items + 1)])
    sample = np.repeat(np.arange(len(text)), items)
    place = pointer[sample] + 2 * (np.arange(len(sample)) - item_ptr[sample]) + 1
    kind = np.full(pointer[-1], PIECE_TEXT, np.int8)
    kind[place] = PIECE_ITEM
    # Cumulative text tokens: before each item, and in total at the sample's last piece. Their
    # differences are the lengths of the text pieces.
    done = np.zeros(pointer[-1] + 1, np.int64)
    done[place - 1], done[pointer[1:] - 1] = before, text
    tokens = np.zeros(pointer[-1], np.int64)
    is_text = np.flatnonzero(kind == PIECE_TEXT)
    tokens[is_text] = np.diff(done[is_text], prepend=0)
    tokens[pointer[:-1]] = done[pointer[:-1]]
    tokens[place] = prefix
    return {
        "piece_ptr": pointer.astype(np.int64),
        "piece_kind": kind,
        "piece_tokens": tokens.astype(np.int32),
        "piece_variants": np.ones(len(kind), np.int16),
    }
