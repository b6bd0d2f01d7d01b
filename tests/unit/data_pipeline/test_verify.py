"""Every kind of damage that `data verify` promises to find, planted one at a time in real sources.

The real ingest builds the clean source once; a test changes a copy of it.
"""

import dataclasses
import hashlib
import json
import shutil
import tarfile
import zlib
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.index.manifest import manifest_key, read_index, sources_at, write_index
from data_pipeline.index.shards import ShardBuilder
from data_pipeline.ingest.ingest import ingest
from data_pipeline.inspect.problem import KINDS, Problem
from data_pipeline.inspect.verify import Checks, open_source, verify_source
from data_pipeline.store.open import FolderStore, StoreUnavailable
from data_pipeline.text import Tokenizer
from tests.unit.data_pipeline.conftest import TRAINING_TEXT, train_ranks
from tests.unit.data_pipeline.crude_samples import crude
from tests.unit.data_pipeline.media import mp4

NAME = "mixed"


@pytest.fixture(scope="module")
def clean(tmp_path_factory, tokenizer) -> Path:
    root = tmp_path_factory.mktemp("clean")
    ingest(crude(), FolderStore(root), NAME, tokenizer, 20_000, category="grounding")
    return root


@pytest.fixture
def store(clean, tmp_path) -> FolderStore:
    shutil.copytree(clean, tmp_path / "copy")
    return FolderStore(tmp_path / "copy")


def found(store, tokenizer=None, **checks) -> list[Problem]:
    index = read_index(store, NAME)
    reports = verify_source(store, index, Checks(tokenizer, **checks))
    return [problem for report in reports for problem in report.problems]


def kinds(problems: list[Problem]) -> dict[str, int]:
    assert {problem.kind for problem in problems} <= set(KINDS)
    return dict(Counter(problem.kind for problem in problems))


def flip(store: FolderStore, key: str, at: int) -> None:
    data = bytearray(store.get(key))
    data[at] ^= 4
    store.put(key, bytes(data))


def rewrite_index(store: FolderStore, index) -> None:
    store.delete(manifest_key(index.name))
    write_index(store, index)


def change_index(store: FolderStore, **columns) -> None:
    """Rewrite the index with other columns: the index itself stays valid."""
    index = read_index(store, NAME)
    rewrite_index(store, dataclasses.replace(index, **columns))


def changed(column: np.ndarray, at: int, by: float) -> np.ndarray:
    copy = column.copy()
    copy[at] += by
    return copy


def test_a_sound_source_has_no_problem(store, tokenizer):
    index = read_index(store, NAME)
    assert len(index.shards) > 2
    read = []
    reports = list(verify_source(store, index, Checks(tokenizer, decode=True), read.append))
    assert [problem for report in reports for problem in report.problems] == []
    assert sum(report.samples for report in reports) == 8
    every_byte = sum(shard.size for shard in index.shards)
    assert sum(report.bytes for report in reports) == sum(read) == every_byte
    with tarfile.open(store.root / index.shards[0].key) as tar:
        assert reports[1].files == len(tar.getnames())


def header(store: FolderStore, index, **fields) -> None:
    """Write another header with a right checksum for the first medium."""
    key, at = index.shards[0].key, int(index.item_offset[0]) - 512
    data = bytearray(store.get(key))
    info = tarfile.TarInfo.frombuf(bytes(data[at : at + 512]), "utf-8", "strict")
    for name, value in fields.items():
        setattr(info, name, value)
    data[at : at + 512] = info.tobuf(tarfile.USTAR_FORMAT)
    store.put(key, bytes(data))


def append(store: FolderStore, index) -> None:
    with tarfile.open(store.root / index.shards[0].key, "a", format=tarfile.USTAR_FORMAT) as tar:
        tar.add(__file__, "more.py")


def end_off(store: FolderStore, index) -> None:
    """Sizes and hashes of manifest and shard agree; only a tar reader would fail."""
    data = store.get(index.shards[-1].key)[:-1024]
    store.put(index.shards[-1].key, data)
    sha256 = hashlib.sha256(data).hexdigest()
    info = dataclasses.replace(index.shards[-1], size=len(data), sha256=sha256)
    change_index(store, shards=(*index.shards[:-1], info))


