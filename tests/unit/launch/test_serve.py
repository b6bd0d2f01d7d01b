"""Tests of the web pages without a browser: access, response headers, file ranges, bad input."""

import asyncio
import hashlib
import html
import json
import os
import re
import shutil
import socket
import sqlite3
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html.parser import HTMLParser
from types import SimpleNamespace
from urllib.parse import quote

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra platform is not installed")
from starlette.testclient import TestClient

from data_pipeline.access import open_data, open_tokenizer, run_sources
from data_pipeline.catalog.audit import entries
from data_pipeline.catalog.engine import Catalog
from data_pipeline.catalog.register import look, register
from data_pipeline.catalog.states import promote
from data_pipeline.index.manifest import read_index
from data_pipeline.plan.planner import QUARANTINE_DELAY, Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import load_config
from launch.cli import data_serve
from launch.cli.data_show import show_rows
from launch.web import app, auth, record_pages, rejected
from launch.web.app import application
from launch.web.auth import Doorkeeper, Person, Role, add_token, digest, host_of, read_tokens
from launch.web.corpus import Corpus
from launch.web.decoder import Bounds, Decoder
from launch.web.fresh import Fresh, manifests_of
from launch.web.media import Kept, Media
from launch.web.records import Records
from launch.web.rejected import RejectedList
from launch.web.site import HERE, Site
from launch.web.statistics import Statistics
from launch.web.steps import Steps
from tests.unit.launch.data_command import run
from tests.unit.launch.inspected import HOSTILE
from tests.unit.launch.served import PAYLOADS, Quiet, build_served, config_file, film, turned_jpeg

HTMX_SHA256 = "d6fdc75f204e6bdefa99b69bf1e6d4ac69b8a364f77929f45c13476b4000f717"
ROLES = {role.name.lower(): f"token of a {role.name.lower()}" for role in Role}
FILM = len(PAYLOADS)  # sample number of the film in source hostile


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> SimpleNamespace:
    """Yield a site with a corpus, a catalogue and the steps of a configuration."""
    folder = tmp_path_factory.mktemp("served")
    store = build_served(folder / "corpus")
    catalog = Catalog(str(folder / "catalog.sqlite"))
    for name in ("digits", "hostile", "prose"):
        register(catalog, look(store, None, name), owner=PAYLOADS[0], licence="MIT")
    config = load_config(str(config_file(store.root, folder / "my.yaml")))
    data = config.data.replace(workers=0, prefetch_steps=0, cache=None)
    opened = open_data(data)

    def steps() -> Steps:
        planner = Planner([read_index(opened, name) for name in data.source_names], data)
        return Steps("my.yaml", data, 50, planner, opened, open_tokenizer(data, opened))

    corpus = Corpus(
        store,
        None,
        ["digits", "hostile", "mixed", "prose"],
        data.limits,
        folder / "facts",
        lambda name: Quiet(),
    )
    people = {digest(token): Person(f"a-{role}", Role.named(role)) for role, token in ROLES.items()}
    door = Doorkeeper(people, {digest("once"): Person("me", Role.VIEWER)})
    site = Site(
        corpus,
        Media(),
        Statistics(data.limits, data.seq_len, {}),
        door,
        frozenset({"testserver", "data.example.com"}),
        "session",
        records=Records(catalog),
        steps=Fresh("the steps", partial(manifests_of, store, data.source_names), steps),
        runs=(folder / "run",),
    )
    (folder / "run").mkdir()
    line = {"step": 3, "source": "hostile", "key": "evil/01", "item": 0, "reason": PAYLOADS[1]}
    (folder / "run" / "quarantine.jsonl").write_text(json.dumps(line) + '\n{"step": 4, "sou')
    with TestClient(application(site)):  # starts and stops the application
        yield SimpleNamespace(site=site, store=store, catalog=catalog, folder=folder)
    catalog.close()


def browser_of(site: Site, base: str = "http://testserver") -> TestClient:
    """Return a client that sends our own site as the origin of each request."""
    return TestClient(application(site), base, follow_redirects=False, headers={"Origin": base})


def client(made, role: str | None = None) -> TestClient:
    found = browser_of(made.site)
    if role is not None:
        answer = found.post("/login", data={"token": ROLES[role]})
        assert (answer.status_code, answer.headers["location"]) == (303, "/")
        assert "session" in found.cookies
    return found


@pytest.fixture
def viewer(made) -> TestClient:
    return client(made, "viewer")


def form_of(answer) -> str:
    return re.search(r'name="form" value="([^"]+)"', answer.text)[1]


def problem(answer) -> str:
    """Return the error line of a response, and check that it is a single line."""
    [line] = re.findall(r'role="alert">(.*?)</p>', answer.text, re.DOTALL)
    assert "\n" not in line
    assert "Traceback" not in answer.text
    return html.unescape(line)


# Access -----------------------------------------------------------------------------------------

PATHS = (
    "/", "/sources/prose", "/samples", "/samples/count", "/rows", "/blend", "/statistics",
    "/statistics/counted", "/sources/hostile/samples/0", "/media/hostile/0/0.jpg", "/words/prose/1",
    "/thumbnails/hostile/0", "/sources/hostile/rejected", "/quarantined", "/governance",
    "/versions", "/versions/prose@1", "/audit", "/sources/hostile/samples/0/draws", "/pictures/a",
    "/nowhere",
)  # fmt: skip


@pytest.mark.parametrize("path", PATHS)
def test_nothing_is_shown_without_a_session(made, path):
    stranger = client(made)
    for cookie in ("other=1", "session=guessed", "session=", "session"):
        answer = stranger.get(path, headers={"Cookie": cookie})
        assert answer.status_code == 303
        assert answer.headers["location"] == "/login"
        assert answer.text == ""
    part = stranger.get(path, headers={"HX-Request": "true"})
    assert (part.status_code, part.headers["HX-Redirect"]) == (401, "/login")


def test_a_token_of_an_address_is_used_up_by_its_first_use(made):
    made.site.door._once[digest("once")] = Person("me", Role.VIEWER)
    first, second = client(made), client(made)
    answer = first.post("/login", data={"token": "once"})
    assert answer.status_code == 303
    cookie = answer.headers["set-cookie"].lower()
    for word in ("httponly", "samesite=strict", "path=/"):
        assert word in cookie
    assert first.get("/").status_code == 200
    assert second.post("/login", data={"token": "once"}).status_code == 401
    assert second.get("/").status_code == 303


