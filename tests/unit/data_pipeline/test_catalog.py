"""The catalogue on SQLite and on a real PostgreSQL: gates, compare-and-set, audit, schema."""

import multiprocessing
import os
import pwd
import shutil
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra platform is not installed")
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from data_pipeline.catalog import migrate
from data_pipeline.catalog.audit import check, entries
from data_pipeline.catalog.collect import Ledger
from data_pipeline.catalog.engine import Catalog, CatalogError, Conflict
from data_pipeline.catalog.file_systems import network_kind
from data_pipeline.catalog.lookup import TRAINABLE, version
from data_pipeline.catalog.names import Wanted, check_licence, of_folder, parse
from data_pipeline.catalog.register import Source, register
from data_pipeline.catalog.runs import Run, forget, scan
from data_pipeline.catalog.show import details, versions
from data_pipeline.catalog.states import FOLLOWING, delete_version, promote, set_fields
from data_pipeline.catalog.tables import AUDIT, METADATA, SCHEMA, STATES
from data_pipeline.govern.collect_plan import Spot, Thing
from tests import postgres
from tests.unit.data_pipeline import catalog_jobs

# The fork server loads the catalogue only: other modules that tests load are not fork-safe.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([catalog_jobs.__name__])


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres.server() as url:
        yield url


@pytest.fixture(scope="module")
def template(tmp_path_factory) -> Path:
    """Return an SQLite file with empty tables."""
    file = tmp_path_factory.mktemp("template") / "catalog.sqlite"
    Catalog(str(file)).migrate()
    return file


@pytest.fixture(params=["sqlite", "postgresql"])
def bare(request, tmp_path) -> str:
    """Return the URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/new/catalog.sqlite"
    found = postgresql(request)
    sql(found, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    return found


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request, tmp_path) -> str:
    """Return the URL of an empty catalogue."""
    if request.param == "sqlite":
        file = shutil.copy(request.getfixturevalue("template"), tmp_path)
        return f"sqlite:///{file}"
    found = postgresql(request)
    tables = ", ".join(METADATA.tables)
    try:
        schema = f"UPDATE alembic_version SET version_num = '{SCHEMA}'"
        sql(found, unguarded(found), f"TRUNCATE {tables}", GUARDED, schema)
    except CatalogError:  # an earlier test left other tables
        sql(found, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
        Catalog(found).migrate()
    return found


def postgresql(request) -> str:
    """Return the URL of the server; skip without a server."""
    if postgres.binaries() is None:
        pytest.skip(postgres.MISSING)
    return request.getfixturevalue("server")


@pytest.fixture
def catalog(url) -> Iterator[Catalog]:
    found = Catalog(url)
    yield found
    found.close()


def sql(url: str, *statements: str) -> None:
    """Run statements that bypass the catalogue's code."""
    found = Catalog(url)
    with found._transaction(writes=True) as connection:
        for statement in statements:
            connection.execute(text(statement))
    found.close()


GUARDED = "ALTER TABLE audit ENABLE TRIGGER USER"


def unguarded(url: str) -> str:
    """Return the statements with which a database owner can disable the audit guard."""
    if url.startswith("postgresql"):
        return "ALTER TABLE audit DISABLE TRIGGER USER"
    return "; ".join(f"DROP TRIGGER audit_{what}" for what in ("update", "delete", "insert"))


def source(name: str, content: str | None = None, root: str = "/corpus", **columns) -> Source:
    values = {
        "content_hash": content or f"content of {name}", "category": "text", "tokenizer_hash": "t",
        "samples": 2**40, "items": 0, "bytes": 1, "provenance": {"kind": "ingest"}, "parent": None,
    }  # fmt: skip
    return Source(root, "", name, f"index of {name}", values | columns)


def report(content: str, **other) -> dict:
    about = {"content_hash": content, "sample_share": 1.0, "tokens_counted": True, "problems": {}}
    return {"problems": 0, "sources": {"it": about | other}}


