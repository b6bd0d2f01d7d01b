"""Statistics of sources against slow plain counting, and planted duplicates."""

import math

import numpy as np
import pytest

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.index.reads import medium_of
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    RegionSegment,
    TextSegment,
    VideoSegment,
)
from data_pipeline.inspect.duplicates import Place, find_duplicates
from data_pipeline.inspect.stats import histogram, source_stats, spread, totals
from data_pipeline.store.open import FolderStore
from moonvit3d.geometry import PatchLimits, grid
from tests.unit.data_pipeline.crude_samples import crude
from tests.unit.data_pipeline.media import encoded, mp4, noise
from tests.unit.data_pipeline.plain import made_index

LIMITS = PatchLimits(image=64, frame=8)


@pytest.fixture
def index(tokenizer, store) -> SourceIndex:
    return ingest(crude(8), store, "mixed", tokenizer, 20_000, category="grounding")


def test_tokens_are_what_laying_out_token_by_token_gives(index):
    found = source_stats(index, LIMITS, seq_len=60)
    lengths, pads, over = [], 0, 0
    for sample in range(index.num_samples):
        length = 2 + int(
            index.piece_tokens[index.piece_ptr[sample] : index.piece_ptr[sample + 1]].sum()
        )
        for item in range(index.item_ptr[sample], index.item_ptr[sample + 1]):
            columns = (index.item_kind, index.item_frames, index.item_height, index.item_width)
            _, rows, cols = grid(*(int(column[item]) for column in columns), LIMITS)
            length += rows * cols // 4 + 1
            pads += rows * cols // 4
        lengths.append(length)
        over += length > 60
    assert found["tokens"] == sum(lengths)
    assert found["media_tokens"] == pads
    assert found["text_tokens"] == int(index.text_tokens.sum())
    assert found["markup_tokens"] == sum(lengths) - pads - found["text_tokens"]
    assert found["tokens_per_sample"]["max"] == max(lengths)
    assert found["tokens_per_sample"]["p50"] == np.median(lengths)
    assert found["longest"][0] == [index.key_of(int(np.argmax(lengths))), max(lengths)]
    assert 0 < over < 8
    assert found["over_seq_len"]["samples"] == over


def test_what_a_source_holds_is_counted(index, store):
    found = source_stats(index, LIMITS)
    assert found["samples"] == len(crude(8))
    assert found["images"]["files"] == 2 * (1 + 1 + 2)
    assert (found["videos"]["files"], found["videos"]["chunks"]) == (2, 6)
    assert found["videos"]["frames"] == 2 * 11  # 22 frames at 4 a second, sampled at 2
    assert found["items"] == 8 + 6
    assert found["regions"] == {"point": 2, "box": 4, "polygon": 2, "turn": 2}
    assert (found["texts_with_variants"], found["variants"]) == (2, 4)
    media = sum(len(s.data) for sample in crude(8) for s in sample.segments if hasattr(s, "data"))
    assert found["media_bytes"] == media == found["images"]["bytes"] + found["videos"]["bytes"]
    assert found["bytes"] == sum(store.head(shard.key).size for shard in index.shards)
    assert found["scaled_down"] == 6  # the videos: their 64 x 48 pixels are 12 patches
    assert source_stats(index, PatchLimits())["scaled_down"] == 0
    assert found["images"]["longer_side"]["max"] == 64
    assert found["images"]["aspect"]["max"] == pytest.approx(64 / 33)
    assert "over_seq_len" not in found


def test_a_source_of_text_alone(tokenizer, store):
    index = ingest([CrudeSample("a", [TextSegment("words")])], store, "t", tokenizer)
    found = source_stats(index, LIMITS, 4096)
    assert found["images"] == {
        "files": 0, "bytes": 0, "megapixels": {"count": 0}, "longer_side": {"count": 0},
        "aspect": {"count": 0},
    }  # fmt: skip
    assert found["media_share"] == 0.0


def test_totals_add_up_by_category():
    indices = [made_index(name, [5, 4], seed, media=0.5) for seed, name in enumerate("abc")]
    sources = [source_stats(index, LIMITS) for index in indices]
    sources[2] = sources[2] | {"category": "code"}
    found = totals(sources)
    assert found["all"]["samples"] == 27
    assert found["categories"]["text"]["sources"] == 2
    for name in ("samples", "tokens", "media_tokens", "items"):
        parts = [part[name] for part in found["categories"].values()]
        assert sum(parts) == found["all"][name] == sum(source[name] for source in sources)


def test_a_histogram_counts_everything_once():
    values = [0, 0, 1, 1.4, 2, 3, 4, 5, 1000]
    found = histogram(values, 2)
    edges, counts = found["edges"], found["counts"]
    assert found["zeros"] == [2]
    assert len(edges) == len(counts) + 1
    assert edges[0] == 1
    for low, high, count in zip(edges, edges[1:], counts):
        assert count == sum(low <= value < high for value in values)
        assert math.isclose(high / low, math.sqrt(2))
    assert counts[0] > 0
    assert counts[-1] > 0


def test_histograms_share_their_edges_and_nothing_has_none():
    one, other = histogram([3, 100], 4)["edges"], histogram([0.2, 7], 4)["edges"]
    assert set(one) & set(other)
    assert histogram([0, 0], 2) == {"zeros": [2], "counts": [], "edges": []}
    assert spread([]) == {"count": 0}
    assert spread([7])["p1"] == spread([7])["mean"] == 7


