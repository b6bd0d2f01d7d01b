"""Samples that every loader reads: 20,000 photographs of 224 x 224 pixels with captions.

Each is a window of a photograph that scikit-image or scikit-learn ships, as a JPEG of about 8 KB.
The samples are written once as one of our sources, which is a folder of plain tar files. webdataset
and Energon read the same tars; the others get the same bytes in their own formats (`convert.py`). A
second, text-only source made from Python's documentation serves the blended runs.
"""

import io
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from PIL import Image

from benchmarks.loaders.job import PAIRS, PROSE
from data_pipeline.ingest.ingest import CrudeSample, ImageSegment, TextSegment, ingest
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from launch.demo.generator import generator
from launch.demo.photos import CAPTIONS, opaque, package_file
from launch.demo.python_texts import prose_texts, text_samples

SEED = 2026
SIDE = 224
QUALITY = 74  # gives 8 KB on average
SHARDS = 20
TOKENIZER = "tokenizer/bench.tiktoken"


@cache
def photograph(path: str) -> Image.Image:
    with Image.open(package_file(path)) as opened:
        return opaque(opened)


def pair(number: int) -> CrudeSample:
    """Return sample `number`: a window of a photograph, and a caption that describes the window."""
    rng = generator(SEED, "bench/pairs", number)
    path = list(CAPTIONS)[number % len(CAPTIONS)]
    whole = photograph(path)
    side = int(min(whole.size) * rng.uniform(0.25, 1.0))
    left, top = (int(rng.integers(0, extent - side + 1)) for extent in whole.size)
    box = (left, top, left + side, top + side)
    file = io.BytesIO()
    whole.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box).save(file, "JPEG", quality=QUALITY)
    text = f"part of a picture: {CAPTIONS[path]}; {side} pixels wide, from column {left}, row {top}"
    return CrudeSample(
        f"{number:08d}", [ImageSegment(file.getvalue(), "jpg"), TextSegment(text)], {"from": path}
    )


def pairs(count: int) -> Iterator[CrudeSample]:
    return (pair(number) for number in range(count))


def make(root: Path, count: int) -> None:
    """Write both sources and their tokenizer under `root`, unless they exist already."""
    done = root / f"made-{count}"
    if done.exists():
        return
    store = FolderStore(root)
    captions = [sample.segments[1].text for sample in pairs(500)]  # type: ignore[union-attr]
    ranks = train_ranks([*captions, *prose_texts(1 << 18)], 1500)
    store.put(TOKENIZER, ranks)
    tokenizer = Tokenizer(ranks, "bench")
    words = text_samples(PROSE, prose_texts(1 << 20), 500, tokenizer.encode)
    ingest(words, store, PROSE, tokenizer, 128 << 10, category="text")
    ingest(pairs(count), store, PAIRS, tokenizer, shard_bytes(count), category="caption")
    done.touch()


def shard_bytes(count: int) -> int:
    """Return the size of a tar that holds a twentieth of the samples or slightly more."""
    tried = range(0, count, 41)
    mean = sum(len(sample.segments[0].data) for sample in map(pair, tried)) / len(tried)  # type: ignore
    # A tar member has a header of 512 bytes and is padded to a multiple of 512.
    return int((mean + 256 + 512 + 1024) * 1.015 * count / SHARDS)
