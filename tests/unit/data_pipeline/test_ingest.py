"""Ingest: every number in the index against a plain recount from the shards."""

import io
import json
import re
import tarfile
import zlib

import numpy as np
import pytest
from PIL import Image

from data_pipeline.index.columns import PIECE_ITEM, PIECE_TEXT
from data_pipeline.index.manifest import read_index
from data_pipeline.index.reads import document_of, medium_of
from data_pipeline.ingest.ingest import (
    CrudeSample,
    ImageSegment,
    IngestPolicy,
    RegionSegment,
    TextSegment,
    VideoSegment,
    ingest,
)
from tests.unit.data_pipeline.media import encoded, mp4, noise, samples, watch_puts


def _text(key: str, text: str = "hello") -> CrudeSample:
    return CrudeSample(key, [TextSegment(text)])


def test_index_and_shards_hold_what_was_handed_in(store, tokenizer):
    given = samples(12)
    index = ingest(given, store, "src", tokenizer, 30_000)
    assert index.num_samples == 12
    assert sum(shard.samples for shard in index.shards) == 12
    for i, sample in enumerate(given):
        assert index.key_of(i) == sample.key
        document = store.get(*document_of(index, i).span)
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
                assert store.get(*medium_of(index, item).span) == segment.data
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


def test_shards_stay_below_their_size(store, tokenizer):
    limit = 16_384
    big = CrudeSample("big", [ImageSegment(encoded(noise(100, 100)), "png")])
    index = ingest([*samples(9), big, _text("last")], store, "src", tokenizer, limit)
    for shard in index.shards:
        assert shard.size <= limit or shard.samples == 1
    assert max(shard.size for shard in index.shards) > limit  # the large sample got its own shard
    for shard in index.shards:
        with tarfile.open(fileobj=io.BytesIO(store.get(shard.key))) as tar:
            assert len([n for n in tar.getnames() if n.endswith(".json")]) == shard.samples


def test_the_manifest_is_put_last_and_once(store, tokenizer):
    order = []
    watch_puts(store, lambda key, data: order.append((key, len(data))))
    index = ingest(samples(9), store, "src", tokenizer, 16_384)
    shards = [shard.key for shard in index.shards]
    lock, *keys = [key.removeprefix("src/") for key, _ in order]
    assert lock == ".ingest/lock"
    tail = ["rejected.jsonl", "provenance.json", "index.parquet", "manifest.json"]
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