def bring(catalog: Catalog, name: str, state: str) -> None:
    """Promote a new version to a state by the allowed transitions."""
    way = {"deprecated": ["verified", "active", "deprecated"], "active": ["verified", "active"]}
    way |= {"deleted": ["archived"], "staged": []}
    folder = name.replace("@", "_")
    for to in way.get(state, [state]):
        seen = report(f"content of {folder}") if to == "verified" else None
        promote(catalog, name, to, report=seen)
    if state == "deleted":
        assert collected(catalog, name)


def collected(catalog: Catalog, name: str) -> bool:
    """Record that the bytes of a version are gone; return whether that marks it deleted."""
    with catalog.write() as connection:
        return delete_version(connection, version(connection, name), "a plan")


def state_of(catalog: Catalog) -> list:
    """Return the full content of the catalogue."""
    with catalog.read() as connection:
        tables = METADATA.sorted_tables
        return [[tuple(row) for row in connection.execute(table.select())] for table in tables]


# Names ------------------------------------------------------------------------------------------


def test_names():
    assert parse("captions@3") == Wanted("captions", 3)
    assert str(parse("a-b_c@active")) == "a-b_c@active"
    for bad in ("captions", "captions@", "captions@03", "captions@0", "@3", "a/b@1", "c@latest"):
        with pytest.raises(ValueError):
            parse(bad)
    folders = {
        "captions": ("captions", 1), "captions_3": ("captions", 3), "ocr-v12": ("ocr", 12),
        "pairs_k2": ("pairs_k2", 1), "x_007": ("x_007", 1), "a_2_3": ("a_2", 3), "_3": ("_3", 1),
    }  # fmt: skip
    assert {name: of_folder(name) for name in folders} == folders
    assert check_licence("cc-by-4.0 or mit") == "CC-BY-4.0 OR MIT"
    with pytest.raises(ValueError, match="CC-BY: expected|'CC-BY'"):
        check_licence("CC-BY")


def test_a_network_file_system_is_seen_by_its_mount(tmp_path):
    table = (
        "22 1 8:1 / / rw - ext4 /dev/sda rw\n"
        "23 22 0:40 / /shared rw shared:1 - nfs4 server:/x rw\n"
        "24 23 0:41 / /shared/local rw - xfs /dev/sdb rw\n"
        "25 22 0:42 / /a\\040b rw - fuse.sshfs u@h:/ rw\n"
        "26 22 0:43 / /twice rw - nfs a rw\n27 22 8:2 / /twice rw - ext4 b rw\n"
    )
    kinds = {
        "/home/x": None, "/shared/runs/c.sqlite": "nfs4", "/shared/local/c": None,
        "/a b/c": "fuse.sshfs", "/sharedother": None, "/twice/c": None,
    }  # fmt: skip
    assert {path: network_kind(Path(path), table) for path in kinds} == kinds


def test_sqlite_on_a_network_file_system_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("data_pipeline.catalog.engine.network_kind", lambda path: "lustre")
    with pytest.raises(CatalogError, match="SQLite on lustre.*postgresql://"):
        Catalog(str(tmp_path / "c.sqlite"))
    assert not (tmp_path / "c.sqlite").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("postgresql://me:hunter2@host/db", "password"),
        ("postgresql://host/db?password=hunter2", "password"),
        ("postgresql://host/db?sslpassword=hunter2", "password"),
        ("mysql://me@host/db", "expected a file"),
        ("sqlite://", "expected a file"),
        ("postgresql://me:hunter2@host:port/db", "expected a file"),
    ],
)
def test_a_bad_url_is_refused_and_its_password_not_shown(given, told):
    with pytest.raises(CatalogError, match=told) as error:
        Catalog(given)
    assert "hunter2" not in str(error.value)


# Registration -----------------------------------------------------------------------------------


