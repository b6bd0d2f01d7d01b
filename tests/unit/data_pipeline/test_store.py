"""The store contract on a folder and in memory, coalescing, opening by URI. S3: tests/fault."""

import errno
import os
import random
import stat
import threading
from pathlib import Path

import pytest

from data_pipeline.ingest.readers import open_inputs
from data_pipeline.store.addresses import check_local, split_place
from data_pipeline.store.objects import Versions, merge_spans
from data_pipeline.store.open import (
    AccessDenied,
    FolderStore,
    MemoryStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    S3Store,
    Span,
    StoreError,
    StoreUnavailable,
    get_many,
    open_store,
)
from data_pipeline.store.plain_file import SpecialFile, open_plain
from data_pipeline.store.s3_answers import failure, meaning_of
from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from tests.silent import KEYS, refusing


@pytest.fixture(params=["folder", "memory"])
def store(request, tmp_path):
    if request.param == "folder":
        return FolderStore(tmp_path / "bucket")
    memory = MemoryStore("test_store", "some/prefix")
    memory.clear()
    return memory


@pytest.fixture
def folder(tmp_path):
    return FolderStore(tmp_path / "bucket")


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


def test_a_failed_write_leaves_the_old_object_and_no_rest(folder, monkeypatch):
    folder.put("a", b"old")
    with monkeypatch.context() as patch:
        patch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            folder.put("a", b"new")
    assert folder.get("a") == b"old"
    assert [p.name for p in folder.root.iterdir()] == ["a"]


def test_missing_things_are_told_apart(store, tmp_path):
    store.put("a", b"1")
    for call in (store.get, store.head):
        with pytest.raises(MissingKey, match="no/such"):
            call("no/such")
        with pytest.raises(MissingBucket, match="nowhere"):
            getattr(FolderStore(tmp_path / "nowhere"), call.__name__)("a")
    with pytest.raises(MissingKey, match="a/x: no such object"):
        store.get("a/x")


def test_a_pipe_or_device_is_refused_and_not_waited_for(folder):
    folder.root.mkdir(exist_ok=True)
    os.mkfifo(folder.root / "000000.tar")
    told = []

    def read():
        with pytest.raises(MissingKey, match=r"000000\.tar: is a pipe, socket or device") as caught:
            folder.get("000000.tar", 0, 512)
        told.append(caught.value)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(30)
    assert told, "the read waits for somebody who writes into the pipe"
    with pytest.raises(MissingKey):
        folder.head("000000.tar")
    with pytest.raises(SpecialFile, match="is a pipe, socket or device"):
        open_plain(Path("/dev/null"))


def test_a_changed_object_is_noticed(store):
    old = store.put("a", b"one")
    store.put("a", b"two")
    with pytest.raises(ObjectChanged, match="overwritten"):
        store.get("a", etag=old.etag)


def test_a_store_in_memory_notices_that_an_object_is_another_one_than_before():
    mine, theirs = MemoryStore("shared"), MemoryStore("shared")
    mine.clear()
    theirs.put("a", b"one")
    first = mine.head("a").etag
    assert mine.get("a") == b"one"
    theirs.put("a", b"two")
    for _ in range(2):  # the error repeats
        with pytest.raises(ObjectChanged, match=f"memory://shared/a: expected .*{first}"):
            mine.get("a", 0, 1)
    # an explicit ETag reads the new version
    assert mine.get("a", etag=mine.head("a").etag) == b"two"
    theirs.put("a", b"one")
    assert mine.get("a") == b"one"
    mine.put("a", b"own")
    assert mine.get("a") == b"own"


def test_first_versions_are_kept_for_the_keys_read_last():
    versions = Versions(limit=2)
    for key in ("a", "b", "a", "c"):  # b is evicted
        versions.check("u", key, "1")
    versions.check("u", "b", "2")  # c stays, a is evicted
    with pytest.raises(ObjectChanged, match="u/c: expected the version with ETag 1"):
        versions.check("u", "c", "2")
    versions.check("u", "a", "2")


def test_names_in_memory_are_apart_and_prefixes_nest():
    for name in ("one", "two"):
        MemoryStore(name).clear()
        MemoryStore(name, "a/b").put("key", name.encode())
    assert open_store("memory://one").get("a/b/key") == b"one"
    assert open_store("memory://two/a").get("b/key") == b"two"
    assert open_store("memory://two/a").list() == ["b/key"]
    buffer = bytearray(b"xyz")
    MemoryStore("one").put("k", buffer)
    buffer[0] = 0
    assert MemoryStore("one").get("k") == b"xyz"
    MemoryStore("one", "a").clear()
    assert MemoryStore("one").list() == ["k"]


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


