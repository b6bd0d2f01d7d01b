"""0001: tables of versions, replicas and the audit log."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "version",
        sa.Column("dataset", sa.String(200), nullable=False),
        sa.Column("number", sa.Integer, autoincrement=False, nullable=False),
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("category", sa.String(32), nullable=False),
        sa.Column("tokenizer_hash", sa.String(64), nullable=False),
        sa.Column("samples", sa.BigInteger, nullable=False),
        sa.Column("items", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("provenance", sa.JSON),
        sa.Column("parent", sa.String(64)),
        sa.Column("licence", sa.String(200)),
        sa.Column("owner", sa.String(200)),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("report", sa.String(64)),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("revision", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("dataset", "number", name="pk_version"),
        sa.UniqueConstraint("content_hash", name="uq_version_content_hash"),
        sa.CheckConstraint(
            "state IN ('staged', 'verified', 'active', 'deprecated', 'archived', 'deleted')",
            name="ck_version_state_known",
        ),
        sa.CheckConstraint(
            "state IN ('staged', 'archived', 'deleted') OR report IS NOT NULL",
            name="ck_version_verified",
        ),
        sa.CheckConstraint(
            "state <> 'active' OR (licence IS NOT NULL AND owner IS NOT NULL)",
            name="ck_version_released",
        ),
    )
    op.create_index(
        "ix_version_one_active",
        "version",
        ["dataset"],
        unique=True,
        sqlite_where=sa.text("state = 'active'"),
        postgresql_where=sa.text("state = 'active'"),
    )
    op.create_table(
        "replica",
        sa.Column("content_hash", sa.String(64), nullable=False),
        sa.Column("root", sa.Text, nullable=False),
        sa.Column("endpoint", sa.Text, nullable=False),
        sa.Column("name", sa.String(200), nullable=False),
        sa.Column("index_sha256", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("content_hash", "root", "endpoint", name="pk_replica"),
        sa.ForeignKeyConstraint(
            ["content_hash"], ["version.content_hash"], name="fk_replica_content_hash"
        ),
        sa.UniqueConstraint("root", "endpoint", "name", name="uq_replica_root_endpoint_name"),
    )
    op.create_table(
        "audit",
        sa.Column("seq", sa.BigInteger, autoincrement=False, nullable=False),
        sa.Column("at", sa.String(32), nullable=False),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("what", sa.Text, nullable=False),
        sa.Column("previous", sa.String(64), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.PrimaryKeyConstraint("seq", name="pk_audit"),
        sa.UniqueConstraint("hash", name="uq_audit_hash"),
    )
