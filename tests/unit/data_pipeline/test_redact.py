"""Redaction leaves no byte of the samples in any source, and every other sample unchanged."""

import hashlib
import itertools
import json
import shutil
import tarfile
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from data_pipeline.cache.cached_store import CacheConfig, CachedStore
from data_pipeline.config import DataConfig
from data_pipeline.govern.holds import Hold, end_hold, lock, put_hold, refuse_held
from data_pipeline.govern.redact import carry_out, held, plan, purge
from data_pipeline.index.erased import read_erased
from data_pipeline.index.manifest import SCHEMA, read_index
from data_pipeline.index.reads import (
    ShardReplaced,
    check_shards,
    document_of,
    medium_of,
    moved_shards,
    read_checked,
)
from data_pipeline.ingest.claim import Claim, NameTaken
from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.reindex import reindex
from data_pipeline.ingest.samples import CrudeSample, TextSegment
from data_pipeline.inspect.verify import Checks, verify_source
from data_pipeline.loader import Loader
from data_pipeline.store.open import FolderStore, MissingKey, S3Store, StoreUnavailable
from data_pipeline.stream.stream import SampleStream, StreamConfig
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import PatchLimits
from tests.unit.data_pipeline.every_kind import WORDS, filmed, picture, sentence

NAMES = ("pairs", "pairs_2", "pairs_k", "other")
GONE = {"pairs": ["p3", "p17", "v1"], "pairs_2": ["n2"]}  # n2 is in shards of pairs_2 only
CONFIG = DataConfig(
    root="/not/opened", sources={"other": 1.0, "pairs": 2.0}, seq_len=128, rows_per_step=3,
    pack_window=16, tokenizer="words.tiktoken", prefetch_steps=0, fetch_threads=1,
    limits=PatchLimits(image=100, frame=16, side=512),
)  # fmt: skip
CACHE = {"disk_bytes": 1 << 24, "block_bytes": 4096}


def crude(prefix, count, seed):
    rng = np.random.default_rng(seed)
    return [
        CrudeSample(f"{prefix}{i}", [picture(rng, "png"), TextSegment(sentence(rng) + f" {i}.")])
        for i in range(count)
    ]


@pytest.fixture
def root(tmp_path):
    """Build a source, a source grown from it, a reindexed source, and an unrelated source."""
    store, rng = FolderStore(tmp_path / "bucket"), np.random.default_rng(1)
    ranks = train_ranks([WORDS * 3], 300)
    store.put("words.tiktoken", ranks)
    tokenizer = Tokenizer(ranks, "words")
    clips = [CrudeSample(f"v{i}", [filmed(rng, 6), TextSegment(f"clip {i}")]) for i in range(2)]
    ingest([*crude("p", 18, 2), *clips], store, "pairs", tokenizer, 150_000, category="caption")
    grown = {"category": "caption", "append_to": "pairs"}
    ingest(crude("n", 4, 3), store, "pairs_2", tokenizer, 150_000, **grown)
    reindex(store, "pairs", "pairs_k", Tokenizer(train_ranks([WORDS * 9], 280), "k"))
    ingest(crude("o", 5, 4), store, "other", tokenizer, 150_000, category="caption")
    return store, tokenizer


def parts(index, samples):
    found = [document_of(index, n) for n in samples]
    for n in samples:
        found += [medium_of(index, i) for i in range(*index.item_ptr[n : n + 2].tolist())]
    return found


def contents(store, index):
    """Return key -> bytes of each sample's document and files."""
    return {
        index.key_of(n): read_checked(store, parts(index, [n])) for n in range(index.num_samples)
    }


def occurrences(folder, needles):
    """Return the files of a folder that contain any of the byte strings."""
    return [
        path
        for path in sorted(folder.rglob("*"))
        if path.is_file() and any(needle in path.read_bytes() for needle in needles)
    ]


