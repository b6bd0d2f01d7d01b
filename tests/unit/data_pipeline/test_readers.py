"""Readers of folders, webdataset tars and manifests: samples, resume positions, rejections."""

import gzip
import io
import json
import os
import pickle
import tarfile

import pytest
import webdataset

from data_pipeline.govern.holds import put_hold
from data_pipeline.govern.redact import carry_out
from data_pipeline.index.reads import read_samples
from data_pipeline.index.shards import MAX_KEY, check_sample_key
from data_pipeline.ingest.byte_sources import ByteSource
from data_pipeline.ingest.ingest import ImageSegment, IngestPolicy, TextSegment, ingest
from data_pipeline.ingest.readers import open_inputs
from data_pipeline.ingest.records import safe_key
from data_pipeline.ingest.samples import Refused
from data_pipeline.store.open import FolderStore, MemoryStore
from tests.unit.data_pipeline.media import encoded, mp4, noise, samples

PNG, JPEG = encoded(noise(28, 28)), encoded(noise(20, 30), "JPEG")
WEBP, CLIP = encoded(noise(9, 9), "WEBP"), mp4(6)
POLICY = IngestPolicy()


def _put(folder, files: dict[str, bytes | str]):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return str(folder)


def _tar(path, files, mode="w"):
    with tarfile.open(path, mode) as tar:
        for name, data in files:
            info = tarfile.TarInfo(name)
            data = data.encode() if isinstance(data, str) else data
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def _loaded(where, category, **options):
    """Return key -> segments and meta, or key -> the rejection reason."""
    inputs = [where] if isinstance(where, str) else where
    found = {}
    for _, unit in open_inputs(inputs, category, **options).read():
        unit = pickle.loads(pickle.dumps(unit))  # as a worker receives it
        try:
            sample = unit.load(POLICY)
            assert sample.key not in found
            found[sample.key] = (list(sample.segments), sample.meta)
        except Refused as refusal:
            found[unit.key] = refusal.args[0]
    return found


FOLDER = {
    "b.jpg": JPEG,
    "b.txt": "\ufeffof b \n",
    "a/x y.PNG": PNG,
    "a/x y.caption": "of x",
    "a/z.webp": WEBP,
    "a/z.json": '{"caption": ["one", "two"], "license": "CC0", "meta": {"n": 1}}',
    "a/v1.5.png": PNG,
    "a/v1.5.txt": "half",
    "a/v1.6.png": PNG,
    "a/v1.6.json": '"six"',
    "many.json": '{"images": ["0.png", "1.jpg"], "text": "two"}',
    "many.0.png": PNG,
    "many.1.jpg": JPEG,
    "auto.json": '["w1", "w2"]',
    "auto.10.png": PNG,
    "auto.2.jpg": JPEG,
    "both.txt": "wins",
    "both.json": '{"text": "kept"}',
    "both.png": PNG,
    "ours.json": '{"meta": {"m": 2}, "segments": [{"kind": "text", "text": "T"}, '
    '{"kind": "image", "file": "0.png"}]}',
    "ours.0.png": PNG,
    "alone.png": PNG,
    "words.txt": "no picture",
    "strange.npy": b"\x93NUMPY",
    "two.png": PNG,
    "two.jpg": JPEG,
    "two.txt": "which?",
    "clip.mp4": CLIP,
    "clip.txt": "moves",
    "bad.json": "{",
    "bad.png": PNG,
    "latin.txt": b"\xe9t\xe9",
    "latin.png": PNG,
    ".hidden/x.png": PNG,
    ".DS_Store": b"",
}


def test_a_folder_of_captions(tmp_path):
    found = _loaded(_put(tmp_path / "in", FOLDER), "caption")
    image, photo = ImageSegment(PNG, "png"), ImageSegment(JPEG, "jpg")
    assert found == {
        "alone": "missing field",
        "auto": ([photo, image, TextSegment(texts=["w1", "w2"])], {}),
        "b": ([photo, TextSegment("of b")], {}),
        "bad": "unreadable",
        "both": ([image, TextSegment("wins")], {"text": "kept"}),
        "clip": "bad field",
        "latin": "not UTF-8",
        "many": ([image, photo, TextSegment("two")], {}),
        "ours": ([TextSegment("T"), image], {"m": 2}),
        "strange": "unknown suffix",
        "two": ([photo, image, TextSegment("which?")], {}),
        "words": "missing field",
        safe_key("a/v1.5"): ([image, TextSegment("half")], {}),
        safe_key("a/v1.6"): ([image, TextSegment("six")], {}),
        safe_key("a/x y"): ([image, TextSegment("of x")], {}),
        "a/z": (
            [ImageSegment(WEBP, "webp"), TextSegment(texts=["one", "two"])],
            {"license": "CC0", "n": 1},
        ),
    }
    # Order: the files of a folder by name, then its subfolders.
    assert list(found)[:3] == ["alone", "auto", "b"]
    assert list(found)[-1] == "a/z"


