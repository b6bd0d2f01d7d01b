"""Sources for the sync tests: one with several shards, one grown from it, one reindexed."""

import hashlib
import os
import random
from pathlib import Path

from data_pipeline.index.manifest import read_manifest
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, Listed, TextSegment
from data_pipeline.store.open import FolderStore, Store
from data_pipeline.text import Tokenizer, train_ranks

RANKS = train_ranks(["the third text of 12 captions"] * 9, 270)
OTHER = train_ranks(["another tokenizer for the same texts"] * 9, 260)
SHARDS = 8


def samples(name: str, count: int, size: int) -> Listed:
    """Return `count` samples of `size` bytes; large samples get a shard each."""
    draw = random.Random(name)
    texts = ("".join(draw.choices("abcdefgh ", k=size)) for _ in range(count))
    crude = [CrudeSample(f"{name}-{i}", [TextSegment(text)]) for i, text in enumerate(texts)]
    return Listed(iter(crude), identity={"file": f"{name}.jsonl"})


def build(root: Path, shards: int = SHARDS, size: int = 5000) -> FolderStore:
    """Build captions, captions_2 grown from it, captions_k2 reindexed, web, and the rank files."""
    store = FolderStore(root)
    store.put("tokenizer/kimi.tiktoken", RANKS)
    store.put("tokenizer/other.tiktoken", OTHER)
    ours = Tokenizer(RANKS, "kimi.tiktoken")
    ingest(samples("captions", shards, size), store, "captions", ours, 4096)
    ingest(samples("more", 3, size), store, "captions_2", ours, 4096, append_to="captions")
    reindex(store, "captions", "captions_k2", Tokenizer(OTHER, "other.tiktoken"))
    ingest(samples("web", 2, size), store, "web", ours, 4096)
    return store


def objects_of(store: Store) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list()}


def assert_whole(target: Store) -> list[str]:
    """Check that the shards of each manifest exist and match their SHA-256; return the sources."""
    keys = target.list()
    names = [key.removesuffix("/manifest.json") for key in keys if key.endswith("/manifest.json")]
    for name in names:
        for shard in read_manifest(target, name)["shards"]:
            assert hashlib.sha256(target.get(shard["key"])).hexdigest() == shard["sha256"], shard
        assert f"{name}/index.parquet" in keys
    return names


def flip(path: Path, draw: random.Random) -> None:
    """Flip one bit of a file, and keep its size and times."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.chmod(0o600)
    path.write_bytes(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
