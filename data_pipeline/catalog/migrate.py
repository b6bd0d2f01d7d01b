"""Upgrades a catalogue's schema to this version's with Alembic, inside the caller's transaction.

The caller's transaction excludes all other writers, so of several processes that start at once, the
first upgrades the schema and the others find it current. There is no alembic.ini or env.py, because
the schema has a single line of upgrades.
"""

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

_HERE = Path(__file__).parent


def scripts() -> ScriptDirectory:
    """Return the schema's migration steps, in `catalog.versions`."""
    return ScriptDirectory(str(_HERE))


def current(connection: Connection) -> str | None:
    """Return the schema of a catalogue, or None if it has none yet."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run the missing migration steps. The transaction must exclude other writers."""
    steps = scripts()
    context = MigrationContext.configure(
        connection, opts={"fn": lambda revision, _: steps._upgrade_revs(to, revision)}
    )
    with Operations.context(context):
        context.run_migrations()
