"""Redaction: overwrites the bytes of samples in every shard under a root that holds them.

1. `plan` finds the samples in every source that has their shards, including extended and reindexed
   sources.
2. New shards of the same length are written under new keys (`index.redacted`), read back and
   compared. No other sample moves, and no index changes.
3. Each source's manifest lists the new shards and their hashes, the redacted samples, and the
   replaced shards. It changes atomically, and the source's content_hash changes with it. Runs
   identify a source by its original hash (`SourceIndex.identity`), so they continue. Before the
   manifest changes, hashes of the samples are written to the source's folder; they stay when the
   manifest is removed (`index.erased`).
4. Replaced shards that no manifest under the root names are removed, with all their versions.
5. `purge` drops their blocks from a node's cache.

A manifest is authoritative for the shards in its own folder (`index.own_keys`). Its entries on
shards in other folders are followed only if its samples are asked for, and only if all sources
agree on the shards' contents. So a source changes before the sources derived from it. An
interrupted redaction leaves a readable root with old or new shards. Running the same command again
finishes it, and so does the next redaction under the root if the manifest of the shard's own folder
has changed.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.govern.holds import read_holds, refuse_held
from data_pipeline.govern.spots import (
    Erasure,
    Root,
    Spot,
    Spots,
    add_spots,
    check_spots,
    refuse_other_shards,
    samples_at,
    spot_of,
)
from data_pipeline.index.columns import ShardInfo, SourceIndex
from data_pipeline.index.erased import note_erased, sums_of
from data_pipeline.index.manifest import expect, manifest_key, read_manifest
from data_pipeline.index.own_keys import folder_of, is_own, place_of
from data_pipeline.index.redacted import with_redacted
from data_pipeline.ingest.claim import Claim, NameTaken
from data_pipeline.names import listed
from data_pipeline.plan.tombstones import samples_of, unknown_key
from data_pipeline.store.json_objects import read_json
from data_pipeline.store.open import FolderStore, MissingKey, S3Store, Store, StoreError

_MARK = ".redacted-"
_MOST_ROUNDS = 5  # repeat at most this often for sources that appear meanwhile


class Twin(NamedTuple):
    """Another sample that may have the same bytes: a document or file of equal length and CRC."""

    source: str
    key: str
    of: str


@dataclass(frozen=True, eq=False)
class Plan:
    """Work of a redaction.

    Attributes:
        indices: of the sources whose manifests change. Sources that refer to other sources' shards
            come after those sources.
        samples: source -> samples not yet redacted, in the order that its manifest gets, which is
            the order of the request. Runs rely on this order (`plan.redactions`).
        shards: key of a shard to rewrite -> offsets and new bytes.
        twins: samples outside the request that may have the same bytes.
        elsewhere: samples outside the request that another source (`of`) lists as redacted; their
            shards are not in that source's folder.
    """

    indices: Mapping[str, SourceIndex]
    samples: Mapping[str, list[int]]
    shards: Mapping[str, list[Erasure]]
    twins: Sequence[Twin]
    elsewhere: Sequence[Twin]

    def __bool__(self) -> bool:
        return bool(self.indices)


@dataclass
class Done:
    """Result of a redaction.

    Attributes:
        samples: source -> number of redacted samples.
        contents: source -> its content_hash before and after.
        shards: keys of the new shards.
        removed: keys of the removed shards.
        kept: (key, reason) of replaced shards that could not be removed.
    """

    samples: dict[str, int] = field(default_factory=dict)
    contents: dict[str, tuple[str, str]] = field(default_factory=dict)
    shards: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)


def plan(store: Store, wanted: Mapping[str, Sequence[str]]) -> Plan:
    """Return the work needed to redact samples, including work that earlier redactions left undone.

    Args:
        store: rooted at the folder of the sources.
        wanted: source -> keys of samples.

    Raises:
        ValueError: a source or sample does not exist, a shard is under a hold, sources disagree on
            a shard's contents, or a source being written may refer to the shards; the message names
            it. Nothing is changed.
        IndexMismatch, StoreError: a source cannot be read.
    """
    root = Root(store)
    orders = _orders(root, wanted)
    spots: Spots = {}
    places: dict[Spot, int] = {}
    for name, numbers in orders.items():
        add_spots(spots, root, root.index(name), numbers)
        for number in numbers:
            places.setdefault(spot_of(root.index(name), number), len(places))
    _refuse_unfinished(store, root)
    changed: dict[str, SourceIndex] = {}
    samples: dict[str, list[int]] = {}
    shards: dict[str, list[Erasure]] = {}
    for name in root.owners_first():
        if not root.places[name] & spots.keys():
            continue
        index = root.index(name)
        check_spots(root, name, spots)
        if not (new := _in_order(index, spots, orders.get(name, ()), places)):
            continue
        changed[name], samples[name] = index, new
        for number in new:
            key = index.shards[index.shard[number]].key
            shards[key] = [one for found in spots[place_of(key)].values() for one in found]
    refuse_other_shards(root, changed)
    refuse_held(store, shards)
    elsewhere = _elsewhere(root, spots)
    return Plan(changed, samples, shards, _twins(changed, samples), elsewhere)


def held(store: Store, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Return source -> numbers of the samples, for every source under a root that has their shards.

    Redacted samples are included.

    Args:
        wanted: source -> keys of samples; unknown sources are skipped.

    Raises:
        ValueError: a source has no sample with such a key.
        IndexMismatch, StoreError: a source cannot be read.
    """
    root = Root(store)
    spots: dict[str, set[int]] = {}
    for name in sorted({*wanted} & {*root.manifests}):
        index = root.index(name)
        for number in _numbers(store, index, wanted[name]):
            place, offset = spot_of(index, number)
            spots.setdefault(place, set()).add(offset)
    found: dict[str, list[int]] = {}
    for name in root.manifests:
        if root.places[name] & spots.keys() and (numbers := samples_at(root.index(name), spots)):
            found[name] = numbers
    return found


