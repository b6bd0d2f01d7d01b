"""The pages: what each address shows. Who may ask for it was decided before (`auth.Gate`).

Handlers are plain functions and run in threads: what they ask (facts, indices, stores, the
catalogue) waits for disks and networks. A page and the part of it that htmx asks for have one
address; the answer says which page's address the browser is to show.
"""

import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

from anyio import to_thread
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from data_pipeline.govern.holds import end_hold, put_hold, read_holds
from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.inspect.find import HOLDS, STRETCH, Wanted, count, find, longest, number_of
from data_pipeline.store.open import MissingKey, StoreError
from launch.local.user_errors import user_message
from launch.pages import html
from launch.pages.pictures import overlay
from launch.pages.samples_page import Medium, StoredSample, samples_body
from launch.web.auth import Doorkeeper, Gate, Role, Session
from launch.web.corpus import Corpus, NotHere
from launch.web.media import Media, file_answer
from launch.web.records import Records
from launch.web.statistics import Statistics
from launch.web.steps import MOST_EPOCHS, MOST_ROWS, MOST_STEPS, Steps

HERE = Path(__file__).parent
PAGE = 60  # samples that a page shows at first, and each time it is scrolled to its end
_LARGE = 896  # pixels of the longer side of a sample's pictures
_WORDS = 280  # characters of a text in the grid
_ENTRIES = 100  # of the audit, on a page
_LINES = 500  # of a run's quarantine
_THREADS = 12
_FORM = 16 << 10  # bytes of a form


@dataclass
class Site:
    """What there is to show, and to whom.

    Attributes:
        corpus: the sources.
        media: their pictures.
        statistics: counts them.
        door: knows the sessions.
        hosts: names that the server goes by.
        cookie: name of the session's cookie.
        secure: browsers reach it by https alone.
        records: the catalogue, if there is one.
        steps: of a configuration or a run, if one was given.
        runs: folders of runs, beside those that the catalogue knows.
    """

    corpus: Corpus
    media: Media
    statistics: Statistics
    door: Doorkeeper
    hosts: frozenset[str]
    cookie: str
    secure: bool = False
    records: Records | None = None
    steps: Steps | None = None
    runs: tuple[Path, ...] = ()

    def needs_records(self) -> Records:
        """Return the catalogue.

        Raises:
            NotHere: this server was started without one.
        """
        if self.records is None:
            raise NotHere("there is no catalogue here: start the server with --catalog")
        return self.records

    def needs_steps(self) -> Steps:
        """Return the steps.

        Raises:
            NotHere: this server was started without a configuration.
        """
        if self.steps is None:
            raise NotHere("there are no steps here: start the server with --config or --run")
        return self.steps


def application(site: Site) -> Gate:
    """Return the server's application, behind its gate: answers to faults pass it, too."""
    app = Starlette(
        routes=_routes(),
        exception_handlers={
            HTTPException: _told_http,
            ValueError: _told,
            OSError: _told,
            StoreError: _told,
            IndexMismatch: _told,
            Exception: _fault,
        },
        lifespan=_lifespan,
    )
    app.state.site = site
    app.state.templates = templates()
    return Gate(app, site.door, site.hosts, site.cookie)


@asynccontextmanager
async def _lifespan(app: Starlette) -> AsyncIterator[None]:
    to_thread.current_default_thread_limiter().total_tokens = _THREADS
    yield
    site: Site = app.state.site
    if site.steps is not None:
        site.steps.close()


def templates() -> Environment:
    """Return the templates: whatever they are given is escaped."""
    found = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters |= {
        "amount": html.amount,
        "num_bytes": html.num_bytes,
        "percent": html.percent,
        "part": partial(quote, safe=""),
        "json": partial(json.dumps, indent=1, ensure_ascii=False),
    }
    return found


# What every page has -----------------------------------------------------------------------------


def _site(request: Request) -> Site:
    return request.app.state.site


def _session(request: Request) -> Session:
    found = request.scope["session"]
    assert found is not None, "the gate lets nobody else through"
    return found


