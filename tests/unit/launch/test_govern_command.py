"""Tests of the commands `kimi-pretrain data exposure` and `data redact`."""

import json
from shutil import copytree, rmtree

import pytest

pytest.importorskip("sqlalchemy", reason="the extra platform is not installed")
from data_pipeline.access import run_sources
from data_pipeline.catalog.audit import entries
from data_pipeline.catalog.engine import Catalog
from data_pipeline.catalog.register import look, register
from data_pipeline.catalog.show import details
from data_pipeline.index.manifest import RUN_SOURCES, RUN_TOMBSTONES, read_index
from data_pipeline.plan.planner import Planner
from data_pipeline.store.open import FolderStore
from kimi_pretrain.config import dump_config, load_config
from tests.dist.jobs import SMALL
from tests.unit.launch.data_command import run


@pytest.fixture
def root(data_root, tmp_path, monkeypatch):
    copytree(data_root, tmp_path / "corpus")
    monkeypatch.setenv("KIMI_PRETRAIN_CATALOG", str(tmp_path / "catalog.sqlite"))
    return tmp_path / "corpus"


def test_a_request_from_exposure_to_the_audit(root, tmp_path):
    store = FolderStore(root)
    keys = [f"data.root={root}", f"data.cache={{folder: {tmp_path}/cache, block_bytes: 65536}}"]
    config = load_config("tiny_cpu", [*SMALL, *keys])
    runs = tmp_path / "runs"
    (runs / "mine").mkdir(parents=True)
    (runs / "mine" / "config.yaml").write_text(dump_config(config))
    indices = [read_index(store, name) for name in config.data.source_names]
    (runs / "mine" / RUN_SOURCES).write_text(json.dumps(run_sources(config.data, indices, [])))
    record = Planner(indices, config.data).tombstones.record()
    (runs / "mine" / RUN_TOMBSTONES).write_text(json.dumps(record))
    (runs / "mine" / "metrics.jsonl").write_text('{"step": 1}\n{"step": 30}\n')
    samples = tmp_path / "request.jsonl"
    lines = [{"source": "words", "key": f"w{n:04d}"} for n in range(20)]
    samples.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = run("exposure", runs, "--list", samples, "--out", tmp_path / "uses.jsonl", "--json")
    summary = json.loads(found.stdout.splitlines()[-1])
    uses = [json.loads(line) for line in (tmp_path / "uses.jsonl").read_text().splitlines()]
    assert summary["failed"] == 0
    assert summary["runs"][0]["uses"] == len(uses) > 5
    assert {*uses[0]} == {"run", "step", "row", "source", "key", "part", "epoch", "masked"}

    with Closing(Catalog()) as catalog:
        register(catalog, look(store, None, "words"), owner="text")
    before = {key: store.get(key) for key in store.list()}
    told = run("redact", root, "--list", samples)
    assert "words: 20 samples to be redacted" in told.stdout
    assert "nothing was changed; --yes does it" in told.stdout
    assert {key: store.get(key) for key in store.list()} == before
    run("catalog", "request", "17", "--list", samples)
    config = runs / "mine" / "config.yaml"
    arguments = ("--list", samples, "--request", "17", "--config", config, "--yes", "--json")
    told = run("redact", root, *arguments)
    assert "words: 20 samples redacted" in told.stdout
    assert "catalogue: words@1 is words@2 now: verify and promote it" in told.stdout
    assert json.loads(told.stdout.splitlines()[-1])["kept"] == []
    assert len(read_index(store, "words").redacted) == 20
    assert "no block of" in run("redact", root, "--config", config, "--purge-only").stdout
    audit = run("catalog", "audit").stdout
    assert '"action": "received"' in audit
    assert '"action": "redacted"' in audit
    assert "w0003" not in audit
    with Closing(Catalog()) as catalog, catalog.read() as connection:
        assert details(connection, "words@2")["owner"] == "text"
    again = run("exposure", runs, "--list", samples, "--json")
    assert json.loads(again.stdout.splitlines()[-1])["runs"] == summary["runs"]
    # A run that cannot be replayed is reported; the other runs are still examined.
    copytree(runs / "mine", runs / "other")
    noted = (runs / "other" / RUN_SOURCES).read_text()
    (runs / "other" / RUN_SOURCES).write_text(noted.replace(indices[1].content_hash, "0" * 64))
    copytree(runs / "mine", runs / "third")
    (runs / "third" / RUN_TOMBSTONES).unlink()  # words redacted at an unknown step
    found = run("exposure", runs, "--list", samples, code=1)
    assert f"{runs / 'third' / RUN_TOMBSTONES} is missing: " in " ".join(found.stderr.split())
    assert "its rows cannot be told; restore the file" in " ".join(found.stderr.split())
    assert "left out: " in found.stderr
    assert "restore the source" in found.stderr
    assert f"{runs / 'third'}: " not in found.stdout
    assert f"{runs / 'mine'}: " in found.stdout