def carry_out(
    store: Store,
    wanted: Mapping[str, Sequence[str]],
    progress: Callable[[str], None] = lambda _: None,
) -> Done:
    """Redact samples, and remove the shards that held them.

    Args:
        store, wanted: as in `plan`.
        progress: called with a description of each step before it starts.

    Raises:
        ValueError, IndexMismatch, StoreError: as in `plan`; a shard does not match its index; or
            another process writes to a source. Running the same command again continues the
            redaction.
    """
    done = Done()
    for _ in range(_MOST_ROUNDS):
        todo = plan(store, wanted)
        if not todo:
            break
        with ExitStack() as claims:
            held = [claims.enter_context(Claim(store, name)) for name in sorted(todo.indices)]
            # check again: from here on, the claims keep anyone from adding a hold
            refuse_held(store, todo.shards)
            infos = _write_shards(store, todo, done, progress)
            for claim in held:
                claim.check()
            for name in todo.indices:
                progress(f"{name}/manifest.json")
                _write_manifest(store, todo, name, infos, done)
    else:
        raise ValueError(f"{store.uri}: sources that hold these samples keep coming; run it again")
    _remove_replaced(store, wanted, done, progress)
    return done


def replaced_shards(store: Store) -> list[ShardInfo]:
    """Return the shards that redacted shards have replaced, by the manifests under a root.

    If manifests disagree on a shard's size or hash, each variant is returned.
    """
    gone = {
        ShardInfo(one["key"], one["size"], one["sha256"], 0): None
        for manifest in Root(store).manifests.values()
        for one in _replaced(manifest)
    }
    return [*gone]


def purge(store: Store, config: CacheConfig) -> int:
    """Drop all blocks of replaced shards from this node's cache; return the number of such shards.

    Args:
        store: rooted at the runs' `data.root`; closed with the cache.
        config: cache configuration of the runs.
    """
    gone = replaced_shards(store)
    with CachedStore(store, config) as cache:
        for one in gone:
            cache.register(one.key, one.size, one.sha256)
            cache.forget(one.key)
    return len({one.key for one in gone})