# Duplicates -------------------------------------------------------------------------------------


def picture(seed: int) -> ImageSegment:
    return ImageSegment(encoded(noise(20, 30, seed)), "png")


def places(groups) -> list[set[Place]]:
    return [set(group.places) for group in groups]


@pytest.fixture
def planted(tokenizer, store) -> tuple[FolderStore, list[SourceIndex]]:
    clip = mp4(10)
    one = [
        CrudeSample("a", [picture(1), TextSegment("first")]),
        CrudeSample("b", [picture(1), TextSegment("second")]),  # the image of a
        CrudeSample("c", [TextSegment("same"), picture(2), picture(3)]),
        CrudeSample("d", [TextSegment("same"), picture(3), picture(2)]),  # in another order
        CrudeSample("e", [VideoSegment(clip), TextSegment("clip")]),
        CrudeSample("f", [TextSegment("alone")]),
    ]
    two = [
        # equal to c in another source
        CrudeSample("z", [TextSegment("same"), picture(2), picture(3)]),
        CrudeSample("y", [TextSegment("alone")]),
        CrudeSample("x", [TextSegment("aloft")]),
        CrudeSample("w", [VideoSegment(clip), TextSegment("clip")], {"but": "another document"}),
    ]
    return store, [
        ingest(one, store, "one", tokenizer, 8192),
        ingest(two, store, "two", tokenizer, 4096),
    ]


def test_equal_media_and_samples_are_found_across_sources(planted):
    found = find_duplicates(*planted)
    media = places(found.media)
    assert {Place("one", "a", 0), Place("one", "b", 0)} in media
    assert {Place("one", "c", 0), Place("one", "d", 1), Place("two", "z", 0)} in media
    assert {Place("one", "c", 1), Place("one", "d", 0), Place("two", "z", 1)} in media
    assert {Place("one", "e", 0), Place("two", "w", 0)} in media
    assert len(media) == 4
    samples = places(found.samples)
    assert {Place("one", "c"), Place("two", "z")} in samples
    assert {Place("one", "f"), Place("two", "y")} in samples
    assert len(samples) == 2
    redundant = [group.redundant_bytes for group in found.media]
    assert redundant == sorted(redundant, reverse=True)


def test_an_equal_crc_alone_is_no_duplicate(tokenizer, store):
    """Equal CRC-32s pass the filter, but the SHA-256 decides. These two words have one CRC-32."""
    samples = [CrudeSample(word, [TextSegment(word)]) for word in ("plumless", "buckeroo")]
    index = ingest(samples, store, "words", tokenizer)
    assert index.json_crc[0] == index.json_crc[1]
    before = store.stats.bytes
    assert find_duplicates(store, [index]).samples == ()
    assert store.stats.bytes > before


def test_damaged_samples_are_named_and_not_counted(planted):
    store, indices = planted
    span = medium_of(indices[0], 0).span
    data = bytearray(store.get(span.key))
    data[span.offset + 20] ^= 1
    store.put(span.key, bytes(data))
    with pytest.raises(IndexMismatch, match=r"source 'one', sample 'a', file 0.* CRC-32 is"):
        find_duplicates(store, indices)


def test_only_what_may_be_equal_is_read(planted):
    store, indices = planted
    steps = []
    before = store.stats.bytes
    find_duplicates(store, indices, progress=lambda done, total: steps.append((done, total)))
    done, total = steps[-1]
    assert done == total
    everything = sum(shard.size for index in indices for shard in index.shards)
    assert total <= store.stats.bytes - before < everything


def test_without_equals_nothing_is_read(tokenizer, store):
    samples = [CrudeSample(f"s{i}", [picture(i), TextSegment(f"text {i}")]) for i in range(4)]
    index = ingest(samples, store, "other", tokenizer)
    before = store.stats.requests
    found = find_duplicates(store, [index])
    assert (found.media, found.samples) == ((), ())
    assert store.stats.requests == before


def test_the_same_shards_under_another_index_are_no_copies(planted, tokenizer):
    store, indices = planted
    again = reindex(store, "one", "one_again", tokenizer)
    found = find_duplicates(store, [*indices, again])
    assert found.left_out == ("one_again",)
    assert found.media == find_duplicates(store, indices).media


def test_the_report_lists_the_largest_groups(planted):
    found = find_duplicates(*planted).as_dict(listed=2)
    assert found["media"]["groups"] == 4
    assert found["media"]["redundant"] == 1 + 2 + 2 + 1
    assert len(found["media"]["largest"]) == 2
    first = found["media"]["largest"][0]
    assert first["copies"] >= 2
    assert len(first["places"]) <= 2
    assert found["media"]["redundant_bytes"] >= first["bytes"] * (first["copies"] - 1)


def test_regions_are_counted_as_written_tokens(tokenizer, store):
    sample = CrudeSample(
        "r", [picture(0), RegionSegment("box", [[1, 1], [9, 9]], " cat"), TextSegment(" ok")]
    )
    found = source_stats(ingest([sample], store, "regions", tokenizer), LIMITS)
    assert found["region_tokens"] == tokenizer.region_length(" cat", 4)
    assert found["text_tokens"] == found["region_tokens"] + len(tokenizer.encode(" ok"))
