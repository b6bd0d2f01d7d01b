"""Appending to a source equals one single ingest, and the old shards keep their keys."""

import json
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.govern.redact import carry_out
from data_pipeline.index.columns import COLUMNS, GROUPS
from data_pipeline.index.erased import note_all_erased, note_erased, read_erased
from data_pipeline.index.manifest import IndexMismatch, read_index, read_provenance
from data_pipeline.index.reads import check_shards, document_of, medium_of, read_checked
from data_pipeline.ingest.claim import Claim
from data_pipeline.ingest.ingest import CrudeSample, RegionSegment, TextSegment, ingest
from data_pipeline.ingest.samples import Listed, VideoSegment
from data_pipeline.inspect.verify import Checks, verify_source
from data_pipeline.store.open import MemoryStore, MissingKey
from data_pipeline.sync.sync import sync
from data_pipeline.text import Tokenizer, train_ranks
from tests.unit.data_pipeline.conftest import TRAINING_TEXT
from tests.unit.data_pipeline.media import mp4, samples

# These columns differ when a sample was added to a shard later.
PLACES = {"shard", "json_offset", "item_offset"}


@pytest.fixture(scope="module")
def given() -> list[CrudeSample]:
    """Return samples that fill every column of an index."""
    found = []
    for number, sample in enumerate(samples(12)):
        more = [
            RegionSegment("box", [[1, 2], [3, 4]], "\nrivers and towns", 1),
            RegionSegment("polygon", [[1, 2], [3, 4], [1, 4]], "a map", 1),
            TextSegment(texts=["the map shows", "12 rivers,", "345 towns and more"]),
        ]
        found.append(CrudeSample(sample.key, [*sample.segments, *(more * (number % 3 == 2))]))
    return [*found, CrudeSample("clip", [TextSegment("See:"), VideoSegment(mp4(10))])]


@pytest.fixture
def grown(store, tokenizer, given):
    """Return (store, old index, grown index, objects before the append)."""
    ingest(given[:7], store, "old", tokenizer, 20_000, category="caption")
    before = {key: store.get(key) for key in store.list()}
    made = dict(category="caption", append_to="old")
    # A file name with bytes that are not UTF-8, in Python's surrogate form.
    ingest(Listed(given[7:], {"file": "b\udce9"}), store, "new", tokenizer, 20_000, **made)
    return store, read_index(store, "old"), read_index(store, "new"), before


def test_growing_equals_ingesting_all_at_once(grown, tokenizer, given):
    store, old, new, before = grown
    anew = ingest(given, store, "anew", tokenizer, 20_000, category="caption")
    assert len(old.shards) > 1
    assert len(new.shards) > len(old.shards) + 1
    assert [new.key_of(n) for n in range(13)] == [anew.key_of(n) for n in range(13)]
    for name in (*COLUMNS, *(f"{group}_ptr" for group in GROUPS)):
        if name not in PLACES:
            assert np.array_equal(getattr(new, name), getattr(anew, name)), name
    assert new.shards[: len(old.shards)] == old.shards
    for parts in (document_of, medium_of):
        count = range(new.num_samples if parts is document_of else new.num_items)
        found = [read_checked(store, [parts(i, n) for n in count], 1, 0) for i in (new, anew)]
        assert found[0] == found[1]
    assert before.items() <= {key: store.get(key) for key in store.list()}.items()
    assert not any(key.startswith("old/") for key in set(store.list()) - before.keys())


def test_the_grown_source_is_sound_and_says_where_it_comes_from(grown, tokenizer):
    store, old, new, _ = grown
    reports = verify_source(store, new, Checks(tokenizer, decode=True))
    assert [problem for report in reports for problem in report.problems] == []
    assert check_shards(store, new) == len(new.shards)
    found = read_provenance(store, "new")
    assert found is not None
    assert (found["kind"], found["source"], found["parent"]) == ("append", "old", old.content_hash)
    assert found["input"] == {"file": "b\udce9"}


def test_shards_of_a_grown_source_are_not_written_over(grown, tokenizer, given):
    """An ingest under the old name is refused when the old source is gone or was not copied."""
    store, *_ = grown
    target = MemoryStore("without-the-old")
    sync(store, target, ["new"])
    assert "old/manifest.json" not in target.list()
    before = {key: target.get(key) for key in target.list()}
    for stream in (given[5:], Listed(given[5:], {"file": "x"})):  # with and without a journal
        with pytest.raises(ValueError, match=r"old: source 'new' has shards in .* old/000000\.tar"):
            ingest(stream, target, "old", tokenizer, 20_000, category="caption")
    assert {key: target.get(key) for key in target.list()} == before
    target.put("old2/000000.tar", b"of an ingest that was killed")
    ingest(given[5:], target, "old2", tokenizer, 20_000, category="caption")


def test_it_can_grow_again(grown, tokenizer):
    store, _, new, _ = grown
    more = [CrudeSample("late", [TextSegment("a map")])]
    last = ingest(more, store, "third", tokenizer, category="caption", append_to="new")
    assert last.shards[:-1] == new.shards
    assert last.key_of(13) == "late"
    assert json.loads(read_checked(store, [document_of(last, 13)], 1, 0)[0])["segments"]


