"""Tables of the catalogue, as created by `catalog.versions`.

Hashes, sizes and provenance are copied from the files of a source; state, licence, owner, tags and
the audit log exist only here. No table holds a credential.
"""

from sqlalchemy import (
    JSON,
    BigInteger,
    CheckConstraint,
    Column,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
    text,
)

SCHEMA = "0003"
"""Last step of `catalog.versions`; a catalogue with another schema is refused."""

STATES = ("staged", "verified", "active", "deprecated", "archived", "deleted")
"""States of a version, in order."""

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(column_0_label)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)

# Database constraints repeat the checks of `states`, so that no program can bypass them.
STATE_KNOWN = "state IN ('staged', 'verified', 'active', 'deprecated', 'archived', 'deleted')"
VERIFIED = "state IN ('staged', 'archived', 'deleted') OR report IS NOT NULL"
RELEASED = "state <> 'active' OR (licence IS NOT NULL AND owner IS NOT NULL)"

VERSION = Table(
    "version",
    METADATA,
    Column("dataset", String(200), primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("content_hash", String(64), nullable=False, unique=True),
    Column("category", String(32), nullable=False),
    Column("tokenizer_hash", String(64), nullable=False),
    Column("samples", BigInteger, nullable=False),
    Column("items", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("provenance", JSON(none_as_null=True)),
    Column("parent", String(64)),  # content hash; the parent may be unregistered
    Column("licence", String(200)),
    Column("owner", String(200)),
    Column("tags", JSON, nullable=False),
    Column("report", String(64)),  # SHA-256 of the report that verified it
    Column("state", String(16), nullable=False),
    Column("revision", Integer, nullable=False),  # number of changes
    CheckConstraint(STATE_KNOWN, name="state_known"),
    CheckConstraint(VERIFIED, name="verified"),
    CheckConstraint(RELEASED, name="released"),
)
ONE_ACTIVE = Index(
    "ix_version_one_active",
    VERSION.c.dataset,
    unique=True,
    sqlite_where=text("state = 'active'"),
    postgresql_where=text("state = 'active'"),
)

# Locations of a version: at most one per root.
REPLICA = Table(
    "replica",
    METADATA,
    Column("content_hash", String(64), ForeignKey("version.content_hash"), primary_key=True),
    Column("root", Text, primary_key=True),
    Column("endpoint", Text, primary_key=True),  # "" for AWS S3 and for folders
    Column("name", String(200), nullable=False),
    Column("index_sha256", String(64), nullable=False),
    UniqueConstraint("root", "endpoint", "name"),
)

# Append-only, enforced by triggers (`catalog.versions.v0003_append_only`).
AUDIT = Table(
    "audit",
    METADATA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", String(32), nullable=False),
    Column("who", String(200), nullable=False),
    Column("what", Text, nullable=False),  # the hashed JSON text
    Column("previous", String(64), nullable=False),
    Column("hash", String(64), nullable=False, unique=True),
)

RUN = Table(
    "run",
    METADATA,
    Column("folder", Text, primary_key=True),
    Column("state", String(16), nullable=False),
    Column("step", BigInteger, nullable=False),
)

# Sources that a run used; they may be unregistered.
RUN_INPUT = Table(
    "run_input",
    METADATA,
    Column("folder", Text, ForeignKey("run.folder"), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("use", String(16), primary_key=True),
    Column("asked", String(250), nullable=False),
    Column("content_hash", String(64), nullable=False, index=True),
    Column("index_sha256", String(64), nullable=False),
    Column("steps", BigInteger, nullable=False),  # number of steps that trained on a token of it
    Column("first_step", BigInteger),
    Column("last_step", BigInteger),
    Column("tokens", BigInteger, nullable=False),
)