PNG = encoded(noise(28, 28))
REJECTED = {
    "key twice": _text("good"),
    "bad key": _text("with.dot"),
    "empty": CrudeSample("e", []),
    "bad text": CrudeSample("t", [TextSegment(texts=["one"])]),
    "bad region": CrudeSample("r", [TextSegment("x"), RegionSegment("point", [[1, 2]])]),
    "bad segment": CrudeSample("s", ["text"]),
    "unknown suffix": CrudeSample("u", [ImageSegment(PNG, "bmp")]),
    "undecodable": CrudeSample("d", [TextSegment("x"), ImageSegment(PNG[:-30], "png")]),
    "not JSON": CrudeSample("j", [TextSegment("x")], {"nan": float("nan")}),
    "too large": _text("l", "many tokens " * 200),
}
TWO_PICTURES = [ImageSegment(PNG, ".PNG"), ImageSegment(PNG, "png")]
TOO_LARGE = {
    "max_items": (TWO_PICTURES, 1),
    "max_media_bytes": (TWO_PICTURES, len(PNG) - 1),
    "max_text_tokens": ([TextSegment(texts=["short", "many tokens " * 99])], 99),
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


@pytest.mark.parametrize("limit", TOO_LARGE)
def test_what_is_too_large_is_left_out(store, tokenizer, limit):
    segments, most = TOO_LARGE[limit]
    given = [_text("good"), CrudeSample("large", segments)]
    policy = IngestPolicy(**{limit: most})
    assert ingest(given, store, "less", tokenizer, policy=policy).key == ["good"]
    assert ingest(given, store, "all", tokenizer).num_samples == 2


@pytest.mark.parametrize(
    "segment",
    [
        TextSegment(""),
        ImageSegment(b"", "png"),
        ImageSegment(mp4(3), "jpg"),
        ImageSegment(mp4(3), "mp4"),
        VideoSegment(PNG),
        VideoSegment(mp4(30)[:-2000]),
        ImageSegment(encoded(np.zeros((8, 8), np.uint16)), "png"),
        TextSegment("half a pair \ud800"),
        TextSegment(texts=["fine", "half a pair \ud800"]),
        TextSegment("a", texts=["b", "c"]),
        TextSegment(texts="bc"),
        TextSegment(7),
        RegionSegment("turn", degrees=90),
    ],
)
def test_more_that_cannot_be_used(store, tokenizer, segment):
    given = [_text("good"), CrudeSample("bad", [segment])]
    index = ingest(given, store, "src", tokenizer)
    assert index.num_samples == 1
    assert json.loads(store.get("src/rejected.jsonl"))["key"] == "bad"


def _placed(*regions: RegionSegment, **options) -> CrudeSample:
    """Return a video, an image of 40 x 28 pixels as medium 1, another image, and regions."""
    picture = ImageSegment(encoded(noise(28, 40)), "png")
    segments = [regions[0], VideoSegment(mp4(22)), picture, picture, *regions[1:]]
    return CrudeSample("placed", segments, **options)


def test_regions_and_variants_in_the_index(store, tokenizer):
    corner, far = RegionSegment("point", [[0, 28]], "a corner", 1), [[0, 0], [40, 0], [40, 28]]
    texts = ["one wording", "another wording, longer", "third"]
    sample = _placed(
        corner,
        RegionSegment("box", [[1, 2.5], [40, 28]], "\nbox", 1),
        TextSegment(texts=texts, loss=False),
        RegionSegment("polygon", far, "", 2, loss=False),
        RegionSegment("turn", label="up", media=2, degrees=270),
    )
    index = ingest([_text("t"), sample], store, "src", tokenizer, category="ocr")
    assert index.piece_kind.tolist() == [0, 2, 1, 1, 1, 1, 1, 2, 0, 2, 2]
    assert index.piece_variants.tolist() == [1] * 8 + [3, 1, 1]
    lengths = [len(tokenizer.encode(text)) for text in texts]
    assert [index.piece_tokens[8], *index.variant_tokens] == lengths
    for piece, label, numbers in ((1, "a corner", 2), (7, "\nbox", 4), (9, "", 6), (10, "up", 1)):
        assert index.piece_tokens[piece] == len(tokenizer.region(label, [0] * numbers))
    # Items of the sample: three chunks of the video, then the images.
    assert index.region_item.tolist() == [3, 3, 4, 4]
    assert index.region_shape.tolist() == [0, 1, 2, 3]
    assert index.region_points.tolist() == [1, 2, 3, 1]
    points = [[0, 28], [1, 2.5], [40, 28], *far, [270, 0]]
    assert np.stack([index.point_x, index.point_y], 1).tolist() == points
    for group, counts in {"piece": [1, 10], "variant": [0, 2], "region": [0, 4]}.items():
        assert np.diff(getattr(index, f"{group}_ptr")).tolist() == counts
    written = json.loads(store.get(*document_of(index, 1).span))["segments"]
    assert written[0] == {
        "kind": "region", "label": "a corner", "loss": True, "media": 1, "points": [[0, 28]],
        "shape": "point",
    }  # fmt: skip
    assert written[5] == {"kind": "text", "loss": False, "texts": texts}
    assert written[7] == {
        "kind": "region", "label": "up", "loss": True, "media": 2, "degrees": 270, "shape": "turn",
    }  # fmt: skip


WRONG_REGIONS = {
    r"\(40.1, 3\) lies outside the picture of 40 x 28": RegionSegment("point", [[40.1, 3]], "", 1),
    r"\(3, -1\) lies outside": RegionSegment("box", [[3, -1], [5, 5]], "", 1),
    "x1 < x2": RegionSegment("box", [[5, 5], [5, 9]], "", 1),
    "y1 < y2": RegionSegment("box", [[5, 9], [6, 5]], "", 1),
    "a point has 1 point, not 2": RegionSegment("point", [[1, 1], [2, 2]], "", 1),
    "a box has 2 points, not 1": RegionSegment("box", [[1, 1]], "", 1),
    "a polygon has 3 points or more, not 2": RegionSegment("polygon", [[1, 1], [2, 2]], "", 1),
    "not a list of": RegionSegment("point", [[1, 2, 3]], "", 1),
    "points 'ab' are not": RegionSegment("point", "ab", "", 1),
    r"points \[\['1', 2\]\] are not": RegionSegment("point", [["1", 2]], "", 1),
    r"points \[\[True, 2\]\] are not": RegionSegment("point", [[True, 2]], "", 1),
    r"points \[\[nan, 2\]\] are not": RegionSegment("point", [[float("nan"), 2]], "", 1),
    "media 0 is not an image": RegionSegment("point", [[1, 1]]),
    "media 3, there are 3": RegionSegment("point", [[1, 1]], "", 3),
    "media -1, there are 3": RegionSegment("point", [[1, 1]], "", -1),
    "label 7 is not a text": RegionSegment("point", [[1, 1]], 7, 1),
    "shape 'circle'; known are point": RegionSegment("circle", [[1, 1]], "", 1),
    "degrees of 0, 90, 180 or 270, not 45": RegionSegment("turn", (), "", 1, 45),
    "not None": RegionSegment("turn", (), "", 1),
    "a turn has no points": RegionSegment("turn", [[1, 1]], "", 1, 90),
    "degrees belong to a turn": RegionSegment("point", [[1, 1]], "", 1, 90),
}


@pytest.mark.parametrize("detail", WRONG_REGIONS)
def test_regions_that_cannot_be_are_refused_with_the_numbers(store, tokenizer, detail):
    told = []
    given = [_text("good"), _placed(WRONG_REGIONS[detail])]
    ingest(given, store, "src", tokenizer, rejected=told.append, category="grounding")
    assert [rejection.reason for rejection in told] == ["bad region"]
    assert re.search(f"segment 0: .*{detail}", told[0].detail)


def _turned(*media: int) -> list[RegionSegment]:
    return [RegionSegment("turn", (), "turn", number, 90) for number in media]


@pytest.mark.parametrize(
    ("category", "sample", "flip", "turn"),
    [
        ("caption", _placed(TextSegment("a dog")), True, True),
        ("caption", _placed(TextSegment("the left dog")), False, False),
        ("caption", _placed(TextSegment(texts=["a dog", "above it"])), True, False),
        ("caption", _placed(RegionSegment("point", [[1, 1]], "left", 1)), False, False),
        ("caption", _placed(TextSegment("a dog"), meta={"flip": False}), False, True),
        ("caption", _placed(TextSegment("a dog"), meta={"flip": True}), True, True),
        ("caption", _placed(*_turned(1)), False, True),
        ("ocr", _placed(TextSegment("a dog")), False, False),
        ("ocr", _placed(*_turned(1)), False, False),
        ("ocr", _placed(*_turned(1, 2)), False, True),
        ("code", _text("t"), False, False),
    ],
)
def test_what_augmentation_may_do(store, tokenizer, category, sample, flip, turn):
    index = ingest([sample], store, "src", tokenizer, category=category)
    assert (index.flip_ok.tolist(), index.turn_ok.tolist()) == ([flip], [turn])


def test_every_format_of_pictures(store, tokenizer):
    kinds = {"PNG": "png", "JPEG": "jpg", "WEBP": "webp", "GIF": "gif"}
    pictures = [ImageSegment(encoded(noise(28, 28), k), f".{s.upper()}") for k, s in kinds.items()]
    index = ingest([CrudeSample("p", pictures)], store, "src", tokenizer)
    assert index.num_items == 4
    with tarfile.open(fileobj=io.BytesIO(store.get("src/000000.tar"))) as tar:
        assert tar.getnames()[1:] == ["p.0.png", "p.1.jpg", "p.2.webp", "p.3.gif"]


def test_no_sample_left_is_an_error_that_counts_the_reasons(store, tokenizer):
    with pytest.raises(ValueError, match="rejected: 2 x empty; the first is 'a': empty: no text"):
        ingest([CrudeSample("a", []), CrudeSample("b", [])], store, "src", tokenizer)
    assert len(store.get("src/rejected.jsonl").splitlines()) == 2
    with pytest.raises(ValueError, match="none"):
        ingest([], store, "src", tokenizer)
    assert "src/manifest.json" not in store.list()


def test_names_and_sizes_are_checked(store, tokenizer):
    for name in ("", "a/b", "../x", "a.b"):
        with pytest.raises(ValueError, match="use"):
            ingest(samples(1), store, name, tokenizer)
    with pytest.raises(ValueError, match="4096"):
        ingest(samples(1), store, "a", tokenizer, 100)
    with pytest.raises(ValueError, match="2\\*\\*15"):
        IngestPolicy(max_items=2**15)


def test_a_medium_is_what_its_bytes_are_whatever_its_name_says(store, tokenizer):
    jpeg = encoded(noise(9, 9), "JPEG")
    told = []
    given = [
        CrudeSample("renamed", [ImageSegment(jpeg, "png"), ImageSegment(PNG, "jpeg")]),
        CrudeSample("bmp", [ImageSegment(encoded(noise(9, 9), "BMP"), "png")]),
        CrudeSample("clip", [ImageSegment(mp4(4), "png")]),
        CrudeSample("picture", [VideoSegment(PNG)]),
    ]
    index = ingest(given, store, "src", tokenizer, rejected=told.append)
    names = [s["file"] for s in json.loads(store.get(*document_of(index, 0).span))["segments"]]
    assert names == ["0.jpg", "1.png"]
    assert [(r.key, r.reason) for r in told] == [
        ("bmp", "undecodable"), ("clip", "undecodable"), ("picture", "undecodable")
    ]  # fmt: skip


def test_progress_counts_and_turned_images_are_told(store, tokenizer):
    exif = Image.Exif()
    exif[0x0112] = 3
    turned = ImageSegment(encoded(noise(28, 28), "JPEG", exif=exif), "jpg")
    told = []
    clip = CrudeSample("c", [VideoSegment(mp4(4, turn=90)), VideoSegment(mp4(4))])
    given = [*samples(9), CrudeSample("t", [turned]), clip, CrudeSample("bad", [])]
    index = ingest(given, store, "src", tokenizer, 16_384, progress=told.append)
    shards = [p.shards for p in told]
    assert shards == sorted(shards)
    assert set(shards) == set(range(len(index.shards) + 1))
    assert [p.samples for p in told] == sorted(p.samples for p in told)
    last = told[-1]
    assert (last.samples, last.rejected, last.turned) == (11, 1, 2)
    assert last.bytes == sum(shard.size for shard in index.shards)
