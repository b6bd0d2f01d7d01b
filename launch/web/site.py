"""The state of the server, and helpers that all pages share.

The helpers cover templates, numbers in addresses, checked forms, and one-line error answers.
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
_FORM = 16 << 10  # most bytes of a form
_AGAIN_S = 1  # seconds after which a busy page is loaded again


@dataclass
class Site:
    """Contents and access control of the server.

    Attributes:
        corpus: the sources.
        media: pictures and videos of the sources.
        statistics: counter of the sources.
        door: keeper of the sessions.
        hosts: host names of the server.
        cookie: name of the session's cookie.
        secure: True if browsers reach the server only by https.
        records: the catalogue, if there is one.
        steps: steps of a configuration or a run, if the user gave one.
        runs: folders of runs, in addition to the runs in the catalogue.
        working: limit of requests that plan, read or count at a time, because each occupies one of
            the threads that all pages share.
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
        """Return the steps for the current sources and tombstones.

        Raises:
            NotHere: this server was started without a configuration. ComeAgain: the steps are
                being read again. Also any error of reading them.
        """
        if self.steps is None:
            raise NotHere("there are no steps here: start the server with --config or --run")
        return self.steps.now()

    def trains_on(self, source: ShownSource) -> bool:
        """Return whether the steps train on a source; False without steps."""
        return self.steps is not None and self.steps.last.trains_on(source)


def templates() -> Environment:
    """Return the templates, which escape all values."""
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


# Parts of pages ---------------------------------------------------------------------------------


def site_of(request: Request) -> Site:
    """Return the site of the server."""
    return request.app.state.site


def session_of(request: Request) -> Session:
    """Return the session of a request."""
    found = request.scope["session"]
    assert found is not None, "the gate lets nobody else through"
    return found


def page(request: Request, template: str, status: int = 200, **values: Any) -> HTMLResponse:
    """Return a page rendered from a template."""
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
    """Return an HTML answer; replace lone surrogates from data, which UTF-8 cannot encode."""
    return HTMLResponse(text.encode("utf-8", "replace"), status)


def ready(parts: Iterable[str]) -> Markup:
    """Return HTML of `launch.pages` as safe markup, because it has already escaped all data."""
    return Markup("\n".join(parts))


def number(request: Request, name: str, default: int, least: int, most: int) -> int:
    """Return a number from the address, or the default if the address has none.

    Raises:
        ValueError: the value is not a whole number from `least` to `most`.
    """
    given = whole(request.query_params.get(name, ""), name)
    value = default if given is None else given
    if not least <= value <= most:
        raise ValueError(f"{name}={value}: expected {least:,} to {most:,}")
    return value


def whole(text: str, name: str) -> int | None:
    """Parse a whole number of at least 0 from user input; return None for empty text.

    Raises:
        ValueError: the text is not such a number; the message contains `name`.
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
        HTTPException: the request is not a form, or the form is too long or incomplete.
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
    """Return the fields of a form after checking its origin and the person's role.

    Raises:
        HTTPException: the form is not from this session, or the person lacks the role.
    """
    given, session = await form_fields(request), session_of(request)
    if not hmac.compare_digest(given.get("form", "").encode(), session.form.encode()):
        raise HTTPException(403, "this form is of another session: load the page again")
    if session.person.role < role:
        raise HTTPException(403, f"only a {role.name.lower()} may do this")
    return given


# Errors ------------------------------------------------------------------------------------------


def told(request: Request, error: Exception) -> Response:
    """Answer with one line that describes the error."""
    message = user_message(error)
    if message is None:
        raise error
    missing = isinstance(error, NotHere | MissingKey)
    behind = isinstance(error, StoreError | IndexMismatch | OSError) and not missing
    return _wrong(request, message, 404 if missing else 502 if behind else 400)


def told_again(request: Request, error: Exception) -> Response:
    """Answer that the work takes longer, with a retry time; browsers retry automatically."""
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
    """Answer with the reason why Starlette or a handler refuses a request."""
    assert isinstance(error, HTTPException)
    return _wrong(request, f"{error.status_code}: {error.detail}", error.status_code)


def told_nested(request: Request, error: Exception) -> Response:
    """Answer that JSON in the data is nested more deeply than Python can parse."""
    return _wrong(request, "a file of the data is JSON that is nested too deeply", 502)


def fault(request: Request, error: Exception) -> Response:
    """Answer without details of the error, which are in the server's log."""
    return _wrong(request, "this server has a fault; its log says which", 500)


def _wrong(request: Request, message: str, status: int) -> Response:
    if "hx-request" in request.headers:
        escaped = html.text(message)
        return html_answer(f'<p class="wrong" role="alert">{escaped}</p>', status)
    return page(request, "error.html", status, title="Not possible", message=message)
