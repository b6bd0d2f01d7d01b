"""`data sync` between folders: copied files, the cost of a second sync, and refusals."""

import json
import random
import shutil
import threading
import time
from pathlib import Path

import pytest

from data_pipeline.govern.holds import end_hold, put_hold
from data_pipeline.govern.redact import carry_out
from data_pipeline.index.manifest import IndexMismatch, read_index, read_manifest
from data_pipeline.index.reads import document_of, read_checked
from data_pipeline.ingest import claim
from data_pipeline.ingest.claim import Claim, NameTaken
from data_pipeline.plan.tombstones import samples_of
from data_pipeline.store.open import FolderStore, MemoryStore, MissingKey
from data_pipeline.sync.compare import compare
from data_pipeline.sync.contents import Item
from data_pipeline.sync.places import Place, open_places
from data_pipeline.sync.rate import Meter, Rate, Stopped
from data_pipeline.sync.survey import OtherContent, _Look
from data_pipeline.sync.sync import Options, _Copying, sync
from data_pipeline.sync.sync_journal import SyncJournal
from data_pipeline.sync.transfer import Damaged
from tests.unit.data_pipeline.synced import SHARDS, assert_whole, build, flip, objects_of

ALL = ["captions", "captions_2", "captions_k2", "web"]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> FolderStore:
    return build(tmp_path_factory.mktemp("made"))


@pytest.fixture
def source(made, tmp_path) -> FolderStore:
    """Return a copy that a test may damage."""
    shutil.copytree(made.root, tmp_path / "a")
    return FolderStore(tmp_path / "a")


@pytest.fixture
def target(tmp_path) -> FolderStore:
    return FolderStore(tmp_path / "b")


class Watched(FolderStore):
    """A folder that records its requests."""

    def __init__(self, root):
        super().__init__(root)
        self.asked: list[tuple[str, str]] = []

    def get(self, key, offset=0, length=None, *, etag=None):
        self.asked.append(("get", key))
        return super().get(key, offset, length, etag=etag)

    def head(self, key):
        self.asked.append(("head", key))
        return super().head(key)

    def put(self, key, data):
        self.asked.append(("put", key))
        return super().put(key, data)

    def put_verified(self, key, size, sha256, read):
        self.asked.append(("put", key))
        return super().put_verified(key, size, sha256, read)

    def put_new(self, key, data):
        self.asked.append(("put", key))
        return super().put_new(key, data)

    def list(self, prefix=""):
        self.asked.append(("list", prefix))
        return super().list(prefix)


def test_all_sources_come_with_all_that_belongs_to_them(made, target):
    seen = []
    report = sync(made, target, progress=lambda done, total: seen.append((done, total)))
    assert objects_of(target) == objects_of(made)
    assert report.sources == dict.fromkeys(ALL, "copied")
    assert seen[-1] == (report.bytes, report.bytes)
    assert report.bytes == sum(len(data) for key, data in objects_of(made).items()
                               if not key.endswith("manifest.json"))  # fmt: skip
    assert read_index(target, "captions_2").num_samples == SHARDS + 3
    assert not list(target.root.rglob(".*"))  # no journal, lock or part is left


def test_a_source_comes_with_shards_of_others_and_its_own_tokenizer(made, target):
    report = sync(made, target, ["captions_k2"])
    assert report.sources == {"captions_k2": "copied"}
    found = set(target.list())
    shards = {f"captions/{n:06d}.tar" for n in range(SHARDS)}
    own = {f"captions_k2/{name}" for name in ("index.parquet", "manifest.json", "provenance.json")}
    assert found == shards | own | {"tokenizer/other.tiktoken"}
    # Then sync the source that owns these shards: they are compared, not copied.
    report = sync(made, target, ["captions"])
    assert report.copied == len({"index", "provenance", "rejected", "tokenizer"})
    assert report.there == SHARDS
    assert assert_whole(target) == ["captions", "captions_k2"]