def test_a_version_is_a_content_and_its_copies_are_replicas(catalog):
    assert register(catalog, source("captions_3"), tags=["web"]) == ("captions@3", True)
    before = state_of(catalog)
    assert register(catalog, source("captions_3")) == ("captions@3", False)
    assert state_of(catalog) == before
    copy = source("other", "content of captions_3", root="s3://far")
    assert register(catalog, copy) == ("captions@3", True)
    with catalog.read() as connection:
        found = details(connection, "captions@3")
    places = [(one["root"], one["name"]) for one in found["replicas"]]
    assert places == [("/corpus", "captions_3"), ("s3://far", "other")]
    assert (found["samples"], found["tags"], found["state"]) == (2**40, ["web"], "staged")
    assert [one["what"].split("lies at ")[1] for one in found["history"]] == [
        "/corpus/captions_3", "s3://far/other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("second", "wanted", "told"),
    [
        (source("captions_3", "other"), None, "a source that is finished never changes"),
        (source("captions-v3", "other"), None, "give it another name, --as captions@NUMBER"),
        (source("again", "content of captions_3"), None, "which of the two"),
        (source("captions_3", root="/b"), Wanted("captions", 4), "is captions@3 already"),
    ],
)
def test_a_name_or_place_that_is_taken_is_refused(catalog, second, wanted, told):
    register(catalog, source("captions_3"))
    before = state_of(catalog)
    with pytest.raises(CatalogError, match=told):
        register(catalog, second, wanted)
    assert state_of(catalog) == before


def test_what_is_not_there_is_not_made_by_looking(bare):
    catalog = Catalog(bare)
    for _ in range(2):
        with pytest.raises(CatalogError, match="there is none yet"), catalog.read():
            pass
    register(catalog, source("captions_3"))
    with catalog.read() as connection:
        assert [one["version"] for one in versions(connection)] == ["captions@3"]
    catalog.close()


def test_unknown_names_are_told_with_what_there_is(catalog):
    register(catalog, source("captions_3"))
    with catalog.read() as connection:
        for name, told in (
            ("caption@3", "did you mean 'captions'"),
            ("captions@4", r"there are captions@3 \(staged\)"),
            ("captions@active", r"there are captions@3 \(staged\)"),
        ):
            with pytest.raises(CatalogError, match=told):
                version(connection, name)


# States -----------------------------------------------------------------------------------------


def test_the_way_of_a_version(catalog):
    register(catalog, source("c_1"))
    register(catalog, source("c_2"))
    bring(catalog, "c@1", "verified")
    with pytest.raises(CatalogError, match="licence and owner must be set.*--licence"):
        promote(catalog, "c@1", "active")
    set_fields(catalog, "c@1", {"licence": "mit", "owner": "vision", "tags": ["a"]})
    assert promote(catalog, "c@1", "active") == [("c@1", "verified", "active")]
    set_fields(catalog, "c@2", {"licence": "MIT", "owner": "vision", "parent": "c@1"})
    bring(catalog, "c@2", "verified")
    assert promote(catalog, "c@2", "active") == [
        ("c@1", "active", "deprecated"),
        ("c@2", "verified", "active"),
    ]
    with catalog.read() as connection:
        assert version(connection, "c@active").number == 2
        one, two = details(connection, "c@1"), details(connection, "c@2")
        assert check(connection)[0] == 9
    assert (one["state"], one["children"], one["licence"]) == ("deprecated", ["c@2"], "MIT")
    assert (two["parent"], len(two["report"])) == ("c@1", 64)
    assert promote(catalog, "c@1", "active")[0] == ("c@2", "active", "deprecated")
    with pytest.raises(CatalogError, match="must have a licence"):
        set_fields(catalog, "c@1", {"licence": None})
    with pytest.raises(CatalogError, match="descend from itself"):
        set_fields(catalog, "c@1", {"parent": "c@2"})
    promote(catalog, "c@2", "archived")
    promote(catalog, "c@2", "staged")
    with catalog.read() as connection:
        assert version(connection, "c@2").report is None


