"""Untrusted configurations, checkpoints and media: refused in one line, and nothing executes."""

import json
import os
import pickle
import struct
import time
import tracemalloc

import numpy as np
import pytest
import torch
from PIL import ImageFile

from data_pipeline import decode
from data_pipeline.index.manifest import IndexMismatch, read_index
from data_pipeline.ingest.ingest import ImageSegment, TextSegment, VideoSegment, ingest
from data_pipeline.ingest.samples import CrudeSample
from data_pipeline.store.addresses import check_address, masked
from data_pipeline.store.open import FolderStore, MemoryStore, open_store
from data_pipeline.text import Tokenizer, train_ranks
from kimi_pretrain.checkpoint.errors import CheckpointError
from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from kimi_pretrain.config import ConfigError, load_config
from kimi_pretrain.weights.weight_reader import open_weights
from moonvit3d import media
from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PatchLimits, grid
from moonvit3d.media import MediaError
from moonvit3d.mp4_tables import MAX_SAMPLES, claimed_samples
from moonvit3d.weights import inspect
from tests.unit.data_pipeline.media import encoded, mp4, noise

PNG, CLIP = encoded(noise(28, 42)), mp4(9)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(train_ranks([f"row {i} of {i * i} rows" for i in range(99)], 280), "tiny")


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


# Configurations -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.mkdir [{}]",
        "!!python/object/new:os.mkdir [{}]",
        "!!python/name:os.mkdir",
        "!!python/module:os",
    ],
)
def test_a_configuration_cannot_execute(value, tmp_path):
    made = tmp_path / "made"
    file = tmp_path / "evil.yaml"
    file.write_text(f"data:\n  root: {value.format(made)}\n")
    for load in (
        lambda: load_config(file),
        lambda: load_config("tiny_cpu", [f"data.root={value.format(made)}"]),
    ):
        with pytest.raises(ConfigError, match="not YAML: could not determine a constructor"):
            load()
    assert not made.exists()


@pytest.mark.parametrize(
    "key", ["data.root", "data.sources", "data.schedule", "data.limits", "train.frozen", "train"]
)
@pytest.mark.timeout(60)
def test_a_value_that_stands_for_a_billion_is_refused_at_once(key):
    value = '"laugh"'
    for level in range(9):
        value = f"[&x{level} {value}{f', *x{level}' * 9}]"
    with pytest.raises(ConfigError) as error:
        load_config("tiny_cpu", [f"{key}={value}"])
    assert len(str(error.value)) < 5000


@pytest.mark.parametrize(
    "address",
    ["s3://AKIA:pass/w+ord@bucket/x", "s3://pass@bucket", "https://user:pass@host:9000/x"],
)
def test_an_address_with_a_password_is_refused_and_not_shown(address, monkeypatch):
    for key in ("data.root", "data.endpoint", "data.tokenizer", "checkpoint.place"):
        with pytest.raises(ConfigError, match=r"holds a user name or password .*\*\*\*@") as error:
            load_config("tiny_cpu", [f"{key}={address}"])
        assert "pass" not in str(error.value).replace("password", "")
    with pytest.raises(ValueError, match="user name or password") as error:
        open_store(address)
    assert "pass" not in str(error.value).replace("password", "")
    monkeypatch.setenv("AWS_ENDPOINT_URL", address)
    with pytest.raises(ValueError, match="S3 endpoint holds a user name or password") as error:
        open_place("s3://bucket/x")
    assert "pass" not in str(error.value).replace("password", "")


def test_addresses_without_credentials_pass():
    for address in (None, "", "/a/b@c", "s3://bucket/a@b", "http://host:9000", "memory://x"):
        check_address("x", address)
        assert masked(address or "") == (address or "")