def needles_of(held, gone):
    """Return byte strings of the redacted documents and files that no other sample contains.

    Args:
        held: source -> key -> bytes of the sample.
        gone: keys of the redacted samples.
    """
    found, others = [], []
    for samples in held.values():
        for key, bodies in samples.items():
            if key not in gone:
                others += bodies
                continue
            for body in bodies:
                step = max(1, len(body) // 8)
                found += [body[at : at + 24] for at in range(0, len(body) - 24, step)]
    rest = b"\0".join(others)
    return [piece for piece in dict.fromkeys(found) if len(set(piece)) > 8 and piece not in rest]


def test_no_byte_is_left_and_all_else_is_as_it_was(root, tmp_path):
    store, tokenizer = root
    before = {name: read_index(store, name) for name in NAMES}
    held = {name: contents(store, index) for name, index in before.items()}
    needles = needles_of(held, {"p3", "p17", "v1", "n2"})
    assert len(needles) > 30
    config = CacheConfig(folder=str(tmp_path / "cache"), **CACHE)
    with CachedStore(FolderStore(store.root), config) as cache:
        for index in before.values():
            for shard in index.shards:
                cache.register(shard.key, shard.size, shard.sha256)
                cache.get(shard.key)
    assert occurrences(tmp_path / "cache", needles)
    assert len(occurrences(store.root, needles)) >= 3
    todo = plan(store, GONE)
    assert {name: len(found) for name, found in todo.samples.items()} == {
        "pairs": 3, "pairs_2": 4, "pairs_k": 3,
    }  # fmt: skip
    done = carry_out(store, GONE)
    assert done.samples == {"pairs": 3, "pairs_2": 4, "pairs_k": 3}
    assert not done.kept
    assert len(done.removed) == len(done.shards) >= 3
    assert occurrences(store.root, needles) == []
    purge(FolderStore(store.root), config)
    assert occurrences(tmp_path / "cache", needles) == []
    out = {"pairs": {"p3", "p17", "v1"}, "pairs_2": {"p3", "p17", "v1", "n2"}, "other": set()}
    for name in NAMES:
        index, gone = read_index(store, name), out.get(name, out["pairs"])
        assert {index.key_of(n) for n in index.redacted} == gone
        assert index.identity == before[name].content_hash
        assert (index.content_hash == index.identity) == (name == "other")
        assert [s.size for s in index.shards] == [s.size for s in before[name].shards]
        assert done.contents.get(name) in (None, (index.identity, index.content_hash))
        check_shards(store, index)
        now = contents(store, index)
        for key, bodies in held[name].items():
            assert (now[key] == bodies) == (key not in gone), key
        for sample in index.redacted:
            document, *media = now[index.key_of(sample)]
            assert document.strip() == b'{"meta":{},"segments":[]}'
            assert not any(any(body) for body in media)
        for shard in index.shards:
            assert hashlib.sha256(store.get(shard.key)).hexdigest() == shard.sha256
            with tarfile.open(store.root / shard.key) as tar:
                assert len(tar.getmembers()) > 1
        checks = Checks(None if name == "pairs_k" else tokenizer, decode=True)
        found = [p for report in verify_source(store, index, checks) for p in report.problems]
        assert found == []
    # A second run has nothing left to do.
    assert not plan(store, GONE)
    again = carry_out(store, GONE)
    assert not again.samples
    assert not again.removed
    # Later, another sample of the same shards.
    more = carry_out(store, {"pairs_k": ["p4"]})
    assert more.samples == {"pairs": 1, "pairs_2": 1, "pairs_k": 1}
    index = read_index(store, "pairs")
    assert [index.key_of(n) for n in index.redacted] == ["p3", "p17", "v1", "p4"]
    assert index.identity == before["pairs"].content_hash
    assert occurrences(store.root, needles_of(held, {"p4"})) == []


def test_samples_are_redacted_in_the_order_in_which_they_are_asked_for(root):
    """Runs number redactions in this order; a source not named uses that of its shards' source."""
    store, _ = root

    def order(name):
        index = read_index(store, name)
        return [index.key_of(n) for n in index.redacted]

    carry_out(store, {"pairs": ["p17", "v1", "p3"]})
    for name in ("pairs", "pairs_2", "pairs_k"):
        assert order(name) == ["p17", "v1", "p3"]
    carry_out(store, {"pairs": ["p9", "p5", "p3"], "pairs_k": ["p5", "p9"]})
    assert order("pairs") == ["p17", "v1", "p3", "p9", "p5"]
    assert order("pairs_k") == ["p17", "v1", "p3", "p5", "p9"]


def test_each_medium_of_a_sample_is_erased(root):
    """The checksums of all files become those of zeros, so that readers find no damage."""
    store, tokenizer = root
    rng = np.random.default_rng(6)
    many = [picture(rng, "png"), TextSegment("and"), picture(rng, "jpg"), filmed(rng, 6)]
    crude_ones = [CrudeSample("many", many), *crude("m", 2, 7)]
    ingest(crude_ones, store, "several", tokenizer, 150_000, category="caption")
    held = {"several": contents(store, read_index(store, "several"))}
    carry_out(store, {"several": ["many"]})
    document, *media = contents(store, read_index(store, "several"))["many"]
    assert len(media) >= 3
    assert [body for body in media if any(body)] == []
    for body in held["several"]["many"]:
        assert occurrences(store.root, [body[len(body) // 2 :][:24]]) == []


def test_sources_made_of_redacted_ones_know_it(root):
    store, tokenizer = root
    carry_out(store, GONE)
    for name, make in (
        ("later", lambda: reindex(store, "pairs_2", "later", tokenizer)),
        (
            "grown",
            lambda: ingest(
                crude("z", 3, 8), store, "grown", tokenizer, 150_000, category="caption",
                append_to="pairs_2",
            ),
        ),
    ):  # fmt: skip
        make()
        index = read_index(store, name)
        assert {index.key_of(n) for n in index.redacted} == {"p3", "p17", "v1", "n2"}
        assert index.made_as == ""
        check_shards(store, index)
    old, new = read_index(store, "pairs_2"), read_index(store, "later")
    assert np.array_equal(old.piece_tokens, new.piece_tokens)


def test_a_run_goes_on_and_draws_none_of_them(root):
    store, tokenizer = root

    def loader():
        indices = [read_index(store, name) for name in ("other", "pairs")]
        return Loader(CONFIG, FolderStore(store.root), indices, tokenizer)

    def keys(running, steps):
        found = []
        for _ in range(steps):
            batch = next(running)
            assert not batch.bad
            table = batch.plan.samples
            pairs = zip(table.source.tolist(), table.index.tolist())
            found += [running.indices[source].key_of(n) for source, n in pairs]
        return found

    with loader() as running:
        assert set(keys(running, 12)) >= {"p3", "p17", "v1"}
        state = running.state_dict()
        whole = [next(running).plan.content_hash() for _ in range(3)]
    carry_out(store, {"pairs": GONE["pairs"]})
    with loader() as running:
        running.load_state_dict(state)
        assert "from step 13 on" in running.planner.notices()[-1]
        assert not {*keys(running, 20)} & {"p3", "p17", "v1"}
        [[step, noted]] = running.state_dict()["redacted"]
        assert (step, {name: count for name, (count, _) in noted.items()}) == (12, {"pairs": 3})
    with loader() as fresh:
        assert not {*keys(fresh, 20)} & {"p3", "p17", "v1"}
    assert whole


def test_a_loader_under_way_reads_on_in_the_new_shards(root, tmp_path, caplog):
    """All other samples stay bit-identical; redacted samples count as unusable with a reason."""
    store, tokenizer = root
    shutil.copytree(store.root, tmp_path / "copy")
    indices = [read_index(store, name) for name in ("other", "pairs")]
    redactions, met = [{"pairs": ["p3"]}, {"pairs": ["p17", "v1"]}], set()
    with (
        Loader(CONFIG, store, indices, tokenizer) as running,
        Loader(CONFIG, FolderStore(tmp_path / "copy"), indices, tokenizer) as alone,
    ):
        for step in range(24):
            if step in (1, 4):  # the second redaction replaces shards of the first
                assert carry_out(store, redactions.pop(0)).removed
            mine, whole = next(running), next(alone)
            table, bad = mine.plan.samples, {one.sample for one in mine.bad}
            met |= {running.indices[table.source[n]].key_of(int(table.index[n])) for n in bad}
            assert all("redacted after this start had read" in one.reason for one in mine.bad)
            for n in bad:
                at = slice(table.start[n], table.start[n] + table.length[n])
                assert not mine.rows.loss_mask[table.row[n], at].any()
                for name in ("tokens", "labels", "loss_mask"):
                    rows, expected = getattr(mine.rows, name), getattr(whole.rows, name)
                    rows[table.row[n], at] = expected[table.row[n], at]
            for name in ("tokens", "labels", "loss_mask"):
                assert np.array_equal(getattr(mine.rows, name), getattr(whole.rows, name))
            lost = {item for item in whole.media if int(mine.plan.items.sample[item]) in bad}
            assert mine.media.keys() == whole.media.keys() - lost
            assert all(np.array_equal(whole.media[item], mine.media[item]) for item in mine.media)
    assert met == {"p3", "p17", "v1"}
    assert "was replaced by a redaction" in caplog.text


def test_a_start_that_meets_a_redaction_is_worth_another(root):
    """The start read the index with the shards that were removed then."""
    store, _ = root
    index = read_index(store, "pairs_2")
    carry_out(store, {"pairs": ["p3"]})
    with pytest.raises(ShardReplaced, match=r"pairs/000000\.tar .* replaced by .*--resume latest"):
        check_shards(store, index)
    store.delete(read_index(store, "pairs_2").shards[0].key)
    with pytest.raises(MissingKey):  # a missing key without a redaction
        check_shards(store, read_index(store, "pairs_2"))


def test_what_manifests_say_of_shards_cannot_go_in_circles(tmp_path):
    """Each manifest is well-formed, but together they form a cycle."""
    store, sha = FolderStore(tmp_path), {one: one * 64 for one in "1234"}
    keys = {one: f"a/000000.redacted-{one * 12}.tar" for one in "12"}
    keys |= {one: f"a/000001.redacted-{one * 12}.tar" for one in "34"}

    def put(name, *steps):
        shards = [{"key": keys[b], "size": 1, "sha256": sha[b], "samples": 1} for _, b in steps]
        old = [{"key": keys[a], "size": 1, "sha256": sha[a], "by": keys[b]} for a, b in steps]
        manifest = {"schema": SCHEMA, "name": name, "category": "text", "samples": 1, "items": 0}
        manifest |= {"shards": shards, "content_hash": "c", "index_sha256": "i"}
        manifest["tokenizer"] = {"name": "t", "sha256": "s"}
        manifest["redacted"] = {"made_as": "m", "samples": [], "replaced": old}
        store.put(f"{name}/manifest.json", json.dumps(manifest).encode())

    put("a", ("1", "2"), ("3", "4"))
    put("b", ("2", "1"))
    store.put("torn/manifest.json", b"{")
    assert moved_shards(store, ["b/000000.tar", *keys.values()]) == {keys["3"]: keys["4"]}


def test_a_stream_of_raw_samples_goes_on_with_others_in_their_places(root):
    store, _ = root

    def stream():
        return SampleStream(FolderStore(store.root), ["pairs"], StreamConfig(batch_size=5))

    def keys(running, count):
        return [sample["__key__"] for sample in itertools.islice(running, count)]

    with stream() as running:
        plain = keys(running, 60)
        state = running.state_dict()
    carry_out(store, {"pairs": GONE["pairs"]})
    out = set(GONE["pairs"])
    with stream() as running:
        running.load_state_dict(state)
        assert not {*keys(running, 60)} & out
    with stream() as running:
        found = keys(running, 60)
    assert not {*found} & out
    assert all(a == b for a, b in zip(plain, found, strict=True) if a not in out)
    assert {*plain} >= out


class Breaking(FolderStore):
    """A store that fails after a number of changes."""

    def __init__(self, store, changes):
        super().__init__(store.root)
        self.left = changes

    def _change(self):
        self.left -= 1
        if self.left < 0:
            raise StoreUnavailable("gone")

    def put(self, key, data):
        if "/.ingest/" not in key:
            self._change()
        return super().put(key, data)

    def delete_versions(self, key):
        self._change()
        return super().delete_versions(key)


@pytest.mark.parametrize("changes", [2, 5, 7, pytest.param(None, marks=pytest.mark.slow)])
def test_a_redaction_that_is_cut_off_leaves_a_sound_root_and_goes_on(root, changes):
    store, _ = root
    held = {name: contents(store, read_index(store, name)) for name in NAMES}
    needles = needles_of(held, {"p3", "p17", "v1", "n2"})
    cut = 0
    for number in range(99) if changes is None else (changes,):
        try:
            carry_out(Breaking(store, number), GONE)
        except StoreUnavailable:
            cut += 1
        else:
            break
        for name in NAMES:
            index = read_index(store, name)
            check_shards(store, index)
    assert cut or changes == 7  # an object that cannot be removed is reported without an error
    done = carry_out(store, {})  # no arguments are needed once a manifest was written
    if not any(read_index(store, name).redacted for name in NAMES):
        assert not done.samples
        carry_out(store, GONE)
    wanted = carry_out(store, GONE)
    assert not wanted.kept
    assert occurrences(store.root, needles) == []
    for name, count in (("pairs", 3), ("pairs_2", 4), ("pairs_k", 3), ("other", 0)):
        index = read_index(store, name)
        assert len(index.redacted) == count
        check_shards(store, index)


def test_sources_change_before_those_that_were_made_of_them(root):
    """An interrupted redaction resumes from the manifest in the shards' own folder."""
    store, tokenizer = root
    made_of = {"category": "caption", "append_to": "other"}
    ingest(crude("a", 2, 5), store, "a_grown", tokenizer, 150_000, **made_of)
    for number in range(1, 5):
        sample = f"o{number}"
        with suppress(StoreUnavailable):
            carry_out(Breaking(store, number), {"a_grown": [sample]})
        found = [set(read_index(store, name).redacted) for name in ("other", "a_grown")]
        carry_out(store, {})
        done = [set(read_index(store, name).redacted) for name in ("other", "a_grown")]
        assert done[0] == done[1] == found[0] >= found[1]
    assert len(done[0]) >= 2


def test_what_may_be_the_same_is_told(root):
    store, tokenizer = root
    twin = crude("p", 18, 2)[3]
    ingest(
        [replace(twin, key="copy"), *crude("t", 2, 9)], store, "pairs_3", tokenizer, 150_000,
        category="caption", append_to="pairs",
    )  # fmt: skip
    found = plan(store, {"pairs": ["p3"]}).twins
    assert [(one.source, one.key, one.of) for one in found] == [("pairs_3", "copy", "p3")]


@pytest.mark.parametrize(
    ("wanted", "told"),
    [
        ({"pears": ["p3"]}, "no finished source 'pears'; there are: other, pairs"),
        ({"pairs": ["p3", "p333"]}, "'pairs' has no sample 'p333' among 20"),
    ],
)
def test_bad_requests_are_told_in_one_line_and_change_nothing(root, wanted, told):
    store, _ = root
    before = {key: store.get(key) for key in store.list()}
    with pytest.raises(ValueError, match=told):
        carry_out(store, wanted)
    assert {key: store.get(key) for key in store.list()} == before


def test_samples_are_found_in_every_source_of_their_shards(root):
    """Samples are found by their position, redacted or not; unknown sources are ignored."""
    store, _ = root
    for _ in range(2):
        assert held(store, {"pairs": ["p3"]}) == {"pairs": [3], "pairs_2": [3], "pairs_k": [3]}
        assert held(store, {"pairs_k": ["p3", "v1"], "other": ["o4"], "gone": ["x"]}) == {
            "other": [4], "pairs": [3, 19], "pairs_2": [3, 19], "pairs_k": [3, 19],
        }  # fmt: skip
        assert held(store, {"pairs_2": ["n2"]}) == {"pairs_2": [22]}
        assert held(store, {}) == held(store, {"gone": ["x"]}) == {}
        carry_out(store, GONE)
    with pytest.raises(ValueError, match="'other' has no sample 'x'"):  # the first by name
        held(store, {name: ["x"] for name in ("pairs_k", "pairs_2", "pairs", "other")})


def test_what_was_erased_is_known_by_its_hash_in_every_source(root):
    store, _ = root
    before = {name: read_index(store, name) for name in NAMES}
    assert not read_erased(store).by_crc
    carry_out(store, GONE)
    for name, index in before.items():
        gone = sorted(read_index(store, name).redacted)
        assert read_erased(store).among(index) == gone
        assert (f"{name}/erased.json" in {*store.list()}) == bool(gone)


def test_a_hold_keeps_shards_whoever_names_them(root):
    store, _ = root
    before = {key: store.get(key) for key in store.list()}
    hold = put_hold(store, "pairs", "case-9")
    assert hold.shards == tuple(shard.key for shard in read_index(store, "pairs").shards)
    for keys in (hold.shards, hold.shards[1:], hold.shards[2:]):
        with pytest.raises(ValueError, match=f": {keys[0]} is under hold"):  # the first held key
            refuse_held(store, keys[::-1])
    for wanted in (GONE, {"pairs_k": ["p3"]}):
        with pytest.raises(ValueError, match=r"pairs/00000\d.tar is under hold 'case-9' since"):
            carry_out(store, wanted)
    with pytest.raises(ValueError, match="there is a hold 'case-9' already"):
        put_hold(store, "pairs", "case-9")
    put_hold(store, "pairs_2", "case-10", [read_index(store, "pairs_2").shards[-1].key])
    with pytest.raises(ValueError, match="no shard 'x'; there are: pairs/"):
        put_hold(store, "pairs_2", "case-11", ["x"])
    with pytest.raises(ValueError, match="no hold 'case-8'; there are: case-9"):
        end_hold(store, "pairs", "case-8")
    end_hold(store, "pairs", "case-9")
    end_hold(store, "pairs_2", "case-10")
    assert {key: store.get(key) for key in store.list()} == before
    store.put("other/holds.json", b"{}")
    with pytest.raises(ValueError, match="other/holds.json: expected"):
        carry_out(store, GONE)
    store.delete("other/holds.json")
    assert not carry_out(store, GONE).kept


def test_a_hold_keeps_a_shard_that_was_replaced(root):
    """The hold arrives after the redaction has changed the manifests and before the removal."""
    store, _ = root
    key = read_index(store, "other").shards[0].key
    told = {"holds": [{"hold": "case-9", "since": "then", "shards": [key]}]}

    class Late(FolderStore):
        def put(self, name, data):
            written = super().put(name, data)
            if name == "other/manifest.json":
                super().put("other/holds.json", json.dumps(told).encode())
            return written

    before = store.get(key)
    for where in (Late(store.root), store):  # and on later runs while the hold lasts
        done = carry_out(where, {"other": ["o0"]})
        assert done.kept == [(key, "under hold 'case-9'")]
        assert store.get(key) == before
    end_hold(store, "other", "case-9")
    assert carry_out(store, {"other": ["o0"]}).removed == [key]


def test_a_hold_that_is_put_while_a_redaction_begins_is_kept(root, monkeypatch):
    store, _ = root
    before = {name: store.get(f"{name}/manifest.json") for name in NAMES}
    enter = Claim.__enter__

    def late(claim):
        if claim._source.endswith("/pairs"):
            monkeypatch.undo()
            put_hold(store, "pairs_2", "case-9")
        return enter(claim)

    monkeypatch.setattr(Claim, "__enter__", late)
    with pytest.raises(ValueError, match="is under hold 'case-9'"):
        carry_out(store, {"pairs": ["p3"]})
    assert {name: store.get(f"{name}/manifest.json") for name in NAMES} == before


def test_ending_a_hold_leaves_the_locks_of_others(monkeypatch):
    """A bucket's legal hold has no name: a shard under two holds stays locked."""
    asked: list[tuple[str, bool]] = []
    store = object.__new__(S3Store)
    monkeypatch.setattr(S3Store, "set_hold", lambda self, key, *, on: asked.append((key, on)))
    monkeypatch.setattr("data_pipeline.govern.holds.enforces", lambda store: True)
    first = Hold("case-1", "pairs", "then", ("pairs/000000.tar", "pairs/000001.tar"))
    second = Hold("case-2", "pairs_2", "then", ("pairs/000001.tar", "pairs_2/000000.tar"))
    assert "set on 2 shards" in lock(store, first, on=True, others=[second])
    assert asked == [("pairs/000000.tar", True), ("pairs/000001.tar", True)]
    asked.clear()
    assert "ended of 1 shards" in lock(store, first, on=False, others=[second])
    assert asked == [("pairs/000000.tar", False)]


def test_a_shard_that_is_no_longer_what_was_replaced_stays(root):
    """A replaced shard also stays if its redacted successor is lost."""
    store, _ = root
    key = read_index(store, "other").shards[0].key
    data = store.get(key)
    carry_out(Breaking(store, 3), {"other": ["o0"]})  # the removal is the fourth change
    assert key in store.list()
    store.put(key, data[:-1] + b"x")
    [(kept, reason)] = carry_out(store, {}).kept
    assert (kept, "has other bytes than other says" in reason) == (key, True)
    store.put(key, data)
    new = read_index(store, "other").shards[0].key
    redacted = store.get(new)
    store.delete(new)
    [(kept, reason)] = carry_out(store, {}).kept
    assert (kept, reason) == (key, f"{new}, which is to be in its place, is not there: restore it")
    store.put(new, redacted)
    assert carry_out(store, {}).removed == [key]


def test_nobody_writes_in_a_folder_while_replaced_shards_are_removed(root):
    """A temporary file there would be another writer's shard."""
    store, _ = root
    refused = []

    class Late(FolderStore):
        def remove_unfinished(self, folder):
            with pytest.raises(NameTaken), Claim(store, folder):
                pass
            refused.append(folder)
            super().remove_unfinished(folder)

    assert carry_out(Late(store.root), {"other": ["o0"]}).removed
    assert refused == ["other"]


def test_replaced_shards_stay_while_somebody_else_writes(root, monkeypatch):
    """The writer may be there or in a source that may name them; the next redaction gets them."""
    store, _ = root
    key = read_index(store, "other").shards[0].key
    carry_out(Breaking(store, 3), {"other": ["o0"]})  # the removal is the fourth change
    part = store.root / "other" / ".part-0123456789abcdef"
    part.write_bytes(b"a shard of another writer")
    with Claim(store, "other"):
        [(kept, reason)] = carry_out(store, {}).kept
    assert (kept, "is being written by another process" in reason) == (key, True)
    assert part.exists()
    request, enter = "late/.ingest/request.json", Claim.__enter__

    def begun(claim):
        store.put(request, b'{"append to": "abc"}')
        return enter(claim)

    monkeypatch.setattr(Claim, "__enter__", begun)
    [(kept, reason)] = carry_out(store, {}).kept
    assert (kept, "late: a source that may hold the shards of" in reason) == (key, True)
    monkeypatch.undo()
    store.delete(request)
    assert carry_out(store, {}).removed == [key]
    assert not part.exists()


def test_a_damaged_shard_or_an_unfinished_source_is_refused(root):
    store, _ = root
    store.put("half/.ingest/request.json", b'{"append to": "abc"}')
    with pytest.raises(ValueError, match="half: a source that may hold the shards of another"):
        carry_out(store, GONE)
    store.put("half/.ingest/request.json", b'{"inputs": []}')
    key = read_index(store, "pairs").shards[0].key
    store.put(key, store.get(key)[:-1] + b"x")
    with pytest.raises(Exception, match=r"SHA-256 is .*, expected"):
        carry_out(store, GONE)
    assert not read_index(store, "pairs").redacted


def test_the_catalogue_takes_a_redacted_source_for_another_version(root, tmp_path):
    pytest.importorskip("sqlalchemy", reason="the extra platform is not installed")
    from data_pipeline.catalog.audit import check
    from data_pipeline.catalog.engine import Catalog, CatalogError
    from data_pipeline.catalog.redactions import follow, note_request
    from data_pipeline.catalog.register import look, register
    from data_pipeline.catalog.show import details, versions

    store, _ = root
    catalog = Catalog(str(tmp_path / "catalog.sqlite"))
    for name in ("pairs", "pairs_2"):
        register(catalog, look(store, None, name), licence="CC-BY-4.0", owner="vision")
    before = read_index(store, "pairs").content_hash
    assert follow(catalog, [look(store, None, name) for name in NAMES]) == []
    carry_out(store, GONE)
    note_request(catalog, "17", GONE, "redacted")
    moved = follow(catalog, [look(store, None, name) for name in NAMES], "17")
    assert moved == [("pairs@1", "pairs@3"), ("pairs@2", "pairs@4")]
    assert follow(catalog, [look(store, None, name) for name in NAMES]) == []
    with catalog.read() as connection:
        check(connection)
        assert [(one["version"], one["state"]) for one in versions(connection, "pairs")] == [
            (f"pairs@{number}", "staged") for number in (1, 2, 3, 4)
        ]
        one = details(connection, "pairs@3")
        assert one["content_hash"] == read_index(store, "pairs").content_hash != before
        assert (one["licence"], one["owner"]) == ("CC-BY-4.0", "vision")
    with pytest.raises(CatalogError, match=r"which is not pairs@3 .* with samples redacted"):
        follow(catalog, [look(store, None, "other")._replace(name="pairs")])
    catalog.close()
