"""Samples to a source: every number in the index against a plain recount from the shards."""

import io
import json
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from data_pipeline.index import PIECE_ITEM, PIECE_TEXT
from data_pipeline.ingest import (
    CrudeSample,
    ImageSegment,
    IngestPolicy,
    TextSegment,
    VideoSegment,
    ingest,
)
from data_pipeline.manifest import item_span, read_index, sample_span
from data_pipeline.store import FolderStore
from tests.unit.data_pipeline.media import encoded, mp4, noise, samples


def _text(key: str, text: str = "hello") -> CrudeSample:
    return CrudeSample(key, [TextSegment(text)])


def test_index_and_shards_hold_what_was_handed_in(store, tokenizer):
    given = samples(12)
    index = ingest(given, store, "src", tokenizer, 30_000)
    assert index.num_samples == 12
    assert sum(shard.samples for shard in index.shards) == 12
    for i, sample in enumerate(given):
        assert index.key_of(i) == sample.key
        document = store.get(*sample_span(index, i))
        assert zlib.crc32(document) == index.json_crc[i]
        content = json.loads(document)
        assert content["meta"] == sample.meta
        items = list(range(*index.item_ptr[i : i + 2]))
        media, pieces = 0, []
        for segment, written in zip(sample.segments, content["segments"], strict=True):
            if isinstance(segment, TextSegment):
                assert written == {"kind": "text", "text": segment.text, "loss": segment.loss}
                pieces.append((PIECE_TEXT, len(tokenizer.encode(segment.text)), 1))
                continue
            video = isinstance(segment, VideoSegment)
            assert written["file"] == f"{media}.{segment.suffix}"
            assert written["kind"] == ("video" if video else "image")
            for chunk in range(3 if video else 1):  # 22 frames at 4 per second: chunks of 4, 4, 3
                item = items.pop(0)
                assert store.get(*item_span(index, item)) == segment.data
                assert index.item_crc[item] == zlib.crc32(segment.data)
                layout = ("item_kind", "item_media", "item_chunk")
                assert [int(getattr(index, name)[item]) for name in layout] == [video, media, chunk]
                size = (48, 64) if video else Image.open(io.BytesIO(segment.data)).size[::-1]
                assert (index.item_height[item], index.item_width[item]) == size
                assert index.item_frames[item] == ((4, 4, 3)[chunk] if video else 1)
                stamp = ("00:00:00.000", "00:00:02.000", "00:00:04.250")[chunk]
                prefix = tokenizer.video_prefix(stamp) if video else tokenizer.image_prefix()
                pieces.append((PIECE_ITEM, len(prefix), 1))
            media += 1
        assert not items
        row = slice(index.piece_ptr[i], index.piece_ptr[i + 1])
        columns = (index.piece_kind, index.piece_tokens, index.piece_variants)
        assert list(zip(*(column[row].tolist() for column in columns))) == pieces
        assert index.text_tokens[i] == sum(p[1] for p in pieces if p[0] == PIECE_TEXT)


def test_what_ingest_returns_is_what_is_read_later(store, tokenizer):
    index = ingest(samples(), store, "src", tokenizer)
    found = read_index(store, "src")
    assert found.content_hash == index.content_hash
    assert found.shards == index.shards
    assert (found.tokenizer_name, found.tokenizer_hash) == ("tiny", tokenizer.hash)


def test_equal_samples_give_equal_objects(tmp_path, tokenizer):
    contents = []
    for name in ("one", "two"):
        store = FolderStore(tmp_path / name)
        ingest(iter(samples(12)), store, "src", tokenizer, 30_000)
        contents.append({key: store.get(key) for key in store.list()})
    assert contents[0] == contents[1]


def test_shards_stay_below_their_size(store, tokenizer):
    limit = 16_384
    big = CrudeSample("big", [ImageSegment(encoded(noise(100, 100)), "png")])
    index = ingest([*samples(9), big, _text("last")], store, "src", tokenizer, limit)
    for shard in index.shards:
        assert shard.size <= limit or shard.samples == 1
    assert max(shard.size for shard in index.shards) > limit  # the big one made its own
    for shard in index.shards:
        with tarfile.open(fileobj=io.BytesIO(store.get(shard.key))) as tar:
            assert len([n for n in tar.getnames() if n.endswith(".json")]) == shard.samples


def test_the_manifest_is_put_last_and_once(store, tokenizer):
    order, put = [], store.put
    store.put = lambda key, data: (order.append((key, len(data))), put(key, data))[1]
    index = ingest(samples(9), store, "src", tokenizer, 16_384)
    shards = [shard.key for shard in index.shards]
    keys = [key.removeprefix("src/") for key, _ in order]
    tail = ["rejected.jsonl", "index.parquet", "manifest.json"]
    assert keys == ["rejected.jsonl", *(key.removeprefix("src/") for key in shards), *tail]
    assert [size for key, size in order if key in shards] == [s.size for s in index.shards]


