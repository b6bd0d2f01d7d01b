"""States of a version, their transitions, and the conditions for each.

    staged -> verified -> active -> deprecated -> archived -> deleted

Backward transitions: a verified version may become staged, and a deprecated one active again. An
archived version becomes staged, so it must be verified again before training. A dataset has at most
one active version; the next version replaces it in one transaction, so that there is always one.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, Row, select

from data_pipeline.catalog.audit import canonical, change
from data_pipeline.catalog.engine import Catalog, CatalogError, Conflict
from data_pipeline.catalog.lookup import version
from data_pipeline.catalog.names import check_licence, name_of
from data_pipeline.catalog.register import check_descent
from data_pipeline.catalog.runs import unfinished_with
from data_pipeline.catalog.tables import STATES, VERSION
from data_pipeline.names import did_you_mean, listed

FOLLOWING: dict[str, tuple[str, ...]] = {
    "staged": ("verified", "archived"),
    "verified": ("active", "staged", "archived"),
    "active": ("deprecated",),
    "deprecated": ("active", "archived"),
    "archived": ("staged", "deleted"),
    "deleted": (),
}
"""State -> states that may follow; only `catalog.collect` sets "deleted", after removal."""


def promote(
    catalog: Catalog,
    name: str,
    to: str,
    *,
    report: Mapping[str, Any] | None = None,
    revision: int | None = None,
    by: str | None = None,
) -> list[tuple[str, str, str]]:
    """Bring a version into another state.

    Args:
        name: captions@3, or captions@active.
        to: one of `STATES`.
        report: of `data verify`, for "verified"; see `read_report`.
        revision: revision that the version must still have; None: any.
        by: person who sent the request to a server; the audit log names the server's user as well.

    Returns:
        (version, state before, state after) of the version; before it, that of the version it
        replaces.

    Raises:
        CatalogError: the transition is not allowed, or a condition is not met; nothing was changed.
        Conflict: the version has another revision.
    """
    if to not in STATES:
        raise CatalogError(f"state {to!r}: {did_you_mean(to, STATES)}")
    if report is not None and to != "verified":
        raise CatalogError(f"--report is for the state verified, not for {to}")
    done: list[tuple[str, str, str]] = []
    with catalog.write() as connection:
        row = version(connection, name)
        _check_revision(row, revision)
        _check_step(row, to)
        if to == "deleted":
            raise CatalogError(
                f"{name_of(row)}: a version is deleted when its bytes are, and by nothing else: "
                "kimi-pretrain data collect ROOT"
            )
        note: dict[str, Any] = {} if by is None else {"by": by}
        values: dict[str, Any] = {"state": to}
        if to == "verified":
            values["report"], note["report"] = _verified_by(row, report), report
        elif to == "staged":
            values["report"] = None
        elif to == "active":
            _check_released(row)
            done += _retire(connection, row, note)
        elif to == "archived":
            _check_unused(connection, row)
        change(connection, row, note, **values)
        done.append((name_of(row), row.state, to))
    return done


def set_fields(
    catalog: Catalog, name: str, values: Mapping[str, Any], revision: int | None = None
) -> str:
    """Set licence, owner, tags or parent of a version; return its name.

    Args:
        values: "licence" (SPDX), "owner", "tags" (a list), "parent" (another version's name); None
            removes licence, owner or parent.

    Raises:
        CatalogError: the version is deleted, or is active and would lose a required field.
        ValueError: the licence is not SPDX.
        Conflict: as in `promote`.
    """
    with catalog.write() as connection:
        row = version(connection, name)
        _check_revision(row, revision)
        if row.state == "deleted":
            raise CatalogError(f"{name_of(row)} is deleted: nothing of it changes any more")
        given = dict(values)
        if given.get("licence") is not None:
            given["licence"] = check_licence(given["licence"])
        if given.get("parent") is not None:
            given["parent"] = version(connection, given["parent"]).content_hash
            check_descent(connection, name_of(row), row.content_hash, given["parent"])
        for key in ("licence", "owner"):
            if row.state == "active" and key in given and not given[key]:
                raise CatalogError(f"{name_of(row)} is active, and so must have a {key}")
        if given := {key: value for key, value in given.items() if getattr(row, key) != value}:
            change(connection, row, {}, **given)
        return name_of(row)


def read_report(file: Path) -> dict[str, Any]:
    """Return the report that `data verify --json` printed, from the last line of a file.

    Raises:
        ValueError: the file has no report.
    """
    lines = file.read_text().splitlines()
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        found = None
    sources = found.get("sources") if isinstance(found, dict) else None
    sound = isinstance(sources, dict) and all(isinstance(one, dict) for one in sources.values())
    if not isinstance(found, dict) or not sound:
        raise ValueError(f"{file}: expected what `kimi-pretrain data verify --json` prints")
    return found


def _check_revision(row: Row[Any], revision: int | None) -> None:
    if revision not in (None, row.revision):
        raise Conflict(
            f"{name_of(row)} has revision {row.revision} ({row.state}), not {revision}; somebody "
            "changed it: look at it again"
        )


def _check_step(row: Row[Any], to: str) -> None:
    if to not in FOLLOWING[row.state]:
        raise CatalogError(
            f"{name_of(row)} is {row.state} and cannot become {to}: what may follow is "
            f"{listed(FOLLOWING[row.state])}"
        )


def _verified_by(row: Row[Any], report: Mapping[str, Any] | None) -> str:
    """Return the SHA-256 of a report that finds the whole version valid.

    Raises:
        CatalogError: names the part that the report lacks.
    """
    if report is None:
        raise CatalogError(
            f"{name_of(row)}: give --report FILE with what `kimi-pretrain data verify --json` "
            "printed"
        )
    about = [
        (name, one)
        for name, one in sorted(report["sources"].items())
        if one.get("content_hash") == row.content_hash
    ]
    if not about:
        raise CatalogError(
            f"{name_of(row)}: the report is of {listed(sorted(report['sources']))}, and of none "
            f"with content {row.content_hash[:12]}"
        )
    for name, one in about:
        if one.get("problems") != {}:
            raise CatalogError(f"{name_of(row)}: the report finds problems in {name}")
        if one.get("sample_share") != 1:
            raise CatalogError(
                f"{name_of(row)}: the report looked at {one.get('sample_share')} of {name}; verify "
                "all of it"
            )
        if not one.get("tokens_counted"):
            raise CatalogError(
                f"{name_of(row)}: the report did not count the tokens of {name}; verify it with "
                "--tokenizer FILE"
            )
    return hashlib.sha256(canonical(report).encode()).hexdigest()


def _check_released(row: Row[Any]) -> None:
    missing = [key for key in ("licence", "owner") if not getattr(row, key)]
    if missing:
        raise CatalogError(
            f"{name_of(row)}: {' and '.join(missing)} must be set before it is active: "
            f"kimi-pretrain data catalog set {name_of(row)} "
            + " ".join(f"--{key} ..." for key in missing)
        )


def _retire(
    connection: Connection, row: Row[Any], note: Mapping[str, Any]
) -> list[tuple[str, str, str]]:
    """Deprecate the active version of the dataset, if there is one."""
    same = (VERSION.c.dataset == row.dataset, VERSION.c.state == "active")
    found = []
    for other in connection.execute(select(VERSION).where(*same)).all():
        told = {**note, "replaced_by": name_of(row)}
        change(connection, other, told, state="deprecated")
        found.append((name_of(other), "active", "deprecated"))
    return found


def _check_unused(connection: Connection, row: Row[Any]) -> None:
    if runs := unfinished_with(connection, row.content_hash):
        raise CatalogError(
            f"{name_of(row)} cannot be archived: unfinished runs use it: {listed(runs)} (if they "
            "are over: `data catalog scan` reads how they stand, `data catalog forget` drops one)"
        )


def delete_version(connection: Connection, row: Row[Any], plan: str) -> bool:
    """Record that the bytes of an archived version are gone; return True if it is deleted now.

    Only `catalog.collect` calls this, after it has removed the bytes. The version stays archived
    while a version that is not deleted refers to its shards, because a copy elsewhere may have
    them.

    Args:
        row: the version, as read.
        plan: hash of the collection plan that removed it.
    """
    mine = {row.content_hash, (row.provenance or {}).get("made_as", row.content_hash)}
    # Use the provenance, because people may set the parent.
    for other in connection.execute(select(VERSION).where(VERSION.c.state != "deleted")):
        made_of = other.provenance or {}
        holds = made_of.get("kind") in ("append", "reindex") and made_of.get("parent") in mine
        if holds and other.content_hash not in mine:
            return False
    change(connection, row, {"collected": plan}, state="deleted")
    return True