def test_every_other_step_is_refused(catalog):
    for before in STATES:
        name = f"{before}@1"
        register(catalog, source(f"{before}_1"), licence="MIT", owner="me")
        bring(catalog, name, before)
        held = state_of(catalog)
        for to in sorted(set(STATES) - set(FOLLOWING[before])):
            with pytest.raises(CatalogError, match=f"is {before} and cannot become {to}"):
                promote(catalog, name, to)
        assert state_of(catalog) == held
    with pytest.raises(CatalogError, match="did you mean 'active'"):
        promote(catalog, "staged@1", "activ")
    with pytest.raises(CatalogError, match="is deleted"):
        set_fields(catalog, "deleted@1", {"owner": "you"})
    assert set(TRAINABLE) == {"verified", "active", "deprecated"}


def test_descent_is_no_circle(catalog):
    register(catalog, source("c_1", parent="content of c_2"))  # which is not registered yet
    before = state_of(catalog)
    with pytest.raises(CatalogError, match="c@2 would descend from itself"):
        register(catalog, source("c_2"), parent="content of c_1")
    assert state_of(catalog) == before
    # A cycle made past the catalogue's code must not hold the lock for ever.
    register(catalog, source("c_2"))
    register(catalog, source("c_3"))
    with catalog.write() as connection:
        connection.execute(text("UPDATE version SET parent = 'content of c_1' WHERE number = 2"))
    with pytest.raises(CatalogError, match="would descend from itself"):
        set_fields(catalog, "c@3", {"parent": "c@1"})


def test_a_version_whose_shards_another_names_is_not_deleted(catalog):
    register(catalog, source("c_1"))
    made_of = {"kind": "append", "parent": "content of c_1"}
    register(catalog, source("c_2", provenance=made_of), parent=None)
    for name in ("c@1", "c@2"):
        bring(catalog, name, "archived")
    before = state_of(catalog)
    assert not collected(catalog, "c@1")
    with pytest.raises(CatalogError, match="deleted when its bytes are, and by nothing else"):
        promote(catalog, "c@1", "deleted")
    assert state_of(catalog) == before
    assert collected(catalog, "c@2")
    assert collected(catalog, "c@1")


@pytest.mark.parametrize("state", ["running", "stopped", "failed", "waiting", "unknown"])
def test_a_run_that_is_not_finished_keeps_its_source(catalog, state):
    """A stopped run may resume tomorrow; `forget` declares it abandoned."""
    register(catalog, source("c_1"))
    used = {"name": "c_1", "use": "train", "asked": "c@1", "content_hash": "content of c_1"}
    counts = {"steps": 1, "tokens": 1, "first_step": 1, "last_step": 1}
    used |= {"folder": "/runs/a", "index_sha256": "0", **counts}
    scan(catalog, [Run("/runs/a", state, 1, [used])])
    with pytest.raises(CatalogError, match="unfinished runs use it: /runs/a"):
        promote(catalog, "c@1", "archived")
    scan(catalog, [Run("/runs/a", "finished", 1, [used])])
    promote(catalog, "c@1", "archived")


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (None, "give --report"),
        (report("other"), "the report is of it, and of none with content"),
        (report("content of c_1", problems={"crc": 1}), "finds problems in it"),
        (report("content of c_1", sample_share=0.5), "looked at 0.5 of it"),
        (report("content of c_1", tokens_counted=False), "did not count"),
    ],
)
def test_verified_needs_a_report_that_finds_all_of_it_sound(catalog, seen, told):
    register(catalog, source("c_1"))
    with pytest.raises(CatalogError, match=told):
        promote(catalog, "c@1", "verified", report=seen)
    with catalog.read() as connection:
        assert version(connection, "c@1").state == "staged"


