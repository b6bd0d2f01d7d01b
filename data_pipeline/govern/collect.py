"""Garbage collection: lists unneeded objects under a root and removes them after a grace period.

1. `propose` lists provably unneeded objects. It reads the manifests, holds and journals under the
   root, the catalogue and the run folders (`needed`), and changes nothing.
2. `Plan.save` writes the list to a file (`collect_plan`).
3. `apply` computes the list again after the grace period, while it holds the claims of all sources
   concerned. It removes an object only if the object is still unneeded and unchanged.

A source's manifest is removed first; the source then no longer exists, and the plan lists its
remaining objects. If a collection is interrupted, every source under the root is still complete or
gone; running the same command again finishes it.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime

from data_pipeline.govern.collect_plan import (
    KINDS,
    NO_CLOCK,
    BootClock,
    Plan,
    Records,
    Retired,
    Thing,
)
from data_pipeline.govern.needed import (
    LOCK,
    THREADS,
    Root,
    contents_of,
    facts_of,
    sources_that_may_go,
    spots_of,
    things_that_may_go,
)
from data_pipeline.index.erased import note_all_erased
from data_pipeline.index.manifest import IndexMismatch, folders_with, manifest_key
from data_pipeline.index.own_keys import is_own
from data_pipeline.ingest.claim import Claim, NameTaken
from data_pipeline.store.objects import Unfinished, in_threads
from data_pipeline.store.open import MissingKey, Store, StoreError


@dataclass
class Collected:
    """Result of applying a plan.

    Attributes:
        removed: things, with the objects that were removed.
        kept: (key, reason) of objects that the store refused to delete.
        refused: (kind, folder, reason) of things that are needed now or have changed.
    """

    removed: list[Thing] = field(default_factory=list)
    kept: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str, str]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Total bytes of the removed objects."""
        return sum(thing.size for thing in self.removed)


# A claim expires if its process stalls for a minute or more; check all claims this often.
_CHECK_S = 5.0


def propose(
    store: Store, records: Records, facts: Store | None = None
) -> tuple[tuple[Thing, ...], tuple[tuple[str, str], ...]]:
    """Return removable things of a root, and (folder, reason) of archived sources that must stay.

    Args:
        store: rooted at the folder of the sources.
        facts: the folder of facts, if facts are collected too.

    Raises:
        ValueError, IndexMismatch, StoreError: a manifest or a holds file cannot be read, so the
            objects it needs are unknown.
    """
    root = Root(store)
    going, kept = sources_that_may_go(root, records)
    things = [
        *things_that_may_go(root, going),
        *(facts_of(facts, records) if facts is not None else ()),
    ]
    return tuple(sorted(things, key=_order)), tuple(sorted(kept.items()))


def apply(
    store: Store,
    plan: Plan,
    records: Records,
    now: datetime,
    progress: Callable[[str], None] = lambda _: None,
    facts: Store | None = None,
    clock: BootClock = NO_CLOCK,
) -> Collected:
    """Remove the things of a plan that are still unneeded.

    Args:
        store: rooted at the folder that the plan was made for.
        now: current time, UTC.
        progress: called with a description of each removal before it starts.
        facts: as in `propose`.
        clock: boot clock of this machine.

    Raises:
        ValueError: the plan belongs to another root, or its grace period is not over; nothing was
            changed.
        NameTaken: another process is writing to a source concerned.
        IndexMismatch, StoreError: as in `propose`.
    """
    if store.uri != plan.root:
        raise ValueError(f"the plan is of {plan.root}, not of {store.uri}")
    if (told := plan.too_early(now, clock)) is not None:
        raise ValueError(told)
    done = Collected()
    with _claimed(store, plan) as (claims, busy):
        root = Root(store, frozenset(claims))
        taken = records.taken(plan.id)
        planned = {thing.name for thing in plan.things if thing.kind == "source"}
        going, kept = sources_that_may_go(root, records, taken, planned)
        found = [
            *things_that_may_go(root, going),
            *(facts_of(facts, records) if facts is not None else ()),
        ]
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
        # Sources that were marked as removed before a kill but are needed again, or that the store
        # refuses to delete.
        for name in sorted({name for kind, name, _ in done.refused if kind == "source"}):
            _give_back(root, records, name)
    return done


def _order(thing: Thing) -> tuple[int, str]:
    return KINDS.index(thing.kind), thing.name


@contextmanager
def _claimed(store: Store, plan: Plan) -> Iterator[tuple[dict[str, Claim], dict[str, str]]]:
    """Claim the folders of all finished sources and of everything in the plan.

    The claims keep other processes from redacting, holding, syncing into or appending to these
    sources. Yields the claims, and (folder -> reason) of unfinished sources that another process is
    writing.

    Raises:
        NameTaken: another process writes to a finished source.
    """
    finished = {*folders_with(store.list(), "manifest.json")}
    names = sorted(finished | {one.name for one in plan.things if one.kind != "facts"})
    busy: dict[str, str] = {}
    with ExitStack() as held:
        with ThreadPoolExecutor(THREADS, thread_name_prefix="collect claim") as pool:
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
    """Return the part of a thing that may still be removed, or None and the reason."""
    if now is None:
        return None, kept.get(thing.name, "it is gone, or needed by now")
    if thing.content != now.content:
        return None, "it holds other content by now"
    then = {*thing.spots}
    # Checking a lock rewrites it, and the manifest's content was compared above.
    apart = (f"{thing.name}/{LOCK}", manifest_key(thing.name))
    new = [spot for spot in now.spots if spot not in then and spot.key not in apart]
    if new and (thing.kind in ("unfinished", "source") or len(new) == len(now.spots)):
        return None, "something of it was written since the plan was made"
    same = tuple(spot for spot in now.spots if spot not in new and spot.key != apart[0])
    return replace(thing, spots=same), ""


