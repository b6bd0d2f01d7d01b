"""Tests that the server's derived data are rebuilt when the store changes, one build at a time."""

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("starlette", reason="the extra platform is not installed")
from starlette.testclient import TestClient

from data_pipeline.govern.holds import end_hold, put_hold, read_holds
from data_pipeline.govern.redact import carry_out
from data_pipeline.index.manifest import read_manifest
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, ImageSegment, TextSegment
from data_pipeline.store.open import MissingKey, ObjectInfo, open_store
from data_pipeline.text import Tokenizer, train_ranks
from kimi_pretrain.config import load_config
from launch.cli.data_serve import _for_pages
from launch.pages.pictures import encoded
from launch.pages.turns import ComeAgain
from launch.web import fresh
from launch.web.app import application
from launch.web.auth import Doorkeeper, Person, Role, digest
from launch.web.corpus import PATIENCE_S, Corpus, NotHere
from launch.web.fresh import Fresh
from launch.web.media import Media
from launch.web.site import Site
from launch.web.statistics import Statistics
from moonvit3d.geometry import PatchLimits
from tests.unit.launch.served import Quiet


class Objects:
    """Source with a state; records the states from which a value was built."""

    def __init__(self) -> None:
        self.state, self.made = 0, list[int]()

    def look(self):
        return (ObjectInfo(self.state, ""),)

    def make(self) -> str:
        self.made.append(self.state)
        return f"of {self.state}"


def test_it_is_made_again_when_the_state_is_another_and_only_then():
    given = Objects()
    found = Fresh("it", given.look, given.make, lambda: "first")
    assert (found.now(), found.now(), given.made) == ("first", "first", [])
    given.state = 7
    assert found.last == "first"
    assert (found.now(), found.now(), given.made) == ("of 7", "of 7", [7])
    assert found.last == "of 7"


def test_what_changes_while_it_is_made_is_seen():
    given = Objects()

    def make() -> str:
        told = given.make()
        given.state += given.state in (0, 4)  # another writer, after the read
        return told

    found = Fresh("it", given.look, make)
    assert (found.last, found.now(), found.now()) == ("of 0", "of 1", "of 1")
    given.state = 4
    assert (found.now(), found.now(), found.now()) == ("of 4", "of 5", "of 5")


def test_a_failure_is_told_and_tried_again():
    given, faults = Objects(), [ValueError("no such tokenizer")]

    def make() -> str:
        if faults:
            raise faults.pop()
        return given.make()

    found = Fresh("it", given.look, make, given.make)
    given.state = 1
    with pytest.raises(ValueError, match="no such tokenizer"):
        found.now()
    assert found.now() == "of 1"


def test_who_comes_while_it_is_made_waits_or_comes_again(monkeypatch):
    given, begun, go_on = Objects(), threading.Event(), threading.Event()

    def make() -> str:
        begun.set()
        assert go_on.wait(60)
        return given.make()

    found = Fresh("it", given.look, make, given.make)
    given.state = 1
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(found.now)
        assert begun.wait(60)
        monkeypatch.setattr(fresh, "WAIT_S", 0.0)
        with pytest.raises(ComeAgain, match="it was changed a moment ago"):
            found.now()
        monkeypatch.setattr(fresh, "WAIT_S", 60.0)
        waiting = pool.submit(found.now)
        go_on.set()
        assert (first.result(), waiting.result(), given.made) == ("of 1", "of 1", [0, 1])


def test_two_are_made_at_a_time(monkeypatch):
    monkeypatch.setattr(fresh, "WAIT_S", 0.0)
    given = Objects()
    found = Fresh("it", given.look, given.make)
    given.state = 1
    assert fresh._AT_ONCE.acquire(timeout=60)
    assert fresh._AT_ONCE.acquire(timeout=60)
    try:
        with pytest.raises(ComeAgain):
            found.now()
    finally:
        fresh._AT_ONCE.release(2)
    assert found.now() == "of 1"


