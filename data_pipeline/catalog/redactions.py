"""Records redactions: after one, a source's folder has other content, which is a new version.

The new version is staged. It inherits licence, owner and tags of the old version, whose replica is
removed. Requests are entries of the audit log. Keys of samples may name persons, and no entry can
be removed, so entries contain only the number of keys and a hash of them.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, delete, func, select

from data_pipeline.catalog.audit import append
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.names import Wanted, name_of
from data_pipeline.catalog.register import Source, register_in
from data_pipeline.catalog.tables import REPLICA, VERSION
from data_pipeline.govern.holds import Hold
from data_pipeline.store.addresses import endpoint_of


def note_request(
    catalog: Catalog, request: str, wanted: Mapping[str, Sequence[str]], what: str
) -> None:
    """Record in the audit log a request to delete samples, or its execution.

    Args:
        request: number or name of the request.
        wanted: source -> keys of samples.
        what: "received" or "redacted".
    """
    with catalog.write() as connection:
        append(connection, {"request": request, "action": what, "samples": _told(wanted)})


def note_hold(
    catalog: Catalog, root: str, endpoint: str | None, hold: Hold, what: str, locked: str | None
) -> None:
    """Record in the audit log that a hold was put or ended.

    Args:
        root, endpoint: of the source, as its store was opened.
        what: "put" or "ended".
        locked: result of the store's own lock; None: no lock was requested.
    """
    with catalog.write() as connection:
        append(connection, _about(root, endpoint, hold, what) | {"lock": locked})


def change_hold(
    catalog: Catalog,
    root: str,
    endpoint: str | None,
    change: Callable[[], Hold],
    what: str,
    by: str,
) -> None:
    """Put or end a hold for a person; an error leaves the hold and the audit log unchanged.

    Args:
        root, endpoint, what: as for `note_hold`.
        change: puts or ends the hold.
        by: the person.
    """
    with catalog.write() as connection:
        append(connection, _about(root, endpoint, change(), what) | {"by": by})


def _about(root: str, endpoint: str | None, hold: Hold, what: str) -> dict[str, Any]:
    about = {"hold": hold.name, "action": what, "since": hold.since, "shards": list(hold.shards)}
    place = {"in": root, "endpoint": endpoint_of(root, endpoint), "folder": hold.source}
    return about | place


def follow(
    catalog: Catalog, sources: Sequence[Source], request: str | None = None
) -> list[tuple[str, str]]:
    """Record the current content of redacted sources; all of them or none.

    Args:
        sources: as returned by `register.look`; skips unregistered and unchanged sources.
        request: request number or name for the entries.

    Returns:
        (old version, new version) of each changed source.

    Raises:
        CatalogError: a folder's content is not its version with samples redacted.
    """
    moved: list[tuple[str, str]] = []
    with catalog.write() as connection:
        for source in sources:
            row = _registered(connection, source)
            if row is not None and row.content_hash != source.columns["content_hash"]:
                moved.append(_move(connection, source, row, request))
    return moved


def _move(
    connection: Connection, source: Source, row: Row[Any], request: str | None
) -> tuple[str, str]:
    made_as = (source.columns["provenance"] or {}).get("made_as")
    if made_as not in (row.content_hash, (row.provenance or {}).get("made_as", "")):
        raise CatalogError(
            f"{source.root}/{source.name}: its content is {source.columns['content_hash'][:12]}, "
            f"which is not {name_of(row)} ({row.content_hash[:12]}) with samples redacted"
        )
    place = [REPLICA.c[key] == value for key, value in source.place.items()]
    connection.execute(delete(REPLICA).where(*place))
    told = {} if request is None else {"request": request}
    append(connection, {"replica_gone": name_of(row), **source.place, **told})
    content = VERSION.c.content_hash == source.columns["content_hash"]
    if connection.execute(select(VERSION).where(content)).first() is not None:
        # another redacted copy is registered already
        return name_of(row), register_in(connection, source, None, {})[0]
    same = select(func.max(VERSION.c.number)).where(VERSION.c.dataset == row.dataset)
    name = Wanted(row.dataset, int(connection.execute(same).scalar_one()) + 1)
    governed = {"licence": row.licence, "owner": row.owner, "tags": row.tags}
    governed["parent"] = row.content_hash
    return name_of(row), register_in(connection, source, name, governed)[0]


def _registered(connection: Connection, source: Source) -> Row[Any] | None:
    """Return the version registered at a source's root and folder."""
    place = [REPLICA.c[key] == value for key, value in source.place.items()]
    query = select(VERSION).join(REPLICA, REPLICA.c.content_hash == VERSION.c.content_hash)
    return connection.execute(query.where(*place)).first()


def _told(wanted: Mapping[str, Sequence[str]]) -> dict[str, list[Any]]:
    """Return source -> number of samples, SHA-256 of their sorted keys."""
    return {
        name: [len(keys), hashlib.sha256(json.dumps(sorted(keys)).encode()).hexdigest()]
        for name, keys in sorted(wanted.items())
    }
