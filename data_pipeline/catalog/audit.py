"""Who changed what, in a chain of hashes: an entry that is altered or taken out later shows.

The hash of an entry is over itself and the hash before it. The end of the chain can be cut off
unseen, so whoever must be sure keeps the head of it elsewhere, and has it looked for again. The
database refuses all of this to anybody but its owner, who can take its triggers away. The
entries hold every change of a version, so the versions can be compared with them, too.
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
"""Columns of a version of which the audit holds every value."""
_PLACE = ("root", "endpoint", "name")
_SESSION = text("SELECT session_user, host(inet_client_addr())")


class Entry(NamedTuple):
    """An entry of the audit: its number from 1, UTC, a person, a JSON object."""

    seq: int
    at: str
    who: str
    what: dict[str, Any]
    hash: str


def person(connection: Connection) -> str:
    """Return who this process acts for.

    PostgreSQL says whom it let in, and from where: the role of the session and the client's address
    ("local" for a socket). Nothing is taken from the process. SQLite knows nobody: there it is the
    kernel's user and the machine; LOGNAME and USER are whatever somebody sets.
    """
    if connection.dialect.name == "postgresql":
        role, address = connection.execute(_SESSION).one()
        return f"{role} from {address or 'local'}"
    try:
        name = pwd.getpwuid(os.getuid()).pw_name
    except KeyError:  # a number without a name, as in containers
        name = f"user {os.getuid()}"
    return f"{name}@{socket.gethostname()}"


def canonical(value: Mapping[str, Any]) -> str:
    """Return the one text of a JSON object."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def append(connection: Connection, what: Mapping[str, Any]) -> None:
    """Add an entry. The transaction must be one that writes: no other may append beside it."""
    last = connection.execute(
        select(AUDIT.c.seq, AUDIT.c.hash).order_by(AUDIT.c.seq.desc()).limit(1)
    ).first()
    seq, previous = (last.seq + 1, last.hash) if last else (1, "")
    at, who, told = datetime.now(UTC).isoformat("T", "seconds"), person(connection), canonical(what)
    values = {"seq": seq, "at": at, "who": who, "what": told, "previous": previous}
    connection.execute(insert(AUDIT).values(**values, hash=_hash(**values)))


def change(connection: Connection, row: Row[Any], note: Mapping[str, Any], **values: Any) -> None:
    """Change a version as it was read, and say so in the audit.

    Args:
        row: the version, as read.
        note: what else the entry says.
        values: columns and their new values.

    Raises:
        Conflict: it was changed since.
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
    """Yield the audit from its beginning, each entry compared with its hash.

    Raises:
        CatalogError: names the first entry that is not as it was written.
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
    """Compare the chain of entries, and the versions with what it says of them.

    Args:
        head: hash of an entry as somebody noted it, which must be in the chain.

    Returns:
        Number of entries, and the hash of the last one: "" without any.

    Raises:
        CatalogError: names the entry or the version that is not as it was written.
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
    """Compare where versions lie with what the audit says of it."""
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
