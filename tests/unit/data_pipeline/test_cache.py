"""The cache in one process: it returns the bytes of the store behind it, with few requests."""

import fcntl
import logging
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.cache import blocks as cache_blocks
from data_pipeline.cache import cached_store as cache
from data_pipeline.cache import node as cache_node
from data_pipeline.cache import tier as cache_tier
from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.cache.node import CacheTimeout, NodeFolder, RangeLocks
from data_pipeline.cache.tier import BlockId, Tier
from data_pipeline.store.objects import FolderStore, MissingKey, Span, StoreError

BLOCK = 1024
SIZE = 10 * BLOCK + 300
DATA = b"".join(os.urandom(BLOCK) for _ in range(10)) + os.urandom(300)
TIERS = {
    "memory": {"memory_bytes": 1 << 20},
    "disk": {"folder": "disk"},
    "both": {"folder": "disk", "memory_bytes": 1 << 20},
}


class Counted(FolderStore):
    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gets: list[tuple[str, int, int | None]] = []
        self.closed = False

    def get(self, key, offset=0, length=None, *, etag=None):
        self.gets.append((key, offset, length))
        return super().get(key, offset, length, etag=etag)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def shared_memory(tmp_path, monkeypatch) -> Iterator[Path]:
    """Replace /dev/shm with a temporary folder."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(cache_node, "SHARED_MEMORY", folder)
    return folder


@pytest.fixture
def inner(tmp_path) -> Counted:
    store = Counted(tmp_path / "bucket")
    store.put("a/shard", DATA)
    return store


@pytest.fixture
def opened(tmp_path, shared_memory, inner):
    """Return a function that opens caches over `inner` with the object registered."""
    stores: list[CachedStore] = []

    def opened(**config) -> CachedStore:
        if config.get("folder") == "disk":
            config["folder"] = str(tmp_path / "disk")
        store = CachedStore(
            inner, CacheConfig(**{"block_bytes": BLOCK, **config}), {"a/shard": (SIZE, "v1")}
        )
        stores.append(store)
        return store

    yield opened
    for store in stores:
        store.close()


def block_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.block"))


def spans():
    offsets = st.integers(0, SIZE).flatmap(
        lambda offset: st.tuples(st.just(offset), st.integers(0, min(SIZE - offset, 4 * BLOCK)))
    )
    return st.lists(offsets.map(lambda span: Span("a/shard", *span)), max_size=12)


@pytest.mark.parametrize("tiers", TIERS)
def test_any_reads_give_the_bytes_of_the_inner_store(opened, inner, tiers):
    stores = [opened(**TIERS[tiers]), opened(**TIERS[tiers])]

    @settings(max_examples=60)
    @given(spans(), st.integers(1, 3), st.booleans(), st.randoms(use_true_random=False))
    def check(requests, threads, forget, rng):
        wanted = [DATA[offset : offset + length] for _, offset, length in requests]
        for store in stores:
            assert store.get_many(requests, threads=threads) == wanted
            for span, data in zip(requests, wanted, strict=True):
                assert store.get(*span) == data
                assert store.get(span.key, span.offset) == DATA[span.offset :]
        if forget and requests:
            stores[0].forget(*rng.choice(requests))

    check()
    # Each block is fetched once, unless it was evicted.
    assert stores[0].cache_stats.memory_hits + stores[0].cache_stats.disk_hits > 0


@pytest.mark.parametrize("tiers", TIERS)
def test_a_read_of_missing_neighbours_is_one_request(opened, inner, tiers):
    store = opened(**TIERS[tiers])
    assert store.get("a/shard", 2 * BLOCK + 5, BLOCK) == DATA[2 * BLOCK + 5 :][:BLOCK]
    assert inner.gets == [("a/shard", 2 * BLOCK, 2 * BLOCK)]
    # Blocks 2 and 3 are cached: two runs are left, and the last block is short.
    assert store.get("a/shard") == DATA
    assert sorted(inner.gets[1:]) == [
        ("a/shard", 0, 2 * BLOCK),
        ("a/shard", 4 * BLOCK, SIZE - 4 * BLOCK),
    ]
    assert store.get("a/shard") == DATA
    assert len(inner.gets) == 3
    counts = store.cache_stats
    assert (counts.misses, counts.fetched_bytes) == (11, SIZE)
    assert counts.memory_hits + counts.disk_hits == 2 + 11
    assert counts.memory_bytes + counts.disk_bytes == 2 * BLOCK + SIZE
    assert (counts.memory_hits > 0) == (tiers != "disk")
    assert store.stats.requests == inner.stats.requests > 0


def test_get_many_fetches_the_runs_of_all_spans(opened, inner):
    store = opened(memory_bytes=1 << 20)
    inner.put("plain", b"0123456789")
    requests = [
        Span("a/shard", 5 * BLOCK, 10),
        Span("plain", 2, 3),
        Span("a/shard", 0, 1),
        Span("a/shard", 4 * BLOCK - 1, 2),
        Span("a/shard", SIZE, 0),
        Span("plain", 5, 5),
    ]
    answers = store.get_many(requests)
    assert answers == [
        *(DATA[5 * BLOCK :][:10], b"234", DATA[:1], DATA[4 * BLOCK - 1 :][:2], b"", b"56789")
    ]
    assert sorted(inner.gets) == [
        ("a/shard", 0, BLOCK),
        ("a/shard", 3 * BLOCK, 3 * BLOCK),
        ("plain", 2, 8),
    ]


def test_runs_are_bounded(opened, inner, monkeypatch):
    monkeypatch.setattr(cache, "RUN_BYTES", 4 * BLOCK)
    assert opened(memory_bytes=1 << 20).get("a/shard") == DATA
    assert sorted(inner.gets) == [
        ("a/shard", 0, 4 * BLOCK),
        ("a/shard", 4 * BLOCK, 4 * BLOCK),
        ("a/shard", 8 * BLOCK, SIZE - 8 * BLOCK),
    ]


def test_the_disk_outlives_the_store_and_the_memory_does_not(opened, inner, shared_memory):
    first = opened(**TIERS["both"])
    first.get("a/shard")
    assert len(block_files(shared_memory)) == 11
    first.close()
    assert inner.closed
    assert list(shared_memory.iterdir()) == []
    second = opened(**TIERS["both"])
    assert second.get("a/shard") == DATA
    assert len(inner.gets) == 1
    assert second.cache_stats.disk_hits == 11
    # Blocks read from the disk are in memory now.
    assert second.get("a/shard") == DATA
    assert (second.cache_stats.disk_hits, second.cache_stats.memory_hits) == (11, 11)


def test_memory_stays_until_the_last_store_closes(opened, inner, shared_memory):
    first, second = opened(memory_bytes=1 << 20), opened(memory_bytes=1 << 20)
    first.get("a/shard")
    first.close()
    first.close()
    assert second.get("a/shard") == DATA
    assert len(inner.gets) == 1
    second.close()
    assert list(shared_memory.iterdir()) == []


def test_only_registered_objects_without_an_etag_are_cached(opened, inner):
    store = opened(memory_bytes=1 << 20)
    info = inner.put("index", b"index")
    assert store.get("index") == store.get("index", etag=info.etag) == b"index"
    assert store.get("a/shard", 1, 2, etag=inner.head("a/shard").etag) == DATA[1:3]
    assert inner.gets == [("index", 0, None), ("index", 0, None), ("a/shard", 1, 2)]
    assert store.cache_stats.misses == 0
    with pytest.raises(MissingKey):
        store.get("nothing")


def test_the_rest_of_a_store_passes_through(opened, inner, tmp_path):
    store = opened(memory_bytes=1 << 20)
    assert store.uri == inner.uri
    assert store.list() == ["a/shard"]
    assert store.head("a/shard") == inner.head("a/shard")
    (tmp_path / "file").write_bytes(b"file")
    store.put_file("file", tmp_path / "file")
    assert store.get("file") == b"file"
    # A written object is a new version: its registration is gone.
    store.get("a/shard")
    store.put("a/shard", b"new")
    assert store.get("a/shard") == b"new"


def test_versions_never_mix(opened, inner):
    store = opened(**TIERS["both"])
    store.get("a/shard")
    other = bytes(reversed(DATA))
    inner.put("a/shard", other)
    assert store.get("a/shard", 5, 10) == DATA[5:15]
    store.register("a/shard", SIZE, "v1")
    assert store.get("a/shard", 5, 10) == DATA[5:15]
    store.register("a/shard", SIZE, "v2")
    assert store.get("a/shard", 5, 10) == other[5:15]
    store.register("a/shard", SIZE, "v1")
    assert store.get("a/shard", 5, 10) == DATA[5:15]


@pytest.mark.parametrize("tiers", TIERS)
def test_forgotten_blocks_are_fetched_again(opened, inner, tiers):
    store, other = opened(**TIERS[tiers]), opened(**TIERS[tiers])
    store.get("a/shard")
    inner.gets.clear()
    store.forget("a/shard", BLOCK - 1, 2)
    store.forget("unknown")
    assert other.get("a/shard") == DATA
    assert inner.gets == [("a/shard", 0, 2 * BLOCK)]
    store.forget("a/shard")
    assert store.get("a/shard") == DATA
    assert len(inner.gets) == 2


def test_reads_outside_the_object_are_refused_as_the_inner_store_does(opened, inner):
    store = opened(memory_bytes=1 << 20)
    for offset, length in ((0, SIZE + 1), (SIZE, 1), (3 * SIZE, 1), (SIZE - 1, 2)):
        for where in (store, inner):
            with pytest.raises(StoreError, match="a/shard: expected .* the object holds only"):
                where.get("a/shard", offset, length)
    assert store.get("a/shard", SIZE + 5) == inner.get("a/shard", SIZE + 5) == b""
    assert store.get("a/shard", SIZE, 0) == b""
    for offset, length in ((-1, 2), (0, -1), (BLOCK, -BLOCK)):
        with pytest.raises(ValueError, match="bad byte range"):
            store.get("a/shard", offset, length)


def test_an_error_of_the_inner_store_is_raised_and_the_next_read_tries_again(opened, inner):
    store = opened(memory_bytes=1 << 20)
    os.rename(inner.root / "a", inner.root / "b")
    for threads in (1, 4):
        with pytest.raises(MissingKey, match="a/shard"):
            store.get_many([Span("a/shard", 0, 1), Span("a/shard", 5 * BLOCK, 1)], threads=threads)
    os.rename(inner.root / "b", inner.root / "a")
    assert store.get("a/shard") == DATA


# Damaged blocks


def damage_byte(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(64 + 100)
        byte = file.read(1)
        file.seek(64 + 100)
        file.write(bytes([byte[0] ^ 1]))


def damage_header(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"x")


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"x")


def empty(path: Path) -> None:
    os.truncate(path, 0)


def swap(path: Path) -> None:
    """Replace a block file with another block's valid file of the same size."""
    other = path.with_name(path.name.replace("00000003", "00000005"))
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("tier", ["memory", "disk"])
@pytest.mark.parametrize("damage", [damage_byte, damage_header, truncate, extend, empty, swap])
def test_a_damaged_block_is_dropped_and_fetched_again(opened, inner, shared_memory, tier, damage):
    writer = opened(**TIERS["both" if damage is damage_byte else tier])
    writer.get("a/shard")
    inner.gets.clear()
    folder = shared_memory if tier == "memory" else writer.config.folder
    victims = [p for p in block_files(Path(folder)) if p.name.endswith("-00000003.block")]
    damage(victims[0])
    # the disk tier is not read while memory has the block
    if damage is damage_byte and tier == "disk":
        os.unlink(next(p for p in block_files(shared_memory) if p.name == victims[0].name))
    reader = opened(**TIERS["both" if damage is damage_byte else tier])
    assert reader.get("a/shard") == DATA
    assert reader.cache_stats.corrupt == 1
    # After a damaged byte in memory, the disk tier still has the block.
    lost = damage is not damage_byte or tier == "disk"
    assert inner.gets == ([("a/shard", 3 * BLOCK, BLOCK)] if lost else [])
    assert opened(**TIERS[tier]).get("a/shard") == DATA
    assert reader.cache_stats.failures == 0


