"""A source with shards of any size, written without ingesting that much data."""

import hashlib
import random
from dataclasses import replace

import numpy as np

from data_pipeline.index.columns import ShardInfo, SourceIndex
from data_pipeline.index.manifest import read_index, write_index
from data_pipeline.store.open import Store


def bulk_source(store: Store, like: str, name: str, count: int, size: int) -> SourceIndex:
    """Write a source of `count` shards of `size` random bytes each, with the samples of `like`.

    Index, manifest and hashes are consistent. The shards do not contain the samples that the index
    lists, so the source is only useful where shards are moved as whole files.
    """
    draw, shards = random.Random(name), []
    for number in range(count):
        data = draw.randbytes(size)
        key = f"{name}/{number:06d}.tar"
        store.put(key, data)
        shards.append(ShardInfo(key, size, hashlib.sha256(data).hexdigest(), 0))
    old = read_index(store, like)
    column = np.zeros_like(old.shard)
    index = replace(old, name=name, shards=tuple(shards), shard=column, index_sha256="")
    write_index(store, index)
    return index