def test_a_token_is_exchanged_by_a_form_of_our_own_page_only(made):
    """GET and HEAD, as link previews send them, and forms of other sites keep the token valid."""
    made.site.door._once[digest("once")] = Person("me", Role.VIEWER)
    plain = TestClient(application(made.site), follow_redirects=False)
    for path in ("/login?token=once", "/login"):
        for looked in (plain.get(path), plain.head(path)):
            assert looked.status_code == 200
            assert "set-cookie" not in looked.headers
            assert "once" not in looked.text.replace("at-once", "").replace("used once", "")
    given = {"token": "once"}
    foreign = (
        {}, {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Origin": "http://testserver:1"},
        {"Origin": "http://testserver", "Sec-Fetch-Site": "cross-site"},
    )  # fmt: skip
    for headers in foreign:
        answer = plain.post("/login", data=given, headers=headers)
        assert (answer.status_code, "set-cookie" in answer.headers) == (403, False), headers
    assert client(made).post("/login", data=given).status_code == 303


def test_a_link_of_another_site_signs_nobody_in_by_itself(made):
    """Our script submits the form only if the user opened the address; otherwise a click does."""
    stranger = client(made)
    for site, at_once in (("none", True), ("cross-site", False), ("same-site", False), ("", False)):
        answer = stranger.get("/login", headers={"Sec-Fetch-Site": site} if site else {})
        assert ("data-at-once" in answer.text) == at_once, site


def test_cookies_of_other_programs_on_this_host_do_not_hide_ours(made):
    """Browsers send the cookies of all ports of a host, and those may be malformed."""
    own = client(made, "viewer").cookies["session"]
    for foreign in (
        'state={"a": [1, 2]}',
        "na[me=1",
        "plain",
        "=",
        '"',
        "a=b=c",
        "\xe9=\xff",
        "x=@:,",
    ):
        for cookie in (f"{foreign}; session={own}", f"session={own}; {foreign}"):
            headers = {"Cookie": cookie.encode("latin-1")}
            assert browser_of(made.site).get("/", headers=headers).status_code == 200, cookie


def test_the_cookie_is_for_https_alone_where_the_server_is(made, monkeypatch):
    monkeypatch.setattr(made.site, "secure", True)
    answer = client(made).post("/login", data={"token": ROLES["viewer"]})
    assert "; secure" in answer.headers["set-cookie"].lower()


def test_a_session_ends_by_signing_out_and_by_age(made, monkeypatch):
    one, other = client(made, "viewer"), client(made, "viewer")
    cookie = one.cookies["session"]
    assert one.post("/logout", data={"form": form_of(one.get("/"))}).status_code == 303
    one.cookies.set("session", cookie)
    assert one.get("/").status_code == 303
    assert other.get("/").status_code == 200
    monkeypatch.setattr(auth, "IDLE_S", -1.0)
    assert other.get("/").status_code == 303


def test_the_oldest_session_of_a_person_makes_room_for_his_own(monkeypatch):
    monkeypatch.setattr(auth, "_SESSIONS", 2)
    people = {digest("t"): Person("a", Role.VIEWER), digest("u"): Person("b", Role.ADMIN)}
    people[digest("v")] = people[digest("t")]  # a second token of the same person
    door = Doorkeeper(people, {})
    other = door.enter("u")
    secrets = [door.enter(token) for token in "ttv"]
    assert [door.session(one) is not None for one in secrets] == [False, True, True]
    assert door.session(other).person.name == "b"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("testserver", 200), ("testserver:8080", 200), ("DATA.example.com", 200),
        ("evil.example", 400), ("testserver.evil.example", 400), ("testserver@evil.example", 400),
        ("", 400),
    ],
)  # fmt: skip
def test_only_known_hosts_are_answered(viewer, host, status):
    assert viewer.get("/", headers={"Host": host}).status_code == status


@pytest.mark.parametrize(
    ("given", "name"),
    [("a:80", "a"), ("a", "a"), ("[::1]:80", "[::1]"), ("[::1]", "[::1]"), (":80", ":80")],
)
def test_the_name_of_a_host(given, name):
    assert host_of(given) == name


def test_two_hosts_are_none(made):
    sent = []

    async def send(message):
        sent.append(message)

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/login", "query_string": b""}
    headers = [(b"host", b"testserver"), (b"host", b"evil.example")]
    asyncio.run(application(made.site)({**scope, "headers": headers}, receive, send))
    assert sent[0]["status"] == 400


def test_every_answer_has_its_policy(made, viewer):
    for answer in (
        viewer.get("/"), viewer.get("/nowhere"), viewer.get("/static/htmx.min.js"),
        viewer.get("/static/style.css"), client(made).get("/"), viewer.get("/samples?tokens_to=x"),
        viewer.get("/", headers={"Host": "evil.example"}), viewer.put("/"),
    ):  # fmt: skip
        policy = answer.headers["content-security-policy"]
        assert policy.startswith("default-src 'none'; script-src 'self'; style-src 'self'")
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "same-origin"
        assert answer.headers["cache-control"] == "no-store"
        assert "server" not in answer.headers


def test_files_of_data_can_be_nothing_but_a_picture(viewer):
    for path in ("/media/hostile/0/0.jpg", f"/media/hostile/{FILM}/0.mp4", "/thumbnails/hostile/0"):
        answer = viewer.get(path)
        assert answer.status_code == 200, path
        assert "sandbox" in answer.headers["content-security-policy"]
        assert "script-src" not in answer.headers["content-security-policy"]
        assert answer.headers["content-type"].split("/")[0] in ("image", "video")


# Changes ------------------------------------------------------------------------------------------


def test_roles(made):
    """Viewers change nothing, curators may not archive, and no role can use another role's form."""
    before = len(audited(made))
    forms = {role: (client(made, role)) for role in ROLES}
    page = "/versions/prose@1"
    texts = {role: one.get(page) for role, one in forms.items()}
    assert "Make it" not in texts["viewer"].text
    assert "archived" not in re.findall(r'value="(\w+)">Make it', texts["curator"].text)
    assert "archived" in re.findall(r'value="(\w+)">Make it', texts["admin"].text)
    for role, state, form, status in (
        ("viewer", "archived", "own", 403),
        ("viewer", "verified", "own", 403),
        ("curator", "archived", "own", 403),
        ("admin", "archived", "curator", 403),
        ("admin", "archived", "none", 403),
    ):
        value = form_of(texts[role if form == "own" else "curator"]) if form != "none" else ""
        given = {"state": state, "revision": "1", "form": value}
        answer = forms[role].post(f"{page}/state", data=given)
        assert answer.status_code == status, (role, state, form)
        problem(answer)
    held = {"do": "put", "hold": "mine", "form": form_of(texts["viewer"])}
    assert forms["viewer"].post("/sources/prose/holds", data=held).status_code == 403
    assert len(audited(made)) == before


def audited(made) -> list:
    with made.catalog.read() as connection:
        return list(entries(connection))


def test_a_state_is_changed_only_as_it_was_seen(made):
    report = {"problems": {}, "sample_share": 1, "tokens_counted": True}
    content = read_index(made.store, "digits").content_hash
    seen = {"sources": {"digits": {"content_hash": content, **report}}}
    promote(made.catalog, "digits@1", "verified", report=seen)
    curator = client(made, "curator")
    page = curator.get("/versions/digits@1")
    assert "verified, revision 2" in page.text
    given = {"state": "active", "revision": "1", "form": form_of(page)}
    late = curator.post("/versions/digits@1/state", data=given)
    assert "has revision 2 (verified), not 1" in problem(late)
    done = curator.post("/versions/digits@1/state", data=given | {"revision": "2"})
    assert (done.status_code, done.headers["location"]) == (303, "/versions/digits@1")
    assert "active, revision 3" in curator.get("/versions/digits@1").text
    assert audited(made)[-1].what["by"] == "a-curator (curator, by the page)"
    wrong = curator.post("/versions/digits@1/state", data=given | {"state": "flying"})
    assert wrong.status_code == 400


def test_holds_are_put_by_curators_and_ended_by_admins(made):
    curator, admin = client(made, "curator"), client(made, "admin")
    form = form_of(curator.get("/sources/prose"))
    given = {"form": form, "do": "put", "hold": PAYLOADS[0]}
    assert curator.post("/sources/prose/holds", data=given).status_code == 303
    assert html.escape(PAYLOADS[0], quote=False) in curator.get("/governance").text.replace(
        "&#34;", '"'
    )
    end = given | {"do": "end"}
    assert curator.post("/sources/prose/holds", data=end).status_code == 403
    mine = end | {"form": form_of(admin.get("/sources/prose"))}
    assert admin.post("/sources/prose/holds", data=mine).status_code == 303
    told = [(one.what["action"], one.what["by"]) for one in audited(made)[-2:]]
    assert told == [
        ("put", "a-curator (curator, by the page)"),
        ("ended", "a-admin (admin, by the page)"),
    ]
    assert audited(made)[-1].what["hold"] == PAYLOADS[0]
    assert "no hold" in problem(admin.post("/sources/prose/holds", data=mine))
    assert admin.post("/sources/prose/holds", data=mine | {"hold": ""}).status_code == 400


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"}, {"Origin": "http://testserver:81"},
    ],
)  # fmt: skip
def test_a_form_of_another_site_is_refused(made, headers):
    admin = client(made, "admin")
    given = {"form": form_of(admin.get("/"))}
    assert admin.post("/logout", data=given, headers=headers).status_code == 403
    ours = {"Origin": "http://testserver", "Sec-Fetch-Site": "same-origin"}
    assert admin.post("/logout", data=given, headers=ours).status_code == 303


