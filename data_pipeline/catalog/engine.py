"""An open catalogue: SQLite by default, PostgreSQL by a URL; what a transaction of it excludes.

Writers come one after the other: SQLite takes its write lock at the beginning (BEGIN IMMEDIATE; a
reader that becomes a writer would fail with "database is locked" whatever the timeout), PostgreSQL
an advisory lock. So nothing that a writer has read changes before it commits, the audit is one
chain, and there is no order of locks in which two could wait for each other. Whoever may not write
is refused by the database itself: by its grants, or by the rights of the file.
"""

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import URL, Connection, create_engine, event, exc, make_url, text

from data_pipeline.catalog import migrate
from data_pipeline.catalog.file_systems import network_kind
from data_pipeline.catalog.tables import SCHEMA
from data_pipeline.store.addresses import masked

VARIABLE = "KIMI_PRETRAIN_CATALOG"
"""Environment variable: where the catalogue is."""
DEFAULT = "~/.local/share/kimi-pretrain/catalog.sqlite"
WAIT_S = 30
_LOCK = 0x4B494D49  # of PostgreSQL's advisory locks, in this database alone
_WRITES = "kimi_catalog_writes"
_SCHEMA = text("SELECT version_num FROM alembic_version")
_MIGRATE = "kimi-pretrain data catalog migrate"


class CatalogError(ValueError):
    """The catalogue cannot do what it was asked, and nothing of it was changed."""


class NoCatalog(CatalogError):
    """There is no catalogue yet."""


class Conflict(CatalogError):
    """What was to be changed is no longer as it was seen."""


class Catalog:
    """An open catalogue.

    Args:
        url: a file, or a URL: sqlite:///FILE, postgresql://USER@HOST/DATABASE. None: as the
            environment says (KIMI_PRETRAIN_CATALOG), or a file of this user.

    Raises:
        CatalogError: no such kind of catalogue, a password in the URL, or SQLite on a network file
            system.
    """

    def __init__(self, url: str | None = None) -> None:
        given = _checked(url or os.environ.get(VARIABLE) or DEFAULT)
        self.where = given.render_as_string()
        self._file, self._has_tables = None, False
        if given.get_backend_name() == "sqlite":
            self._file = Path(given.database or "")
            self.where = str(self._file)
            self._engine = create_engine(given, connect_args={"timeout": WAIT_S})
            event.listen(self._engine, "connect", _on_connect)
            event.listen(self._engine, "begin", _on_begin)
        else:
            self._engine = create_engine(
                given,
                isolation_level="READ COMMITTED",  # a snapshot would be older than the lock
                pool_pre_ping=True,
                connect_args={"connect_timeout": 10},
            )

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a transaction that sees one state and changes nothing.

        Raises:
            NoCatalog: there is none yet.
            CatalogError: it has another schema, or it does not answer.
        """
        if self._file is not None and not self._file.exists():
            raise self._nothing_there()
        with self._transaction(writes=False) as connection:
            if (found := self._schema(connection)) is None:
                raise self._nothing_there()
            self._check_schema(found)
            yield connection

    @contextmanager
    def write(self) -> Iterator[Connection]:
        """Open a transaction that no other writer runs beside; an empty database gets its tables.

        Raises:
            CatalogError: it has another schema, this user may not write, or it does not answer.
        """
        with self._transaction(writes=True) as connection:
            if (found := self._schema(connection)) is None:
                migrate.upgrade(connection)
            else:
                self._check_schema(found)
            yield connection

    def migrate(self) -> tuple[str | None, str]:
        """Bring the schema to this version's; returns the one that was there, and that.

        Raises:
            CatalogError: it is a later version's, or as `write`.
        """
        with self._transaction(writes=True) as connection:
            before = migrate.current(connection)
            if before not in (None, SCHEMA):
                self._check_schema(before, may_be_old=True)
            if before != SCHEMA:
                migrate.upgrade(connection)
        return before, SCHEMA

    @contextmanager
    def _transaction(self, *, writes: bool) -> Iterator[Connection]:
        if self._file is not None and writes:
            self._file.parent.mkdir(parents=True, exist_ok=True)
        options: dict[str, object] = {_WRITES: writes}
        if self._file is None and not writes:  # SQLite's readers see one state anyway
            options |= {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}
        try:
            with self._engine.connect() as plain:
                connection = plain.execution_options(**options)
                with connection.begin():
                    if self._file is None and writes:
                        connection.exec_driver_sql(f"SET LOCAL lock_timeout = '{WAIT_S}s'")
                        connection.exec_driver_sql(f"SELECT pg_advisory_xact_lock({_LOCK})")
                    yield connection
        except exc.DBAPIError as error:
            told = " ".join(str(error.orig).split())
            raise CatalogError(f"catalogue {self.where}: {told}; nothing was changed") from error

    def _schema(self, connection: Connection) -> str | None:
        """Return the schema; Alembic looks whether there is one, a question that costs more."""
        if self._has_tables:
            return connection.execute(_SCHEMA).scalar()
        found = migrate.current(connection)
        self._has_tables = found is not None
        return found

    def _nothing_there(self) -> NoCatalog:
        return NoCatalog(
            f"catalogue {self.where}: there is none yet; `kimi-pretrain data catalog register` "
            f"begins one, --catalog or {VARIABLE} names another"
        )

    def _check_schema(self, found: str, *, may_be_old: bool = False) -> None:
        if found == SCHEMA:
            return
        if found not in {script.revision for script in migrate.scripts().walk_revisions()}:
            raise CatalogError(
                f"catalogue {self.where}: its schema is {found}, this version knows up to "
                f"{SCHEMA}: a later version made it; use that"
            )
        if not may_be_old:
            raise CatalogError(
                f"catalogue {self.where}: its schema is {found}, this version has {SCHEMA}: run "
                f"`{_MIGRATE}` once (earlier versions will refuse it then)"
            )


def _checked(given: str) -> URL:
    """Return a URL, of SQLite with an absolute path.

    Raises:
        CatalogError: see `Catalog`.
    """
    if "://" not in given:
        url = URL.create("sqlite", database=given)
    else:
        try:
            url = make_url(given)
        except (exc.ArgumentError, ValueError):
            raise _bad_url(masked(given)) from None
    if url.password is not None or any("password" in key for key in url.query):
        raise CatalogError(
            f"catalogue {masked(given.partition('?')[0])}: a password in its URL would end up in "
            "logs and shells; put it into ~/.pgpass or PGPASSWORD"
        )
    if url.get_backend_name() == "postgresql":
        return url.set(drivername="postgresql+psycopg")
    if url.get_backend_name() != "sqlite" or url.database in (None, "", ":memory:"):
        raise _bad_url(given)
    file = Path(str(url.database)).expanduser().resolve()
    if (kind := network_kind(file)) is not None:
        raise CatalogError(
            f"catalogue {file}: SQLite on {kind}, whose locks do not hold between machines; give "
            "a local file, or PostgreSQL: postgresql://USER@HOST/DATABASE"
        )
    return URL.create("sqlite", database=str(file))


def _bad_url(given: str) -> CatalogError:
    return CatalogError(
        f"catalogue {given}: expected a file, sqlite:///FILE or postgresql://USER@HOST/DATABASE"
    )


def _on_connect(connection: sqlite3.Connection, _: object) -> None:
    connection.isolation_level = None  # transactions begin where we say, and as we say
    connection.execute("PRAGMA foreign_keys = ON")


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
