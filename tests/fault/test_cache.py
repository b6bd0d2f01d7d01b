"""The cache under processes that come, go and die, and on disks that fill up."""

import errno
import logging
import multiprocessing
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from data_pipeline.cache import node as cache_node
from data_pipeline.cache.node import CacheTimeout, locked_file
from data_pipeline.store.open import open_store
from tests.fault import cache_reader
from tests.fault.cache_reader import BLOCK, requests

pytestmark = pytest.mark.fault

SPAWN = multiprocessing.get_context("spawn")  # inherits the environment variables of the test
FORKS = multiprocessing.get_context("forkserver")  # saves half a second of imports per process
FORKS.set_forkserver_preload([cache_reader.__name__])
SIZES = {"shard-0": 13 * BLOCK + 77, "shard-1": 8 * BLOCK, "shard-2": 100}
BLOCKS = 14 + 8 + 1
TIERS = {
    "memory": {"memory_bytes": 1 << 20},
    "disk": {"folder": "disk"},
    "both": {"folder": "disk", "memory_bytes": 1 << 20},
}


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Objects to read, and a folder in the real shared memory that acts as this node's /dev/shm."""
    rng = random.Random(0)
    (tmp_path / "objects").mkdir()
    for name, size in SIZES.items():
        (tmp_path / "objects" / name).write_bytes(rng.randbytes(size))
    shared_memory = Path(tempfile.mkdtemp(prefix="kimi-pretrain-test-", dir="/dev/shm"))
    (tmp_path / "shm").symlink_to(shared_memory)
    monkeypatch.setattr(cache_node, "SHARED_MEMORY", shared_memory)
    yield tmp_path
    left = sorted(str(path) for path in shared_memory.rglob("*"))
    shutil.rmtree(shared_memory)
    assert left == []  # closing leaves nothing behind, whatever the test did


def config(node: Path, tiers: str, **more) -> dict:
    values = {**TIERS[tiers], **more}
    return {**values, "folder": str(node / "disk")} if "folder" in values else values


def start(function, *args) -> multiprocessing.Process:
    process = FORKS.Process(target=function, args=args)
    process.start()
    return process


