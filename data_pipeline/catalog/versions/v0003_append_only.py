"""0003: triggers that keep the audit log append-only and check an entry's sequence and user.

Only the owner of the database can drop the triggers; nobody else can bypass them, whatever the
grants. SQLite has no users, so there the triggers only prevent mistakes.
"""

from alembic import op

revision = "0003"
down_revision = "0002"

_ADDED = "audit: entries are only ever added"
_BEHIND = "audit: an entry does not follow the last one"
_WHO = "audit: an entry names another person than this session is"

_SQLITE = (
    f"""CREATE TRIGGER audit_update BEFORE UPDATE ON audit
    BEGIN SELECT RAISE(ABORT, '{_ADDED}'); END""",
    f"""CREATE TRIGGER audit_delete BEFORE DELETE ON audit
    BEGIN SELECT RAISE(ABORT, '{_ADDED}'); END""",
    f"""CREATE TRIGGER audit_insert BEFORE INSERT ON audit
    WHEN NEW.seq <> (SELECT coalesce(max(seq), 0) + 1 FROM audit)
      OR NEW.previous <> coalesce((SELECT hash FROM audit ORDER BY seq DESC LIMIT 1), '')
    BEGIN SELECT RAISE(ABORT, '{_BEHIND}'); END""",
)
# Qualify the table with its schema, because a temporary table of the same name takes precedence.
_POSTGRESQL = (
    f"""CREATE FUNCTION audit_appends() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        last_seq bigint;
        last_hash text;
    BEGIN
        IF TG_OP <> 'INSERT' THEN
            RAISE EXCEPTION '{_ADDED}';
        END IF;
        EXECUTE format('SELECT seq, hash FROM %I.audit ORDER BY seq DESC LIMIT 1', TG_TABLE_SCHEMA)
            INTO last_seq, last_hash;
        IF NEW.seq <> coalesce(last_seq, 0) + 1 OR NEW.previous <> coalesce(last_hash, '') THEN
            RAISE EXCEPTION '{_BEHIND}';
        END IF;
        IF NEW.who <> session_user || ' from ' || coalesce(host(inet_client_addr()), 'local') THEN
            RAISE EXCEPTION '{_WHO}';
        END IF;
        RETURN NEW;
    END $$""",
    "CREATE TRIGGER audit_rows BEFORE INSERT OR UPDATE OR DELETE ON audit "
    "FOR EACH ROW EXECUTE FUNCTION audit_appends()",
    "CREATE TRIGGER audit_table BEFORE TRUNCATE ON audit EXECUTE FUNCTION audit_appends()",
)


def upgrade() -> None:
    """Create the triggers."""
    postgresql = op.get_bind().dialect.name == "postgresql"
    for statement in _POSTGRESQL if postgresql else _SQLITE:
        op.execute(statement)
