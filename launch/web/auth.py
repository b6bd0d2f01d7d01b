"""Who may look at the page, and from where: hosts, tokens, sessions, and headers of every answer.

A token is shown once and kept as its SHA-256. It is exchanged for a session, whose cookie no script
can read and no other site's request carries (HttpOnly, SameSite=Strict). A page of another site
that has this machine's name resolve to the loopback ("DNS rebinding") is refused by its Host. The
exchange of a token, and all that changes anything, is a POST whose Origin is one of our own pages;
a change also carries a value that only our own pages know.
"""

import hashlib
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

IDLE_S = 12 * 3600.0
"""A session that nobody uses for so long ends."""

_SESSIONS = 16  # of one person, whose oldest one makes room
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_OPEN = ("/login", "/static/")  # what a person without a session may ask for

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
FILE_CSP = "default-src 'none'; frame-ancestors 'none'; sandbox"
"""Of files that came from data: opened by themselves they are nothing but a picture."""


class Role(IntEnum):
    """What a person may do; each role may do what those before it may."""

    VIEWER = 1
    CURATOR = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> "Role":
        """Return a role by its name.

        Raises:
            ValueError: there is none.
        """
        known = {role.name.lower(): role for role in cls}
        if name not in known:
            raise ValueError(f"role {name!r}: expected {', '.join(known)}")
        return known[name]


@dataclass(frozen=True)
class Person:
    """Who is signed in."""

    name: str
    role: Role


def digest(token: str) -> str:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """Return a token that nobody can guess."""
    return secrets.token_urlsafe(32)


def read_tokens(file: Path) -> dict[str, Person]:
    """Return SHA-256 -> person of a file of tokens: JSON lines {"name", "role", "sha256"}.

    Raises:
        ValueError: a line is not as expected, or somebody else may write the file; names both.
    """
    text = _read_own(file)
    found: dict[str, Person] = {}
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{file}, line {number}"
        try:
            name, role, sha256 = (json.loads(line)[key] for key in ("name", "role", "sha256"))
        except (ValueError, KeyError, TypeError):
            raise ValueError(
                f'{where}: expected {{"name": ..., "role": ..., "sha256": ...}}'
            ) from None
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ValueError(f"{where}: name {name!r}: expected letters, digits, . _ @ -")
        if not isinstance(sha256, str) or not _HASH.fullmatch(sha256):
            raise ValueError(f"{where}: sha256 of {name}: expected 64 hexadecimal digits")
        try:
            found[sha256] = Person(name, Role.named(role))
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
    if not found:
        raise ValueError(f"{file}: no token in it; `kimi-pretrain data token` adds one")
    return found


def _read_own(file: Path) -> str:
    """Return the text of a file that nobody but its owner, or root, can have written."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        state = os.fstat(opened.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{file}: expected a regular file of tokens")
        _refuse_others(file, state)
        folder = file.resolve().parent  # whose writers could replace the file
        _refuse_others(folder, folder.stat())
        if state.st_mode & 0o007:
            raise ValueError(f"{file}: everybody may read it, and so see who signs in; chmod o-rwx")
        return opened.read().decode("utf-8", "replace")


def _refuse_others(path: Path, state: os.stat_result) -> None:
    """Refuse what somebody else could replace, and so sign in as anybody."""
    if state.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{path}: belongs to user {state.st_uid}, who could sign in as anybody; expected you "
            f"({os.geteuid()}) or root: chown it, or copy the file to a folder of your own"
        )
    sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    if state.st_mode & 0o022 and not sticky:  # of /tmp, nobody replaces another's file
        raise ValueError(f"{path}: others may write it, and so sign in as anybody; chmod go-w")


def add_token(file: Path, name: str, role: Role) -> str:
    """Add a token of a person to a file, which nobody else may read; returns the token.

    Raises:
        ValueError: the file is not one of tokens, or the name is none.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: expected letters, digits, . _ @ -, at most 64")
    begin = ""
    if file.exists():
        read_tokens(file)
        begin = "" if file.read_bytes().endswith(b"\n") else "\n"  # as an editor may leave it
    token = new_token()
    line = {"name": name, "role": role.name.lower(), "sha256": digest(token)}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a") as out:
        out.write(f"{begin}{json.dumps(line)}\n")
    return token


