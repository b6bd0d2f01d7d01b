"""Shards as external tools read them: tarfile and webdataset."""

import hashlib
import io
import json
import random
import tarfile
import zlib

import numpy as np
import pytest
import webdataset
from isal.isal_zlib import crc32

from data_pipeline.index import reads, shards
from data_pipeline.index.shards import (
    MAX_KEY,
    Member,
    ShardBuilder,
    check_sample_key,
    frame,
    sample_json,
)
from data_pipeline.inspect import shard as inspected
from data_pipeline.stream import batches

KEYS = ["a", "deep/er/k-1", "b_2", "c" * MAX_KEY]


def _content():
    rng = random.Random(3)
    sizes = [0, 1, 511, 512, 513, 70_000]
    for i, key in enumerate(KEYS):
        document = sample_json([{"kind": "text", "text": f"grüße {i}", "loss": True}], {"i": i})
        media = [(f"{n}.png", rng.randbytes(rng.choice(sizes))) for n in range(i)]
        yield key, document, media


def _build():
    builder = ShardBuilder()
    members = {key: builder.add(key, doc, media) for key, doc, media in _content()}
    return builder, members


def test_offsets_and_checksums_point_at_the_bytes():
    builder, members = _build()
    size = builder.size
    shard = builder.finish()
    assert len(shard.data) == size
    assert shard.sha256 == hashlib.sha256(shard.data).hexdigest()
    assert shard.samples == len(KEYS)
    for key, document, media in _content():
        for member, data in zip(members[key], [document, *(d for _, d in media)], strict=True):
            found = shard.data[member.offset : member.offset + member.length]
            assert found == data
            assert member.crc == zlib.crc32(data)


def test_isal_counts_as_zlib_does():
    """Every index written so far holds zlib's values."""
    rng = np.random.default_rng(0)
    for size in (*range(66), *rng.integers(66, 300_000, 60).tolist()):
        data = rng.bytes(size)
        assert crc32(data) == crc32(memoryview(data)) == zlib.crc32(data)
    assert all(module.crc32 is crc32 for module in (shards, reads, batches, inspected))


def test_tarfile_reads_the_same_and_sees_nothing_of_the_machine():
    shard = _build()[0].finish()
    expected = [
        (f"{key}.{name}", data)
        for key, document, media in _content()
        for name, data in [("json", document), *media]
    ]
    with tarfile.open(fileobj=io.BytesIO(shard.data)) as tar:
        infos = tar.getmembers()
        assert [(i.name, tar.extractfile(i).read()) for i in infos] == expected
    assert {(i.mtime, i.uid, i.gid, i.uname, i.gname) for i in infos} == {(0, 0, 0, "", "")}


def test_webdataset_reads_the_same(tmp_path):
    (tmp_path / "0.tar").write_bytes(_build()[0].finish().data)
    found = list(webdataset.WebDataset(str(tmp_path / "0.tar"), shardshuffle=False))
    assert [s["__key__"] for s in found] == KEYS
    for sample, (_, document, media) in zip(found, _content(), strict=True):
        assert sample["json"] == document
        files = {name: data for name, data in sample.items() if name.endswith("png")}
        assert files == dict(media)


def test_equal_samples_give_equal_bytes_and_a_builder_starts_afresh():
    builder, _ = _build()
    first = builder.finish()
    for key, document, media in _content():
        builder.add(key, document, media)
    assert builder.finish() == first


def test_json_does_not_depend_on_the_order_of_keys():
    one, two = {"a": 1, "b": {"x": 1, "y": 2}}, {"b": {"y": 2, "x": 1}, "a": 1}
    assert sample_json([], one) == sample_json([], two)
    assert json.loads(sample_json([{"kind": "text"}], one)) == {
        "segments": [{"kind": "text"}],
        "meta": one,
    }


@pytest.mark.parametrize("meta", [{"x": float("nan")}, {"x": object()}, {"x": "\ud800"}])
def test_what_is_not_json_is_refused(meta):
    with pytest.raises((ValueError, TypeError)):
        sample_json([], meta)


@pytest.mark.parametrize(
    "key", ["", "a.b", "a b", "../a", "/a", "a/", "a//b", "ä", "x" * (MAX_KEY + 1), 7, "a\n"]
)
def test_bad_keys_are_refused(key):
    with pytest.raises(ValueError, match="sample key"):
        check_sample_key(key)


def test_a_framed_sample_is_the_same_wherever_it_stands():
    builder = ShardBuilder()
    for key, document, media in _content():
        framed = frame(key, document, media)
        empty = builder.size
        members = builder.add(key, document, media)
        assert builder.size - empty == len(framed.data)
        start = members[0].offset - framed.members[0].offset
        assert [Member(start + m.offset, m.length, m.crc) for m in framed.members] == members
        assert builder.finish().data[start : start + len(framed.data)] == framed.data
        builder.append(b"\0" * 1024)  # the next sample gets another offset