def miscount(store: FolderStore, index) -> None:
    info = dataclasses.replace(index.shards[0], samples=index.shards[0].samples + 1)
    change_index(store, shards=(info, *index.shards[1:]))


# Change to the source (the first shard holds the first medium) -> problems, words in them.
DAMAGE = {
    "a bit of a medium": (
        lambda s, i: flip(s, i.shards[0].key, int(i.item_offset[0]) + 60),
        {"media crc": 1, "shard hash": 1}, '"s-0001"',
    ),
    "a bit of a document": (
        lambda s, i: flip(s, i.shards[i.shard[5]].key, int(i.json_offset[5]) + 9),
        {"json crc": 1, "shard hash": 1}, "s-0005.json",
    ),
    **{
        f"a bit of the {part} in a tar header": (
            lambda s, i, at=at: flip(s, i.shards[0].key, int(i.item_offset[0]) - 512 + at),
            {"tar": 1, "shard hash": 1}, '"s-0001"',
        )
        for part, at in {"name": 2, "size": 130, "sum": 150, "type": 156}.items()
    },
    # Header and checksum are right, but a tar reader would return the wrong image.
    "a name that is another sample's": (
        lambda s, i: header(s, i, name="s-0001.0.jpg"),
        {"tar": 1, "media": 1, "shard hash": 1}, "'s-0001.0.png' is expected",
    ),
    # Header and checksum are right, but the member links to another file.
    "a member that is no plain file": (
        lambda s, i: header(s, i, type=tarfile.SYMTYPE), {"tar": 1, "shard hash": 1}, "s-0001",
    ),
    "a bit of the filling": (
        lambda s, i: flip(s, i.shards[0].key, int(i.json_offset[0] + i.json_length[0])),
        {"tar": 1, "shard hash": 1}, "are not zero",
    ),
    "a missing shard": (
        lambda s, i: s.delete(i.shards[1].key), {"shard missing": 1}, "000001.tar",
    ),
    "bytes after the end": (
        lambda s, i: s.put(i.shards[0].key, s.get(i.shards[0].key) + b"\1" * 700),
        {"shard size": 1, "shard hash": 1, "tar": 1}, "does not know",
    ),
    "a file that the index does not know": (
        append, {"shard size": 1, "shard hash": 1, "tar": 1}, "'more.py'",
    ),
    "a tar without its end": (end_off, {"tar": 1}, "a tar ends with 1024"),
    "another number of samples": (miscount, {"index": 1}, "the manifest counts"),
}  # fmt: skip


@pytest.mark.parametrize("what", DAMAGE)
def test_damage_is_told_by_its_kind(store, tokenizer, what):
    damage, expected, words = DAMAGE[what]
    damage(store, read_index(store, NAME))
    problems = found(store, tokenizer)
    assert kinds(problems) == expected
    assert words in "".join(problem.as_json() for problem in problems)


def test_a_truncated_shard_names_every_lost_sample(store, tokenizer):
    index = read_index(store, NAME)
    key, cut = index.shards[0].key, int(index.item_offset[0]) + 10
    store.put(key, store.get(key)[:cut])
    problems = found(store, tokenizer)
    in_shard = [index.key_of(i) for i in np.flatnonzero(index.shard == 0)]
    assert kinds(problems) == {"shard size": 1, "shard hash": 1, "lost": len(in_shard) - 1}
    assert [p.sample for p in problems if p.kind == "lost"] == in_shard[1:]


def test_an_index_that_is_not_the_manifest_s(store):
    change = store.get(f"{NAME}/index.parquet")
    store.put(f"{NAME}/index.parquet", change[:-1] + b"\0")
    problem = open_source(store, NAME)
    assert isinstance(problem, Problem)
    assert problem.kind == "index"
    assert "index_sha256" in problem.detail


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "kimi-pretrain/source/1"}, "schema"),
        ({"shards": None}, "NoneType"),
        ({"samples": 3}, "samples is 8, expected 3"),
        ({"category": "pictures"}, "category"),
    ],
)
def test_a_manifest_that_is_no_such_thing(store, change, said):
    key = f"{NAME}/manifest.json"
    store.put(key, json.dumps(json.loads(store.get(key)) | change).encode())
    problem = open_source(store, NAME)
    assert isinstance(problem, Problem)
    assert said in problem.detail