def test_what_is_no_form_is_refused(made):
    admin = client(made, "admin")
    assert admin.post("/logout", json={"form": "x"}).status_code == 415
    assert admin.post("/logout", data={"form": "x" * 20_000}).status_code == 413
    for method in ("PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        assert admin.request(method, "/").status_code == 405
    assert admin.get("/logout").status_code == 405


# Contents -----------------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Names and attributes of all elements of a page."""

    def __init__(self, text: str):
        super().__init__()
        self.found: list[tuple[str, dict]] = []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs)))


PAGES = (
    "/", "/sources/hostile", "/samples", "/samples?source=hostile", "/sources/hostile/rejected",
    "/sources/hostile/samples/{n}", "/sources/hostile/samples/{n}/draws", "/rows?step=2&rows=16",
    "/quarantined", "/governance", "/versions", "/versions/hostile@1", "/audit",
    "/words/hostile/{n}", "/samples?key={payload}", "/sources/{payload}", "/versions/{payload}",
    "/statistics?source={payload}",
    "/samples?holds={payload}", "/samples?tokens_from={payload}", "/samples?after={payload}",
    "/sources/hostile/keys/{payload}", "/rows?step={payload}", "/media/hostile/0/{payload}",
    "/sources/hostile/rejected?reason={payload}&key={payload}", "/blend?steps=2",
)  # fmt: skip
OURS = {"/static/htmx.min.js", "/static/style.css", "/static/web.css", "/static/icon.svg"}


@pytest.mark.parametrize("path", PAGES)
def test_no_payload_becomes_an_element(viewer, path):
    for number, payload in enumerate(PAYLOADS):
        answer = viewer.get(path.format(n=number, payload=quote(payload, safe="")))
        if not answer.headers["content-type"].startswith("text/html"):
            continue
        for tag, attributes in Elements(answer.text).found:
            assert tag not in ("iframe", "base", "style", "math", "mglyph", "object"), path
            assert "style" not in attributes
            assert not any(name.startswith(("on", "hx-on")) for name in attributes)
            for name in ("src", "href", "action", "xlink:href", "hx-get"):
                value = attributes.get(name, "/")
                assert value.startswith(("/", "#")), (path, tag, value)
                assert not value.startswith("//")
            if tag in ("script", "link"):
                assert attributes.get("src") or attributes.get("href") in OURS
            assert "hx-post" not in attributes
            assert attributes.get("hx-get", "/samples") != "/logout"
        if "{payload}" not in path:
            break  # the page does not depend on the payload


def test_payloads_are_all_there_as_text(viewer):
    text = html.unescape(viewer.get("/sources/hostile/samples/0").text)
    assert PAYLOADS[0] in text
    rejected = html.unescape(viewer.get("/sources/hostile/rejected").text)
    for number, payload in enumerate(PAYLOADS):
        assert f"{payload}{number}" in rejected
    assert PAYLOADS[1] in html.unescape(viewer.get("/quarantined").text)
    assert HOSTILE.strip() in html.unescape(viewer.get("/sources/mixed/samples/0").text)


@pytest.fixture
def listed(tmp_path, monkeypatch) -> SimpleNamespace:
    """Write a list of 1,000 rejected samples, of which a page searches 30 kB at a time."""
    monkeypatch.setattr(rejected, "STRETCH", 30_000)
    monkeypatch.setattr(rejected, "_PIECE", 7_000)
    store = FolderStore(tmp_path)
    lines = [
        {"key": f"key {n}", "reason": ("odd", "rare")[n % 100 == 99], "detail": "x" * (n % 70)}
        for n in range(1000)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    store.put("one/rejected.jsonl", text.encode())
    return SimpleNamespace(store=store, lines=lines, size=len(text), all=RejectedList(store, "one"))


def all_pages(listed, reason: str = "", key: str = "") -> list[list[dict]]:
    pages, after = [], 0
    while after is not None:
        found = listed.all.page(reason, key, after)
        pages.append(found.lines)
        after = found.after
    return pages


def test_rejected_samples_come_in_parts(listed):
    pages = all_pages(listed)
    assert [len(page) for page in pages] == [200] * 5
    assert sum(pages, []) == listed.lines
    assert sum(all_pages(listed, "rare"), []) == listed.lines[99::100]
    assert sum(all_pages(listed, key="EY 77"), []) == [
        one for one in listed.lines if one["key"].startswith("key 77")
    ]
    with pytest.raises(ValueError, match=r"after=5: no line of one/rejected\.jsonl begins there"):
        listed.all.page("", "", 5)
    with pytest.raises(ValueError, match="no line"):
        listed.all.page("", "", listed.size)


def test_a_look_at_rejected_samples_reads_no_more_than_a_stretch(listed):
    before = listed.store.stats.bytes
    first = listed.all.page("no such reason", "", 0)
    assert listed.store.stats.bytes - before <= 2 * (30_000 + 7_000)
    assert first.lines == []
    assert 30_000 <= first.after < 30_100
    assert first.counted == pytest.approx(30_000 / listed.size, abs=0.01)
    found = [listed.all.page("", "", 0) for _ in range(5)]
    assert found[-1].reasons == {"odd": 990, "rare": 10}
    assert [one.counted < 1 for one in found] == [True, False, False, False, False]
    # A replaced list is counted again; a last line without a newline counts, too.
    listed.store.put("one/rejected.jsonl", b'{"key": "k", "reason": "new", "detail": ""}')
    assert listed.all.page("", "", 0) == ([{"key": "k", "reason": "new", "detail": ""}], None,
                                          {"new": 1}, 1.0)  # fmt: skip
    assert RejectedList(listed.store, "none").page("", "", 0) == ([], None, {}, 1.0)


def test_rejected_samples_go_on_by_a_link(viewer, monkeypatch):
    monkeypatch.setattr(rejected, "LINES", 2)
    path, keys = "/sources/hostile/rejected?key=script", []
    for _ in range(len(PAYLOADS)):
        text = viewer.get(path).text
        keys += re.findall(r"<tr><td>(.*?)</td>", text)
        if (found := re.search(r'href="([^"]+)">look further', text)) is None:
            break
        path = html.unescape(found[1])
    assert len(keys) == len({*keys}) == sum("script" in payload for payload in PAYLOADS) > 2
    assert "16 rejected samples." in text


@pytest.mark.parametrize("size", [1, 7, 64, 1 << 16])
def test_the_last_lines_of_a_file(tmp_path, monkeypatch, size):
    monkeypatch.setattr(record_pages, "_BLOCK", size)
    file = tmp_path / "lines"
    file.write_bytes(b"")
    assert record_pages.last_lines(file, 3) == []
    lines = [b"%d" % n * (n % 9) for n in range(40)]
    file.write_bytes(b"\n".join(lines) + b"\nunfinished")
    for count in (1, 3, 39, 40, 41):
        assert record_pages.last_lines(file, count) == lines[-count:]


def test_the_grid_and_its_parts(viewer):
    whole = viewer.get("/samples?tokens_from=1&key=EVIL&category=&source=")
    assert whole.headers["vary"] == "HX-Request"
    assert "hx-push-url" not in whole.headers
    assert "<nav>" in whole.text
    part = viewer.get("/samples?tokens_from=1&key=EVIL&category=", headers={"HX-Request": "true"})
    assert part.headers["vary"] == "HX-Request"
    assert part.headers["hx-push-url"] == "/samples?key=EVIL&tokens_from=1"
    assert "<nav>" not in part.text
    assert "how-many" in part.text
    back = {"HX-Request": "true", "HX-History-Restore-Request": "true"}
    assert "<nav>" in viewer.get("/samples", headers=back).text
    cards, after, seen = [], "", 0
    while True:
        asked = {"HX-Request": "true"}
        answer = viewer.get(f"/samples?{after}", headers=asked)
        assert ("hx-push-url" in answer.headers) == (not after)
        cards += re.findall(r'class="card" href="([^"]+)"', answer.text)
        found = re.search(r'class="more" hx-get="/samples\?([^"]+)"', answer.text)
        if found is None:
            break
        after, seen = html.unescape(found[1]), seen + 1
    assert len(cards) == len({*cards}) == 60 + 15 + 12 + 13
    assert seen == 1  # pages hold 60 samples
    assert viewer.get("/samples/count").text == "100 of 100 samples"


def test_filters_find_what_the_index_has(made, viewer):
    index = read_index(made.store, "digits")
    sizes = np.diff(index.item_ptr)
    for query, expected in (
        ("source=hostile&holds=boxes", len(PAYLOADS)),
        ("source=hostile&holds=videos", 1),
        ("holds=text&category=text", 13),
        ("source=hostile&side_from=200&side_to=200", len(PAYLOADS)),
        ("source=hostile&side_from=201", 0),
        ("source=digits&items_from=1&items_to=1", int((sizes == 1).sum())),
        ("key=evil/0", 10),
        ("key=%25", 0),
        ("source=digits&bytes_to=1", 0),
    ):
        answer = viewer.get(f"/samples?{query}")
        assert len(re.findall('class="card"', answer.text)) == expected, query
        assert viewer.get(f"/samples/count?{query}").text.startswith(f"{expected:,} of "), query
    longest = viewer.get("/samples?order=longest&source=prose").text
    told = [int(one.replace(",", "")) for one in re.findall(r"([\d,]+) tokens", longest)]
    assert told == sorted(told, reverse=True)
    assert len(told) == 13


def test_a_sample_by_its_key(viewer):
    answer = viewer.get("/sources/hostile/keys/evil/03")
    assert answer.headers["location"] == "/sources/hostile/samples/3"
    assert "no sample 'evil'" in problem(viewer.get("/sources/hostile/keys/evil"))


def test_media_are_the_files_of_the_shards(viewer):
    assert viewer.get("/media/hostile/0/0.jpg").content == turned_jpeg()
    whole = viewer.get(f"/media/hostile/{FILM}/0.mp4")
    assert whole.content == film()
    assert whole.headers["accept-ranges"] == "bytes"
    for path in ("0.png", "0.mp4"):
        answer = viewer.get(f"/media/hostile/0/{path}")
        assert answer.status_code == (200 if path == "0.png" else 404)
    for path in ("0.html", "0", "1.jpg", "x.jpg", "999999999.jpg", "0.jpg.html"):
        assert viewer.get(f"/media/hostile/0/{path}").status_code == 404, path
    assert viewer.get("/media/hostile/99/0.jpg").status_code == 404
    assert viewer.get("/thumbnails/prose/0").status_code == 404


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [
        ("bytes=0-9", 206, slice(0, 10)),
        ("bytes=10-", 206, slice(10, None)),
        ("bytes=-7", 206, slice(-7, None)),
        ("bytes=5-1000000", 206, slice(5, None)),
        ("bytes=-1000000", 206, slice(0, None)),
        ("bytes=1000000-", 416, None),
        ("bytes=9-3", 416, None),
        ("bytes=-0", 416, None),
        ("bytes=-", 200, slice(0, None)),
        ("bytes=0-1,5-6", 200, slice(0, None)),
        ("lines=0-1", 200, slice(0, None)),
        ("bytes=a-b", 200, slice(0, None)),
    ],
)
def test_parts_of_a_file(viewer, asked, status, part):
    data = film()
    answer = viewer.get(f"/media/hostile/{FILM}/0.mp4", headers={"Range": asked})
    assert answer.status_code == status
    if part is None:
        assert answer.headers["content-range"] == f"bytes */{len(data)}"
        return
    assert answer.content == data[part]
    assert int(answer.headers["content-length"]) == len(data[part])
    if status == 206:
        first, last, _ = part.indices(len(data))
        assert answer.headers["content-range"] == f"bytes {first}-{last - 1}/{len(data)}"


