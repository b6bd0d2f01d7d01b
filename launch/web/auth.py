"""Access control of the web page: hosts, tokens, sessions, and security headers of every answer.

A token is shown once and stored as its SHA-256. The user exchanges it for a session. No script can
read the session's cookie, and no request from another site carries it (HttpOnly, SameSite=Strict).
The Host check refuses a page of another site whose name resolves to the loopback ("DNS rebinding").
The exchange of a token and every change are POST requests whose Origin is one of our own pages; a
change also carries a value that only our own pages know.
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
"""Seconds after which an unused session ends."""

_SESSIONS = 16  # per person; a new session then replaces the least recently used one
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_HASH = re.compile(r"[0-9a-f]{64}")
_OPEN = ("/login", "/static/")  # paths that need no session

CSP = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; media-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
FILE_CSP = "default-src 'none'; frame-ancestors 'none'; sandbox"
"""Policy for files from the data: a browser that opens one can only show it as a picture."""


class Role(IntEnum):
    """Permissions of a person; each role includes the permissions of the roles before it."""

    VIEWER = 1
    CURATOR = 2
    ADMIN = 3

    @classmethod
    def named(cls, name: str) -> "Role":
        """Return a role by its name.

        Raises:
            ValueError: no role has this name.
        """
        known = {role.name.lower(): role for role in cls}
        if name not in known:
            raise ValueError(f"role {name!r}: expected {', '.join(known)}")
        return known[name]


@dataclass(frozen=True)
class Person:
    """The owner of a token or session."""

    name: str
    role: Role


def digest(token: str) -> str:
    """Return the SHA-256 of a token, which is the only form in which it is stored."""
    return hashlib.sha256(token.encode()).hexdigest()


def new_token() -> str:
    """Return a random token that cannot be guessed."""
    return secrets.token_urlsafe(32)


def read_tokens(file: Path) -> dict[str, Person]:
    """Return {SHA-256: person} from a file of tokens: JSON lines {"name", "role", "sha256"}.

    Raises:
        ValueError: a line is malformed, or other users may read or write the file.
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
    """Return the text of a file that only the current user or root can have written."""
    with os.fdopen(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
        state = os.fstat(opened.fileno())
        if not stat.S_ISREG(state.st_mode):
            raise ValueError(f"{file}: expected a regular file of tokens")
        _refuse_others(file, state)
        folder = file.resolve().parent  # its writers could replace the file
        _refuse_others(folder, folder.stat())
        if state.st_mode & 0o007:
            raise ValueError(f"{file}: everybody may read it, and so see who signs in; chmod o-rwx")
        return opened.read().decode("utf-8", "replace")


def _refuse_others(path: Path, state: os.stat_result) -> None:
    """Refuse a path that another user could replace, who could then sign in as any person."""
    if state.st_uid not in (0, os.geteuid()):
        raise ValueError(
            f"{path}: belongs to user {state.st_uid}, who could sign in as anybody; expected you "
            f"({os.geteuid()}) or root: chown it, or copy the file to a folder of your own"
        )
    sticky = stat.S_ISDIR(state.st_mode) and state.st_mode & stat.S_ISVTX
    if state.st_mode & 0o022 and not sticky:  # sticky folders such as /tmp prevent this
        raise ValueError(f"{path}: others may write it, and so sign in as anybody; chmod go-w")


def add_token(file: Path, name: str, role: Role) -> str:
    """Add a person's token to a file that only the current user may read; return the token.

    Raises:
        ValueError: the file is not a file of tokens, or the name is invalid.
    """
    if not _NAME.fullmatch(name):
        raise ValueError(f"name {name!r}: expected letters, digits, . _ @ -, at most 64")
    begin = ""
    if file.exists():
        read_tokens(file)
        begin = "" if file.read_bytes().endswith(b"\n") else "\n"  # editors may omit it
    token = new_token()
    line = {"name": name, "role": role.name.lower(), "sha256": digest(token)}
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    with os.fdopen(descriptor, "a") as out:
        out.write(f"{begin}{json.dumps(line)}\n")
    return token


@dataclass
class Session:
    """Session of a signed-in person; `form` is the value that our own forms carry."""

    person: Person
    form: str = field(default_factory=new_token)
    used: float = field(default_factory=time.monotonic)


class Doorkeeper:
    """Exchanges tokens for sessions, and looks up the person of a session.

    Args:
        tokens: {SHA-256: person} of tokens that are valid as long as the server runs.
        once: {SHA-256: person} of tokens that are valid for one exchange.
    """

    def __init__(self, tokens: Mapping[str, Person], once: Mapping[str, Person]) -> None:
        self._tokens, self._once = dict(tokens), dict(once)
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()

    def enter(self, token: str) -> str | None:
        """Return the secret of a new session, or None if the token is unknown or used up."""
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
        """Return the session of a cookie, or None if it is unknown or expired."""
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
    """Checks every request before the application, and stores its session in `scope["session"]`.

    Args:
        app: the application behind the gate.
        door: keeper of the sessions.
        hosts: accepted host names, without ports.
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
    if "hx-request" in headers:  # a part of a page: redirect the whole page
        return PlainTextResponse("sign in\n", 401, {"HX-Redirect": "/login"})
    return Response(status_code=303, headers={"Location": "/login"})


def host_of(given: str) -> str:
    """Return the name in a Host header, without the port."""
    name, _, port = given.rpartition(":")
    return (name if name and port.isdigit() else given).lower()


def _cookie(headers: Headers, name: str) -> str | None:
    """Return our cookie; other programs on this host may have set malformed cookies."""
    return cookie_parser("; ".join(headers.getlist("cookie"))).get(name)


def _of_our_own(headers: Headers, host: str) -> bool:
    """Return whether the browser reports one of our own pages as the origin of a form."""
    origin, site = headers.get("origin", ""), headers.get("sec-fetch-site")
    return origin.partition("://")[2].lower() == host.lower() and site in (None, "same-origin")


def _with_headers(send: Send) -> Send:
    """Wrap `send` so that every answer has the security headers."""
    fixed = {
        "content-security-policy": CSP,
        "x-content-type-options": "nosniff",
        "referrer-policy": "same-origin",  # otherwise the Origin of forms would be "null"
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
