"""Sources of the fusion benchmark: media sources that consist mostly of media tokens, and text.

The demo's pages of digits hold 34% media tokens, so no mixture of them can hold more. Here a
picture has few words: `walls` are pages of 4 x 4 scans of one digit, with the digit as text;
`photos` are crops of photographs with captions. `prose` and `code` are the demo's texts as whole
documents, so that they fill rows. Each source has a `_heldout` source with other scans, other crops
of the same photographs, or other documents.
"""

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np

from data_pipeline.ingest.ingest import ingest
from data_pipeline.ingest.samples import CrudeSample, ImageSegment, TextSegment
from data_pipeline.ingest.texts import sample_texts
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from launch.demo import digits, photos, python_texts
from launch.demo.corpus import TOKENIZER_KEY, VOCABULARY
from launch.demo.generator import generator

MEDIA, TEXT = ("photos", "walls"), ("code", "prose")
SIDE = 4  # scans per side of a wall
# Number of answers that a model without vision has to choose from, and held-out documents per
# source.
CHOICES = {"photos": len(photos.CAPTIONS), "walls": 10}
HELDOUT = {"photos": len(photos.CAPTIONS), "walls": 50}
EVERY = 8  # one in this many text documents is held out


def build(folder: Path, *, walls: int, cuts: int, text_bytes: int) -> None:
    """Write all sources and their tokenizer into a folder.

    Args:
        walls: pages to train on.
        cuts: crops of each photograph to train on.
        text_bytes: bytes of each text source, including held-out documents.
    """
    train, heldout = digits.split(digits.load_scans(), 0)
    written = {
        "prose": list(python_texts.bounded(iter(python_texts.topics()), text_bytes)),
        "code": list(python_texts.code_texts(text_bytes)),
    }
    sources: dict[str, Iterable[CrudeSample]] = {
        "walls": walls_of(train, "walls", walls),
        "walls_heldout": walls_of(heldout, "walls_heldout", HELDOUT["walls"]),
        "photos": cuts_of(0, cuts),
        "photos_heldout": cuts_of(1, HELDOUT["photos"] // CHOICES["photos"]),
    }
    for name, documents in written.items():
        sources[name] = texts_of(name, (d for i, d in enumerate(documents) if i % EVERY))
        sources[f"{name}_heldout"] = texts_of(name, map(_middle, documents[::EVERY]))
    samples = {name: list(found) for name, found in sources.items()}
    learnt = (found for name, found in samples.items() if not name.endswith("_heldout"))
    ranks = train_ranks(chain.from_iterable(map(sample_texts, chain(*learnt))), VOCABULARY)
    store = FolderStore(folder)
    store.put(TOKENIZER_KEY, ranks)
    tokenizer = Tokenizer(ranks, "fusion")
    for name, found in samples.items():
        category = "text" if name.removesuffix("_heldout") in TEXT else "caption"
        ingest(found, store, name, tokenizer, category=category)


def walls_of(scans: digits.Scans, purpose: str, count: int) -> Iterator[CrudeSample]:
    """Yield pages of scans of one digit. All digits occur equally often."""
    for item in range(count):
        rng, digit = generator(0, purpose, item), item % 10
        chosen = rng.choice(np.flatnonzero(scans.labels == digit), SIDE**2)
        row, column = np.divmod(np.arange(SIDE**2), SIDE)
        corner = np.stack([column, row], 1) * digits.CELL
        corner = corner + rng.integers(0, digits.JITTER + 1, corner.shape)
        boxes = np.concatenate([corner, corner + digits.INK], 1)
        page = digits.PageLayout(SIDE * digits.CELL, SIDE * digits.CELL, boxes)
        picture = ImageSegment(digits.png(digits.draw_page(page, scans.pixels[chosen])), "png")
        yield CrudeSample(f"{purpose}-{item:05d}", [picture, TextSegment(f" {digit}")])


def cuts_of(seed: int, count: int) -> Iterator[CrudeSample]:
    """Yield `count` crops of every photograph.

    The whole photograph is left out, because it would be in both the training and the held-out
    source.
    """
    for sample in photos.photos(seed, per_photo=count + 1):
        picture, told = sample.segments
        assert isinstance(told, TextSegment)
        if not sample.key.endswith("-00"):
            yield CrudeSample(f"{sample.key}-{seed}", [picture, TextSegment(told.texts[-1])])


def texts_of(name: str, documents: Iterable[str]) -> Iterator[CrudeSample]:
    """Yield documents as samples."""
    for number, text in enumerate(documents):
        yield CrudeSample(f"{name}-{number:04d}", [TextSegment(text)])


def _middle(document: str) -> str:
    """Return the middle of a held-out document, because all documents begin alike."""
    half = len(document) // 2
    return document[half : half + 600] or document