def _page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page made by a template."""
    session: Session | None = request.scope.get("session")
    site = _site(request)
    text = request.app.state.templates.get_template(template).render(
        person=session.person if session else None,
        form=session.form if session else "",
        may_curate=session is not None and session.person.role >= Role.CURATOR,
        may_administer=session is not None and session.person.role >= Role.ADMIN,
        has_records=site.records is not None,
        has_steps=site.steps is not None,
        root=site.corpus.store.uri,
        **values,
    )
    return HTMLResponse(text, status)


def _body(parts: Iterable[str]) -> Markup:
    """Return HTML of `launch.pages`, which has escaped what came from data."""
    return Markup("\n".join(parts))


def _number(request: Request, name: str, default: int, least: int, most: int) -> int:
    given = _whole(request.query_params.get(name, ""), name)
    value = default if given is None else given
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: expected {least:,} to {most:,}")
    return value


def _whole(text: str, name: str) -> int | None:
    text = text.strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError(f"{name}={text[:40]!r}: expected a whole number")
    return int(text)


# What goes wrong ---------------------------------------------------------------------------------


def _told(request: Request, error: Exception) -> Response:
    """Answer with one line that says what is wrong."""
    message = user_message(error)
    if message is None:
        raise error
    missing = isinstance(error, NotHere | MissingKey)
    behind = isinstance(error, StoreError | IndexMismatch | OSError) and not missing
    return _wrong(request, message, 404 if missing else 502 if behind else 400)


def _told_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return _wrong(request, f"{error.status_code}: {error.detail}", error.status_code)


def _fault(request: Request, error: Exception) -> Response:
    """Answer without a word of the error, which the server's log has."""
    return _wrong(request, "this server has a fault; its log says which", 500)


def _wrong(request: Request, message: str, status: int) -> Response:
    if "hx-request" in request.headers:
        escaped = html.text(message)
        return HTMLResponse(f'<p class="wrong" role="alert">{escaped}</p>', status)
    return _page(request, "error.html", status, message=message)


# Coming and going --------------------------------------------------------------------------------


def sign_in(request: Request) -> Response:
    """Exchange the token of an address for a session; without one, ask for it."""
    token = request.query_params.get("token", "")
    if not token or request.method == "HEAD":
        return _page(request, "login.html", wrong=False)
    return _entered(request, token)


async def sign_in_by_form(request: Request) -> Response:
    """Exchange the token of a form."""
    return _entered(request, (await _fields(request)).get("token", ""))


def _entered(request: Request, token: str) -> Response:
    site = _site(request)
    secret = site.door.enter(token)
    if secret is None:
        return _page(request, "login.html", 401, wrong=True)
    # No redirect: a browser that came from another site would not send the cookie along with it.
    answer = HTMLResponse(request.app.state.templates.get_template("entered.html").render())
    answer.set_cookie(
        site.cookie, secret, httponly=True, samesite="strict", secure=site.secure, path="/"
    )
    return answer


async def sign_out(request: Request) -> Response:
    """End the session."""
    await _checked_form(request, Role.VIEWER)
    site = _site(request)
    site.door.leave(request.scope["secret"])
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(site.cookie, path="/", httponly=True, samesite="strict")
    return answer


async def _fields(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: it is none, or too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "expected a form")
    body = b""
    async for piece in request.stream():
        body += piece
        if len(body) > _FORM:
            raise HTTPException(413, f"a form of more than {_FORM:,} bytes")
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


async def _checked_form(request: Request, role: Role) -> dict[str, str]:
    """Return the fields of one of our own forms, of a person who may send it.

    Raises:
        HTTPException: it is not ours, or not for this person.
    """
    given, session = await _fields(request), _session(request)
    if not hmac.compare_digest(given.get("form", "").encode(), session.form.encode()):
        raise HTTPException(403, "this form is of another session: load the page again")
    if session.person.role < role:
        raise HTTPException(403, f"only a {role.name.lower()} may do this")
    return given


# Sources -----------------------------------------------------------------------------------------


def sources(request: Request) -> Response:
    """All sources."""
    site = _site(request)
    corpus, known = site.corpus, {}
    if site.records is not None:
        known = site.records.lying_at(corpus.store.uri, corpus.endpoint)
    rows = [
        {
            "name": name,
            **{key: source.manifest[key] for key in ("category", "samples", "items")},
            "shards": len(source.manifest["shards"]),
            "bytes": sum(shard["size"] for shard in source.manifest["shards"]),
            "tokenizer": source.manifest["tokenizer"]["name"],
            "redacted": source.num_redacted,
            "version": known.get(name),
            "same": known.get(name, {}).get("content_hash") == source.manifest["content_hash"],
        }
        for name, source in corpus.sources.items()
    ]
    return _page(request, "sources.html", rows=rows)


