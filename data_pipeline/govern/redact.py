"""Redaction: the bytes of samples are overwritten wherever the shards under a root hold them.

1. `plan` finds the samples in every source that holds their shards: grown and reindexed ones, too.
2. Shards are written anew under names of their own, of equal length (`index.redacted`), read back
   and compared. No other sample moves, and no index changes.
3. Each source's manifest names the new shards and their hashes, the samples that are redacted, and
   the shards that were replaced. It changes as a whole, and with it the source's content_hash; runs
   know a source by the hash that it was made with (`SourceIndex.identity`), so they go on. Before
   it hashes of the samples are written beside it, which stay when it goes (`index.erased`).
4. Replaced shards that no manifest under the root names are removed, with all their versions.
5. `purge` drops their blocks from a node's cache.

A redaction that was cut off leaves a root that can be read, with old shards or new ones; the same
command goes on, and so does the next redaction under the root.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.govern.holds import read_holds, refuse_held
from data_pipeline.index.columns import ShardInfo, SourceIndex
from data_pipeline.index.erased import note_erased, sums_of
from data_pipeline.index.manifest import expect, manifest_key, read_index, read_manifest, sources_at
from data_pipeline.index.redacted import erased, with_redacted
from data_pipeline.ingest.claim import Claim
from data_pipeline.names import listed
from data_pipeline.plan.tombstones import samples_of, unknown_key
from data_pipeline.store.json_objects import read_json
from data_pipeline.store.open import FolderStore, MissingKey, S3Store, Store, StoreError

Erasure = tuple[int, bytes]
"""Offset in a shard, and the bytes that are to be there."""
_MARK = ".redacted-"
_MOST_ROUNDS = 5  # sources that come in between are taken in as often


class Twin(NamedTuple):
    """Another sample that may hold the same bytes: a document or file of equal length and CRC."""

    source: str
    key: str
    of: str


@dataclass(frozen=True, eq=False)
class Plan:
    """What a redaction has to do.

    Attributes:
        indices: of the sources whose manifests change.
        samples: source -> those to be redacted that are not yet, ascending.
        shards: key -> what is to stand where in it; of shards to be written anew.
        renamed: key of a shard in a manifest -> that of the one in its place, already there.
        twins: samples that are not to be redacted and may hold the same bytes.
    """

    indices: Mapping[str, SourceIndex]
    samples: Mapping[str, list[int]]
    shards: Mapping[str, list[Erasure]]
    renamed: Mapping[str, str]
    twins: Sequence[Twin]

    def __bool__(self) -> bool:
        return bool(self.indices)


@dataclass
class Done:
    """What a redaction did.

    Attributes:
        samples: source -> samples that were redacted.
        contents: source -> its content_hash before and after.
        shards: keys of the new shards.
        removed: keys of replaced shards that are gone.
        kept: (key, reason) of those that could not be removed.
    """

    samples: dict[str, int] = field(default_factory=dict)
    contents: dict[str, tuple[str, str]] = field(default_factory=dict)
    shards: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)


class _Root:
    """The manifests of all finished sources under a root, and which shards took others' places."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.manifests = {name: read_manifest(store, name) for name in sources_at(store)}
        self.replaced: dict[str, dict[str, Any]] = {
            one["key"]: one for manifest in self.manifests.values() for one in _replaced(manifest)
        }

    def now(self, key: str) -> str:
        """Return the key of the shard that is in the place of one by now."""
        while key in self.replaced:
            key = self.replaced[key]["by"]
        return key

    def keys_of(self, name: str) -> list[str]:
        """Return the shards that a source's manifest names."""
        return [shard["key"] for shard in self.manifests[name]["shards"]]


