"""Untrusted manifests with correct hashes, checked before every operation that removes objects."""

import hashlib
import io
import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.govern.collect import apply, propose
from data_pipeline.govern.collect_plan import Plan, Retired
from data_pipeline.govern.holds import put_hold
from data_pipeline.govern.redact import carry_out, held, plan, purge
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.erased import read_erased
from data_pipeline.index.manifest import (
    IndexMismatch,
    index_key,
    index_of,
    manifest_key,
    read_index,
    read_manifest,
    read_table,
    write_index,
)
from data_pipeline.index.own_keys import check_form, first_shards, is_shard
from data_pipeline.index.parts import index_parts
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, Listed, TextSegment
from data_pipeline.inspect.problem import Problem
from data_pipeline.inspect.verify import open_source
from data_pipeline.store.open import FolderStore
from data_pipeline.sync.compare import compare
from data_pipeline.sync.survey import OtherContent
from data_pipeline.sync.sync import sync
from data_pipeline.text import Tokenizer, train_ranks
from launch.local.user_errors import user_message
from tests.unit.data_pipeline.synced import objects_of

NOW = datetime(2026, 1, 1, tzinfo=UTC)
RANKS = train_ranks(["the tide and the harbour " * 9], 270)
TOKENIZER = Tokenizer(RANKS, "t.tiktoken")
ASKED = {"other": ["other-1"]}
OTHERS = ("victim/", "half/", "raw/", "models/", "tokenizer/")
NEW = "redacted-0123456789ab"


