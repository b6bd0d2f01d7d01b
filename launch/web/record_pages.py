"""Pages of rejected samples, quarantine, deletions, holds and the catalogue, with their forms."""

import os
from functools import partial
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from data_pipeline.govern.holds import end_hold, put_hold, read_holds
from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.store.open import MissingKey
from launch.web.auth import Role
from launch.web.fresh import Fresh
from launch.web.lines import UNREADABLE, begin_of, fields_of
from launch.web.site import checked_form, page, session_of, site_of, whole
from launch.web.steps import Steps

_ENTRIES = 100  # audit entries on a page
_LINES = 500  # shown lines of a run's quarantine
_BLOCK = 1 << 16  # bytes of the quarantine read at a time
_MOST = 16 << 20  # bytes of the quarantine read in total


def rejected(request: Request) -> Response:
    """Show the samples that the ingest of a source rejected, and the reasons."""
    corpus, given = site_of(request).corpus, request.query_params
    shown = corpus.source(request.path_params["name"])
    reason, key = given.get("reason", ""), given.get("key", "")[:200]
    after = whole(given.get("after", ""), "after") or 0
    found = shown.rejected.page(reason, key, after)
    asked = urlencode({"reason": reason, "key": key, "after": found.after})
    values = {"found": found, "reason": reason, "key": key, "further": asked}
    return page(request, "rejected.html", source=shown.name, **values)


def quarantined(request: Request) -> Response:
    """Show the samples that runs could not use, and the reasons."""
    site = site_of(request)
    folders = {str(folder) for folder in site.runs}
    if site.records is not None:
        folders |= set(site.records.run_folders())
    runs = [(folder, _quarantine_of(Path(folder))) for folder in sorted(folders)]
    return page(request, "quarantined.html", runs=runs, shown=_LINES)


def _quarantine_of(folder: Path) -> list[dict[str, str]] | None:
    """Return the last lines of a run's quarantine, or None if the run is not on this machine."""
    file = folder / "quarantine.jsonl"
    if not folder.is_dir():
        return None
    if not file.is_file():
        return []
    return [_quarantined(line) for line in last_lines(file, _LINES)]


def _quarantined(line: bytes) -> dict[str, str]:
    """Return the fields of a line, or a note that the line is unreadable."""
    names = ("step", "source", "key", "reason")
    told = f"{UNREADABLE}: {begin_of(line)}"
    return fields_of(line, names) or dict.fromkeys(names, "") | {"reason": told}


def last_lines(file: Path, count: int) -> list[bytes]:
    """Return the last complete lines of a file, read from its end.

    Args:
        count: most lines to return.
    """
    found = b""
    with file.open("rb") as opened:
        begin = opened.seek(0, os.SEEK_END)
        while begin and found.count(b"\n") <= count and len(found) < _MOST:
            end, begin = begin, max(0, begin - _BLOCK)
            opened.seek(begin)
            found = opened.read(end - begin) + found
    return found.split(b"\n")[1 if begin else 0 : -1][-count:]


def governance(request: Request) -> Response:
    """Show deletions and holds."""
    site = site_of(request)
    corpus = site.corpus
    redacted = [(one.name, one.num_redacted) for one in corpus.every() if one.num_redacted]
    return page(
        request,
        "governance.html",
        holds=read_holds(corpus.store, corpus.names),
        redacted=redacted,
        requests=None if site.records is None else site.records.requests(),
        tombstones=None if site.steps is None else _tombstones_of(site.steps),
        title="" if site.steps is None else site.steps.last.title,
    )


def _tombstones_of(steps: Fresh[Steps]) -> list[str]:
    """Return lines about the tombstones, or the reason why the steps cannot be planned."""
    try:
        return steps.now().tombstones()
    except (MissingKey, IndexMismatch, ValueError) as error:
        return [f"They cannot be planned: {error}"]


async def hold(request: Request) -> Response:
    """Put or end a hold."""
    name = request.path_params["name"]
    given = await checked_form(request, Role.CURATOR)
    ends = given.get("do") == "end"
    if ends and session_of(request).person.role < Role.ADMIN:
        raise HTTPException(403, "only an admin may end a hold")
    site, wanted = site_of(request), given.get("hold", "").strip()
    if not 1 <= len(wanted) <= 200:
        raise ValueError(f"hold={wanted[:40]!r}: expected a name of 1 to 200 characters")
    shown = site.corpus.source(name)
    act = end_hold if ends else put_hold
    store, by = shown.store, _by(request)

    change = partial(act, store, shown.name, wanted)
    if site.records is None:
        await run_in_threadpool(change)
    else:
        about = (store.uri, site.corpus.endpoint, change, "ended" if ends else "put", by)
        await run_in_threadpool(site.records.change_hold, *about)
    return RedirectResponse(f"/sources/{quote(shown.name, safe='')}", 303)


# The catalogue ----------------------------------------------------------------------------------


def versions(request: Request) -> Response:
    """Show all versions."""
    return page(request, "versions.html", rows=site_of(request).needs_records().versions())


def version(request: Request) -> Response:
    """Show one version with its lineage, replicas and runs."""
    site = site_of(request)
    records = site.needs_records()
    found = records.details(request.path_params["name"])
    here = [
        one["name"]
        for one in found["replicas"]
        if (one["root"], one["endpoint"]) == (site.corpus.store.uri, site.corpus.endpoint)
        and one["name"] in site.corpus.names
    ]
    may = records.may_become(found["state"])
    if session_of(request).person.role < Role.ADMIN:
        may = tuple(one for one in may if one not in _ADMINS)
    return page(request, "version.html", version=found, here=here, may_become=may)


def _by(request: Request) -> str:
    """Return the signed-in person as text for the audit log."""
    person = session_of(request).person
    return f"{person.name} ({person.role.name.lower()}, by the page)"


_ADMINS = ("archived",)
"""States that only an admin may set."""


async def change_state(request: Request) -> Response:
    """Move a version to another state, if its revision is still the one on the page."""
    given = await checked_form(request, Role.CURATOR)
    records, person = site_of(request).needs_records(), session_of(request).person
    state, revision = given.get("state", ""), whole(given.get("revision", ""), "revision")
    if state in _ADMINS and person.role < Role.ADMIN:
        raise HTTPException(403, f"only an admin may bring a version into the state {state}")
    if revision is None:
        raise ValueError("revision: expected that of the page")
    name = request.path_params["name"]
    await run_in_threadpool(records.promote, name, state, revision, _by(request))
    return RedirectResponse(f"/versions/{quote(name, safe='@')}", 303)


def audit(request: Request) -> Response:
    """Show the audit log, with the newest entries first."""
    records = site_of(request).needs_records()
    before = whole(request.query_params.get("before", ""), "before")
    found = records.audit(before, _ENTRIES)
    older = found.entries[-1]["seq"] if found.entries and found.entries[-1]["seq"] > 1 else None
    return page(request, "audit.html", found=found, older=older)