def test_a_block_that_loses_bytes_while_it_is_open_is_fetched_again(opened, inner):
    store = opened(folder="disk")
    store.get("a/shard")
    truncate(block_files(Path(store.config.folder))[3])
    assert store.get("a/shard", 4 * BLOCK - 10, 10) == DATA[4 * BLOCK - 10 :][:10]


def test_left_over_temporary_files_are_removed_and_others_are_not(opened, tmp_path):
    store = opened(folder="disk")
    store.get("a/shard")
    store.close()
    (tmp_path / "disk" / ".part-killed").write_bytes(b"x" * 500)
    (tmp_path / "disk" / "notes.txt").write_bytes(b"not ours")
    store = opened(folder="disk")
    names = {path.name for path in (tmp_path / "disk").iterdir() if path.suffix != ".block"}
    assert names == {"notes.txt", "ledger"}


# Size limits


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_the_limit_holds_and_the_blocks_used_last_stay(opened, inner, shared_memory, tier):
    limit = 8 * (BLOCK + 4096)
    if tier == "memory":
        store, folder = opened(memory_bytes=limit), shared_memory
    else:
        store = opened(folder="disk", disk_bytes=limit)
        folder = Path(store.config.folder)
    inner.put("big", DATA * 10)
    store.register("big", len(DATA) * 10, "v1")
    store.get("a/shard", 0, 2 * BLOCK)
    for i in range(100):
        assert store.get("big", i * BLOCK, BLOCK) == (DATA * 10)[i * BLOCK :][:BLOCK]
        # Constant use; the marks are renewed without waiting for the next upkeep.
        store.get("a/shard", 0, 2 * BLOCK)
        store._blocks._upkeep_at = 0.0
        assert sum(path.stat().st_size for path in block_files(folder)) <= limit
    assert len([gets for gets in inner.gets if gets[0] == "a/shard"]) == 1
    inner.gets.clear()
    other = opened(**TIERS[tier], **{f"{tier}_bytes": limit}) if tier == "disk" else store
    for i in (97, 98, 99):
        assert other.get("a/shard", 0, 2 * BLOCK) == DATA[: 2 * BLOCK]
        assert store.get("big", i * BLOCK, BLOCK) == (DATA * 10)[i * BLOCK :][:BLOCK]
    assert inner.gets == []
    assert store.cache_stats.evicted > 50
    assert sum(path.stat().st_size for path in block_files(folder)) > limit // 2


