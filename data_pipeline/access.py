"""Opens the store, request budget, cache and tokenizer that a data config names.

Every process of a node opens its own objects; they share the budget and the cache through files.
"""

import hashlib
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from data_pipeline.cache.cached_store import CachedStore
from data_pipeline.config import DataConfig
from data_pipeline.fetch import Fetcher
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch, identity_of, read_manifest
from data_pipeline.store.addresses import endpoint_of, split_place
from data_pipeline.store.budget import Budget
from data_pipeline.store.objects import StoreError
from data_pipeline.store.open import Store, open_store
from data_pipeline.store.private import private_folder
from data_pipeline.text import Tokenizer

# (key, size, SHA-256) of every shard.
ShardVersions = Sequence[tuple[str, int, str]]


def shard_versions(indices: Sequence[SourceIndex]) -> ShardVersions:
    """Return the shard versions that a cache needs for some sources."""
    return [(shard.key, shard.size, shard.sha256) for index in indices for shard in index.shards]


def register(store: Store, versions: ShardVersions) -> None:
    """Register objects with a store that caches; other stores ignore them."""
    if isinstance(store, CachedStore):
        for key, size, version in versions:
            store.register(key, size, version)


def open_data(config: DataConfig) -> Store:
    """Open the store at `config.root`, behind the node's request budget and cache.

    Raises:
        ValueError: the config's root, endpoint or cache is not usable.
    """
    budget = None
    if config.requests_per_second is not None:
        budget = Budget(budget_folder(config), config.requests_per_second)
    store = open_store(
        config.root,
        endpoint=config.endpoint,
        patience=config.patience,
        budget=budget,
        threads=max(32, config.fetch_threads),
    )
    if budget is not None:
        weakref.finalize(store, budget.close)  # stays open while its store is in use
    return store if config.cache is None else CachedStore(store, config.cache)


def budget_folder(config: DataConfig) -> Path:
    """Return the folder of the node's request budget.

    Processes with the same root, endpoint and rate share one budget.

    Raises:
        StoreError: other users can write to the parent folder.
    """
    base = Path(tempfile.gettempdir())
    if config.cache is not None and config.cache.folder is not None:
        base = Path(config.cache.folder).expanduser().absolute()
    try:
        base = private_folder(base)
    except OSError as error:
        raise StoreError(f"the node's request budget (data.requests_per_second): {error}") from None
    named = f"{config.endpoint}\n{config.root}\n{config.requests_per_second}"
    return base / f"budget-{hashlib.sha256(named.encode()).hexdigest()[:12]}"


def open_tokenizer(config: DataConfig, store: Store) -> Tokenizer:
    """Read the tokenizer's rank file from a key under the root, a path or a URI.

    Raises:
        StoreError: the file does not exist.
        ValueError: the file is not a complete rank file.
    """
    name = config.tokenizer
    if "://" in name or name.startswith(("/", "~")):
        folder, _, file = name.rpartition("/")
        return Tokenizer.from_store(open_store(folder or "/", endpoint=config.endpoint), file)
    return Tokenizer.from_store(store, name)


def check_tokenizer(index: SourceIndex, tokenizer: Tokenizer) -> None:
    """Refuse a source that was indexed with another tokenizer.

    Raises:
        IndexMismatch: names the source and both tokenizers.
    """
    if index.tokenizer_hash != tokenizer.hash:
        raise IndexMismatch(
            f"source {index.name!r} was made with tokenizer {index.tokenizer_name!r} "
            f"({index.tokenizer_hash[:12]}), this run has {tokenizer.name!r} "
            f"({tokenizer.hash[:12]}); give that tokenizer or reindex the source"
        )


def run_sources(
    config: DataConfig,
    indices: Sequence[SourceIndex],
    heldout: Sequence[SourceIndex],
    changes: Sequence[tuple[int, int, Sequence[str]]] = (),
) -> list[dict[str, Any]]:
    """Return a run's record of its sources as JSON values without secrets.

    Each entry holds the name, the requested name (captions@active), the content_hash now and at
    creation, the number of samples redacted since, the SHA-256 of the index as read, root,
    endpoint ("" for a folder or Amazon's default), use ("train" or "heldout"), and the first step
    that may draw from the source.

    Args:
        changes: (first step, position, new sources) of each mid-run change of the data.
    """
    since = {name: step for step, _, names in changes for name in names}
    found = {
        "train": [(index.name, _contents(index)) for index in indices],
        "heldout": [(index.name, _contents(index)) for index in heldout],
    }
    return [
        _told(config, name, use, contents, since.get(name, 1))
        for use, used in found.items()
        for name, contents in used
    ]


def sources_ahead(config: DataConfig, heldout: Sequence[str]) -> list[dict[str, Any]]:
    """Return the sources that a run will read, in the form of `run_sources`, from manifests only.

    A garbage collection that begins before the indices are read needs this list. The first step of
    a new source is not known yet, so every entry has step 1.

    Args:
        heldout: names of the held-out sources.

    Raises:
        MissingKey, IndexMismatch, StoreError: a manifest cannot be read.
    """
    found: list[dict[str, Any]] = []
    with closing(open_data(config.replace(cache=None))) as store:
        for use, names in (("train", config.source_names), ("heldout", heldout)):
            for name in names:
                manifest = read_manifest(store, name)
                contents = {
                    "content_hash": manifest["content_hash"],
                    "made_as": identity_of(manifest),
                    "redacted": len(manifest.get("redacted", {}).get("samples", ())),
                    "index_sha256": manifest["index_sha256"],
                }
                found.append(_told(config, name, use, contents, 1))
    return found


def _contents(index: SourceIndex) -> dict[str, Any]:
    return {
        "content_hash": index.content_hash,
        "made_as": index.identity,
        "redacted": len(index.redacted),
        "index_sha256": index.index_sha256,
    }


def _told(
    config: DataConfig, name: str, use: str, contents: Mapping[str, Any], from_step: int
) -> dict[str, Any]:
    scheme, folder = split_place("data.root", config.root)
    root = config.root.rstrip("/")
    if scheme in ("", "file"):
        root = str(Path(folder).expanduser().resolve())
    return {
        "name": name,
        "asked": config.asked.get(name, name),
        **contents,
        "root": root,
        "endpoint": endpoint_of(root, config.endpoint),
        "use": use,
        "from_step": from_step,
    }


def open_fetcher(config: DataConfig, versions: ShardVersions, tokenizer_hash: str) -> Fetcher:
    """Open a fetcher with its own store and tokenizer, for a worker process.

    Raises:
        IndexMismatch: the tokenizer no longer has the hash `tokenizer_hash`.
    """
    store = open_data(config)
    register(store, versions)
    tokenizer = open_tokenizer(config, store)
    if tokenizer.hash != tokenizer_hash:
        raise IndexMismatch(
            f"tokenizer {config.tokenizer} has SHA-256 {tokenizer.hash[:12]}, this run began with "
            f"{tokenizer_hash[:12]}; restore that rank file"
        )
    return Fetcher(store, tokenizer, config.fetch_threads)
