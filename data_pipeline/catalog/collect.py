"""Catalogue side of garbage collection (`govern.collect`): versions that may go, and removals.

A version may be removed from a root after it has been archived for long enough. The removal has two
steps, so that an interrupted collection can be finished and the catalogue stays correct. Before the
first byte is removed, the replica's row is deleted, with the plan's hash in the audit log. After
the last byte of the last copy is removed, the version's state becomes "deleted"; nothing else leads
to this state. If a source stays or comes back, its replica is restored.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, Row, delete, insert, select

from data_pipeline.catalog.audit import append, entries
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.lookup import version
from data_pipeline.catalog.names import name_of
from data_pipeline.catalog.runs import unfinished_with
from data_pipeline.catalog.states import delete_version, promote
from data_pipeline.catalog.tables import REPLICA, RUN, RUN_INPUT, VERSION
from data_pipeline.govern.collect_plan import Retired, Thing

GOING = ("archived", "deleted")
"""States of versions whose bytes may be removed."""

Needs = Callable[[str], str | None]
"""Folder of a finished run -> why it still needs its sources, or None if it does not."""


Runs = Sequence[tuple[str, Sequence[Mapping[str, Any]]]]


class Ledger:
    """`govern.collect_plan.Records` of a catalogue, for one root.

    Args:
        catalog: open.
        root, endpoint: as in the table of replicas.
        keep_archived_days: minimum time that a version stays archived before its removal.
        now: current time, UTC.
        needs: called for the finished runs that `scan` recorded.
        runs: returns (folder, sources.json) of further runs, which need the sources they list.
    """

    def __init__(
        self,
        catalog: Catalog,
        root: str,
        endpoint: str,
        keep_archived_days: float,
        now: datetime,
        needs: Needs,
        runs: Callable[[], Runs] = tuple,
    ) -> None:
        self._catalog, self._place = catalog, (root, endpoint)
        self._keep, self._now, self._needs = keep_archived_days, now, needs
        self._read_runs, self._runs = runs, runs()

    def look_again(self) -> None:
        """See `govern.collect_plan.Records`."""
        self._runs = self._read_runs()

    def retired(self) -> dict[str, Retired]:
        """See `govern.collect_plan.Records`."""
        found: dict[str, Retired] = {}
        with self._catalog.read() as connection:
            since = _since(connection)
            for row in _replicas(connection, *self._place):
                at = since.get(name_of(row), ("", ""))[1]
                if row.state == "archived" and _days(at, self._now) < self._keep:
                    continue
                if row.state in GOING:
                    why = f"{name_of(row)} is {row.state} since {at}"
                    found[row.folder] = Retired(name_of(row), row.content_hash, why)
        return found

    def user(self, name: str, contents: frozenset[str]) -> str | None:
        """See `govern.collect_plan.Records`; a run also counts if it used the folder's name."""
        for folder, sources in self._runs:
            for one in sources:
                if one["name"] == name or {one["content_hash"], one.get("made_as")} & contents:
                    return f"run {folder} uses it"
        mine = (RUN_INPUT.c.name == name) | RUN_INPUT.c.content_hash.in_(contents)
        query = select(RUN).join(RUN_INPUT, RUN_INPUT.c.folder == RUN.c.folder).where(mine)
        with self._catalog.read() as connection:
            runs = connection.execute(query.distinct().order_by(RUN.c.folder)).all()
        for run in runs:
            if run.state != "finished":
                return (
                    f"run {run.folder} ({run.state}) uses it; if it will never go on: "
                    f"kimi-pretrain data catalog forget {run.folder}"
                )
            if (reason := self._needs(run.folder)) is not None:
                return f"run {run.folder} {reason}"
        return None

    def has_facts(self, content: str) -> bool:
        """See `govern.collect_plan.Records`."""
        query = select(VERSION.c.state).where(VERSION.c.content_hash == content)
        with self._catalog.read() as connection:
            return connection.execute(query).scalar() not in (None, *GOING)

    def taken(self, plan: str) -> dict[str, str]:
        """See `govern.collect_plan.Records`; omits sources registered or restored since."""
        with self._catalog.read() as connection:
            there = {row.folder for row in _replicas(connection, *self._place)}
            found = {
                entry.what["name"]: entry.what["content"]
                for entry in entries(connection)
                if entry.what.get("collected") == plan and "replica_gone" in entry.what
            }
            gone = select(VERSION.c.content_hash).where(VERSION.c.state.in_(GOING))
            going = {*connection.execute(gone).scalars()}
        return {
            name: content
            for name, content in found.items()
            if name not in there and content in going
        }

    def take(self, plan: str, thing: Thing) -> None:
        """See `govern.collect_plan.Records`."""
        with self._catalog.write() as connection:
            place = dict(zip(("root", "endpoint", "name"), (*self._place, thing.name)))
            query = [REPLICA.c[key] == value for key, value in place.items()]
            there = connection.execute(select(REPLICA.c.content_hash).where(*query)).scalar()
            if there is None and self._was_taken(connection, plan, thing):
                return
            if there != thing.content:
                raise CatalogError(f"{thing.version} does not lie there any more")
            row = version(connection, thing.version)
            if row.state not in GOING:
                raise CatalogError(f"{thing.version} is {row.state} by now")
            if runs := unfinished_with(connection, row.content_hash):
                raise CatalogError(f"unfinished run {runs[0]} uses it")
            connection.execute(delete(REPLICA).where(*query))
            what = {"replica_gone": name_of(row), **place}
            append(connection, what | {"collected": plan, "content": thing.content})

    def give_back(self, name: str, content: str, index_sha256: str) -> None:
        """See `govern.collect_plan.Records`."""
        give_back(self._catalog, *self._place, {name: (content, index_sha256)})

    def _was_taken(self, connection: Connection, plan: str, thing: Thing) -> bool:
        wanted = (plan, thing.name, thing.content)
        return any(
            tuple(entry.what.get(key) for key in ("collected", "name", "content")) == wanted
            for entry in entries(connection)
        )

    def note(self, plan: str, thing: Thing, kept: Sequence[tuple[str, str]]) -> None:
        """See `govern.collect_plan.Records`."""
        root, endpoint = self._place
        told = {"collected": plan, "kind": thing.kind, "folder": thing.name, "bytes": thing.size}
        told |= {"in": root, "endpoint": endpoint, "objects": [spot.key for spot in thing.spots]}
        with self._catalog.write() as connection:
            append(connection, told | {"kept": [list(one) for one in kept]})
            if thing.kind == "source" and not kept:
                while self._delete(connection, plan):
                    pass

    def _delete(self, connection: Connection, plan: str) -> bool:
        """Mark versions as deleted whose last copy the plan removed; return True if there are any.

        A derived version may be recorded after its parent, so every call checks all versions of the
        plan.
        """
        mine = [one.what for one in entries(connection) if one.what.get("collected") == plan]
        gone = {one["folder"] for one in mine if one.get("kind") == "source" and not one["kept"]}
        contents = {one["content"] for one in mine if "replica_gone" in one and one["name"] in gone}
        query = select(VERSION).where(
            VERSION.c.state == "archived",
            VERSION.c.content_hash.in_(contents),
            VERSION.c.content_hash.not_in(select(REPLICA.c.content_hash)),
        )
        rows = connection.execute(query).all()
        return any([delete_version(connection, row, plan) for row in rows])


