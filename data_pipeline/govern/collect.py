"""Garbage collection: what nobody needs under a root is listed, and removed after a grace.

1. `propose` lists what can be proven unneeded, by the manifests, holds and journals under the root
   and by what the catalogue and the run folders say (`Records`); it changes nothing.
2. `Plan.save` writes it down: each object with its size and ETag, why, and since when.
3. `apply` works it out once more, when the grace is over and nobody else can write to the sources
   concerned. Only what is still unneeded, and still the very same object, is removed.

An object is needed by key, wherever it lies: a version that grew, or was reindexed, names shards in
the folders of others. Only files in the folders of sources that have one of the names which this
project gives (`_OURS`) are ever proposed. A manifest that cannot be read, or a file of holds, ends
it all: nobody knows what they need.

A source goes manifest first: without it there is none, and what is left of it is in the plan. A
collection that was cut off leaves a root in which every source is whole; the same command goes on.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from data_pipeline.govern.holds import Hold, read_holds
from data_pipeline.index.manifest import manifest_key, read_manifest_file
from data_pipeline.ingest.claim import Claim, NameTaken
from data_pipeline.store.objects import Unfinished, check_key, in_threads
from data_pipeline.store.open import MissingKey, Store, StoreError

SCHEMA = 1
KINDS = ("unfinished", "journal", "shard", "upload", "versions", "facts", "source")
"""What may be collected, in the order in which it is."""
_OURS = re.compile(
    r"[0-9]{6}(\.redacted-[0-9a-f]{12})?\.tar|(manifest|provenance)\.json"
    r"|index\.parquet|rejected\.jsonl|\.ingest/(lock|request\.json|[0-9]{6}\.npz)|\.sync/[0-9a-f]{32}"
)
_SHARD = re.compile(r"[0-9]{6}(\.redacted-[0-9a-f]{12})?\.tar")
_FACTS = re.compile(r"([0-9a-f]{64})/[^/]+/facts\.parquet")
_LOCK = ".ingest/lock"
_THREADS = 16


class Spot(NamedTuple):
    """An object: its key, bytes and ETag; of an unfinished upload its mark."""

    key: str
    size: int
    etag: str


@dataclass(frozen=True)
class Thing:
    """Objects that go together.

    Attributes:
        kind: one of `KINDS`: a source that is archived; what an ingest or a sync that did not
            finish has left; its notes beside a finished source; shards that no manifest names;
            uploads that were never completed; versions that a bucket keeps of objects that were
            deleted; facts (`inspect.facts`) of contents that are gone.
        name: folder of the source; of facts their content_hash.
        why: for people.
        version: of a source in the catalogue, else "".
        content: its content_hash, else "".
        spots: the objects, by key; of a source without shards that others need.
    """

    kind: str
    name: str
    why: str
    version: str
    content: str
    spots: tuple[Spot, ...]

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(spot.size for spot in self.spots)


class Retired(NamedTuple):
    """A version that may go by its state: its name, content_hash, and why for people."""

    version: str
    content: str
    why: str


class Records(Protocol):
    """What the catalogue and the run folders say; asked anew by `apply`."""

    def retired(self) -> Mapping[str, Retired]:
        """Folder under the root -> the version that may go by its state and age."""
        ...

    def user(self, name: str, contents: frozenset[str]) -> str | None:
        """Which run needs the source of a folder, or one of these contents; None: no one."""
        ...

    def has_facts(self, content: str) -> bool:
        """Whether somebody may want to count a content: it is a version that is not archived."""
        ...

    def taken(self, plan: str) -> Mapping[str, str]:
        """Folder -> content of the sources that the catalogue has let go for a plan."""
        ...

    def take(self, plan: str, thing: Thing) -> None:
        """Let a source go, for good, unless it is needed again by now.

        Raises:
            ValueError: it is; says why.
        """
        ...

    def note(self, plan: str, thing: Thing, kept: Sequence[tuple[str, str]]) -> None:
        """Note what was removed, and what the store did not let go, (key, reason) each."""
        ...


@dataclass(frozen=True)
class Plan:
    """What may be removed from a root, and when.

    Attributes:
        root, endpoint: of the store, as `Store.uri` and `endpoint_of` tell them.
        seen: UTC, ISO 8601.
        grace_days: so long after `seen` at the earliest.
        audit: head of the catalogue's audit at that time.
        options: of the command, with which `apply` asks again.
        things: in the order of `KINDS` and of names.
        kept: (folder, why) of archived sources that are needed.
        archive: (version, revision, why) of those to be archived by then.
    """

    root: str
    endpoint: str
    seen: str
    grace_days: float
    audit: str
    options: Mapping[str, Any]
    things: tuple[Thing, ...]
    kept: tuple[tuple[str, str], ...]
    archive: tuple[tuple[str, int, str], ...] = ()

    @property
    def id(self) -> str:
        """SHA-256 over all of it."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def due(self) -> datetime:
        """When it may be applied."""
        return datetime.fromisoformat(self.seen) + timedelta(days=self.grace_days)

    def save(self, file: Path) -> None:
        """Write it into a file that does not exist yet.

        Raises:
            ValueError: it does.
        """
        text = json.dumps({"schema": SCHEMA, "id": self.id, **asdict(self)}, indent=1)
        try:
            with file.open("x") as out:
                out.write(f"{text}\n")
        except FileExistsError:
            raise ValueError(
                f"{file}: is there already; a plan is never overwritten, because its grace counts "
                "from when it was written: apply it, or give another name"
            ) from None

    @staticmethod
    def read(file: Path) -> "Plan":
        """Return the plan of a file.

        Raises:
            ValueError: it is none, or was changed since it was written.
        """
        expected = "expected a file that `kimi-pretrain data collect ROOT --plan FILE` wrote"
        try:
            given = json.loads(file.read_text())
            schema, id = given.pop("schema"), given.pop("id")
            things = [
                Thing(**{**one, "spots": tuple(Spot(*spot) for spot in one["spots"])})
                for one in given.pop("things")
            ]
            kept = [(name, why) for name, why in given.pop("kept")]
            archive = [(name, revision, why) for name, revision, why in given.pop("archive")]
            plan = Plan(**given, things=tuple(things), kept=tuple(kept), archive=tuple(archive))
        except FileNotFoundError:
            raise ValueError(f"{file}: no such file; {expected}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise ValueError(f"{file}: {expected}") from None
        if schema != SCHEMA or plan.id != id:
            raise ValueError(
                f"{file}: schema {schema!r}, or something in it, was changed since it was written; "
                f"{expected}"
            )
        return plan


@dataclass
class Collected:
    """What a plan's application did.

    Attributes:
        removed: things, with the objects that went.
        kept: (key, reason) of objects that the store did not let go.
        refused: (kind, folder, reason) of what is needed, or is no longer as it was seen.
    """

    removed: list[Thing] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes that went."""
        return sum(thing.size for thing in self.removed)


def propose(
    store: Store, records: Records, facts: Store | None = None
) -> tuple[tuple[Thing, ...], tuple[tuple[str, str], ...]]:
    """Return what may be removed from a root, and (folder, why) of archived sources that may not.

    Args:
        store: rooted where the sources lie.
        facts: the folder of facts, if they are to go, too.

    Raises:
        ValueError, IndexMismatch, StoreError: a manifest or a file of holds cannot be read, so that
            nobody knows what they need.
    """
    root = _Root(store)
    going, kept = _sources(root, records)
    things = [*_things(root, going), *(_facts(facts, records) if facts is not None else ())]
    return tuple(sorted(things, key=_order)), tuple(sorted(kept.items()))


def apply(
    store: Store,
    plan: Plan,
    records: Records,
    now: datetime,
    progress: Callable[[str], None] = lambda _: None,
    facts: Store | None = None,
) -> Collected:
    """Remove what a plan lists and is still unneeded.

    Args:
        store: rooted where the plan was made.
        now: UTC.
        progress: called with what is removed next.
        facts: as of `propose`.

    Raises:
        ValueError: the plan is another root's, or too young; nothing was changed. NameTaken: a
            source concerned is being written.
        IndexMismatch, StoreError: as `propose`.
    """
    if store.uri != plan.root:
        raise ValueError(f"the plan is of {plan.root}, not of {store.uri}")
    if now < plan.due:
        raise ValueError(
            f"the plan was made at {plan.seen}, and its grace of {plan.grace_days:g} days ends at "
            f"{plan.due.isoformat()}: what came into use by then will not be removed; wait"
        )
    done = Collected()
    with _claimed(store, plan) as (claims, busy):
        root = _Root(store, frozenset(claims))
        taken = records.taken(plan.id)
        planned = {thing.name for thing in plan.things if thing.kind == "source"}
        going, kept = _sources(root, records, taken, planned)
        found = [*_things(root, going), *(_facts(facts, records) if facts is not None else ())]
        fresh = {(one.kind, one.name): one for one in found}
        fresh |= _left_of(root, plan, taken, going)
        removal = _Removal(root, plan, records, claims, done, progress)
        todo: list[Thing] = []
        for thing in plan.things:
            same, reason = _still(thing, fresh.get((thing.kind, thing.name)), kept)
            if same is None or (thing.name in busy and thing.kind != "facts"):
                told = (thing.kind, thing.name, busy.get(thing.name, reason))
                done.refused.append(told)
            else:
                todo.append(same)
        for thing in todo:
            if thing.kind != "source":
                _remove(removal, facts if thing.kind == "facts" else store, thing)
        _remove_sources(removal, [thing for thing in todo if thing.kind == "source"])
    return done


class _Root:
    """What lies under a root, and what of it is needed.

    Attributes:
        keys: of all objects.
        manifests: source -> its manifest.
        files: source -> bytes of its manifest.
        holds: all that there are.
    """

    def __init__(self, store: Store, claimed: frozenset[str] = frozenset()) -> None:
        self.store, self.claimed = store, claimed
        self.keys = store.list()
        self.manifests: dict[str, dict[str, Any]] = {}
        self.files: dict[str, bytes] = {}
        for name in _names(self.keys, "manifest.json"):
            self.manifests[name], self.files[name] = _read(store, name)
        self.holds: list[Hold] = read_holds(store, _names(self.keys, "holds.json"))
        self.held = {key: hold for hold in self.holds for key in hold.shards}
        self.leftovers = store.unfinished()
        # Of locks no old version: whoever looks has written a newer one.
        self.bygone = [
            one
            for one in store.bygone()
            if _OURS.fullmatch(one.key.partition("/")[2]) and not one.key.endswith(_LOCK)
        ]
        self._inside: dict[str, list[str]] = {}
        for key in self.keys:
            name, _, rest = key.partition("/")
            if _OURS.fullmatch(rest):
                self._inside.setdefault(name, []).append(key)

    def inside(self, name: str) -> list[str]:
        """Return the keys in the folder of a source that have a name of ours, sorted."""
        return self._inside.get(name, [])

    def named_by(self, sources: Iterable[str]) -> set[str]:
        """Return the keys of the shards that the manifests of some sources name."""
        return {shard["key"] for name in sources for shard in self.manifests[name]["shards"]}

    def begun(self) -> list[str]:
        """Return the folders without a manifest in which a source is being made, or was."""
        parts = (key.split("/") for key in self.keys)
        made = {one[0] for one in parts if len(one) > 2 and one[1] in (".ingest", ".sync")}
        return sorted(made - {*self.manifests})

    def referring(self, keys: Sequence[str]) -> set[str]:
        """Return the sources being made that may come to name the shards of others.

        A plain ingest does not; one that appends, a reindex and a sync may.

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
            request = json.loads(self.store.get(f"{name}/.ingest/request.json"))
        except (MissingKey, ValueError):
            return True
        return not isinstance(request, dict) or "append to" in request


def _read(store: Store, name: str) -> tuple[dict[str, Any], bytes]:
    """Read a manifest, and see that it tells which shards it needs.

    Raises:
        ValueError, IndexMismatch, StoreError: it does not.
    """
    manifest, data = read_manifest_file(store, name)
    try:
        for shard in manifest["shards"]:
            check_key(shard["key"])
        contents_of(manifest)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{store.uri}/{manifest_key(name)}: does not tell its shards and its content "
            f"({type(error).__name__}: {error}); as long as nobody knows what it needs, nothing is "
            "collected: restore it"
        ) from None
    return manifest, data