def test_large_files_are_sent_in_pieces(monkeypatch, viewer):
    """The server reads neither the whole file nor a range longer than a piece."""
    monkeypatch.setattr("launch.web.media.WHOLE", 1000)
    monkeypatch.setattr("launch.web.media._PIECE", 300)
    monkeypatch.setattr("launch.web.media.ranged.__defaults__", (300,))
    monkeypatch.setattr(
        "launch.web.corpus.ShownSource.whole", lambda *_: pytest.fail("read as a whole")
    )
    data = film()
    path = f"/media/hostile/{FILM}/0.mp4"
    assert viewer.get(path).content == data
    part = viewer.get(path, headers={"Range": "bytes=100-"})
    assert part.content == data[100:400]
    assert part.headers["content-range"] == f"bytes 100-399/{len(data)}"


def test_large_files_are_not_decoded(made, monkeypatch, viewer):
    """Thumbnails and draws of large files are refused; draws read single images and no videos."""
    read: list[tuple[str, int]] = []
    real = Media.whole

    def whole(self, source, sample, medium):
        read.append((source.name, medium.number))
        return real(self, source, sample, medium)

    monkeypatch.setattr(Media, "whole", whole)
    film_or_clip = "/sources/mixed/samples/1/draws?epochs=2"
    assert viewer.get(film_or_clip).status_code == 200
    assert read == []
    assert viewer.get("/sources/mixed/samples/0/draws?epochs=2").status_code == 200
    assert read == [("mixed", 0)] * 2
    monkeypatch.setattr("launch.web.media.WHOLE", 1000)
    monkeypatch.setattr(
        "launch.web.corpus.ShownSource.whole", lambda *_: pytest.fail("read as a whole")
    )
    for path in (f"/thumbnails/hostile/{FILM}", "/sources/mixed/samples/0/draws"):
        monkeypatch.setattr(made.site.media, "_small", Kept(1))
        answer = viewer.get(path)
        assert answer.status_code == 400
        assert re.search(
            r"file 0 has [\d.]+ kB; only files of up to 1.0 kB are decoded here", problem(answer)
        )


def test_damaged_bytes_are_not_shown(made, viewer, monkeypatch):
    real = type(made.store).get

    def wrong(self, key, offset=0, length=None, *, etag=None):
        data = real(self, key, offset, length, etag=etag)
        return data[:-1] + bytes([data[-1] ^ 1]) if key.endswith(".tar") else data

    monkeypatch.setattr(type(made.store), "get", wrong)
    for path in ("/media/hostile/5/0.jpg", "/sources/hostile/samples/5", "/thumbnails/hostile/5"):
        answer = viewer.get(path)
        assert answer.status_code == 502, path
        assert "CRC-32 is" in problem(answer)


def test_rows_are_those_that_data_show_shows(made, viewer):
    static = show_rows(str(made.folder / "my.yaml"), (), 3, range(1, 3))
    shown = viewer.get("/rows?step=3&row=1&rows=2").text
    for kind in ("section", "article"):
        assert static.count(f"<{kind}") == shown.count(f"<{kind}")
    span = r'<span class="(t[^"]*)" title="([^"]*)">'
    assert re.findall(span, static.split("<section", 1)[1]) == re.findall(
        span, shown.split("<section", 1)[1]
    )
    assert "data:" not in shown
    [first, *_] = re.findall(r'href="(/pictures/\w+)"', shown)
    assert viewer.get(first).headers["content-type"].startswith("image/")
    assert viewer.get("/pictures/none").status_code == 404
    # A step looks the same after a later step was planned.
    viewer.get("/rows?step=40")
    again = viewer.get("/rows?step=3&row=1&rows=2").text
    assert re.findall(span, again) == re.findall(span, shown)