def plan(store: Store, wanted: Mapping[str, Sequence[str]]) -> Plan:
    """Find what is to be done to redact samples, and what earlier redactions left undone.

    Args:
        store: rooted where the sources lie.
        wanted: source -> keys of samples.

    Raises:
        ValueError: no such source or sample, a shard is under a hold, or a source is being written
            that may take over the shards; names it. Nothing is changed.
        IndexMismatch, StoreError: a source cannot be read.
    """
    root = _Root(store)
    spots: dict[str, dict[int, list[Erasure]]] = {}
    indices: dict[str, SourceIndex] = {}

    def index_of(name: str) -> SourceIndex:
        if name not in indices:
            indices[name] = read_index(store, name)
        return indices[name]

    for name in sorted(wanted):
        if name not in root.manifests:
            there = listed(sorted(root.manifests))
            raise ValueError(f"{store.uri}: no finished source {name!r}; there are: {there}")
        index = index_of(name)
        _add_spots(spots, root, index, _numbers(store, index, wanted[name]))
    for name, manifest in root.manifests.items():
        if "redacted" in manifest:
            _add_spots(spots, root, index_of(name), list(index_of(name).redacted))
    _refuse_unfinished(store, root)
    changed: dict[str, SourceIndex] = {}
    samples: dict[str, list[int]] = {}
    shards: dict[str, list[Erasure]] = {}
    renamed: dict[str, str] = {}
    for name in root.manifests:
        stale = {key: root.now(key) for key in root.keys_of(name) if root.now(key) != key}
        if not stale and not any(key in spots for key in root.keys_of(name)):
            continue
        index = index_of(name)
        new = sorted({*_samples_at(index, spots, root)} - {*index.redacted})
        if not stale and not new:
            continue
        changed[name], samples[name] = index, new
        renamed |= stale
        for number in new:
            key = root.now(index.shards[index.shard[number]].key)
            shards[key] = [one for found in spots[key].values() for one in found]
    refuse_held(store, shards)
    return Plan(changed, samples, shards, renamed, _twins(changed, samples))