def test_a_folder_of_programs_is_one_sample_a_file(tmp_path):
    files = {
        "m/a.c": "int a;\n", "m/a.h": " extern\n", "m/a.txt": "about", "m/b.json": '{"text": "j"}',
        "m/logo.png": PNG,
    }  # fmt: skip
    found = _loaded(_put(tmp_path / "in", files), "code")
    assert found == {
        safe_key("m/a.c"): ([TextSegment("int a;\n")], {}),
        safe_key("m/a.h"): ([TextSegment(" extern\n")], {}),
        "m/a": ([TextSegment("about")], {}),
        "m/b": ([TextSegment("j")], {}),
        safe_key("m/logo.png"): "bad field",
    }
    packed = [(name, data) for name, data in files.items()]
    assert _loaded(_tar(tmp_path / "in.tar", packed), "code") == found


def test_keys_made_of_any_name():
    names = [
        "a",
        "a/b-c_D9",
        "a b",
        "a_b",
        "ä",
        "a.b",
        "x" * MAX_KEY,
        "x" * 99,
        "//",
        "a//b",
        "a\n",
    ]
    names += ["\udcff", ".", "x" * 69 + "/" + "y" * 20]
    keys = [safe_key(name) for name in names]
    for key in keys:
        check_sample_key(key)
    assert len(set(keys)) == len(names)
    assert keys[:2] == names[:2]
    assert keys[6] == names[6]


@pytest.mark.parametrize("mode", ["w", "w:gz"], ids=["tar", "tgz"])
def test_tars_that_were_joined_with_cat_are_read_to_their_end(tmp_path, mode):
    files = [[(f"{n}.png", PNG), (f"{n}.txt", f"t{n}")] for n in range(4)]
    parts = [_tar(tmp_path / f"{n}.tar", part, mode) for n, part in enumerate([*files, []])]
    where = tmp_path / ("all.tar" if mode == "w" else "all.tgz")
    data = b"".join((tmp_path / os.path.basename(part)).read_bytes() for part in parts)
    where.write_bytes(data)
    found = _loaded(str(where), "caption")
    assert found == {
        str(n): ([ImageSegment(PNG, "png"), TextSegment(f"t{n}")], {}) for n in range(4)
    }
    reader = open_inputs([str(where)], "caption")
    whole = list(reader.read())
    for number, (cursor, _) in enumerate(whole):
        assert [unit for _, unit in reader.read(cursor)] == [unit for _, unit in whole[number:]]
    junk = gzip.compress(b"no tar") if mode == "w:gz" else b"no tar"
    where.write_bytes(data + junk)
    assert _loaded(str(where), "caption") == {**found, where.name: "damaged file"}


def test_a_sample_does_not_reach_over_the_end_of_a_tar(tmp_path):
    _tar(tmp_path / "1.tar", [("a.png", PNG)])
    _tar(tmp_path / "2.tar", [("a.txt", "of another a")])
    (tmp_path / "all.tar").write_bytes(
        (tmp_path / "1.tar").read_bytes() + (tmp_path / "2.tar").read_bytes()
    )
    units = [unit for _, unit in open_inputs([str(tmp_path / "all.tar")], "caption").read()]
    assert [[*unit.members] for unit in units] == [["png"], ["txt"]]