def test_draws_are_those_of_the_run(made, viewer):
    """The page shows the draws that the loader's plan has for each epoch."""
    text = viewer.get("/sources/hostile/samples/2/draws?first=1&epochs=5").text
    assert re.findall(r"<b>epoch (\d+)</b>", text) == ["1", "2", "3", "4", "5"]
    turned = re.findall(r"turned by (\d+) degrees", text)
    assert {*turned} <= {"90", "180", "270"}
    assert turned
    steps = made.site.steps.last
    source = next(one for one in steps._planner.sources if one.index.name == "hostile")
    drawn = source.in_epochs(np.full(5, 2), np.arange(1, 6))
    told = [int(one) for one in re.findall(r"&middot; (\d+) tokens", text)]
    assert told == drawn.layout.length.tolist()
    plans = [steps._reader.plan(step) for step in range(50)]
    seen = 0
    for plan in plans:
        table = plan.samples
        mine = (table.index == 2) & (
            table.source == [s.index.name for s in steps._planner.sources].index("hostile")
        )
        for epoch, length in zip(table.epoch[mine].tolist(), table.length[mine].tolist()):
            assert (
                int(source.in_epochs(np.array([2]), np.array([epoch])).layout.length[0]) == length
            )
            seen += 1
    assert seen > 3


def test_a_blend_is_that_of_the_plans(made, viewer):
    text = viewer.get("/blend?step=5&steps=10").text
    steps = made.site.steps.last
    plans = [steps._reader.plan(step) for step in range(4, 14)]
    names = [one.index.name for one in steps._planner.sources]
    for number, name in enumerate(names):
        tokens = sum(int(p.samples.length[p.samples.source == number].sum()) for p in plans)
        samples = sum(int((p.samples.source == number).sum()) for p in plans)
        media = sum(
            int(p.items.tokens[p.samples.source[p.items.sample] == number].sum()) for p in plans
        )
        found = re.search(
            rf"<tr><td>{name}</td><td>{samples:,}</td><td>{tokens:,}</td><td>.*?</td><td>(.*?)</td>",
            text,
        )
        assert found[1] == f"{media:,}"


@pytest.fixture
def late(made, monkeypatch) -> Iterator[SimpleNamespace]:
    """Yield unplanned steps of a server that plans one step per request."""
    steps = made.site.steps._make()
    planned: list[int] = []
    real = steps._planner.plan

    def plan(state):
        planned.append(state["step"])
        return real(state)

    monkeypatch.setattr(steps._planner, "plan", plan)
    monkeypatch.setattr(made.site, "steps", Fresh("the steps", tuple, lambda: steps))
    monkeypatch.setattr("launch.web.steps.SLICE_S", -1.0)
    plain = Planner(steps._planner.indices, steps.config)
    yield SimpleNamespace(steps=steps, planned=planned, plan=plan, plain=plain)
    steps.close()


def test_a_late_step_comes_after_some_time_without_holding_anybody(viewer, late):
    for number in range(1, 9):
        answer = viewer.get("/rows?step=10&rows=1")
        again = (answer.headers["refresh"], answer.headers["retry-after"])
        assert (answer.status_code, again) == (503, ("1", "1"))
        assert problem(answer) == (
            "step 10 comes after windows that have to be packed first: done up to step "
            f"{number}. This page comes again by itself."
        )
    assert late.planned == list(range(8))
    assert viewer.get("/rows?step=10&rows=1").status_code == 200
    assert late.planned == [*range(9), 9]
    plain, _ = late.plain.plan(late.plain.state_at(9))
    assert np.array_equal(late.steps._reader.plan(9).samples.index, plain.samples.index)


def test_a_fault_on_the_way_loses_nothing(viewer, late, monkeypatch):
    monkeypatch.setattr("launch.web.steps.SLICE_S", 60.0)
    faults = [5]

    def plan(state):
        if state["step"] in faults:
            faults.clear()
            raise ValueError("a window that cannot be packed")
        return late.plan(state)

    monkeypatch.setattr(late.steps._planner, "plan", plan)
    assert problem(viewer.get("/rows?step=9&rows=1")) == "a window that cannot be packed"
    assert viewer.get("/rows?step=9&rows=1").status_code == 200
    assert late.planned == [*range(8), 8]


def test_a_blend_of_many_steps_comes_in_parts(viewer, late):
    answers = [viewer.get("/blend?step=3&steps=4") for _ in range(5)]
    assert [one.status_code for one in answers] == [503] * 4 + [200]
    assert "done up to step 4" in problem(answers[2])
    assert late.planned == list(range(6))


def test_rows_that_take_too_much_memory_are_not_read(viewer, monkeypatch):
    assert viewer.get("/rows?step=2&rows=3").status_code == 200
    monkeypatch.setattr("launch.web.steps.MOST_BYTES", 1000)
    told = problem(viewer.get("/rows?step=2&rows=3"))
    assert re.fullmatch(
        r"3 rows of step 2 take [\d.]+ [kM]B with their media files; 1.0 kB may be read at once: "
        "ask for fewer",
        told,
    )


def test_who_comes_while_steps_are_read_comes_again(viewer, late):
    with late.steps._reader._lock:
        assert "other steps are being planned" in problem(viewer.get("/rows?step=1&rows=1"))
        assert viewer.get("/samples").status_code == 200
    assert viewer.get("/rows?step=1&rows=1").status_code == 200


def test_pictures_are_decoded_in_another_process(made, viewer, monkeypatch):
    """The server process decodes no image and refuses an image with too many pixels."""
    for name in ("read_image", "read_video"):
        monkeypatch.setattr(f"data_pipeline.decode.{name}", lambda *_: pytest.fail("decoded here"))
    monkeypatch.setattr(made.site.media, "_small", Kept(1 << 20))
    for path in (
        "/thumbnails/hostile/0", f"/thumbnails/hostile/{FILM}", "/rows?step=2&rows=16",
        "/sources/hostile/samples/2/draws?epochs=2",
    ):  # fmt: skip
        assert viewer.get(path).status_code == 200, path
    little = Decoder(Bounds(image=100))
    monkeypatch.setattr(made.site.media, "decoder", little)
    told = "200 x 100 pixels; only pictures of up to 100 are decoded here"
    assert told in problem(viewer.get("/thumbnails/hostile/1"))
    assert told in html.unescape(viewer.get("/rows?step=2&rows=16").text)
    little.close()


def test_draws_are_offered_of_what_is_trained_on(made):
    mine, steps = made.site.corpus.source("prose"), made.site.steps.last
    assert steps.trains_on(mine)
    assert not steps.trains_on(SimpleNamespace(name="prose", identity="of another content"))
    assert not steps.trains_on(SimpleNamespace(name="proses", identity=mine.identity))


def test_pages_that_take_long_leave_threads_to_the_others(made, viewer):
    """Four slow requests may run at a time; the server refuses the next one immediately."""
    long = ("/rows?step=3", "/blend", "/sources/hostile/samples/2/draws")
    for _ in range(4):
        assert made.site.working.acquire(blocking=False)
    try:
        for path in (*long, "/statistics/counted"):
            answer = viewer.get(path)
            assert (answer.status_code, "others are having" in problem(answer)) == (503, True)
            assert answer.headers["refresh"] == "1"
        part = viewer.get("/statistics/counted?source=prose", headers={"HX-Request": "true"})
        assert 'hx-get="/statistics/counted?source=prose"' in part.text
        assert part.headers["retry-after"] == "1"
        assert viewer.get("/samples").status_code == viewer.get("/statistics").status_code == 200
    finally:
        for _ in range(4):
            made.site.working.release()
    for path in long:
        assert viewer.get(path).status_code == 200
    for _ in range(5):  # a failed request frees its slot
        assert viewer.get("/rows?step=0").status_code == 400


