"""Audit log of the catalogue: a hash chain that reveals entries altered or removed later.

An entry's hash covers the entry and the hash before it. Cutting off the end of the chain goes
undetected, so an auditor must keep the head hash elsewhere and check that it is still in the chain.
The database refuses such changes to everybody except its owner, who can drop the triggers. The
entries record every change of a version, so `check` also compares the versions with them.
"""

import hashlib
import json
import os
import pwd
import socket
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, insert, select, text, update

from data_pipeline.catalog.engine import CatalogError, Conflict
from data_pipeline.catalog.names import name_of
from data_pipeline.catalog.tables import AUDIT, REPLICA, VERSION

AUDITED = tuple(
    column.name
    for column in VERSION.columns
    if column.name not in ("dataset", "number", "revision", "provenance")
)
"""Columns of a version whose every value is in the audit log."""
_PLACE = ("root", "endpoint", "name")
_SESSION = text("SELECT session_user, host(inet_client_addr())")


class Entry(NamedTuple):
    """Entry of the audit log: its number from 1, UTC time, person, JSON object and hash."""

    seq: int
    at: str
    who: str
    what: dict[str, Any]
    hash: str


def person(connection: Connection) -> str:
    """Return the user that this process acts for.

    On PostgreSQL, it is the session's role and the client's address ("local" for a socket), as
    reported by the server; nothing comes from the process. SQLite has no users, so it is the
    kernel's user and the host name; LOGNAME and USER are ignored because anyone can set them.
    """
    if connection.dialect.name == "postgresql":
        role, address = connection.execute(_SESSION).one()
        return f"{role} from {address or 'local'}"
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a uid without a name, as in containers
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def canonical(value: Mapping[str, Any]) -> str:
    """Return the canonical text of a JSON object."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def append(connection: Connection, what: Mapping[str, Any]) -> None:
    """Add an entry; the transaction must be a writing one, so that no other writer appends."""
    last = connection.execute(
        select(AUDIT.c.seq, AUDIT.c.hash).order_by(AUDIT.c.seq.desc()).limit(1)
    ).first()
    seq, previous = (last.seq + 1, last.hash) if last else (1, "")
    at, who, told = datetime.now(UTC).isoformat("T", "seconds"), person(connection), canonical(what)
    values = {"seq": seq, "at": at, "who": who, "what": told, "previous": previous}
    connection.execute(insert(AUDIT).values(**values, hash=_hash(**values)))


def change(connection: Connection, row: Row[Any], note: Mapping[str, Any], **values: Any) -> None:
    """Change a version that is unchanged since it was read, and record this in the audit log.

    Args:
        row: the version, as read.
        note: additional fields of the entry.
        values: columns and their new values.

    Raises:
        Conflict: the version was changed since it was read.
    """
    key = (VERSION.c.dataset == row.dataset, VERSION.c.number == row.number)
    done = connection.execute(
        update(VERSION)
        .where(*key, VERSION.c.revision == row.revision)
        .values(**values, revision=row.revision + 1)
    )
    name = name_of(row)
    if done.rowcount != 1:
        raise Conflict(f"{name} was changed since revision {row.revision}; look at it again")
    changed = {key: [getattr(row, key), value] for key, value in values.items()}
    append(connection, {"version": name, "revision": row.revision + 1, "change": changed, **note})


def entries(connection: Connection) -> Iterator[Entry]:
    """Yield the audit log from its beginning, and check each entry's hash.

    Raises:
        CatalogError: names the first entry that was altered.
    """
    seq, previous = 0, ""
    for row in connection.execute(select(AUDIT).order_by(AUDIT.c.seq)):
        values = row._asdict()
        found = values.pop("hash")
        if (row.seq, row.previous) != (seq + 1, previous) or found != _hash(**values):
            raise CatalogError(
                f"audit: entry {row.seq} after {seq} was altered, or one before it is gone"
            )
        seq, previous = row.seq, found
        yield Entry(row.seq, row.at, row.who, json.loads(row.what), found)


def check(connection: Connection, head: str | None = None) -> tuple[int, str]:
    """Check the hash chain, and compare the versions and replicas with the entries.

    Args:
        head: hash of an entry noted earlier, which must be in the chain.

    Returns:
        Number of entries, and the hash of the last one ("" if there are none).

    Raises:
        CatalogError: names the entry or the version that was altered.
    """
    told: dict[str, dict[str, Any]] = {}
    places: set[tuple[str, str, str, str]] = set()
    number, last, seen = 0, "", head is None
    for entry in entries(connection):
        number, last, seen = entry.seq, entry.hash, seen or entry.hash == head
        if name := entry.what.get("version"):
            new = {key: value for key, (_, value) in entry.what["change"].items()}
            told.setdefault(name, {}).update(new, revision=entry.what["revision"])
        if name := entry.what.get("replica"):
            root, endpoint, folder = (entry.what[key] for key in _PLACE)
            places.add((name, root, endpoint, folder))
        if name := entry.what.get("replica_gone"):
            root, endpoint, folder = (entry.what[key] for key in _PLACE)
            places.discard((name, root, endpoint, folder))
    if not seen:
        raise CatalogError(f"audit: no entry has the hash {head}; its end was cut off, or changed")
    for row in connection.execute(select(VERSION)):
        name = name_of(row)
        expected = told.pop(name, {})
        for key in (*AUDITED, "revision"):
            if getattr(row, key) != expected.get(key):
                raise CatalogError(
                    f"audit: {name} has {key}={getattr(row, key)!r}, its last entry says "
                    f"{expected.get(key)!r}: somebody changed the table itself"
                )
    if told:
        raise CatalogError(f"audit: {next(iter(told))} is gone from the table of versions")
    _check_replicas(connection, places)
    return number, last


def _check_replicas(connection: Connection, told: set[tuple[str, str, str, str]]) -> None:
    """Compare the replicas with the audit log."""
    query = select(VERSION.c.dataset, VERSION.c.number, *(REPLICA.c[key] for key in _PLACE)).join(
        REPLICA, REPLICA.c.content_hash == VERSION.c.content_hash
    )
    found = {(name_of(row), row.root, row.endpoint, row.name) for row in connection.execute(query)}
    for name, root, endpoint, folder in sorted(found ^ told):
        lies = "lies" if (name, root, endpoint, folder) in found else "does not lie"
        raise CatalogError(
            f"audit: {name} {lies} at {root}/{folder} {endpoint}".rstrip()
            + ", and the entries say otherwise: somebody changed the table itself"
        )


def _hash(seq: int, at: str, who: str, what: str, previous: str) -> str:
    entry = json.dumps([seq, at, who, what, previous], separators=(",", ":"))
    return hashlib.sha256(entry.encode()).hexdigest()
