"""0002: tables of runs, and of the sources and steps they used."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "run",
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("folder", name="pk_run"),
    )
    op.create_table(
        "run_input",
        sa.Column("folder", sa.Text, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("use", sa.String(16), nullable=False),
        sa.Column("asked", sa.String(250), nullable=False),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("index_sha256", sa.String(64), nullable=False),
        sa.Column("steps", sa.BigInteger, nullable=False),
        sa.Column("first_step", sa.BigInteger),
        sa.Column("last_step", sa.BigInteger),
        sa.Column("tokens", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("folder", "name", "use", name="pk_run_input"),
        sa.ForeignKeyConstraint(["folder"], ["run.folder"], name="fk_run_input_folder"),
    )
    op.create_index("ix_run_input_content_hash", "run_input", ["content_hash"])
