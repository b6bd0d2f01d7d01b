"""Tests of the web pages with malformed and hostile files: they report errors and never fail."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra platform is not installed")
from starlette.testclient import TestClient

from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, ImageSegment, RegionSegment, TextSegment
from data_pipeline.store.open import open_store
from data_pipeline.text import Tokenizer, train_ranks
from launch.pages.pictures import encoded
from launch.web import corpus, lines, record_pages, rejected
from launch.web.app import application
from launch.web.auth import Doorkeeper, Person, Role, digest
from launch.web.corpus import Corpus
from launch.web.media import Media
from launch.web.rejected import RejectedList
from launch.web.site import Site
from launch.web.statistics import Statistics
from moonvit3d.geometry import PatchLimits
from tests.unit.launch.served import Quiet

DEEP = 200_000
BODIES = {
    "empty": b"",
    "no text": b"\xff\xfe\x00\x01",
    "no JSON": b"{",
    "null": b"null",
    "a list": b"[]",
    "a number": b"7",
    "a text": b'"x"',
    "an object": b"{}",
    "deep lists": b"[" * DEEP + b"]" * DEEP,
    "deep objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
    "a long number": b'{"step": 1' + b"0" * 9_000 + b"}",
    "half a character": b'{"key": "\\ud800", "reason": "\\udfff", "detail": "\\ud8ff", "step": 1,'
    b' "source": "\\udc00", "holds": [{"hold": "\\ud800", "since": "\\ud800", "shards": []}]}',
    "other types": b'{"key": [1], "reason": {"a": NaN}, "detail": null, "step": "x", "source": 7}',
    "holds of null": b'{"holds": null}',
    "shards of null": b'{"holds": [{"hold": "a", "since": "b", "shards": null}]}',
    "a hold of null": b'{"holds": [{"hold": null, "since": null, "shards": [null]}]}',
}


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> SimpleNamespace:
    """Yield a store with one source, which the tests overwrite, and a folder for the site."""
    store = open_store("memory://hostile")
    tokenizer = Tokenizer(train_ranks(["the tide and the harbour " * 9], 270), "t")
    picture = ImageSegment(encoded(np.full((60, 60, 3), 9, np.uint8))[0], "png")
    box = RegionSegment("box", [[1, 1], [9, 9]], "label")
    ingest([CrudeSample("a", [TextSegment("tide"), picture, box])], store, "notes", tokenizer)
    place = tmp_path_factory.mktemp("hostile")
    (place / "run").mkdir()
    yield SimpleNamespace(store=store, place=place)
    store.clear()


def signed_in(site: SimpleNamespace) -> TestClient:
    """Return a client that is signed in at a newly started server."""
    names, limits = ["notes"], PatchLimits()
    facts = site.place / "facts"
    shown = Corpus(open_store("memory://hostile"), None, names, limits, facts, lambda _: Quiet())
    door = Doorkeeper({digest("token"): Person("ann", Role.ADMIN)}, {})
    hosts, runs = frozenset({"testserver"}), (site.place / "run",)
    made = Site(shown, Media(), Statistics(limits, None, {}), door, hosts, "session", runs=runs)
    ours = {"Origin": "http://testserver"}
    found = TestClient(application(made), follow_redirects=False, headers=ours)
    found.post("/login", data={"token": "token"})
    return found


@pytest.fixture(scope="module")
def browser(site) -> TestClient:
    return signed_in(site)


PAGES = ("/", "/sources/notes", "/sources/notes/rejected", "/quarantined", "/governance",
         "/sources/notes/samples/0", "/words/notes/0", "/samples")  # fmt: skip


@pytest.mark.parametrize("kind", BODIES)
def test_hostile_sidecars_are_shown_as_such(site, kind):
    keys = [f"notes/{name}" for name in ("provenance.json", "rejected.jsonl", "holds.json")]
    before = {key: site.store.get(key) for key in keys[:2]}
    for key in keys:
        site.store.put(key, BODIES[kind] + b"\n" + BODIES[kind] * (key in before))
    try:
        browser = signed_in(site)
        statuses = {path: browser.get(path).status_code for path in PAGES}
    finally:
        site.store.delete(keys[-1])
        for key, body in before.items():
            site.store.put(key, body)
    touched = ("/sources/notes", "/governance")
    assert {statuses.pop(path) for path in touched} <= {200, 400, 502}
    assert {*statuses.values()} == {200}, statuses


@pytest.mark.parametrize("kind", BODIES)
def test_a_hostile_line_of_quarantine_is_shown_among_the_others(site, browser, kind):
    good = {"step": 3, "source": "notes", "key": "a", "item": 0, "reason": "it is damaged"}
    text = json.dumps(good).encode()
    (site.place / "run" / "quarantine.jsonl").write_bytes(
        b"\n".join([text, BODIES[kind], text, b""])
    )
    shown = browser.get("/quarantined")
    assert shown.status_code == 200
    assert shown.text.count("it is damaged") == 2
    assert shown.text.count("<tr><td>") == 3
    assert ("unreadable line" in shown.text) == (kind not in ("half a character", "other types"))


@pytest.mark.parametrize(
    "change",
    [
        {"category": None}, {"samples": -1}, {"samples": "many"}, {"items": []}, {"shards": None},
        {"shards": [7]}, {"shards": [{"key": "x"}]}, {"tokenizer": "t"}, {"redacted": []},
        {"redacted": {"samples": None}}, {"redacted": {"samples": ["x"]}}, {"content_hash": 1},
        {"content_hash": "../../else"},
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_told_in_one_line(site, change):
    browser = signed_in(site)
    before = site.store.get("notes/manifest.json")
    site.store.put("notes/manifest.json", json.dumps(json.loads(before) | change).encode())
    try:
        for path in PAGES:
            assert browser.get(path).status_code in (200, 400, 502), path
        answer = browser.get("/sources/notes")
        assert answer.status_code in (400, 502)
        assert "Traceback" not in answer.text
    finally:
        site.store.put("notes/manifest.json", before)


POINTS = '{"kind":"region","media":0,"shape":"box","label":"x","loss":true,"points":%s}'
DOCUMENTS = {
    **{kind: BODIES[kind] for kind in BODIES},
    "no segments": b'{"meta": {}, "segments": {}}',
    "a segment of null": b'{"meta": {}, "segments": [null]}',
    "an unknown kind": b'{"meta": {}, "segments": [{"kind": "x"}]}',
    "a text without text": b'{"meta": {}, "segments": [{"kind": "text", "loss": true}]}',
    "a file that is none": b'{"meta": {}, "segments": [{"kind": "image", "file": "x.png"}]}',
    "other files": b'{"meta": {}, "segments": [{"kind": "image", "file": "7.png"}]}',
    "no media": b'{"meta": {}, "segments": [{"kind": "text", "text": "x", "loss": true}]}',
    "points": b'{"meta": {}, "segments": [{"kind": "image", "file": "0.png"}, %s]}'
    % (POINTS % ("[[1" + "0" * 400 + ", 1], [2, 2]]")).encode(),
}


@pytest.mark.parametrize("kind", DOCUMENTS)
def test_a_hostile_document_is_told_in_one_line(browser, monkeypatch, kind):
    monkeypatch.setattr(corpus, "read_checked", lambda *_: [DOCUMENTS[kind]])
    for path in ("/sources/notes/samples/0", "/words/notes/0"):
        answer = browser.get(path)
        assert answer.status_code == 502, path
        assert "its document cannot be shown" in answer.text


def test_meta_data_may_hold_anything(browser, monkeypatch):
    """Metadata may hold a lone surrogate, or a nesting that json can parse but not serialize."""
    real = corpus.read_checked
    for meta, statuses in (
        (b'{"a": "\\ud800"}', (200,)),
        (b'{"a":' * 980 + b"1" + b"}" * 980, (200, 502)),
    ):

        def read(store, parts, threads=8, meta=meta):
            document = json.loads(real(store, parts)[0])
            return [
                b'{"segments": %s, "meta": %s}' % (json.dumps(document["segments"]).encode(), meta)
            ]

        monkeypatch.setattr(corpus, "read_checked", read)
        assert browser.get("/sources/notes/samples/0").status_code in statuses


def test_a_line_without_end_takes_no_memory(monkeypatch):
    """Only a part of a long line is kept; a line longer than STRETCH ends the list."""
    monkeypatch.setattr(rejected, "STRETCH", 30_000)
    monkeypatch.setattr(rejected, "_PIECE", 1_000)
    monkeypatch.setattr(rejected, "LONGEST", 500)
    monkeypatch.setattr(lines, "LONGEST", 500)
    store = open_store("memory://lines")
    line = json.dumps({"key": "k", "reason": "r", "detail": "d"}).encode() + b"\n"
    long = b"x" * 7_777 + b"\n"
    store.put("a/rejected.jsonl", line + long + line)
    found = RejectedList(store, "a").page("", "", 0)
    assert [one["reason"] for one in found.lines] == ["r", "unreadable line", "r"]
    assert (found.after, found.counted) == (None, 1.0)
    store.put("b/rejected.jsonl", line + b"x" * 500_000)
    before = store.stats.bytes
    assert [one["reason"] for one in RejectedList(store, "b").page("", "", 0).lines] == [
        "r", "unreadable line"
    ]  # fmt: skip
    assert store.stats.bytes - before < 100_000
    many = [json.dumps({"key": "k", "reason": f"r{n}", "detail": ""}) for n in range(300)]
    store.put("c/rejected.jsonl", "\n".join(many).encode())
    reasons = RejectedList(store, "c").page("", "", 0).reasons
    assert len(reasons) == 101
    assert reasons["other reasons"] == 200
    store.clear()


def test_the_last_lines_of_a_file_without_any(tmp_path, monkeypatch):
    monkeypatch.setattr(record_pages, "_MOST", 1_000)
    monkeypatch.setattr(record_pages, "_BLOCK", 100)
    file = tmp_path / "lines"
    file.write_bytes(b"x" * 100_000)
    assert record_pages.last_lines(file, 3) == []
    file.write_bytes(b"x" * 100_000 + b"\nlast\n")
    assert record_pages.last_lines(file, 3) == [b"last"]