def texts(name, count=2):
    crude = [CrudeSample(f"{name}-{i}", [TextSegment(f"{name} {i} " * 200)]) for i in range(count)]
    return Listed(crude, identity={"file": name})


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A root with a victim under hold, user files, a killed ingest, and a hostile source."""
    store = FolderStore(tmp_path_factory.mktemp("hostile"))
    store.put("tokenizer/t.tiktoken", RANKS)
    for name in ("victim", "other", "evil"):
        ingest(texts(name), store, name, TOKENIZER, 4096, category="text")
    reindex(store, "victim", "twin", TOKENIZER)
    put_hold(store, "victim", "case-9")
    store.put("models/000000/model.safetensors", b"weights")
    for key in ("raw/000000.tar", "half/000000.tar"):
        store.put(key, store.get("evil/000000.tar"))
    store.put("half/.ingest/request.json", b'{"inputs": []}')
    return objects_of(store)


@pytest.fixture
def store(made, tmp_path):
    store = FolderStore(tmp_path / "root")
    for key, data in made.items():
        store.put(key, data)
    return store


def put(store: FolderStore, folder: str, /, **changes: object) -> None:
    """Change a manifest as an expert attacker would, with a correct content_hash."""
    manifest = read_manifest(store, folder) | changes
    data = store.get(index_key(folder))
    try:
        index = index_of(read_table(data), manifest, manifest["index_sha256"])
        manifest["content_hash"] = index.content_hash
    except (IndexMismatch, KeyError, TypeError, ValueError):
        pass  # such a manifest has no content hash
    store.put(manifest_key(folder), json.dumps(manifest).encode())


def shard(store: FolderStore, key: str) -> dict[str, object]:
    data = store.get(key)
    return {"key": key, "size": len(data), "sha256": hashlib.sha256(data).hexdigest(), "samples": 1}


def as_replaced(store: FolderStore, key: str, by: str) -> dict[str, object]:
    return {**{k: v for k, v in shard(store, key).items() if k != "samples"}, "by": by}


class Archived:
    """A catalogue with the hostile source long archived and nothing in use."""

    def __init__(self, store):
        self.store = store

    def retired(self):
        content = read_manifest(self.store, "evil")["content_hash"]
        return {"evil": Retired("evil@1", content, "archived")}

    def look_again(self): ...

    def user(self, name, contents):
        return None

    def has_facts(self, content):
        return True

    def taken(self, plan):
        return {}

    def take(self, plan, thing): ...

    def give_back(self, name, content, index_sha256): ...

    def note(self, plan, thing, kept): ...


def collect(store):
    records = Archived(store)
    things, kept = propose(store, records)
    todo = Plan(store.uri, "", NOW.isoformat(), 0, "", {}, things, kept)
    apply(store, todo, records, NOW + timedelta(days=1))
    return dict(kept)


def theirs(store):
    return {key: data for key, data in objects_of(store).items() if key.startswith(OTHERS)}


# Malformed manifests ------------------------------------------------------------------------------


def names(*keys):
    def change(store):
        return {"shards": [shard(store, key) for key in keys]}

    return change


def redacted(*pairs, samples=(0,)):
    def change(store):
        return {
            "redacted": {
                "made_as": read_manifest(store, "evil")["content_hash"],
                "samples": list(samples),
                "replaced": [as_replaced(store, key, by) for key, by in pairs],
            }
        }

    return change


UNSOUND = {
    "holds of another": names("evil/000000.tar", "victim/holds.json"),
    "the index of another": names("evil/000000.tar", "victim/index.parquet"),
    "a tokenizer": names("evil/000000.tar", "tokenizer/t.tiktoken"),
    "weights": names("evil/000000.tar", "models/000000/model.safetensors"),
    "its own index": names("evil/000000.tar", "evil/index.parquet"),
    "replaced holds": redacted(("victim/holds.json", f"victim/000000.{NEW}.tar")),
    "replaced by itself": redacted(("victim/000000.tar", "victim/000000.tar")),
    "replaced in another place": redacted(("victim/000000.tar", f"evil/000000.{NEW}.tar")),
    "replaced by none of its shards": redacted(("raw/000000.tar", f"raw/000000.{NEW}.tar")),
    "replaced and there": redacted(("evil/000000.tar", f"evil/000000.{NEW}.tar")),
    "no list": lambda store: {"redacted": {"made_as": "x", "samples": [], "replaced": 7}},
    "no redaction": lambda store: {"redacted": []},
    "another's fields": lambda store: {"shards": [{"key": "evil/000000.tar"}]},
}


def a_circle(store):
    first, second = (f"evil/000000.redacted-{n:012d}.tar" for n in (1, 2))
    about = {"size": 1, "sha256": f"{1:012d}{0:052d}"}
    replaced = [{"key": a, "by": b, **about} for a, b in ((first, second), (second, first))]
    return {"redacted": {"made_as": "x", "samples": [], "replaced": replaced}}


def deep(store):
    """Write a malformed manifest, nested a hundred thousand levels deep."""
    text = store.get(manifest_key("evil")).decode()
    nested = "[" * 100_000 + "]" * 100_000
    store.put(manifest_key("evil"), text.replace('"samples"', f'"x": {nested}, "samples"').encode())


@pytest.mark.parametrize("what", [*UNSOUND, "a circle", "nested deeply"])
def test_nothing_is_removed_by_a_manifest_without_its_form(store, tmp_path, what):
    if what == "nested deeply":
        deep(store)
    else:
        put(store, "evil", **(UNSOUND | {"a circle": a_circle})[what](store))
    before, target = objects_of(store), FolderStore(tmp_path / "target")
    told = r"evil/manifest\.json: (does not have its form: |not JSON)"
    for remove in (
        lambda: plan(store, ASKED),
        lambda: carry_out(store, ASKED),
        lambda: carry_out(store, {"evil": ["evil-0"]}),
        lambda: propose(store, Archived(store)),
        lambda: sync(store, target),
        lambda: sync(store, target, ["evil"]),
        lambda: compare(store, target, ["evil"]),
    ):
        with pytest.raises((IndexMismatch, ValueError), match=told) as caught:
            remove()
        assert "\n" not in str(caught.value)
    problem = open_source(store, "evil")
    assert isinstance(problem, Problem)
    assert "does not have its form" in problem.detail or "not JSON" in problem.detail
    assert objects_of(store) == before
    assert not target.root.exists() or target.list() == []


# Malformed indices --------------------------------------------------------------------------------


def column(name, values):
    def change(table):
        return table.set_column(table.column_names.index(name), name, values)

    return change


INDICES = {
    "no checksums": (lambda table: table.drop_columns(["json_crc"]), "json_crc is missing"),
    "no keys": (lambda table: table.drop_columns(["key"]), "key is missing"),
    "texts": (column("json_offset", pa.array(["x", "y"])), "json_offset is of type string"),
    "long numbers": (column("shard", pa.array([2**40] * 2)), "shard is of type int64"),
    "no number": (column("json_offset", pa.array([0.5, float("nan")])), "is of type double"),
    "no lists": (column("piece_kind", pa.array([1, 1], pa.int8())), "piece_kind is of type int8"),
    "no offsets": (column("json_offset", pa.array([None] * 2, pa.int64())), "lacks values"),
    "no key": (column("key", pa.array(["a", None], pa.string())), "key lacks values"),
    "no list": (column("piece_kind", pa.array([None] * 2, pa.large_list(pa.int8()))), "lacks val"),
    "an empty place in a list": (
        column("piece_kind", pa.array([[1], [None]], pa.large_list(pa.int8()))), "lacks values",
    ),
    "no shard": (column("shard", pa.array([-1, 0], pa.int32())), "must be grouped and name one"),
    "no Parquet": (None, "evil/index.parquet: no Parquet file that can be read"),
    "a damaged footer": (None, "evil/index.parquet: no Parquet file that can be read"),
}  # fmt: skip


@pytest.mark.parametrize("what", INDICES)
def test_an_index_without_its_form_is_refused_in_one_line(store, tmp_path, what):
    change, told = INDICES[what]
    if change is None:
        index = b"garbage" if what == "no Parquet" else b"PAR1" + b"\xff" * 99 + b"\x20\0\0\0PAR1"
    else:
        out = io.BytesIO()
        pq.write_table(change(read_table(store.get(index_key("evil")))), out)
        index = out.getvalue()
    store.put(index_key("evil"), index)
    put(store, "evil", index_sha256=hashlib.sha256(index).hexdigest())
    before = objects_of(store)
    for read in (
        lambda: read_index(store, "evil"),
        lambda: list(index_parts(store, "evil", tmp_path / "copy")),
        lambda: carry_out(store, {"evil": ["evil-0"]}),
        lambda: held(store, {"evil": ["evil-0"]}),
    ):
        with pytest.raises((IndexMismatch, ValueError), match=f"{told}|content_hash is") as caught:
            read()
        assert user_message(caught.value)
    assert objects_of(store) == before


# Well-formed manifests ----------------------------------------------------------------------------


def test_shards_of_others_are_no_one_s_own(store):
    """They are readable, like those of a recounted source, but do not go with the source."""
    put(store, "evil", **names("half/000000.tar", "raw/000000.tar")(store))
    assert isinstance(read_index(store, "evil"), SourceIndex)
    before = theirs(store)
    assert not carry_out(store, ASKED).kept
    assert theirs(store) == before
    kept = collect(store)
    left = theirs(store)
    assert left.keys() >= {key for key in before if not key.startswith("half/")}
    assert "no source has this folder" in kept["raw"]
    assert "evil/manifest.json" not in store.list()


def erased_bytes(store, key):
    """Return a shard of zeros, as after a full redaction, under the name it would have."""
    data = bytes(len(store.get(key)))
    sha256 = hashlib.sha256(data).hexdigest()
    by = key.replace(".tar", f".redacted-{sha256[:12]}.tar")
    return by, data


@pytest.mark.parametrize("planted", [False, True])
def test_shards_of_others_are_not_replaced_on_its_word(store, planted):
    """This holds even if the attacker could put a shard into their folders, as a sync does."""
    shards, replaced = [], []
    for key in ("victim/000001.tar", "raw/000000.tar"):
        by, data = erased_bytes(store, key)
        replaced.append(as_replaced(store, key, by))
        store.put(by, data)
        shards.append(shard(store, by))
        if not planted:
            store.delete(by)
    about = {"made_as": "", "samples": [0, 1], "replaced": replaced}
    first = [{**new, **{k: old[k] for k in ("key", "size", "sha256")}}
             for new, old in zip(shards, replaced)]  # fmt: skip
    put(store, "evil", shards=first)
    about["made_as"] = read_manifest(store, "evil")["content_hash"]
    put(store, "evil", shards=shards, redacted=about)
    assert isinstance(read_index(store, "evil"), SourceIndex)
    store.delete("victim/holds.json")
    before = theirs(store)
    done = carry_out(store, ASKED)
    assert done.samples == {"other": 1}
    assert [key for key, _ in done.kept] == ["raw/000000.tar"]
    assert "it is not in its folder" in done.kept[0][1]
    assert theirs(store) == before
    collect(store)
    assert {"victim/000000.tar", "victim/000001.tar", "raw/000000.tar"} <= {*store.list()}


def test_no_other_hash_on_its_word_keeps_blocks_in_a_cache(store, tmp_path):
    """It claims other bytes for the replaced shard, which the cache does not hold."""
    config = CacheConfig(folder=str(tmp_path / "cache"), disk_bytes=1 << 24, block_bytes=4096)
    [before, _] = read_index(store, "other").shards
    with CachedStore(FolderStore(store.root), config) as cache:
        cache.register(before.key, before.size, before.sha256)
        cache.get(before.key)
    blocks = [file for file in (tmp_path / "cache").rglob("*") if b"other 0 other 0" in data(file)]
    assert blocks
    carry_out(store, {"other": ["other-0"]})
    now = read_manifest(store, "other")["shards"][0]
    replaced = [{"key": before.key, "size": 1, "sha256": "0" * 64, "by": now["key"]}]
    about = {"made_as": "x", "samples": [0], "replaced": replaced}
    for name in (index_key, manifest_key):
        store.put(name("zzz"), store.get(name("evil")))  # the last source by name
    put(store, "zzz", shards=[now], redacted=about)
    assert purge(FolderStore(store.root), config) == 1
    assert not [file for file in blocks if b"other 0 other 0" in data(file)]


def data(file):
    return file.read_bytes() if file.is_file() else b""


def test_samples_of_others_are_not_redacted_on_its_word(store):
    """A twin of the victim declares all its samples redacted, but no redaction was requested."""
    store.delete("victim/holds.json")
    twin = read_manifest(store, "twin")
    about = {"made_as": twin["content_hash"], "samples": [0, 1], "replaced": []}
    put(store, "twin", redacted=about)
    before = theirs(store)
    todo = plan(store, ASKED)
    assert todo.samples.keys() == {"other"}
    assert [(one.source, one.key, one.of) for one in todo.elsewhere] == [
        ("victim", "victim-0", "twin"),
        ("victim", "victim-1", "twin"),
    ]
    assert not carry_out(store, ASKED).kept
    assert theirs(store) == before
    # A requested redaction compares both indices and applies to both sources.
    done = carry_out(store, {"victim": ["victim-1"]})
    assert done.samples == {"victim": 1}
    assert [(key, reason.split()[0]) for key, reason in done.kept] == [
        ("victim/000001.tar", "twin")
    ]


def test_a_sample_that_covers_others_is_refused(store):
    """Its index claims a document as long as the victim's shard."""
    store.delete("victim/holds.json")
    size = len(store.get("victim/000000.tar"))
    index = read_index(store, "twin")
    length = index.json_length.copy()
    length[0] = size - index.json_offset[0]
    store.delete(manifest_key("twin"))
    write_index(store, replace(index, json_length=length))
    before = objects_of(store)
    for wanted in ({"twin": ["victim-0"]}, {"victim": ["victim-0"]}):
        told = r"victim/000000: the sources that hold this shard do not agree .* twin, victim"
        with pytest.raises(ValueError, match=told):
            carry_out(store, wanted)
    assert objects_of(store) == before
    offset = index.json_offset.copy()
    offset[0] += 512  # an offset that the victim's index does not have
    store.delete(manifest_key("twin"))
    write_index(store, replace(index, json_offset=offset))
    before = objects_of(store)
    with pytest.raises(ValueError, match="do not agree on the sample at offset 1024"):
        carry_out(store, {"twin": ["victim-0"]})
    assert objects_of(store) == before


