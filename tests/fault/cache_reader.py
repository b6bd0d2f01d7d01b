"""Functions run by the processes of the cache fault tests; small, as every process imports it."""

import hashlib
import os
import random
import sys
import time
from pathlib import Path

from data_pipeline.cache import blocks as cache_blocks
from data_pipeline.cache import node as cache_node
from data_pipeline.cache.cached_store import CacheConfig, CachedStore, CacheStats
from data_pipeline.store.objects import FolderStore, Span

BLOCK = 4096


class CountedStore(FolderStore):
    """Appends a line (key, offset, length) per read to a log shared by all processes."""

    def __init__(self, root: Path, log: Path, delay_s: float = 0.0, hang: bool = False) -> None:
        super().__init__(root)
        self._log, self._delay_s, self._hang = log, delay_s, hang

    def get(self, key, offset=0, length=None, *, etag=None):
        with self._log.open("a") as log:  # a short append, so lines never interleave
            log.write(f"{key} {offset} {length}\n")
        time.sleep(1000.0 if self._hang else self._delay_s)
        return super().get(key, offset, length, etag=etag)


def requests(log: Path) -> list[tuple[str, int, int]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [(key, int(a), int(b)) for key, a, b in (line.split() for line in lines)]


def open_cache(folder: Path, config: dict, **how) -> CachedStore:
    """Open a cache over `folder`/objects; `folder`/shm links to the node's shared memory."""
    cache_node.SHARED_MEMORY = (folder / "shm").resolve()
    inner = CountedStore(folder / "objects", folder / "log", **how)
    store = CachedStore(inner, CacheConfig(**{"block_bytes": BLOCK, **config}))
    for path in sorted((folder / "objects").iterdir()):
        version = hashlib.sha256(path.read_bytes()).hexdigest()
        store.register(path.name, path.stat().st_size, version)
    return store


def meet(folder: Path, processes: int) -> None:
    """Wait until that many processes have called this."""
    (folder / f"here-{os.getpid()}").touch()
    deadline = time.monotonic() + 80.0
    while len(list(folder.glob("here-*"))) < processes:
        assert time.monotonic() < deadline, "the other processes did not start"
        time.sleep(0.002)


def random_reads(
    folder: Path, config: dict, seed: int, count: int, processes: int = 1
) -> CacheStats:
    """Read random ranges by both methods and compare each with the file."""
    cache_blocks._MOST_OPEN = 8  # forces blocks to be reopened again and again
    meet(folder, processes)
    rng = random.Random(seed)
    files = {path.name: path.read_bytes() for path in sorted((folder / "objects").iterdir())}
    with open_cache(folder, config, delay_s=0.001) as store:
        for _ in range(count):
            spans = []
            for _ in range(rng.randrange(1, 6)):
                key = rng.choice(sorted(files))
                offset = rng.randrange(len(files[key]))
                longest = min(len(files[key]) - offset, 5 * BLOCK)
                spans.append(Span(key, offset, rng.randrange(longest + 1)))
            wanted = [files[key][offset : offset + length] for key, offset, length in spans]
            assert store.get_many(spans, threads=2) == wanted
            assert store.get(*spans[0]) == wanted[0]
            assert store.get(*spans[-1]) == wanted[-1]
        return store.cache_stats


def whole_reads(folder: Path, config: dict, seed: int, processes: int) -> CacheStats:
    """Read all objects whole, in random order."""
    meet(folder, processes)
    keys = sorted(path.name for path in (folder / "objects").iterdir())
    random.Random(seed).shuffle(keys)
    with open_cache(folder, config, delay_s=0.01) as store:
        for key in keys:
            assert store.get(key) == (folder / "objects" / key).read_bytes()
        return store.cache_stats


def s3_epoch(folder: Path, uri: str, endpoint: str, seed: int, processes: int) -> int:
    """Read every sample (1,000 bytes) of a shard once, in randomly ordered batches.

    Returns:
        Number of requests that this process sent to the server.
    """
    # Imports boto3, which the other processes do not need.
    from data_pipeline.store.open import open_store

    cache_node.SHARED_MEMORY = (folder / "shm").resolve()
    config = CacheConfig(folder=str(folder / "disk"), memory_bytes=1 << 22, block_bytes=1 << 16)
    data = (folder / "shard").read_bytes()
    samples = [Span("shard", i, min(1000, len(data) - i)) for i in range(0, len(data), 1000)]
    random.Random(seed).shuffle(samples)
    with CachedStore(open_store(uri, endpoint=endpoint), config) as store:
        store.register("shard", len(data), hashlib.sha256(data).hexdigest())
        meet(folder, processes)
        for i in range(0, len(samples), 16):
            batch = samples[i : i + 16]
            wanted = [data[offset : offset + length] for _, offset, length in batch]
            assert store.get_many(batch) == wanted
        meet(folder / "done", processes)  # the last process to close removes the shared memory
        return store.stats.requests


def one_read(folder: Path, config: dict, hang: bool) -> bytes:
    """Read the first three blocks of `shard-0`; with `hang`, the store never returns."""
    with open_cache(folder, config, hang=hang) as store:
        meet(folder, 1)
        return store.get("shard-0", 10, 3 * BLOCK - 10)


def hold_open(folder: Path, config: dict) -> None:
    """Fill the cache, signal readiness, and stay alive."""
    store = open_cache(folder, config)
    store.get("shard-0")
    (folder / "ready").touch()
    time.sleep(1000.0)
    sys.exit(f"process {os.getpid()} was not ended")
