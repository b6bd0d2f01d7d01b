"""The tables of the catalogue, as `catalog.versions` makes them.

What a source is (hashes, sizes, provenance) is a copy of what lies beside its shards; state,
licence, owner, tags and the audit are here alone. No table holds a credential.
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
"""The last step of `catalog.versions`; a catalogue of another schema is refused."""

STATES = ("staged", "verified", "active", "deprecated", "archived", "deleted")
"""The states of a version, in the order in which it goes through them."""

METADATA = MetaData(
    naming_convention={
        "pk": "pk_%(table_name)s",
        "ix": "ix_%(column_0_label)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
    }
)

# The gates once more, where no program can go around them.
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
    Column("parent", String(64)),  # content hash, perhaps of a source that nobody registered
    Column("licence", String(200)),
    Column("owner", String(200)),
    Column("tags", JSON, nullable=False),
    Column("report", String(64)),  # SHA-256 of the report that verified it
    Column("state", String(16), nullable=False),
    Column("revision", Integer, nullable=False),  # counts its changes
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

# Where a version lies: at most once under a root.
REPLICA = Table(
    "replica",
    METADATA,
    Column("content_hash", String(64), ForeignKey("version.content_hash"), primary_key=True),
    Column("root", Text, primary_key=True),
    Column("endpoint", Text, primary_key=True),  # "" for Amazon's own and for folders
    Column("name", String(200), nullable=False),
    Column("index_sha256", String(64), nullable=False),
    UniqueConstraint("root", "endpoint", "name"),
)

# Entries are only ever added: by triggers, too (`catalog.versions.v0003_append_only`).
AUDIT = Table(
    "audit",
    METADATA,
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("at", String(32), nullable=False),
    Column("who", String(200), nullable=False),
    Column("what", Text, nullable=False),  # JSON as it was hashed
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

# Which source a run used; the hash may be of one that nobody registered.
RUN_INPUT = Table(
    "run_input",
    METADATA,
    Column("folder", Text, ForeignKey("run.folder"), primary_key=True),
    Column("name", String(200), primary_key=True),
    Column("use", String(16), primary_key=True),
    Column("asked", String(250), nullable=False),
    Column("content_hash", String(64), nullable=False, index=True),
    Column("index_sha256", String(64), nullable=False),
    Column("steps", BigInteger, nullable=False),  # in which a token of it was trained on
    Column("first_step", BigInteger),
    Column("last_step", BigInteger),
    Column("tokens", BigInteger, nullable=False),
)
