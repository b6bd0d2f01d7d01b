"""Reads the catalogue as plain values for tables, pages and JSON."""

from typing import Any

from sqlalchemy import Connection, Row, select

from data_pipeline.catalog.audit import entries
from data_pipeline.catalog.lookup import unknown, version
from data_pipeline.catalog.names import name_of
from data_pipeline.catalog.tables import REPLICA, RUN, RUN_INPUT, VERSION


def versions(connection: Connection, dataset: str | None = None) -> list[dict[str, Any]]:
    """Return the versions of one or all datasets, sorted by name.

    Raises:
        CatalogError: there is no such dataset.
    """
    query = select(VERSION).order_by(VERSION.c.dataset, VERSION.c.number)
    if dataset is not None:
        query = query.where(VERSION.c.dataset == dataset)
    found = [_version(row) for row in connection.execute(query)]
    if dataset is not None and not found:
        raise unknown(connection, dataset)
    return found


def details(connection: Connection, name: str) -> dict[str, Any]:
    """Return a version with its replicas, parent, children, runs and history.

    Raises:
        CatalogError: there is no version of this name.
    """
    row = version(connection, name)
    found, content = _version(row), row.content_hash
    places = select(REPLICA.c.root, REPLICA.c.endpoint, REPLICA.c.name).where(
        REPLICA.c.content_hash == content
    )
    used = (
        select(
            RUN.c.folder, RUN.c.state, RUN_INPUT.c.name, RUN_INPUT.c.use, RUN_INPUT.c.steps,
            RUN_INPUT.c.first_step, RUN_INPUT.c.last_step, RUN_INPUT.c.tokens,
        )
        .join(RUN_INPUT, RUN_INPUT.c.folder == RUN.c.folder)
        .where(RUN_INPUT.c.content_hash == content)
    )  # fmt: skip
    children = select(VERSION.c.dataset, VERSION.c.number).where(VERSION.c.parent == content)
    said = [one for one in entries(connection) if found["version"] in _about(one.what)]
    return {
        **found,
        "parent": _named(connection, row.parent),
        "children": sorted(name_of(one) for one in connection.execute(children)),
        "provenance": row.provenance,
        "replicas": [
            one._asdict() for one in connection.execute(places.order_by("root", "endpoint"))
        ],
        "runs": [one._asdict() for one in connection.execute(used.order_by("folder", "name"))],
        "history": [{"at": e.at, "who": e.who, "what": _in_short(e.what)} for e in said],
    }


def lying_at(connection: Connection, root: str, endpoint: str) -> dict[str, dict[str, Any]]:
    """Return folder -> version for the sources registered under a root."""
    query = (
        select(REPLICA.c.name, *VERSION.c)
        .join(VERSION, VERSION.c.content_hash == REPLICA.c.content_hash)
        .where(REPLICA.c.root == root, REPLICA.c.endpoint == endpoint)
    )
    return {row.name: _version(row) for row in connection.execute(query)}


def known_runs(connection: Connection) -> list[str]:
    """Return the folders of the scanned runs, sorted."""
    return sorted(connection.execute(select(RUN.c.folder)).scalars())


def _version(row: Row[Any]) -> dict[str, Any]:
    left_out = ("dataset", "number", "provenance")
    values = {key: value for key, value in row._asdict().items() if key not in left_out}
    return {"version": name_of(row), **values}


def _about(what: dict[str, Any]) -> tuple[Any, Any]:
    return what.get("version"), what.get("replica")


def _in_short(what: dict[str, Any]) -> str:
    changes = [
        f"{key}: {'-' if old is None else old} -> {'-' if new is None else new}"
        for key, (old, new) in what.get("change", {}).items()
        if (old or new) and key not in ("content_hash", "tokenizer_hash")
    ]
    place = "/".join(what[key] for key in ("root", "name")) if "root" in what else None
    return ", ".join([*changes, *([f"lies at {place}"] if place else [])])


def _named(connection: Connection, content: str | None) -> str | None:
    """Return the version of a content, or its hash if it is not registered."""
    query = select(VERSION.c.dataset, VERSION.c.number).where(VERSION.c.content_hash == content)
    found = connection.execute(query).first()
    return name_of(found) if found else content