def test_statistics_are_those_of_data_count(made, viewer, monkeypatch):
    # A thread replaces the process here; tests/browser uses the process.
    monkeypatch.setattr(
        "launch.web.statistics.ProcessPoolExecutor", lambda *_: ThreadPoolExecutor()
    )
    found = viewer.get("/statistics/counted?source=digits").text
    assert "60" in re.search(r"<tr><td>digits</td>.*?</tr>", found)[0]
    assert "<svg" in found
    assert 'style="' not in found
    assert "<style" not in found
    compared = viewer.get("/statistics/counted?source=digits&against=prose").text
    assert "digits after prose" in compared
    assert viewer.get("/statistics?against=prose").status_code == 400


def test_audit_and_versions(made, viewer):
    text = html.unescape(viewer.get("/audit").text)
    assert "each with the hash that it had" in text
    assert '"version": "hostile@1"' in text
    version = html.unescape(viewer.get("/versions/hostile@1").text)
    for words in (made.store.uri, PAYLOADS[0], "None that was scanned"):
        assert words in version
    assert "staged" in viewer.get("/versions").text


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/samples?tokens_from=many", 400, "tokens_from='many': expected a whole number"),
        ("/samples?bytes_to=-1", 400, "bytes_to='-1': expected a whole number"),
        ("/samples?items_to=9999999999999999999", 400, "items_to="),
        ("/samples?holds=everything", 400, "holds='everything': expected one of"),
        ("/samples?order=random", 400, "order='random': expected stored or longest"),
        ("/samples?source=digit", 404, "did you mean 'digits'?"),
        ("/samples?category=texts", 404, "did you mean 'text'?"),
        ("/samples?after=nowhere:1", 400, "after='nowhere:1': expected SOURCE:NUMBER"),
        ("/samples?after=digits", 400, "after='digits'"),
        ("/sources/digit", 404, "did you mean 'digits'?"),
        ("/sources/digits/samples/60", 404, "no sample 60; it has 60"),
        ("/rows?step=0", 400, "step=0: expected 1"),
        ("/rows?step=51", 400, "my.yaml has steps 1 to 50"),
        ("/rows?row=100000", 400, "row 100000: a step has rows 0 to"),
        ("/rows?rows=17", 400, "rows=17: expected 1 to 16"),
        ("/blend?step=45&steps=10", 400, "my.yaml has steps 1 to 50"),
        ("/blend?steps=201", 400, "steps=201: expected 1 to 200"),
        ("/sources/digits/samples/0/draws?epochs=13", 400, "epochs=13: expected 1 to 12"),
        ("/versions/digits", 400, "expected DATASET@NUMBER"),
        ("/versions/digits@9", 400, "no such version"),
        ("/audit?before=x", 400, "before='x': expected a whole number"),
        ("/nowhere", 404, "404: Not Found"),
        ("/static/../app.py", 404, "404: Not Found"),
        ("/static/%2e%2e/app.py", 404, "404: Not Found"),
    ],
)
def test_bad_input_is_told_in_one_line(viewer, path, status, words):
    answer = viewer.get(path)
    assert answer.status_code == status
    assert words in problem(answer)
    part = viewer.get(path, headers={"HX-Request": "true"})
    assert part.status_code == status
    assert words in problem(part)
    assert "<nav>" not in part.text


def test_a_fault_tells_nothing_of_itself(made, viewer, monkeypatch):
    def broken(*_):
        raise RuntimeError("the secret of the house")

    monkeypatch.setattr("launch.web.record_pages.read_holds", broken)
    quiet = TestClient(application(made.site), raise_server_exceptions=False)
    quiet.cookies = viewer.cookies
    answer = quiet.get("/governance")
    assert answer.status_code == 500
    assert "secret of the house" not in answer.text
    assert "its log says which" in problem(answer)
    assert "default-src 'none'" in answer.headers["content-security-policy"]


def test_without_a_catalogue_and_steps_the_rest_is_shown(made, monkeypatch):
    monkeypatch.setattr(made.site, "records", None)
    monkeypatch.setattr(made.site, "steps", None)
    found = client(made, "admin")
    for path in ("/", "/sources/prose", "/samples", "/governance", "/quarantined"):
        assert found.get(path).status_code == 200, path
    assert "--catalog" in problem(found.get("/versions"))
    assert "--config or --run" in problem(found.get("/rows"))
    assert 'href="/audit"' not in found.get("/").text


def test_what_is_served_of_others_is_what_was_taken_in():
    folder = HERE / "static"
    assert hashlib.sha256((folder / "htmx.min.js").read_bytes()).hexdigest() == HTMX_SHA256
    assert 'version:"2.0.11"' in (folder / "htmx.min.js").read_text()
    assert (folder / "htmx.LICENSE").read_text().startswith("Zero-Clause BSD")
    assert {path.name for path in folder.iterdir()} == {
        "htmx.min.js", "htmx.LICENSE", "icon.svg", "login.js", "web.css"
    }  # fmt: skip


def test_templates_escape_and_have_no_script_or_style_of_their_own():
    for path in (HERE / "templates").iterdir():
        text = path.read_text()
        assert "|safe" not in text, path
        assert "autoescape" not in text, path
        assert not re.search(r"\sstyle=|\son\w+=|<style|<script(?! src=\"/static/)", text), path


# The command --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], ["--host 0.0.0.0", "--tokens FILE"]),
        (["--host", "::"], ["--host ::", "--tokens FILE"]),
        (["--host", "data.example.com"], ["--tokens FILE"]),
        (["--host", "0.0.0.0", "--tokens", "TOKENS"], ["--allow-host NAME"]),
        (["--tokens", "/nowhere/tokens"], ["/nowhere/tokens"]),
        (["--role", "owner"], ["role 'owner'", "viewer, curator, admin"]),
        (["--certificate", "a.pem"], ["--certificate and --key"]),
        (["--certificate", "/none.pem", "--key", "/none.key"], ["--certificate /none.pem"]),
        (["--certificate", "TOKENS", "--key", "TOKENS"], ["--certificate ", "--key "]),
        (["--config", "tiny_cpu", "--run", "x"], ["--config and --run"]),
        (["--host", "203.0.113.7", "--tokens", "TOKENS", "--allow-host", "a"], ["203.0.113.7"]),
        (["--source", "digit"], ["'digit'", "did you mean 'digits'"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
        (["--run", "/nowhere"], ["/nowhere"]),
    ],
)  # fmt: skip
def test_the_command_refuses_in_one_line(made, tmp_path, monkeypatch, options, words):
    monkeypatch.delenv("KIMI_PRETRAIN_CATALOG", raising=False)
    monkeypatch.setattr(data_serve, "_run", lambda *_: pytest.fail("it served"))
    add_token(tmp_path / "tokens", "ann", Role.VIEWER)
    given = [str(tmp_path / "tokens") if one == "TOKENS" else one for one in options]
    facts = ("--facts", tmp_path / "facts")
    result = run("serve", made.store.root, *given, *facts, code=2)
    assert all(word in result.stderr for word in words), result.stderr
    assert not (tmp_path / "facts").exists()


def test_a_port_in_use_is_told(made):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("serve", made.store.root, "--port", port, code=2)
    assert f"--port {port}: Address already in use" in result.stderr


@pytest.fixture
def sites(monkeypatch) -> Iterator[list]:
    """Return a list that collects the sites which the command would serve."""
    found: list = []
    monkeypatch.setattr(data_serve, "_run", lambda site, *_: found.append(site))
    monkeypatch.delenv("KIMI_PRETRAIN_CATALOG", raising=False)
    return found


def test_the_command_serves_the_loopback_with_a_token_for_one_use(made, sites):
    options = ("--facts", made.folder / "facts", "--source", "prose", "--role", "curator")
    result = run("serve", made.store.root, *options)
    address = result.stdout.split()[1]
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/login#token=[\w-]{43}", address)
    [site] = sites
    assert site.hosts == {"127.0.0.1", "localhost", "[::1]"}
    assert site.corpus.names == ("prose",)
    secret = site.door.enter(address.partition("token=")[2])
    assert site.door.session(secret).person.role == Role.CURATOR
    assert not site.secure


