"""Appends samples: builds a new source that references the old shards and adds new shards.

A finished source never changes, because runs may be reading it. Appending therefore creates a new
source, the next version: its index has the old samples first, unchanged, then the new samples. The
old shards are neither read nor copied.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.index.columns import COLUMNS, GROUPS, SourceIndex
from data_pipeline.text import Tokenizer


def check_appendable(old: SourceIndex, category: str, tokenizer: Tokenizer) -> None:
    """Refuse to append samples of another category or tokenizer.

    Raises:
        ValueError: the message names both categories or tokenizers.
    """
    for what, found, expected in (
        ("category", category, old.category),
        ("tokenizer", tokenizer.hash, old.tokenizer_hash),
    ):
        if found != expected:
            raise ValueError(
                f"source {old.name!r} has {what} {expected[:12]}, what is to be appended "
                f"{found[:12]}: give the same, or make a source of its own"
            )


def appended(old: SourceIndex, new: SourceIndex) -> SourceIndex:
    """Return an index with the samples of `old`, followed by those of `new`.

    Args:
        old: index of the old source, whose shards are referenced.
        new: index of the added samples, with the new source's name. The two must not share keys or
            shards.
    """
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(old, name), getattr(new, name)])
        for name in COLUMNS
        if name != "shard"
    }
    for group in GROUPS:
        first, second = getattr(old, f"{group}_ptr"), getattr(new, f"{group}_ptr")
        columns[f"{group}_ptr"] = np.concatenate([first, first[-1] + second[1:]])
    keys = [pa.array(index.key, pa.string()) for index in (old, new)]
    return SourceIndex(
        name=new.name,
        category=new.category,
        shards=(*old.shards, *new.shards),
        key=pa.concat_arrays(keys),
        shard=np.concatenate([old.shard, new.shard + np.int32(len(old.shards))]),
        tokenizer_name=new.tokenizer_name,
        tokenizer_hash=new.tokenizer_hash,
        index_sha256="",
        redacted=old.redacted,
        made_as="",
        **columns,
    )