def wait_until(condition, seconds: float = 50.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "did not come about"
        time.sleep(0.005)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_requests_do_not_grow_with_the_processes(node, processes):
    """Any number of processes costs at most one request per block, and no byte is read twice."""
    settings = config(node, "both")
    # Keep the cache open; else the first process to finish removes the shared memory too early.
    with cache_reader.open_cache(node, settings), ProcessPoolExecutor(processes, FORKS) as pool:
        futures = [
            pool.submit(cache_reader.random_reads, node, settings, seed, 60, processes)
            for seed in range(processes)
        ]
        counts = [future.result(timeout=100) for future in futures]
    asked = requests(node / "log")
    assert sum(c.misses for c in counts) <= BLOCKS
    assert len(asked) <= BLOCKS
    assert sum(length for _, _, length in asked) <= sum(SIZES.values())
    assert len(asked) == len(set(asked))
    assert all(c.corrupt == c.failures == 0 and c.off == () for c in counts)


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_requests_to_s3_for_an_epoch_of_a_shard(node, s3_environment, processes):
    """At most one request per block; without a cache it is one per sample and process."""
    uri = f"s3://{s3_environment.bucket}/cache-{processes}"
    data = random.Random(2).randbytes(20 * (1 << 16) + 5000)
    (node / "shard").write_bytes(data)
    (node / "done").mkdir()
    open_store(uri, endpoint=s3_environment.endpoint).put("shard", data)
    with ProcessPoolExecutor(processes, SPAWN) as pool:
        futures = [
            pool.submit(cache_reader.s3_epoch, node, uri, s3_environment.endpoint, seed, processes)
            for seed in range(processes)
        ]
        sent = sum(future.result(timeout=100) for future in futures)
    assert 1 <= sent <= 21


@pytest.mark.parametrize("tiers", TIERS)
def test_whole_objects_cost_as_many_requests_as_in_one_process(node, tiers):
    settings = config(node, tiers)
    with cache_reader.open_cache(node, settings), ProcessPoolExecutor(4, FORKS) as pool:
        futures = [pool.submit(cache_reader.whole_reads, node, settings, i, 4) for i in range(4)]
        counts = [future.result(timeout=100) for future in futures]
    assert sorted(requests(node / "log")) == [(name, 0, SIZES[name]) for name in sorted(SIZES)]
    assert sum(c.misses for c in counts) == BLOCKS
    assert sum(c.memory_hits + c.disk_hits for c in counts) == 3 * BLOCKS


def test_a_killed_fetcher_does_not_hold_up_the_others(node):
    settings = config(node, "both")
    fetcher = start(cache_reader.one_read, node, settings, True)
    wait_until(lambda: len(requests(node / "log")) == 1)
    with ProcessPoolExecutor(2, FORKS) as pool:
        futures = [pool.submit(cache_reader.one_read, node, settings, False) for _ in range(2)]
        wait_until(lambda: len(list(node.glob("here-*"))) == 3)
        time.sleep(0.2)
        assert not any(future.done() for future in futures)
        assert len(requests(node / "log")) == 1  # they wait
        os.kill(fetcher.pid, signal.SIGKILL)
        fetcher.join()
        wanted = (node / "objects" / "shard-0").read_bytes()[10 : 3 * BLOCK]
        assert [future.result(timeout=100) for future in futures] == [wanted, wanted]
    # One request of the killed process, and one of the two that waited.
    assert requests(node / "log") == [("shard-0", 0, 3 * BLOCK)] * 2


def test_waiting_ends_and_names_the_process_that_hangs(node):
    fetcher = start(cache_reader.one_read, node, config(node, "memory"), True)
    try:
        wait_until(lambda: len(requests(node / "log")) == 1)
        with cache_reader.open_cache(node, config(node, "memory", wait_s=0.3)) as store:
            # Blocks that no process fetches stay available.
            assert len(store.get("shard-0", 5 * BLOCK, 3)) == 3
            message = f"0.3 s for process {fetcher.pid} on .*/shard-0, blocks 2 to 3"
            with pytest.raises(CacheTimeout, match=message):
                store.get("shard-0", 2 * BLOCK, BLOCK + 1)
    finally:
        fetcher.kill()
        fetcher.join()
    # The next process to open and close the cache removes what the killed one left.
    with cache_reader.open_cache(node, config(node, "memory")) as store:
        assert len(store.get("shard-0", 2 * BLOCK, BLOCK + 1)) == BLOCK + 1


def test_shared_memory_of_a_killed_process_is_reclaimed(node):
    settings = config(node, "memory")
    holder = start(cache_reader.hold_open, node, settings)
    wait_until((node / "ready").exists)
    blocks = list((node / "shm").resolve().rglob("*.block"))
    assert len(blocks) == 14
    # A cache of another size cannot use the memory, and must keep it while it is in use.
    with cache_reader.open_cache(node, config(node, "memory", memory_bytes=1 << 21)):
        assert all(path.exists() for path in blocks)
    os.kill(holder.pid, signal.SIGKILL)
    holder.join()
    assert all(path.exists() for path in blocks)
    with cache_reader.open_cache(node, config(node, "memory", memory_bytes=1 << 21)):
        assert not any(path.exists() for path in blocks)


def test_a_process_that_ends_without_close_leaves_nothing(node):
    code = (
        "import sys; from pathlib import Path; from tests.fault import cache_reader\n"
        "store = cache_reader.open_cache(Path(sys.argv[1]), {'memory_bytes': 1 << 20})\n"
        "store.get('shard-0')\n"
        "print(len(list(Path(sys.argv[1], 'shm').resolve().rglob('*.block'))))\n"
        "if len(sys.argv) > 2: raise KeyboardInterrupt\n"
    )
    for more in ([], ["interrupted"]):
        done = subprocess.run(
            [sys.executable, "-c", code, str(node), *more],
            capture_output=True, text=True, timeout=100,
        )  # fmt: skip
        assert done.stdout == "14\n"
        assert list((node / "shm").resolve().iterdir()) == []


def test_a_forked_child_does_not_take_the_cache_along(node):
    with cache_reader.open_cache(node, config(node, "memory")) as store:
        store.get("shard-0")
        child = os.fork()
        if not child:
            store.close()
            os._exit(0)
        os.waitpid(child, 0)
        assert len(list((node / "shm").resolve().rglob("*.block"))) == 14
        with cache_reader.open_cache(node, config(node, "memory")) as other:
            other.get("shard-0")
    assert len(requests(node / "log")) == 1


@pytest.mark.parametrize("tier", ["memory", "disk"])
def test_the_limit_holds_over_processes_that_read_and_evict(node, tier):
    limit = 6 * (BLOCK + 4096)
    settings = config(node, tier, **{f"{tier}_bytes": limit})
    most = 0
    with cache_reader.open_cache(node, settings), ProcessPoolExecutor(3, FORKS) as pool:
        folder = next((node / "shm").rglob("blocks")) if tier == "memory" else node / "disk"
        futures = [
            pool.submit(cache_reader.random_reads, node, settings, seed, 80, 3) for seed in range(3)
        ]
        while not all(future.done() for future in futures):
            most = max(most, held(folder))
            time.sleep(0.001)
        most = max(most, held(folder))
        counts = [future.result() for future in futures]
        assert limit // 2 < most <= limit
    assert sum(c.evicted for c in counts) > 10
    assert all(c.corrupt == c.failures == 0 for c in counts)


def held(folder: Path) -> int:
    """Return the bytes of block files, finished or partial, while the ledger is locked."""
    with locked_file(folder / "ledger", 60.0):
        return sum(p.stat().st_size for p in folder.iterdir() if p.name != "ledger")


def test_processes_killed_at_any_moment_break_nothing(node):
    rng = random.Random(1)
    settings = config(node, "both", memory_bytes=40_000, disk_bytes=60_000)
    for seed in range(8):
        victim = start(cache_reader.random_reads, node, settings, seed, 10_000)
        wait_until((node / f"here-{victim.pid}").exists)
        victim.join(0.2 * rng.random())
        assert victim.exitcode is None
        os.kill(victim.pid, signal.SIGKILL)
        victim.join()
    with cache_reader.open_cache(node, settings) as store:
        read_all(node, store)
        assert store.cache_stats.corrupt == store.cache_stats.failures == 0
        assert held(node / "disk") <= 60_000
        assert not list((node / "disk").glob(".part-*"))


# Disks


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    """Mount a separate file system that can really fill up."""
    folder.mkdir(exist_ok=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(folder)],
        capture_output=True,
    )
    if mount.returncode:
        pytest.skip("mounting needs root")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def fill(folder: Path) -> None:
    with open(folder / "theirs", "wb", buffering=0) as file:
        while file.write(bytes(4096)) == 4096 and shutil.disk_usage(folder).free:
            pass


