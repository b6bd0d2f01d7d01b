"""The index reads back as it was written, and any other content is refused."""

import hashlib
import io
import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.synthetic_index import synthetic_index
from data_pipeline.index.columns import (
    COLUMNS,
    GROUPS,
    PIECE_ITEM,
    PIECE_REGION,
    PIECE_TEXT,
    SAMPLE_COLUMNS,
    ShardInfo,
    SourceIndex,
)
from data_pipeline.index.manifest import (
    IndexMismatch,
    index_key,
    read_index,
    read_table,
    write_index,
)
from data_pipeline.index.reads import (
    check_shards,
    document_of,
    medium_of,
    read_checked,
    read_samples,
)
from data_pipeline.ingest.ingest import ingest
from data_pipeline.store.open import FolderStore, MissingKey
from tests.unit.data_pipeline.media import samples


@pytest.fixture
def source(store, tokenizer):
    return ingest(samples(24), store, "src", tokenizer, 20_000, category="caption")


ALL_COLUMNS = [*COLUMNS, *(f"{group}_ptr" for group in GROUPS)]


def _made(**changed) -> SourceIndex:
    """Return an index of five samples with pieces of every kind; `changed` replaces columns."""
    rng = np.random.default_rng(0)
    kinds = [[0], [0, 1, 2, 1, 0], [2, 1], [0, 0], [1, 1, 2, 1, 0, 1, 2]]
    piece_kind = np.array([kind for row in kinds for kind in row])
    variants = np.where(piece_kind == PIECE_TEXT, 1 + np.arange(len(piece_kind)) % 3, 1)
    sample = np.repeat(np.arange(5), [len(row) for row in kinds])
    is_region = piece_kind == PIECE_REGION
    points = 1 + np.arange(is_region.sum())
    entries = {
        "piece": np.ones(len(sample), int),
        "variant": variants - 1,
        "item": piece_kind == PIECE_ITEM,
        "region": is_region,
        "point": np.zeros(len(sample), int),
    }
    entries["point"][is_region] = points
    columns = {
        f"{group}_ptr": np.append(0, np.cumsum(np.bincount(sample, counts, 5))).astype(np.int64)
        for group, counts in entries.items()
    }
    for group, names in GROUPS.items():
        for name, kind in names.items():
            columns[name] = rng.integers(0, 100, entries[group].sum()).astype(kind)
    for name, kind in SAMPLE_COLUMNS.items():
        columns[name] = rng.integers(0, 100, 5).astype(kind)
    columns |= {
        "piece_kind": piece_kind.astype(np.int8),
        "piece_variants": variants.astype(np.int16),
        "region_points": points.astype(np.int16),
        "shard": np.array([0, 0, 1, 1, 2], np.int32),
    }
    about = {
        "name": "made",
        "category": "grounding",
        "shards": tuple(
            ShardInfo(f"made/{i:06d}.tar", 9, f"{i}" * 64, n) for i, n in enumerate([2, 2, 1])
        ),
        "key": [f"k{i}" for i in range(5)],
        "tokenizer_name": "tiny",
        "tokenizer_hash": "abc",
    }
    return SourceIndex(**(about | columns | changed))


def test_write_then_read_keeps_every_column(store):
    made = _made()
    write_index(store, made)
    found = read_index(store, "made")
    for name in ALL_COLUMNS:
        assert getattr(found, name).dtype == COLUMNS.get(name, np.int64)
        assert np.array_equal(getattr(found, name), getattr(made, name)), name
    assert [found.key_of(i) for i in range(5)] == [made.key_of(i) for i in range(5)]
    for name in ("name", "category", "shards", "content_hash", "tokenizer_name", "tokenizer_hash"):
        assert getattr(found, name) == getattr(made, name), name
    assert (found.num_samples, found.num_items) == (5, 7)
    texts = [made.piece_tokens[made.piece_kind != PIECE_ITEM].sum(), found.text_tokens.sum()]
    assert texts[0] == texts[1]


