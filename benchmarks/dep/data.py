"""Corpora of the DEP benchmark: noise pictures in the sizes of a real mix, and pages of N images.

The mix is that of benchmarks/sim/mix.csv: 703 documents with 858 pictures and clips of heavy-tailed
sizes. Sides are a quarter as long, so tokens are about a sixteenth, like the rows of the small
model. The content of a picture does not affect its cost, so noise is enough.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
from PIL import Image

from benchmarks.sim.corpus import Mix, media_source, read_mix
from data_pipeline.config import DataConfig
from data_pipeline.ingest.ingest import (
    CrudeSample,
    ImageSegment,
    TextSegment,
    VideoSegment,
    ingest,
)
from data_pipeline.store.open import FolderStore
from data_pipeline.text import Tokenizer, train_ranks
from moonvit3d.geometry import KIND_VIDEO, SAMPLE_FPS, TOKEN, PatchLimits

SHRINK = 4  # divides each side of the mix
RANKS = 290  # vocabulary size of the tokenizer
WORDS = "the cat sat on a mat and saw 42 red kites over the old mill while it rained".split()  # noqa: SIM905
TEXTS, WORDS_OF_TEXT = 400, 60
WORDS_OF_DOCUMENT = 8
PAGES = 8  # samples of each source of pages
LONGEST_WORD = 8  # tokens by which a text may exceed its length
PAGE_IMAGE = (2, 3)  # height and width of page images in tokens: 6 tokens, 24 patches


def small_mix() -> Mix:
    """Return the mix with shorter sides."""
    mix = read_mix()
    sides = (np.maximum(1, side // SHRINK) for side in (mix.width, mix.height))
    width, height = sides
    return replace(mix, width=width, height=height)


def build_mix(root: Path, config: DataConfig, every: int) -> None:
    """Write the sources `mixed` and `words` and a tokenizer under `root`.

    Args:
        root: an empty folder.
        config: data configuration; its limits and row length determine where a long document is
            cut.
        every: use every n-th document; 1 for all.
    """
    store, generator = FolderStore(root), _generator(7)
    texts = [_words(generator, WORDS_OF_TEXT) for _ in range(TEXTS)]
    tokenizer = write_tokenizer(store, texts)
    samples = (CrudeSample(f"w{n:05d}", [TextSegment(text)]) for n, text in enumerate(texts))
    ingest(samples, store, "words", tokenizer)
    mix = small_mix()
    mix = mix[mix.document % every == 0]
    ingest(_documents(mix, config, generator), store, "mixed", tokenizer, category="interleaved")


def write_tokenizer(store: FolderStore, texts: list[str]) -> Tokenizer:
    """Train a tokenizer on the texts and write it to the store."""
    store.put("tokenizer.tiktoken", train_ranks(texts, RANKS))
    return Tokenizer.from_store(store, "tokenizer.tiktoken")


def _documents(
    mix: Mix, config: DataConfig, generator: np.random.Generator
) -> Iterator[CrudeSample]:
    """Yield the mix's documents, cut where they exceed a row."""
    limits = PatchLimits(**vars(config.limits))
    cuts = media_source(mix, limits, config.seq_len).item_ptr.tolist()
    for number, (start, end) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
        media = list(_media(mix[np.arange(start, end)], generator))
        text = TextSegment(_words(generator, WORDS_OF_DOCUMENT))
        yield CrudeSample(f"d{number:05d}", [*media, text])


def _media(mix: Mix, generator: np.random.Generator) -> Iterator[ImageSegment | VideoSegment]:
    """Yield pictures, and clips with the frames of all their consecutive chunks."""
    frames = 0
    for item in range(len(mix.kind)):
        width, height = int(mix.width[item]), int(mix.height[item])
        if mix.kind[item] != KIND_VIDEO:
            yield ImageSegment(png(noise(generator, 1, height, width)[0]), "png")
            continue
        frames += int(mix.frames[item])
        shape = (mix.kind[item], width, height, mix.document[item])
        after = item + 1
        if after < len(mix.kind) and shape == (
            mix.kind[after], int(mix.width[after]), int(mix.height[after]), mix.document[after]
        ):  # fmt: skip
            continue
        yield VideoSegment(mp4(noise(generator, frames, height // 2 * 2, width // 2 * 2)), "mp4")
        frames = 0


def build_pages(root: Path, counts: list[int]) -> int:
    """Write sources `pages_N` whose samples have N images each and about equal length.

    Args:
        root: an empty folder.
        counts: images per sample, one source for each number.

    Returns:
        the row length that holds one sample but not two.
    """
    store, generator = FolderStore(root), _generator(8)
    texts = [_words(generator, WORDS_OF_TEXT) for _ in range(TEXTS)]
    tokenizer = write_tokenizer(store, texts)
    image = len(tokenizer.image_prefix()) + math.prod(PAGE_IMAGE) + 1
    room = max(counts) * image
    for count in counts:
        samples = (
            CrudeSample(
                f"p{number:05d}",
                [
                    *(_page_image(generator) for _ in range(count)),
                    TextSegment(_text_of(tokenizer, generator, room - count * image)),
                ],
            )
            for number in range(PAGES)
        )
        ingest(samples, store, f"pages_{count}", tokenizer, category="interleaved")
    return room + 2 + LONGEST_WORD


def _page_image(generator: np.random.Generator) -> ImageSegment:
    height, width = (side * TOKEN for side in PAGE_IMAGE)
    return ImageSegment(png(noise(generator, 1, height, width)[0]), "png")


def _text_of(tokenizer: Tokenizer, generator: np.random.Generator, tokens: int) -> str:
    """Return words that encode to about `tokens` tokens."""
    words: list[str] = []
    ids = 0
    while ids < tokens or not words:
        word = str(generator.choice(WORDS))
        words.append(word)
        ids += len(tokenizer.encode(f" {word}"))
    return " ".join(words)


def noise(generator: np.random.Generator, frames: int, height: int, width: int) -> np.ndarray:
    """Return random pixels, uint8 [frames, height, width, 3]."""
    return generator.integers(0, 256, (frames, max(1, height), max(1, width), 3), dtype=np.uint8)


def png(pixels: np.ndarray) -> bytes:
    """Return an uncompressed PNG, because noise does not compress."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=0)
    return buffer.getvalue()


def mp4(frames: np.ndarray) -> bytes:
    """Return a clip at the rate at which clips are sampled, so that every frame is used."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        stream = container.add_stream(
            "libx264", rate=int(SAMPLE_FPS), options={"preset": "ultrafast"}
        )
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuv420p"
        for pixels in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return buffer.getvalue()


def _words(generator: np.random.Generator, count: int) -> str:
    return " ".join(generator.choice(WORDS, size=count))


def _generator(key: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))