def source(request: Request) -> Response:
    """One source."""
    site = _site(request)
    shown = site.corpus.source(request.path_params["name"])
    known = None
    if site.records is not None:
        places = site.records.lying_at(site.corpus.store.uri, site.corpus.endpoint)
        known = places.get(shown.name)
    return _page(
        request,
        "source.html",
        source=shown,
        manifest=shown.manifest,
        provenance=shown.provenance(),
        version=known,
        holds=read_holds(site.corpus.store, [shown.name]),
        trained=site.steps is not None
        and site.steps.knows(shown.name, shown.manifest["content_hash"]),
    )


async def hold(request: Request) -> Response:
    """Put or end a hold."""
    name = request.path_params["name"]
    given = await _checked_form(request, Role.CURATOR)
    ends = given.get("do") == "end"
    if ends and _session(request).person.role < Role.ADMIN:
        raise HTTPException(403, "only an admin may end a hold")
    site, wanted = _site(request), given.get("hold", "").strip()
    if not 1 <= len(wanted) <= 200:
        raise ValueError(f"hold={wanted[:40]!r}: expected a name of 1 to 200 characters")
    shown = site.corpus.source(name)
    act = end_hold if ends else put_hold
    await run_in_threadpool(act, site.corpus.store, shown.name, wanted)
    return RedirectResponse(f"/sources/{quote(shown.name, safe='')}", 303)


# Samples -----------------------------------------------------------------------------------------

_NUMBERS = tuple(one.name for one in fields(Wanted) if one.name not in ("key", "holds"))


@dataclass(frozen=True)
class Asked:
    """What a page of samples was asked for."""

    source: str
    category: str
    order: str
    wanted: Wanted

    @property
    def query(self) -> str:
        """Return it as part of an address, in one form."""
        given = {"source": self.source, "category": self.category, **self.wanted.asks}
        if self.order != "stored":
            given["order"] = self.order
        return urlencode({key: value for key, value in given.items() if value != ""})

    @property
    def values(self) -> dict[str, Any]:
        """Return what stands in the fields of the form."""
        empty = dict.fromkeys((one.name for one in fields(Wanted)), "")
        chosen = {"source": self.source, "category": self.category, "order": self.order}
        return empty | self.wanted.asks | chosen


def _asked(request: Request) -> Asked:
    given = request.query_params
    order = given.get("order", "stored") or "stored"
    if order not in ("stored", "longest"):
        raise ValueError(f"order={order[:40]!r}: expected stored or longest")
    numbers = {name: _whole(given.get(name, ""), name) for name in _NUMBERS}
    key, holds = given.get("key", "")[:200], given.get("holds", "")
    if holds not in HOLDS:
        raise ValueError(f"holds={holds[:40]!r}: expected one of {', '.join(HOLDS)}")
    wanted = Wanted(key=key, holds=holds, **numbers)
    return Asked(given.get("source", ""), given.get("category", ""), order, wanted)


def samples(request: Request) -> Response:
    """Samples as a grid: the page, the grid alone after a filter, or what follows on it."""
    site, asked = _site(request), _asked(request)
    names = site.corpus.chosen(asked.source, asked.category)
    after = request.query_params.get("after", "")
    cards, following = _cards(site.corpus, asked, names, after)
    values: dict[str, Any] = {"cards": cards, "following": following, "query": asked.query}
    address = f"/samples?{asked.query}" if asked.query else "/samples"
    if "hx-request" not in request.headers or "hx-history-restore-request" in request.headers:
        answer = _page(
            request,
            "samples.html",
            **values,
            values=asked.values,
            names=list(site.corpus.sources),
            categories=site.corpus.categories,
            holds=[name for name in HOLDS if name],
        )
    elif after:
        answer = _page(request, "cards.html", **values)
    else:
        answer = _page(request, "grid.html", **values)
        answer.headers["HX-Push-Url"] = address
    answer.headers["Vary"] = "HX-Request"
    return answer


