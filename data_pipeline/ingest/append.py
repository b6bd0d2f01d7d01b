"""More samples of a kind: a new source that holds an old one's shards by reference, and new ones.

A source that is finished never changes, because runs may be reading it. So growth is a source of
its own, a version after the old one: its index has the old samples first, exactly as they were,
then the new. No byte of the old shards is read or copied.
"""

from typing import Any

import numpy as np
import pyarrow as pa

from data_pipeline.index.columns import COLUMNS, GROUPS, SourceIndex
from data_pipeline.text import Tokenizer


def check_appendable(old: SourceIndex, category: str, tokenizer: Tokenizer) -> None:
    """Refuse to put samples of another kind behind a source, or samples counted otherwise.

    Raises:
        ValueError: names both categories or tokenizers.
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
    """Return the index of the samples of one source, and after them those of another.

    Args:
        old: its shards stay where they are.
        new: gives the name. Neither keys nor shards may be in both.
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
