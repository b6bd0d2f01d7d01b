"""The store contract on a folder, coalescing, and opening by URI. S3 itself: tests/fault."""

import random
import threading

import pytest

from data_pipeline.store import (
    FolderStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    S3Store,
    Span,
    StoreError,
    get_many,
    open_store,
)


def test_bytes_come_back_whole_and_in_ranges(store):
    data = random.Random(0).randbytes(5000)
    info = store.put("a/b.bin", data)
    assert store.head("a/b.bin") == info
    assert info.size == 5000
    assert store.get("a/b.bin") == data
    assert store.get("a/b.bin", 100, 50) == data[100:150]
    assert store.get("a/b.bin", 4990) == data[4990:]
    assert store.get("a/b.bin", 10, 0) == b""
    assert store.get("a/b.bin", etag=info.etag) == data


def test_put_file_equals_put(store, tmp_path):
    (tmp_path / "local").write_bytes(b"x" * 3_000_000)
    assert store.put_file("big", tmp_path / "local").size == 3_000_000
    assert store.get("big", 2_999_990) == b"x" * 10


def test_keys_are_sorted_and_by_prefix(store):
    for key in ("b/2", "a", "b/10", "bb/1"):
        store.put(key, b"")
    assert store.list() == ["a", "b/10", "b/2", "bb/1"]
    assert store.list("b/") == ["b/10", "b/2"]
    assert store.list("b") == ["b/10", "b/2", "bb/1"]


def test_a_failed_write_leaves_the_old_object_and_no_rest(store, monkeypatch):
    store.put("a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            store.put("a", b"new")
    assert store.get("a") == b"old"
    assert [p.name for p in store.root.iterdir()] == ["a"]


def test_missing_things_are_told_apart(store, tmp_path):
    store.put("a", b"1")
    for call in (store.get, store.head):
        with pytest.raises(MissingKey, match="no/such"):
            call("no/such")
        with pytest.raises(MissingBucket, match="nowhere"):
            getattr(FolderStore(tmp_path / "nowhere"), call.__name__)("a")


def test_a_changed_object_is_noticed(store):
    old = store.put("a", b"one")
    store.put("a", b"two")
    with pytest.raises(ObjectChanged, match="overwritten"):
        store.get("a", etag=old.etag)


def test_reading_past_the_end_says_both_numbers(store):
    store.put("a", b"12345")
    with pytest.raises(StoreError, match="expected 4 bytes from offset 3, .* only 2"):
        store.get("a", 3, 4)
    with pytest.raises(ValueError, match="-1"):
        store.get("a", -1)


@pytest.mark.parametrize("key", ["", "../x", "a/../../x", "/etc/passwd", "a//b", "./a", "a\\..\\b"])
def test_keys_that_leave_the_root_are_refused(store, key):
    for call in (store.get, store.head, lambda k: store.put(k, b"")):
        with pytest.raises(ValueError, match="bad object key"):
            call(key)


def test_a_link_is_no_way_out(store, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    store.put("a", b"")
    (store.root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="leads out"):
        store.get("link/secret")


def _counting(store):
    """Record the ranges that reach the store."""
    seen, get = [], store.get

    def spy(key, offset=0, length=None, *, etag=None):
        seen.append(Span(key, offset, length))
        return get(key, offset, length, etag=etag)

    store.get = spy
    return seen


def test_get_many_equals_plain_reads_and_merges_neighbours(store):
    rng = random.Random(1)
    objects = {key: rng.randbytes(4000) for key in ("x", "y")}
    for key, data in objects.items():
        store.put(key, data)
    spans = []
    for _ in range(300):
        start = rng.randrange(3900)
        spans.append(Span(rng.choice("xy"), start, rng.randrange(100)))
    plain = [objects[s.key][s.offset : s.offset + s.length] for s in spans]
    for gap, threads in ((0, 1), (0, 8), (64, 3), (10**6, 8)):
        seen = _counting(store)
        assert get_many(store, spans, gap, threads) == plain
        if gap == 10**6:
            assert len(seen) == 2
    assert get_many(store, []) == []


def test_the_gap_decides_what_is_merged(store):
    store.put("x", bytes(1000))
    seen = _counting(store)
    get_many(store, [Span("x", 0, 10), Span("x", 30, 10), Span("x", 61, 10)], max_gap=20)
    assert sorted(seen) == [("x", 0, 40), ("x", 61, 10)]


def test_get_many_raises_the_first_error(store):
    store.put("x", bytes(10))
    with pytest.raises(MissingKey, match="gone"):
        get_many(store, [Span("x", 0, 5), Span("gone", 0, 5)])


def test_counts_are_exact_under_threads(store):
    store.put("x", bytes(100))
    before = store.stats
    threads = [
        threading.Thread(target=lambda: [store.get("x", 0, 10) for _ in range(50)])
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.stats.requests - before.requests == 400
    assert store.stats.bytes - before.bytes == 4000
    assert store.stats.written == 100


def test_open_store_reads_the_scheme(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert open_store(tmp_path).uri == str(tmp_path)
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)
    s3 = open_store("s3://bucket/some/prefix/", endpoint="http://127.0.0.1:9")
    assert isinstance(s3, S3Store)
    assert s3.uri == "s3://bucket/some/prefix"
    for uri in ("gs://bucket/x", "s3://", "s3:///x"):
        with pytest.raises(ValueError, match="use s3://"):
            open_store(uri)


def test_an_endpoint_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY") as error:
        open_store("s3://bucket", endpoint="https://me:hunter2@host")
    assert "hunter2" not in str(error.value)
