"""Folders of keys are listed without the keys in them. S3: tests/fault/test_checkpoint_s3.py."""

import pytest

from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.store.open import FolderStore, MemoryStore, MissingBucket

KEYS = ("b/2", "a", "b/10/x", "bb/1", "c/d1/x", "c/d1/y", "c/d2/y/z", "c/d3", "c/e/1")


@pytest.fixture(params=["folder", "memory", "cached"])
def store(request, tmp_path):
    if request.param == "memory":
        found = MemoryStore("listing", "some/prefix")
        found.clear()
        MemoryStore("listing", "some/prefix2").put("of_others/x", b"")
        MemoryStore("listing").put("some/other/x", b"")
        return found
    folder = FolderStore(tmp_path / "bucket")
    if request.param == "folder":
        return folder
    return CachedStore(folder, CacheConfig(memory_bytes=1 << 20, block_bytes=1024))


def test_folders_are_listed_once_each_and_sorted(store):
    for key in KEYS:
        store.put(key, b"")
    found = {prefix: store.list_folders(prefix) for prefix in ("", "b", "b/", "c/d", "a/", "z/z")}
    assert found == {
        "": ["b", "bb", "c"],
        "b": ["b", "bb"],
        "b/": ["b/10"],
        "c/d": ["c/d1", "c/d2"],
        "a/": [],
        "z/z": [],
    }
    store.delete("c/d2/y/z")
    assert store.list_folders("c/") == ["c/d1", "c/e"]
    store.close()


def test_a_folder_that_is_no_store_or_leads_out_of_it_is_not_listed(tmp_path):
    (tmp_path / "outside" / "secret").mkdir(parents=True)
    (tmp_path / "outside" / "secret" / "x").touch()
    store = FolderStore(tmp_path / "bucket")
    with pytest.raises(MissingBucket, match="no such folder"):
        store.list_folders()
    store.put("in/x", b"")
    (store.root / "link").symlink_to(tmp_path / "outside")
    assert store.list_folders() == ["in"]
    for prefix in ("../", "link/"):
        with pytest.raises(ValueError, match=r"bad object key|leads out"):
            store.list_folders(prefix)