def _left_of(
    root: Root, plan: Plan, taken: Mapping[str, str], going: Mapping[str, Retired]
) -> dict[tuple[str, str], Thing]:
    """Return the remains of sources that this plan was removing when it was interrupted."""
    needed = root.named_by(root.manifests.keys() - going.keys()) | root.held.keys()
    found: dict[tuple[str, str], Thing] = {}
    for thing in plan.things:
        lost = thing.kind == "source" and thing.name not in root.manifests
        if lost and taken.get(thing.name) == thing.content:
            mine = [s.key for s in thing.spots if is_own(thing.name, s.key)]
            spots = spots_of(root.store, [key for key in mine if key not in needed])
            same = tuple(spot for spot in thing.spots if spots.get(spot.key) == spot)
            found[thing.kind, thing.name] = replace(thing, spots=same)
    return found


def _refuse_newcomers(root: Root) -> None:
    """Raise if a new source is being made: its manifest may name objects about to be removed."""
    # All finished sources are claimed, so new ones can only appear in the few other folders.
    others = [name for name in root.store.list_folders() if name not in root.claimed]
    left = [key for name in others for key in root.store.list(f"{name}/.ingest/")]
    new = {name for name in others if _is_there(root.store, manifest_key(name))}
    for name in sorted(root.referring(left) | new):
        raise ValueError(
            f"{root.store.uri}/{name}: is being made just now and may name what was to be removed; "
            "the same command goes on later"
        )


def _is_there(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except MissingKey:
        return False
    return True


@dataclass(frozen=True)
class _Removal:
    root: Root
    plan: Plan
    records: Records
    claims: Mapping[str, Claim]
    done: Collected
    progress: Callable[[str], None]
    # time of the last check of the claims
    checked: list[float] = field(default_factory=lambda: [-math.inf])

    def check(self) -> None:
        """Check that all claims still hold and that no new source may refer to these objects."""
        if time.monotonic() - self.checked[0] > _CHECK_S:
            in_threads(lambda claim: claim.check(), list(self.claims.values()), THREADS)
            self.checked[0] = time.monotonic()
        _refuse_newcomers(self.root)

    def finish(self, thing: Thing, kept: Sequence[tuple[str, str]]) -> None:
        """Record which objects of a thing were removed."""
        out = {key for key, _ in kept}
        went = replace(thing, spots=tuple(spot for spot in thing.spots if spot.key not in out))
        self.records.note(self.plan.id, went, kept)
        self.done.removed.append(went)
        self.done.kept += kept


def _remove(removal: _Removal, store: Store | None, thing: Thing) -> None:
    """Remove the objects of a thing that is not a source."""
    assert store is not None
    removal.check()
    removal.progress(f"{thing.name}: {thing.kind}, {len(thing.spots):,} objects")
    kept: list[tuple[str, str]] = []
    if thing.kind == "versions":
        kept = store.drop_bygone([Unfinished(spot.key, spot.etag) for spot in thing.spots])
    elif thing.kind != "upload":
        # Remove the journal last, because it identifies an unfinished source.
        kept = store.discard(sorted((s.key for s in thing.spots), key=lambda key: "/." in key))
    for spot in thing.spots if thing.kind == "upload" else ():
        try:
            store.drop_unfinished(Unfinished(spot.key, spot.etag))
        except StoreError as error:
            kept.append((spot.key, str(error)))
    removal.finish(thing, kept)


def _remove_sources(removal: _Removal, sources: Sequence[Thing]) -> None:
    """Remove sources, manifest first; sources that refer to other sources' shards go first."""
    root = removal.root
    standing = {*root.manifests}
    gone: list[Thing] = []
    waiting = list(sources)
    folders = {
        name: {key.partition("/")[0] for key in root.named_by([name])} - {name}
        for name in root.manifests
    }
    while waiting:
        needed = set[str]().union(*(folders[name] for name in standing))
        blocked = needed & standing  # a source without a manifest cannot be restored as it was
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
    """Mark a source as removed in the catalogue and delete its manifest; return True if it is gone.

    A process that makes a source from this one first claims its own name and then reads this
    manifest. This function first deletes the manifest and then looks for claimed names. So at least
    one of the two processes notices the other.
    """
    root, done, key = removal.root, removal.done, manifest_key(thing.name)
    removal.check()
    if thing.name not in root.manifests:  # an earlier run of this plan removed it
        return True
    # Earlier removals may have taken hours, and a run that starts takes no claim.
    removal.records.look_again()
    user = removal.records.user(thing.name, contents_of(root.manifests[thing.name]))
    try:
        if user is not None:
            raise ValueError(user)
        note_all_erased(root.store, thing.name)  # so that erased samples cannot be ingested again
        removal.records.take(removal.plan.id, thing)
    except (ValueError, IndexMismatch, MissingKey) as error:
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
        _give_back(root, removal.records, thing.name)
        raise
    return True


def _give_back(root: Root, records: Records, name: str) -> None:
    """Mark a source as present in the catalogue if its manifest is in its folder."""
    if (manifest := root.manifests.get(name)) is not None:
        records.give_back(name, manifest["content_hash"], manifest["index_sha256"])