def test_exposure_does_not_answer_for_what_is_not_there(root, tmp_path):
    """Collected sources (trained on or held out) and unknown sources give no answer."""
    store, mine = FolderStore(root), tmp_path / "mine"
    sources = "data.sources={words: 1}"
    keys = (f"data.root={root}", sources, "data.vision_token_ratio=null")
    config = load_config("tiny_cpu", [*SMALL, *keys])
    mine.mkdir()
    (mine / "config.yaml").write_text(dump_config(config))
    words, pictures = (read_index(store, name) for name in ("words", "pictures_heldout"))
    noted = run_sources(config.data, [words], [pictures])
    (mine / RUN_SOURCES).write_text(json.dumps(noted))
    (mine / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    wrong = run("exposure", mine, "--source", "wrods", "--key", "w0001", code=2)
    assert "knows a source 'wrods'; did you mean 'words'?" in wrong.stderr
    held = ("exposure", mine, "--source", "pictures_heldout", "--key", "p0001")
    assert "0 uses in 0 of steps 1 to 2, held out in pictures_heldout" in run(*held).stdout
    rmtree(root / "pictures_heldout")
    asked = ("exposure", mine, "--source", "words", "--key", "w0001", "--json")
    found = run(*asked, code=1)
    assert "whether held-out source 'pictures_heldout' held them cannot be told" in found.stderr
    assert json.loads(found.stdout.splitlines()[-1])["runs"][0]["untold"] == ["pictures_heldout"]
    assert "pictures_heldout cannot be told: under" in run(*held, code=1).stderr
    rmtree(root / "words")
    for one in (asked, ("exposure", mine, "--source", "pictures", "--key", "p0001")):
        found = run(*one, code=1)
        assert "its uses cannot be told: it drew from words, not under" in found.stderr
        assert "0 uses" not in found.stdout


class Closing:
    """Context manager that closes a catalogue."""

    def __init__(self, catalog):
        self.catalog = catalog

    def __enter__(self):
        return self.catalog

    def __exit__(self, *_):
        self.catalog.close()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("redact", "{root}"), "give --source with --key, or --list"),
        (("redact", "{root}", "--source", "words"), "give --source with --key, or --list"),
        (("redact", "{root}", "--source", "wrods", "--key", "w"), "no finished source 'wrods'"),
        (("redact", "{root}", "--source", "words", "--key", "w1"), "has no sample 'w1' among 200"),
        (("redact", "{root}", "--list", "{root}/none.jsonl"), "none.jsonl: no such file"),
        (("redact", "{root}", "--purge-only"), "--purge-only: give --config"),
        (("exposure", "{root}", "--source", "words", "--key", "w"), "no run here"),
    ],
)
def test_what_is_asked_wrongly_is_told_in_one_line(root, monkeypatch, arguments, told):
    monkeypatch.delenv("KIMI_PRETRAIN_CATALOG")
    monkeypatch.setenv("HOME", str(root))
    result = run(*(one.format(root=root) for one in arguments), code=2)
    assert told in result.stderr


def test_holds_are_in_the_audit(root):
    with Closing(Catalog()) as catalog:
        register(catalog, look(FolderStore(root), None, "words"), owner="text")
    run("hold", root / "words", "case-9", "--lock")
    run("hold", root / "words", "case-9", "--release")
    run("hold", root / "words", "case-9", "--release", code=2)
    with Closing(Catalog()) as catalog, catalog.read() as connection:
        held = [one.what for one in entries(connection) if "hold" in one.what]
    shards = [shard.key for shard in read_index(FolderStore(root), "words").shards]
    assert [(one["hold"], one["action"], one["folder"], one["in"]) for one in held] == [
        ("case-9", "put", "words", str(root)), ("case-9", "ended", "words", str(root)),
    ]  # fmt: skip
    assert [one["shards"] for one in held] == [shards, shards]
    assert [one["lock"] for one in held] == [
        "the store has no locks: this software alone keeps to the hold", None,
    ]  # fmt: skip
