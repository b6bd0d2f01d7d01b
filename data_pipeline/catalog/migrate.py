"""Brings the schema of a catalogue to this version's (Alembic), inside a transaction of its own.

The caller's transaction excludes all other writers, so of several that begin at once the first does
the work and the others find it done. There is no alembic.ini and no env.py: one schema, one way up.
"""

from pathlib import Path

from alembic.migration import MigrationContext
from alembic.operations import Operations
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

_HERE = Path(__file__).parent


def scripts() -> ScriptDirectory:
    """Return the steps of the schema, in `catalog.versions`."""
    return ScriptDirectory(str(_HERE))


def current(connection: Connection) -> str | None:
    """Return the schema that a catalogue has; None where there is none yet."""
    return MigrationContext.configure(connection).get_current_revision()


def upgrade(connection: Connection, to: str = "head") -> None:
    """Run the steps that a catalogue lacks. The transaction must exclude other writers."""
    steps = scripts()
    context = MigrationContext.configure(
        connection, opts={"fn": lambda revision, _: steps._upgrade_revs(to, revision)}
    )
    with Operations.context(context):
        context.run_migrations()
