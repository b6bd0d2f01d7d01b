"""Garbage collection removes all unneeded objects and no needed one, whatever happens meanwhile."""

import itertools
import json
import threading
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.govern.collect import apply, propose
from data_pipeline.govern.collect_plan import Plan, Retired
from data_pipeline.govern.holds import holds_key
from data_pipeline.index.columns import SCHEMA
from data_pipeline.index.manifest import IndexMismatch, manifest_key
from data_pipeline.ingest.claim import Claim, NameTaken
from data_pipeline.store.objects import Unfinished
from data_pipeline.store.open import FolderStore, MemoryStore

NAMES = ("a", "b", "c", "d")
SHA256 = "0123456789ab" + "0" * 52
NOW = datetime(2026, 1, 1, tzinfo=UTC)
LATER = NOW + timedelta(days=7)
FRESH = (f"{number}" for number in count())


class Killed(BaseException):
    """A killed process; no code may catch it."""


class Kill:
    """Kills a process before its change number `after`; None disables it."""

    def __init__(self, after=None):
        self.after, self.lock = after, threading.Lock()

    def tick(self):
        with self.lock:
            if self.after is not None:
                self.after -= 1
                if self.after < 0:
                    raise Killed


class Dying(MemoryStore):
    """A store whose user may be killed before any change to an object other than a lock."""

    def __init__(self, name, kill=None, refuses=frozenset(), between=None):
        super().__init__(name)
        self.kill, self.refuses, self.between = kill or Kill(), refuses, between

    def discard(self, keys):
        kept = []
        for key in keys:
            self.kill.tick()
            if key in self.refuses:
                kept.append((key, "AccessDenied"))
            else:
                self.delete_versions(key)
            if self.between is not None:
                self.between(key)
        return kept

    def put_new(self, key, data):
        if not key.endswith("/lock"):
            self.kill.tick()
        return super().put_new(key, data)


class World:
    """A root with its catalogue and run folders; acts as the `Records`."""

    def __init__(self):
        self.name = f"collect-{next(FRESH)}"
        self.store, self.kill = MemoryStore(self.name), Kill()
        self.old: set[str] = set()  # folders archived long ago
        self.runs: set[str] = set()  # folders that a run uses
        self.gone: dict[tuple[str, str], str] = {}
        self.notes = []

    def source(self, name, own, shared=(), redacted=None):
        """Write a finished source; its shards are objects of a few bytes."""
        keys = [*shared, *(f"{name}/{number:06d}.tar" for number in range(own))]
        for key in keys[len(shared) :]:
            self.store.put(key, f"bytes of {key}".encode())
        self.manifest(name, keys, redacted)
        for file in ("index.parquet", "provenance.json", "rejected.jsonl"):
            self.store.put(f"{name}/{file}", file.encode())

    def manifest(self, name, keys, redacted=None):
        shards = [{"key": key, "size": 1, "sha256": SHA256, "samples": 1} for key in keys]
        found = {"schema": SCHEMA, "name": name, "shards": shards, "index_sha256": SHA256}
        found |= {"category": "text", "tokenizer": {"name": "t", "sha256": SHA256}}
        found |= {"samples": len(keys), "items": 0, "content_hash": f"content of {name} {keys}"}
        if redacted:
            found["redacted"] = redacted
        self.store.put(manifest_key(name), json.dumps(found).encode())

    def shards(self, name):
        return [one["key"] for one in self.read(name)["shards"]]

    def read(self, name):
        return json.loads(self.store.get(manifest_key(name)))

    def names(self):
        return sorted(k.split("/")[0] for k in self.store.list() if k.endswith("/manifest.json"))

    def hold(self, name, keys):
        told = {"holds": [{"hold": "case", "since": "then", "shards": list(keys)}]}
        self.store.put(holds_key(name), json.dumps(told).encode())

    def objects(self):
        return {key: self.store.get(key) for key in MemoryStore(self.name).list()}

    # Records

    def look_again(self):
        self.seen = set(self.runs)

    def retired(self):
        return {
            name: Retired(f"{name}@1", self.read(name)["content_hash"], "archived")
            for name in self.names()
            if name in self.old
        }

    def user(self, name, contents):
        return "a run uses it" if name in self.seen else None

    def has_facts(self, content):
        return content.startswith("0")

    def taken(self, plan):
        return {name: content for (which, name), content in self.gone.items() if which == plan}

    def take(self, plan, thing):
        self.kill.tick()
        if self.taken(plan).get(thing.name) == thing.content:
            return
        if thing.name not in self.old:
            raise ValueError("is active by now")
        self.old.discard(thing.name)
        self.gone[plan, thing.name] = thing.content

    def give_back(self, name, content, index_sha256):
        gone = {key for key, one in self.gone.items() if (key[1], one) == (name, content)}
        self.old |= {name} if gone else set()
        self.gone = {key: one for key, one in self.gone.items() if key not in gone}

    def note(self, plan, thing, kept):
        self.kill.tick()
        self.notes.append((thing.kind, thing.name, len(thing.spots), list(kept)))

    def plan(self, store=None):
        self.look_again()
        things, kept = propose(store or self.store, self)
        uri = self.store.uri
        return Plan(uri, "", NOW.isoformat(), 7, "", {}, things, kept)

    def apply(self, plan, store=None):
        self.look_again()
        return apply(store or self.store, plan, self, LATER)


