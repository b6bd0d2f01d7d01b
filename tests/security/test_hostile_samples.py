"""Untrusted lines and files at ingest: each is rejected, and the good samples pass.

Machine errors (no memory, an absent store, bad credentials) are distinguished from data errors:
they end the ingest and reject nothing.
"""

import errno
import gzip
import io
import itertools
import json
import os
import random
import tarfile

import pytest

from data_pipeline.ingest import byte_sources, readers
from data_pipeline.ingest.ingest import ImageSegment, TextSegment, VideoSegment, ingest
from data_pipeline.ingest.readers import open_inputs
from data_pipeline.ingest.samples import CrudeSample, IngestPolicy
from data_pipeline.store.objects import RequestRefused, access_denied
from data_pipeline.store.open import (
    FolderStore,
    MemoryStore,
    MissingBucket,
    MissingKey,
    ObjectChanged,
    StoreUnavailable,
)
from data_pipeline.text import Tokenizer, train_ranks
from tests.unit.data_pipeline.media import encoded, mp4, noise

PNG = encoded(noise(28, 42))
HUGE = 10**400
TOKENIZER = Tokenizer(train_ranks([f"row {i} of {i * i} rows" for i in range(99)], 280), "tiny")


def ingested(inputs, category, store, **options):
    """Return the keys of the good samples, and {key: (reason, detail)} of the rejected ones."""
    reader = open_inputs([str(where) for where in inputs], category)
    index = ingest(reader, store, "s", TOKENIZER, category=category, **options)
    told = [json.loads(line) for line in store.get("s/rejected.jsonl").splitlines()]
    good = [str(index.key_of(n)) for n in range(index.num_samples)]
    return good, {line["key"]: (line["reason"], line["detail"]) for line in told}


def grounding(**changes) -> dict:
    place = {"label": "x", "point": [1, 2]}
    return {"image": "a.png", "objects": [place | changes.pop("place", {})], **changes}


LINES = {
    "a point of 400 digits": json.dumps(grounding(place={"point": [HUGE, 1]})),
    "an infinite point": '{"image": "a.png", "objects": [{"label": "", "point": [1e999, 1]}]}',
    "a turn of 400 digits": json.dumps({"segments": [{"kind": "region", "degrees": HUGE}]}),
    "a number of 5,000 digits": '{"image": ' + "9" * 5000 + "}",
    "meta that is a list": json.dumps(grounding(meta=[1])),
    "meta of 400 digits and none": '{"image": "a.png", "objects": [], "meta": {"a": NaN}}',
    "a key with half a pair": json.dumps(grounding(key="\ud800")),
    "an image with half a pair": json.dumps(grounding(image="\ud800.png")),
    "a suffix with half a pair": json.dumps(grounding(image="a.\ud800")),
    "a label with half a pair": json.dumps(grounding(place={"label": "\ud800"})),
    "a field with half a pair": json.dumps(grounding(**{"\udfff": 1})),
    "a name of 5,000 letters": json.dumps(grounding(image="n" * 5000 + ".png")),
    "a path of 5,000 folders": json.dumps(grounding(image="n/" * 5000 + "a.png")),
    "a key of a megabyte": json.dumps(grounding(key="k" * (1 << 20))),
    "a name with a null byte": json.dumps(grounding(image="a\0.png")),
    "a pipe": json.dumps(grounding(image="pipe.png")),
    "a circle of links": json.dumps(grounding(image="circle.png")),
    "a folder": json.dumps(grounding(image="folder.png")),
    "a scheme that is none": json.dumps(grounding(image="s4://bucket/a.png")),
    "a bucket that is none": json.dumps(grounding(image="memory:///a.png")),
    "an object that is not there": json.dumps(grounding(image="memory://nothing/a.png")),
    "brackets": "[" * 100_000,
    "a document too large": json.dumps(grounding(place={"label": "x" * (1 << 17)})),
    "meta too large": json.dumps(grounding(meta={"a": "x" * (1 << 14)})),
    "a line that does not end": "{" + " " * (1 << 19),
    "no object": "7",
    "no UTF-8": None,
}
GOOD = json.dumps(grounding())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.png").write_bytes(PNG)
    (tmp_path / "in" / "folder.png").mkdir()
    os.mkfifo(tmp_path / "in" / "pipe.png")
    (tmp_path / "in" / "circle.png").symlink_to("circle.png")
    return tmp_path / "in"


@pytest.fixture
def store():
    found = MemoryStore("hostile")
    found.clear()
    return found


