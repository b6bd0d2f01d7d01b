"""Registers sources in the catalogue: a single source, or all under a root to rebuild a catalogue.

A version is identified by its content, and its replicas record its locations. The same content
under another root is the same version; other content under the same name is refused.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from sqlalchemy import Connection, insert, select

from data_pipeline.catalog.audit import AUDITED, append
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.names import Wanted, of_folder
from data_pipeline.catalog.tables import REPLICA, VERSION
from data_pipeline.index.manifest import IndexMismatch, read_index, read_provenance, sources_at
from data_pipeline.names import listed
from data_pipeline.store.addresses import endpoint_of
from data_pipeline.store.open import MissingKey, Store


class Source(NamedTuple):
    """A source as read from its folder: its location, and its columns in the catalogue."""

    root: str
    endpoint: str
    name: str
    index_sha256: str
    columns: dict[str, Any]

    @property
    def place(self) -> dict[str, str]:
        """Location of the source, as columns of the tables."""
        return {"root": self.root, "endpoint": self.endpoint, "name": self.name}


def look(store: Store, endpoint: str | None, name: str) -> Source:
    """Read a source's index and provenance, and check that they match.

    Raises:
        MissingKey, IndexMismatch: the source does not exist, or its files do not match.
    """
    index, provenance = read_index(store, name), read_provenance(store, name)
    if index.redacted:  # derived sources identify it by its original hash
        provenance = (provenance or {}) | {"made_as": index.identity}
    parent = (provenance or {}).get("parent")
    columns = {
        "content_hash": index.content_hash,
        "category": index.category,
        "tokenizer_hash": index.tokenizer_hash,
        "samples": index.num_samples,
        "items": index.num_items,
        "bytes": sum(shard.size for shard in index.shards),
        "provenance": provenance,
        # Reindexing with the same tokenizer gives the same content.
        "parent": parent if isinstance(parent, str) and parent != index.content_hash else None,
    }
    place = (store.uri, endpoint_of(store.uri, endpoint), name)
    return Source(*place, index.index_sha256, columns)


def register(
    catalog: Catalog, source: Source, wanted: Wanted | None = None, **governed: Any
) -> tuple[str, bool]:
    """Register a source as a new staged version, or as another copy of a known version.

    Args:
        source: as returned by `look`.
        wanted: its name in the catalogue; None: derived from its folder by `names.of_folder`.
        governed: licence, owner, tags and parent of a new version.

    Returns:
        The version's name, and True if anything changed.

    Raises:
        CatalogError: the name or the location belongs to other content; nothing was changed.
    """
    with catalog.write() as connection:
        return register_in(connection, source, wanted, governed)


def rebuild(
    catalog: Catalog, store: Store, endpoint: str | None
) -> tuple[list[tuple[str, bool]], list[str]]:
    """Register all finished sources under a root, using only their own files.

    All of them are staged, because states, licences and owners exist only in the catalogue.

    Returns:
        Results of `register` for the registered sources; error messages for the other sources.
    """
    taken, problems = [], []
    for name in sources_at(store):
        try:
            taken.append(register(catalog, look(store, endpoint, name)))
        except KeyError as error:  # a missing field of a manifest
            problems.append(f"{store.uri}/{name}: manifest.json has no field {error}")
        except (ValueError, TypeError, IndexMismatch, MissingKey) as error:
            problems.append(f"{store.uri}/{name}: {error}")
    return taken, problems


def register_in(
    connection: Connection, source: Source, wanted: Wanted | None, governed: Mapping[str, Any]
) -> tuple[str, bool]:
    """Do the work of `register` in an open write transaction."""
    content = source.columns["content_hash"]
    known = connection.execute(select(VERSION).where(VERSION.c.content_hash == content)).first()
    _check_place(connection, source, content)
    if known is None:
        name = wanted or Wanted(*of_folder(source.name))
        _add_version(connection, source, name, governed)
        _add_replica(connection, source, content)
        return str(name), True
    name = Wanted(known.dataset, known.number)
    if wanted not in (None, name):
        raise CatalogError(f"{source.root}/{source.name}: its content is {name} already")
    if governed:
        raise CatalogError(
            f"{name} is there already: change {listed(governed)} by `data catalog set`"
        )
    places = select(REPLICA).where(REPLICA.c.content_hash == content)
    for copy in connection.execute(places):
        if (copy.root, copy.endpoint) == (source.root, source.endpoint):
            if copy.name == source.name:
                return str(name), False
            raise CatalogError(
                f"{source.root}/{source.name}: {copy.name} under the same root holds this content "
                f"and is {name}; a run must know which of the two it reads"
            )
    _add_replica(connection, source, content)
    append(connection, {"replica": str(name), **source.place})
    return str(name), True


def _check_place(connection: Connection, source: Source, content: str) -> None:
    """Raise if the location is registered with other content: a finished source never changes."""
    same = [REPLICA.c[key] == value for key, value in source.place.items()]
    found = connection.execute(select(REPLICA.c.content_hash).where(*same)).scalar()
    if found not in (None, content):
        raise CatalogError(
            f"{source.root}/{source.name}: its content is {content[:12]}, it was registered with "
            f"{found[:12]}; a source that is finished never changes: restore it, or give the new "
            "content a folder of its own"
        )


def _add_version(
    connection: Connection, source: Source, name: Wanted, governed: Mapping[str, Any]
) -> None:
    assert name.number is not None
    same = (VERSION.c.dataset == name.dataset, VERSION.c.number == name.number)
    other = connection.execute(select(VERSION.c.content_hash).where(*same)).scalar()
    if other is not None:
        raise CatalogError(
            f"{name} is {other[:12]}, {source.root}/{source.name} holds "
            f"{source.columns['content_hash'][:12]}: give it another name, --as "
            f"{name.dataset}@NUMBER"
        )
    columns = source.columns | {"licence": None, "owner": None, "tags": [], **governed}
    columns |= {"report": None, "state": "staged", "revision": 1}
    check_descent(connection, str(name), columns["content_hash"], columns["parent"])
    values = {"dataset": name.dataset, "number": name.number, **columns}
    connection.execute(insert(VERSION).values(**values))
    changed = {key: [None, columns[key]] for key in AUDITED}
    what = {"version": str(name), "revision": 1, "change": changed}
    append(connection, what | {"replica": str(name), **source.place})


def check_descent(connection: Connection, name: str, content: str, parent: str | None) -> None:
    """Refuse a version that would be its own ancestor.

    Raises:
        CatalogError: the version would descend from itself.
    """
    seen = {content}
    while parent is not None:
        if parent in seen:
            raise CatalogError(f"{name} would descend from itself")
        seen.add(parent)
        query = select(VERSION.c.parent).where(VERSION.c.content_hash == parent)
        parent = connection.execute(query).scalar()


def _add_replica(connection: Connection, source: Source, content: str) -> None:
    values = {"content_hash": content, **source.place, "index_sha256": source.index_sha256}
    connection.execute(insert(REPLICA).values(**values))