def test_an_index_of_no_items_and_of_one_sample(store):
    for tokens in ([7], [7, 8, 9]):
        made = synthetic_index(f"t{len(tokens)}", tokens)
        write_index(store, made)
        found = read_index(store, made.name)
        assert found.text_tokens.tolist() == tokens
        assert found.num_items == 0
        assert found.content_hash == made.content_hash


def test_equal_content_gives_equal_bytes(store):
    write_index(store, _made())
    first = [store.get(f"made/{name}") for name in ("index.parquet", "manifest.json")]
    with pytest.raises(ValueError, match="made: a finished source of this name exists"):
        write_index(store, _made())
    store.delete("made/manifest.json")
    write_index(store, _made())
    assert [store.get(f"made/{n}") for n in ("index.parquet", "manifest.json")] == first


@pytest.mark.parametrize("column", [*ALL_COLUMNS, "key", "category", "tokenizer_hash", "shards"])
def test_every_column_counts_in_the_content_hash(column):
    made = _made()
    values = getattr(made, column)
    if column == "key":
        other = [*values[:4], "other"]
    elif column == "shards":
        other = (*values[:2], ShardInfo("made/000002.tar", 9, "f" * 64, 1))
    elif isinstance(values, str):
        other = "code" if column == "category" else "other"
    else:
        other = values.copy()
        # Sums must stay consistent: pointers and counts move by one and back.
        at = {"shard": -2, "piece_kind": 3}.get(column, -1)
        if column in ("piece_kind", "piece_variants", "region_points"):
            other[:] = other[::-1]
        elif column.endswith("_ptr"):
            other[2] -= 1
        else:
            other[at] = 2 if column == "shard" else not other[at]
    assert _made(**{column: other}).content_hash != made.content_hash


@pytest.mark.parametrize(
    ("column", "what"),
    [
        ("piece_kind", "items"),
        ("piece_variants", "variants"),
        ("region_points", "points"),
    ],
)
def test_groups_that_do_not_add_up_are_refused(column, what):
    values = getattr(_made(), column).copy()
    values[0] += 1
    with pytest.raises(ValueError, match=f"{what} in their columns, but"):
        _made(**{column: values})


def test_the_manifest_names_everything(store, source, tokenizer):
    manifest = json.loads(store.get("src/manifest.json"))
    assert manifest["schema"] == "kimi-pretrain/source/2"
    assert manifest["category"] == "caption"
    assert manifest["tokenizer"] == {"name": "tiny", "sha256": tokenizer.hash}
    assert (manifest["samples"], manifest["items"]) == (24, source.num_items)
    assert len(manifest["shards"]) > 2
    for shard in manifest["shards"]:
        data = store.get(shard["key"])
        assert shard["size"] == len(data)
        assert shard["sha256"] == hashlib.sha256(data).hexdigest()
    index = store.get("src/index.parquet")
    assert manifest["index_sha256"] == hashlib.sha256(index).hexdigest()
    assert pq.read_table(io.BytesIO(index)).num_rows == 24


def test_an_unfinished_source_is_not_there(store):
    store.put("half/index.parquet", b"")
    with pytest.raises(MissingKey, match="no finished source"):
        read_index(store, "half")


def test_another_schema_is_refused(store, source):
    manifest = json.loads(store.get("src/manifest.json")) | {"schema": "other/9"}
    store.put("src/manifest.json", json.dumps(manifest).encode())
    with pytest.raises(IndexMismatch, match="'other/9', this version reads"):
        read_index(store, "src")
    for junk in (b"not json", b"[]"):
        store.put("src/manifest.json", junk)
        with pytest.raises(IndexMismatch, match=r"manifest\.json"):
            read_index(store, "src")


def test_an_index_that_is_not_the_manifests_is_refused(store, source):
    write_index(store, synthetic_index("other", [1, 2]))
    store.put("src/index.parquet", store.get("other/index.parquet"))
    with pytest.raises(IndexMismatch, match="src: index_sha256 is .* expected"):
        read_index(store, "src")