def test_a_tar_that_is_not_sorted_is_told_how_to_sort_it(tmp_path):
    files = [
        (f"{n}.{kind}", PNG if kind == "png" else "x") for kind in ("png", "txt") for n in "01"
    ]
    where = _tar(tmp_path / "in.tar", files)
    units = [unit for _, unit in open_inputs([where], "caption").read()]
    assert len(units) == 4
    for unit in units:
        with pytest.raises(Refused, match="missing field.*`tar --sort=name`"):
            unit.load(POLICY)
    [(_, unit)] = open_inputs([_put(tmp_path / "in", {"0.png": PNG})], "caption").read()
    with pytest.raises(Refused) as error:
        unit.load(POLICY)
    assert "tar" not in error.value.args[1]


def test_packed_files_are_refused_before_they_are_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.ingest.readers.content", lambda *_: pytest.fail("unpacked"))
    files = [("a.png", bytes(2001)), ("a.txt", "x" * 1001), ("b.npy", bytes(1001))]
    where = _tar(tmp_path / "in.tgz", files, "w:gz")
    policy = IngestPolicy(max_media_bytes=2000, max_document_bytes=1000)
    a, b = (unit for _, unit in open_inputs([where], "caption", policy=policy).read())
    for name, most in (("png", 2000), ("txt", 1000)):
        with pytest.raises(Refused, match=f"too large.*a.{name}: {most + 1} bytes, at most {most}"):
            a.members[name].read(1 << 40)
    with pytest.raises(Refused, match="unknown suffix"):
        b.load(policy)


def test_unpacked_files_are_held_to_the_bounds_of_who_reads_them():
    source = ByteSource("in.tgz", data=bytes(11))
    assert source.read(11) == bytes(11)
    with pytest.raises(Refused, match="too large.*11 bytes, at most 10"):
        source.read(10)


def _webdataset_tar(path):
    """Write a tar with the webdataset library."""
    with webdataset.TarWriter(str(path)) as sink:
        sink.write(
            {"__key__": "d/000", "jpg": JPEG, "txt": "first", "cls": 3, "json": {"url": "u"}}
        )
        sink.write({"__key__": "d/001", "jpg": JPEG, "json": {"caption": "second", "width": 30}})
        sink.write({"__key__": "d/002", "0.png": PNG, "1.png": WEBP, "txt": "third"})
        sink.write({"__key__": "d/003", "png": PNG, "seg.png": PNG, "txt": "fourth"})
    return str(path)


def test_tars_of_webdataset(tmp_path):
    found = _loaded(_webdataset_tar(tmp_path / "x.tar"), "caption")
    image = ImageSegment(PNG, "png")
    assert found == {
        "d/000": ([ImageSegment(JPEG, "jpg"), TextSegment("first")], {"url": "u"}),
        "d/001": ([ImageSegment(JPEG, "jpg"), TextSegment("second")], {"width": 30}),
        "d/002": ([image, ImageSegment(WEBP, "png"), TextSegment("third")], {}),
        "d/003": ([image, TextSegment("fourth")], {}),
    }


def test_packed_tars_and_tars_in_a_store_and_long_names(tmp_path):
    long = "deep/" * 40 + "name"
    names = [f"{long}.png", f"{long}.txt", "./k.png", "./k.txt", "k2.txt", "._k.png", "k3.png"]
    files = [(name, PNG if name.endswith("png") else name[-5]) for name in [*names, "k3.txt"]]
    plain = _tar(tmp_path / "a.tar", files)
    expected = _loaded(plain, "caption")
    assert list(expected) == [safe_key(long), "k", "k2", "k3"]
    assert expected["k"] == ([ImageSegment(PNG, "png"), TextSegment("k")], {})
    packed = _tar(tmp_path / "a.tgz", files, "w:gz")
    assert _loaded(packed, "caption") == expected
    store = MemoryStore("readers")
    store.put("in/a.tar", (tmp_path / "a.tar").read_bytes())
    store.put("in/z.tgz", (tmp_path / "a.tgz").read_bytes())
    assert _loaded("memory://readers/in/a.tar", "caption") == expected
    prefix = _loaded("memory://readers/in", "caption", prefix_keys=True)
    assert [key.split("/")[0] for key in prefix] == ["a"] * 4 + ["z"] * 4
    assert list(prefix.values()) == 2 * list(expected.values())