def give_back(
    catalog: Catalog, root: str, endpoint: str, sources: Mapping[str, tuple[str, str]]
) -> list[tuple[str, str]]:
    """Restore the replicas of collected sources that are in their folders again.

    The versions keep their state: archived and deleted versions may be collected again.

    Args:
        root, endpoint: as in the table of replicas.
        sources: folder -> content_hash and index_sha256 of its manifest; skips sources that no
            collection removed there or that the catalogue already lists there.

    Returns:
        (version, folder) of each restored replica.
    """
    wanted = {(folder, content) for folder, (content, _) in sources.items()}
    if not let_go(catalog, root, endpoint) & wanted:  # users without write access stop here
        return []
    found: list[tuple[str, str]] = []
    with catalog.write() as connection:
        for folder, content in sorted(_let_go(connection, root, endpoint) & wanted):
            known = select(VERSION).where(VERSION.c.content_hash == content)
            name = name_of(connection.execute(known).one())
            place = {"root": root, "endpoint": endpoint, "name": folder}
            values = {"content_hash": content, "index_sha256": sources[folder][1], **place}
            connection.execute(insert(REPLICA).values(**values))
            append(connection, {"replica": name, **place, "came_back": content})
            found.append((name, folder))
    return found


def let_go(catalog: Catalog, root: str, endpoint: str) -> set[tuple[str, str]]:
    """Return (folder, content) of sources that were collected at a root and not restored."""
    with catalog.read() as connection:
        return _let_go(connection, root, endpoint)


