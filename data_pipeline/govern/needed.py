"""Finds which objects under a root are needed, and which are provably unneeded.

An object is needed by its key, in whatever folder it is: an extended or reindexed version names
shards in the folders of other sources. Only files in source folders whose names follow this
project's scheme (`index.own_keys`) are ever proposed. A source is removed with the objects in its
own folder; shards that it names in a folder without a source are kept and reported. If a manifest
or a holds file cannot be read, nothing is proposed, because the objects it needs are unknown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from data_pipeline.govern.collect_plan import Records, Retired, Spot, Thing
from data_pipeline.govern.holds import Hold, read_holds
from data_pipeline.index.manifest import folders_with, read_manifest_file
from data_pipeline.index.own_keys import folder_of, is_own, is_shard
from data_pipeline.store.json_objects import read_json
from data_pipeline.store.objects import in_threads
from data_pipeline.store.open import MissingKey, Store

LOCK = ".ingest/lock"
THREADS = 16
# Temporary files of folder stores, which stand in for incomplete uploads of the final key.
_TEMPORARY = re.compile(r"(?:\.(?:ingest|sync)/)?\.part-[0-9a-f]+")
_FACTS = re.compile(r"([0-9a-f]{64})/[^/]+/facts\.parquet")


class Root:
    """Objects under a root, and those that are needed.

    Attributes:
        keys: of all objects.
        manifests: source -> its manifest.
        files: source -> bytes of its manifest.
        holds: all holds under the root.
    """

    def __init__(self, store: Store, claimed: frozenset[str] = frozenset()) -> None:
        self.store, self.claimed = store, claimed
        self.keys = store.list()
        self.manifests: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        for name in folders_with(self.keys, "manifest.json"):
            self.manifests[name], self.files[name] = read_manifest_file(store, name)
        self.holds: list[Hold] = read_holds(store, folders_with(self.keys, "holds.json"))
        self.held = {key: hold for hold in self.holds for key in hold.shards}
        self.leftovers = store.unfinished()
        # Skip old versions of locks: each check of a lock writes a newer version.
        self.bygone = [
            one
            for one in store.bygone()
            if is_own(folder_of(one.key), one.key) and not one.key.endswith(LOCK)
        ]
        self._inside: dict[str, list[str]] = {}
        for key in self.keys:
            if is_own(folder_of(key), key):
                self._inside.setdefault(folder_of(key), []).append(key)

    def inside(self, name: str) -> list[str]:
        """Return the keys in a source's folder that follow this project's naming scheme, sorted."""
        return self._inside.get(name, [])

    def named_by(self, sources: Iterable[str]) -> set[str]:
        """Return the keys of the shards that the manifests of the given sources name."""
        return {shard["key"] for name in sources for shard in self.manifests[name]["shards"]}

    def begun(self) -> list[str]:
        """Return the folders without a manifest that an unfinished ingest or sync writes to."""
        parts = (key.split("/") for key in self.keys)
        made = {one[0] for one in parts if len(one) > 2 and one[1] in (".ingest", ".sync")}
        return sorted(made - {*self.manifests})

    def referring(self, keys: Sequence[str]) -> set[str]:
        """Return the unfinished sources that may come to name shards of other sources.

        An appending ingest, a reindex or a sync may; a plain ingest does not.

        Args:
            keys: of all objects.
        """
        left: dict[str, set[str]] = {}
        for key in keys:
            name, inside, rest = key.partition("/.ingest/")
            if inside and "/" not in name and name not in self.manifests:
                left.setdefault(name, set()).add(rest)
        mine = {name for name in self.claimed & left.keys() if left[name] == {"lock"}}
        return {name for name in left.keys() - mine if self._refers(name)}

    def _refers(self, name: str) -> bool:
        try:
            request = read_json(self.store, f"{name}/.ingest/request.json")
        except (MissingKey, ValueError):
            return True
        return not isinstance(request, dict) or "append to" in request


def contents_of(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return a manifest's content_hash and, if it was redacted since, its original content_hash."""
    found = {manifest["content_hash"]}
    if redacted := manifest.get("redacted"):
        found.add(redacted["made_as"])
    return frozenset(str(one) for one in found if one)


def sources_that_may_go(
    root: Root,
    records: Records,
    taken: Mapping[str, str] | None = None,
    only: set[str] | None = None,
) -> tuple[dict[str, Retired], dict[str, str]]:
    """Return the sources that may be removed, and folder -> reason for archived ones that may not.

    Args:
        taken: sources that the catalogue has marked as removed by the plan being applied.
        only: sources that the plan lists; None: all.
    """
    going: dict[str, Retired] = {}
    kept: dict[str, str] = {}
    wanted = dict(records.retired())
    for name, content in (taken or {}).items():
        wanted.setdefault(name, Retired("", content, "was being removed"))
    referring = sorted(root.referring(root.keys))
    for name, retired in wanted.items():
        if name not in root.manifests or (only is not None and name not in only):
            continue
        contents = contents_of(root.manifests[name])
        shards = {*root.named_by([name]), *root.inside(name)}
        held = next((root.held[key] for key in sorted(shards & root.held.keys())), None)
        if root.manifests[name]["content_hash"] != retired.content:
            kept[name] = f"its folder holds other content than {retired.version or 'the plan'}"
        elif held or any(hold.source == name for hold in root.holds):
            kept[name] = f"under hold {held.name!r}" if held else "there are holds on it"
        elif referring:
            kept[name] = f"{referring[0]} is being made and may need its shards: finish that first"
        elif reason := records.user(name, contents):
            kept[name] = reason
        else:
            going[name] = retired
    # Iterate to a fixed point: a source stays while a remaining source names a shard in its folder.
    while True:
        staying = root.manifests.keys() - going.keys()
        needed = {
            shard["key"].partition("/")[0]: name
            for name in sorted(staying)
            for shard in root.manifests[name]["shards"]
        }
        lost = sorted(going.keys() & needed.keys())
        if not lost:
            return going, kept | _of_no_source(root, going)
        for name in lost:
            kept[name] = f"{needed[name]} holds its shards by reference"
            del going[name]


