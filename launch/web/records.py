"""The catalogue as the page reads it, and the few changes that the page makes there."""

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from data_pipeline.catalog.audit import Entry, entries
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.redactions import change_hold
from data_pipeline.catalog.show import details, known_runs, lying_at, versions
from data_pipeline.catalog.states import FOLLOWING, promote
from data_pipeline.govern.holds import Hold


class AuditPage(NamedTuple):
    """Entries of the audit log, newest first; their total number; and the error of the chain."""

    entries: list[dict[str, Any]]
    number: int
    head: str
    problem: str | None


class Records:
    """An open catalogue; thread-safe.

    Args:
        catalog: a catalogue that this process may read.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def versions(self) -> list[dict[str, Any]]:
        """Return all versions, by name."""
        with self._catalog.read() as connection:
            return versions(connection)

    def details(self, name: str) -> dict[str, Any]:
        """Return a version with its relatives, replicas, runs and history.

        Raises:
            CatalogError, ValueError: no version has this name.
        """
        with self._catalog.read() as connection:
            return details(connection, name)

    def lying_at(self, root: str, endpoint: str) -> dict[str, dict[str, Any]]:
        """Return {folder: version} of the sources registered under a root."""
        with self._catalog.read() as connection:
            return lying_at(connection, root, endpoint)

    def run_folders(self) -> list[str]:
        """Return the sorted folders of the scanned runs."""
        with self._catalog.read() as connection:
            return known_runs(connection)

    def requests(self) -> list[dict[str, Any]]:
        """Return the audit entries about deletion requests, newest first."""
        with self._catalog.read() as connection:
            found = [_told(one) for one in entries(connection) if "request" in one.what]
        return found[::-1]

    def audit(self, before: int | None, count: int) -> AuditPage:
        """Return the entries before number `before`, after a check of their hashes.

        If the chain is broken, only entries before the break are returned.
        """
        kept: list[Entry] = []
        number, head, problem = 0, "", None
        with self._catalog.read() as connection:
            try:
                for entry in entries(connection):
                    number, head = entry.seq, entry.hash
                    if before is None or entry.seq < before:
                        kept.append(entry)
                        del kept[:-count]
            except CatalogError as error:
                problem = str(error)
        return AuditPage([_told(one) for one in kept[::-1]], number, head, problem)

    def may_become(self, state: str) -> tuple[str, ...]:
        """Return the states that a button on the page may set after a given state.

        Only a report of `data verify` sets verified, and only `data collect` sets deleted.
        """
        return tuple(one for one in FOLLOWING[state] if one not in ("verified", "deleted"))

    def promote(self, name: str, state: str, revision: int, by: str) -> list[tuple[str, str, str]]:
        """Move a version to another state, if it still has the given revision.

        Args:
            by: person for the audit log.

        Raises:
            CatalogError, Conflict: as for `states.promote`.
        """
        return promote(self._catalog, name, state, revision=revision, by=by)

    def change_hold(
        self, root: str, endpoint: str | None, change: Callable[[], Hold], what: str, by: str
    ) -> None:
        """Put or end a hold and record it in the audit log; see `redactions.change_hold`."""
        change_hold(self._catalog, root, endpoint, change, what, by)


def _told(entry: Entry) -> dict[str, Any]:
    return {**entry._asdict(), "what": _in_words(entry.what)}


def _in_words(what: Mapping[str, Any]) -> str:
    return json.dumps(what, ensure_ascii=False, sort_keys=True)