def test_a_key_that_the_old_source_has_is_rejected(store, tokenizer, given):
    ingest(given[:3], store, "old", tokenizer)
    told = []
    new = ingest(given[2:5], store, "new", tokenizer, append_to="old", rejected=told.append)
    assert [(one.key, one.reason) for one in told] == [(given[2].key, "key twice")]
    assert "the source that this is appended to" in told[0].detail
    assert new.num_samples == 5


def test_a_sample_that_was_erased_here_is_rejected_also_when_its_source_is_gone(
    store, tokenizer, given
):
    made = dict(category="caption")
    ingest(given[:2], store, "old", tokenizer, 20_000, **made)
    ingest(given[2:7], store, "gone", tokenizer, 20_000, **made)
    erased = [given[3].key, given[4].key]
    for key in erased:
        carry_out(store, {"gone": [key]})
    gone, noted = read_index(store, "gone"), store.get("gone/erased.json")
    # as for a source that was made from a redacted source
    note_erased(store, "gone", gone, gone.redacted)
    assert read_erased(store).among(gone) == []
    store.put("gone/erased.json", noted)
    index = store.get("gone/index.parquet")
    store.put("gone/index.parquet", store.get("old/index.parquet"))
    with pytest.raises(IndexMismatch, match="gone: index_sha256 is"):
        note_all_erased(store, "gone")
    store.put("gone/index.parquet", index)
    store.delete("gone/erased.json")  # as after a sync of the source
    note_all_erased(store, "gone")
    assert store.get("gone/erased.json") == noted
    for key in store.list("gone/"):
        if not key.endswith("/erased.json"):
            store.delete(key)
    others = [replace(given[4], segments=given[5].segments), replace(given[3], key="twin")]
    again = [*given[2:4], *others, *given[5:7]]
    new = ingest(again, store, "new", tokenizer, 20_000, append_to="old", **made)
    # New content under an erased key is accepted, and so is erased content under a new key.
    kept = [*given[:3], *others, *given[5:7]]
    assert [new.key_of(n) for n in range(new.num_samples)] == [sample.key for sample in kept]
    [told] = [json.loads(line) for line in store.get("new/rejected.jsonl").splitlines()]
    assert (told["key"], told["reason"]) == (erased[0], "erased")
    again = ingest(given[2:7], store, "again", tokenizer, 20_000, **made)
    assert again.num_samples == 3


def test_no_byte_of_the_old_shards_is_read(tokenizer, given):
    store = MemoryStore("append")
    store.clear()
    old = ingest(given, store, "old", tokenizer, 20_000, category="caption")
    read = store.stats.bytes
    more = [CrudeSample("late", [TextSegment("a map")])]
    ingest(more, store, "new", tokenizer, category="caption", append_to="old")
    read = store.stats.bytes - read
    # The manifest is read again after the claim: the source may have been removed meanwhile.
    spare = len(store.get("old/index.parquet")) + 2 * len(store.get("old/manifest.json"))
    assert spare <= read < spare + 1000  # plus a few reads of the lock
    assert sum(shard.size for shard in old.shards) > 2 * spare


def test_a_killed_one_goes_on_behind_the_same_source_alone(store, tokenizer, given):
    ingest(given[:3], store, "old", tokenizer, category="caption")
    ingest(given[:2], store, "other", tokenizer, category="caption")

    def some(stop: int):
        for number, one in enumerate(given[3:]):
            if number == stop:
                raise KeyboardInterrupt
            yield one

    made = dict(shard_bytes=8192, category="caption")
    with pytest.raises(KeyboardInterrupt):
        ingest(Listed(some(8), {}), store, "new", tokenizer, append_to="old", **made)
    for other in ("other", None):
        with pytest.raises(ValueError, match="begun with another append to"):
            ingest(Listed(some(99), {}), store, "new", tokenizer, append_to=other, **made)
    found = ingest(Listed(some(99), {}), store, "new", tokenizer, append_to="old", **made)
    whole = ingest(given[3:], store, "whole", tokenizer, append_to="old", **made)
    assert found.content_hash == whole.content_hash


def test_what_does_not_fit_behind_it_is_refused_before_anything_is_written(store, tokenizer, given):
    ingest(given[:3], store, "old", tokenizer, category="caption")
    before = store.list()
    other = Tokenizer(train_ranks([text.upper() for text in TRAINING_TEXT], 300), "other")
    for arguments, told in (
        ((tokenizer, {"category": "ocr"}), "has category caption, what is to be appended ocr"),
        ((other, {"category": "caption"}), f"has tokenizer {tokenizer.hash[:12]}"),
    ):
        ranks, made = arguments
        with pytest.raises(ValueError, match=told):
            ingest(given[3:], store, "new", ranks, append_to="old", **made)
    assert store.list() == before


def test_a_source_that_goes_before_the_name_is_taken_is_not_grown(
    store, tokenizer, given, monkeypatch
):
    ingest(given[:3], store, "old", tokenizer, category="caption")
    enter = Claim.__enter__

    def late(claim):
        store.delete("old/manifest.json")
        return enter(claim)

    monkeypatch.setattr(Claim, "__enter__", late)
    with pytest.raises(MissingKey, match="old: no manifest"):
        ingest(given[3:], store, "new", tokenizer, category="caption", append_to="old")
    assert "new/manifest.json" not in store.list()
