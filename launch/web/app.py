"""The web application: routes from addresses to pages, sign-in and sign-out.

`auth.Gate` authorises each request before it gets here. Handlers are plain functions and run in
threads, because facts, indices, stores and the catalogue wait for disks and networks.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from anyio import to_thread
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.store.open import StoreError
from launch.pages import html
from launch.pages.turns import ComeAgain
from launch.web import record_pages, source_pages, step_pages
from launch.web.auth import Gate, Role
from launch.web.site import (
    HERE,
    Site,
    checked_form,
    fault,
    form_fields,
    page,
    site_of,
    templates,
    told,
    told_again,
    told_http,
    told_nested,
)

_THREADS = 12


def application(site: Site) -> Gate:
    """Return the server's application behind its gate, which also covers error responses."""
    app = Starlette(
        routes=_routes(),
        exception_handlers={
            HTTPException: told_http,
            ComeAgain: told_again,
            ValueError: told,
            OSError: told,
            StoreError: told,
            IndexMismatch: told,
            RecursionError: told_nested,
            Exception: fault,
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
    site.media.close()
    if site.steps is not None:
        site.steps.last.close()


def sign_in(request: Request) -> Response:
    """Ask for a token; the address may contain it after "#", which browsers send to no server.

    If the user opened the address directly, our script submits the form immediately. A link on
    another site only fills in the form; otherwise that site could sign in its visitor as another
    person.
    """
    by_hand = request.headers.get("sec-fetch-site") == "none"
    return page(request, "login.html", wrong=False, at_once=by_hand)


async def sign_in_by_form(request: Request) -> Response:
    """Exchange a token for a session."""
    site, token = site_of(request), (await form_fields(request)).get("token", "")
    secret = site.door.enter(token)
    if secret is None:
        return page(request, "login.html", 401, wrong=True, at_once=False)
    answer = RedirectResponse("/", 303)
    answer.set_cookie(
        site.cookie, secret, httponly=True, samesite="strict", secure=site.secure, path="/"
    )
    return answer


async def sign_out(request: Request) -> Response:
    """End the session."""
    await checked_form(request, Role.VIEWER)
    site = site_of(request)
    site.door.leave(request.scope["secret"])
    answer = RedirectResponse("/login", 303)
    answer.delete_cookie(site.cookie, path="/", httponly=True, samesite="strict")
    return answer


def style(request: Request) -> Response:
    """Return the style sheet that static pages embed."""
    return Response(html.STYLE, media_type="text/css")


def icon(request: Request) -> Response:
    """Return the icon that browsers request for a response that names none."""
    return FileResponse(HERE / "static" / "icon.svg")


Handler = Callable[[Request], Response] | Callable[[Request], Awaitable[Response]]


def _routes() -> list[Route | Mount]:
    pages: dict[str, Handler] = {
        "/": source_pages.sources,
        "/sources/{name}": source_pages.source,
        "/sources/{name}/samples/{number:int}": source_pages.sample,
        "/sources/{name}/samples/{number:int}/draws": step_pages.draws,
        "/sources/{name}/rejected": record_pages.rejected,
        "/sources/{name}/keys/{key:path}": source_pages.by_key,
        "/samples": source_pages.samples,
        "/samples/count": source_pages.how_many,
        "/words/{name}/{number:int}": source_pages.words,
        "/media/{name}/{number:int}/{file}": source_pages.medium,
        "/thumbnails/{name}/{number:int}": source_pages.thumbnail,
        "/pictures/{name}": source_pages.picture,
        "/rows": step_pages.rows,
        "/blend": step_pages.blend,
        "/statistics": step_pages.statistics,
        "/statistics/counted": step_pages.counted,
        "/quarantined": record_pages.quarantined,
        "/governance": record_pages.governance,
        "/versions": record_pages.versions,
        "/versions/{name}": record_pages.version,
        "/audit": record_pages.audit,
        "/login": sign_in,
        "/static/style.css": style,
        "/favicon.ico": icon,
    }
    forms: dict[str, Handler] = {
        "/login": sign_in_by_form,
        "/logout": sign_out,
        "/sources/{name}/holds": record_pages.hold,
        "/versions/{name}/state": record_pages.change_state,
    }
    return [
        *(Route(path, handler) for path, handler in pages.items()),
        *(Route(path, handler, methods=["POST"]) for path, handler in forms.items()),
        Mount("/static", StaticFiles(directory=HERE / "static")),
    ]