def test_samples_read_back_and_a_flipped_byte_is_found(store, source):
    documents = read_samples(store, source, [5, 0, 23])
    assert [d["meta"]["number"] for d in documents] == [5, 0, 23]
    shard = source.shards[source.shard[5]].key
    data = bytearray(store.get(shard))
    data[source.json_offset[5] + 20] ^= 1
    store.put(shard, bytes(data))
    with pytest.raises(IndexMismatch, match=r"s-0005.*CRC-32 is [0-9a-f]{8}, expected"):
        read_samples(store, source, [5])


def test_a_part_is_what_its_own_checksum_says(store, source):
    """Two parts of one span are compared separately; the error names the part that differs."""
    part = document_of(source, 5)
    assert read_checked(store, [part, part]) == [store.get(*part.span)] * 2
    wrong = part._replace(crc=part.crc ^ 1, name="the other index")
    for parts in ([part, wrong], [wrong, part]):
        with pytest.raises(IndexMismatch, match=r"the other index: CRC-32 .* \(read 3 times\)"):
            read_checked(store, parts)


def test_check_shards_finds_what_changed(store, source):
    count = len(source.shards)
    assert check_shards(store, source) == count
    assert check_shards(store, source, every=2) == (count + 1) // 2
    victim = source.shards[1].key
    whole = store.get(victim)
    store.put(victim, whole + b"\0")
    with pytest.raises(IndexMismatch, match=f"{victim}: size is {len(whole) + 1}, expected"):
        check_shards(store, source)
    assert check_shards(store, source, every=2)  # skips shard 1
    store.put(victim, bytes(len(whole)))
    with pytest.raises(IndexMismatch, match="CRC-32"):
        check_shards(store, source)
    (store.root / victim).unlink()
    with pytest.raises(MissingKey, match=victim):
        check_shards(store, source)


def test_check_shards_reads_media_too(store, source):
    shard = next(s for s, info in enumerate(source.shards) if info.samples >= 1)
    rows = np.flatnonzero(source.shard == shard)
    middle = rows[len(rows) // 2]
    while source.item_ptr[middle] == source.item_ptr[middle + 1]:
        shard += 1
        rows = np.flatnonzero(source.shard == shard)
        middle = rows[len(rows) // 2]
    span = medium_of(source, int(source.item_ptr[middle])).span
    data = bytearray(store.get(span.key))
    data[span.offset + span.length // 2] ^= 1
    store.put(span.key, bytes(data))
    with pytest.raises(IndexMismatch, match="CRC-32"):
        check_shards(store, source)


def test_columns_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="item_kind has 1 entries, expected 2"):
        synthetic_index("x", [1], item_ptr=[0, 2], item_kind=[0], item_width=[1, 1])
    with pytest.raises(ValueError, match="unknown columns"):
        synthetic_index("x", [1], itme_kind=[0])
    with pytest.raises(ValueError, match="grouped"):
        synthetic_index("x", [1, 1, 1], shard=[0, 1, 0])


def test_an_index_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        _made().piece_tokens[0] = 1


def test_a_misspelt_source_is_told_the_nearest(tmp_path):
    store = FolderStore(tmp_path)
    for name in ("digits", "charts", "unfinished"):
        store.put(f"{name}/shard.tar", b"")
    for name in ("digits", "charts"):
        store.put(f"{name}/manifest.json", b"{}")
    with pytest.raises(MissingKey, match="did you mean 'digits'. there are: charts, digits; "):
        read_index(store, "digit")
    with pytest.raises(MissingKey, match="of this name; there are: charts, digits; ") as error:
        read_index(store, "xyz")
    assert "did you mean" not in str(error.value)


def test_arrow_keeps_no_bytes_of_python(source, store, monkeypatch):
    """Arrow's threads would release them, and a process that exits at that moment would abort."""
    data, real, counts = store.get(index_key("src")), pq.ParquetFile, []

    def counting(reader):
        counts.append(sys.getrefcount(data))
        return real(reader)

    monkeypatch.setattr(pq, "ParquetFile", counting)
    as_argument = (lambda data: sys.getrefcount(data))(data)
    assert read_table(data).num_rows == source.num_samples
    assert counts == [as_argument]
