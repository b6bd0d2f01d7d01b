"""The code of docs/alone/stream.md and docs/alone/loader.md runs unchanged."""

import json

import numpy as np
import pytest

from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, ImageSegment, TextSegment
from data_pipeline.store.open import FolderStore
from data_pipeline.stream.stream import SampleStream, StreamConfig
from data_pipeline.text import Tokenizer, train_ranks
from tests import ROOT, docs
from tests.unit.data_pipeline.media import encoded


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Build sources with the names of the examples in a folder "corpus"; return its parent."""
    folder = tmp_path_factory.mktemp("docs")
    store = FolderStore(folder / "corpus")
    words = ["tide", "comes", "in", "twice", "a", "day", "and", "goes", "out", "as", "often"]
    draw = np.random.default_rng(0)

    def text():
        return TextSegment(" ".join(draw.choice(words, draw.integers(4, 40))))

    def image(suffix):
        pixels = draw.integers(0, 256, (60, 90, 3), dtype=np.uint8)
        return ImageSegment(encoded(pixels, {"png": "PNG", "jpg": "JPEG"}[suffix]), suffix)

    ranks = train_ranks([" ".join(words)], 270)
    store.put("tokenizer/tokenizer.tiktoken", ranks)
    tokenizer = Tokenizer(ranks, "words")
    for name, suffix in (("captions", "png"), ("scans", "jpg")):
        pairs = [CrudeSample(f"{name}{i}", [image(suffix), text()]) for i in range(12)]
        ingest(pairs, store, name, tokenizer, category="caption")
    ingest([CrudeSample(f"w{i}", [text()]) for i in range(30)], store, "web", tokenizer)
    return folder


@pytest.fixture(autouse=True)
def in_the_folder(corpus, monkeypatch):
    monkeypatch.chdir(corpus)


def test_the_loader_alone():
    scope = docs.run("docs/alone/loader.md")
    assert scope["tokens"].shape == scope["mask"].shape == (8, 512)
    assert scope["mask"].any()
    assert scope["patches"] > 0
    assert scope["state"]["step"] == 3
    assert len(str(scope["state"])) < 520


# as written, and other counts for the same batches
@pytest.mark.parametrize("num_workers", [2, 0, 3])
def test_the_stream_alone(num_workers):
    scope = docs.run("docs/alone/stream.md", {"num_workers=2": f"num_workers={num_workers}"})
    assert scope["sizes"] == [(90, 60)] * 16
    assert scope["state"]["position"] == 80
    config = StreamConfig(batch_size=80, shares={"captions": 2, "scans": 1}, seed=7)
    with SampleStream("corpus", ["scans", "captions"], config) as stream:
        whole = next(stream.batches())
    assert whole.source.count("captions") in (53, 54)
    documents = list(map(json.loads, whole.document))
    assert [document for _, document in scope["batch"]] == documents[64:]


def test_the_pages_are_short():
    for page in ("docs/alone/stream.md", "docs/alone/loader.md"):
        lines = (ROOT / page).read_text().splitlines()
        assert not [line for line in lines if len(line) > 100]
        (code,) = docs.blocks(page)
        assert len(code.splitlines()) <= 16