def test_hostile_lines_are_rejected_one_by_one(folder, store, monkeypatch):
    monkeypatch.setattr(readers, "_LONGEST_LINE", 1 << 18)
    lines = [b'{"image": "\xff"}' if line is None else line.encode() for line in LINES.values()]
    every = [text for line in lines for text in (GOOD.encode(), line)]
    (folder / "m.jsonl").write_bytes(b"\n".join([*every, GOOD.encode()]))
    policy = IngestPolicy(max_document_bytes=1 << 17, max_meta_bytes=1 << 13)
    good, rejected = ingested([folder / "m.jsonl"], "grounding", store, policy=policy)
    assert len(good) == len(LINES) + 1
    assert len(rejected) == len(LINES)
    by_name = dict(zip(LINES, rejected.values(), strict=True))
    assert not [name for name, (reason, _) in by_name.items() if reason == "failed"], by_name
    for name, reason in {
        "a point of 400 digits": "bad region",
        "a pipe": "missing file",
        "a circle of links": "missing file",
        "a name of 5,000 letters": "missing file",
        "a document too large": "too large",
        "meta too large": "too large",
        "a line that does not end": "too large",
    }.items():
        assert by_name[name][0] == reason, (name, by_name[name])
    assert all(len(key) <= 200 and len(detail) <= 1000 for key, (_, detail) in rejected.items())


def test_hostile_files_of_a_folder_are_rejected_one_by_one(folder, store):
    bad = {
        "list.json": b'{"meta": [1]}', "list.png": PNG, "list.txt": b"x",
        "number.json": b'{"text": 7}', "number.png": PNG,
        "wide.txt": b"x" * (1 << 17), "wide.png": PNG,
        "wide2.json": json.dumps({"text": "x", "a": "x" * (1 << 14)}).encode(), "wide2.png": PNG,
    }  # fmt: skip
    for name, data in {**bad, "a.txt": b"x"}.items():
        (folder / name).write_bytes(data)
    os.mkfifo(folder / "text.txt")
    (folder / "text.png").write_bytes(PNG)
    policy = IngestPolicy(max_document_bytes=1 << 16, max_meta_bytes=1 << 13)
    good, rejected = ingested([folder], "caption", store, policy=policy)
    assert good == ["a"]
    assert set(rejected) == {"circle", "pipe", "list", "number", "wide", "wide2", "text"}


VALUES = [
    None, True, 0, -1, 1.5, HUGE, -HUGE, "", "a.png", "\ud800", "n" * 5000, [], [[]], [1, 2], {},
    {"a": {}}, [None], "\0", [[1, 2], [HUGE, 4]], [{}], {"image": "a.png"}, "pipe.png",
]  # fmt: skip
FIELDS = (
    *("key", "meta", "segments", "image", "images", "turn", "prompt", "question", "answer", "text"),
    *("texts", "lines", "objects", "content", "video", "system", "task", "steps", "turns"),
)
SEGMENT = ("kind", "text", "texts", "loss", "file", "media", "shape", "points", "label", "degrees")


@pytest.mark.parametrize("category", ["agent", "caption", "grounding", "interleaved", "ocr"])
def test_whatever_the_lines_say_the_good_ones_come_through(category, folder, store):
    draw = random.Random(category)
    good = {"key": "good", "segments": [{"kind": "text", "text": "x"}]}
    lines = []
    for number in range(400):
        record = {name: draw.choice(VALUES) for name in draw.sample(FIELDS, draw.randint(1, 4))}
        if number % 3 == 0:
            segment = {"kind": draw.choice(["text", "image", "video", "region"])}
            segment |= {n: draw.choice(VALUES) for n in draw.sample(SEGMENT, draw.randint(1, 5))}
            record["segments"] = [{"kind": "image", "file": "a.png"}, segment]
        lines.append(json.dumps(record))
        if number % 100 == 50:
            lines.append(json.dumps(good | {"key": f"good-{number}"}))
    (folder / "m.jsonl").write_text("\n".join(lines))
    found, rejected = ingested([folder / "m.jsonl"], category, store)
    assert {f"good-{n}" for n in (50, 150, 250, 350)} <= set(found)
    assert len(rejected) > 200
    assert not [told for told in rejected.values() if told[0] == "failed"]


