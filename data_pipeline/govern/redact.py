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

A manifest speaks for the shards in its own folder (`index.own_keys`). What it says of shards in
other folders is followed only if its samples are asked for, and only where all sources agree on
what lies there. So sources change before those that were made of them. A redaction that was cut off
leaves a root that can be read, with old shards or new ones; the same command goes on, and so does
the next redaction under the root wherever the folder's own manifest has changed.
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
            Sources that hold shards of others come after those.
        samples: source -> those to be redacted that are not yet, in the order that its manifest
            gets: that in which they were asked for. Runs go by it (`plan.redactions`).
        shards: key -> what is to stand where in it; of shards to be written anew.
        twins: samples that are not to be redacted and may hold the same bytes.
        elsewhere: samples that are not to be redacted, and are redacted in another source that
            names their shards (`of`), in whose folder these do not lie.
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


def plan(store: Store, wanted: Mapping[str, Sequence[str]]) -> Plan:
    """Find what is to be done to redact samples, and what earlier redactions left undone.

    Args:
        store: rooted where the sources lie.
        wanted: source -> keys of samples.

    Raises:
        ValueError: no such source or sample, a shard is under a hold, sources do not agree on what
            lies in a shard, or a source is being written that may take over the shards; names it.
            Nothing is changed.
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
    """Return in which sources under a root samples are, by their shards: redacted ones, too.

    Args:
        wanted: source -> keys of samples; names that are no source here are left out.

    Raises:
        ValueError: a source has no sample of such a key.
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
            refuse_held(store, todo.shards)  # by now; from here on nobody can put a hold on them
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
    """Return the shards in whose places redacted ones are, as the manifests under a root say.

    Each with all bytes that any manifest says it had: none takes the place of another's word.
    """
    gone = {
        ShardInfo(one["key"], one["size"], one["sha256"], 0): None
        for manifest in Root(store).manifests.values()
        for one in _replaced(manifest)
    }
    return [*gone]


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
    return len({one.key for one in gone})


def _replaced(manifest: Mapping[str, Any]) -> list[dict[str, Any]]:
    return manifest.get("redacted", {}).get("replaced", [])


def _orders(root: Root, wanted: Mapping[str, Sequence[str]]) -> dict[str, list[int]]:
    """Return the samples to be redacted by source: those wanted, and those that are already.

    The latter only of shards in a source's own folder: sources that were made of it follow it.
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
    """Return samples that are redacted by a source in others' folders, where these have them."""
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
    """Return the numbers of samples; ValueError: there is none of a key."""
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
        own: samples of this source in their order; they come first.
        places: place of each spot in the order of all sources: for the samples that are not in
            `own`.
    """
    new = {*samples_at(index, spots)} - {*index.redacted}
    first = [number for number in dict.fromkeys(own) if number in new]
    rest = new - {*first}
    return first + sorted(rest, key=lambda number: places[spot_of(index, number)])


def _refuse_unfinished(store: Store, root: Root) -> None:
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
        before, data = known[key], bytearray(store.get(key))
        found = hashlib.sha256(data).hexdigest()
        expect(f"{store.uri}/{key}", "SHA-256", found, before.sha256)
        for offset, body in todo.shards[key]:
            if not 0 <= offset <= len(data) - len(body):
                expect(f"{store.uri}/{key}", "size", len(data), f"{offset + len(body)} or more")
            data[offset : offset + len(body)] = body
        sha256 = hashlib.sha256(data).hexdigest()
        if sha256 == before.sha256:
            continue  # erased already
        info = ShardInfo(_new_key(key, sha256), len(data), sha256, before.samples)
        if not _has(store, info):  # usually because another source names it already
            store.put(info.key, bytes(data))
            there = hashlib.sha256(store.get(info.key)).hexdigest()
            expect(f"{store.uri}/{info.key}", "SHA-256", there, sha256)
            done.shards.append(info.key)
        infos[key] = info
    return infos


def _has(store: Store, shard: ShardInfo) -> bool:
    """Return whether a store holds exactly the bytes of a shard."""
    try:
        return hashlib.sha256(store.get(shard.key)).hexdigest() == shard.sha256
    except MissingKey:
        return False


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
    """Remove replaced shards that nobody needs, in all versions, and what writers left.

    Those in the folder of the source that says so; of sources whose samples were asked for also
    those that lie in no other source's folder. The folders are held meanwhile, and sources in the
    making are looked for: another process may write there, or come to name these shards.
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
    """Return the replaced shards that may be removed -> the source that says so, and its entry."""
    found: dict[str, tuple[str, dict[str, Any]]] = {}
    for name, manifest in root.manifests.items():
        for one in _replaced(manifest):
            key, owner = one["key"], root.owner(place_of(one["key"]))
            if folder_of(key) == name or (owner is None and name in wanted):
                found[key] = name, one
    return found


def _hold(store: Store, folders: Set[str], held: ExitStack) -> dict[str, str]:
    """Hold folders of sources for as long as `held` lasts; returns those of others, and why."""
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
    """Return why a replaced shard may not be removed; None: it may.

    Args:
        name, replaced: the source that says that it was replaced, and what it says.
        there: keys of all objects.
        named: key of a shard -> a source whose manifest names it.
        holds: key of a shard -> the hold that it is under.
    """
    if key in holds:  # put on it after it was replaced and could not be removed
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