@dataclass
class Session:
    """A person who is signed in; `form` is the value that our own forms carry."""

    person: Person
    form: str = field(default_factory=new_token)
    used: float = field(default_factory=time.monotonic)


class Doorkeeper:
    """Exchanges tokens for sessions, and knows whose a session is.

    Args:
        tokens: SHA-256 -> person, for as long as the server runs.
        once: the same, of tokens that are used up by their first exchange.
    """

    def __init__(self, tokens: Mapping[str, Person], once: Mapping[str, Person]) -> None:
        self._tokens, self._once = dict(tokens), dict(once)
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def enter(self, token: str) -> str | None:
        """Return the secret of a new session; None for a token that is unknown or used up."""
        key = digest(token)
        with self._lock:
            person = self._once.pop(key, None) or self._tokens.get(key)
            if person is None:
                return None
            name = person.name
            own = [key for key, one in self._sessions.items() if one.person.name == name]
            if len(own) >= _SESSIONS:
                del self._sessions[min(own, key=lambda key: self._sessions[key].used)]
            secret = new_token()
            self._sessions[digest(secret)] = Session(person)
        return secret

    def session(self, secret: str | None) -> Session | None:
        """Return the session of a cookie; None for one that is unknown or too old."""
        if not secret:
            return None
        key = digest(secret)
        with self._lock:
            found = self._sessions.get(key)
            if found is None:
                return None
            if time.monotonic() - found.used > IDLE_S:
                del self._sessions[key]
                return None
            found.used = time.monotonic()
            return found

    def leave(self, secret: str | None) -> None:
        """End a session."""
        with self._lock:
            self._sessions.pop(digest(secret or ""), None)


class Gate:
    """Stands before the application; `scope["session"]` is the session of who comes through.

    Args:
        app: what is behind it.
        door: who knows the sessions.
        hosts: names that a request may be for, without ports.
        cookie: name of the session's cookie.
    """

    def __init__(self, app: ASGIApp, door: Doorkeeper, hosts: Collection[str], cookie: str):
        self._app, self._door, self._cookie = app, door, cookie
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        app = self._app if refusal is None else refusal
        await app(scope, receive, _with_headers(send))

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        given = headers.getlist("host")
        if len(given) != 1 or host_of(given[0]) not in self._hosts:
            return PlainTextResponse("this server does not go by that name\n", 400)
        scope["secret"] = _cookie(headers, self._cookie)
        scope["session"] = session = self._door.session(scope["secret"])
        if scope["method"] not in ("GET", "HEAD", "POST"):
            return PlainTextResponse("GET, HEAD or POST\n", 405)
        if scope["method"] == "POST" and not _of_our_own(headers, given[0]):
            return PlainTextResponse("this form is not from a page of this server\n", 403)
        if session is None and not scope["path"].startswith(_OPEN):
            return _sign_in(headers)
        return None


def _sign_in(headers: Headers) -> Response:
    if "hx-request" in headers:  # a part of a page: the whole page shall go there
        return PlainTextResponse("sign in\n", 401, {"HX-Redirect": "/login"})
    return Response(status_code=303, headers={"Location": "/login"})


def host_of(given: str) -> str:
    """Return the name in a Host header, without the port."""
    name, _, port = given.rpartition(":")
    return (name if name and port.isdigit() else given).lower()


def _cookie(headers: Headers, name: str) -> str | None:
    """Return our cookie among those of other programs on this host, whatever theirs look like."""
    return cookie_parser("; ".join(headers.getlist("cookie"))).get(name)


def _of_our_own(headers: Headers, host: str) -> bool:
    """Whether a browser says that a form comes from one of our own pages."""
    origin, site = headers.get("origin", ""), headers.get("sec-fetch-site")
    return origin.partition("://")[2].lower() == host.lower() and site in (None, "same-origin")


def _with_headers(send: Send) -> Send:
    """Put what protects the page on every answer."""
    fixed = {
        "content-security-policy": CSP,
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",  # without it forms would come from "null"
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-store",
    }

    async def out(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = {name.lower() for name, _ in message["headers"]}
            more = [(k.encode(), v.encode()) for k, v in fixed.items() if k.encode() not in given]
            message = {**message, "headers": [*message["headers"], *more]}
        await send(message)

    return out