def test_other_hashes_of_a_shard_are_refused(store):
    store.delete("victim/holds.json")
    shards = [one | {"sha256": "0" * 64} for one in read_manifest(store, "twin")["shards"]]
    put(store, "twin", shards=shards)
    before = objects_of(store)
    with pytest.raises(ValueError, match=r"victim/000000\.tar: has sha256 .* by that of 'twin'"):
        carry_out(store, {"victim": ["victim-0"]})
    assert objects_of(store) == before


def test_another_name_in_a_manifest_is_no_way_into_its_folder(store):
    put(store, "evil", name="victim")
    before = theirs(store)
    carry_out(store, {"evil": ["evil-0"]})
    assert theirs(store) == before
    assert "evil/erased.json" in store.list()
    assert read_erased(store).by_crc


def test_redactions_of_another_content_are_unsound_and_do_not_travel(store, tmp_path):
    """A source claims the target's content_hash with all samples redacted; made_as is verified."""
    target = FolderStore(tmp_path / "target")
    sync(store, target, ["victim"])
    content = read_manifest(target, "victim")["content_hash"]
    store.put("victim/index.parquet", store.get("evil/index.parquet"))
    about = {"made_as": content, "samples": [0, 1], "replaced": []}
    sha256 = read_manifest(store, "evil")["index_sha256"]
    put(store, "victim", index_sha256=sha256, redacted=about)
    before = objects_of(target)
    with pytest.raises(IndexMismatch, match=r"victim: redacted\.made_as is"):
        sync(store, target, ["victim"])
    problem = open_source(store, "victim")
    assert isinstance(problem, Problem)
    assert "redacted.made_as" in problem.detail
    assert objects_of(target) == before


