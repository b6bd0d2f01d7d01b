"""Finds versions in the catalogue, and the folder of the version that a run requests."""

from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, select

from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.names import name_of, parse
from data_pipeline.catalog.tables import REPLICA, VERSION
from data_pipeline.index.manifest import expect, read_manifest
from data_pipeline.names import did_you_mean, listed
from data_pipeline.store.addresses import endpoint_of
from data_pipeline.store.open import Store

TRAINABLE = ("verified", "active", "deprecated")
"""States in which a run may request a version by name."""


class Resolved(NamedTuple):
    """Result of resolving a name: the version, its folder under the run's root, its state."""

    version: str
    name: str
    state: str


def version(connection: Connection, name: str) -> Row[Any]:
    """Return the row of a version, by a name such as captions@3 or captions@active.

    Raises:
        ValueError: no such version; the message lists the existing ones.
    """
    wanted = parse(name)
    found = connection.execute(
        select(VERSION).where(VERSION.c.dataset == wanted.dataset).order_by(VERSION.c.number)
    ).all()
    if not found:
        raise unknown(connection, wanted.dataset)
    for row in found:
        if wanted.number in (row.number, None) and (wanted.number or row.state == "active"):
            return row
    there = listed(f"{name_of(row)} ({row.state})" for row in found)
    raise CatalogError(f"{name}: there is no such version; there are {there}")


def unknown(connection: Connection, dataset: str) -> CatalogError:
    """Return the error for an unknown dataset."""
    known = connection.execute(select(VERSION.c.dataset).distinct().order_by("dataset"))
    hint = did_you_mean(dataset, [row.dataset for row in known])
    return CatalogError(f"the catalogue has no {dataset!r}; {hint}")


def resolve(catalog: Catalog, store: Store, endpoint: str | None, name: str) -> Resolved:
    """Return the folder under a store's root for a version's name.

    Args:
        catalog: read in one transaction.
        store: the run's store, at its root.
        endpoint: endpoint that the store was opened with.
        name: captions@3 or captions@active.

    Raises:
        CatalogError: no such version, its state forbids training, or it has no copy under this
            root.
        IndexMismatch: the folder's manifest does not match the version.
        StoreError: the manifest cannot be read.
    """
    with catalog.read() as connection:
        row = version(connection, name)
        query = select(REPLICA).where(REPLICA.c.content_hash == row.content_hash)
        replicas = connection.execute(query.order_by(REPLICA.c.root, REPLICA.c.endpoint)).all()
    told = name_of(row)
    if row.state not in TRAINABLE:
        raise CatalogError(
            f"{name}: {told} is {row.state}; a run may name versions that are {listed(TRAINABLE)}"
        )
    here = (store.uri, endpoint_of(store.uri, endpoint))
    for replica in replicas:
        if (replica.root, replica.endpoint) == here:
            found = read_manifest(store, replica.name)["content_hash"]
            expect(f"{store.uri}/{replica.name}", "content_hash", found, row.content_hash)
            return Resolved(told, replica.name, row.state)
    places = listed(" at ".join(filter(None, (r.root, r.endpoint))) for r in replicas)
    raise CatalogError(
        f"{name}: {told} does not lie under {' at '.join(filter(None, here))}; it lies under "
        f"{places}: set data.root and data.endpoint, or register a copy here"
    )


class Copy(NamedTuple):
    """A copy of a version: root and endpoint (or ""), its folder, and its content_hash."""

    version: str
    root: str
    endpoint: str
    folder: str
    content: str


def copies(catalog: Catalog, name: str) -> list[Copy]:
    """Return the copies of captions@3 or captions@active in any state, sorted.

    Raises:
        CatalogError: there is no such version, or the catalogue knows no copy of it.
    """
    with catalog.read() as connection:
        row = version(connection, name)
        query = select(REPLICA).where(REPLICA.c.content_hash == row.content_hash)
        found = connection.execute(query.order_by(REPLICA.c.root, REPLICA.c.endpoint)).all()
    told = name_of(row)
    if not found:
        raise CatalogError(f"{name}: {told} ({row.state}) lies nowhere that the catalogue knows")
    return [Copy(told, one.root, one.endpoint, one.name, row.content_hash) for one in found]