def test_a_tar_larger_than_a_block_comes_from_a_store_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("data_pipeline.ingest.byte_sources._BLOCK", 4096)
    monkeypatch.setattr(
        "data_pipeline.ingest.readers._HELD", 3000
    )  # larger members take separate requests
    files = [(f"{i}.{s}", d) for i in range(9) for s, d in (("png", PNG), ("txt", f"t{i}"))]
    expected = _loaded(_tar(tmp_path / "a.tar", files), "caption")
    MemoryStore("blocks").put("a.tar", (tmp_path / "a.tar").read_bytes())
    assert _loaded("memory://blocks/a.tar", "caption") == expected


def test_shards_of_this_project_are_read_as_they_are(tmp_path, tokenizer):
    store = FolderStore(tmp_path / "one")
    first = ingest(samples(9), store, "src", tokenizer, 16_384, category="interleaved")
    again = FolderStore(tmp_path / "two")
    reader = open_inputs([str(tmp_path / "one" / "src")], "interleaved")
    index = ingest(reader, again, "src", tokenizer, 16_384, category="interleaved")
    assert index.content_hash == first.content_hash
    with tarfile.open(tmp_path / "one" / "src" / "000000.tar") as tar:
        tar.extractall(tmp_path / "unpacked")
    reader = open_inputs([str(tmp_path / "unpacked")], "interleaved")
    part = ingest(reader, again, "part", tokenizer, category="interleaved")
    assert part.num_samples == first.shards[0].samples
    documents = read_samples(store, first, range(part.num_samples))
    assert read_samples(again, part, range(part.num_samples)) == documents


def _manifest(tmp_path, lines, name="m.jsonl"):
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    data = gzip.compress(text.encode()) if name.endswith("gz") else text.encode()
    return _put(tmp_path, {name: data, "i/a b.png": PNG}) + f"/{name}"


def test_manifests(tmp_path):
    MemoryStore("bucket").put("far.jpg", JPEG)
    lines = [
        {"key": "k/1", "image": "i/a b.png", "text": "x", "meta": {"y": [1]}},
        "",
        {"image": "memory://bucket/far.jpg", "text": "x"},
        {"image": "memory://bucket/none.jpg", "text": "x"},
        {"image": "i/none.png", "text": "x"},
        {"image": "i", "text": "x"},
        {"image": "../m.jsonl", "text": "x"},
        {"image": "i/../../x.png", "text": "x"},
        {"image": "/etc/hostname", "text": "x"},
        {"image": "", "text": "x"},
        {"image": "m.jsonl", "text": "x"},
        '{"image": ',
        "[" * 100_000,
        "[1]",
        "\x00",
        {"image": "./i/./a b.png", "text": "last"},
    ]
    expected = {
        "k/1": ([ImageSegment(PNG, "png"), TextSegment("x")], {"y": [1]}),
        "m-00000003": ([ImageSegment(JPEG, "jpg"), TextSegment("x")], {}),
        "m.jsonl:4": "missing file",
        "m.jsonl:5": "missing file",
        "m.jsonl:6": "unknown suffix",
        "m.jsonl:7": "bad path",
        "m.jsonl:8": "bad path",
        "m.jsonl:9": "bad path",
        "m.jsonl:10": "bad path",
        "m.jsonl:11": "unknown suffix",
        "m.jsonl:12": "unreadable",
        "m.jsonl:13": "unreadable",
        "m.jsonl:14": "bad field",
        "m.jsonl:15": "unreadable",
        "m-00000016": ([ImageSegment(PNG, "png"), TextSegment("last")], {}),
    }
    assert _loaded(_manifest(tmp_path, lines), "caption") == expected
    packed = _loaded(_manifest(tmp_path, lines, "m.jsonl.gz"), "caption")
    assert [key.replace(".gz", "") for key in packed] == list(expected)
    prefixed = _loaded(_manifest(tmp_path, lines), "caption", prefix_keys=True)
    assert list(prefixed)[:2] == ["m/k/1", "m-00000003"]
    MemoryStore("bucket").put("list/m.jsonl", (tmp_path / "m.jsonl").read_bytes())
    MemoryStore("bucket").put("list/i/a b.png", PNG)
    assert _loaded("memory://bucket/list/m.jsonl", "caption") == expected


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    where = _manifest(tmp_path, [{"image": "i/a b.png", "text": "x"}])
    [(_, line)] = open_inputs([where], "caption").read()
    with pytest.raises(Refused, match="too large"):
        line.load(IngestPolicy(max_media_bytes=len(PNG) - 1))
    line.load(IngestPolicy(max_media_bytes=len(PNG)))