def test_a_hold_stays_whoever_names_it_and_where_no_source_is(store):
    """This also holds in a folder without a manifest."""
    store.put("raw/holds.json", store.get("victim/holds.json").replace(b"victim", b"other"))
    before = objects_of(store)
    with pytest.raises(ValueError, match="is under hold 'case-9'"):
        carry_out(store, ASKED)
    assert objects_of(store) == before
    for wrong in (b"[" * 100_000, b'{"holds": [{"hold": "x", "since": "", "shards": [7]}]}'):
        store.put("raw/holds.json", wrong)
        with pytest.raises(ValueError, match=r"raw/holds\.json: expected"):
            carry_out(store, ASKED)
        with pytest.raises(ValueError, match=r"raw/holds\.json: expected"):
            propose(store, Archived(store))


def test_what_a_stranger_s_redaction_is_said_to_be_is_not_done_to_the_original(store, tmp_path):
    """A manifest in the target declares shards replaced; the advice names that source."""
    target = FolderStore(tmp_path / "target")
    by, data = erased_bytes(store, "victim/000000.tar")
    replaced = [as_replaced(store, "victim/000000.tar", by)]
    first = shard(store, "victim/000000.tar")
    store.put(by, data)
    second = shard(store, "evil/000001.tar")
    put(store, "evil", shards=[first, second])
    made_as = read_manifest(store, "evil")["content_hash"]
    about = {"made_as": made_as, "samples": [0], "replaced": replaced}
    put(store, "evil", shards=[shard(store, by), second], redacted=about)
    sync(store, target, ["evil"])
    store.delete(manifest_key("evil"))
    with pytest.raises(OtherContent, match=r"if nobody did, do not trust .*target/evil: remove it"):
        sync(store, target, ["victim"])


