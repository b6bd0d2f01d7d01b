"""What the server shows and to whom, and what all its pages have in common.

Templates, numbers of addresses, forms of our own, and answers to what goes wrong: one line.
"""

import hmac
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import BoundedSemaphore
from typing import Any
from urllib.parse import parse_qsl, quote

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, Response

from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.store.open import MissingKey, StoreError
from launch.local.user_errors import user_message
from launch.pages import html
from launch.web.auth import Doorkeeper, Role, Session
from launch.web.corpus import Corpus, NotHere, ShownSource
from launch.web.fresh import Fresh
from launch.web.media import Media
from launch.web.records import Records
from launch.web.statistics import Statistics
from launch.web.steps import Steps

HERE = Path(__file__).parent
_FORM = 16 << 10  # bytes of a form
_AGAIN_S = 1  # after which a page that shall come again does


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
        working: how many requests may plan, read or count at a time: each holds one of the threads
            that all pages share.
    """

    corpus: Corpus
    media: Media
    statistics: Statistics
    door: Doorkeeper
    hosts: frozenset[str]
    cookie: str
    secure: bool = False
    records: Records | None = None
    steps: Fresh[Steps] | None = None
    runs: tuple[Path, ...] = ()
    working: BoundedSemaphore = field(default_factory=partial(BoundedSemaphore, 4))

    def needs_records(self) -> Records:
        """Return the catalogue.

        Raises:
            NotHere: this server was started without one.
        """
        if self.records is None:
            raise NotHere("there is no catalogue here: start the server with --catalog")
        return self.records

    def needs_steps(self) -> Steps:
        """Return the steps, of sources and tombstones as they are now.

        Raises:
            NotHere: this server was started without a configuration. ComeAgain: they are being
                read again. Whatever reading them does.
        """
        if self.steps is None:
            raise NotHere("there are no steps here: start the server with --config or --run")
        return self.steps.now()

    def trains_on(self, source: ShownSource) -> bool:
        """Whether there are steps in which a source is trained on."""
        return self.steps is not None and self.steps.last.trains_on(source)


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
        "part": partial(quote, safe="", errors="replace"),
        "json": partial(json.dumps, indent=1, ensure_ascii=False),
    }
    return found


# What pages have --------------------------------------------------------------------------------


def site_of(request: Request) -> Site:
    """Return what the server shows."""
    return request.app.state.site


def session_of(request: Request) -> Session:
    """Return the session of who asks."""
    found = request.scope["session"]
    assert found is not None, "the gate lets nobody else through"
    return found


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page made by a template."""
    session: Session | None = request.scope.get("session")
    site = site_of(request)
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
    return html_answer(text, status)


def html_answer(text: str, status: int = 200) -> HTMLResponse:
    """Return HTML, where data may hold half of a character, which UTF-8 cannot have."""
    return HTMLResponse(text.encode("utf-8", "replace"), status)


def ready(parts: Iterable[str]) -> Markup:
    """Return HTML of `launch.pages`, which has escaped what came from data."""
    return Markup("\n".join(parts))


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a number of the address, or the default where it has none.

    Raises:
        ValueError: it is no whole number, or not within `least` to `most`.
    """
    given = whole(request.query_params.get(name, ""), name)
    value = default if given is None else given
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: expected {least:,} to {most:,}")
    return value


def whole(text: str, name: str) -> int | None:
    """Return a whole number, not below 0, as somebody wrote it; None for nothing.

    Raises:
        ValueError: it is none; says so by `name`.
    """
    text = text.strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 15:
        raise ValueError(f"{name}={text[:40]!r}: expected a whole number")
    return int(text)


# Forms ------------------------------------------------------------------------------------------


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of a form.

    Raises:
        HTTPException: it is none, or too long.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/x-www-form-urlencoded":
        raise HTTPException(415, "expected a form")
    body = b""
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > _FORM:
                raise HTTPException(413, f"a form of more than {_FORM:,} bytes")
    except ClientDisconnect:
        raise HTTPException(400, "a form without its end") from None
    return dict(parse_qsl(body.decode("utf-8", "replace"), keep_blank_values=True))


async def checked_form(request: Request, role: Role) -> dict[str, str]:
    """Return the fields of one of our own forms, of a person who may send it.

    Raises:
        HTTPException: it is not ours, or not for this person.
    """
    given, session = await form_fields(request), session_of(request)
    if not hmac.compare_digest(given.get("form", "").encode(), session.form.encode()):
        raise HTTPException(403, "this form is of another session: load the page again")
    if session.person.role < role:
        raise HTTPException(403, f"only a {role.name.lower()} may do this")
    return given


# What goes wrong ---------------------------------------------------------------------------------


def told(request: Request, error: Exception) -> Response:
    """Answer with one line that says what is wrong."""
    message = user_message(error)
    if message is None:
        raise error
    missing = isinstance(error, NotHere | MissingKey)
    behind = isinstance(error, StoreError | IndexMismatch | OSError) and not missing
    return _wrong(request, message, 404 if missing else 502 if behind else 400)


def told_again(request: Request, error: Exception) -> Response:
    """Answer that something takes longer, and when to ask again; a browser does so by itself."""
    if request.method == "POST":
        answer = _wrong(request, str(error), 503)
    elif "hx-request" not in request.headers:
        message = f"{error}. This page comes again by itself."
        answer = page(request, "error.html", 503, title="In a moment", message=message)
        answer.headers["Refresh"] = str(_AGAIN_S)
    else:
        where = f"{request.url.path}?{request.url.query}".rstrip("?")
        answer = html_answer(
            f'<p class="note" role="status" hx-get="{html.text(where)}" hx-target="this" '
            f'hx-trigger="load delay:{_AGAIN_S}s" hx-swap="outerHTML">{html.text(str(error))} ...'
            "</p>",
            503,
        )
    answer.headers["Retry-After"] = str(_AGAIN_S)
    return answer


def told_http(request: Request, error: Exception) -> Response:
    """Answer with what Starlette, or a handler, refuses a request for."""
    assert isinstance(error, HTTPException)
    return _wrong(request, f"{error.status_code}: {error.detail}", error.status_code)


def told_nested(request: Request, error: Exception) -> Response:
    """Answer to JSON that is nested beyond what Python follows; it is of the data."""
    return _wrong(request, "a file of the data is JSON that is nested too deeply", 502)


def fault(request: Request, error: Exception) -> Response:
    """Answer without a word of the error, which the server's log has."""
    return _wrong(request, "this server has a fault; its log says which", 500)


def _wrong(request: Request, message: str, status: int) -> Response:
    if "hx-request" in request.headers:
        escaped = html.text(message)
        return html_answer(f'<p class="wrong" role="alert">{escaped}</p>', status)
    return page(request, "error.html", status, title="Not possible", message=message)