@pytest.mark.parametrize("endpoint", ["localhost:9000", "s3.host", "ftp://host", "//host:1"])
def test_an_endpoint_without_a_scheme_is_told_what_to_add(endpoint, monkeypatch):
    host = endpoint.split("//")[-1]
    expected = f"{endpoint!r}: add http:// or https://, as in http://{host}"
    with pytest.raises(ConfigError, match="endpoint") as error:
        load_config("tiny_cpu", [f"data.endpoint={endpoint}"])
    assert expected in str(error.value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    with pytest.raises(ValueError, match="the S3 endpoint") as refused:
        open_store("s3://bucket/x")
    assert expected in str(refused.value)


# Checkpoints --------------------------------------------------------------------------------------


def _tensor_file(header: bytes, data: bytes = b"", length: int | None = None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


def _entry(shape, end, begin=0, dtype="F32"):
    return json.dumps(
        {"w": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}
    ).encode()


TENSOR_FILES = {
    "a pickle": None,  # filled in by the test
    "no bytes": b"",
    "a header of 2**63 bytes": _tensor_file(b"{}", length=1 << 63),
    "a header longer than the file": _tensor_file(b"{}", length=1 << 20),
    "a header that is no JSON": _tensor_file(b"\x80\x04K\x01."),
    "a header of brackets": _tensor_file(b"[" * 200_000),
    "a tensor of 2**60 numbers": _tensor_file(_entry([1 << 30, 1 << 30], 16), bytes(16)),
    "a tensor outside the file": _tensor_file(_entry([4], 1 << 40, (1 << 40) - 16), bytes(16)),
    "a tensor before the data": _tensor_file(_entry([4], 8, -8), bytes(16)),
    "a negative shape": _tensor_file(_entry([-2, -2], 16), bytes(16)),
    "a type that is none": _tensor_file(_entry([4], 16, dtype="__import__"), bytes(16)),
    "an offset that is no number": _tensor_file(_entry([4], "16"), bytes(16)),
}


def _checkpoint(folder, tensor_file: bytes, **changes):
    """Write a complete single-file checkpoint with correct hashes, as a hostile writer could."""
    import hashlib

    folder.mkdir(exist_ok=True)
    files = {"rank_00000_000.safetensors": tensor_file}
    files["index.json"] = json.dumps({"weight_map": {"w": "rank_00000_000.safetensors"}}).encode()
    files |= changes.pop("more", {})
    for name, data in files.items():
        (folder / name).write_bytes(data)
    listed = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
    }
    manifest = {
        "schema": 2,
        "state": {"step": 1, "optimizer_steps": 1, "loader": {}, "losses": []},
        "model": {}, "dtype": "float32", "layout": {}, "contents": "all", "versions": {},
        "files": listed | changes.pop("files", {}),
    } | changes  # fmt: skip
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


def _read(folder):
    checkpoint = open_checkpoint(folder)
    assert checkpoint.verify() == []
    tensor = torch.zeros(4)
    checkpoint.read_into("w", tensor)
    return tensor


def test_the_checkpoint_of_these_tests_is_read(tmp_path):
    good = _tensor_file(_entry([4], 16), struct.pack("<4f", 1, 2, 3, 4))
    assert _read(_checkpoint(tmp_path / "step_00000001", good)).tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("what", TENSOR_FILES)
@pytest.mark.timeout(60)
def test_a_hostile_tensor_file_is_refused(what, tmp_path):
    made = tmp_path / "made"
    data = TENSOR_FILES[what]
    data = pickle.dumps(Payload(made)) if data is None else data
    tracemalloc.start()
    with pytest.raises(CheckpointError) as error:
        _read(_checkpoint(tmp_path / "step_00000001", data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert "rank_00000_000.safetensors" in str(error.value)
    assert "\n" not in str(error.value)
    assert not made.exists()
    assert peak < 64 << 20


HERE = {"bytes": 1, "sha256": "0" * 64}
MANIFESTS = {
    "a name that climbs": {"files": {"../../outside": HERE}},
    "an absolute name": {"files": {"/etc/passwd": HERE}},
    "a hidden name": {"files": {".bashrc": HERE}},
    "a name with a null byte": {"files": {"a\0b": HERE}},
    "a size that is none": {"files": {"index.json": {"bytes": -1, "sha256": "0" * 64}}},
    "a size of text": {"files": {"index.json": {"bytes": "1", "sha256": "0" * 64}}},
    "a step that is none": {"state": {"step": "1", "optimizer_steps": 1, "loader": {}}},
    "no state": {"state": None},
    "files as a list": {"files": {}, "model": []},
    "another schema": {"schema": {"__reduce__": 1}},
    "an index that climbs": {
        "more": {"index.json": b'{"weight_map": {"w": "../outside.safetensors"}}'}
    },
    "an index of brackets": {"more": {"index.json": b"[" * 100_000}},
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_hostile_manifest_is_refused(what, tmp_path):
    good = _tensor_file(_entry([4], 16), bytes(16))
    (tmp_path / "outside.safetensors").write_bytes(good)
    folder = _checkpoint(tmp_path / "step_00000001", good, **MANIFESTS[what])
    with pytest.raises(CheckpointError) as error:
        _read(folder)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 2000


def test_other_files_of_a_checkpoint_s_folder_are_never_opened(tmp_path):
    """These are pickles that older formats would have loaded."""
    made = tmp_path / "made"
    good = _tensor_file(_entry([4], 16), bytes(16))
    folder = _checkpoint(tmp_path / "step_00000001", good)
    for name in (".metadata", "__0_0.distcp", "common.pt", "optimizer.pt", "model.bin"):
        (folder / name).write_bytes(pickle.dumps(Payload(made)))
    _read(folder)
    assert open_place(tmp_path).steps() == [1]
    assert not made.exists()


def test_weights_of_a_stranger_name_files_of_their_folder_alone(tmp_path):
    good = _tensor_file(_entry([4], 16), bytes(16))
    (tmp_path / "outside.safetensors").write_bytes(good)
    folder = tmp_path / "weights"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors"), "a/b", ".x", 7):
        index.write_text(json.dumps({"weight_map": {"vision_tower.x": name}}))
        with pytest.raises(ValueError, match="want JSON whose weight_map names each tensor's file"):
            inspect(folder)
        with pytest.raises(CheckpointError) as error:
            open_weights(folder)
        assert "\n" not in str(error.value)


def test_weights_that_are_a_pickle_are_refused(tmp_path):
    file = tmp_path / "model.safetensors"
    file.write_bytes(pickle.dumps(Payload(tmp_path / "made")))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        inspect(file)
    with pytest.raises(CheckpointError):
        open_weights(tmp_path)
    file.rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="never read here"):
        open_weights(tmp_path)
    assert not (tmp_path / "made").exists()


# Media --------------------------------------------------------------------------------------------


def _box(data: bytes, *path: bytes) -> int:
    """Return the offset of a box's content."""
    at, end = 0, len(data)
    for name in path:
        while data[at + 4 : at + 8] != name:
            at += int.from_bytes(data[at : at + 4], "big")
            assert at < end, name
        at, end = at + 8, at + int.from_bytes(data[at : at + 4], "big")
    return at


TABLE = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def _claiming(count: int) -> bytes:
    data = bytearray(CLIP)
    at = _box(CLIP, *TABLE, b"stsz")
    data[at + 4 : at + 12] = struct.pack(">II", 1, count)
    return bytes(data)


def test_tables_that_claim_millions_are_refused_before_ffmpeg_sees_them(monkeypatch):
    assert claimed_samples(CLIP) == 9
    monkeypatch.setattr(media, "_open_video", None)
    run = struct.pack(">II", 0, MAX_SAMPLES // 2 + 1)
    trun = struct.pack(">I4s", 8 + len(run), b"trun") + run
    traf = struct.pack(">I4s", 8 + len(trun), b"traf") + trun
    moof = struct.pack(">I4s", 8 + len(traf), b"moof") + traf
    for data in (_claiming(MAX_SAMPLES + 1), _claiming(2**32 - 1), CLIP + moof + moof):
        for read in (media.verify, media.probe):
            with pytest.raises(MediaError, match=r"tables claim \d+ pictures") as error:
                read(data, KIND_VIDEO)
            assert "\n" not in str(error.value)
    packed = CLIP.replace(b"trak", b"cmov")
    with pytest.raises(MediaError, match="compressed"):
        media.verify(packed, KIND_VIDEO)


def test_boxes_that_lead_nowhere_end():
    for data in (b"\0\0\0\1moov" + bytes(8), b"\0\0\0\0moov" * 50, b"\0\0\0\7moov", b"", b"\0"):
        claimed_samples(data)
    deep = b""
    for _ in range(500):
        deep = struct.pack(">I4s", 8 + len(deep), b"moov") + deep
    assert claimed_samples(deep) == 0


LIMITS = PatchLimits(image=4096, frame=1024)


@pytest.mark.parametrize("kind", [KIND_IMAGE, KIND_VIDEO])
def test_a_file_of_another_size_than_the_index_says_is_not_decoded(kind, monkeypatch):
    """The index promises a small picture, and decoding the file would take 70 million pixels."""

    def never(*_, **__):
        raise AssertionError("a pixel was decoded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", never)
    monkeypatch.setattr(media, "_of_one_size", never)
    data = encoded(np.zeros((280, 420, 3), np.uint8)) if kind == KIND_IMAGE else CLIP
    promised = grid(kind, 1, 28, 28, LIMITS)
    with pytest.raises(MediaError, match="the index promises"):
        decode.decode_item(data, kind, 0, LIMITS, promised)
    found = media.probe(data, kind)
    right = grid(kind, 1, found.height, found.width, LIMITS)
    with pytest.raises((AssertionError, MediaError), match="a pixel was decoded"):
        decode.decode_item(data, kind, 0, LIMITS, right)  # proves that the check above could fail


def test_ingest_leaves_bombs_out(tokenizer):
    wide = bytearray(PNG)
    wide[16:24] = struct.pack(">II", 60000, 60000)
    begun = time.process_time()
    samples = [
        CrudeSample("wide", [ImageSegment(bytes(wide), "png"), TextSegment("x")]),
        CrudeSample("tables", [VideoSegment(_claiming(80_000_000)), TextSegment("x")]),
        CrudeSample("good", [ImageSegment(PNG, "png"), TextSegment("x")]),
    ]
    store = MemoryStore("bombs")
    index = ingest(samples, store, "s", tokenizer, category="caption")
    assert [index.key_of(n) for n in range(index.num_samples)] == ["good"]
    reasons = [json.loads(line) for line in store.get("s/rejected.jsonl").splitlines()]
    assert [(line["key"], line["reason"]) for line in reasons] == [
        ("wide", "undecodable"),
        ("tables", "undecodable"),
    ]
    assert time.process_time() - begun < 5  # CPU seconds; decoding either takes a minute


def test_a_source_s_shards_lie_in_its_root(tokenizer, tmp_path):
    store = FolderStore(tmp_path / "root")
    sample = CrudeSample("good", [ImageSegment(PNG, "png"), TextSegment("x")])
    ingest([sample], store, "s", tokenizer, category="caption")
    shard = store.get("s/000000.tar")
    (tmp_path / "outside.tar").write_bytes(shard)
    file = tmp_path / "root" / "s" / "manifest.json"
    manifest = json.loads(file.read_text())
    for key in ("../outside.tar", str(tmp_path / "outside.tar"), "s/../../outside.tar"):
        manifest["shards"][0]["key"] = key
        file.write_text(json.dumps(manifest))
        with pytest.raises(IndexMismatch, match=r"shard '.*' is no key of a shard"):
            read_index(store, "s")