ABOUT = {"size": 9, "sha256": "0123456789ab" + "0" * 52}
GOOD = {
    "name": "a", "category": "text", "content_hash": "c", "index_sha256": "i", "samples": 2,
    "items": 0, "tokenizer": {"name": "t", "sha256": "s"},
    "shards": [
        {"key": f"a/000000.{NEW}.tar", "samples": 1, **ABOUT},
        {"key": "b/000001.tar", "samples": 1, **ABOUT},
    ],
    "redacted": {
        "made_as": "m", "samples": [0],
        "replaced": [{"key": "a/000000.tar", "by": f"a/000000.{NEW}.tar", **ABOUT}],
    },
}  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3)
    | st.sampled_from([f"{name}/000000{mark}.tar" for name in "ab" for mark in ("", f".{NEW}")]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=4,
)  # fmt: skip


def holders(value):
    """Yield (container, key) for every value inside nested objects and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inside in list(items):
        yield value, key
        if isinstance(inside, dict | list):
            yield from holders(inside)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_manifest_is_sound_or_refused_in_words(data):
    """A manifest that passes is complete, with the expected type in every field."""
    check_form(GOOD)
    manifest = json.loads(json.dumps(GOOD))
    for _ in range(data.draw(st.integers(1, 2))):
        holder, key = data.draw(st.sampled_from(list(holders(manifest))))
        if data.draw(st.booleans()) and isinstance(holder, dict):
            del holder[key]
        else:
            holder[key] = data.draw(VALUES)
    try:
        check_form(manifest)
    except ValueError:
        return
    assert len(first_shards(manifest)) == len(manifest["shards"])
    assert all(is_shard(one["key"]) for one in manifest["shards"])
    assert all(type(one["samples"]) is int for one in manifest["shards"])
