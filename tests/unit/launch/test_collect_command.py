"""Tests of the command `kimi-pretrain data collect` with a catalogue and run folders."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from shutil import copytree

import pytest

pytest.importorskip("sqlalchemy", reason="the extra platform is not installed")
from sqlalchemy import select

from data_pipeline.access import run_sources
from data_pipeline.catalog.audit import check, entries
from data_pipeline.catalog.collect import Ledger
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.register import look, register
from data_pipeline.catalog.show import details
from data_pipeline.catalog.states import promote
from data_pipeline.catalog.tables import REPLICA
from data_pipeline.govern import collect_plan
from data_pipeline.govern.collect import apply, propose
from data_pipeline.govern.collect_plan import Plan
from data_pipeline.index.manifest import RUN_SOURCES, read_index, read_manifest, sources_at
from data_pipeline.index.reads import check_shards
from data_pipeline.ingest.reindex import reindex
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from kimi_pretrain.config import load_config
from launch.cli import data_collect
from tests.dist.jobs import SMALL
from tests.unit.launch.data_command import run

DAYS = ("--grace-days", 7, "--keep-archived-days", 30)


@pytest.fixture
def root(data_root, tmp_path, monkeypatch):
    """Return a corpus in which `words_2` was reindexed from `words`; both are registered."""
    copytree(data_root, tmp_path / "corpus")
    store = FolderStore(tmp_path / "corpus")
    reindex(store, "words", "words_2", Tokenizer(train_ranks(["a tide table " * 9], 262), "k"))
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", str(tmp_path / "catalog.sqlite"))
    catalog = Catalog()
    for name in ("words", "words_2"):
        register(catalog, look(store, None, name))
    catalog.close()
    return store


@pytest.fixture
def clock(monkeypatch):
    """Return a list that holds the elapsed days, for the boot clock and the wall clock."""
    days = [0.0]
    monkeypatch.setattr(collect_plan, "boot_clock", lambda: ("this", 1e3 + days[0] * 86400))
    monkeypatch.setattr(data_collect, "_now", lambda: datetime.now(UTC) + timedelta(days=days[0]))
    return days


def archive(*names):
    catalog = Catalog()
    for name in names:
        promote(catalog, name, "archived")
    catalog.close()


def state(name):
    catalog = Catalog()
    with catalog.read() as connection:
        check(connection)
        found = details(connection, name)
    catalog.close()
    return found["state"], [one["name"] for one in found["replicas"]]


def last(found):
    return json.loads(found.stdout.splitlines()[-1])


def test_a_clock_that_is_set_ahead_ends_no_grace(root, clock, tmp_path, monkeypatch):
    archive("words@2")
    clock[0], plan = 31, tmp_path / "plan.json"
    found = run("collect", root.uri, "--plan", plan, *DAYS, "--json")
    assert last(found)["objects"]
    before = set(root.list())
    monkeypatch.setattr(collect_plan, "boot_clock", lambda: ("this", 1e3 + 33 * 86400))
    clock[0] = 400
    refused = run("collect", root.uri, "--apply", plan, code=2)
    assert "lasts another 5.00 days: it was set ahead" in refused.stderr
    assert set(root.list()) == before
    # After a reboot or on another machine, only the wall clock can be compared.
    monkeypatch.setattr(collect_plan, "boot_clock", lambda: ("later", 10.0))
    run("collect", root.uri, "--apply", plan)
    assert set(root.list()) < before


def test_a_version_goes_after_its_time_and_its_grace(root, clock, tmp_path):
    before = set(root.list())
    archive("words@1")
    clock[0] = 31
    found = run("collect", root.uri, "--plan", tmp_path / "none.json", *DAYS, "--json")
    assert last(found)["stays"] == {"words": "words_2 holds its shards by reference"}
    archive("words@2")
    clock[0] = 29
    found = run("collect", root.uri, "--plan", tmp_path / "plan.json", *DAYS, "--json")
    assert (last(found)["objects"], last(found)["stays"]) == (0, {})
    clock[0] = 63
    plan = tmp_path / "both.json"
    found = run("collect", root.uri, "--plan", plan, *DAYS, "--json")
    assert last(found)["stays"] == {}
    assert "nothing was changed" in found.stdout
    assert set(root.list()) == before
    run("collect", root.uri, "--apply", plan, code=2)
    run("collect", root.uri, "--plan", plan, code=2)
    run("collect", root.uri, code=2)
    run("catalog", "promote", "words@1", "deleted", code=2)
    assert set(root.list()) == before
    clock[0] = 71
    found = run("collect", root.uri, "--apply", plan, "--json")
    told = last(found)
    gone = before - set(root.list())
    assert told["objects"] == len(gone) > 4
    assert (told["refused"], told["kept_by_store"]) == ([], [])
    assert {key.split("/")[0] for key in gone} == {"words", "words_2"}
    assert not [key for key in root.list() if key.startswith(("words/", "words_2/"))]
    assert state("words@1") == state("words@2") == ("deleted", [])
    catalog = Catalog()
    with catalog.read() as connection:
        noted = [one.what for one in entries(connection) if "collected" in one.what]
    catalog.close()
    assert {key for one in noted for key in one.get("objects", [])} == gone
    assert last(run("collect", root.uri, "--apply", plan, "--json"))["objects"] == 0
    assert state("words@1") == ("deleted", [])


@pytest.mark.parametrize("noted", [True, False])
def test_what_was_erased_stays_away_when_its_source_is_collected(root, clock, tmp_path, noted):
    """A sync from a replica that still has the erased sample does not bring it back."""
    replica = FolderStore(tmp_path / "replica")
    copytree(root.root, replica.root)
    told = run("redact", root.uri, "--source", "words", "--key", "w0003", "--yes").stdout
    names = [line.split()[3] for line in told.splitlines() if line.startswith("catalogue: ")]
    assert len(names) == 2
    files = [f"{name}/erased.json" for name in ("words", "words_2")]
    for file in files if not noted else ():
        root.delete(file)  # a redacted source that came by a sync has no such file
    archive(*names)
    clock[0] = 31
    run("collect", root.uri, "--plan", tmp_path / "plan.json", *DAYS)
    clock[0] = 39
    index = root.root / "words" / "index.parquet"
    index.rename(tmp_path / "index.parquet")  # without the index, the erased samples are unknown
    found = last(run("collect", root.uri, "--apply", tmp_path / "plan.json", "--json"))
    [(kind, name, why)] = found["refused"]
    assert (kind, name) == ("source", "words")
    assert "words/index.parquet: no such object" in why
    assert "words/manifest.json" in root.list()
    (tmp_path / "index.parquet").rename(index)
    run("collect", root.uri, "--apply", tmp_path / "plan.json")
    left = [key for key in root.list() if key.startswith(("words/", "words_2/"))]
    assert [key for key in left if not key.endswith("/lock")] == files
    before = {key: root.get(key) for key in root.list()}
    for wanted in ("words", "words_2"):
        found = run("sync", replica.uri, root.uri, "--source", wanted, code=2)
        assert f"{root.uri}/{wanted}: 1 of its samples were erased there, and" in found.stderr
        assert "still has them: w0003; nothing was changed" in found.stderr
    assert {key: root.get(key) for key in root.list()} == before
    run("redact", replica.uri, "--source", "words", "--key", "w0003", "--yes")
    run("sync", replica.uri, root.uri)
    assert {"words", "words_2"} <= {*sources_at(root)}


def test_what_a_sync_brings_back_lies_there_again(root, clock, tmp_path, monkeypatch):
    replica = tmp_path / "replica"
    copytree(root.root, replica)
    archive("words@1", "words@2")
    clock[0] = 31
    run("collect", root.uri, "--plan", tmp_path / "plan.json", *DAYS)
    clock[0] = 39
    run("collect", root.uri, "--apply", tmp_path / "plan.json")
    assert state("words@1") == state("words@2") == ("deleted", [])
    run("sync", replica, root.uri, "--source", "pictures")  # never collected
    told = run("sync", replica, root.uri, "--source", "words").stdout
    assert f"catalogue: words@1 lies in {root.uri}/words again" in told
    assert state("words@1") == ("deleted", ["words"])
    assert state("words@2") == ("deleted", [])
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", str(tmp_path / "none.sqlite"))
    run("sync", replica, root.uri, "--source", "words_2")
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", str(tmp_path / "catalog.sqlite"))
    told = run("sync", replica, root.uri).stdout  # recorded although nothing is copied
    assert told.count("catalogue: ") == 1
    assert state("words@2") == ("deleted", ["words_2"])
    assert "catalogue: " not in run("sync", replica, root.uri).stdout


def test_what_runs_need_stays_until_they_are_forgotten(root, clock, tmp_path):
    archive("words@2")
    data = load_config("tiny_cpu", [*SMALL, f"data.root={root.uri}"]).data
    runs = tmp_path / "runs"
    folder = runs / "mine"
    folder.mkdir(parents=True)
    used = run_sources(data, [read_index(root, "words_2")], [])
    (folder / RUN_SOURCES).write_text(json.dumps(used))
    (folder / "status.json").write_text('{"state": "running"}')
    clock[0] = 31
    plans = (tmp_path / f"{number}.json" for number in range(9))

    def stays(*options):
        found = run("collect", root.uri, "--plan", next(plans), *DAYS, *options, "--json")
        return last(found)["stays"].get("words_2")

    assert stays() is None
    assert stays("--runs", runs) == f"run {folder} uses it"
    waiting = next(plans)
    run("collect", root.uri, "--plan", waiting, *DAYS)
    run("catalog", "scan", runs)
    assert "(running) uses it" in stays()
    clock[0] = 39  # a run began to use it between plan and removal
    before = set(root.list())
    found = run("collect", root.uri, "--apply", waiting, "--json")
    assert [one[1] for one in last(found)["refused"]] == ["words_2"]
    assert set(root.list()) == before
    (folder / "status.json").write_text('{"state": "finished"}')
    (folder / "checkpoints" / "step_00000007").mkdir(parents=True)
    (folder / "checkpoints" / "step_00000007" / "manifest.json").write_text("{}")
    run("catalog", "scan", runs)
    assert "has checkpoints at" in stays()
    assert stays("--runs", runs) == f"run {folder} uses it"
    folder.rename(tmp_path / "away")
    assert "cannot be seen from here" in stays()
    run("catalog", "forget", folder)
    assert stays() is None
    assert read_manifest(root, "words_2")["name"] == "words_2"
    found = run("collect", root.uri, "--plan", next(plans), "--runs", tmp_path / "none", code=2)
    assert "no run here" in found.stderr
    (runs / "old" / "other").mkdir(parents=True)
    (runs / "old" / "sources.json").write_text("[]")
    (runs / "old" / "other" / "status.json").write_text("{}")
    found = run("collect", root.uri, "--plan", tmp_path / "other.json", "--runs", runs, code=2)
    assert f"{runs / 'old' / 'other'}: a run that has left no sources.json" in found.stderr


def test_deprecated_versions_are_archived_by_a_plan(root, clock, tmp_path):
    from tests.unit.data_pipeline.test_catalog import report

    catalog = Catalog()
    for name in ("words@1", "words@2"):
        with catalog.read() as connection:
            content = details(connection, name)["content_hash"]
        promote(catalog, name, "verified", report=report(content))
        run("catalog", "set", name, "--licence", "MIT", "--owner", "me")
        promote(catalog, name, "active")
    catalog.close()
    clock[0] = 91
    plan = tmp_path / "plan.json"
    found = run("collect", root.uri, "--plan", plan, *DAYS, "--archive-deprecated-days", 90)
    assert "to archive words@1" in found.stdout
    assert state("words@1")[0] == "deprecated"
    clock[0] = 99
    assert last(run("collect", root.uri, "--apply", plan, "--json"))["not_archived"] == []
    assert (state("words@1")[0], state("words@2")[0]) == ("archived", "active")


def test_a_catalogue_that_was_set_back_ends_it(root, clock, tmp_path):
    copy = (tmp_path / "catalog.sqlite").read_bytes()
    archive("words@2")
    clock[0] = 31
    run("collect", root.uri, "--plan", tmp_path / "plan.json", *DAYS)
    clock[0] = 39
    (tmp_path / "catalog.sqlite").write_bytes(copy)
    found = run("collect", root.uri, "--apply", tmp_path / "plan.json", code=2)
    assert "its end was cut off" in found.stderr


class Killed(BaseException):
    """Simulates a kill of the process."""


def test_killed_between_any_two_operations_it_is_finished_by_the_same_plan(root, tmp_path):
    """The test kills it before and after each catalogue transaction and each removal."""
    archive("words@1", "words@2")
    now = datetime.now(UTC) + timedelta(days=31)
    left = [0]

    def tick():
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    class Dying(FolderStore):
        def discard(self, keys):
            for key in keys:
                tick()
                self.delete(key)
            return []

    class DyingLedger(Ledger):
        def take(self, plan, thing):
            tick()
            super().take(plan, thing)
            tick()

        def note(self, plan, thing, kept):
            tick()
            super().note(plan, thing, kept)
            tick()

    def ledger(kind, catalog, place):
        return kind(catalog, place, "", 30, now, lambda _: None)

    catalog = Catalog()
    things, kept = propose(root, ledger(Ledger, catalog, root.uri))
    assert not kept
    plan = Plan(root.uri, "", now.isoformat(), 0, "", {}, things, kept)
    whole = {spot.key for thing in things for spot in thing.spots}
    others = {*root.list()} - whole
    file = tmp_path / "catalog.sqlite"
    for name in ("words", "words_2"):
        copytree(root.root / name, tmp_path / "kept" / name)
    held = file.read_bytes()
    kills = 0
    for after in range(0, 99, 2):
        left[0] = after
        try:
            apply(Dying(root.root), plan, ledger(DyingLedger, catalog, root.uri), now)
        except Killed:
            kills += 1
        else:
            break
        for name in sources_at(root):
            check_shards(root, read_index(root, name))
        done = apply(root, plan, ledger(Ledger, catalog, root.uri), now)
        assert (done.kept, done.refused) == ([], [])
        assert {*root.list()} == others
        assert state("words@1") == state("words@2") == ("deleted", [])
        catalog.close()
        copytree(tmp_path / "kept", root.root, dirs_exist_ok=True)
        file.write_bytes(held)
        catalog = Catalog()
        plan = replace(plan, things=propose(root, ledger(Ledger, catalog, root.uri))[0])
    catalog.close()
    assert kills > 7


def test_what_stays_after_it_was_let_go_has_its_place_again(root, tmp_path, monkeypatch):
    """The version keeps its folder if a new source uses it or if the store refuses the removal."""
    now = datetime.now(UTC) + timedelta(days=31)
    catalog = Catalog()
    archive("words@2")

    def ledger():
        return Ledger(catalog, root.uri, "", 30, now, lambda _: None)

    things, _ = propose(root, ledger())
    plan = Plan(root.uri, "", now.isoformat(), 0, "", {}, things, ())
    before, at_first = {key: root.get(key) for key in root.list()}, entry_of("words_2")
    discard = FolderStore.discard

    def grown(store, keys):
        if keys == ["words_2/manifest.json"]:
            store.put("new/.ingest/request.json", b'{"append to": "words_2"}')
        return discard(store, keys)

    def kept(store, keys):
        return [(key, "access denied") for key in keys]

    monkeypatch.setattr(FolderStore, "discard", grown)
    with pytest.raises(ValueError, match="/new: is being made just now"):
        apply(root, plan, ledger(), now)
    assert {key: root.get(key) for key in before} == before
    assert state("words@2") == ("archived", ["words_2"])
    assert entry_of("words_2") == at_first
    root.delete("new/.ingest/request.json")
    monkeypatch.setattr(FolderStore, "discard", kept)
    assert [one[1] for one in apply(root, plan, ledger(), now).refused] == ["words_2"]
    assert state("words@2") == ("archived", ["words_2"])
    monkeypatch.setattr(FolderStore, "discard", discard)
    assert apply(root, plan, ledger(), now).refused == []
    assert state("words@2") == ("deleted", [])
    catalog.close()


def entry_of(folder):
    """Return the row of a folder in the catalogue's table of replicas."""
    catalog = Catalog()
    with catalog.read() as connection:
        row = connection.execute(select(REPLICA).where(REPLICA.c.name == folder)).one()
    catalog.close()
    return row._asdict()


def test_what_was_brought_back_after_a_kill_stays(root, tmp_path):
    """The process dies after the release and before any removal; then a user stages the version."""
    archive("words@2")
    now = datetime.now(UTC) + timedelta(days=31)
    with_catalog = Catalog()

    def ledger():
        return Ledger(with_catalog, root.uri, "", 30, now, lambda _: None)

    things, kept = propose(root, ledger())
    plan = Plan(root.uri, "", now.isoformat(), 0, "", {}, things, kept)
    [thing] = things
    ledger().take(plan.id, thing)
    ledger().take(plan.id, thing)  # again, as after a kill
    assert ledger().taken(plan.id) == {"words_2": thing.content}
    assert state("words@2") == ("archived", [])
    promote(with_catalog, "words@2", "staged")
    assert ledger().taken(plan.id) == {}
    before = set(root.list())
    done = apply(root, plan, ledger(), now)
    assert [one[1] for one in done.refused] == ["words_2"]
    assert set(root.list()) == before
    assert state("words@2") == ("staged", ["words_2"])  # its folder is recorded again
    register(with_catalog, look(root, None, "words_2"))
    with pytest.raises(CatalogError, match="words@2 is staged by now"):
        ledger().take(plan.id, thing)
    with_catalog.close()