def _of_no_source(root: Root, going: Mapping[str, Retired]) -> dict[str, str]:
    """Return folders without a source whose shards only departing sources name, and the reason.

    The owner of such shards is unknown: a hostile manifest may name other people's files there.
    """
    left = root.named_by(going) - root.named_by(root.manifests.keys() - going.keys())
    folders = {folder_of(key) for key in left & {*root.keys}} - root.manifests.keys()
    return {
        name: "no source has this folder, and only sources that go name its shards: whose they are "
        "cannot be told; remove it if no one needs it"
        for name in folders
    }


def things_that_may_go(root: Root, going: Mapping[str, Retired]) -> tuple[Thing, ...]:
    """Return everything that may be removed if the given sources are removed."""
    staying = root.manifests.keys() - going.keys()
    needed = root.named_by(staying) | root.held.keys()
    found: list[tuple[str, str, str, list[str]]] = []
    for name in root.begun():
        left = [key for key in root.inside(name) if key not in needed]
        found.append(("unfinished", name, "an ingest or sync that did not finish", left))
    for name in sorted(staying):
        inside = [key for key in root.inside(name) if key not in needed]
        notes = [key for key in inside if "/." in key]
        found.append(("journal", name, "notes of an ingest or sync that is over", notes))
        shards = [key for key in inside if is_shard(key)]
        found.append(("shard", name, "no manifest names them", shards))
    for name in sorted(going):
        mine = [key for key in root.inside(name) if key not in needed]
        found.append(("source", name, going[name].why, mine))
    spots = spots_of(root.store, [key for *_, keys in found for key in keys])
    things = [
        Thing(
            *(kind, name, why),
            going[name].version if kind == "source" else "",
            going[name].content if kind == "source" else "",
            tuple(spots[key] for key in keys if key in spots),
        )
        for kind, name, why, keys in found
    ]
    things += [*_uploads(root), *_bygone(root)]
    return tuple(one for one in things if one.spots)


def facts_of(facts: Store, records: Records) -> Iterator[Thing]:
    """Yield the facts of contents that nobody counts any more; facts can be computed again."""
    contents: dict[str, list[str]] = {}
    for key in facts.list():
        if match := _FACTS.fullmatch(key):
            contents.setdefault(match[1], []).append(key)
    for content, keys in sorted(contents.items()):
        if not records.has_facts(content):
            why = "facts of a content that no version has, or an archived one"
            spots = spots_of(facts, keys).values()
            yield Thing("facts", content, why, "", "", tuple(spots))


def _uploads(root: Root) -> Iterator[Thing]:
    """Yield incomplete uploads that killed writers left in folders of sources."""
    folders: dict[str, list[Spot]] = {}
    ours = {*root.manifests, *root.begun()}
    for one in root.leftovers:
        name, _, inside = one.key.partition("/")
        if name in ours and (is_own(name, one.key) or _TEMPORARY.fullmatch(inside)):
            folders.setdefault(name, []).append(Spot(one.key, 0, one.mark))
    for name, spots in folders.items():
        yield Thing("upload", name, "an upload that was never completed", "", "", tuple(spots))


def _bygone(root: Root) -> Iterator[Thing]:
    """Yield old versions of objects that no longer exist and that no manifest names.

    Covers only folders of sources, including those whose manifest exists only as an old version.
    Old versions in other folders may be the owner's only backup.
    """
    # an old version may be the only way to restore a needed shard
    needed = root.named_by(root.manifests) | root.held.keys()
    ours = {*root.manifests, *root.begun()}
    ours |= {folder_of(one.key) for one in root.bygone if one.key.endswith("/manifest.json")}
    folders: dict[str, list[Spot]] = {}
    for one in root.bygone:
        if one.key not in needed and folder_of(one.key) in ours:
            spot = Spot(one.key, one.size, one.mark)
            folders.setdefault(folder_of(one.key), []).append(spot)
    for name, spots in folders.items():
        yield Thing("versions", name, "of objects that were deleted", "", "", tuple(spots))


def spots_of(store: Store, keys: Sequence[str]) -> dict[str, Spot]:
    """Return the size and ETag of objects; skips those that no longer exist."""

    def look(key: str) -> Spot | None:
        with suppress(MissingKey):
            return Spot(key, *vars(store.head(key)).values())
        return None

    return {spot.key: spot for spot in in_threads(look, keys, THREADS) if spot is not None}