def test_the_next_version_copies_what_is_new(made, target):
    sync(made, target, ["captions"])
    watched = Watched(target.root)
    report = sync(made, watched, ["captions_2"])
    assert report.copied == 3 + len({"index", "provenance", "rejected"})
    old = [how for how, key in watched.asked if key.startswith("captions/0")]
    # Its manifest vouches for the shards; they are checked again after the claim.
    assert old == ["head"] * 2 * SHARDS
    assert assert_whole(target) == ["captions", "captions_2"]


def test_nothing_to_do_costs_a_head_for_each_shard(made, target):
    sync(made, target)
    here, there = Watched(made.root), Watched(target.root)
    assert sync(here, there).sources == dict.fromkeys(ALL, "there")
    shards = SHARDS + 3 + 2
    assert [how for how, key in there.asked if key.endswith(".tar")] == ["head"] * shards
    assert not [key for _, key in here.asked if key.endswith(".tar")]
    assert not [key for how, key in there.asked + here.asked if how == "put"]
    # One of them checks the size of a manifest before it is read.
    assert len(there.asked) <= shards + 9 * len(ALL)


def test_a_tokenizer_that_is_not_there_is_told(source, target):
    source.delete("tokenizer/other.tiktoken")
    assert sync(source, target).without_tokenizer == ["captions_k2"]


def test_what_is_missing_beside_a_manifest_is_completed(made, target):
    sync(made, target)
    target.delete("captions/000003.tar")
    target.delete("web/provenance.json")
    report = sync(made, target)
    assert (report.sources["captions"], report.sources["web"]) == ("completed", "completed")
    assert report.copied == 2
    assert objects_of(target) == objects_of(made)


# Damage -----------------------------------------------------------------------------------------


def test_planted_flips_are_found_on_either_side(source, target):
    """20 of 20 flips are found: ten in the source before a copy, ten in a complete copy."""
    draw = random.Random(0)
    keys = [f"captions/{n:06d}.tar" for n in range(SHARDS)] + [
        "captions/index.parquet", "captions/manifest.json"
    ]  # fmt: skip
    for key in keys:
        whole = source.get(key)
        flip(source.root / key, draw)
        with pytest.raises((Damaged, IndexMismatch, ValueError), match=key.split("/")[0]) as caught:
            sync(source, target, ["captions"])
        if key.endswith(".tar"):
            assert str(caught.value).startswith(f"{source.uri}/{key}: sha256 is ")
        assert "captions/manifest.json" not in (target.list() if target.root.exists() else [])
        source.put(key, whole)
        shutil.rmtree(target.root, ignore_errors=True)
    sync(source, target, ["captions"])
    assert compare(source, target, ["captions"]).problems == ()
    for key in keys:
        whole = target.get(key)
        flip(target.root / key, draw)
        problems = compare(source, target, ["captions"]).problems
        assert [p.split(": ")[0] for p in problems] == [f"{target.uri}/{key}"]
        target.put(key, whole)


def test_a_comparison_changes_nothing_and_names_both_sides(source, target):
    sync(source, target)
    before = objects_of(source), objects_of(target)
    (source.root / "captions" / "000001.tar").write_bytes(b"short")
    (target.root / "web" / "rejected.jsonl").write_bytes(b"x")
    (target.root / "web" / "000000.tar").unlink()
    (target.root / "captions_k2" / "manifest.json").unlink()
    found = compare(source, target)
    assert sorted(problem.split(",")[0] for problem in found.problems) == sorted([
        f"{source.uri}/captions/000001.tar: size is 5",
        f"{target.uri}/captions_k2/manifest.json: not there",
        f"{target.uri}/web/000000.tar: not there",
        f"{target.uri}/web/rejected.jsonl: size is 1",
    ])  # fmt: skip
    assert found.files == len(before[0])
    assert len(objects_of(target)) == len(before[1]) - 2
    nowhere = compare(source, FolderStore(target.root / "none"), ["web"])
    assert len(nowhere.problems) == nowhere.files


