"""Lists the files of a source with their sizes and SHA-256.

A manifest names the shards, and the hashes of the index and of the tokenizer's rank file. Shards
may be in the folders of other sources if the version was extended or reindexed from an earlier one.
The manifest does not hash the `sidecars`, which record the source's origin and are not needed for
reading. Any other file in a source's folder is not part of the source.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data_pipeline.index.manifest import (
    index_key,
    manifest_key,
    provenance_key,
    read_manifest_file,
)
from data_pipeline.index.own_keys import folder_of
from data_pipeline.index.shards import check_source_name
from data_pipeline.names import did_you_mean
from data_pipeline.store.open import MissingKey, Store

_TOKENIZERS = "tokenizer"


@dataclass(frozen=True)
class Item:
    """A file of a source; `sha256` (hex) is None if the manifest has no hash of it."""

    key: str
    size: int
    sha256: str | None

    @property
    def folder(self) -> str:
        """Top-level folder of the file, usually that of a source."""
        return folder_of(self.key)


@dataclass(frozen=True)
class Contents:
    """Files of a source under one root.

    Attributes:
        name: its folder.
        manifest: the bytes of its manifest.
        content_hash: as in the manifest.
        shards: in the order of the manifest.
        others: index, sidecars, and the tokenizer's rank file.
        tokenizer: name of the tokenizer if its rank file is missing under this root, else "".
    """

    name: str
    manifest: bytes
    content_hash: str
    shards: tuple[Item, ...]
    others: tuple[Item, ...]
    tokenizer: str

    @property
    def items(self) -> tuple[Item, ...]:
        """All files except the manifest, in copy order."""
        return *self.shards, *self.others


def sidecars(name: str) -> tuple[str, ...]:
    """Return the keys of optional files of a source that are not part of its content."""
    return provenance_key(name), f"{name}/rejected.jsonl"


def find_sources(store: Store, wanted: Sequence[str]) -> list[str]:
    """Return the names of all sources under a root, or of the wanted sources, sorted.

    Costs one listing of the folders, and one request per folder.

    Raises:
        ValueError: there are no sources, or a wanted source is missing; suggests the nearest name.
    """
    missing = [name for name in wanted if not _is_there(store, name)]
    if wanted and not missing:
        return sorted(set(wanted))
    found = [name for name in store.list_folders() if _is_there(store, name)]
    if not found:
        raise ValueError(
            f"{store.uri}: no finished source here (no NAME/manifest.json); give the folder that "
            "holds the sources"
        )
    for name in missing:
        raise ValueError(f"{store.uri}: no source {name!r}; {did_you_mean(name, found)}")
    return found


def _is_there(store: Store, name: str) -> bool:
    try:
        check_source_name(name)
        store.head(manifest_key(name))
    except (MissingKey, ValueError):
        return False
    return True


class RankFiles:
    """Rank files of a store by SHA-256; they are read once, on first use."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._found: dict[str, Item] | None = None

    def find(self, sha256: str) -> Item | None:
        """Return the rank file with this hash, or None if tokenizer/ has no such file."""
        if self._found is None:
            self._found = {}
            for key in self._store.list(f"{_TOKENIZERS}/"):
                data = self._store.get(key)
                found = hashlib.sha256(data).hexdigest()
                self._found.setdefault(found, Item(key, len(data), found))
        return self._found.get(sha256)


def read_contents(store: Store, name: str, ranks: RankFiles) -> Contents:
    """Read the list of a source's files; reads only the manifest itself.

    Raises:
        MissingKey: the source or its index does not exist.
        IndexMismatch: the manifest is malformed, or names keys that are not shards
            (`own_keys.check_form`).
    """
    manifest, data = read_manifest_file(store, name)
    shards = tuple(Item(s["key"], s["size"], s["sha256"]) for s in manifest["shards"])
    index = Item(index_key(name), store.head(index_key(name)).size, manifest["index_sha256"])
    tokenizer = manifest["tokenizer"]
    ranks_file = ranks.find(tokenizer["sha256"])
    tokenizer_name = "" if ranks_file else tokenizer["name"]
    others = [index, *_present(store, sidecars(name))]
    if ranks_file is not None:
        others.append(ranks_file)
    return Contents(name, data, manifest["content_hash"], shards, tuple(others), tokenizer_name)


def _present(store: Store, keys: Iterable[str]) -> list[Item]:
    found = []
    for key in keys:
        try:
            found.append(Item(key, store.head(key).size, None))
        except MissingKey:
            continue
    return found
