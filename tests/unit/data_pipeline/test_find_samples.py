"""Sample search by facts, checked against the index; indices cut into pieces; redacted samples."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("duckdb", reason="the extra platform is not installed")
from data_pipeline.govern.redact import carry_out
from data_pipeline.index import cut, parts
from data_pipeline.index.columns import HASHED
from data_pipeline.index.cut import CutIndex
from data_pipeline.index.manifest import read_index
from data_pipeline.inspect import find as module
from data_pipeline.inspect.count import count_source
from data_pipeline.inspect.facts import write_facts
from data_pipeline.inspect.find import HOLDS, Wanted, count, find, longest, number_of
from data_pipeline.inspect.query import Facts
from data_pipeline.inspect.stats import source_stats
from data_pipeline.plan.layout import lay_out
from data_pipeline.store.open import FolderStore
from moonvit3d.geometry import PatchLimits
from tests.unit.launch.inspected import build

LIMITS = PatchLimits(image=64, frame=8)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> FolderStore:
    return build(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def facts(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "STRETCH", 7)
    file, _ = write_facts(corpus, "digits", LIMITS, tmp_path)
    with Facts(file) as found:
        yield found


def expected(index, wanted: Wanted) -> list[int]:
    """Return the samples that match, checked one by one against the index."""
    tokens = lay_out(index, LIMITS, np.arange(index.num_samples), np.zeros(index.num_samples, int))
    found = []
    for sample in range(index.num_samples):
        items = slice(*index.item_ptr[sample : sample + 2].tolist())
        sides = np.maximum(index.item_height[items], index.item_width[items]).tolist()
        files = index.item_length[items][index.item_chunk[items] == 0]
        size = int(index.json_length[sample]) + int(files.sum())
        regions = index.region_ptr[sample + 1] - index.region_ptr[sample]
        values = {"tokens": int(tokens.length[sample]), "bytes": size, "items": len(sides)}
        fits = wanted.key.lower() in index.key_of(sample).lower()
        fits &= {"": True, "boxes": regions > 0, "text": not sides}[wanted.holds]
        for name, value in values.items():
            least, most = (getattr(wanted, f"{name}_{end}") for end in ("from", "to"))
            fits &= (least is None or value >= least) and (most is None or value <= most)
        if wanted.side_from is not None or wanted.side_to is not None:
            least, most = wanted.side_from or 0, wanted.side_to or 10**9
            fits &= any(least <= side <= most for side in sides)
        if fits:
            found.append(sample)
    return found


@pytest.mark.parametrize(
    "wanted",
    [
        Wanted(),
        Wanted(key="000001"),
        Wanted(key="DIGITS-00000"),
        Wanted(holds="boxes", tokens_from=40),
        Wanted(tokens_from=30, tokens_to=60),
        Wanted(bytes_from=900, items_from=1, items_to=1),
        Wanted(side_from=60, side_to=90),
        Wanted(side_to=70),
        Wanted(holds="text"),
        Wanted(key="%"),
    ],
)
def test_what_is_found_is_what_the_index_says(corpus, facts, wanted):
    index = read_index(corpus, "digits")
    numbers, first = [], 0
    while first is not None:
        page = find(facts, wanted, first, 3)
        assert len(page.samples) <= 3
        assert page.after is None or page.after > first
        numbers += [one.sample for one in page.samples]
        first = page.after
    assert numbers == expected(index, wanted)
    assert count(facts, wanted) == len(numbers)
    top = longest(facts, wanted, 5)
    sizes = {one.sample: one.tokens for one in longest(facts, Wanted(), 1000)}
    order = sorted(numbers, key=lambda one: (-sizes[one], one))
    assert [one.sample for one in top] == order[:5]


def test_a_sample_by_its_key(corpus, facts):
    index = read_index(corpus, "digits")
    assert [number_of(facts, index.key_of(n)) for n in (0, 59)] == [0, 59]
    assert number_of(facts, "digits-0") is None
    with pytest.raises(ValueError, match=r"holds is 'x'; expected one of"):
        find(facts, Wanted(holds="x"))
    assert all(count(facts, Wanted(holds=name)) >= 0 for name in HOLDS)


def equal_pieces(store: FolderStore, name: str, folder: Path) -> int:
    """Compare every piece with the whole index; return the number of pieces."""
    whole, pieces = read_index(store, name), CutIndex(store, name, folder)
    seen = set()
    for sample in range(whole.num_samples):
        index, first = pieces.around(sample)
        at = sample - first
        seen.add(first)
        assert index.key_of(at) == whole.key_of(sample)
        for column in HASHED:
            if column.endswith("_ptr"):
                continue
            group = column.split("_")[0]
            if f"{group}_ptr" in HASHED:
                mine = slice(*getattr(index, f"{group}_ptr")[at : at + 2].tolist())
                theirs = slice(*getattr(whole, f"{group}_ptr")[sample : sample + 2].tolist())
            else:
                mine, theirs = slice(at, at + 1), slice(sample, sample + 1)
            assert (getattr(index, column)[mine] == getattr(whole, column)[theirs]).all(), column
    for outside in (-1, whole.num_samples):
        with pytest.raises(ValueError, match=f"no sample {outside}"):
            pieces.around(outside)
    pieces.close()
    return len(seen)


def test_an_index_in_pieces_is_the_whole(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(cut, "PIECE", 7)
    for name, pieces in (("digits", 9), ("mixed", 2), ("prose", 2)):
        assert equal_pieces(corpus, name, tmp_path) == pieces
    files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
    assert files == [cut.FILE] * 3


def test_facts_and_pieces_of_a_redacted_source(tmp_path, monkeypatch):
    """Regression: samples after the first part were searched in it, with the old content hash."""
    monkeypatch.setattr(parts, "PART_SAMPLES", 7)
    monkeypatch.setattr(parts.index_parts, "__defaults__", (7,))
    monkeypatch.setattr(cut, "PIECE", 7)
    store = build(tmp_path / "corpus")
    keys = [read_index(store, "digits").key_of(n) for n in (3, 20, 58)]
    carry_out(store, {"digits": keys}, lambda what: None)
    index = read_index(store, "digits")
    assert index.redacted == (3, 20, 58)
    file, _ = write_facts(store, "digits", LIMITS, tmp_path / "facts")
    found = count_source(file).figures
    told = source_stats(index, LIMITS)
    assert {key: found[key] for key in ("samples", "tokens", "items", "bytes")} == {
        key: told[key] for key in ("samples", "tokens", "items", "bytes")
    }
    assert equal_pieces(store, "digits", tmp_path / "facts") == 9


def test_nothing_is_left_of_an_index_that_is_not_the_manifests(corpus, tmp_path):
    store = FolderStore(tmp_path / "root")
    for key in ("digits/manifest.json", "digits/index.parquet"):
        store.put(key, corpus.get(key))
    index = read_index(corpus, "digits")
    other = dataclasses.replace(index, json_crc=~index.json_crc)
    import pyarrow.parquet as pq

    from data_pipeline.index.manifest import IndexMismatch, table_of

    pq.write_table(table_of(other), tmp_path / "root" / "digits" / "index.parquet")
    with pytest.raises(IndexMismatch, match="index_sha256"):
        CutIndex(store, "digits", tmp_path / "facts")
    assert [path for path in (tmp_path / "facts").rglob("*") if path.is_file()] == []