def test_a_block_that_is_being_written_counts_in_full(tmp_path):
    limit = 6 * (BLOCK + 64)
    tier = Tier("disk", tmp_path, limit, 5.0)
    for i in range(6):
        assert tier.put(BlockId(b"0" * 16, i, BLOCK), memoryview(bytes(BLOCK)))
    with tier._ledger() as ledger:
        part = tier._reserve(ledger, 3 * BLOCK)
    for i in range(6, 20):
        tier.put(BlockId(b"0" * 16, i, BLOCK), memoryview(bytes(BLOCK)))
        assert sum(path.stat().st_size for path in block_files(tmp_path)) <= limit - 3 * BLOCK
    # Its writer is gone: the next scan removes it as a leftover.
    os.close(part[0])
    for i in range(20, 30):
        assert tier.put(BlockId(b"0" * 16, i, BLOCK), memoryview(bytes(BLOCK)))
    assert not list(tmp_path.glob(".part-*"))


def test_opening_a_block_counts_as_use(tmp_path):
    tier = Tier("disk", tmp_path, 6 * (BLOCK + 64), 5.0)
    blocks = [BlockId(b"0" * 16, i, BLOCK) for i in range(7)]
    for i, block in enumerate(blocks[:6]):
        assert tier.put(block, memoryview(bytes(BLOCK)))
        os.utime(tmp_path / block.name, (i, i))
    assert tier.open(blocks[0]) is not None
    assert tier.put(blocks[6], memoryview(bytes(BLOCK)))
    assert [tier.open(block) is not None for block in blocks[:4]] == [True, False, False, True]