def test_a_source_without_its_index(store):
    (store.root / NAME / "index.parquet").unlink()
    problem = open_source(store, NAME)
    assert isinstance(problem, Problem)
    assert "index.parquet" in problem.detail


def test_wrong_token_counts(store, tokenizer):
    index = read_index(store, NAME)
    change_index(
        store,
        piece_tokens=changed(index.piece_tokens, 0, 1),
        variant_tokens=changed(index.variant_tokens, 3, -1),
    )
    problems = found(store, tokenizer)
    assert kinds(problems) == {"tokens": 2}
    assert [p.sample for p in problems] == ["s-0000", "s-0004"]
    assert found(store, None) == [], "without a tokenizer no tokens are counted"


def test_another_tokenizer(store):
    other = Tokenizer(train_ranks(TRAINING_TEXT, 300), "other")
    problems = found(store, other)
    assert kinds(problems) == {"tokenizer": 1}


@pytest.mark.parametrize(
    ("column", "at", "by", "expected"),
    [
        ("item_width", 0, 1, {"media": 1}),
        ("item_height", 2, -3, {"media": 1}),
        ("item_frames", 1, -1, {"media": 1}),
        ("item_crc", 0, 1, {"media crc": 1}),
        ("json_crc", 3, 1, {"json crc": 1}),
        ("json_length", 0, -1, {"tar": 2, "json crc": 1}),
        ("json_length", 0, 1 << 40, {"lost": 1, "tar": 1}),
        ("item_media", 0, 1, {"document": 1, "tar": 1}),
        ("item_chunk", 1, 1, {"document": 1}),
        ("region_shape", 0, 3, {"document": 1, "region": 1}),
        ("region_item", 9, -1, {"document": 1}),
        ("point_x", 0, 0.25, {"document": 1}),
        ("point_x", 1, 50, {"document": 1, "region": 1}),
        ("point_y", 1, -2.5, {"document": 1, "region": 1}),
        ("region_item", 0, 4, {"document": 1, "region": 1}),
    ],
)  # fmt: skip
def test_a_wrong_number_in_the_index(store, tokenizer, column, at, by, expected):
    index = read_index(store, NAME)
    change_index(store, **{column: changed(getattr(index, column), at, by)})
    assert kinds(found(store, tokenizer)) == expected


def test_a_wrong_offset_is_told_and_the_rest_is_still_checked(store, tokenizer):
    index = read_index(store, NAME)
    change_index(store, json_offset=changed(index.json_offset, 1, 512))
    flip(store, index.shards[-1].key, int(index.json_offset[-1]) + 3)
    problems = found(store, tokenizer)
    assert {p.sample for p in problems if p.kind == "tar"} >= {"s-0001"}
    assert [p.sample for p in problems if p.kind == "json crc"] == ["s-0001", "s-0007"]


def test_a_video_with_another_number_of_frames(store, tokenizer):
    """The shard, its CRCs and its hash match the index; only the file shows the difference."""
    other = FolderStore(store.root / "other")
    samples = crude(3)
    builder = ShardBuilder()
    index = ingest(samples, other, NAME, tokenizer, category="video")
    data, clip = other.get(index.shards[0].key), mp4(10)
    assert clip != samples[2].segments[1].data
    picture = samples[1].segments[1].data
    read = [data[o : o + n] for o, n in zip(index.json_offset, index.json_length)]
    photo = samples[2].segments[3].data
    media = [[], [("0.png", picture)], [("0.mp4", clip), ("1.jpg", photo)]]
    members = [builder.add(index.key_of(i), read[i], media[i]) for i in range(3)]
    shard = builder.finish()
    other.put(index.shards[0].key, shard.data)
    info = dataclasses.replace(index.shards[0], size=len(shard.data), sha256=shard.sha256)
    lines = [members[1][1], *[members[2][1]] * 3, members[2][2]]
    columns = {
        f"item_{part}": np.array([getattr(line, part) for line in lines], dtype)
        for part, dtype in (("offset", np.int64), ("length", np.int64), ("crc", np.uint32))
    }
    rewrite_index(other, dataclasses.replace(index, shards=(info,), **columns))
    problems = found(other, tokenizer)
    assert kinds(problems) == {"media": 2}  # frames of the chunks, and their times
    assert {p.sample for p in problems} == {"s-0002"}