def needed_by_force(world: World) -> set[str]:
    """Return the keys that must stay, by trying every set of removable sources."""
    names = world.names()
    named = {name: set(world.shards(name)) for name in names}
    holds = {}
    for key in world.store.list():
        if key.endswith("/holds.json"):
            for one in json.loads(world.store.get(key))["holds"]:
                holds.setdefault(key.split("/")[0], set()).update(one["shards"])
    held = set().union(*holds.values())
    appending = False
    for key in world.store.list():
        name, inside, rest = key.partition("/.ingest/")
        if inside and name not in names:
            request = f"{name}/.ingest/request.json"
            plain = request in world.store.list() and b"append" not in world.store.get(request)
            appending |= not plain
    may = [
        name
        for name in names
        if (name in world.old or world.read(name)["content_hash"] in world.gone.values())
        and name not in world.runs
        and name not in holds
        and not appending
        and not held & (named[name] | {k for k in world.store.list() if k.startswith(f"{name}/")})
    ]
    best: set[str] = set()
    for size in range(len(may) + 1):
        for some in itertools.combinations(may, size):
            others = set(names) - set(some)
            folders = {key.split("/")[0] for name in others for key in named[name]}
            if not folders & set(some):
                best |= set(some)
    staying = set(names) - best
    needed = set().union(held, *(named[name] for name in staying))
    for name in staying:
        for file in ("manifest.json", "index.parquet", "provenance.json", "rejected.jsonl"):
            needed.add(f"{name}/{file}")
    known = (".tar", ".npz", ".json", ".parquet", ".jsonl", "/lock")
    strange = {
        key
        for key in world.store.list()
        if not key.endswith(known)
        and "/.sync/" not in key
        or key.endswith("/holds.json")
        or key.split("/")[0] in ("tokenizer", "elsewhere")
    }
    return (needed | strange) & set(world.store.list())


def lost(world: World) -> list[str]:
    """Return the sources that are present although the catalogue has released them."""
    there = {(name, world.read(name)["content_hash"]) for name in world.names()}
    return sorted(key[1] for key, content in world.gone.items() if (key[1], content) in there)


def whole(world: World) -> bool:
    """Return whether each present source has all its files."""
    there = set(world.store.list())
    return all({*world.shards(name), f"{name}/index.parquet"} <= there for name in world.names())