def test_the_database_keeps_the_gates_by_itself(catalog, url):
    register(catalog, source("c_1"))
    register(catalog, source("c_2"), licence="MIT", owner="me")
    for values in ("state='active'", "state='verified'", "state='gone'"):
        with pytest.raises(CatalogError):
            sql(url, f"UPDATE version SET {values}")
    bring(catalog, "c@2", "active")
    with pytest.raises(CatalogError):  # two active versions
        sql(url, "UPDATE version SET state='active', report='r', licence='MIT', owner='o'")


def test_a_change_of_what_was_seen_before_another_is_refused(catalog):
    register(catalog, source("c_1"))
    with catalog.read() as connection:
        seen = version(connection, "c@1").revision
    set_fields(catalog, "c@1", {"owner": "me"}, seen)
    before = state_of(catalog)
    for change in (
        lambda: set_fields(catalog, "c@1", {"owner": "you"}, seen),
        lambda: promote(catalog, "c@1", "archived", revision=seen),
    ):
        with pytest.raises(Conflict, match="has revision 2"):
            change()
    assert state_of(catalog) == before


# Audit ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tampering", "told"),
    [
        ("UPDATE audit SET who = 'nobody' WHERE seq = 2", "entry 2 after 1"),
        ("UPDATE audit SET at = '1999' WHERE seq = 1", "entry 1 after 0"),
        ("DELETE FROM audit WHERE seq = 2", "entry 3 after 1"),
        ("DELETE FROM audit WHERE seq = 3", "its last entry says"),
        ("UPDATE version SET owner = 'thief'", "has owner='thief', its last entry says 'me'"),
        ("DELETE FROM replica; DELETE FROM version", "c@1 is gone"),
        ("UPDATE replica SET root = '/thief'", "c@1 does not lie at /corpus/c_1"),
        ("DELETE FROM replica", "c@1 does not lie at /corpus/c_1"),
    ],
)
def test_what_is_altered_past_the_catalogue_shows(catalog, url, tampering, told):
    register(catalog, source("c_1"))
    set_fields(catalog, "c@1", {"owner": "you"})
    set_fields(catalog, "c@1", {"owner": "me"})
    with catalog.read() as connection:
        number, head = check(connection)
        assert [one.seq for one in entries(connection)] == [1, 2, 3]
        assert check(connection, head) == (number, head)
    sql(url, *unguarded(url).split("; "), *tampering.split("; "))
    with catalog.read() as connection, pytest.raises(CatalogError, match=told):
        check(connection)


def test_the_audit_names_the_user_of_the_process(catalog, monkeypatch):
    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.setenv(name, "somebody-else")
    register(catalog, source("c_1"))
    with catalog.read() as connection:
        [entry] = entries(connection)
    if catalog.where.startswith("postgresql"):  # the role that logged in, and its address
        assert entry.who == f"{postgres.OWNER} from 127.0.0.1"
    else:
        assert entry.who.startswith(f"{pwd.getpwuid(os.getuid()).pw_name}@")


ENTRY = "INTO audit (seq, at, who, what, previous, hash) SELECT {}, at, who, what, {}, 'h' "
SAME_AS_LAST = "FROM audit WHERE seq = 2"