def _cards(
    corpus: Corpus, asked: Asked, names: Sequence[str], after: str
) -> tuple[list[tuple[str, Any]], str | None]:
    """Return samples with their sources, and where to go on: "SOURCE:NUMBER"."""
    if asked.order == "longest":
        found = [
            (name, one) for name in names for one in longest(corpus.facts(name), asked.wanted, PAGE)
        ]
        return sorted(found, key=lambda one: -one[1].tokens)[:PAGE], None
    left, first = list(names), 0
    if after:
        name, _, number = after.rpartition(":")
        if name not in left or (place := _whole(number, "after")) is None:
            raise ValueError(f"after={after[:80]!r}: expected SOURCE:NUMBER")
        left, first = left[left.index(name) :], place
    cards: list[tuple[str, Any]] = []
    looked = 0
    while left and len(cards) < PAGE and looked < STRETCH:
        name, total = left[0], corpus.source(left[0]).cut.num_samples
        page = find(corpus.facts(name), asked.wanted, first, PAGE - len(cards))
        cards += [(name, one) for one in page.samples]
        looked += (total if page.after is None else page.after) - first
        if page.after is not None:
            first = page.after
        else:
            left, first = left[1:], 0
    return cards, f"{left[0]}:{first}" if left else None


def how_many(request: Request) -> Response:
    """How many samples are as wanted."""
    site, asked = _site(request), _asked(request)
    names = site.corpus.chosen(asked.source, asked.category)
    found = sum(count(site.corpus.facts(name), asked.wanted) for name in names)
    total = sum(site.corpus.sources[name].cut.num_samples for name in names)
    return HTMLResponse(f"{found:,} of {total:,} samples")


def words(request: Request) -> Response:
    """The first words of a sample."""
    shown = _site(request).corpus.source(request.path_params["name"])
    document = shown.document(request.path_params["number"])
    texts = (
        (one.get("texts") or [one["text"]])[0]
        for one in document["segments"]
        if one["kind"] == "text"
    )
    return HTMLResponse(html.text(" ".join(texts)[:_WORDS]))


def sample(request: Request) -> Response:
    """One sample: its texts, its media with regions over them, what is known of it."""
    site, number = _site(request), request.path_params["number"]
    shown = site.corpus.source(request.path_params["name"])
    index, first = shown.around(number)
    stored = StoredSample(number - first, shown.document(number), before=first)

    def show(_: StoredSample, medium: Medium) -> str:
        return _shown_medium(shown.name, number, medium)

    return _page(
        request,
        "sample.html",
        source=shown.name,
        number=number,
        key=index.key_of(number - first),
        last=shown.cut.num_samples - 1,
        body=_body(samples_body(index, [stored], show)),
        trained=site.steps is not None
        and site.steps.knows(shown.name, shown.manifest["content_hash"]),
    )


def _shown_medium(source: str, sample: int, medium: Medium) -> str:
    """Return a medium as the browser shows the stored file itself."""
    href = f"/media/{quote(source, safe='')}/{sample}/{quote(medium.name, safe='')}"
    if medium.name.endswith(".mp4"):
        return f'<video controls muted preload="metadata" src="{html.text(href)}"></video>'
    return overlay(href, medium.size, medium.size, medium.shapes, _LARGE)


def by_key(request: Request) -> Response:
    """Go to a sample by its key."""
    corpus, name = _site(request).corpus, request.path_params["name"]
    key = request.path_params["key"]
    number = number_of(corpus.facts(name), key)
    if number is None:
        raise NotHere(f"source {name!r}: no sample {key!r}")
    return RedirectResponse(f"/sources/{quote(name, safe='')}/samples/{number}", 303)


def medium(request: Request) -> Response:
    """A media file, or a part of it."""
    site, at = _site(request), request.path_params
    return site.media.file(request, site.corpus.source(at["name"]), at["number"], at["file"])


def thumbnail(request: Request) -> Response:
    """A small picture of a sample's first medium."""
    site, at = _site(request), request.path_params
    found = site.media.small(site.corpus.source(at["name"]), at["number"])
    if found is None:
        raise NotHere(f"source {at['name']!r}: sample {at['number']} has no media")
    return file_answer(*found)


def picture(request: Request) -> Response:
    """A picture that a page made."""
    return _site(request).media.picture(request.path_params["name"])


