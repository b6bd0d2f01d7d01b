"""Reindex with another tokenizer: equal to a new ingest, without reading the media."""

import numpy as np
import pytest

from data_pipeline.index.columns import COLUMNS, GROUPS
from data_pipeline.index.manifest import IndexMismatch, read_index
from data_pipeline.index.reads import check_shards
from data_pipeline.ingest.ingest import (
    CrudeSample,
    ImageSegment,
    RegionSegment,
    TextSegment,
    ingest,
)
from data_pipeline.ingest.reindex import reindex
from data_pipeline.store.open import MemoryStore, MissingKey
from data_pipeline.text import Tokenizer, train_ranks
from tests.unit.data_pipeline.conftest import TRAINING_TEXT
from tests.unit.data_pipeline.media import encoded, noise, samples

OTHER = Tokenizer(train_ranks([text.upper() + " 00:0" for text in TRAINING_TEXT], 300), "other")


def _samples():
    for number, sample in enumerate(samples(9)):
        regions = [
            RegionSegment("box", [[1, 2], [3, 4]], "\nrivers and towns", 1),
            RegionSegment("polygon", [[1, 2], [3, 4], [1, 4]], "a map", 1),
            RegionSegment("turn", label="up", media=1, degrees=90),
            TextSegment(texts=["the map shows", "12 rivers,", "345 towns and more"]),
        ]
        yield CrudeSample(sample.key, [*sample.segments, *(regions if number % 3 == 2 else [])])
    yield CrudeSample("large", [ImageSegment(encoded(noise(300, 300)), "png")])


@pytest.mark.parametrize("workers", [0, 1])
def test_counting_anew_equals_ingesting_anew(store, tokenizer, workers, monkeypatch):
    monkeypatch.setattr("data_pipeline.ingest.reindex._BATCH", 3)
    old = ingest(_samples(), store, "old", tokenizer, 30_000, category="caption")
    anew = ingest(_samples(), store, "anew", OTHER, 30_000, category="caption")
    before = {key: store.get(key) for key in store.list()}
    told = []
    index = reindex(store, "old", "new", OTHER, workers=workers, progress=lambda *n: told.append(n))
    assert told == [(3, 10), (6, 10), (9, 10), (10, 10)]
    for name in (*COLUMNS, *(f"{group}_ptr" for group in GROUPS)):
        assert np.array_equal(getattr(index, name), getattr(anew, name)), name
    assert not np.array_equal(index.piece_tokens, old.piece_tokens)
    assert not np.array_equal(index.variant_tokens, old.variant_tokens)
    found = read_index(store, "new")
    # Shards, columns and tokenizer are equal; only the keys of the shards differ.
    assert found.content_hash == index.content_hash == anew.content_hash
    assert (found.tokenizer_name, found.tokenizer_hash) == ("other", OTHER.hash)
    assert found.shards == old.shards
    assert check_shards(store, found) == len(old.shards)
    assert before.items() <= {key: store.get(key) for key in store.list()}.items()


def test_media_are_not_read(tokenizer):
    store = MemoryStore("reindex")
    store.clear()
    picture = ImageSegment(encoded(noise(200, 200)), "png")
    given = (CrudeSample(f"k{i}", [picture, TextSegment("a map")]) for i in range(20))
    index = ingest(given, store, "old", tokenizer, category="caption")
    before = store.stats.bytes
    reindex(store, "old", "new", OTHER)
    spare = len(store.get("old/index.parquet")) + len(store.get("old/manifest.json"))
    assert store.stats.bytes - before < 2 * spare + index.json_length.sum() + 5_000
    assert index.item_length.sum() > 20 * (store.stats.bytes - before)


def test_what_cannot_be_counted_anew_is_an_error(store, tokenizer):
    index = ingest(_samples(), store, "old", tokenizer, 30_000, category="caption")
    with pytest.raises(ValueError, match="old: a finished source of this name exists"):
        reindex(store, "old", "old", OTHER)
    with pytest.raises(ValueError, match="source name 'a/b'"):
        reindex(store, "old", "a/b", OTHER)
    with pytest.raises(MissingKey, match="no finished source"):
        reindex(store, "none", "new", OTHER)
    shard = index.shards[0].key
    data = bytearray(store.get(shard))
    data[index.json_offset[1] + 20] ^= 1
    store.put(shard, bytes(data))
    with pytest.raises(IndexMismatch, match=r"s-0001.*CRC-32"):
        reindex(store, "old", "new", OTHER)
    assert "new/manifest.json" not in store.list()