def test_bytes_that_are_wrong_once_are_read_again(made, target):
    class Flaky(FolderStore):
        wrong = 1

        def get(self, key, offset=0, length=None, *, etag=None):
            data = super().get(key, offset, length, etag=etag)
            if key == "captions/000002.tar" and self.wrong:
                self.wrong -= 1
                data = bytes([data[0] ^ 1]) + data[1:]
            return data

    seen = []
    report = sync(Flaky(made.root), target, ["captions"], progress=lambda *at: seen.append(at))
    assert seen[-1] == (report.bytes, report.bytes)
    assert assert_whole(target) == ["captions"]


def test_a_target_that_takes_wrong_bytes_is_found(made, target):
    class Lossy(FolderStore):
        def put_verified(self, key, size, sha256, read):
            written = super().put_verified(key, size, sha256, read)
            if key == "captions/000002.tar":
                flip(self.root / key, random.Random(1))
            return written

    with pytest.raises(Damaged, match=r"captions/000002\.tar: sha256 is .* after it was written"):
        sync(made, Lossy(target.root), ["captions"])
    assert "captions/000002.tar" not in target.list()
    assert "captions/manifest.json" not in target.list()
    sync(made, target, ["captions"])
    assert assert_whole(target) == ["captions"]


# Refusals ---------------------------------------------------------------------------------------


def refused(source, target, wanted, kind, message):
    before = objects_of(target) if target.root.exists() else None
    with pytest.raises(kind, match=message) as caught:
        sync(source, target, wanted)
    assert "\n" not in str(caught.value)
    assert (objects_of(target) if target.root.exists() else None) == before


def test_a_target_that_holds_other_bytes_is_left_alone(made, target):
    for key, data, message in (
        ("captions/000001.tar", b"other", r"b/captions/000001\.tar: size is 5, expected \d+; "),
        ("captions/000001.tar", bytes(len(made.get("captions/000001.tar"))),
         r"b/captions/000001\.tar: sha256 is \w{64}, expected \w{64}; nothing was changed"),
        ("captions/index.parquet", b"", r"b/captions/index\.parquet: size is 0, expected"),
        ("tokenizer/kimi.tiktoken", b"", r"b/tokenizer/kimi\.tiktoken: size is 0, expected"),
        ("captions/.ingest/request.json", b"{}", r"request\.json: an ingest of source 'captions'"),
    ):  # fmt: skip
        target.put(key, data)
        refused(made, target, ["captions"], OtherContent, message)
        target.delete(key)


def test_another_source_of_the_name_is_left_alone(made, target):
    for change, message in (
        ({"content_hash": "f" * 64}, r"b/captions/manifest\.json: content_hash is f{64}, expected"),
        ({"index_sha256": "f" * 64}, r"b/captions/manifest\.json: index_sha256 is f{64}, expected"),
        ({"name": "other"}, r"b/captions/manifest\.json: is written otherwise than in"),
    ):
        values = json.loads(made.get("captions/manifest.json")) | change
        target.put("captions/manifest.json", json.dumps(values).encode())
        refused(made, target, ["captions"], OtherContent, message)
    values = json.loads(made.get("captions/manifest.json"))
    values["shards"][0]["sha256"] = "f" * 64
    target.put("captions/manifest.json", json.dumps(values).encode())
    target.put("captions/000000.tar", made.get("captions/000000.tar"))
    message = r"000000\.tar: sha256 \(by a manifest there\) is f{64}, expected"
    refused(made, target, ["captions_2"], OtherContent, message)