def test_json_of_a_packed_tar_is_bounded(tmp_path, store):
    """A few kB contain 18 MiB of unknown fields."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in (
            ("a.png", PNG), ("a.txt", b"x"),
            ("b.json", b'{"text": "x", "z": [' + b"[]," * (6 << 20) + b"[]]}"), ("b.png", PNG),
        ):  # fmt: skip
            header = tarfile.TarInfo(name)
            header.size = len(data)
            tar.addfile(header, io.BytesIO(data))
    (tmp_path / "in.tar.gz").write_bytes(gzip.compress(out.getvalue(), 1))
    good, rejected = ingested([tmp_path / "in.tar.gz"], "caption", store)
    assert good == ["a"]
    assert rejected["b"][0] == "too large"


def test_a_video_of_many_large_frames_is_not_decoded(store, monkeypatch):
    clip = VideoSegment(mp4(9))
    wanted = [CrudeSample("a", [clip]), CrudeSample("b", [TextSegment("x")])]
    policy = IngestPolicy(max_video_pixels=9 * 48 * 64 - 1)
    index = ingest(wanted, store, "s", TOKENIZER, category="video", policy=policy)
    assert index.num_samples == 1
    [told] = map(json.loads, store.get("s/rejected.jsonl").splitlines())
    assert (told["reason"], told["key"]) == ("too large", "a")
    assert "9 frames of 64 x 48, at most 27647 pixels" in told["detail"]
    ticks = itertools.count()  # the first frames arrive in time, later ones do not
    monkeypatch.setattr("data_pipeline.ingest.prepare.time.monotonic", lambda: 200.0 * next(ticks))
    index = ingest(wanted, MemoryStore("slow"), "s", TOKENIZER, category="video")
    assert index.num_samples == 1


def test_an_object_is_not_read_if_it_is_too_large(folder, store):
    crude = MemoryStore("crude")
    crude.put("large.png", PNG + bytes(1 << 20))
    crude.put("small.png", PNG)
    lines = [grounding(image=f"memory://crude/{name}.png") for name in ("large", "small")]
    (folder / "m.jsonl").write_text("\n".join(map(json.dumps, lines)))
    before = byte_sources.store_of("memory://crude/x")[0].stats.bytes
    policy = IngestPolicy(max_media_bytes=1 << 20)
    good, rejected = ingested([folder / "m.jsonl"], "grounding", store, policy=policy)
    assert (good, rejected.popitem()[1][0]) == (["m-00000002"], "too large")
    assert byte_sources.store_of("memory://crude/x")[0].stats.bytes - before == len(PNG)


def test_what_the_machine_causes_ends_the_ingest_and_rejects_nothing(store):
    class Failing:
        key, size = "one", 0

        def __init__(self, error):
            self.error = error

        def load(self, policy):
            raise self.error

    good = CrudeSample("good", [ImageSegment(PNG, "png")])
    for error in (MemoryError(), OSError(5, "no answer"), StoreUnavailable("away")):
        with pytest.raises(type(error)):
            ingest([good, Failing(error)], store, "s", TOKENIZER, category="caption")
        assert "s/manifest.json" not in store.list()
    index = ingest([good, Failing(ZeroDivisionError("a bug"))], store, "s", TOKENIZER)
    assert index.num_samples == 1
    [told] = map(json.loads, store.get("s/rejected.jsonl").splitlines())
    assert told["reason"] == "failed"
    assert told["detail"].startswith("ZeroDivisionError: a bug (test_hostile_samples.py, line ")


@pytest.mark.parametrize(
    ("error", "is_the_sample_s"),
    [
        (MissingKey("s3://other/a.png: no such object"), True),
        (MissingBucket("s3://other/a.png: there is no bucket"), True),
        (access_denied("s3://other/a.png", "HTTP 403 AccessDenied"), False),
        (access_denied("s3://other/a.png", "no complete credentials found"), False),
        (access_denied("s3://a", "HTTP 400 ExpiredToken, and again with others"), False),
        (RequestRefused("s3://other/a.png: refused: HTTP 400 InvalidArgument"), False),
        (ObjectChanged("s3://other/a.png: overwritten"), False),
        (StoreUnavailable("s3://other/a.png: HTTP 403 RequestTimeTooSkewed"), False),
        (PermissionError(13, "Permission denied", "a.png"), False),
    ],
    ids=[
        *("no object", "no bucket", "another's object", "no credentials", "an old token"),
        *("an odd refusal", "overwritten", "a skewed clock", "no right"),
    ],
)
def test_only_a_name_of_nothing_rejects_a_sample_whose_object_cannot_be_read(
    error, is_the_sample_s, folder, store, monkeypatch
):
    class Denying(FolderStore):
        def head(self, key):
            raise error

        get = head

    Denying.get = lambda self, key, *_, **__: self.head(key)
    monkeypatch.setattr(byte_sources, "open_store", lambda root: Denying(folder))
    byte_sources._store.cache_clear()
    lines = [GOOD, json.dumps(grounding(image="s3://other/a.png"))]
    (folder / "m.jsonl").write_text("\n".join(lines))
    if is_the_sample_s:
        good, rejected = ingested([folder / "m.jsonl"], "grounding", store)
        assert (len(good), rejected.popitem()[1][0]) == (1, "missing file")
    else:
        with pytest.raises(type(error)):
            ingested([folder / "m.jsonl"], "grounding", store)
    byte_sources._store.cache_clear()


def test_a_local_file_without_the_right_to_read_it_ends_the_ingest(folder, store, monkeypatch):
    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    (folder / "m.jsonl").write_text(json.dumps({"image": "a.png", "text": "x"}))
    (folder / "a.png").write_bytes(PNG)
    [(_, unit)] = open_inputs([str(folder / "m.jsonl")], "caption").read()
    monkeypatch.setattr(byte_sources, "open_regular", denied)
    with pytest.raises(PermissionError, match=r"a\.png"):
        unit.load(IngestPolicy())
