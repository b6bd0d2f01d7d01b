"""Finds versions in the catalogue, and the folder of the one that a run asks for."""

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
"""States in which a version may be trained on by its name."""


class Resolved(NamedTuple):
    """What a name stands for: the version, the folder under the run's root, its state."""

    version: str
    name: str
    state: str


def version(connection: Connection, name: str) -> Row[Any]:
    """Return the row of captions@3, or of captions@active.

    Raises:
        ValueError: there is none; says which there are.
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
    """Return the error of a dataset that is not there."""
    known = connection.execute(select(VERSION.c.dataset).distinct().order_by("dataset"))
    hint = did_you_mean(dataset, [row.dataset for row in known])
    return CatalogError(f"the catalogue has no {dataset!r}; {hint}")


def resolve(catalog: Catalog, store: Store, endpoint: str | None, name: str) -> Resolved:
    """Return the folder under a store's root that a version's name stands for.

    Args:
        catalog: read once.
        store: the run's, at its root.
        endpoint: as it was opened with.
        name: captions@3 or captions@active.

    Raises:
        CatalogError: no such version, its state forbids it, or it does not lie under this root.
        IndexMismatch: the folder's manifest is not that of the version.
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
    """Where a version lies: root and endpoint ("" without one), its folder, and its content."""

    version: str
    root: str
    endpoint: str
    folder: str
    content: str


def copies(catalog: Catalog, name: str) -> list[Copy]:
    """Return where captions@3 or captions@active lies, whatever its state; sorted.

    Raises:
        CatalogError: there is no such version, or it lies nowhere.
    """
    with catalog.read() as connection:
        row = version(connection, name)
        query = select(REPLICA).where(REPLICA.c.content_hash == row.content_hash)
        found = connection.execute(query.order_by(REPLICA.c.root, REPLICA.c.endpoint)).all()
    told = name_of(row)
    if not found:
        raise CatalogError(f"{name}: {told} ({row.state}) lies nowhere that the catalogue knows")
    return [Copy(told, one.root, one.endpoint, one.name, row.content_hash) for one in found]