def test_damage_that_only_decoding_finds(store, tokenizer, tmp_path):
    """The header of the PNG is valid, but its pixels are damaged."""
    other = FolderStore(tmp_path / "other")
    index = ingest(crude(2), other, NAME, tokenizer, category="grounding")
    at, length = int(index.item_offset[0]), int(index.item_length[0])
    flip(other, index.shards[0].key, at + length // 2)
    data = other.get(index.shards[0].key)
    info = dataclasses.replace(index.shards[0], sha256=hashlib.sha256(data).hexdigest())
    crc = np.array([zlib.crc32(data[at : at + length])], np.uint32)
    rewrite_index(other, dataclasses.replace(index, shards=(info,), item_crc=crc))
    assert found(other, tokenizer) == []
    assert kinds(found(other, tokenizer, decode=True)) == {"media": 1}


def test_keys_that_stand_twice_or_are_no_keys(store, tokenizer):
    index = read_index(store, NAME)
    keys = [str(key) for key in index.key]
    keys[3], keys[6] = keys[2], "two.dots"
    change_index(store, key=keys)
    problems = found(store, tokenizer)
    assert [p.sample for p in problems if p.kind == "key"] == ["s-0002", "two.dots"]
    assert kinds(problems)["tar"] >= 2  # the names in the tar differ from the index


def test_all_problems_are_found_in_the_order_of_the_shards(store, tokenizer):
    index = read_index(store, NAME)
    for sample in range(index.num_samples):
        flip(store, index.shards[index.shard[sample]].key, int(index.json_offset[sample]) + 5)
    runs = [found(store, tokenizer, threads=threads) for threads in (1, 4)]
    assert runs[0] == runs[1]
    assert kinds(runs[0])["json crc"] == index.num_samples
    shards = [p.shard for p in runs[0]]
    assert shards == sorted(shards)


def test_a_share_of_the_samples_reads_a_share_of_the_bytes(store, tokenizer):
    index = read_index(store, NAME)
    for sample in (0, 1):
        flip(store, index.shards[index.shard[sample]].key, int(index.json_offset[sample]) + 5)
    reports = list(verify_source(store, index, Checks(tokenizer, share=0.5)))
    assert sum(report.samples for report in reports) == 4
    assert sum(r.bytes for r in reports) < 0.8 * sum(shard.size for shard in index.shards)
    problems = [problem for report in reports for problem in report.problems]
    assert kinds(problems) == {"json crc": 1}
    assert problems[0].sample == "s-0000"


def test_a_share_still_sees_every_shard_s_size(store):
    index = read_index(store, NAME)
    store.put(index.shards[-1].key, store.get(index.shards[-1].key) + b"\0")
    assert kinds(found(store, share=0.01)) == {"shard size": 1}


def test_a_shard_overwritten_while_it_is_read(store, monkeypatch):
    index = read_index(store, NAME)
    monkeypatch.setattr("data_pipeline.inspect.shard._PART", 512)
    calls = []

    def overwrite(_: int) -> None:
        calls.append(1)
        if len(calls) == 3:
            store.put(index.shards[0].key, store.get(index.shards[0].key))

    reports = verify_source(store, index, Checks(threads=1), overwrite)
    problems = [problem for report in reports for problem in report.problems]
    assert kinds(problems) == {"shard changed": 1}


def test_a_store_that_does_not_answer_is_no_problem_of_the_data(store):
    class Down(FolderStore):
        def get(self, key, offset=0, length=None, *, etag=None):
            raise StoreUnavailable("down")

    index = read_index(store, NAME)
    with pytest.raises(StoreUnavailable):
        list(verify_source(Down(store.root), index, Checks()))


def test_sources_are_found_by_their_manifests(store):
    store.put("tokenizer/t.tiktoken", b"")
    store.put("unfinished/000000.tar", b"")
    store.put("a/b/manifest.json", b"")
    assert sources_at(store) == [NAME]


@pytest.mark.parametrize("share", [0, -1, 1.5, float("nan")])
def test_a_share_out_of_bounds(share):
    with pytest.raises(ValueError, match="above 0, at most 1"):
        Checks(share=share)