def _all_inputs(tmp_path):
    return [
        _put(tmp_path / "folder", FOLDER),
        _webdataset_tar(tmp_path / "x.tar"),
        _tar(tmp_path / "p.tar.gz", [(f"p{i}.txt", "x") for i in range(5)], "w:gz"),
        _manifest(tmp_path, [{"text": str(i)} for i in range(7)] + ["", "{"]),
    ]


@pytest.mark.parametrize("category", ["caption", "code"])
def test_reading_goes_on_from_every_cursor(tmp_path, category):
    reader = open_inputs(_all_inputs(tmp_path), category)
    whole = list(reader.read())
    assert len(whole) > 25
    for number, (cursor, _) in enumerate(whole):
        rest = list(reader.read(json.loads(json.dumps(cursor))))
        assert [unit for _, unit in rest] == [unit for _, unit in whole[number:]]


def test_the_total_is_the_number_of_samples(tmp_path):
    folder, tar, _, manifest = _all_inputs(tmp_path)
    reader = open_inputs([folder, manifest], "caption")
    assert reader.total == len(list(reader.read()))  # one line is empty
    assert open_inputs([folder, tar], "caption").total is None


def test_identities_change_with_the_input_and_not_with_its_place(tmp_path):
    inputs = _all_inputs(tmp_path / "a")
    first = open_inputs(inputs, "caption").identity
    assert open_inputs(inputs, "caption").identity == json.loads(json.dumps(first)) == first
    assert open_inputs(inputs[::-1], "caption").identity != first
    assert open_inputs(inputs, "caption", prefix_keys=True).identity != first
    (tmp_path / "a").rename(tmp_path / "b")
    moved = [where.replace(str(tmp_path / "a"), str(tmp_path / "b")) for where in inputs]
    assert open_inputs(moved, "caption").identity == first
    for change in ("folder/b.txt", "x.tar", "m.jsonl"):
        path = tmp_path / "b" / change
        path.write_bytes(path.read_bytes() + b"\n")
        changed = open_inputs(moved, "caption").identity
        assert changed != first
        first = changed


def _last_is_damage(found, whole, name="x.tar"):
    """Check that samples before the damage are whole; return their number."""
    assert found.popitem() == (name, "damaged file")
    assert found == {key: whole[key] for key in list(whole)[: len(found)]}
    return len(found)


# Cuts: at 0, in a first header, in a header, before data, inside data, at the end of data, and at
# the end of its padding.
@pytest.mark.parametrize(
    ("mark", "after", "left"),
    [("d/000.cls", 0, 0), ("d/000.cls", 99, 0), ("d/002.txt", 99, 2), ("d/003.txt", 512, 3),
     ("fourth", 3, 3), ("fourth", 6, 3), ("fourth", 512, 3)],
)  # fmt: skip
def test_a_tar_that_breaks_off_is_told(tmp_path, mark, after, left):
    path = tmp_path / "x.tar"
    whole = _loaded(_webdataset_tar(path), "caption")
    data = path.read_bytes()
    path.write_bytes(data[: data.index(mark.encode()) + after])
    assert _last_is_damage(_loaded(str(path), "caption"), whole) == left


def test_a_packed_manifest_that_breaks_off_is_told(tmp_path):
    where = _manifest(tmp_path, [{"image": "i/a b.png", "text": str(n)} for n in range(9)])
    whole = _loaded(where, "caption")
    data = b"".join(gzip.compress(line) for line in (tmp_path / "m.jsonl").open("rb"))
    (tmp_path / "m.jsonl.gz").write_bytes(data[:-9])
    found = _loaded(f"{where}.gz", "caption")
    assert _last_is_damage(found, whole, "m.jsonl.gz") > 1