def test_more_than_fits_is_not_kept(tmp_path, caplog):
    tier = Tier("disk", tmp_path, 2 * BLOCK, 5.0)
    assert not tier.put(BlockId(b"0" * 16, 0, 3 * BLOCK), memoryview(bytes(3 * BLOCK)))
    assert tier.put(BlockId(b"0" * 16, 1, BLOCK), memoryview(bytes(BLOCK)))
    assert tier.writable
    assert caplog.text == ""


def test_a_write_that_fails_leaves_nothing(opened, tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(5, "Input/output error")

    store = opened(folder="disk")
    with monkeypatch.context() as patch:
        patch.setattr(cache_tier.os, "rename", refuse)
        assert store.get("a/shard") == DATA
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["ledger"]
    assert "Input/output error" in caplog.text


def test_a_smaller_limit_is_kept_from_the_start(opened, tmp_path):
    store = opened(folder="disk")
    store.get("a/shard")
    store.close()
    limit = 4 * (512 + 4096)
    for path in block_files(tmp_path / "disk"):
        os.truncate(path, 1 << 20)
    opened(folder="disk", disk_bytes=limit * 10)
    assert block_files(tmp_path / "disk") == []


def test_evicted_blocks_are_let_go_of(opened, shared_memory, monkeypatch):
    monkeypatch.setattr(cache_blocks, "_UPKEEP_S", 0.0)
    store = opened(memory_bytes=1 << 20)
    store.get("a/shard")
    store.get("a/shard")
    assert len(store._blocks._open) == 11
    for path in block_files(shared_memory)[1:]:
        path.unlink()
    store.forget("a/shard", 0, 1)
    store.get("a/shard", 0, 1)
    store.get("a/shard", 0, 1)
    assert len(store._blocks._open) == 1


def descriptors_in(folder: Path) -> int:
    """Count the descriptors of this process that refer to files in a folder."""
    found = 0
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # another thread's
            found += os.readlink(f"/proc/self/fd/{number}").startswith(f"{folder}/")
    return found


def test_few_descriptors_are_used(opened, inner, tmp_path, monkeypatch):
    monkeypatch.setattr(cache_blocks, "_MOST_OPEN", 8)
    store = opened(folder="disk")
    before = descriptors_in(tmp_path)
    for _ in range(3):
        assert store.get("a/shard") == DATA
    assert before < descriptors_in(tmp_path) <= before + 8
    store.close()
    assert descriptors_in(tmp_path) == 0


# Threads and locks


def test_threads_fetch_each_block_once(opened, inner, monkeypatch):
    store, other = opened(memory_bytes=1 << 20), opened(memory_bytes=1 << 20)
    get = inner.get

    def slow(*args, **kwargs):
        time.sleep(0.3)  # until all threads have reached it
        return get(*args, **kwargs)

    monkeypatch.setattr(inner, "get", slow)
    ranges = [(0, SIZE), (BLOCK, 6 * BLOCK), (5 * BLOCK, 5 * BLOCK), (3 * BLOCK, 4 * BLOCK)] * 3
    start = threading.Barrier(len(ranges))

    def read(i: int) -> bool:
        start.wait()
        offset, length = ranges[i]
        return (store, other)[i % 2].get("a/shard", offset, length) == DATA[offset:][:length]

    with ThreadPoolExecutor(len(ranges)) as pool:
        assert all(pool.map(read, range(len(ranges))))
    assert sum(length for _, _, length in inner.gets) == SIZE  # no byte twice
    counts = [s.cache_stats for s in (store, other)]
    assert sum(c.misses for c in counts) == 11
    assert sum(c.waits for c in counts) > 0


def test_a_lock_that_is_held_too_long_is_named(tmp_path):
    locks = RangeLocks(tmp_path / "locks", 0.05)
    with locks.hold(100, 10, "x") as waited:
        assert not waited
        with locks.hold(110, 5, "a neighbour"), locks.hold(99, 1, "another"):
            pass
        message = f"waited 0.05 s for process {os.getpid()} .* to fetch shard 7, blocks 3 to 4"
        with (
            pytest.raises(CacheTimeout, match=message),
            locks.hold(109, 2, "shard 7, blocks 3 to 4"),
        ):
            pass
    with locks.hold(109, 2, "shard 7") as waited:
        assert not waited


def test_a_node_folder_that_goes_while_one_waits_for_it_is_made_again(tmp_path):
    base = tmp_path / f"kimi-pretrain-cache-{os.getuid()}"
    base.mkdir(mode=0o700)
    with ThreadPoolExecutor(1) as pool:
        handle = os.open(base, os.O_RDONLY)
        assert cache_node.try_flock(handle, fcntl.LOCK_EX)
        waiting = pool.submit(NodeFolder, tmp_path, "name", 5.0)
        time.sleep(0.05)
        base.rmdir()
        os.close(handle)
        node = waiting.result()
    assert node.first
    assert node.path.is_dir()
    node.close()
    assert not base.exists()


# No writable storage


def test_without_shared_memory_the_disk_still_works(opened, inner, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(cache_node, "SHARED_MEMORY", tmp_path / "none")
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(tmp_path))
    store = opened(**TIERS["both"])
    assert [r.getMessage().split(":")[0] for r in caplog.records] == [
        "the cache has no memory tier"
    ]
    assert store.get("a/shard") == store.get("a/shard") == DATA
    assert store.cache_stats.disk_hits == 11
    store.close()
    assert not list(tmp_path.glob("kimi-pretrain-*"))


def test_a_base_folder_of_somebody_else_is_not_used(opened, shared_memory, caplog, monkeypatch):
    monkeypatch.setattr(cache.tempfile, "gettempdir", lambda: str(shared_memory.parent))
    base = shared_memory / f"kimi-pretrain-cache-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    store = opened(**TIERS["both"])
    assert store.get("a/shard") == DATA
    assert "no memory tier" in caplog.text
    assert block_files(shared_memory) == []


# Folders that other users can write to

NOBODY = 65534
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can make other users' files")


def test_a_ledger_that_somebody_planted_is_not_followed(opened, inner, tmp_path, caplog):
    secret, folder = tmp_path / "secret", tmp_path / "disk"
    secret.write_text("0123456789abcdef")
    folder.mkdir()
    folder.chmod(0o777)
    (folder / "ledger").symlink_to(secret)
    store = opened(folder="disk")
    assert store.get("a/shard") == store.get("a/shard") == DATA
    assert secret.read_text() == "0123456789abcdef"
    assert block_files(folder) == []
    assert "may be written by other users (mode 777); chmod go-w" in caplog.text
    assert len(caplog.records) == 1


def test_a_folder_that_is_opened_to_others_later_is_not_written(opened, tmp_path, caplog):
    store = opened(folder="disk")
    store.get("a/shard", 0, BLOCK)
    (tmp_path / "disk").chmod(0o770)
    assert store.get("a/shard") == DATA
    assert len(block_files(tmp_path / "disk")) == 1
    assert "mode 770" in caplog.text


@as_root
def test_a_folder_of_somebody_else_is_not_used(opened, tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    os.chown(tmp_path / "disk", NOBODY, NOBODY)
    assert opened(folder="disk").get("a/shard") == DATA
    assert list((tmp_path / "disk").iterdir()) == []
    assert f"belongs to user {NOBODY}" in caplog.text


@pytest.mark.parametrize("how", ["a link", pytest.param("a file of another user", marks=as_root)])
def test_a_block_that_somebody_planted_is_not_served(opened, inner, tmp_path, how):
    """The planted block has a right checksum: an attacker writes that as well."""
    opened(folder="disk").get("a/shard", 0, BLOCK)
    (block,) = block_files(tmp_path / "disk")
    evil = bytes(BLOCK)
    head = bytearray(block.read_bytes()[: cache_tier._HEADER.size])
    head[40:48] = cache_tier.xxh3_64_intdigest(evil).to_bytes(8, "little")
    block.write_bytes(head + evil)
    if how == "a link":
        block.rename(tmp_path / "elsewhere")
        block.symlink_to(tmp_path / "elsewhere")
    else:
        os.chown(block, NOBODY, NOBODY)
    assert opened(folder="disk").get("a/shard", 0, BLOCK) == DATA[:BLOCK]


def test_in_a_folder_that_all_share_each_user_has_one_of_his_own(opened, tmp_path, caplog):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o1777)
    store = opened(folder="disk")
    assert store.get("a/shard") == DATA
    (own,) = (tmp_path / "disk").iterdir()
    assert (own.name, own.stat().st_mode & 0o777) == (f"kimi-pretrain-{os.getuid()}", 0o700)
    assert len(block_files(own)) == 11
    assert not caplog.records


@pytest.mark.parametrize("what", ["a folder", pytest.param("a link", marks=as_root)])
def test_that_folder_may_be_planted_too(opened, tmp_path, caplog, what):
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk").chmod(0o1777)
    own = tmp_path / "disk" / f"kimi-pretrain-{os.getuid()}"
    if what == "a folder":
        own.mkdir()
        own.chmod(0o777)
    else:
        (tmp_path / "aim").mkdir()
        own.symlink_to(tmp_path / "aim")
        os.lchown(own, NOBODY, NOBODY)
    assert opened(folder="disk").get("a/shard") == DATA
    assert list(own.iterdir()) == []
    assert "the disk tier of the cache" in caplog.text


@pytest.mark.parametrize("tiers", ["memory", "both"])
def test_a_vanished_node_folder_costs_only_the_sharing(opened, inner, shared_memory, caplog, tiers):
    store = opened(**TIERS[tiers])
    store.get("a/shard", 0, BLOCK)
    cache_node.shutil.rmtree(shared_memory)
    shared_memory.mkdir()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert store.get("a/shard") == DATA
    said = [record.getMessage() for record in caplog.records]
    assert len([m for m in said if "has lost its locks" in m]) == 1
    assert len([m for m in said if "the memory tier of the cache" in m]) == 1
    assert store.cache_stats.off == ("memory",)


@pytest.mark.parametrize("where", ["a file", "below a file"])
def test_a_folder_that_cannot_be_is_said_once(opened, inner, tmp_path, caplog, where):
    (tmp_path / "disk").write_text("a file")
    folder = tmp_path / "disk" if where == "a file" else tmp_path / "disk" / "below"
    store = opened(folder=str(folder))
    for offset in (5, BLOCK, 7):
        assert store.get("a/shard", offset, 3) == DATA[offset : offset + 3]
    # Without block storage, only the requested bytes are read.
    assert inner.gets == [("a/shard", offset, 3) for offset in (5, BLOCK, 7)]
    assert len(caplog.records) == 1
    assert "the disk tier of the cache" in caplog.text
    assert store.cache_stats.off == ("disk",)
    assert store.cache_stats.failures > 0


def test_a_vanished_disk_folder_is_tried_again_later(opened, inner, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(cache_tier, "_PAUSE_S", 0.2)
    store = opened(folder="disk")
    store.get("a/shard", 0, BLOCK)
    cache_node.shutil.rmtree(tmp_path / "disk")
    for _ in range(3):
        assert store.get("a/shard") == DATA
    assert len(caplog.records) == 1
    (tmp_path / "disk").mkdir()
    time.sleep(0.25)
    assert store.get("a/shard") == DATA
    assert store.cache_stats.off == ()
    assert len(block_files(tmp_path / "disk")) == 11


# Configuration


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "neither folder nor memory_bytes"),
        ({"folder": " "}, "folder is empty"),
        ({"folder": "x", "block_bytes": 100}, "block_bytes\n.* equal to 1024"),
        ({"folder": "x", "disk_bytes": 1 << 20}, "disk_bytes is 1048576; allowed"),
        ({"memory_bytes": 1 << 20}, "memory_bytes is 1048576; allowed"),
        ({"memory_bytes": -1}, "memory_bytes\n.* equal to 0"),
        ({"memory_bytes": True}, "memory_bytes\n.* valid integer"),
        ({"folder": "x", "wait_s": 0}, "wait_s\n.* greater than 0"),
        ({"folder": "x", "wait_s": float("nan")}, "wait_s\n"),
    ],
)
def test_bad_configs_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        CacheConfig(**config)


def test_all_tiers_are_read_when_none_is_written(opened, inner, monkeypatch):
    opened(**TIERS["both"]).get("a/shard")
    for store in opened(**TIERS["both"]), opened(folder="disk", memory_bytes=1 << 21):
        monkeypatch.setattr(cache_tier.Tier, "writable", False)
        assert store.get("a/shard") == DATA
    assert len(inner.gets) == 1


@pytest.mark.parametrize(("size", "version"), [(-1, "v"), (True, "v"), (1.5, "v"), (3, "")])
def test_bad_registrations_are_refused(opened, size, version):
    with pytest.raises(ValueError, match="object 'k': cannot be cached"):
        opened(memory_bytes=1 << 20).register("k", size, version)
