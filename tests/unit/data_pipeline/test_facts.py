"""Facts of sources: their statistics equal those of `source_stats` and of plain counting."""

import dataclasses
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

pytest.importorskip("duckdb", reason="the extra platform is not installed")
import data_pipeline.index.parts as parts
from data_pipeline.config import ChosenSource
from data_pipeline.index.manifest import IndexMismatch, read_index, write_index
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, Listed, TextSegment
from data_pipeline.inspect.count import by_category, compare, count_alike, count_source
from data_pipeline.inspect.distribution import (
    counted,
    drift,
    merged,
    psi,
    spread_of,
    tail,
    weighted_sum,
)
from data_pipeline.inspect.duplicates import find_duplicates
from data_pipeline.inspect.facts import facts_of, write_facts
from data_pipeline.inspect.query import Facts, FactsError
from data_pipeline.inspect.stats import source_stats, spread, totals
from data_pipeline.plan.layout import lay_out
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import PatchLimits
from tests.unit.data_pipeline.plain import made_index
from tests.unit.launch.inspected import build

SMALL = PatchLimits(image=64, frame=8)
NAMES = ("digits", "mixed", "prose")
SEQ_LEN = 100
CHOICE = ChosenSource(share=1, min_tokens=31, max_tokens=400)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> FolderStore:
    return build(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("facts")


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Write facts in parts even for sources of a few samples."""
    monkeypatch.setattr(parts.index_parts, "__defaults__", (7,))


def equal(found, expected, where=""):
    """Check that integers, texts and counts are equal, and other floats up to rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key, value in expected.items():
            equal(found[key], value, f"{where}/{key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for number, (one, other) in enumerate(zip(found, expected)):
            equal(one, other, f"{where}/{number}")
    elif isinstance(expected, float) and not expected.is_integer():
        assert found == pytest.approx(expected, rel=1e-12), where
    else:
        assert found == expected, where


@pytest.mark.parametrize("limits", [PatchLimits(), SMALL], ids=["usual", "small"])
@pytest.mark.parametrize("name", NAMES)
def test_what_is_counted_is_what_the_index_says(corpus, folder, name, limits):
    index = read_index(corpus, name)
    file, _ = write_facts(corpus, name, limits, folder)
    found = count_source(file, SEQ_LEN, CHOICE).figures
    tails = found.pop("tails")
    equal(found, source_stats(index, limits, SEQ_LEN, CHOICE))
    assert tails["tokens_per_sample"]["sum"] == found["tokens"]
    assert tails["tokens_per_item"]["sum"] == found["media_tokens"]


def test_a_source_of_many_kinds_of_media(tmp_path):
    """More samples, items and chunks than the corpus has, in random order."""
    index = made_index("made", [90, 110, 55], 5, media=0.7, side=900)
    rng = np.random.default_rng(0)
    columns = {
        f"{group}_{what}": rng.integers(1, 5000, size)
        for group, size in (("json", index.num_samples), ("item", index.num_items))
        for what in ("length", "crc")
    }
    columns = {name: value.astype(getattr(index, name).dtype) for name, value in columns.items()}
    index = dataclasses.replace(index, flip_ok=rng.random(index.num_samples) < 0.5, **columns)
    store = FolderStore(tmp_path / "root")
    write_index(store, index)
    file, _ = write_facts(store, "made", SMALL, tmp_path / "facts")
    found = count_source(file, SEQ_LEN).figures
    del found["tails"]
    equal(found, source_stats(index, SMALL, SEQ_LEN))


def test_rows_are_those_of_the_layout(corpus, folder):
    index = read_index(corpus, "mixed")
    file, _ = write_facts(corpus, "mixed", SMALL, folder)
    rows = pq.read_table(file.path).to_pylist()
    samples = [row for row in rows if row["kind"] == 0]
    items = [row for row in rows if row["kind"] != 0]
    number = np.arange(index.num_samples)
    sizes = lay_out(index, SMALL, number, np.zeros(number.size, np.int8))
    assert [row["sample"] for row in samples] == number.tolist()
    assert [row["key"] for row in samples] == list(map(index.key_of, number))
    assert [row["tokens"] for row in samples] == sizes.length.tolist()
    assert [row["tokens"] for row in items] == sizes.tokens.tolist()
    assert [row["bytes"] is None for row in items] == (index.item_chunk > 0).tolist()
    assert Counter(row["sample"] for row in items) == Counter(
        {i: int(n) for i, n in enumerate(np.diff(index.item_ptr)) if n}
    )
    whole = [table.to_pylist() for table in facts_of(index, SMALL)]
    assert [samples, items] == whole  # written as one part, without a file
    for group in range(pq.ParquetFile(file.path).num_row_groups):
        kinds = pq.ParquetFile(file.path).read_row_group(group, ["kind"])["kind"].unique()
        assert (0 in kinds.to_pylist()) != (len(kinds) > 1 or kinds[0].as_py() > 0)


def test_facts_are_written_once_and_again_where_they_are_damaged(corpus, tmp_path):
    file, new = write_facts(corpus, "digits", SMALL, tmp_path)
    assert new
    data = file.path.read_bytes()
    assert write_facts(corpus, "digits", SMALL, tmp_path) == (file, False)
    assert write_facts(corpus, "digits", PatchLimits(), tmp_path)[0].path != file.path
    assert sorted(path.name for path in file.path.parent.iterdir()) == ["facts.parquet"]
    for damage in (data[:-100], b"", b"no Parquet at all"):
        file.path.write_bytes(damage)
        assert write_facts(corpus, "digits", SMALL, tmp_path) == (file, True)
        assert file.path.read_bytes() == data  # bit for bit: it holds no clock time and no path


def test_facts_of_a_copy_are_those_of_the_source(corpus, tmp_path):
    """The copy has the same content under another root and name."""
    index = read_index(corpus, "prose")
    other = FolderStore(tmp_path / "copy")
    write_index(other, dataclasses.replace(index, name="prose_7"))
    file, _ = write_facts(corpus, "prose", SMALL, tmp_path / "facts")
    copy, new = write_facts(other, "prose_7", SMALL, tmp_path / "facts")
    assert (copy.path, new) == (file.path, False)
    assert (file.name, copy.name) == ("prose", "prose_7")
    assert count_source(copy).figures["name"] == "prose_7"


def test_an_index_that_is_not_the_manifests_leaves_nothing_behind(corpus, tmp_path):
    index = read_index(corpus, "prose")
    store = FolderStore(tmp_path / "root")
    write_index(store, dataclasses.replace(index, name="bad"))
    data = bytearray(store.get("bad/index.parquet"))
    data[len(data) // 2] ^= 1
    store.put("bad/index.parquet", bytes(data))
    with pytest.raises(IndexMismatch, match="index_sha256"):
        write_facts(store, "bad", SMALL, tmp_path / "facts")
    assert not [path for path in (tmp_path / "facts").rglob("*") if path.is_file()]


def test_an_index_of_another_content_is_refused(corpus, tmp_path):
    """The check is that of `read_index`: the file's hash may match while the content differs."""
    index = read_index(corpus, "mixed")
    store = FolderStore(tmp_path / "root")
    write_index(store, dataclasses.replace(index, name="bad"))
    manifest = json.loads(store.get("bad/manifest.json"))
    for key, value in (("content_hash", "0" * 64), ("samples", 3), ("items", 3)):
        store.put("bad/manifest.json", json.dumps(manifest | {key: value}).encode())
        with pytest.raises(IndexMismatch, match=key):
            write_facts(store, "bad", SMALL, tmp_path / "facts")
    assert not [path for path in (tmp_path / "facts").rglob("*") if path.is_file()]


def test_damaged_facts_are_told_by_their_name(corpus, tmp_path):
    file, _ = write_facts(corpus, "digits", SMALL, tmp_path)
    data = bytearray(file.path.read_bytes())
    for damage in (data[:200], bytes(len(data))):
        file.path.write_bytes(damage)
        with pytest.raises(FactsError, match=r"facts\.parquet: .*delete it"):
            count_source(file)
    file.path.unlink()
    with pytest.raises(FactsError, match=r"facts\.parquet"):
        count_source(file)


def test_a_folder_may_have_any_name(corpus, tmp_path):
    file, _ = write_facts(corpus, "digits", SMALL, tmp_path / "it's [1] *?")
    assert count_source(file).figures["samples"] == 60


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "COPY (SELECT 1) TO '{}/out.csv'",
        "ATTACH '{}/new.duckdb'",
        "SELECT * FROM read_parquet('{}/other.parquet')",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET allowed_paths = ['/etc/passwd']",
    ],
)
def test_a_question_reads_the_facts_and_nothing_else(corpus, folder, tmp_path, query):
    import duckdb

    file, _ = write_facts(corpus, "digits", SMALL, folder)
    (tmp_path / "other.parquet").write_bytes(file.path.read_bytes())
    with Facts(file) as facts, pytest.raises((FactsError, duckdb.Error)):
        facts.rows(query.format(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["other.parquet"]


def test_categories_are_their_sources_together(corpus, folder):
    files = [write_facts(corpus, name, SMALL, folder)[0] for name in NAMES]
    sources = [count_source(file) for file in files]
    sources[1].figures["category"] = "text"
    found = by_category(sources)
    index = [read_index(corpus, name) for name in NAMES]
    lengths = [
        lay_out(one, SMALL, np.arange(one.num_samples), np.zeros(one.num_samples, np.int8)).length
        for one in index
    ]
    equal(found["text"]["tokens_per_sample"], spread(np.concatenate(lengths[1:]), 2))
    sums = totals([one.figures for one in sources])["categories"]
    assert {key: found["text"][key] for key in sums["text"]} == sums["text"]


# Duplicates -------------------------------------------------------------------------------------


def test_alike_ones_are_the_duplicates(corpus, folder):
    """In these sources, files that agree in length and CRC-32 are always equal."""
    files = [write_facts(corpus, name, SMALL, folder)[0] for name in NAMES]
    found = count_alike(files)
    expected = find_duplicates(corpus, [read_index(corpus, name) for name in NAMES]).as_dict()
    assert expected["media"]["groups"]
    assert expected["samples"]["groups"]
    for part in (*(found[kind] for kind in ("media", "samples")),):
        assert all(int(group.pop("fingerprint"), 16) for group in part["largest"])
    for kind in ("media", "samples"):
        for group in expected[kind]["largest"]:
            del group["sha256"]
        for side in (found, expected):
            side[kind]["largest"].sort(key=lambda group: json.dumps(group["places"]))
    assert found == expected


def test_a_fingerprint_changes_with_each_checksum():
    """A file's fingerprint depends on its bytes, a sample's on its document and its files."""
    index = made_index("made", [9], 3, media=0.6)
    item = int(np.flatnonzero(index.item_chunk == 0)[-1])
    sample = int(np.searchsorted(index.item_ptr, item, side="right")) - 1

    def prints(changed):
        samples, items = facts_of(changed, SMALL)
        return samples["fingerprint"].to_pylist(), items["fingerprint"].to_pylist()

    def other(column, at):
        values = getattr(index, column).copy()
        values[at] ^= 1
        return dataclasses.replace(index, **{column: values})

    def differ(one, two):
        return [at for at, (a, b) in enumerate(zip(one, two, strict=True)) if a != b]

    of_samples, of_items = prints(index)
    for column, at, wanted in (("item_crc", item, [item]), ("json_crc", sample, [])):
        new_samples, new_items = prints(other(column, at))
        assert differ(of_samples, new_samples) == [sample], column
        assert differ(of_items, new_items) == wanted, column


RANKS = train_ranks(["the third text of 12 captions"] * 9, 270)


def texts(names, word="text"):
    return Listed(
        [CrudeSample(name, [TextSegment(f"{word} {name}")]) for name in names],
        identity={"names": [*names, word]},
    )


@pytest.fixture
def versions(tmp_path) -> FolderStore:
    """Build pairs, pairs_2 grown from it, pairs_3 of other texts, pairs_k of another tokenizer."""
    store, tokenizer = FolderStore(tmp_path / "root"), Tokenizer(RANKS, "tiny")
    ingest(texts("abcd"), store, "pairs", tokenizer)
    ingest(texts("efg"), store, "pairs_2", tokenizer, append_to="pairs")
    ingest(texts("abcx", "other"), store, "pairs_3", tokenizer)
    reindex(store, "pairs", "pairs_k", Tokenizer(train_ranks(["word " * 9], 258), "small"))
    return store


def test_older_versions_of_the_same_shards_are_no_copies(versions, tmp_path):
    names = ("pairs", "pairs_2", "pairs_3", "pairs_k")
    files = {name: write_facts(versions, name, SMALL, tmp_path / "f")[0] for name in names}
    found = count_alike([files[name] for name in ("pairs", "pairs_2", "pairs_3", "pairs_k")])
    assert found["left_out"] == ["pairs", "pairs_k"]
    assert found["samples"]["groups"] == 0
    again = count_alike([files["pairs"], files["pairs"]._replace(shards=frozenset({"other"}))])
    assert (again["samples"]["groups"], again["samples"]["redundant"]) == (4, 4)


def test_versions_are_compared_key_by_key(versions, tmp_path):
    def compared(new, old):
        files = [write_facts(versions, name, SMALL, tmp_path / "f")[0] for name in (new, old)]
        found = compare(files[0], files[1])
        keys = found["keys"]
        return found, tuple(
            keys[fate] for fate in ("added", "removed", "changed", "recounted", "same")
        )

    found, keys = compared("pairs_2", "pairs")
    assert keys == (3, 0, 0, 0, 4)
    assert found["keys"]["examples"] == {"added": ["e", "f", "g"]}
    lengths = count_source(write_facts(versions, "pairs_2", SMALL, tmp_path / "f")[0]).figures
    old, new = found["figures"]["tokens"]
    assert new == lengths["tokens"]
    assert found["keys"]["added_tokens"] == new - old
    assert found["keys"]["removed_tokens"] == 0
    found, keys = compared("pairs_3", "pairs")
    assert keys == (1, 1, 3, 0, 0)
    tokens = {
        name: dict(
            count_source(write_facts(versions, name, SMALL, tmp_path / "f")[0]).figures["longest"]
        )
        for name in ("pairs", "pairs_3")
    }
    assert found["keys"]["added_tokens"] == tokens["pairs_3"]["x"] > 0
    assert found["keys"]["removed_tokens"] == tokens["pairs"]["d"] > 0
    assert compared("pairs_k", "pairs")[1] == (0, 0, 0, 4, 0)
    found, keys = compared("pairs", "pairs")
    assert keys == (0, 0, 0, 0, 4)
    assert found["drift"]["tokens_per_sample"]["psi"] == 0
    assert found["drift"]["tokens_per_sample"]["distance"] == 0
    assert found["drift"]["tokens_per_item"] is None


def test_what_was_counted_under_other_limits_is_not_compared(versions, tmp_path):
    one, other = (
        write_facts(versions, "pairs", limits, tmp_path)[0] for limits in (SMALL, PatchLimits())
    )
    with pytest.raises(ValueError, match="limits"):
        compare(one, other)


# Distributions ----------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 3, 10, 999])
def test_a_spread_of_counts_is_that_of_the_values(count):
    values = np.random.default_rng(count).integers(0, 50, count) ** 3
    equal(spread_of(counted(values), 2), spread(values, 2))
    equal(spread_of(counted(values), unit=1e3), spread(values / 1e3))


def test_nothing_has_no_spread_and_no_tail():
    none = counted([])
    assert spread_of(none, 2) == {"count": 0}
    assert tail(none) == {"count": 0, "sum": 0}
    assert tail(counted([0, 0])) == {"count": 2, "sum": 0}
    assert drift(none, counted([1]), 2) is None


def test_counts_add_up():
    values = np.random.default_rng(1).integers(0, 9, 300)
    found = merged([counted(values[:100]), counted(values[100:]), counted([])])
    whole = counted(values)
    assert found.values.tolist() == whole.values.tolist()
    assert found.counts.tolist() == whole.counts.tolist()
    assert weighted_sum(found) == values.sum()


@pytest.mark.parametrize("seed", range(4))
def test_a_tail_is_what_sorting_says(seed):
    values = (np.random.default_rng(seed).pareto(1.1, 777) * 40).astype(int)
    found, ordered = tail(counted(values)), np.sort(values)[::-1]
    for part, share in zip(found["largest"], (0.001, 0.01, 0.1), strict=True):
        assert part["count"] == int(np.ceil(share * 777))
        assert part["sum"] == ordered[: part["count"]].sum()
        assert part["part"] == part["sum"] / values.sum()
    half = found["half"]["count"]
    assert 2 * ordered[:half].sum() >= values.sum() > 2 * ordered[: half - 1].sum()


def test_drift_is_what_plain_formulas_say():
    rng = np.random.default_rng(0)
    one, other = rng.integers(0, 100, 400), rng.integers(20, 160, 300)
    found = drift(counted(one), counted(other), 2)
    assert found is not None
    steps = [abs((one <= x).mean() - (other <= x).mean()) for x in range(161)]
    assert found["distance"] == pytest.approx(max(steps))

    def bin_of(value):
        return -1 if value == 0 else int(np.floor(2 * np.log2(value)))

    counts = [Counter(map(bin_of, part.tolist())) for part in (one, other)]
    bins = set(counts[0]) | set(counts[1])
    expected = 0.0
    sizes = [sum(part.values()) + len(bins) / 2 for part in counts]
    for place in bins:
        a, b = ((part[place] + 0.5) / size for part, size in zip(counts, sizes))
        expected += (a - b) * np.log(a / b)
    assert found["psi"] == pytest.approx(expected)
    assert psi([5, 5], [50, 50]) < 0.01 < psi([9, 1], [10, 90])
    assert drift(counted(one), counted(one + 1), 2)["psi"] < 0.25 < found["psi"]
