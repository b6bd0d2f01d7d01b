"""JSON read from a root: its bytes and nesting are bounded before it costs memory."""

import json

import pytest

from data_pipeline.index import manifest as manifest_module
from data_pipeline.index.erased import read_erased
from data_pipeline.index.manifest import IndexMismatch, read_manifest
from data_pipeline.ingest.ingest import CrudeSample, IngestPolicy, TextSegment, ingest
from data_pipeline.store import json_objects
from data_pipeline.store.json_objects import (
    MOST_NESTED,
    UnsoundJson,
    check_nesting,
    parse_json,
    read_json,
)

DEEP = (b"[" * 100_000, b'{"a":' * (MOST_NESTED + 1) + b"1" + b"}" * (MOST_NESTED + 1))


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_nesting_is_bounded():
    text = json.dumps(nested(MOST_NESTED))
    assert parse_json(text, "x") == nested(MOST_NESTED)
    assert parse_json('"[[[["', "x") == "[[[["
    for data in (*DEEP, json.dumps(nested(MOST_NESTED + 1))):
        with pytest.raises(UnsoundJson, match="here: not JSON.*nested more than 64"):
            parse_json(data, "here")
    with pytest.raises(UnsoundJson, match="nested"):
        check_nesting({"a": (nested(MOST_NESTED),)}, "x")


def test_size_is_asked_before_an_object_is_read(store, monkeypatch):
    store.put("a/big.json", b" " * 100 + b"1")
    assert read_json(store, "a/big.json", 101) == 1
    monkeypatch.setattr(store, "get", lambda *_, **__: pytest.fail("was read"))
    with pytest.raises(UnsoundJson, match=r"a/big.json: 101 bytes, at most 100 are read"):
        read_json(store, "a/big.json", 100)


def test_texts_that_are_too_long_or_no_json_are_named(monkeypatch):
    monkeypatch.setattr(json_objects, "MOST_BYTES", 3)
    with pytest.raises(UnsoundJson, match="here: 4 bytes, at most 3"):
        parse_json(b"1234", "here")
    with pytest.raises(UnsoundJson, match="here: not JSON"):
        parse_json(b"{", "here")


@pytest.mark.parametrize("data", DEEP)
def test_hostile_files_of_a_source_are_errors_of_one_line(store, tokenizer, data):
    ingest([CrudeSample("a", [TextSegment("x")])], store, "src", tokenizer)
    store.put("src/erased.json", data)
    with pytest.raises(ValueError, match="src/erased.json: expected"):
        read_erased(store)
    store.put("src/manifest.json", data)
    with pytest.raises(IndexMismatch, match="src/manifest.json: not JSON.*ingest the source again"):
        read_manifest(store, "src")


def test_the_number_of_shards_is_bounded_for_writers_and_readers(store, tokenizer, monkeypatch):
    samples = [CrudeSample(f"k{n}", [TextSegment("x " * 1500)]) for n in range(3)]
    ingest(samples, store, "three", tokenizer, 4096)
    monkeypatch.setattr(manifest_module, "MOST_SHARDS", 2)
    with pytest.raises(IndexMismatch, match="three/manifest.json: names 3 shards, .* at most 2"):
        read_manifest(store, "three")
    with pytest.raises(ValueError, match="'again': 3 shards, at most 2; make larger"):
        ingest(samples, store, "again", tokenizer, 4096)


def test_what_could_not_be_read_again_is_not_written(store, tokenizer):
    good = CrudeSample("good", [TextSegment("x")], {"a": nested(MOST_NESTED - 2)})
    deep = CrudeSample("deep", [TextSegment("x")], {"a": nested(MOST_NESTED - 1)})
    index = ingest([good, deep], store, "src", tokenizer)
    assert index.num_samples == 1
    told = json.loads(store.get("src/rejected.jsonl"))
    assert (told["key"], told["reason"]) == ("deep", "not JSON")
    with pytest.raises(ValueError, match="max_document_bytes .* at most"):
        IngestPolicy(max_document_bytes=json_objects.MOST_BYTES + 1)