def draws(request: Request) -> Response:
    """A sample in several epochs of a run."""
    site, number = _site(request), request.path_params["number"]
    shown, steps = site.corpus.source(request.path_params["name"]), site.needs_steps()
    first = _number(request, "first", 0, 0, 10**6)
    epochs = range(first, first + _number(request, "epochs", 6, 1, MOST_EPOCHS))
    index, before = shown.around(number)
    return _page(
        request,
        "draws.html",
        source=shown.name,
        number=number,
        key=index.key_of(number - before),
        first=first,
        epochs=len(epochs),
        most=MOST_EPOCHS,
        title=steps.title,
        body=_body(steps.draws(shown, number, epochs, site.media.made)),
    )


# Steps -------------------------------------------------------------------------------------------


def rows(request: Request) -> Response:
    """Rows of a step as the model gets them."""
    site = _site(request)
    steps = site.needs_steps()
    step = _number(request, "step", steps.first, 1, 10**12)
    first = _number(request, "row", 0, 0, 10**9)
    chosen = _number(request, "rows", 4, 1, MOST_ROWS)
    body = _body(steps.rows(step, first, chosen, site.media.made))
    values = {"step": step, "row": first, "rows": chosen, "most": MOST_ROWS}
    total = steps.config.rows_per_step
    return _page(request, "rows.html", **values, steps=steps, total=total, body=body)


def blend(request: Request) -> Response:
    """What the next steps are made of."""
    steps = _site(request).needs_steps()
    step = _number(request, "step", steps.first, 1, 10**12)
    left = max(1, min(MOST_STEPS, steps.last - step + 1))
    chosen = _number(request, "steps", min(50, left), 1, MOST_STEPS)
    body = _body(steps.blend(step, chosen))
    return _page(request, "blend.html", step=step, count=chosen, most=left, steps=steps, body=body)


# Statistics --------------------------------------------------------------------------------------


def statistics(request: Request) -> Response:
    """The page of statistics, which are counted after it is there."""
    site, given = _site(request), request.query_params
    asked = {key: given.get(key, "") for key in ("source", "category", "against")}
    _counted_files(site.corpus, asked)
    query = urlencode({key: value for key, value in asked.items() if value})
    names, categories = list(site.corpus.sources), site.corpus.categories
    return _page(
        request, "statistics.html", names=names, categories=categories, query=query, asked=asked
    )


def counted(request: Request) -> Response:
    """The statistics themselves."""
    site, given = _site(request), request.query_params
    asked = {key: given.get(key, "") for key in ("source", "category", "against")}
    files, against = _counted_files(site.corpus, asked)
    return HTMLResponse(site.statistics.page(files, against))


def _counted_files(corpus: Corpus, asked: Mapping[str, str]) -> tuple[list[Any], Any]:
    names = corpus.chosen(asked["source"], asked["category"])
    if not names:
        raise NotHere(f"source {asked['source']!r} is not of category {asked['category']!r}")
    if asked["against"] and not asked["source"]:
        raise ValueError("against: choose the one source to compare with it")
    against = corpus.source(asked["against"]).facts_file if asked["against"] else None
    return [corpus.sources[name].facts_file for name in names], against


# What was left out, and what must go or stay -----------------------------------------------------


def rejected(request: Request) -> Response:
    """What the ingest of a source left out, and why."""
    corpus, given = _site(request).corpus, request.query_params
    shown = corpus.source(request.path_params["name"])
    reason, key = given.get("reason", ""), given.get("key", "")[:200]
    found = shown.rejected(reason, key)
    return _page(request, "rejected.html", source=shown.name, found=found, reason=reason, key=key)


def quarantined(request: Request) -> Response:
    """What runs could not use, and why."""
    site = _site(request)
    folders = {str(folder) for folder in site.runs}
    if site.records is not None:
        folders |= set(site.records.run_folders())
    runs = [(folder, _quarantine_of(Path(folder))) for folder in sorted(folders)]
    return _page(request, "quarantined.html", runs=runs, shown=_LINES)