@pytest.fixture
def corpus(tmp_path):
    """Yield a corpus in a store that raises if an object that it has read is replaced."""
    store = open_store("memory://fresh")
    ranks = train_ranks(["the tide and the harbour " * 9], 270)
    texts = [CrudeSample(f"t{number}", [TextSegment(f"tide {number}")]) for number in range(9)]
    for name in ("notes", "others"):
        ingest(texts, store, name, Tokenizer(ranks, "t"))
    names = ["notes", "others"]
    place = tmp_path / "facts"
    yield Corpus(open_store("memory://fresh"), None, names, PatchLimits(), place, lambda _: Quiet())
    store.clear()


def test_a_store_that_remembers_what_it_has_read_is_no_hindrance(corpus):
    assert corpus.source("notes").document(3)["segments"][0]["text"] == "tide 3"
    kept = corpus.source("others")
    carry_out(open_store("memory://fresh"), {"notes": ["t3"]})
    with pytest.raises(NotHere, match=r"source 'notes', sample 3 \('t3'\): it was redacted"):
        corpus.source("notes").document(3)
    assert corpus.source("notes").document(4)["segments"][0]["text"] == "tide 4"
    assert corpus.source("others") is kept
    carry_out(open_store("memory://fresh"), {"notes": ["t4"]})
    with pytest.raises(NotHere, match="'t4'"):
        corpus.source("notes").document(4)
    assert [one.num_redacted for one in corpus.every()] == [2, 0]


def test_files_of_a_source_that_took_anothers_name_are_its_own(corpus):
    store, media = open_store("memory://fresh"), Media()
    tokenizer = Tokenizer(train_ranks(["the tide and the harbour " * 9], 270), "t")

    def shown(colour: int) -> bytes:
        for key in store.list("others/"):
            store.delete(key)
        data = encoded(np.full((60, 60, 3), colour, np.uint8))[0]
        ingest([CrudeSample("a", [ImageSegment(data, "png")])], store, "others", tokenizer)
        source = corpus.source("others")
        assert media.whole(source, 0, source.medium(0, 0)) == data
        return media.small(source, 0).data

    assert shown(10) != shown(200)


def test_a_hold_is_put_and_seen_whatever_others_did_meanwhile(corpus):
    other = open_store("memory://fresh")
    assert corpus.source("notes").document(0)
    put_hold(other, "notes", "a")
    assert [hold.name for hold in read_holds(corpus.store, corpus.names)] == ["a"]
    end_hold(other, "notes", "a")
    carry_out(other, {"notes": ["t1"]})
    put_hold(other, "notes", "b")
    assert [hold.name for hold in read_holds(corpus.store, corpus.names)] == ["b"]
    hold = put_hold(corpus.source("notes").store, "notes", "c")
    assert hold.shards == tuple(one["key"] for one in read_manifest(other, "notes")["shards"])
    end_hold(other, "notes", "b")
    assert [hold.name for hold in read_holds(corpus.store, corpus.names)] == ["c"]


def test_the_page_puts_a_hold_on_a_source_that_was_redacted_meanwhile(corpus):
    door = Doorkeeper({digest("token"): Person("ann", Role.CURATOR)}, {})
    statistics = Statistics(PatchLimits(), None, {})
    site = Site(corpus, Media(), statistics, door, frozenset({"testserver"}), "session")
    ours = {"Origin": "http://testserver"}
    browser = TestClient(application(site), follow_redirects=False, headers=ours)
    browser.post("/login", data={"token": "token"})
    [form, *_] = re.findall(r'name="form" value="([^"]+)"', browser.get("/sources/notes").text)
    carry_out(open_store("memory://fresh"), {"notes": ["t3"]})
    answer = browser.post("/sources/notes/holds", data={"form": form, "do": "put", "hold": "mine"})
    assert answer.status_code == 303
    assert "mine" in browser.get("/governance").text


def test_a_source_that_was_removed_is_gone(corpus):
    corpus.store.delete("notes/manifest.json")
    with pytest.raises(MissingKey):
        corpus.source("notes")
    assert [one.name for one in corpus.every()] == ["others"]
    assert [one.name for one in corpus.chosen("", "text")] == ["others"]


def test_pages_read_a_runs_data_here_and_do_not_wait_long_for_them():
    data = load_config("kimi_k25_1t", []).data
    found = _for_pages(data)
    assert (found.workers, found.prefetch_steps, found.cache) == (0, 0, None)
    assert (data.patience, found.patience) == (120.0, PATIENCE_S)
    assert _for_pages(data.replace(patience=2.0)).patience == 2.0