def test_outside_only_tokens_of_the_file_count(made, sites, tmp_path):
    tokens = tmp_path / "tokens"
    token = run("token", "ann", "--role", "admin", "--tokens", tokens).stdout.strip()
    assert token not in tokens.read_text()
    assert tokens.stat().st_mode & 0o777 == 0o600
    other = run("token", "bob", "--tokens", tokens).stdout.strip()
    result = run(
        "serve", made.store.root, "--facts", made.folder / "facts", "--host", "0.0.0.0",
        "--allow-host", "data.example.com", "--tokens", tokens,
    )  # fmt: skip
    assert "login" not in result.stdout
    assert "unencrypted" in result.stderr
    [site] = sites
    assert site.hosts == {"data.example.com"}
    people = [site.door.session(site.door.enter(one)).person for one in (token, other, token)]
    assert people == [Person("ann", Role.ADMIN), Person("bob", Role.VIEWER), people[0]]
    assert site.door.enter("guessed") is None


def test_the_steps_of_a_run_are_those_that_it_had(made, sites, tmp_path):
    """A sample that the run quarantined appears in its first steps and not later."""
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text((made.folder / "my.yaml").read_text())
    data = load_config(str(folder / "config.yaml")).data
    indices = [read_index(made.store, name) for name in data.source_names]
    (folder / "sources.json").write_text(json.dumps(run_sources(data, indices, [])))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    line = {"step": 2, "source": "hostile", "key": "evil/04", "item": 0, "reason": PAYLOADS[0]}
    (folder / "quarantine.jsonl").write_text(json.dumps(line) + "\n")
    result = run("serve", made.store.root, "--facts", made.folder / "facts", "--run", folder)
    printed = result.stdout.partition("token=")[2].strip()
    [site] = sites
    assert site.runs == (folder.resolve(),)
    assert site.steps.last.title == "run mine"

    def drawn(steps: Steps, first: int, count: int) -> int:
        number = [index.name for index in steps._planner.indices].index("hostile")
        tables = [steps._reader.plan(step).samples for step in range(first, first + count)]
        return sum(int(((one.source == number) & (one.index == 4)).sum()) for one in tables)

    plain, mine = made.site.steps.last, site.steps.last
    assert drawn(mine, 0, 40) == drawn(plain, 0, 40) > 0
    late = QUARANTINE_DELAY + 10
    assert drawn(mine, late, 40) == 0
    assert drawn(plain, late, 40) > 0
    mine.close()
    shown = browser_of(site, "http://localhost")
    shown.post("/login", data={"token": printed})
    text = html.unescape(shown.get("/quarantined").text)
    assert PAYLOADS[0] in text
    assert "/sources/hostile/keys/evil%2F04" in text


def test_a_broken_chain_is_told_and_what_stands_before_it_is_shown(made, tmp_path):
    file = tmp_path / "catalog.sqlite"
    catalog = Catalog(str(file))
    for name in ("digits", "prose", "mixed"):
        register(catalog, look(made.store, None, name))
    records = Records(catalog)
    assert records.audit(None, 2).number == 3
    assert [one["seq"] for one in records.audit(None, 2).entries] == [3, 2]
    assert [one["seq"] for one in records.audit(3, 100).entries] == [2, 1]
    with sqlite3.connect(file) as raw:
        raw.execute("DROP TRIGGER audit_update")
        raw.execute("UPDATE audit SET who = 'nobody' WHERE seq = 2")
    found = records.audit(None, 100)
    assert "entry 2 after 1 was altered" in found.problem
    assert [one["seq"] for one in found.entries] == [1]
    catalog.close()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no token in it"),
        ("nothing", "line 1: expected"),
        ('{"name": "a b", "role": "viewer", "sha256": "' + "0" * 64 + '"}', "name 'a b'"),
        ('{"name": "ann", "role": "king", "sha256": "' + "0" * 64 + '"}', "role 'king'"),
        ('{"name": "ann", "role": "viewer", "sha256": "token"}', "64 hexadecimal digits"),
    ],
)
def test_a_file_of_tokens_that_is_none(tmp_path, text, words):
    file = tmp_path / "tokens"
    file.write_text(text)
    file.chmod(0o600)
    with pytest.raises(ValueError, match=re.escape(words)):
        read_tokens(file)


def test_a_token_is_added_to_a_file_whose_last_line_has_no_end(tmp_path):
    """Editors may omit the last newline; appending must not join two tokens into one line."""
    file = tmp_path / "tokens"
    for name in ("ann", "bob", "eve"):
        token = add_token(file, name, Role.VIEWER)
        assert read_tokens(file)[digest(token)] == Person(name, Role.VIEWER)
        file.write_text(file.read_text().rstrip("\n"))
    assert len(file.read_text().splitlines()) == 3


def test_a_file_of_tokens_that_somebody_else_could_have_written(tmp_path, monkeypatch):
    folder = tmp_path / "own"
    folder.mkdir(0o755)
    file = folder / "tokens"
    add_token(file, "ann", Role.VIEWER)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600

    def refused(words: str) -> None:
        for act in (lambda: read_tokens(file), lambda: add_token(file, "bob", Role.ADMIN)):
            with pytest.raises(ValueError, match=words):
                act()

    for mode, words in (
        (0o620, f"{file}: others may write it"),
        (0o602, f"{file}: others may write it"),
        (0o604, f"{file}: everybody may read it"),
    ):
        file.chmod(mode)
        refused(words)
    file.chmod(0o640)  # a service's group may read the file
    assert len(read_tokens(file)) == 1
    folder.chmod(0o777)
    refused(f"{folder}: others may write it")
    folder.chmod(0o1777)  # as /tmp
    assert len(read_tokens(file)) == 1
    with monkeypatch.context() as elsewhere:  # owner: neither the user nor root
        elsewhere.setattr("os.geteuid", lambda: 12_345)
        os.chown(file, os.getuid() or 54_321, -1)
        os.chown(folder, os.getuid(), -1)
        folder.chmod(0o755)
        refused("who could sign in as anybody; expected you")


def test_a_pipe_is_no_file_of_tokens(tmp_path):
    os.mkfifo(tmp_path / "tokens", 0o600)
    with pytest.raises(ValueError, match="expected a regular file of tokens"):
        read_tokens(tmp_path / "tokens")


# Redaction while the server runs ------------------------------------------------------------------

ERASED = {"digits": "digits-000005", "hostile": "film", "prose": "text-03"}
DRAWN = ("digits", "prose")  # the film is longer than a row


@pytest.fixture
def own(made, sites, tmp_path) -> SimpleNamespace:
    """Return a copy of the corpus, its configuration and facts, which the test may change."""
    root = tmp_path / "corpus"
    shutil.copytree(made.store.root, root)
    shutil.copytree(made.folder / "facts", tmp_path / "facts")
    (root / "tombstones.jsonl").write_text("")
    config = config_file(root, tmp_path / "my.yaml", tombstones="tombstones.jsonl")
    return SimpleNamespace(root=root, config=config, facts=tmp_path / "facts", sites=sites)


def serving(own, *options) -> TestClient:
    """Run the command and return a client that is signed in to its site."""
    result = run("serve", own.root, "--facts", own.facts, *options)
    shown = browser_of(own.sites[-1], "http://localhost")
    shown.post("/login", data={"token": result.stdout.partition("token=")[2].strip()})
    return shown


def step_with(steps: Steps, name: str, sample: int) -> tuple[int, int]:
    """Return a step, counted from 1, and a row of it that holds the sample."""
    number = [index.name for index in steps._planner.indices].index(name)
    for step in range(50):
        table = steps._reader.plan(step).samples
        found = np.flatnonzero((table.source == number) & (table.index == sample))
        if found.size:
            return step + 1, int(table.row[found[0]])
    raise AssertionError(f"{name}: {sample} is in no step")