def test_a_link_is_no_way_out(folder, tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    folder.put("a", b"")
    (folder.root / "link").symlink_to(tmp_path / "outside")
    with pytest.raises(ValueError, match="leads out"):
        folder.get("link/secret")


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


def _merged_one_by_one(spans, max_gap, most=16 << 20):
    """Merge spans one after the other: the slow reference of merge_spans."""
    groups, parts = [], []
    for number in sorted((n for n, s in enumerate(spans) if s.length), key=lambda n: spans[n]):
        span = spans[number]
        stop = span.offset + span.length
        if groups and groups[-1][0] == span.key:
            _, start, end = groups[-1]
            near = span.offset - end <= max_gap and max(end, stop) - start <= most
            if stop <= end or near:
                groups[-1][2] = max(end, stop)
                parts.append((number, len(groups) - 1, span.offset - start, stop - start))
                continue
        groups.append([span.key, span.offset, stop])
        parts.append((number, len(groups) - 1, 0, span.length))
    return [Span(key, start, end - start) for key, start, end in groups], parts


@pytest.mark.parametrize("gap", [0, 100, 65536, 5 << 20])
def test_spans_are_merged_as_one_by_one(gap):
    rng = random.Random(gap)
    for size in (1, 7, 300):
        for longest in (10, 4000, 9 << 20, 40 << 20):  # the largest spans exceed one read
            spans = [
                Span(rng.choice("zyx"), rng.randrange(200 * longest), rng.randrange(longest))
                for _ in range(size)
            ]
            spans += rng.choices(spans, k=size // 5)
            groups, parts = merge_spans(spans, gap)
            expected, one_by_one = _merged_one_by_one(spans, gap)
            assert groups == expected
            assert sorted(parts) == sorted(one_by_one)


def test_a_span_that_is_a_whole_read_is_not_copied(store):
    body = bytes(1000)
    store.get = lambda *_: body
    assert get_many(store, [Span("x", 5, 1000)])[0] is body


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


@pytest.mark.parametrize(
    ("status", "code", "meaning"),
    [
        (503, "SlowDown", "throttled"),
        (429, "", "throttled"),
        (400, "RequestLimitExceeded", "throttled"),
        (500, "InternalError", "again"),
        (502, "", "again"),
        (400, "RequestTimeout", "again"),
        (409, "OperationAborted", "again"),
        (501, "NotImplemented", "unsupported"),
        (400, "NotImplemented", "unsupported"),  # OSS
        (403, "RequestTimeTooSkewed", "skewed"),
        (403, "InvalidAccessKeyId", "expired"),  # perhaps rotated
        (400, "IncompleteBody", "again"),
        (409, "ConditionalRequestConflict", "again"),
        (507, "", "full"),
        (403, "QuotaExceeded", "full"),
        (301, "PermanentRedirect", "redirect"),
        (307, "", "redirect"),
        (503, "", "throttled"),
        (599, "Unheard", "again"),
        (418, "Unheard", "refused"),
        (400, "ExpiredToken", "expired"),
        (403, "InvalidToken", "expired"),
        (400, "400", "refused"),  # HEAD: a GET asks for the reason
        (400, "InvalidArgument", "refused"),
        (403, "SignatureDoesNotMatch", "denied"),
        (404, "NoSuchBucket", "no_bucket"),
        (404, "404", "missing"),
        (412, "PreconditionFailed", "changed"),
        (416, "InvalidRange", "range"),
    ],
)
def test_what_an_answer_means(status, code, meaning):
    assert meaning_of(status, code) == meaning


def test_a_failure_is_one_sentence():
    denied = failure("expired", "s3://b/k", "b", "HTTP 400 ExpiredToken", None)
    assert isinstance(denied, AccessDenied)
    assert "ExpiredToken, and again with credentials fetched anew" in str(denied)
    assert str(failure("refused", "s3://b/k", "b", "HTTP 400 X", None)).startswith(
        "s3://b/k: refused: HTTP 400 X"
    )


def test_open_store_reads_the_scheme(tmp_path, monkeypatch):
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    assert open_store(tmp_path).uri == str(tmp_path)
    assert open_store(f"file://{tmp_path}").uri == str(tmp_path)
    assert open_store("memory://name/some/").uri == "memory://name/some"
    s3 = open_store("s3://bucket/some/prefix/", endpoint="http://127.0.0.1:9")
    assert isinstance(s3, S3Store)
    assert s3.uri == "s3://bucket/some/prefix"


@pytest.mark.parametrize(
    "uri",
    [
        *(
            "gs://bucket/x",
            "s3://",
            "s3:///x",
            "memory://",
            "s3:/bucket/x",
            "s3:bucket",
            "S3://b/x",
        ),
        *("gs:/b/x", "HDFS:x", "http://host/x", "file:/x", "file://x", "file:x", "what://x"),
    ],
)
def test_what_is_meant_for_a_store_becomes_no_folder(uri, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for use in (open_store, open_place, open_checkpoint):
        with pytest.raises(ValueError, match=f"{uri}: expected s3://bucket/prefix, ") as error:
            use(uri)
        assert f"(of a folder with this name: ./{uri})" in str(error.value)
    with pytest.raises(ValueError, match=f"input {uri}: expected s3://"):
        open_inputs([uri], "text")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("path", ["run:1/a", "./s3:x", "a/s3://b", "s3", "/s3:/x", "~/memory:x"])
def test_a_path_may_hold_a_colon(path):
    assert split_place("x", path) == ("", path)
    check_local("x", path)
    assert isinstance(open_store(path), FolderStore)


def test_an_endpoint_with_a_password_is_refused_without_showing_it():
    with pytest.raises(ValueError, match="AWS_SECRET_ACCESS_KEY") as error:
        open_store("s3://bucket", endpoint="https://me:hunter2@host")
    assert "hunter2" not in str(error.value)


@pytest.mark.parametrize("kind", ["folder", "memory"])
def test_an_object_that_is_deleted_is_gone_and_may_be_deleted_again(kind, tmp_path):
    store = FolderStore(tmp_path) if kind == "folder" else MemoryStore("deleting")
    store.put("a/b", b"1")
    store.put("a/c", b"2")
    store.delete("a/b")
    store.delete("a/b")
    assert store.list() == ["a/c"]
    with pytest.raises(MissingKey):
        store.get("a/b")
    with pytest.raises(ValueError, match="bad object key"):
        store.delete("../x")


def test_an_error_names_the_server_that_was_asked(monkeypatch):
    """Without an endpoint, Amazon is asked, and the error says so. No request leaves the host."""
    for name in ("AWS_PROFILE", "AWS_ENDPOINT_URL", *KEYS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
    with pytest.raises(
        AccessDenied, match=r"asked https://s3\S*\.amazonaws\.com, Amazon's own: "
    ) as e:
        open_store("s3://bucket").get("key")
    assert "AWS_ENDPOINT_URL is not set" in str(e.value)
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    endpoint = refusing()
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(StoreUnavailable, match=f"asked {endpoint}, as configured, or by AWS_END"):
        open_store("s3://bucket", attempts=1).get("key")


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077, 0o002])
def test_a_folder_s_objects_are_shared_as_far_as_the_umask_lets_them_be(tmp_path, umask):
    before = os.umask(umask)
    try:
        (tmp_path / "plain").write_bytes(b"x")  # mode of an ordinary program's file
        FolderStore(tmp_path).put("a/b", b"x")
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("plain", "a/b")]
    assert modes == [0o666 & ~umask] * 2


class Away:
    """A file system whose reads fail for a while, each with an error that real ones raise."""

    def __init__(self, monkeypatch, number=errno.EIO):
        self.times, self.number, self.slept = 0, number, 0.0
        monkeypatch.setattr("data_pipeline.store.retry.time", self)
        monkeypatch.setattr("data_pipeline.store.patient.time", self)
        opened = "data_pipeline.store.objects.open_plain"
        monkeypatch.setattr(opened, self._failing(open_plain))
        monkeypatch.setattr(Path, "stat", self._failing(Path.stat))
        monkeypatch.setattr(os, "scandir", self._failing(os.scandir))

    def monotonic(self) -> float:
        return self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds

    def _failing(self, real):
        def call(*args, **more):
            if self.times > 0:
                self.times -= 1
                raise OSError(self.number, os.strerror(self.number))
            return real(*args, **more)

        return call


@pytest.mark.parametrize("read", ["get", "head", "list", "list_folders"])
def test_a_disk_that_is_away_for_a_while_shows_only_in_the_time(folder, monkeypatch, read):
    folder.put("a/b", b"text")
    call = {
        "get": lambda: folder.get("a/b", 1, 2), "head": lambda: folder.head("a/b").size,
        "list": folder.list, "list_folders": folder.list_folders,
    }[read]  # fmt: skip
    expected, away = call(), Away(monkeypatch)
    away.times = 5
    assert call() == expected
    assert away.slept > 0
    away.times, away.slept = 10**6, 0.0
    told = rf"{folder.uri}.*: Input/output error \(\d+ attempts in 1\d\d s\); check the disk"
    with pytest.raises(StoreUnavailable, match=told):
        call()
    assert 100 < away.slept < 130


def test_the_patience_of_a_folder_is_that_of_its_store(tmp_path, monkeypatch):
    store = open_store(tmp_path, patience=7.0)
    store.put("a", b"text")
    away = Away(monkeypatch, errno.ESTALE)
    away.times = 10**6
    with pytest.raises(StoreUnavailable, match=r"/a: Stale file handle .* in 7 s"):
        store.get("a")


def test_other_errors_of_a_disk_are_not_tried_again(folder, monkeypatch):
    folder.put("a", b"text")
    away = Away(monkeypatch, errno.EMFILE)
    away.times = 10
    with pytest.raises(OSError, match="Too many open files") as error:
        folder.get("a")
    assert (error.value.errno, away.slept) == (errno.EMFILE, 0.0)