@pytest.mark.parametrize(
    ("statement", "told"),
    [
        ("UPDATE audit SET who = 'nobody' WHERE seq = 2", "entries are only ever added"),
        ("DELETE FROM audit WHERE seq = 2", "entries are only ever added"),
        ("TRUNCATE audit", "entries are only ever added"),
        (f"INSERT {ENTRY.format(4, 'hash')} {SAME_AS_LAST}", "does not follow the last one"),
        (f"INSERT {ENTRY.format(3, 'previous')} {SAME_AS_LAST}", "does not follow the last one"),
        ("INSERT OR REPLACE " + ENTRY.format(2, "hash") + SAME_AS_LAST, "does not follow the last"),
    ],
)
def test_the_database_itself_lets_entries_of_the_audit_only_be_added(catalog, url, statement, told):
    register(catalog, source("c_1"))
    set_fields(catalog, "c@1", {"owner": "me"})
    before = state_of(catalog)
    if statement.startswith("TRUNCATE") and url.startswith("sqlite"):
        pytest.skip("SQLite has no such statement")
    if "OR REPLACE" in statement and url.startswith("postgresql"):
        pytest.skip("PostgreSQL has no such statement")
    with pytest.raises(CatalogError, match=f"audit: .*{told}.*nothing was changed"):
        sql(url, statement)
    assert state_of(catalog) == before
    set_fields(catalog, "c@1", {"owner": "you"})
    with catalog.read() as connection:
        assert check(connection)[0] == 3


def test_a_chain_that_was_cut_off_and_put_right_shows_by_a_head_kept_elsewhere(catalog, url):
    register(catalog, source("c_1"))
    set_fields(catalog, "c@1", {"owner": "me"})
    with catalog.read() as connection:
        _, head = check(connection)
    undo = "UPDATE version SET owner = NULL, revision = 1"
    sql(url, *unguarded(url).split("; "), "DELETE FROM audit WHERE seq = 2", undo)
    with catalog.read() as connection:
        check(connection)  # the database is consistent in itself
        with pytest.raises(CatalogError, match=f"no entry has the hash {head}"):
            check(connection, head)


# Schema -----------------------------------------------------------------------------------------


def test_the_steps_of_the_schema_make_the_tables_of_the_code(bare):
    catalog = Catalog(bare)
    with catalog.write() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)
        assert differences == []
        assert migrate.current(connection) == migrate.scripts().get_current_head() == SCHEMA
    catalog.close()


def begun_with(url: str, schema: str) -> None:
    """Create a catalogue with an older schema and one audit entry."""
    found = Catalog(url)
    with found._transaction(writes=True) as connection:
        migrate.upgrade(connection, schema)
        values = {"seq": 1, "at": "t", "who": "w", "what": "{}", "previous": "", "hash": "h"}
        connection.execute(AUDIT.insert().values(**values))
    found.close()


def test_another_schema_is_refused_with_what_to_do(bare):
    catalog = Catalog(bare)
    begun_with(bare, "0001")
    for use in (catalog.read, catalog.write):
        with pytest.raises(CatalogError, match=f"0001, this version has {SCHEMA}.*migrate"), use():
            pass
    assert catalog.migrate() == ("0001", SCHEMA)
    assert catalog.migrate() == (SCHEMA, SCHEMA)
    assert [len(rows) for rows in state_of(catalog)].count(1) == 1  # the entry is still there
    sql(bare, "UPDATE alembic_version SET version_num = '0099'")
    later = pytest.raises(CatalogError, match="schema is 0099.*later version")
    with later, catalog.read():
        pass
    with pytest.raises(CatalogError, match="schema is 0099.*later version"):
        catalog.migrate()
    catalog.close()


# Several processes ------------------------------------------------------------------------------


def at_once(work: Callable[..., None], *arguments: tuple) -> list:
    """Run `work` in a process for each tuple of arguments; all start together."""
    results, start = FORKS.Queue(), FORKS.Barrier(len(arguments))
    processes = [
        FORKS.Process(target=catalog_jobs.told, args=(results, start, work, given))
        for given in arguments
    ]
    for process in processes:
        process.start()
    found = []
    for process in processes:
        process.join(240)
        assert process.exitcode == 0
    while len(found) < len(processes):
        found.append(results.get(timeout=10))
    return found


@pytest.mark.parametrize("before", [None, "0001", "0002"])
def test_four_migrations_at_once_all_succeed(bare, before):
    if before:
        begun_with(bare, before)
    found = at_once(catalog_jobs.migrated, *[(bare,)] * 4)
    assert sorted(found, key=str) == sorted([(before, SCHEMA), *[(SCHEMA, SCHEMA)] * 3], key=str)