def test_what_is_redacted_is_in_no_answer_of_a_server_that_runs(own):
    browser = serving(own, "--config", own.config)
    [site] = own.sites
    indices = {name: read_index(site.corpus.store, name) for name in ERASED}
    numbers = {name: list(map(str, indices[name].key)).index(key) for name, key in ERASED.items()}
    spots = {name: step_with(site.steps.last, name, numbers[name]) for name in DRAWN}
    # Route -> (whether it must report the samples as gone, addresses that could show them).
    of_each = [(f"{name}/{number}", f"{name}/samples/{number}") for name, number in numbers.items()]
    asked: dict[str, tuple[bool, list[str]]] = {
        "/rows": (False, [f"/rows?step={step}&row={row}&rows=1" for step, row in spots.values()]),
        "/": (False, ["/"]),
        "/sources/{name}": (False, [f"/sources/{name}" for name in numbers]),
        "/sources/{name}/samples/{number:int}": (True, [f"/sources/{at}" for _, at in of_each]),
        "/sources/{name}/samples/{number:int}/draws": (
            True, [f"/sources/{name}/samples/{numbers[name]}/draws" for name in DRAWN],
        ),
        "/sources/{name}/rejected": (False, [f"/sources/{name}/rejected" for name in numbers]),
        "/sources/{name}/keys/{key:path}": (
            False, [f"/sources/{name}/keys/{key}" for name, key in ERASED.items()],
        ),
        "/samples": (False, ["/samples", *(f"/samples?key={key}" for key in ERASED.values())]),
        "/samples/count": (False, ["/samples/count"]),
        "/words/{name}/{number:int}": (True, [f"/words/{at}" for at, _ in of_each]),
        "/media/{name}/{number:int}/{file}": (
            True, [f"/media/digits/{numbers['digits']}/0.png", f"/media/hostile/{FILM}/0.mp4"],
        ),
        "/thumbnails/{name}/{number:int}": (True, [f"/thumbnails/{at}" for at, _ in of_each[:2]]),
        "/blend": (False, ["/blend"]),
        "/statistics": (False, ["/statistics"]),
        "/quarantined": (False, ["/quarantined"]),
        "/governance": (False, ["/governance"]),
    }  # fmt: skip
    before = {path: browser.get(path) for _, paths in asked.values() for path in paths}
    assert {path: one.status_code for path, one in before.items() if one.status_code >= 300} == {
        path: 303 for path in asked["/sources/{name}/keys/{key:path}"][1]
    }
    pictures = {
        href for one in before.values() for href in re.findall(r'href="(/pictures/\w+)"', one.text)
    }
    assert len(pictures) > 6
    assert {browser.get(path).status_code for path in pictures} == {200}
    # Pictures come first, because later pages render those of other samples again.
    asked = {"/pictures/{name}": (True, sorted(pictures)), **asked}
    known = {
        route.path for route in app._routes() if "GET" in (getattr(route, "methods", ()) or ())
    }
    others = {"/statistics/counted", "/versions", "/versions/{name}", "/audit", "/login"}
    assert {*asked} == known - others - {"/static/style.css", "/favicon.ico"}, (
        "say of a new route what it shows"
    )
    secrets = [b"Text 3:", before[f"/media/digits/{numbers['digits']}/0.png"].content, film()]
    thumbs = [before[path].content for path in asked["/thumbnails/{name}/{number:int}"][1]]
    shown = [any(secret in one.content for one in before.values()) for secret in secrets + thumbs]
    assert all(shown)

    lines = [json.dumps({"source": name, "key": key}) for name, key in ERASED.items()]
    (own.root.parent / "list.jsonl").write_text("\n".join(lines))
    run("redact", own.root, "--list", own.root.parent / "list.jsonl", "--yes")

    for gone, paths in asked.values():
        for path in paths:
            answer = browser.get(path)
            assert answer.headers["cache-control"] == "no-store"
            assert not any(secret in answer.content for secret in secrets + thumbs), path
            if gone:
                assert answer.status_code == 404, path
                told = "load the page again" if path in pictures else "it was redacted"
                assert told in problem(answer), path
            else:
                assert answer.status_code == before[path].status_code, path
    own_pictures = re.findall(
        r'href="(/pictures/\w+)"', before[f"/sources/digits/samples/{numbers['digits']}/draws"].text
    )
    assert own_pictures
    assert {browser.get(path).status_code for path in own_pictures} == {404}
    part = {"Range": "bytes=0-99"}
    assert browser.get(f"/media/hostile/{FILM}/0.mp4", headers=part).status_code == 404
    for path, name in zip(asked["/rows"][1], DRAWN, strict=True):
        assert ERASED[name] in before[path].text
        assert ERASED[name] not in browser.get(path).text
    assert ">1<" in re.search(r"<tr><th>redacted.*?</tr>", browser.get("/sources/prose").text)[0]
    assert browser.get("/governance").text.count("<td>1</td>") == len(ERASED)
    # Other samples are served from the rewritten shards.
    kept = browser.get("/media/hostile/0/0.jpg")
    assert kept.content == turned_jpeg()
    assert "draws of augmentation" in browser.get("/sources/prose/samples/4").text
    assert browser.get("/sources/hostile/samples/2/draws").status_code == 200
    site.steps.last.close()


def test_the_steps_of_a_run_do_not_show_what_was_redacted_since(own, tmp_path):
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(own.config.read_text())
    data = load_config(str(own.config)).data
    store = open_data(data.replace(cache=None))
    indices = [read_index(store, name) for name in data.source_names]
    (folder / "sources.json").write_text(json.dumps(run_sources(data, indices, [])))
    record = Planner(indices, data).tombstones.record()
    (folder / "tombstones.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    browser = serving(own, "--run", folder)
    [site] = own.sites
    step, row = step_with(site.steps.last, "digits", 5)
    path = f"/rows?step={step}&row={row}&rows=1"
    before = browser.get(path).text
    assert "digits-000005" in before
    pictures = re.findall(r'href="(/pictures/\w+)"', before)
    # A tombstone that is added later does not apply to the run.
    line = {"source": "digits", "key": "digits-000005", "from_step": step}
    (own.root / "tombstones.jsonl").write_text(json.dumps(line) + "\n")
    assert browser.get(path).text == before
    # After a restart, the run's folder records the tombstone.
    noted = {**record, "tombstones": [["digits", 5, step - 1]]}
    (folder / "tombstones.json").write_text(json.dumps(noted))
    assert "digits-000005" not in browser.get(path).text
    (folder / "tombstones.json").write_text(json.dumps(record))
    run("redact", own.root, "--source", "digits", "--key", "digits-000005", "--yes")
    after = browser.get(path)
    assert after.status_code == 400
    told = f"row {row} of step {step} had sample 'digits-000005' of source 'digits'"
    assert told in problem(after)
    assert {browser.get(one).status_code for one in pictures} == {404}
    site.steps.last.close()


def test_a_tombstone_counts_from_the_next_request_on(own):
    browser = serving(own, "--config", own.config)
    [site] = own.sites
    step, row = step_with(site.steps.last, "prose", 3)
    path = f"/rows?step={step}&row={row}&rows=1"
    assert "text-03" in browser.get(path).text
    (own.root / "tombstones.jsonl").write_text("{}\n")
    assert "line 1: '{}'; expected" in problem(browser.get(path))
    assert "They cannot be planned: " in browser.get("/governance").text
    line = {"source": "prose", "key": "text-03", "from_step": step}
    (own.root / "tombstones.jsonl").write_text(json.dumps(line) + "\n")
    assert "text-03" not in browser.get(path).text
    assert f"1 samples are not drawn from step {step} on" in browser.get("/governance").text
    site.steps.last.close()