def contents_of(manifest: Mapping[str, Any]) -> frozenset[str]:
    """Return the content_hash of a manifest, and that which it was made with if redacted since."""
    found = {manifest["content_hash"]}
    if redacted := manifest.get("redacted"):
        found.add(redacted["made_as"])
    return frozenset(str(one) for one in found if one)


def _names(keys: Iterable[str], file: str) -> list[str]:
    return [
        key.partition("/")[0] for key in keys if key.count("/") == 1 and key.endswith(f"/{file}")
    ]


# What may go -------------------------------------------------------------------------------------


def _sources(
    root: _Root,
    records: Records,
    taken: Mapping[str, str] | None = None,
    only: set[str] | None = None,
) -> tuple[dict[str, Retired], dict[str, str]]:
    """Return the sources that may go, and why those that are archived may not.

    Args:
        taken: those that the catalogue has let go for the plan that is applied.
        only: those that it lists; None: all.
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
    # Until nothing changes: a source stays while one that stays names a shard in its folder.
    while True:
        staying = root.manifests.keys() - going.keys()
        needed = {
            shard["key"].partition("/")[0]: name
            for name in sorted(staying)
            for shard in root.manifests[name]["shards"]
        }
        lost = sorted(going.keys() & needed.keys())
        if not lost:
            return going, kept
        for name in lost:
            kept[name] = f"{needed[name]} holds its shards by reference"
            del going[name]


def _things(root: _Root, going: Mapping[str, Retired]) -> tuple[Thing, ...]:
    """Return all that may go, when these sources do."""
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
        shards = [key for key in inside if _SHARD.fullmatch(key.partition("/")[2])]
        found.append(("shard", name, "no manifest names them", shards))
    spoken_for: set[str] = set()
    for name in sorted(going):
        mine = {*root.inside(name), *root.named_by([name])} & {*root.keys}
        mine -= needed | spoken_for
        spoken_for |= mine
        found.append(("source", name, going[name].why, sorted(mine)))
    spots = _spots(root.store, [key for *_, keys in found for key in keys])
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


def _order(thing: Thing) -> tuple[int, str]:
    return KINDS.index(thing.kind), thing.name


def _facts(facts: Store, records: Records) -> Iterator[Thing]:
    """Yield the facts of contents that nobody counts any more; they can be written again."""
    contents: dict[str, list[str]] = {}
    for key in facts.list():
        if match := _FACTS.fullmatch(key):
            contents.setdefault(match[1], []).append(key)
    for content, keys in sorted(contents.items()):
        if not records.has_facts(content):
            why = "facts of a content that no version has, or an archived one"
            spots = _spots(facts, keys).values()
            yield Thing("facts", content, why, "", "", tuple(spots))


def _uploads(root: _Root) -> Iterator[Thing]:
    """Yield what killed writers left in the folders of sources, made or not."""
    folders: dict[str, list[Spot]] = {}
    ours = {*root.manifests, *root.begun()}
    for one in root.leftovers:
        name = one.key.partition("/")[0]
        if name in ours:
            folders.setdefault(name, []).append(Spot(one.key, 0, one.mark))
    for name, spots in folders.items():
        yield Thing("upload", name, "an upload that was never completed", "", "", tuple(spots))


def _bygone(root: _Root) -> Iterator[Thing]:
    """Yield older versions of objects that are not there any more and that nothing names."""
    needed = root.named_by(root.manifests) | root.held.keys()  # a version may be the rescue of one
    folders: dict[str, list[Spot]] = {}
    for one in root.bygone:
        if one.key not in needed:
            spot = Spot(one.key, one.size, one.mark)
            folders.setdefault(one.key.partition("/")[0], []).append(spot)
    for name, spots in folders.items():
        yield Thing("versions", name, "of objects that were deleted", "", "", tuple(spots))


def _spots(store: Store, keys: Sequence[str]) -> dict[str, Spot]:
    """Return size and ETag of objects; those that are gone are left out."""

    def look(key: str) -> Spot | None:
        with suppress(MissingKey):
            return Spot(key, *vars(store.head(key)).values())
        return None

    return {spot.key: spot for spot in in_threads(look, keys, _THREADS) if spot is not None}


# Removing ----------------------------------------------------------------------------------------


@contextmanager
def _claimed(store: Store, plan: Plan) -> Iterator[tuple[dict[str, Claim], dict[str, str]]]:
    """Hold the folders of all finished sources and of what is to go.

    So nobody redacts, holds, syncs into or goes on with one of them. Yields the claims, and
    (folder -> why) of unfinished ones that somebody goes on with.

    Raises:
        NameTaken: somebody writes to a finished source.
    """
    finished = {*_names(store.list(), "manifest.json")}
    names = sorted(finished | {one.name for one in plan.things if one.kind != "facts"})
    busy: dict[str, str] = {}
    with ExitStack() as held:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="collect claim") as pool:
            claims = {name: Claim(store, name) for name in names}
            futures = {
                name: pool.submit(held.enter_context, claim) for name, claim in claims.items()
            }
        for name, future in futures.items():
            try:
                future.result()
            except NameTaken as error:
                if name in finished:
                    raise
                busy[name] = str(error)
        yield {name: claim for name, claim in claims.items() if name not in busy}, busy


def _still(thing: Thing, now: Thing | None, kept: Mapping[str, str]) -> tuple[Thing | None, str]:
    """Return what of a thing may be removed, or None and why nothing may."""
    if now is None:
        return None, kept.get(thing.name, "it is gone, or needed by now")
    if thing.content != now.content:
        return None, "it holds other content by now"
    then = {*thing.spots}
    # The lock is written by whoever looks; of a manifest the content was compared.
    apart = (f"{thing.name}/{_LOCK}", manifest_key(thing.name))
    new = [spot for spot in now.spots if spot not in then and spot.key not in apart]
    if new and (thing.kind in ("unfinished", "source") or len(new) == len(now.spots)):
        return None, "something of it was written since the plan was made"
    same = tuple(spot for spot in now.spots if spot not in new and spot.key != apart[0])
    return replace(thing, spots=same), ""


def _left_of(
    root: _Root, plan: Plan, taken: Mapping[str, str], going: Mapping[str, Retired]
) -> dict[tuple[str, str], Thing]:
    """Return what is left of sources that this plan was removing when it was cut off."""
    needed = root.named_by(root.manifests.keys() - going.keys()) | root.held.keys()
    found: dict[tuple[str, str], Thing] = {}
    for thing in plan.things:
        lost = thing.kind == "source" and thing.name not in root.manifests
        if lost and taken.get(thing.name) == thing.content:
            spots = _spots(root.store, [s.key for s in thing.spots if s.key not in needed])
            same = tuple(spot for spot in thing.spots if spots.get(spot.key) == spot)
            found[thing.kind, thing.name] = replace(thing, spots=same)
    return found


def _refuse_newcomers(root: _Root) -> None:
    """Refuse while a source is made that was not there: its manifest may name what is removed."""
    now = root.store.list()
    new = {*_names(now, "manifest.json")} - root.manifests.keys()
    for name in sorted((root.referring(now) - root.claimed) | new):
        raise ValueError(
            f"{root.store.uri}/{name}: is being made just now and may name what was to be removed; "
            "the same command goes on later"
        )


@dataclass(frozen=True)
class _Removal:
    root: _Root
    plan: Plan
    records: Records
    claims: Mapping[str, Claim]
    done: Collected
    progress: Callable[[str], None]

    def check(self) -> None:
        """See that all names are still held, and that nobody makes a source out of these."""
        for claim in self.claims.values():
            claim.check()
        _refuse_newcomers(self.root)

    def finish(self, thing: Thing, kept: Sequence[tuple[str, str]]) -> None:
        """Note what of a thing went."""
        out = {key for key, _ in kept}
        went = replace(thing, spots=tuple(spot for spot in thing.spots if spot.key not in out))
        self.records.note(self.plan.id, went, kept)
        self.done.removed.append(went)
        self.done.kept += kept


def _remove(removal: _Removal, store: Store | None, thing: Thing) -> None:
    """Remove the objects of a thing that is no source."""
    assert store is not None
    removal.check()
    removal.progress(f"{thing.name}: {thing.kind}, {len(thing.spots):,} objects")
    kept: list[tuple[str, str]] = []
    if thing.kind == "versions":
        kept = store.drop_bygone([Unfinished(spot.key, spot.etag) for spot in thing.spots])
    elif thing.kind != "upload":
        kept = store.discard([spot.key for spot in thing.spots])
    for spot in thing.spots if thing.kind == "upload" else ():
        try:
            store.drop_unfinished(Unfinished(spot.key, spot.etag))
        except StoreError as error:
            kept.append((spot.key, str(error)))
    removal.finish(thing, kept)


def _remove_sources(removal: _Removal, sources: Sequence[Thing]) -> None:
    """Remove sources: those first that name shards of others, each with its manifest first."""
    root = removal.root
    standing = {*root.manifests}
    gone: list[Thing] = []
    waiting = list(sources)
    while waiting:
        needed = {
            key.partition("/")[0]
            for name in standing
            for key in root.named_by([name])
            if key.partition("/")[0] != name
        }
        blocked = needed & standing  # what has no manifest any more cannot come back as it was
        ready = next((thing for thing in waiting if thing.name not in blocked), None)
        if ready is None:
            reason = "a source that was not removed holds its shards by reference"
            removal.done.refused += [(thing.kind, thing.name, reason) for thing in waiting]
            break
        waiting.remove(ready)
        if _remove_manifest(removal, ready):
            standing.discard(ready.name)
            gone.append(ready)
    needed = root.named_by(standing)
    for thing in gone:
        removal.progress(f"{thing.name}: source, {len(thing.spots):,} objects")
        left = replace(thing, spots=tuple(s for s in thing.spots if s.key not in needed))
        keys = [spot.key for spot in left.spots if spot.key != manifest_key(thing.name)]
        removal.finish(left, root.store.discard(keys))


def _remove_manifest(removal: _Removal, thing: Thing) -> bool:
    """Have the catalogue let a source go, and remove its manifest; returns whether it is gone.

    Whoever makes a source out of this one takes its own name first and reads this manifest then;
    here the manifest goes first, and then names are looked at. So one of the two sees the other.
    """
    root, done, key = removal.root, removal.done, manifest_key(thing.name)
    removal.check()
    if thing.name not in root.manifests:  # it went when the plan was applied before
        return True
    try:
        removal.records.take(removal.plan.id, thing)
    except ValueError as error:
        done.refused.append((thing.kind, thing.name, str(error)))
        return False
    if kept := root.store.discard([key]):
        done.kept += kept
        done.refused.append((thing.kind, thing.name, "the store does not let its manifest go"))
        return False
    try:
        _refuse_newcomers(root)
    except ValueError:
        root.store.put_new(key, root.files[thing.name])
        raise
    return True