def test_a_manifest_that_is_wrong_is_refused(source, target):
    good = json.loads(source.get("captions/manifest.json"))
    shard = good["shards"][0]

    def with_shard(**values):
        return good | {"shards": [shard | values, *good["shards"][1:]]}

    for manifest, message in (
        (good | {"content_hash": "f" * 64}, r"a/captions: content_hash is \w{64}, expected f{64}"),
        (good | {"index_sha256": "f" * 64}, r"a/captions: index_sha256 is \w{64}, expected f{64}"),
        (with_shard(sha256="f" * 64), r"a/captions: content_hash is \w{64}, expected \w{64}"),
        (with_shard(key="../../etc/passwd"), r"json: .*: shard '../../etc/passwd' is no key"),
        (with_shard(key="web/manifest.json"), r"json: .*: shard 'web/manifest.json' is no key"),
        (with_shard(key="web/.ingest/lock"), r"shard 'web/.ingest/lock' is no key of a shard"),
        (with_shard(key=7), r"shard 7 is no key of a shard"),
        (with_shard(size="7"), r"shard 'captions/000000.tar' has size '7'"),
        (with_shard(key="captions/000001.tar"), r"names shard 'captions/000001.tar' twice"),
        ({**good, "shards": [{}]}, r"captions/manifest\.json: does not have its form"),
        ({**good, "schema": "kimi-pretrain/source/9"}, r"schema is 'kimi-pretrain/source/9'"),
    ):
        source.put("captions/manifest.json", json.dumps(manifest).encode())
        refused(source, target, ["captions"], IndexMismatch, message)


def test_no_such_source(made, target, tmp_path):
    refused(made, target, ["caption"], ValueError, "no source 'caption'; did you mean 'captions'")
    refused(made, target, ["captions@1"], ValueError, "no source 'captions@1'")
    (tmp_path / "empty").mkdir()
    refused(FolderStore(tmp_path / "empty"), target, [], ValueError, "no finished source here")


def test_a_shard_that_is_gone(source, target):
    source.delete("captions/000003.tar")
    with pytest.raises(MissingKey, match=r"a/captions/000003\.tar: no such object"):
        sync(source, target)
    assert assert_whole(target) == []


