"""Tests of `kimi-pretrain data catalog` and of configurations that name catalogue versions."""

import json
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("sqlalchemy", reason="the extra platform is not installed")
from data_pipeline.access import run_sources
from data_pipeline.catalog.engine import Catalog, CatalogError
from data_pipeline.catalog.register import look, register
from data_pipeline.catalog.states import promote
from data_pipeline.index.manifest import IndexMismatch, read_index
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, Listed, TextSegment
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from kimi_pretrain.config import Config, ConfigError, dump_config, load_config
from kimi_pretrain.reliability.preflight import read_heldout
from launch.local.versions import load_pinned
from tests.unit.launch.data_command import run

RANKS = train_ranks(["the third text of 12 captions"] * 9, 270)


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Build a corpus with three versions of captions and one of web."""
    store = FolderStore(tmp_path_factory.mktemp("corpus"))
    store.put("tokenizer/tokenizer.tiktoken", RANKS)
    for name, count in (("captions", 3), ("captions_2", 4), ("captions_3", 5), ("web", 2)):
        texts = (CrudeSample(f"k{i}", [TextSegment(f"text {i} of {name}")]) for i in range(count))
        given = Listed(texts, identity={"file": "in.jsonl"})
        ingest(given, store, name, Tokenizer(RANKS, "tiny"))
    return store.root


@pytest.fixture
def root(made, tmp_path, monkeypatch) -> Path:
    """Return a copy of the corpus, next to an empty catalogue."""
    shutil.copytree(made, tmp_path / "corpus")
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", str(tmp_path / "catalog.sqlite"))
    return tmp_path / "corpus"


def activate(root: Path, folder: str) -> None:
    """Register a folder and promote it to active without the command line."""
    catalog = Catalog()
    seen = look(FolderStore(root), None, folder)
    name, _ = register(catalog, seen, licence="CC-BY-4.0", owner="vision")
    about = {"content_hash": seen.columns["content_hash"], "problems": {}}
    about |= {"sample_share": 1.0, "tokens_counted": True}
    promote(catalog, name, "verified", report={"sources": {folder: about}})
    promote(catalog, name, "active")
    catalog.close()


def activate_by_commands(root: Path, folder: str) -> None:
    """Register a folder and promote it to active with the commands of docs/PLATFORM.md."""
    name = run("catalog", "register", root / folder, "--json").stdout
    version = json.loads(name)["version"]
    seen = run("verify", root, "--source", folder, "--json")
    (root.parent / "verify.txt").write_text(seen.stdout)
    run("catalog", "promote", version, "verified", "--report", root.parent / "verify.txt")
    run("catalog", "set", version, "--licence", "CC-BY-4.0", "--owner", "vision")
    run("catalog", "promote", version, "active")


def load(root: Path, sources: dict, run_dir: Path | None = None, **data) -> Config:
    empty = {"schedule": [], "max_epochs": {}, "augment": {}, "vision_token_ratio": None}
    values = empty | {"root": str(root), "sources": sources, **data}
    overrides = [f"data.{key}={json.dumps(value)}" for key, value in values.items()]
    return load_pinned("tiny_cpu", overrides, run_dir)[0]


def test_from_a_folder_to_an_active_version(root):
    activate(root, "captions_2")
    activate_by_commands(root, "captions_3")
    told = run("catalog", "list", "--json").stdout
    assert [(v["version"], v["state"]) for v in json.loads(told.splitlines()[-1])] == [
        ("captions@2", "deprecated"), ("captions@3", "active"),
    ]  # fmt: skip
    shown = json.loads(run("catalog", "show", "captions@active", "--json").stdout)
    assert (shown["version"], shown["samples"], shown["licence"]) == ("captions@3", 5, "CC-BY-4.0")
    assert shown["provenance"]["input"] == {"file": "in.jsonl"}
    run("catalog", "show", "captions@2")
    assert "sound: 8 entries" in run("catalog", "audit").stdout
    found = run("catalog", "resolve", "captions@active", "--root", root).stdout
    assert found == "captions_3\n"


def test_the_next_version_holds_the_one_before(root):
    activate(root, "captions_3")
    (root.parent / "more").mkdir()
    (root.parent / "more" / "late.txt").write_text("a late text")
    made = ["--to", root, "--name", "captions_4", "--append-to", "captions@active"]
    made += ["--category", "text", "--tokenizer", "tokenizer/tokenizer.tiktoken", "--workers", 0]
    run("ingest", root.parent / "more", *made)
    run("catalog", "register", root / "captions_4")
    shown = json.loads(run("catalog", "show", "captions@4", "--json").stdout)
    assert (shown["parent"], shown["samples"]) == ("captions@3", 6)
    assert shown["provenance"]["source"] == "captions_3"
    told = run(
        "ingest",
        root.parent / "more",
        *made[:3],
        "x",
        "--append-to",
        "captions@9",
        *made[6:],
        code=2,
    )
    assert "there is no such version" in told.stderr


def test_a_lost_catalogue_has_its_names_back(root):
    reindex(
        FolderStore(root),
        "captions_3",
        "captions_4",
        Tokenizer(train_ranks(["captions"] * 9, 258), "other"),
    )
    shutil.copytree(root / "web", root / "web_again")
    manifest = json.loads((root / "captions" / "manifest.json").read_text())
    (root / "captions" / "manifest.json").write_text(
        json.dumps(manifest | {"content_hash": "0" * 64})
    )
    shutil.copytree(root / "web", root / "bare")
    (root / "bare" / "manifest.json").write_text(json.dumps({"schema": manifest["schema"]}))
    told = run("catalog", "rebuild", root, code=1)
    assert told.stdout.split() == ["captions@2", "captions@3", "captions@4", "web@1"]
    wrong = told.stderr.splitlines()
    assert "bare/manifest.json: does not have its form: name is" in wrong[0]
    assert "captions: content_hash is" in wrong[1]
    assert "web_again: web under the same root holds this content" in wrong[2]
    shown = json.loads(run("catalog", "show", "captions@4", "--json").stdout)
    assert (shown["parent"], shown["provenance"]["kind"]) == ("captions@3", "reindex")


def test_which_run_used_which_version_at_which_steps(root, tmp_path):
    activate(root, "captions_2")
    config = load(root, {"captions@active": 1, "web": 1}, heldout={"captions_3": 1}).data
    store = FolderStore(root)
    indices = [read_index(store, name) for name in config.source_names]
    used = run_sources(config, indices, [read_index(store, "captions_3")])
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    (folder / "sources.json").write_text(json.dumps(used))
    (folder / "status.json").write_text('{"state": "running", "step": 3}')
    tokens = [(4, 0), (0, 7), (5, 8)]
    lines = [
        json.dumps({"step": n, "loss_tokens_by_source": {"captions_2": one, "web": other}})
        for n, (one, other) in enumerate(tokens, 1)
    ]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    for _ in range(2):  # a second scan changes nothing
        assert run("catalog", "scan", tmp_path / "runs").stdout.endswith("step 3, 3 sources\n")
        [seen] = json.loads(run("catalog", "show", "captions@2", "--json").stdout)["runs"]
        assert seen == {
            "folder": str(folder), "state": "running", "name": "captions_2", "use": "train",
            "steps": 2, "first_step": 1, "last_step": 3, "tokens": 9,
        }  # fmt: skip
    run("catalog", "promote", "captions@2", "deprecated")
    told = run("catalog", "promote", "captions@2", "archived", code=2).stderr
    assert "unfinished runs use it" in told
    (folder / "status.json").write_text('{"state": "finished", "step": 3}')
    run("catalog", "scan", folder)
    run("catalog", "promote", "captions@2", "archived")
    (folder / "sources.json").write_text('[{"name": "web"}]')
    told = run("catalog", "scan", folder, code=2).stderr
    assert "not as a run writes its files: no 'use'" in told


def test_what_a_run_notes_of_its_sources(root, monkeypatch):
    activate(root, "captions_2")
    monkeypatch.chdir(root.parent)
    config = load(Path("corpus"), {"captions@active": 1}).data
    index = read_index(FolderStore(root), "captions_2")
    manifest = json.loads((root / "captions_2" / "manifest.json").read_text())
    assert run_sources(config, [index], []) == [
        {
            "name": "captions_2",
            "asked": "captions@active",
            "content_hash": manifest["content_hash"],
            "made_as": manifest["content_hash"],
            "redacted": 0,
            "index_sha256": manifest["index_sha256"],
            "root": str(root),
            "endpoint": "",
            "use": "train",
            "from_step": 1,
        }
    ]


# Configurations ---------------------------------------------------------------------------------


def test_every_place_of_a_configuration_is_resolved(root):
    activate(root, "captions_2")
    activate(root, "captions_3")
    data = load(
        root,
        {"captions@active": 0.5, "web": 0.25},
        schedule=[{"after_tokens": 9, "sources": {"captions@2": 1.0}}],
        max_epochs={"captions@active": 2.0},
        augment={"captions@2": {"variants": True}},
    ).data
    assert data.sources == {"captions_3": 0.5, "web": 0.25}
    assert data.schedule[0].sources == {"captions_2": 1.0}
    assert (data.max_epochs, list(data.augment)) == ({"captions_3": 2.0}, ["captions_2"])
    assert data.asked == {"captions_2": "captions@2", "captions_3": "captions@active"}
    with pytest.raises(ConfigError, match="captions@3 is captions_3, which is named there already"):
        load(root, {"captions_3": 1, "captions@3": 1})
    given = [f"data.root={root}", 'data.heldout={"captions@2": 1}']
    loaded, pinned = load_pinned("tiny_cpu", given)
    assert loaded.data.heldout == {"captions_2": 1}
    assert load_config("tiny_cpu", pinned) == loaded  # ranks load the pinned overrides


def test_a_run_stands_by_what_it_began_with_and_needs_no_catalogue(root, tmp_path, monkeypatch):
    activate(root, "captions_2")
    began = load(root, {"captions@active": 1})
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text(dump_config(began))
    activate(root, "captions_3")
    assert load(root, {"captions@active": 1}).data.source_names == ("captions_3",)
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", "postgresql://nobody@127.0.0.1:1/none")
    assert load(root, {"captions@active": 1}, folder) == began
    with pytest.raises(ValueError, match="catalogue postgresql.*127.0.0.1.*nothing was changed"):
        load(root, {"captions@3": 1}, folder)


def test_what_a_name_must_not_stand_for(root, tmp_path, monkeypatch):
    run("catalog", "register", root / "web")
    with pytest.raises(ValueError, match="web@1 is staged; a run may name versions that are"):
        load(root, {"web@1": 1})
    activate(root, "captions_2")
    shutil.copytree(root, tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"captions@2 does not lie under .*elsewhere; it lies"):
        load(tmp_path / "elsewhere", {"captions@active": 1})
    run("catalog", "register", tmp_path / "elsewhere" / "captions_2")
    load(tmp_path / "elsewhere", {"captions@active": 1})
    shutil.rmtree(root / "captions_2")
    shutil.copytree(root / "captions_3", root / "captions_2")
    with pytest.raises(IndexMismatch, match="captions_2: content_hash is"):
        load(root, {"captions@active": 1})
    for_two = ["tiny_cpu", [f"data.root={root}", 'data.sources={"captions@active": 1}'], None, 2]
    with pytest.raises(ConfigError, match="one machine of several, must not ask the catalogue"):
        load_pinned(*for_two)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match="must not ask the catalogue by itself"):
        load(root, {"captions@active": 1})
    with pytest.raises(ValueError, match="'captions@2' is a version in the catalogue"):
        read_index(FolderStore(root), "captions@2")


def test_what_a_source_has_grown_from_is_not_held_out_of_it(root):
    store, ranks = FolderStore(root), Tokenizer(RANKS, "tiny")
    late = [CrudeSample("late", [TextSegment("a late text")])]
    grown = ingest(late, store, "captions_9", ranks, append_to="captions")
    config = load(root, {"captions_9": 1}, heldout={"captions": 1})
    with pytest.raises(ConfigError, match="heldout.captions holds the samples of data.sources.cap"):
        read_heldout(config, store, ranks, [grown])
    read_heldout(config, store, ranks, [read_index(store, "web")])


# Errors -----------------------------------------------------------------------------------------


def test_a_manifest_that_does_not_match_is_one_line_and_changes_nothing(root, tmp_path):
    file = root / "web" / "index.parquet"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    assert "index_sha256 is" in run("catalog", "register", root / "web", code=2).stderr
    assert not (tmp_path / "catalog.sqlite").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("list",), "there is none yet"),
        (("register", "{root}/none"), "no finished source"),
        (("register", "{root}/web", "--licence", "mine"), "expected SPDX"),
        (("register", "{root}/web", "--as", "web@active"), "give a number"),
        (("register", "{root}/web", "--catalog", "mysql://x/y"), "expected a file"),
        (("promote", "web@1", "verified", "--report", "{root}/web/manifest.json"), "data verify"),
        (("promote", "web@1", "verified", "--report", "{root}/odd.json"), "data verify"),
        (("set", "web@1"), "give --licence"),
        (("scan", "{root}"), "no run here"),
    ],
)
def test_errors_are_one_line(root, arguments, told):
    (root / "odd.json").write_text('{"sources": {"web": 1}}')
    given = [one.format(root=root) for one in arguments]
    assert told in run("catalog", *given, code=2).stderr


def test_a_file_that_may_not_be_written_is_one_line(root, tmp_path):
    run("catalog", "register", root / "web")
    read_only = Catalog(f"sqlite:///{tmp_path}/catalog.sqlite")
    with read_only._engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA query_only = ON")
    refused = pytest.raises(CatalogError, match="readonly database; nothing was changed")
    with refused, read_only.write() as connection:
        connection.exec_driver_sql("DELETE FROM replica")
    read_only.close()


def test_without_the_extra_it_says_what_to_install(root, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("data_pipeline.catalog")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sqlalchemy", None)
    told = run("catalog", "list", code=2).stderr
    assert "the catalogue needs sqlalchemy" in told
    assert "pip install 'kimi-pretrain[platform]'" in told
    assert load(root, {"web": 1}).data.asked == {}