@st.composite
def worlds(draw):
    world = World()
    for at, name in enumerate(NAMES[: draw(st.integers(1, 4))]):
        before = draw(st.sampled_from([None, *NAMES[:at]]))
        shared = [] if before is None else world.shards(before)
        own = draw(st.integers(0 if shared else 1, 2))
        world.source(name, own, shared)
        if draw(st.integers(0, 3)):
            world.old.add(name)
        if draw(st.integers(0, 4)) == 0:
            world.runs.add(name)
    names = world.names()
    if draw(st.booleans()):  # a redaction: a shard is renamed in all manifests
        key = draw(st.sampled_from(world.shards(draw(st.sampled_from(names)))))
        new = key.replace(".tar", ".redacted-0123456789ab.tar")
        world.store.put(new, b"redacted")
        for name in names:
            if key in (keys := world.shards(name)):
                keys = [new if one == key else one for one in keys]
                replaced = [{"key": key, "size": 1, "sha256": SHA256, "by": new}]
                made = {"made_as": world.read(name)["content_hash"], "samples": []}
                world.manifest(name, keys, made | {"replaced": replaced})
    if draw(st.integers(0, 2)) == 0:
        name = draw(st.sampled_from(names))
        known = [*world.shards(name), f"{name}/000009.tar"]
        world.hold(name, draw(st.lists(st.sampled_from(known), max_size=1)))
    for name in draw(st.lists(st.sampled_from(names), max_size=2, unique=True)):
        world.store.put(f"{name}/000009.tar", b"an orphan")
        world.store.put(f"{name}/.sync/{'0' * 32}", b"{}")
        world.store.put(f"{name}/notes.txt", b"of a person")
    lies = draw(st.sampled_from([None, "plain", "append", "lock"]))
    if lies is not None:
        world.store.put("u/000000.tar", b"unfinished")
        world.store.put("u/readme", b"of a person")
        lock = json.dumps({"id": "dead", "host": "h", "pid": 1, "machine": None}).encode()
        world.store.put("u/.ingest/lock", lock)
        if lies != "lock":
            request = {"append to": "x"} if lies == "append" else {"input": 1}
            world.store.put("u/.ingest/request.json", json.dumps(request).encode())
        if draw(st.booleans()):  # a sync of a source grown from it, without the source itself
            world.source("z", 1, ["u/000000.tar"])
    world.store.put("tokenizer/t.tiktoken", b"ranks")
    world.store.put("elsewhere/000000.tar", b"in the folder of no source")
    return world


def change(world: World, what: str, name: str) -> None:
    """Apply a change that users or runs make while a plan waits."""
    if what == "sync" and f"{name}/000000.tar" in world.store.list():
        world.source("new", 0, [f"{name}/000000.tar"])  # also if no manifest names it any more
    if name not in world.names():
        return
    if what == "run":
        world.runs.add(name)
    elif what == "hold":
        world.hold(name, world.shards(name)[:1])
    elif what == "promote":
        world.old.discard(name)
        world.gone = {key: one for key, one in world.gone.items() if key[1] != name}
    elif what == "archive":
        world.old.add(name)
    elif what == "grow":
        world.source("new", 1, world.shards(name))
    elif what == "rewrite":
        key = world.shards(name)[0]
        world.store.put(key, b"written again")
    elif what == "append" and "u/000000.tar" in world.store.list():
        world.store.put("u/.ingest/request.json", b'{"append to": "x"}')
    elif what == "adopt" and f"{name}/000009.tar" in world.store.list():
        world.source("new", 0, [f"{name}/000009.tar"])


