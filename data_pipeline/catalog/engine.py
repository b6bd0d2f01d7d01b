"""An open catalogue, in SQLite by default or in PostgreSQL by URL, and its transactions.

Writers run one at a time. SQLite takes its write lock at the start (BEGIN IMMEDIATE), because a
reader that becomes a writer would fail with "database is locked" whatever the timeout. PostgreSQL
takes an advisory lock. So the data that a writer has read cannot change before it commits, the
audit log is one chain, and deadlocks cannot occur. The database itself refuses users without write
access, by its grants or by the file's permissions.
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
"""Environment variable with the catalogue's file or URL."""
DEFAULT = "~/.local/share/kimi-pretrain/catalog.sqlite"
WAIT_S = 30
_LOCK = 0x4B494D49  # key of the PostgreSQL advisory lock, local to this database
_WRITES = "kimi_catalog_writes"
_SCHEMA = text("SELECT version_num FROM alembic_version")
_MIGRATE = "kimi-pretrain data catalog migrate"


class CatalogError(ValueError):
    """The catalogue refuses an operation; nothing was changed."""


class NoCatalog(CatalogError):
    """The catalogue does not exist yet."""


class Conflict(CatalogError):
    """The object to change has changed since it was read."""


class Catalog:
    """An open catalogue.

    Args:
        url: a file, or a URL: sqlite:///FILE, postgresql://USER@HOST/DATABASE. None: the
            environment variable KIMI_PRETRAIN_CATALOG, or else a file in this user's home folder.

    Raises:
        CatalogError: unknown kind of catalogue, a password in the URL, or SQLite on a network file
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
                isolation_level="READ COMMITTED",  # a snapshot could predate the lock
                pool_pre_ping=True,
                connect_args={"connect_timeout": 10},
            )

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """Open a read-only transaction that sees one consistent state.

        Raises:
            NoCatalog: the catalogue does not exist yet.
            CatalogError: the schema differs from this version's, or the database does not answer.
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
        """Open a transaction that excludes other writers; create tables in an empty database.

        Raises:
            CatalogError: the schema differs from this version's, this user has no write access, or
                the database does not answer.
        """
        with self._transaction(writes=True) as connection:
            if (found := self._schema(connection)) is None:
                migrate.upgrade(connection)
            else:
                self._check_schema(found)
            yield connection

    def migrate(self) -> tuple[str | None, str]:
        """Upgrade the schema to this version's; return the schema before and after.

        Raises:
            CatalogError: the schema is newer than this version's, or as in `write`.
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
        if self._file is None and not writes:  # SQLite's readers see a snapshot by default
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
        """Return the schema; asks Alembic, which is slower, only until the tables exist."""
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
    """Return the URL of a catalogue; SQLite files get absolute paths.

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
    connection.isolation_level = None  # `_on_begin` starts transactions explicitly
    connection.execute("PRAGMA foreign_keys = ON")


def _on_begin(connection: Connection) -> None:
    writes = connection.get_execution_options().get(_WRITES)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")
