"""One copy of an index for the processes of a node: equal columns, removed with its last user."""

import errno
import json
import logging
import multiprocessing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_pipeline.index import shared
from data_pipeline.index.columns import HASHED, SourceIndex
from data_pipeline.index.manifest import (
    IndexMismatch,
    index_key,
    manifest_key,
    read_index,
    write_index,
)
from data_pipeline.index.redacted import with_redacted
from data_pipeline.index.shared import read_shared_index
from data_pipeline.store.open import FolderStore
from tests.unit.data_pipeline.plain import made_index

SHARDS = [3, 0, 40]


@pytest.fixture
def store(tmp_path):
    store = FolderStore(tmp_path / "data")
    write_index(store, made_index("made", SHARDS, media=0.5))
    return store


@pytest.fixture
def node(tmp_path):
    (tmp_path / "node").mkdir()
    return tmp_path / "node"


def assert_equal(found: SourceIndex, wanted: SourceIndex) -> None:
    for name in HASHED:
        mine, other = getattr(found, name), getattr(wanted, name)
        assert type(mine) is np.ndarray
        assert mine.dtype == other.dtype
        assert np.array_equal(mine, other)
        assert not mine.flags.writeable
    assert pa.array(found.key).to_pylist() == pa.array(wanted.key).to_pylist()
    assert found.key_of(3) == wanted.key_of(3)
    told = (
        "name",
        "category",
        "shards",
        "tokenizer_name",
        "tokenizer_hash",
        "index_sha256",
        "redacted",
        "made_as",
    )
    for name in (*told, "content_hash", "num_samples"):
        assert getattr(found, name) == getattr(wanted, name)
    assert replace(found).content_hash == wanted.content_hash  # recomputed from the columns


def test_the_copy_is_the_index(store, node):
    assert_equal(read_shared_index(store, "made", (node,)), read_index(store, "made"))


def test_the_copy_of_a_redacted_source_knows_what_was_redacted_in_it(store, node):
    manifest = json.loads(store.get(manifest_key("made")))
    made_as = manifest["content_hash"]
    index = with_redacted(read_index(store, "made"), [7, 2], made_as)
    noted = {"made_as": made_as, "samples": [7, 2], "replaced": []}
    text = json.dumps(manifest | {"content_hash": index.content_hash, "redacted": noted})
    store.put(manifest_key("made"), text.encode())
    for _ in range(2):  # first the process that reads it, then a process that maps it
        found = read_shared_index(store, "made", (node,))
        assert (found.redacted, found.made_as, found.identity) == ((7, 2), made_as, made_as)
        assert_equal(found, read_index(store, "made"))


def test_a_source_without_samples_can_be_shared(tmp_path, node):
    store = FolderStore(tmp_path)
    write_index(store, made_index("made", []))
    found = read_shared_index(store, "made", (node,))
    assert found.num_samples == len(found.key) == 0


def test_it_is_read_once_and_gone_with_the_last_who_uses_it(store, node, monkeypatch):
    first = read_shared_index(store, "made", (node,))
    monkeypatch.setattr(shared, "read_index", None)  # a second read would fail
    second = read_shared_index(store, "made", (node,))
    assert_equal(second, first)
    del first
    assert list(node.rglob("columns"))
    del second
    assert not list(node.iterdir())


def _sum(root: Path, node: Path) -> tuple[int, str]:
    index = read_shared_index(FolderStore(root), "made", (node,))
    return int(index.json_offset.sum()), index.content_hash


def test_processes_that_come_together_have_the_same(store, node, tmp_path):
    """No process fails or leaves a file behind."""
    wanted = read_index(store, "made")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.starmap(_sum, [(tmp_path / "data", node)] * 6)
    assert found == [(int(wanted.json_offset.sum()), wanted.content_hash)] * 6
    assert not list(node.iterdir())


def test_without_room_each_has_its_own_and_is_told(store, node, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.WARNING)

    def full(path, array):
        Path(path).write_bytes(b"some of it")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shared.np, "save", full)
    other = tmp_path / "other"
    other.mkdir()
    found = read_shared_index(store, "made", (node, other, tmp_path / "not there"))
    monkeypatch.undo()
    assert_equal(found, read_index(store, "made"))
    assert "has its own copy of the index" in caplog.text
    assert str(node) in caplog.text
    assert not list(node.iterdir())


def test_a_full_folder_is_passed_over(store, node, tmp_path, monkeypatch):
    save, calls = np.save, []

    def full_once(path, array):
        calls.append(path)
        if node in Path(path).parents:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(path, array)

    monkeypatch.setattr(shared.np, "save", full_once)
    other = tmp_path / "other"
    other.mkdir()
    wanted = read_index(store, "made")
    # held by other processes of the node
    held = shared.NodeFolder(node, f"index-{wanted.content_hash}", 1.0)
    for _ in range(2):  # the second process does not try again
        assert_equal(read_shared_index(store, "made", (node, other)), wanted)
    assert sum(node in Path(path).parents for path in calls) == 1
    assert not (held.path / "part").exists()  # the partial copy in the full folder was removed
    held.close()


def test_a_damaged_index_is_refused_by_whoever_reads_it(store, node, tmp_path):
    path = tmp_path / "data" / index_key("made")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    for _ in range(2):
        with pytest.raises(IndexMismatch, match="index_sha256"):
            read_shared_index(store, "made", (node,))
    assert not list(node.iterdir())


def test_a_manifest_that_names_other_content_is_refused(store, node, tmp_path):
    held = read_shared_index(store, "made", (node,))
    path = tmp_path / "data" / manifest_key("made")
    path.write_text(path.read_text().replace(held.content_hash, "0" * 64))
    with pytest.raises(IndexMismatch, match="content_hash"):
        read_shared_index(store, "made", (node,))


def test_what_a_killed_process_left_half_written_is_not_used(store, node):
    wanted = read_index(store, "made")
    held = shared.NodeFolder(node, f"index-{wanted.content_hash}", 1.0)
    (held.path / "part").mkdir()
    (held.path / "part" / "shard.npy").write_bytes(b"half")
    assert_equal(read_shared_index(store, "made", (node,)), wanted)
    held.close()