@pytest.mark.parametrize(
    ("processes", "each"), [(4, 8), pytest.param(8, 100, marks=pytest.mark.slow)]
)
def test_changes_of_many_processes_are_neither_lost_nor_refused(url, processes, each):
    catalog = Catalog(url)
    for number in range(3):
        register(catalog, source(f"c{number}_1"), licence="MIT", owner="me")
        bring(catalog, f"c{number}@1", "active")
    with catalog.read() as connection:
        before = check(connection)[0]
        revisions = sum(row["revision"] for row in versions(connection))
    catalog.close()
    conflicts = at_once(
        catalog_jobs.transitions, *[(url, number, each) for number in range(processes)]
    )
    with catalog.read() as connection:
        changes = sum(row["revision"] for row in versions(connection)) - revisions
        after = check(connection)[0]
    catalog.close()
    assert changes == after - before == processes * each
    print(f"{sum(conflicts)} came too late and looked again")


# Refused roles ----------------------------------------------------------------------------------


def with_role(request, role: str, *grants: str) -> tuple[Catalog, str]:
    """Return a new catalogue with one version, and its URL for a role whose password is its name.

    Args:
        grants: grants to the role, "SELECT ON ..." each.
    """
    server = postgresql(request)
    sql(server, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")
    catalog = Catalog(server)
    register(catalog, source("c_1"))
    sql(
        server,
        f"DROP ROLE IF EXISTS {role}",
        f"CREATE ROLE {role} LOGIN PASSWORD '{role}'",
        *(f"GRANT {grant} TO {role}" for grant in ("USAGE ON SCHEMA public", *grants)),
    )
    return catalog, server.replace("owner@", f"{role}@")


def test_a_curator_of_postgresql_writes_in_its_own_name_alone(request, monkeypatch):
    # The grants of docs/PLATFORM.md, section 1, and one that must never be given.
    catalog, theirs = with_role(
        request, "curator",
        "SELECT, INSERT ON ALL TABLES IN SCHEMA public",
        "UPDATE ON version",
        "DELETE ON replica, run, run_input",
        "UPDATE, DELETE, TRUNCATE ON audit",
    )  # fmt: skip
    monkeypatch.setenv("PGPASSWORD", "curator")
    curator = Catalog(theirs)
    set_fields(curator, "c@1", {"owner": "me"})
    register(curator, source("c_2"))
    before = state_of(curator)
    with curator.read() as connection:
        assert [one.who.split()[0] for one in entries(connection)] == ["owner", *["curator"] * 2]
    elsewhere = "INSERT " + ENTRY.format(9, "'x'").replace("INTO audit", "INTO public.audit")
    named = "INSERT " + ENTRY.format("3 + 1", "(SELECT hash FROM audit WHERE seq = 3)")
    for statements, told in (
        ([f"{named} FROM audit WHERE seq = 1"], "names another person than this session is"),
        (["CREATE TEMPORARY TABLE audit (seq bigint, hash text)",
          "INSERT INTO pg_temp.audit VALUES (8, 'x')",
          f"{elsewhere} FROM public.audit WHERE seq = 3"], "does not follow the last one"),
        (["DELETE FROM audit"], "entries are only ever added"),
        (["ALTER TABLE audit DISABLE TRIGGER USER"], "must be owner"),
        (["DROP TRIGGER audit_rows ON audit"], "must be owner"),
    ):  # fmt: skip
        with pytest.raises(CatalogError, match=told):
            sql(theirs, *statements)
    assert state_of(curator) == before
    curator.close()
    catalog.close()


def test_a_reader_of_postgresql_may_not_write(request, monkeypatch):
    catalog, theirs = with_role(request, "viewer", "SELECT ON ALL TABLES IN SCHEMA public")
    before = state_of(catalog)
    monkeypatch.setenv("PGPASSWORD", "viewer")
    viewer = Catalog(theirs)
    assert state_of(viewer) == before
    for change in (
        lambda: set_fields(viewer, "c@1", {"owner": "thief"}),
        lambda: promote(viewer, "c@1", "archived"),
        lambda: register(viewer, source("c_2")),
    ):
        with pytest.raises(CatalogError, match="permission denied.*nothing was changed"):
            change()
    assert state_of(catalog) == before
    viewer.close()
    monkeypatch.setenv("PGPASSWORD", "wrong")
    stranger = Catalog(theirs)
    with pytest.raises(CatalogError, match="password authentication failed"), stranger.read():
        pass
    monkeypatch.setenv("PGPASSWORD", postgres.PASSWORD)
    catalog.close()


# Collections: removable and removed versions (`govern.collect` decides about the bytes) ----------


def test_a_version_is_let_go_before_its_bytes_and_deleted_after_them(catalog):
    for name in ("c_1", "c_2"):
        register(catalog, source(name))
        bring(catalog, f"c@{name[-1]}", "archived")
    register(catalog, source("copy", "content of c_2", root="s3://far"))
    now = datetime.now(UTC)

    def ledger(days: float = 0, root: str = "/corpus") -> Ledger:
        return Ledger(catalog, root, "", 30, now + timedelta(days=days), lambda _: None)

    assert ledger(29).retired() == {}
    found = ledger(31).retired()
    assert {name: one.version for name, one in found.items()} == {"c_1": "c@1", "c_2": "c@2"}
    assert [one.content for one in ledger(31, "s3://far").retired().values()] == ["content of c_2"]
    scan(catalog, [Run("/runs/a", "running", 7, [used("/runs/a", "x", "content of c_1")])])
    assert "(running) uses it" in (ledger().user("c_1", frozenset({"content of c_1"})) or "")
    things = {
        name: Thing("source", name, "", one.version, one.content, (Spot("k", 1, "e"),))
        for name, one in found.items()
    }
    with pytest.raises(CatalogError, match="unfinished run /runs/a uses it"):
        ledger().take("plan", things["c_1"])
    assert forget(catalog, "/runs/a") == ("/runs/a", 1)
    with pytest.raises(CatalogError, match="knows no run '/runs/a'"):
        forget(catalog, "/runs/a")
    assert ledger().user("c_1", frozenset({"content of c_1"})) is None
    for thing in things.values():
        ledger().take("plan", thing)
        ledger().take("plan", thing)
    with pytest.raises(CatalogError, match="c@1 does not lie there any more"):
        ledger().take("another plan", things["c_1"])
    assert {*ledger().taken("plan")} == {"c_1", "c_2"}
    ledger().note("plan", things["c_1"], [("k", "locked")])
    assert {one["version"]: one["state"] for one in listed_of(catalog)} == {
        "c@1": "archived", "c@2": "archived",
    }  # fmt: skip
    for thing in things.values():
        ledger().note("plan", thing, [])
    assert {one["version"]: one["state"] for one in listed_of(catalog)} == {
        "c@1": "deleted", "c@2": "archived",  # another copy exists
    }  # fmt: skip
    with catalog.read() as connection:
        check(connection)
        forgotten = [one.what for one in entries(connection) if "run_forgotten" in one.what]
    assert forgotten[0]["used"] == [["x", "train", "content of c_1", 5]]
    assert ledger().has_facts("content of c_1") is ledger().has_facts("nobody's") is False


def used(folder: str, name: str, content: str) -> dict:
    return {
        "folder": folder, "name": name, "use": "train", "asked": name, "content_hash": content,
        "index_sha256": "i", "steps": 5, "first_step": 1, "last_step": 5, "tokens": 9,
    }  # fmt: skip


def listed_of(catalog: Catalog) -> list[dict]:
    with catalog.read() as connection:
        return versions(connection)