CHANGES = ("run", "hold", "promote", "archive", "grow", "rewrite", "append", "adopt", "sync")
WHAT = st.tuples(st.sampled_from(CHANGES), st.sampled_from(NAMES))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Let a lock be taken over immediately when its holder shows no activity."""
    monkeypatch.setattr("data_pipeline.ingest.claim.SILENT_S", 0.0)
    monkeypatch.setattr("data_pipeline.ingest.claim._SETTLE_S", 0.0)


def check_world(world, changes, later, kills) -> None:
    """Plan, apply the changes, collect with kills, collect to the end; compare with the oracle."""
    planned_needed, before = needed_by_force(world), world.objects()
    plan = world.plan()
    assert world.objects() == before
    spots = {spot.key: spot for thing in plan.things for spot in thing.spots}
    assert not spots.keys() & planned_needed
    for what, name in changes:
        change(world, what, name)
    needed, then = needed_by_force(world), world.objects()
    for number, after in enumerate(kills):
        world.kill.after = after
        with suppress(Killed):
            world.apply(plan, Dying(world.name, world.kill))
        world.kill.after = None
        now = world.objects()
        assert {key: now.get(key) for key in needed} == {key: then[key] for key in needed}
        assert whole(world)
        for what, name in later if number == 0 else ():
            change(world, what, name)
        needed, then = needed_by_force(world), world.objects()
    done = world.apply(plan)
    now = world.objects()
    assert {key: now.get(key) for key in needed} == {key: then[key] for key in needed}
    assert whole(world)
    assert lost(world) == []
    assert not done.kept
    if not changes and not later:
        assert {*before} - {*now} == spots.keys()
    # Unneeded objects were removed, unless they or an object removed with them changed.
    assert {*before} - {*now} <= spots.keys()
    again = world.apply(plan)
    assert world.objects() == now
    assert not again.size


@settings(max_examples=250, deadline=None, derandomize=True, suppress_health_check=[*HealthCheck])
@given(
    world=worlds(),
    changes=st.lists(WHAT, max_size=2),
    later=st.lists(WHAT, max_size=1),
    kills=st.lists(st.integers(0, 14), max_size=2),
)
def test_no_graph_loses_what_somebody_needs(world, changes, later, kills):
    check_world(world, changes, later, kills)


@pytest.mark.slow
@settings(max_examples=3000, deadline=None, suppress_health_check=[*HealthCheck])
@given(
    world=worlds(),
    changes=st.lists(WHAT, max_size=3),
    later=st.lists(WHAT, max_size=2),
    kills=st.lists(st.integers(0, 20), max_size=3),
)
def test_no_graph_loses_what_somebody_needs_long(world, changes, later, kills):
    check_world(world, changes, later, kills)


def family() -> World:
    """Build a source and two generations grown from it; the first two sources are archived."""
    world = World()
    world.source("a", 2)
    world.source("b", 1, world.shards("a"))
    world.source("c", 1, world.shards("b"))
    world.old |= {"a", "b"}
    return world


def test_what_a_later_version_names_stays_and_goes_with_it():
    world = family()
    plan = world.plan()
    assert plan.things == ()
    assert dict(plan.kept) == {name: "c holds its shards by reference" for name in "ab"}
    world.old.add("c")
    plan = world.plan()
    assert [(one.name, len(one.spots)) for one in plan.things] == [("a", 6), ("b", 5), ("c", 5)]
    for after in range(40):  # a kill before every change
        world = family()
        world.old.add("c")
        plan, world.kill.after = world.plan(), after
        try:
            world.apply(plan, Dying(world.name, world.kill))
        except Killed:
            assert whole(world)
            world.kill.after = None
            world.apply(plan)
            assert world.store.list() == []
        else:
            break
    assert after > 20
    assert [note[1] for note in world.notes] == ["c", "b", "a"]


def test_a_child_that_is_in_use_by_the_moment_of_removal_keeps_its_parents(monkeypatch):
    world = family()
    world.old.add("c")
    plan, before = world.plan(), world.objects()
    take = world.take

    def refusing(plan_id, thing):
        if thing.name == "c":
            raise ValueError("is active by now")
        take(plan_id, thing)

    monkeypatch.setattr(world, "take", refusing)
    done = world.apply(plan)
    assert world.objects() == before
    assert [one[1:] for one in done.refused] == [
        ("c", "is active by now"),
        ("a", "a source that was not removed holds its shards by reference"),
        ("b", "a source that was not removed holds its shards by reference"),
    ]


def test_shards_in_a_folder_without_a_manifest_stay_for_whoever_stays(monkeypatch):
    world = World()
    world.store.put("far/000000.tar", b"of a version that was never copied here")
    world.source("a", 0, ["far/000000.tar"])
    world.source("b", 0, ["far/000000.tar"])
    world.old |= {"a", "b"}
    plan, take = world.plan(), world.take

    def refusing(plan_id, thing):
        if thing.name == "b":
            raise ValueError("is active by now")
        take(plan_id, thing)

    monkeypatch.setattr(world, "take", refusing)
    world.apply(plan)
    assert world.names() == ["b"]
    assert whole(world)
    assert "a/index.parquet" not in world.store.list()
    monkeypatch.undo()
    plan = world.plan()
    assert "no source has this folder" in dict(plan.kept)["far"]
    world.apply(plan)
    assert world.store.list() == ["far/000000.tar"]  # its owner is unknown


def test_shards_under_a_hold_stay_when_no_manifest_names_them():
    world = World()
    world.source("a", 1)
    world.store.put("a/000000.redacted-0123456789ab.tar", b"of a redaction that was cut off")
    world.store.put("a/000009.tar", b"an orphan")
    world.hold("a", ["a/000009.tar"])
    [thing] = world.plan().things
    assert [spot.key for spot in thing.spots] == ["a/000000.redacted-0123456789ab.tar"]


def test_older_versions_of_what_is_no_source_s_stay():
    """A bucket keeps versions that people delete in their own folders, so that they can undo it."""
    bygone = [
        Unfinished(key, "v1", 5)
        for key in ("a/.ingest/000000.npz", "gone/000000.tar", "gone/manifest.json",
                    "raw/000000.tar", "raw/rejected.jsonl", "raw/x.tar")
    ]  # fmt: skip

    class Versioned(MemoryStore):
        def bygone(self, prefix=""):
            return bygone

    world = World()
    world.source("a", 1)
    things = world.plan(Versioned(world.name)).things
    assert [(one.kind, one.name, len(one.spots)) for one in things] == [
        ("versions", "a", 1), ("versions", "gone", 2),
    ]  # fmt: skip


def test_uploads_of_other_programs_stay():
    """Uploads under keys that no store of ours can have stay, and do not stop the collection."""
    left = [
        Unfinished(key, "u1")
        for key in ("a//x", "a/.ingest/000000.npz", "a/000007.tar", "a/raw/.part-0123", "a/x.bin")
    ]

    class Uploading(MemoryStore):
        def unfinished(self, prefix=""):
            return left

    world = World()
    world.source("a", 1)
    [thing] = world.plan(Uploading(world.name)).things
    assert [spot.key for spot in thing.spots] == ["a/.ingest/000000.npz", "a/000007.tar"]


def test_an_unfinished_source_that_was_written_again_stays_whole():
    """Its unchanged files stay, too: an ingest is resuming it."""
    for late in ("u/000001.tar", "u/000000.tar"):
        world = World()
        world.source("a", 1)
        for number in range(2):
            world.store.put(f"u/{number:06d}.tar", b"unfinished")
        world.store.delete(late) if late.endswith("1.tar") else None
        world.store.put("u/.ingest/request.json", b'{"input": 1}')
        plan = world.plan()
        world.store.put(late, b"by somebody who went on with it")
        before = world.objects()
        done = world.apply(plan)
        assert [one[:2] for one in done.refused] == [("unfinished", "u")]
        assert world.objects() == before


def test_what_lies_deeper_is_another_root_s():
    world = World()
    world.source("a", 1)
    for key in ("deep/b/.ingest/request.json", "deep/000000.tar", "deep/b/000000.tar"):
        world.store.put(key, b"{}")
    assert world.plan().things == ()


def test_an_orphan_that_was_written_again_stays():
    world = World()
    world.source("a", 1)
    world.store.put("a/000009.tar", b"an orphan")
    plan = world.plan()
    world.store.put("a/000009.tar", b"of a redaction that went on")
    done = world.apply(plan)
    assert not done.removed
    assert [one[:2] for one in done.refused] == [("shard", "a")]
    assert "a/000009.tar" in world.store.list()


def test_a_run_that_begins_while_other_things_are_removed_keeps_its_source():
    world = World()
    for name in "ab":
        world.source(name, 2)
        world.old.add(name)
    world.store.put("a/000009.tar", b"an orphan")
    plan, store = world.plan(), Dying(world.name, world.kill)
    store.between = lambda key: world.runs.add("b")
    done = world.apply(plan, store)
    assert ("source", "b", "a run uses it") in done.refused
    assert {thing.name for thing in done.removed} == {"a"}
    assert world.names() == ["b"]
    assert whole(world)


def test_what_is_left_of_a_source_and_came_into_use_stays():
    world = World()
    world.source("a", 2)
    world.old.add("a")
    plan, world.kill.after = world.plan(), 2
    with pytest.raises(Killed):
        world.apply(plan, Dying(world.name, world.kill))
    assert "a/manifest.json" not in world.store.list()
    world.kill.after = None
    change(world, "sync", "a")
    world.apply(plan)
    assert whole(world)
    assert [key for key in world.store.list() if key.startswith("a/")] == ["a/000000.tar"]


def test_another_source_in_the_folder_by_now_stays():
    world = World()
    world.source("a", 2)
    world.old.add("a")
    plan = world.plan()
    world.manifest("a", world.shards("a")[:1])  # also archived long ago by the catalogue
    before = world.objects()
    done = world.apply(plan)
    assert [one[1:] for one in done.refused] == [("a", "it holds other content by now")]
    assert world.objects() == before


@pytest.mark.parametrize("request_", [{"append to": "content"}, None])
def test_a_source_that_begins_to_grow_during_the_removal_keeps_what_it_names(request_):
    world = World()
    world.source("a", 1)
    world.old.add("a")
    plan = world.plan()

    def grow(key):
        if key == "a/manifest.json":  # the append holds its name and has not yet read the manifest
            world.store.put("new/.ingest/lock", b'{"id": "another"}')
            if request_ is not None:
                text = json.dumps(request_).encode()
                world.store.put("new/.ingest/request.json", text)

    before = world.objects()
    with pytest.raises(ValueError, match="/new: is being made just now"):
        world.apply(plan, Dying(world.name, between=grow))
    assert lost(world) == []
    now = world.objects()
    assert {key: now[key] for key in before} == before
    for key in ("new/.ingest/lock", "new/.ingest/request.json"):
        world.store.delete(key)
    assert not world.apply(plan).refused
    assert world.store.list() == []


def test_a_source_that_was_finished_during_the_removal_keeps_what_it_names():
    world = World()
    world.source("a", 1)
    world.old.add("a")
    plan, before = world.plan(), world.objects()

    def finish(key):
        if key == "a/manifest.json":
            world.source("new", 1, ["a/000000.tar"])

    with pytest.raises(ValueError, match="/new: is being made just now"):
        world.apply(plan, Dying(world.name, between=finish))
    assert before.items() <= world.objects().items()
    world.apply(plan)
    assert before.items() <= world.objects().items()  # in use by then


def test_a_plain_ingest_beside_it_is_no_hindrance():
    world = World()
    world.source("a", 1)
    world.old.add("a")
    plan = world.plan()
    world.store.put("new/.ingest/request.json", b'{"input": 1}')
    with Claim(world.store, "new"):
        world.apply(plan)
    assert [key for key in world.store.list() if key.startswith("a/")] == []


def test_whoever_writes_a_source_ends_it_before_anything_is_removed(monkeypatch):
    world = family()
    world.store.put("a/000009.tar", b"an orphan")
    world.store.put("u/.ingest/request.json", b'{"input": 1}')
    plan, before = world.plan(), world.objects()
    with Claim(world.store, "c"), pytest.raises(NameTaken):
        world.apply(plan)
    assert world.objects() == before
    with Claim(world.store, "u"):  # a killed ingest resumes
        done = world.apply(plan)
    assert [one[:2] for one in done.refused] == [("unfinished", "u")]
    assert {*before} - {*world.objects()} == {"a/000009.tar"}


def test_a_manifest_or_hold_that_cannot_be_read_ends_it_all():
    for key, text, told in (
        ("x/manifest.json", b"{", "not JSON"),
        ("x/manifest.json", b'{"schema": 0}', "schema is 0"),
        (
            "x/manifest.json",
            json.dumps({"schema": SCHEMA}).encode(),
            "does not have its form: name is",
        ),
        ("a/holds.json", b"[]", "as long as nobody knows what is held"),
        ("a/holds.json", b'{"holds": {}}', "as long as nobody knows what is held"),
        ("a/holds.json", b'{"holds": ""}', "as long as nobody knows what is held"),
    ):
        world = World()
        world.source("a", 1)
        world.old.add("a")
        plan = world.plan()
        world.store.put(key, text)
        before = world.objects()
        with pytest.raises((ValueError, IndexMismatch), match=told):
            world.plan()
        with pytest.raises((ValueError, IndexMismatch), match=told):
            world.apply(plan)
        assert world.objects() == before


def test_the_plan_file(tmp_path):
    world = World()
    world.source("a", 1)
    world.old.add("a")
    plan, file = world.plan(), tmp_path / "plan.json"
    plan.save(file)
    assert Plan.read(file) == plan
    with pytest.raises(ValueError, match="a plan is never overwritten"):
        plan.save(file)
    with pytest.raises(ValueError, match="its grace of 7 days ends at 2026-01-08"):
        apply(world.store, plan, world, LATER - timedelta(seconds=1))
    with pytest.raises(ValueError, match="the plan is of memory://"):
        apply(MemoryStore("other"), plan, world, LATER)
    text = file.read_text()
    for changed in (text.replace("a/index.parquet", "b/index.parquet"), "{}", "[]", "x"):
        assert changed != text
        file.write_text(changed)
        with pytest.raises(ValueError, match="kimi-pretrain data collect ROOT --plan FILE"):
            Plan.read(file)
    with pytest.raises(ValueError, match="no such file"):
        Plan.read(tmp_path / "none")


def test_what_the_store_does_not_let_go_is_told_and_tried_again():
    world = World()
    world.source("a", 2)
    world.old.add("a")
    plan = world.plan()
    done = world.apply(plan, Dying(world.name, refuses={"a/manifest.json"}))
    assert done.kept == [("a/manifest.json", "AccessDenied")]
    assert whole(world)
    done = world.apply(plan, Dying(world.name, refuses={"a/000001.tar"}))
    assert done.kept == [("a/000001.tar", "AccessDenied")]
    assert world.store.list() == ["a/000001.tar"]
    assert world.notes[-1] == ("source", "a", 5, done.kept)
    assert not world.apply(plan).kept
    assert world.store.list() == []


def test_temporary_files_of_a_folder_and_facts(tmp_path):
    world = World()
    world.store = FolderStore(tmp_path / "root")
    world.source("a", 1)
    for name in ("a", "a/.ingest", "loose"):
        folder = tmp_path / "root" / name
        folder.mkdir(exist_ok=True)
        (folder / ".part-00").write_bytes(b"half")
    facts = FolderStore(tmp_path / "facts")
    for content in ("0" * 64, "1" * 64):
        facts.put(f"{content}/1-2-3/facts.parquet", b"facts")
    facts.put("notes/x", b"of a person")
    things, _ = propose(world.store, world, facts)
    assert [(one.kind, one.name, len(one.spots)) for one in things] == [
        ("upload", "a", 2),
        ("facts", "1" * 64, 1),
    ]
    plan = replace(world.plan(), things=things)
    (tmp_path / "root/a/.part-00").unlink()
    (tmp_path / "root/a/.part-00").write_bytes(b"another writer's, since")
    done = apply(world.store, plan, world, LATER, facts=facts)
    assert [len(one.spots) for one in done.removed] == [1, 1]
    assert (tmp_path / "root/a/.part-00").exists()
    assert facts.list() == [f"{'0' * 64}/1-2-3/facts.parquet", "notes/x"]
    plan = replace(plan, things=world.plan().things)
    apply(world.store, plan, world, LATER)
    left = [one.relative_to(tmp_path / "root").as_posix() for one in tmp_path.rglob(".part-*")]
    assert left == ["loose/.part-00"]