@pytest.fixture
def small_disk(node):
    with mounted(node / "disk", "96k"):
        yield node / "disk"


def read_all(node: Path, store) -> None:
    for name in SIZES:
        data = (node / "objects" / name).read_bytes()
        assert store.get(name) == data
        assert store.get(name, 50, 20) == data[50:70]


@pytest.mark.parametrize("tiers", ["disk", "both"])
def test_a_full_disk_is_said_once_and_gone_without(node, small_disk, tiers, caplog):
    with cache_reader.open_cache(node, config(node, tiers)) as store:
        for _ in range(3):
            read_all(node, store)
        counts = store.cache_stats
    assert counts.off == ("disk",)
    assert counts.failures > 0
    assert counts.corrupt == 0
    assert (counts.disk_hits > 0) == (tiers == "disk")  # cached blocks are still used
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert os.strerror(errno.ENOSPC) in caplog.text
    assert not list(small_disk.glob(".part-*"))
    # After space is freed, the next process caches blocks again and finds none broken.
    subprocess.run(["mount", "-o", "remount,size=1m", str(small_disk)], check=True)
    with cache_reader.open_cache(node, config(node, tiers)) as store:
        read_all(node, store)
        assert store.cache_stats.off == ()
        assert store.cache_stats.corrupt == 0
    assert len(list(small_disk.glob("*.block"))) == BLOCKS


def test_a_full_disk_of_other_peoples_files(node, small_disk, caplog):
    fill(small_disk)
    with cache_reader.open_cache(node, config(node, "disk")) as store:
        read_all(node, store)
        read_all(node, store)
        assert store.cache_stats.off == ("disk",)
    assert len(caplog.records) == 1
    assert (small_disk / "theirs").stat().st_size >= 90 << 10
    assert not list(small_disk.glob("*.block"))


@pytest.mark.parametrize("tiers", ["memory", "both"])
def test_full_shared_memory(node, caplog, tiers):
    with mounted((node / "shm").resolve(), "96k"):
        with cache_reader.open_cache(node, config(node, tiers)) as store:
            read_all(node, store)
            fill((node / "shm").resolve())
            for _ in range(2):
                read_all(node, store)
            assert store.cache_stats.off == ("memory",)
            assert store.cache_stats.corrupt == 0
        assert len(caplog.records) == 1
        assert os.strerror(errno.ENOSPC) in caplog.text
        # No space even for the number in the ledger or the note in a lock file.
        fill((node / "shm").resolve())
        with cache_reader.open_cache(node, config(node, tiers)) as store:
            read_all(node, store)
            assert store.cache_stats.off == ("memory",)
        assert "lost its locks" not in caplog.text


def test_a_limit_of_file_sizes(node, caplog):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with cache_reader.open_cache(node, config(node, "disk")) as store:
        resource.setrlimit(resource.RLIMIT_FSIZE, (BLOCK // 2, hard))
        try:
            read_all(node, store)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        # The last, short block fits below the limit, but it comes after blocks that do not.
        assert store.cache_stats.off == ("disk",)
    assert os.strerror(errno.EFBIG) in caplog.text
    assert not list((node / "disk").glob(".part-*"))


def test_a_disk_that_becomes_read_only_is_still_read(node, small_disk, caplog):
    with cache_reader.open_cache(node, config(node, "disk")) as store:
        store.get("shard-1")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    asked = len(requests(node / "log"))
    with cache_reader.open_cache(node, config(node, "disk")) as store:
        read_all(node, store)
        assert store.cache_stats.disk_hits == 9
    assert {key for key, _, _ in requests(node / "log")[asked:]} == {"shard-0", "shard-2"}
    assert len(caplog.records) == 1
    assert os.strerror(errno.EROFS) in caplog.text
    subprocess.run(["mount", "-o", "remount,rw", str(small_disk)], check=True)