def test_a_damaged_header_is_not_taken_for_the_end(tmp_path):
    path = tmp_path / "x.tar"
    whole = _loaded(_webdataset_tar(path), "caption")
    data = bytearray(path.read_bytes())
    data[data.index(b"d/002.0.png")] ^= 1
    path.write_bytes(data)
    # The sample before the header might have continued after it.
    assert _last_is_damage(_loaded(str(path), "caption"), whole) == 1
    data = bytearray(gzip.compress(bytes(data)))
    data[len(data) // 2] ^= 1
    (tmp_path / "y.tgz").write_bytes(data)
    assert _loaded(str(tmp_path / "y.tgz"), "caption").popitem()[1] == "damaged file"


def test_inputs_that_cannot_be_used(tmp_path, tokenizer):
    _put(tmp_path, {"mixed/a.tar": b"", "mixed/b.png": PNG, "x.zip": b"", "only/.hidden": b""})
    (tmp_path / "empty").mkdir()
    (tmp_path / "loop").mkdir()
    (tmp_path / "loop" / "back").symlink_to(tmp_path / "loop")
    for name, message in {
        "no/such": "no such file or folder",
        "no.tar": "no such file",
        "no.jsonl": "no such file",
        "x.zip": "no input that is known",
        "empty": "there are no files",
        "only": "there are no files",
        "mixed": r"tars and other files \(b.png\)",
        "loop": "leads back",
    }.items():
        with pytest.raises(ValueError, match=f"input .*{message}"):
            open_inputs([str(tmp_path / name)], "caption")
    with pytest.raises(ValueError, match="input memory://none/x.*no files"):
        open_inputs(["memory://none/x"], "caption")
    with pytest.raises(ValueError, match="category is 'captions'; known are agent"):
        open_inputs([str(tmp_path)], "captions")
    with pytest.raises(ValueError, match="no input"):
        open_inputs([], "caption")


def test_a_source_of_ours_is_an_input_with_all_that_lies_beside_its_shards(tmp_path, tokenizer):
    there = FolderStore(tmp_path)
    _put(tmp_path / "in", {"a.png": PNG, "a.txt": "one", "b.png": PNG, "b.txt": "two"})
    made = dict(category="caption")
    ingest(open_inputs([str(tmp_path / "in")], "caption"), there, "old", tokenizer, **made)
    carry_out(there, {"old": ["a"]})
    put_hold(there, "old", "case-9")
    assert {"erased.json", "holds.json"} <= {*os.listdir(tmp_path / "old")}
    index = ingest(open_inputs([str(tmp_path / "old")], "caption"), there, "new", tokenizer, **made)
    assert [index.key_of(i) for i in range(index.num_samples)] == ["b"]


def test_a_link_to_nothing_is_told(tmp_path):
    folder = tmp_path / "in"
    _put(folder, {"a.txt": "x"})
    (folder / "a.png").symlink_to(tmp_path / "gone.png")
    assert _loaded(str(folder), "caption") == {"a": "missing file"}


def test_equal_keys_of_two_inputs(tmp_path, store, tokenizer):
    for name in ("one", "two"):
        _put(tmp_path / name, {"a.png": PNG, "a.txt": name})
    inputs = [str(tmp_path / "one"), str(tmp_path / "two")]
    ingest(open_inputs(inputs, "caption"), store, "s", tokenizer, category="caption")
    assert json.loads(store.get("s/rejected.jsonl"))["reason"] == "key twice"
    reader = open_inputs(inputs, "caption", prefix_keys=True)
    index = ingest(reader, store, "t", tokenizer, category="caption")
    assert [index.key_of(i) for i in range(2)] == ["one/a", "two/a"]


def _keys(inputs, category="caption", **options):
    return [unit.load(POLICY).key for _, unit in open_inputs(inputs, category, **options).read()]


LINE = '{"image": "i.png", "text": "x"}\n'


@pytest.mark.parametrize("prefix", [False, True])
def test_keys_that_are_made_of_file_and_line_differ_between_inputs(tmp_path, prefix):
    names = (
        "train/metadata.jsonl", "val/metadata.jsonl", "part.0.jsonl", "part.1.jsonl",
        "m.jsonl", "m.ndjson", "x/y/m.jsonl.gz",
    )  # fmt: skip
    for name in names:
        data = gzip.compress(2 * LINE.encode()) if name.endswith("gz") else 2 * LINE
        _put(tmp_path, {name: data, f"{os.path.dirname(name)}/i.png".lstrip("/"): PNG})
    found = _keys([str(tmp_path / name) for name in names], prefix_keys=prefix)
    assert len(set(found)) == len(found) == 2 * len(names)
    assert found[:3] == [
        "train/metadata-00000001", "train/metadata-00000002", "val/metadata-00000001"
    ]  # fmt: skip
    assert found[4] == safe_key("part.0") + "-00000001"
    assert found[-1] == safe_key("m.jsonl.gz") + "-00000002"
    # A single input has the short name.
    assert _keys([str(tmp_path / names[0])], prefix_keys=prefix)[0] == "metadata-00000001"
    longest = _put(tmp_path, {f"{'n' * 100}.jsonl": LINE})
    [key] = _keys([f"{longest}/{'n' * 100}.jsonl"])
    check_sample_key(key)


def test_prefixes_tell_inputs_apart_by_as_much_of_their_path_as_it_takes(tmp_path):
    files = [("a.png", PNG), ("a.txt", "a")]
    names = ("train/00.tar", "val/00.tar", "part.0.tar", "part.1.tar", "part.1.tgz")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        _tar(tmp_path / name, files, "w:gz" if name.endswith("tgz") else "w")
    _put(tmp_path / "d/in", {"a.png": PNG, "a.txt": "a"})
    _put(tmp_path / "e/in", {"a.png": PNG, "a.txt": "a"})
    inputs = [str(tmp_path / name) for name in (*names, "d/in", "e/in")]
    found = _keys(inputs, prefix_keys=True)
    assert len(set(found)) == len(found) == len(inputs)
    assert found[:3] == ["train/00/a", "val/00/a", safe_key("part.0/a")]
    assert found[-2:] == ["d/in/a", "e/in/a"]
    assert _keys(inputs[1:2], prefix_keys=True) == ["00/a"]


def test_an_input_is_given_once(tmp_path):
    where = _put(tmp_path / "in", {"a.png": PNG, "a.txt": "a"})
    with pytest.raises(ValueError, match="input .*in is given twice"):
        open_inputs([where, f"{where}/../in"], "caption")


def test_names_that_differ_by_their_case_or_lack_a_suffix_are_all_read(tmp_path):
    """Regression: in one folder, "a.PNG" came first and "a.png" replaced it."""
    folder = _put(tmp_path / "in", {"a.PNG": PNG, "a.png": JPEG, "a.txt": "a"})
    [(_, unit)] = open_inputs([folder], "caption").read()
    assert sorted(unit.members) == ["PNG", "png", "txt"]
    texts = {"b": "1", "b.TXT": "3", "b.txt": "2"}
    folder = _put(tmp_path / "texts", texts)
    tar = _tar(tmp_path / "texts.tar", texts.items())
    for where in (folder, tar):
        units = [unit for _, unit in open_inputs([where], "text").read()]
        found = {unit.key: next(iter(unit.members.values())).read(9) for unit in units}
        assert len(found) == 3, found
        assert sorted(found.values()) == [b"1", b"2", b"3"]


def test_a_picture_of_a_kind_that_is_not_read_is_named_by_its_suffix(tmp_path):
    folder = _put(tmp_path / "in", {"a.png": PNG, "a.txt": "a", "b.bmp": b"BM", "b.txt": "b"})
    for category, reason in (("caption", "unknown suffix"), ("knowledge", "unknown suffix")):
        units = dict((unit.key, unit) for _, unit in open_inputs([folder], category).read())
        with pytest.raises(Refused, match="b.*bmp.*known are png") as error:
            units["b"].load(IngestPolicy())
        assert error.value.args[0] == reason
        units["a"].load(IngestPolicy())
    raw = _put(tmp_path / "raw", {"c.npy": b"II", "c.txt": "c"})
    [(_, unit)] = open_inputs([raw], "caption").read()
    with pytest.raises(Refused, match="needed; .*npy.* is no medium"):
        unit.load(IngestPolicy())


def test_a_folder_with_its_manifest_inside_names_the_manifest(tmp_path):
    files = {"a.png": PNG, "list.jsonl": '{"image": "a.png", "text": "x"}'}
    folder = _put(tmp_path / "in", files)
    with pytest.raises(ValueError, match=f"give the manifest itself: {folder}/list.jsonl"):
        open_inputs([folder], "caption")
    assert isinstance(_loaded(f"{folder}/list.jsonl", "caption"), dict)
    # In code it may be a file of the project.
    assert open_inputs([_put(tmp_path / "code", {"a.py": "x = 1", **files})], "code").total