def _replaced(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return manifest.get("redacted", {}).get("replaced", [])


def _orders(root: Root, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Return source -> samples to redact: the requested ones and those already listed as redacted.

    Already redacted samples count only in a source's own folder, so that derived sources follow it.
    """
    orders: dict[str, list[int]] = {}
    for name in sorted(wanted):
        if name not in root.manifests:
            there = listed(sorted(root.manifests))
            raise ValueError(f"{root.store.uri}: no finished source {name!r}; there are: {there}")
        orders[name] = _numbers(root.store, root.index(name), wanted[name])
    for name in root.manifests:
        if own := root.redacted(name, own=True):
            orders[name] = [*orders.get(name, ()), *own]
    return orders


def _elsewhere(root: Root, spots: Spots) -> list[Twin]:
    """Return samples that another source lists as redacted without owning their shards."""
    asked: dict[str, dict[int, str]] = {}
    for name in root.manifests:
        for number in root.redacted(name, own=False):
            place, offset = spot_of(root.index(name), number)
            if offset not in spots.get(place, ()):
                asked.setdefault(place, {}).setdefault(offset, name)
    found: list[Twin] = []
    for name in root.manifests:
        if not root.places[name] & asked.keys():
            continue
        index = root.index(name)
        for number in sorted({*samples_at(index, asked)} - {*index.redacted}):
            place, offset = spot_of(index, number)
            found.append(Twin(name, index.key_of(number), asked[place][offset]))
    return found


def _numbers(store: Store, index: SourceIndex, keys: Sequence[str]) -> list[int]:
    """Return the numbers of samples; raises ValueError if a key is unknown."""
    numbers = samples_of(index, keys).tolist()
    for key, number in zip(keys, numbers, strict=True):
        if number < 0:
            raise ValueError(f"{store.uri}: {unknown_key(index, key)}")
    return numbers


def _in_order(
    index: SourceIndex, spots: Spots, own: Sequence[int], places: Mapping[Spot, int]
) -> list[int]:
    """Return the samples of a source at some spots that are not redacted yet, in order.

    Args:
        own: samples of this source in order; they come first.
        places: rank of each spot over all sources; orders the samples that are not in `own`.
    """
    new = {*samples_at(index, spots)} - {*index.redacted}
    first = [number for number in dict.fromkeys(own) if number in new]
    rest = new - {*first}
    return first + sorted(rest, key=lambda number: places[spot_of(index, number)])


def _refuse_unfinished(store: Store, root: Root) -> None:
    """Raise if a source is being made from another: its manifest would name shards about to go."""
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
    """Return other samples that have a document or file of the same length and CRC."""
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
    """Write the redacted shards; return key of the old shard -> the new shard."""
    known = {shard.key: shard for index in todo.indices.values() for shard in index.shards}
    infos: dict[str, ShardInfo] = {}
    for key in sorted(todo.shards):
        progress(key)
        before, data = known[key], bytearray(store.get(key))
        found = hashlib.sha256(data).hexdigest()
        expect(f"{store.uri}/{key}", "SHA-256", found, before.sha256)
        for offset, body in todo.shards[key]:
            if not 0 <= offset <= len(data) - len(body):
                expect(f"{store.uri}/{key}", "size", len(data), f"{offset + len(body)} or more")
            data[offset : offset + len(body)] = body
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 == before.sha256:
            continue  # an earlier redaction erased it
        info = ShardInfo(_new_key(key, sha256), len(data), sha256, before.samples)
        if not _has(store, info):  # absent unless another source already names it
            store.put(info.key, bytes(data))
            there = hashlib.sha256(store.get(info.key)).hexdigest()
            expect(f"{store.uri}/{info.key}", "SHA-256", there, sha256)
            done.shards.append(info.key)
        infos[key] = info
    return infos


def _has(store: Store, shard: ShardInfo) -> bool:
    """Return True if a store has exactly the bytes of a shard."""
    try:
        return hashlib.sha256(store.get(shard.key)).hexdigest() == shard.sha256
    except MissingKey:
        return False


def _new_key(key: str, sha256: str) -> str:
    """Return the key of the replacement of a shard; the same bytes get the same key."""
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
    note_erased(store, name, index, todo.samples[name])
    store.put(manifest_key(name), text.encode())
    done.samples[name] = done.samples.get(name, 0) + len(todo.samples[name])
    before = done.contents.get(name, (index.content_hash, ""))[0]
    done.contents[name] = (before, new.content_hash)


def _remove_replaced(
    store: Store,
    wanted: Mapping[str, Sequence[str]],
    done: Done,
    progress: Callable[[str], None],
) -> None:
    """Remove all versions of replaced shards that nobody needs, and leftovers of killed writers.

    Covers shards in the folder of the source that lists them as replaced and, for requested
    sources, shards in folders without a source. The folders are claimed during the removal, and
    unfinished sources are looked for, because another process may write there or come to name these
    shards.
    """
    before = Root(store)
    folders = {folder_of(key) for key in _removable(before, wanted)}
    with ExitStack() as held:
        busy = _hold(store, folders & before.manifests.keys(), held)
        root, there = Root(store), {*store.list()}
        removable = _removable(root, wanted)
        mine = {key: one for key, one in removable.items() if folder_of(key) in folders}
        try:
            _refuse_unfinished(store, root)
        except ValueError as error:
            busy = dict.fromkeys(folders, str(error)) | busy
        named = {one["key"]: name for name, m in root.manifests.items() for one in m["shards"]}
        holds = {key: hold.name for hold in read_holds(store) for key in hold.shards}
        for key in sorted(mine):
            reason = busy.get(folder_of(key))
            if reason is not None and key not in there:
                continue
            if reason := reason or _needed(root, key, *mine[key], there, named, holds):
                done.kept.append((key, reason))
                continue
            progress(f"remove {key}")
            try:
                if store.delete_versions(key):
                    done.removed.append(key)
            except StoreError as error:
                done.kept.append((key, str(error)))
        others = {one["key"]: name for name, m in root.manifests.items() for one in _replaced(m)}
        for key in sorted((others.keys() & there) - removable.keys() - named.keys()):
            reason = f"{others[key]} says that it was replaced, and it is not in its folder"
            done.kept.append((key, f"{reason}: remove it if no one needs it"))
        for folder in sorted(folders - busy.keys()):
            if isinstance(store, S3Store):
                store.remove_uploads(f"{folder}/", lambda key, name=folder: not is_own(name, key))
            elif isinstance(store, FolderStore):
                store.remove_unfinished(folder)


def _removable(
    root: Root, wanted: Mapping[str, Sequence[str]]
) -> dict[str, tuple[str, dict[str, Any]]]:
    """Return replaced shard that may be removed -> the source that lists it, and its entry."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, manifest in root.manifests.items():
        for one in _replaced(manifest):
            key, owner = one["key"], root.owner(place_of(one["key"]))
            if folder_of(key) == name or (owner is None and name in wanted):
                found[key] = name, one
    return found


def _hold(store: Store, folders: Set[str], held: ExitStack) -> dict[str, str]:
    """Claim source folders until `held` closes; return folder -> reason for claims that fail."""
    busy: dict[str, str] = {}
    claims: dict[str, Claim] = {}
    for name in sorted(folders):
        try:
            claims[name] = held.enter_context(Claim(store, name, wait=False))
        except NameTaken as error:
            busy[name] = str(error)
    for name, claim in claims.items():
        try:
            claim.settle()
        except NameTaken as error:
            busy[name] = str(error)
    return busy


def _needed(
    root: Root,
    key: str,
    name: str,
    replaced: Mapping[str, Any],
    there: Set[str],
    named: Mapping[str, str],
    holds: Mapping[str, str],
) -> str | None:
    """Return why a replaced shard may not be removed, or None if it may.

    Args:
        name, replaced: the source that lists the shard as replaced, and its entry.
        there: keys of all objects.
        named: key of a shard -> a source whose manifest names it.
        holds: key of a shard -> its hold.
    """
    if key in holds:  # the hold came after the replacement, when removal had failed
        return f"under hold {holds[key]!r}"
    if key in named:
        return f"{named[key]} names it still: kimi-pretrain data verify {root.store.uri}"
    now = [s for s in root.manifests[name]["shards"] if place_of(s["key"]) == place_of(key)]
    if any(shard["key"] not in there for shard in now):
        return f"{now[0]['key']}, which is to be in its place, is not there: restore it"
    info = ShardInfo(key, replaced["size"], replaced["sha256"], 0)
    if key in there and not _has(root.store, info):
        return f"it has other bytes than {name} says: somebody wrote it again"
    return None