def _quarantine_of(folder: Path) -> list[dict[str, Any]] | None:
    """Return the lines of a run's quarantine, the last ones; None: it is not on this machine."""
    file = folder / "quarantine.jsonl"
    if not folder.is_dir():
        return None
    if not file.is_file():
        return []
    lines = file.read_bytes().split(b"\n")[:-1][-_LINES:]  # a running one may be writing the last
    return [json.loads(line) for line in lines]


def governance(request: Request) -> Response:
    """Deletions and holds."""
    site = _site(request)
    corpus = site.corpus
    redacted = [
        (name, one.num_redacted) for name, one in corpus.sources.items() if one.num_redacted
    ]
    return _page(
        request,
        "governance.html",
        holds=read_holds(corpus.store, corpus.sources),
        redacted=redacted,
        requests=None if site.records is None else site.records.requests(),
        tombstones=None if site.steps is None else site.steps.tombstones(),
        steps=site.steps,
    )


# The catalogue -----------------------------------------------------------------------------------


def versions(request: Request) -> Response:
    """All versions."""
    return _page(request, "versions.html", rows=_site(request).needs_records().versions())


def version(request: Request) -> Response:
    """One version with its lineage, replicas and runs."""
    site = _site(request)
    records = site.needs_records()
    found = records.details(request.path_params["name"])
    here = [
        one["name"]
        for one in found["replicas"]
        if (one["root"], one["endpoint"]) == (site.corpus.store.uri, site.corpus.endpoint)
        and one["name"] in site.corpus.sources
    ]
    may = records.may_become(found["state"])
    if _session(request).person.role < Role.ADMIN:
        may = tuple(one for one in may if one not in _ADMINS)
    return _page(request, "version.html", version=found, here=here, may_become=may)


_ADMINS = ("archived", "deleted")
"""States that only an admin brings a version into."""


async def change_state(request: Request) -> Response:
    """Bring a version into another state, if it is as the person saw it."""
    given = await _checked_form(request, Role.CURATOR)
    records, person = _site(request).needs_records(), _session(request).person
    state, revision = given.get("state", ""), _whole(given.get("revision", ""), "revision")
    if state in _ADMINS and person.role < Role.ADMIN:
        raise HTTPException(403, f"only an admin may bring a version into the state {state}")
    if revision is None:
        raise ValueError("revision: expected that of the page")
    name = request.path_params["name"]
    by = f"{person.name} ({person.role.name.lower()}, by the page)"
    await run_in_threadpool(records.promote, name, state, revision, by)
    return RedirectResponse(f"/versions/{quote(name, safe='@')}", 303)


def audit(request: Request) -> Response:
    """The audit, the newest entries first."""
    records = _site(request).needs_records()
    before = _whole(request.query_params.get("before", ""), "before")
    found = records.audit(before, _ENTRIES)
    older = found.entries[-1]["seq"] if found.entries and found.entries[-1]["seq"] > 1 else None
    return _page(request, "audit.html", found=found, older=older)


def style(request: Request) -> Response:
    """The style that static pages have inside."""
    return Response(html.STYLE, media_type="text/css")


Handler = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]


def _routes() -> list[Route | Mount]:
    pages: dict[str, Handler] = {
        "/": sources,
        "/sources/{name}": source,
        "/sources/{name}/samples/{number:int}": sample,
        "/sources/{name}/samples/{number:int}/draws": draws,
        "/sources/{name}/rejected": rejected,
        "/sources/{name}/keys/{key:path}": by_key,
        "/samples": samples,
        "/samples/count": how_many,
        "/words/{name}/{number:int}": words,
        "/media/{name}/{number:int}/{file}": medium,
        "/thumbnails/{name}/{number:int}": thumbnail,
        "/pictures/{name}": picture,
        "/rows": rows,
        "/blend": blend,
        "/statistics": statistics,
        "/statistics/counted": counted,
        "/quarantined": quarantined,
        "/governance": governance,
        "/versions": versions,
        "/versions/{name}": version,
        "/audit": audit,
        "/login": sign_in,
        "/static/style.css": style,
    }
    forms: dict[str, Handler] = {
        "/login": sign_in_by_form,
        "/logout": sign_out,
        "/sources/{name}/holds": hold,
        "/versions/{name}/state": change_state,
    }
    return [
        *(Route(path, handler) for path, handler in pages.items()),
        *(Route(path, handler, methods=["POST"]) for path, handler in forms.items()),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