def test_an_ingest_that_stops_is_invisible_and_can_be_repeated(store, tokenizer):
    def broken():
        yield from samples(9)
        raise RuntimeError("source gone")

    with pytest.raises(RuntimeError, match="source gone"):
        ingest(broken(), store, "src", tokenizer, 16_384)
    assert "src/manifest.json" not in store.list()
    assert any(key.endswith(".tar") for key in store.list())
    index = ingest(samples(9), store, "src", tokenizer, 16_384)
    assert read_index(store, "src").content_hash == index.content_hash


def test_a_finished_source_is_not_overwritten(store, tokenizer):
    ingest(samples(3), store, "src", tokenizer)
    with pytest.raises(ValueError, match="finished source of this name exists"):
        ingest(samples(6), store, "src", tokenizer)


PNG = encoded(noise(28, 28))
REJECTED = {
    "key twice": _text("good"),
    "bad key": _text("with.dot"),
    "empty": CrudeSample("e", []),
    "unknown suffix": CrudeSample("u", [ImageSegment(PNG, "bmp")]),
    "undecodable": CrudeSample("d", [TextSegment("x"), ImageSegment(PNG[:-30], "png")]),
    "not JSON": CrudeSample("j", [TextSegment("x")], {"nan": float("nan")}),
    "too large": _text("l", "many tokens " * 200),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_what_cannot_be_used_is_left_out_with_its_reason(store, tokenizer, reason):
    bad, told, policy = REJECTED[reason], [], IngestPolicy(max_text_tokens=300)
    given = [_text("good"), bad, _text("after")]
    index = ingest(given, store, "src", tokenizer, policy=policy, rejected=told.append)
    assert [index.key_of(i) for i in range(2)] == ["good", "after"]
    lines = [json.loads(line) for line in store.get("src/rejected.jsonl").splitlines()]
    assert [(line["key"], line["reason"]) for line in lines] == [(bad.key, reason)]
    assert lines[0]["detail"]
    assert [vars(rejection) for rejection in told] == lines


@pytest.mark.parametrize(
    "segment",
    [
        TextSegment(""),
        ImageSegment(b"", "png"),
        ImageSegment(PNG, "jpg"),
        ImageSegment(mp4(3), "mp4"),
        VideoSegment(PNG),
        VideoSegment(mp4(30)[:-2000]),
        ImageSegment(encoded(np.zeros((8, 8), np.uint16)), "png"),
        TextSegment("half a pair \ud800"),
    ],
)
def test_more_that_cannot_be_used(store, tokenizer, segment):
    given = [_text("good"), CrudeSample("bad", [segment])]
    index = ingest(given, store, "src", tokenizer)
    assert index.num_samples == 1
    assert json.loads(store.get("src/rejected.jsonl"))["key"] == "bad"


def test_too_many_items_or_bytes(store, tokenizer):
    pictures = CrudeSample("p", [ImageSegment(PNG, ".PNG"), ImageSegment(PNG, "png")])
    for name, policy in (
        ("items", IngestPolicy(max_items=1)),
        ("bytes", IngestPolicy(max_media_bytes=len(PNG) - 1)),
    ):
        assert ingest([_text("a"), pictures], store, name, tokenizer, policy=policy).num_items == 0
    assert ingest([pictures], store, "ok", tokenizer).num_items == 2
    with pytest.raises(ValueError, match="2\\*\\*15"):
        IngestPolicy(max_items=2**15)


def test_no_sample_left_is_an_error_that_counts_the_reasons(store, tokenizer):
    with pytest.raises(ValueError, match=r"\{'empty': 2\}"):
        ingest([CrudeSample("a", []), CrudeSample("b", [])], store, "src", tokenizer)
    with pytest.raises(ValueError, match="none"):
        ingest([], store, "src", tokenizer)
    assert "src/manifest.json" not in store.list()


def test_names_and_sizes_are_checked(store, tokenizer):
    for name in ("", "a/b", "../x", "a.b"):
        with pytest.raises(ValueError, match="use"):
            ingest(samples(1), store, name, tokenizer)
    with pytest.raises(ValueError, match="4096"):
        ingest(samples(1), store, "a", tokenizer, 100)


def test_progress_counts_and_turned_images_are_told(store, tokenizer):
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = ImageSegment(encoded(noise(28, 28), "JPEG", exif=exif), "jpg")
    told = []
    given = [*samples(9), CrudeSample("t", [turned]), CrudeSample("bad", [])]
    index = ingest(given, store, "src", tokenizer, 16_384, progress=told.append)
    assert [p.shards for p in told] == list(range(1, len(index.shards) + 1))
    last = told[-1]
    assert (last.samples, last.rejected, last.turned) == (10, 1, 1)
    assert last.bytes == sum(shard.size for shard in index.shards)