def _let_go(connection: Connection, root: str, endpoint: str) -> set[tuple[str, str]]:
    told = [one.what for one in entries(connection)]
    gone = {
        (one["name"], one["content"])
        for one in told
        if "collected" in one and "replica_gone" in one
        if (one["root"], one["endpoint"]) == (root, endpoint)
    }
    there = _replicas(connection, root, endpoint)
    folders, contents = ({getattr(row, key) for row in there} for key in ("folder", "content_hash"))
    return {one for one in gone if one[0] not in folders and one[1] not in contents}


def to_archive(
    catalog: Catalog, root: str, endpoint: str, days: float, now: datetime
) -> list[tuple[str, int, str]]:
    """Return (version, revision, reason) of versions at a root deprecated for at least `days`."""
    with catalog.read() as connection:
        since = _since(connection)
        return [
            (name_of(row), row.revision, f"deprecated since {since[name_of(row)][1]}")
            for row in _replicas(connection, root, endpoint)
            if row.state == "deprecated" and _days(since[name_of(row)][1], now) >= days
        ]


def archive(catalog: Catalog, wanted: Sequence[tuple[str, int, str]]) -> list[tuple[str, str]]:
    """Archive versions found by `to_archive`; return (version, reason) of refused ones.

    Skips versions that an earlier call archived.
    """
    refused: list[tuple[str, str]] = []
    for name, revision, _ in wanted:
        with catalog.read() as connection:
            if version(connection, name).state in GOING:
                continue
        try:
            promote(catalog, name, "archived", revision=revision)
        except CatalogError as error:
            refused.append((name, str(error)))
    return refused


def note_plan(catalog: Catalog, plan: str, about: Mapping[str, Any]) -> None:
    """Record in the audit log that a plan was made."""
    with catalog.write() as connection:
        append(connection, {"collection_planned": plan, **about})


def _replicas(connection: Connection, root: str, endpoint: str) -> Sequence[Row[Any]]:
    """Return the versions at a root in order of their folders; adds the column `folder`."""
    query = (
        select(VERSION, REPLICA.c.name.label("folder"))
        .join(REPLICA, REPLICA.c.content_hash == VERSION.c.content_hash)
        .where(REPLICA.c.root == root, REPLICA.c.endpoint == endpoint)
    )
    return connection.execute(query.order_by(REPLICA.c.name)).all()


def _since(connection: Connection) -> dict[str, tuple[str, str]]:
    """Return version -> its state and the time it entered this state, from the audit log."""
    found: dict[str, tuple[str, str]] = {}
    for entry in entries(connection):
        state = entry.what.get("change", {}).get("state")
        if state and (name := entry.what.get("version")):
            found[name] = (state[1], entry.at)
    return found


def _days(at: str, now: datetime) -> float:
    """Return the days since a time in the audit log (UTC)."""
    then = datetime.fromisoformat(at) if at else now
    return (now - then.replace(tzinfo=then.tzinfo or UTC)) / timedelta(days=1)