def test_places(tmp_path):
    def opened(source, target):
        return open_places(Place("from", *source), Place("to", *target), 2)

    (tmp_path / "link").symlink_to(tmp_path, target_is_directory=True)
    for source, target, message in (
        ((str(tmp_path),), (str(tmp_path / "link"),), f"^{tmp_path}: is the same place on both"),
        (("memory://x/y/",), ("memory://x/y",), "is the same place on both sides"),
        (("s3://x", "http://h:1", None), ("s3://x/", "http://H:1/", None), "is the same place on"),
        (("s3://x", "http://h:1", None), ("s3://y",), "--to-endpoint or --to-profile is missing"),
        ((str(tmp_path), None, "p"), ("s3://y",), "--from-endpoint and --from-profile are for s3"),
        (("s3:/x",), ("y",), "expected s3://bucket/prefix"),
        (("s3://x", "http://me:secret@h", None), ("y",), "--from-endpoint holds a user name or pa"),
        (("s3://x", "h:1", None), ("y",), "add http://"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            opened(source, target)
        assert "secret" not in str(caught.value)
    MemoryStore("x").clear()


def test_one_writer_at_a_time(made, target, monkeypatch):
    monkeypatch.setattr(claim, "_SETTLE_S", 0.0)
    with Claim(target, "captions"), pytest.raises(NameTaken, match="captions is being written by"):
        sync(made, target)
    assert target.list() == []
    sync(made, target)


def test_the_folders_of_shards_are_claimed_with_the_source_s_own(made, target, monkeypatch):
    """A redaction or collection in those folders must not overlap a sync that copies shards."""
    monkeypatch.setattr(claim, "_SETTLE_S", 0.0)
    with Claim(target, "captions"), pytest.raises(NameTaken, match="captions is being written by"):
        sync(made, target, ["captions_k2"])
    assert target.list() == []
    sync(made, target, ["captions_k2"])
    with Claim(target, "captions"):  # no shard has to be copied into that folder
        assert sync(made, target, ["captions_k2"]).sources == {"captions_k2": "there"}


def test_what_a_collection_removes_while_the_names_settle_is_missed(made, target, monkeypatch):
    """The collection looked for newcomers just before the claims."""
    sync(made, target)
    target.delete("captions/manifest.json")
    settle = _Copying.settle

    def and_collected(copying, claims):
        for key in [key for key in target.list("captions/") if key.endswith(".tar")]:
            target.delete(key)
        settle(copying, claims)

    monkeypatch.setattr(_Copying, "settle", and_collected)
    with pytest.raises(MissingKey, match=r"\.tar"):
        sync(made, target, ["captions"])
    assert "captions/manifest.json" not in target.list()


def test_no_manifest_is_written_under_a_name_that_does_not_settle(made, monkeypatch):
    """No file is missing: a killed sync had copied them all."""
    target = MemoryStore("unsettled")
    sync(made, target)
    target.delete("captions/manifest.json")

    def taken(claim):
        raise NameTaken("by another")

    with monkeypatch.context() as patch:
        patch.setattr(Claim, "settle", taken)
        with pytest.raises(NameTaken, match="by another"):
            sync(made, target, ["captions"])
    assert "captions/manifest.json" not in target.list()
    sync(made, target, ["captions"])
    assert "captions/manifest.json" in target.list()
    target.clear()


# Transfer ---------------------------------------------------------------------------------------


def test_what_is_hashed_and_noted_is_not_hashed_again(made, target, monkeypatch):
    """A sync that was interrupted after some shards resumes after them."""
    real, copied = FolderStore.put_verified, []

    def break_off(self, key, *more):
        if len(copied) == 4:
            raise OSError(28, "No space left on device", key)
        copied.append(key)
        return real(self, key, *more)

    monkeypatch.setattr(FolderStore, "put_verified", break_off)
    with pytest.raises(OSError, match="No space left"):
        sync(made, target, ["captions"], Options(parallel=1))
    monkeypatch.undo()
    assert assert_whole(target) == []
    watched = Watched(target.root)
    report = sync(made, watched, ["captions"])
    assert report.there == 4
    assert not {key for how, key in watched.asked if how == "get"} & set(copied)
    assert not list(target.root.rglob(".*"))
    assert objects_of(target) == {
        key: data for key, data in objects_of(made).items()
        if key.startswith("captions/") or key == "tokenizer/kimi.tiktoken"
    }  # fmt: skip


def test_a_journal_vouches_for_the_very_files_that_it_notes(made, target):
    """It does not vouch for files of equal size or for a file that was rewritten."""
    first, second = (f"captions/{n:06d}.tar" for n in range(2))
    sizes = [len(made.get(key)) for key in (first, second)]
    for key, size in zip((first, second), sizes):
        etag = target.put(key, made.get(key) if key == first else bytes(size)).etag
        if key == first:
            shards = read_manifest(made, "captions")["shards"]
            SyncJournal(target, "captions").note(Item(key, size, shards[0]["sha256"]), etag)
    refused(made, target, ["captions"], OtherContent, rf"{second}: sha256 is \w{{64}}, expected")
    target.put(second, made.get(second))
    target.put(first, bytes(sizes[0]))
    refused(made, target, ["captions"], OtherContent, rf"{first}: sha256 is \w{{64}}, expected")


def test_a_manifest_vouches_for_its_own_folder_alone(made, target):
    """captions_2 names shards of captions, but its manifest there does not prove them intact."""
    other = json.loads(made.get("captions_2/manifest.json"))
    shard = other["shards"][0]
    assert shard["key"].startswith("captions/")
    target.put(shard["key"], bytes(shard["size"]))
    new = other["shards"][-1]["key"]
    assert new.startswith("captions_2/")
    survey = _Look(made, target, [], Rate(), Meter(lambda *_: None))
    survey._vouch(made.get("captions_2/manifest.json"), "captions_2")
    assert new in survey._vouched
    assert shard["key"] not in survey._vouched
    item = Item(shard["key"], shard["size"], shard["sha256"])
    with pytest.raises(OtherContent, match=r"captions/000000\.tar: sha256 is \w{64}, expected"):
        survey.is_there(item)


def test_a_manifest_that_appears_meanwhile_is_kept(made, target, monkeypatch):
    other = made.get("web/manifest.json").replace(b'"name": "web"', b'"name": "wab"')
    real = FolderStore.put_new

    def late(self, key, data):
        if key.endswith("manifest.json"):
            self.put(key, other)
        return real(self, key, data)

    monkeypatch.setattr(FolderStore, "put_new", late)
    with pytest.raises(OtherContent, match="another source of this name appeared"):
        sync(made, target, ["web"])
    assert target.get("web/manifest.json") == other


def test_the_rate_is_that_of_all_threads():
    rate, moved = Rate(1e6), []

    def move():
        for _ in range(5):
            rate.take(10_000)
            moved.append(time.monotonic())

    begun = time.monotonic()
    threads = [threading.Thread(target=move) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begun >= 19 * 0.01
    for number, at in enumerate(sorted(moved)):
        assert at - begun >= number * 0.01 - 1e-3
    Rate().take(1 << 40)
    rate.stop()
    with pytest.raises(Stopped):
        rate.take(1 << 40)


def test_options_that_cannot_be():
    with pytest.raises(ValueError, match="parallel is 0"):
        Options(parallel=0)
    with pytest.raises(ValueError, match="bandwidth is 0"):
        Rate(0)
    Rate(0.5).take(0)  # a limit below one byte per second is valid


def test_memory_is_a_place_too(made):
    there = MemoryStore("sync-test")
    sync(made, there, ["web"])
    assert assert_whole(there) == ["web"]
    assert compare(made, there, ["web"]).problems == ()
    there.clear()


def test_the_source_is_only_read(made, target):
    def times(root: Path) -> dict[str, int]:
        return {str(path): path.stat().st_mtime_ns for path in root.rglob("*")}

    before = times(made.root)
    sync(made, target)
    compare(made, target)
    assert times(made.root) == before


# Redactions and holds ---------------------------------------------------------------------------

GONE = {"captions": ["captions-1"], "captions_2": ["more-0"]}


def erased(store, name):
    index = read_index(store, name)
    return {index.key_of(n) for n in index.redacted}


def bodies(store):
    """Return stretches of the texts of two samples, read before their redaction."""
    made = {**dict.fromkeys(GONE, None)}
    for name, [key] in GONE.items():
        index = read_index(store, name)
        made[name] = read_checked(store, [document_of(index, int(samples_of(index, [key])[0]))])[0][
            80:160
        ]
    return list(made.values())


def holds_any(folder, needles):
    return [
        path for path in folder.rglob("*.tar") if any(one in path.read_bytes() for one in needles)
    ]


def test_redactions_travel(source, target):
    needles = bodies(source)
    sync(source, target)
    assert len(holds_any(target.root, needles)) == 2
    carry_out(source, GONE)
    report = sync(source, target)
    assert report.sources == {
        "captions": "redacted", "captions_2": "redacted", "captions_k2": "redacted",
        "web": "there",
    }  # fmt: skip
    assert (report.copied, report.not_removed) == (0, [])
    assert holds_any(target.root, needles) == []
    for name in ALL:
        assert erased(target, name) == erased(source, name)
        assert read_index(target, name).content_hash == read_index(source, name).content_hash
    assert_whole(target)
    before = objects_of(target)
    assert set(sync(source, target).sources.values()) == {"there"}
    assert objects_of(target) == before
    # a second redaction, in another order at the target
    carry_out(source, {"captions": ["captions-2"]})
    carry_out(target, {"captions": ["captions-3"]})
    report = sync(source, target)
    assert report.sources["captions"] == "redacted there"
    assert erased(target, "captions") == {"captions-1", "captions-2", "captions-3"}


def test_redactions_keep_their_order(source, target):
    """The order also holds in a target source that is not synced and shares the shards."""
    sync(source, target)
    for key in ("captions-3", "captions-1", "captions-2"):
        carry_out(source, {"captions": [key]})
    sync(source, target, ["captions"])
    sync(source, target)
    wanted = read_index(source, "captions").redacted
    assert list(wanted) != sorted(wanted)
    for name in ("captions", "captions_2", "captions_k2"):
        assert read_index(target, name).redacted == read_index(source, name).redacted == wanted


def test_what_was_redacted_in_the_target_comes_back_in_no_way(source, target):
    needles = bodies(source)
    sync(source, target, ["captions"])
    carry_out(target, {"captions": ["captions-1"]})
    report = sync(source, target, ["captions", "web"])
    assert report.sources == {"captions": "redacted there", "web": "copied"}
    assert erased(target, "captions") == {"captions-1"}
    before = objects_of(target)
    with pytest.raises(OtherContent, match="was replaced there by a redaction of 'captions'"):
        sync(source, target)  # captions_2 names the replaced shard
    assert objects_of(target) == before
    manifest = target.get("captions/manifest.json")
    target.put("captions/manifest.json", manifest[:-9])  # its redactions can no longer be read
    with pytest.raises(IndexMismatch, match="captions/manifest.json"):
        sync(source, target, ["captions_2"])
    target.put("captions/manifest.json", manifest)
    assert objects_of(target) == before
    assert holds_any(target.root, needles[:1]) == []
    carry_out(source, GONE)
    sync(source, target)
    assert holds_any(target.root, needles) == []
    assert_whole(target)


def collected(target, *names):
    """Remove sources like a collection, which leaves only the record of erased samples."""
    for key in target.list():
        if key.split("/")[0] in names and not key.endswith("/erased.json"):
            target.delete(key)


def test_what_was_erased_in_a_source_that_is_gone_comes_back_in_no_way(source, target):
    needles = bodies(source)
    sync(source, target, ["captions"])
    carry_out(target, {"captions": ["captions-1"]})
    assert b"captions" not in target.get("captions/erased.json")  # a key may name a person
    collected(target, "captions")
    # Redact other samples at the source: shards, names and content differ.
    carry_out(source, {"captions": ["captions-2", "captions-3"]})
    told = "1 of its samples were erased there, and .* still has them: captions-1; nothing was"
    for wanted in ("captions", "captions_2", "captions_k2"):  # grown from it, reindexed
        refused(source, target, [wanted], OtherContent, f"b/{wanted}: {told}")
    assert sync(source, target, ["web"]).sources == {"web": "copied"}
    noted = target.get("captions/erased.json")
    for wrong in (b"{", b"[]", b'{"erased": [["x", "y"]]}', b'{"erased": [[1]]}'):
        target.put("captions/erased.json", wrong)
        refused(source, target, ["captions"], ValueError, r"b/captions/erased\.json: expected")
    target.put("captions/erased.json", noted)
    carry_out(source, {"captions": ["captions-1"]})
    assert set(sync(source, target).sources.values()) == {"copied", "there"}
    assert holds_any(target.root, needles[:1]) == []
    assert_whole(target)


def test_what_is_held_in_the_target_is_not_redacted_by_a_sync(source, target):
    sync(source, target)
    put_hold(target, "captions_2", "case-9")
    carry_out(source, GONE)
    before = objects_of(target)
    with pytest.raises(ValueError, match="is under hold 'case-9'"):
        sync(source, target)
    assert objects_of(target) == before
    end_hold(target, "captions_2", "case-9")
    sync(source, target)
    assert erased(target, "captions") == {"captions-1"}


def test_a_shard_that_goes_before_the_names_are_taken_is_missed(source, target, monkeypatch):
    sync(source, target, ["captions"])
    [shard] = [key for key in target.list() if key.endswith("captions/000003.tar")]
    (target.root / "captions" / "manifest.json").unlink()
    enter = Claim.__enter__

    def late(claim):
        (target.root / shard).unlink(missing_ok=True)
        return enter(claim)

    monkeypatch.setattr(Claim, "__enter__", late)
    with pytest.raises(MissingKey, match="captions/000003.tar"):
        sync(source, target, ["captions_2"])
    assert "captions_2/manifest.json" not in target.list()
    monkeypatch.undo()
    sync(source, target, ["captions_2"])
    assert_whole(target)


def test_a_redacted_source_of_other_content_is_refused(source, target):
    carry_out(source, GONE)
    sync(source, target)
    file = target.root / "captions" / "manifest.json"
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"content_hash": "0" * 64}))
    before = objects_of(target)
    with pytest.raises(OtherContent, match="content_hash is 0000"):
        sync(source, target)
    assert objects_of(target) == before
