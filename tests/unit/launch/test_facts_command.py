"""Tests of the commands `kimi-pretrain data facts` and `data count`."""

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
import yaml

pytest.importorskip("duckdb", reason="the extra platform is not installed")
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, Listed, TextSegment
from data_pipeline.text import Tokenizer, train_ranks
from tests import ROOT
from tests.unit.launch.data_command import run
from tests.unit.launch.inspected import HOSTILE, build
from tests.unit.launch.test_data_inspect import Page

RANKS = train_ranks(["the third text of 12 captions"] * 9, 270)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Write the sources digits, mixed and prose, and two versions of pairs; return the root."""
    root = tmp_path_factory.mktemp("corpus")
    store = build(root)
    for name, keys in (("pairs", "abcd"), ("pairs_2", "bcdefgh")):
        samples = (CrudeSample(key, [TextSegment(f"text {key * ord(key)}")]) for key in keys)
        given = Listed(samples, identity={"name": name})
        ingest(given, store, name, Tokenizer(RANKS, "tiny"))
    return root


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("KIMI_PRETRAIN_FACTS", str(tmp_path / "facts"))
    return tmp_path / "facts"


def last(result):
    return json.loads(result.stdout.splitlines()[-1])


def test_facts_are_written_once(corpus, folder, tmp_path):
    found = last(run("facts", corpus, "--source", "digits", "--source", "prose", "--json"))
    assert [one["name"] for one in found] == ["digits", "prose"]
    assert all(one["new"] and Path(one["path"]).is_relative_to(folder) for one in found)
    again = run("facts", corpus / "digits", "--json")
    assert last(again) == [found[0] | {"new": False}]
    assert "was there" in again.stdout
    other = last(run("facts", corpus / "digits", "--facts", tmp_path / "other", "--json"))
    assert other[0]["new"]
    few = last(run("facts", corpus / "digits", "--image-patches", 64, "--json"))
    assert few[0]["new"]


def test_stats_and_count_say_the_same(corpus):
    arguments = (corpus, "--seq-len", 100, "--json")
    stats = last(run("stats", *arguments))
    count = last(run("count", *arguments))
    for one, other in zip(count["sources"], stats["sources"], strict=True):
        for key in ("name", "samples", "tokens", "items", "regions", "longest", "over_seq_len"):
            assert one[key] == other[key]
        assert one["tokens_per_sample"]["histogram"] == other["tokens_per_sample"]["histogram"]
    assert count["totals"]["all"] == stats["totals"]["all"]
    for kind in ("media", "samples"):
        assert count["alike"][kind]["redundant"] == stats["duplicates"][kind]["redundant"]


def test_bounds_of_a_config_are_counted(corpus, tmp_path):
    config = yaml.safe_load((ROOT / "configs" / "tiny_cpu.yaml").read_text())
    kept = {key: config["data"][key] for key in ("seq_len", "limits", "rows_per_step") if key in
            config["data"]}  # fmt: skip
    sources = {"prose": {"share": 1, "max_tokens": 60}}
    config["data"] = {"root": str(corpus), "sources": sources, **kept}
    config["train"].pop("validate_every", None)
    file = tmp_path / "my.yaml"
    file.write_text(yaml.safe_dump(config))
    found = [
        last(run(command, corpus, "--source", "prose", "--config", file, "--json"))
        for command in ("count", "stats")
    ]
    assert found[0]["sources"][0]["chosen"]["samples"] == 11
    for key in ("chosen", "over_seq_len"):
        assert found[0]["sources"][0][key] == found[1]["sources"][0][key]


def test_the_terminal_shows_a_line_for_each_source(corpus):
    shown = run("count", corpus, "--seq-len", 100).stdout
    for words in (
        "digits ", "all grounding", "prose: tokens in the longest samples:",
        "prose: 2 samples longer than 100", "alike media files: 2 groups, 10 copies",
    ):  # fmt: skip
        assert words in shown


def test_versions_are_compared(corpus):
    found = run("count", corpus, "--versions", "--json")
    [one] = last(found)["compared"]
    assert (one["new"], one["old"]) == ("pairs_2", "pairs")
    assert [one["keys"][fate] for fate in ("added", "removed", "same")] == [4, 1, 3]
    assert "pairs_2 after pairs: 4 added, 1 removed" in found.stdout
    by_name = last(run("count", corpus, "--source", "pairs_2", "--against", "pairs", "--json"))
    by_place = last(run("count", corpus / "pairs_2", "--against", corpus / "pairs", "--json"))
    assert by_name["compared"] == by_place["compared"] == [one]


def test_the_page_is_whole_and_nothing_in_it_is_run(corpus, tmp_path):
    out = tmp_path / "pages" / "count.html"
    run("count", corpus, "--versions", "--out", out)
    text = out.read_text()
    page = Page(text)
    names = Counter(name for name, _ in page.elements)
    assert names["svg"] > 10
    assert names["table"] > 6
    assert "script" not in names
    assert HOSTILE not in text
    for words in ("Heavy tails", "pairs_2 after pairs", "Alike, by length", "By category"):
        assert words in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--against", "prose"], ["--against prose", "--source", "digits, mixed"]),
        (["--source", "digits", "--against", "pros"], ["pros", "did you mean 'prose'"]),
        (["--source", "digit"], ["'digit'", "did you mean 'digits'"]),
        (["--source", "digits", "--versions"], ["--versions", "digits"]),
        (["--config", "nowhere.yaml"], ["nowhere.yaml"]),
    ],
)
def test_what_is_wrong_is_told_in_one_line(corpus, folder, arguments, words):
    result = run("count", corpus, *arguments, code=2)
    assert all(word in result.stderr for word in words), result.stderr
    assert not folder.exists()


def test_a_folder_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("")
    result = run("count", corpus, "--facts", tmp_path / "file", code=2)
    assert str(tmp_path / "file") in result.stderr


def test_without_duckdb_the_extra_is_named_and_facts_are_still_written(corpus, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("data_pipeline.inspect.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "duckdb", None)
    result = run("count", corpus, code=2)
    assert result.stderr == (
        "error: data count needs duckdb, which is not installed: pip install "
        "'kimi-pretrain[platform]'\n"
    )
    assert last(run("facts", corpus / "digits", "--json"))[0]["new"]


def test_versions_of_the_catalogue_are_counted_by_their_names(corpus, tmp_path, monkeypatch):
    pytest.importorskip("sqlalchemy", reason="the extra platform is not installed")
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", str(tmp_path / "catalog.sqlite"))
    for name in ("pairs", "pairs_2"):
        run("catalog", "register", corpus / name)
    plain = last(run("count", corpus, "--source", "pairs_2", "--against", "pairs", "--json"))
    for arguments in (
        ("pairs@2", "--against", "pairs@1"),
        (corpus, "--source", "pairs@2", "--against", "pairs@1"),
    ):
        found = run("count", *arguments, "--json")
        assert last(found) == plain
        assert f"pairs@1: pairs@1, {corpus}/pairs" in found.stderr
    assert last(run("facts", "pairs@2", "--json"))[0]["name"] == "pairs_2"
    for arguments, told in (
        (("pairs@3",), "pairs@3: there is no such version; there are pairs@1 (staged)"),
        (("pairs@2", "--source", "pairs"), "pairs@2 is one source already"),
        ((tmp_path, "--source", "pairs@2"), "no finished source here"),
    ):
        assert told in run("count", *arguments, code=2).stderr
    (corpus / "pairs" / "manifest.json").rename(tmp_path / "manifest.json")
    told = run("count", "pairs@1", code=2).stderr
    assert "no copy of it can be read" in told
    (tmp_path / "manifest.json").rename(corpus / "pairs" / "manifest.json")