def held(store: Store, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Return in which sources under a root samples are, by their shards: redacted ones, too.

    Args:
        wanted: source -> keys of samples; names that are no source here are left out.

    Raises:
        ValueError: a source has no sample of such a key.
        IndexMismatch, StoreError: a source cannot be read.
    """
    root = _Root(store)
    spots: dict[str, dict[int, list[Erasure]]] = {}
    indices: dict[str, SourceIndex] = {}
    for name in sorted({*wanted} & {*root.manifests}):
        index = indices[name] = read_index(store, name)
        _add_spots(spots, root, index, _numbers(store, index, wanted[name]))
    found: dict[str, list[int]] = {}
    for name in root.manifests:
        if any(root.now(key) in spots for key in root.keys_of(name)):
            index = indices.get(name) or read_index(store, name)
            if numbers := _samples_at(index, spots, root):
                found[name] = numbers
    return found


def carry_out(
    store: Store,
    wanted: Mapping[str, Sequence[str]],
    progress: Callable[[str], None] = lambda _: None,
) -> Done:
    """Redact samples, and remove the shards that held them.

    Args:
        store, wanted: as of `plan`.
        progress: called with what is done next.

    Raises:
        ValueError, IndexMismatch, StoreError: as `plan`; a shard is not that of its index; or
            another process writes a source. The same command goes on.
    """
    done = Done()
    for _ in range(_MOST_ROUNDS):
        todo = plan(store, wanted)
        if not todo:
            break
        with ExitStack() as claims:
            held = [claims.enter_context(Claim(store, name)) for name in sorted(todo.indices)]
            infos = _write_shards(store, todo, done, progress)
            for claim in held:
                claim.check()
            for name in sorted(todo.indices):
                progress(f"{name}/manifest.json")
                _write_manifest(store, todo, name, infos, done)
    else:
        raise ValueError(f"{store.uri}: sources that hold these samples keep coming; run it again")
    _remove_replaced(store, done, progress)
    return done


def replaced_shards(store: Store) -> list[ShardInfo]:
    """Return the shards under a root in whose places redacted ones are."""
    return [
        ShardInfo(one["key"], one["size"], one["sha256"], 0)
        for one in _Root(store).replaced.values()
    ]


def purge(store: Store, config: CacheConfig) -> int:
    """Drop all blocks of replaced shards from this node's cache; returns how many shards it knows.

    Args:
        store: rooted as the runs' `data.root`; closed with the cache.
        config: of the cache, as the runs have it.
    """
    gone = replaced_shards(store)
    with CachedStore(store, config) as cache:
        for one in gone:
            cache.register(one.key, one.size, one.sha256)
            cache.forget(one.key)
    return len(gone)


def _replaced(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return manifest.get("redacted", {}).get("replaced", [])


def _add_spots(
    spots: dict[str, dict[int, list[Erasure]]],
    root: _Root,
    index: SourceIndex,
    numbers: Sequence[int],
) -> None:
    """Note of samples where they lie (shard, offset of the document) and what is to be there."""
    for number in numbers:
        key = root.now(index.shards[index.shard[number]].key)
        spots.setdefault(key, {})[int(index.json_offset[number])] = list(erased(index, number))


def _numbers(store: Store, index: SourceIndex, keys: Sequence[str]) -> list[int]:
    """Return the numbers of samples; ValueError: there is none of a key."""
    numbers = samples_of(index, keys).tolist()
    for key, number in zip(keys, numbers, strict=True):
        if number < 0:
            raise ValueError(f"{store.uri}: {unknown_key(index, key)}")
    return numbers


def _samples_at(
    index: SourceIndex, spots: Mapping[str, Mapping[int, object]], root: _Root
) -> list[int]:
    """Return the samples of a source that lie at some spots (shard, offset of the document)."""
    found: list[int] = []
    for number, shard in enumerate(index.shards):
        if (spot := spots.get(root.now(shard.key))) is None:
            continue
        first, end = np.searchsorted(index.shard, [number, number + 1]).tolist()
        offsets = index.json_offset[first:end]
        found += (first + np.flatnonzero(np.isin(offsets, list(spot)))).tolist()
    return found


def _refuse_unfinished(store: Store, root: _Root) -> None:
    """Refuse while a source is made of another one: its manifest would name shards that go."""
    names = {key.split("/")[0] for key in store.list() if "/.ingest/" in key}
    for name in sorted(names - {*root.manifests}):
        request: object = None
        with suppress(MissingKey, ValueError):
            request = read_json(store, f"{name}/.ingest/request.json")
        if not isinstance(request, dict) or "append to" in request:
            raise ValueError(
                f"{store.uri}/{name}: a source that may hold the shards of another one is being "
                f"written ({name}/.ingest/): finish that first, or delete its folder"
            )


def _twins(indices: Mapping[str, SourceIndex], samples: Mapping[str, list[int]]) -> list[Twin]:
    """Return the other samples of the sources with a document or file of equal length and CRC."""
    seen: dict[tuple[int, int], str] = {}
    for name, numbers in samples.items():
        for number in numbers:
            for one in sums_of(indices[name], number):
                seen.setdefault(one, indices[name].key_of(number))
    found: list[Twin] = []
    for name, index in indices.items():
        out = {*samples[name], *index.redacted}
        media = np.repeat(np.arange(index.num_samples), np.diff(index.item_ptr))
        for lengths, sums, owner in (
            (index.json_length, index.json_crc, np.arange(index.num_samples)),
            (index.item_length, index.item_crc, media),
        ):
            near = np.isin(sums, [crc for _, crc in seen])
            for length, crc, number in zip(*(c[near].tolist() for c in (lengths, sums, owner))):
                if number not in out and (length, crc) in seen:
                    found.append(Twin(name, index.key_of(number), seen[length, crc]))
    return list(dict.fromkeys(found))


def _write_shards(
    store: Store, todo: Plan, done: Done, progress: Callable[[str], None]
) -> dict[str, ShardInfo]:
    """Write the shards anew; returns, by the keys in manifests, what is in their places."""
    known = {shard.key: shard for index in todo.indices.values() for shard in index.shards}
    infos: dict[str, ShardInfo] = {}
    for key in sorted(todo.shards):
        progress(key)
        data = bytearray(store.get(key))
        # Of a renamed shard only the size is known here: no manifest of these names it.
        before = known.get(key)
        if before is not None:
            found = hashlib.sha256(data).hexdigest()
            expect(f"{store.uri}/{key}", "SHA-256", found, before.sha256)
        for offset, body in todo.shards[key]:
            if offset + len(body) > len(data):
                expect(f"{store.uri}/{key}", "size", len(data), f"{offset + len(body)} or more")
            data[offset : offset + len(body)] = body
        sha256 = hashlib.sha256(data).hexdigest()
        samples = before.samples if before is not None else 0
        info = ShardInfo(_new_key(key, sha256), len(data), sha256, samples)
        if before is None or sha256 != before.sha256:
            store.put(info.key, bytes(data))
            there = hashlib.sha256(store.get(info.key)).hexdigest()
            expect(f"{store.uri}/{info.key}", "SHA-256", there, sha256)
            done.shards.append(info.key)
        infos[key] = info
    for old, new in todo.renamed.items():
        if new not in infos:
            data = store.get(new)
            infos[new] = ShardInfo(new, len(data), hashlib.sha256(data).hexdigest(), 0)
        infos[old] = infos[new]
    return infos


def _new_key(key: str, sha256: str) -> str:
    """Return the key of a shard in the place of another; the same for the same bytes."""
    stem = key.removesuffix(".tar").partition(_MARK)[0]
    return f"{stem}{_MARK}{sha256[:12]}.tar"


def _write_manifest(
    store: Store, todo: Plan, name: str, infos: Mapping[str, ShardInfo], done: Done
) -> None:
    index, manifest = todo.indices[name], read_manifest(store, name)
    expect(f"{store.uri}/{name}", "content_hash", manifest["content_hash"], index.content_hash)
    shards, replaced = list(index.shards), list(_replaced(manifest))
    for at, shard in enumerate(index.shards):
        if (info := infos.get(shard.key)) is not None and info.key != shard.key:
            shards[at] = replace(info, samples=shard.samples)
            old = {"key": shard.key, "size": shard.size, "sha256": shard.sha256, "by": info.key}
            replaced.append(old)
    numbers = [*index.redacted, *todo.samples[name]]
    new = with_redacted(replace(index, shards=tuple(shards)), numbers, index.identity)
    manifest |= {
        "shards": [asdict(shard) for shard in new.shards],
        "content_hash": new.content_hash,
        "redacted": {"made_as": new.made_as, "samples": numbers, "replaced": replaced},
    }
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    note_erased(store, index, todo.samples[name])
    store.put(manifest_key(name), text.encode())
    done.samples[name] = done.samples.get(name, 0) + len(todo.samples[name])
    before = done.contents.get(name, (index.content_hash, ""))[0]
    done.contents[name] = (before, new.content_hash)


def _remove_replaced(store: Store, done: Done, progress: Callable[[str], None]) -> None:
    """Remove replaced shards that no manifest names, in all versions, and what writers left."""
    root = _Root(store)
    named = {key for name in root.manifests for key in root.keys_of(name)}
    holds = {key: hold.name for hold in read_holds(store) for key in hold.shards}
    for key in sorted({*root.replaced} - named):
        if key in holds:  # put on it after it was replaced and could not be removed
            done.kept.append((key, f"under hold {holds[key]!r}"))
            continue
        progress(f"remove {key}")
        try:
            if store.delete_versions(key):
                done.removed.append(key)
        except StoreError as error:
            done.kept.append((key, str(error)))
    for folder in sorted({key.rpartition("/")[0] for key in root.replaced}):
        if isinstance(store, S3Store):
            store.remove_uploads(f"{folder}/", lambda _: False)
        elif isinstance(store, FolderStore):
            store.remove_unfinished(folder)
