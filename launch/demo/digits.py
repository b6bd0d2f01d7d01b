"""Pages of handwritten digits: the part of the demo corpus that a tiny model learns to read.

The 1,797 scans of 8x8 pixels that ship inside scikit-learn (UCI, Alpaydin and Kaynak 1998) are
enlarged to 24x24 and placed in cells of 28 pixels with a jitter of 0 to 4 pixels. One merged vision
token covers 28 pixels, so one token covers one digit; every margin is a whole number of cells. Most
pages are short, because a small model must learn within minutes. A few pages are large and mostly
blank, which gives the patch counts the heavy tail of real corpora.

The split is by scan, not by page: a scan is used for training or for evaluation, never for both.
"""

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from PIL import Image

from data_pipeline.ingest.samples import CrudeSample, ImageSegment, RegionSegment, TextSegment
from launch.demo.generator import generator

CELL = 28
INK = 24
JITTER = CELL - INK
TRAIN_SCANS = 1500
PROMPT = "digits:"
WHERE = "where:"

# Number of digits on a page: single digits start the learning, long pages teach the order.
SINGLE, SHORT = 0.55, 0.25
BIG_PAGES = 0.04
# At most 12x12 cells, the 576 patches of configs/tiny_cpu.yaml: a larger page would be scaled down,
# and its digits would no longer align with whole vision tokens.
BIG_COLS, BIG_ROWS = (6, 12), (6, 12)
# Blank rows or columns added to an ordinary page, and their probabilities.
MARGINS, MARGIN_SHARES = (0, 1, 2), (0.65, 0.25, 0.10)


@dataclass(frozen=True)
class Scans:
    """Enlarged scans.

    Attributes:
        pixels: [scans, 24, 24] uint8, white ink on black.
        labels: [scans] int64, 0 to 9.
    """

    pixels: np.ndarray
    labels: np.ndarray


@dataclass(frozen=True)
class PageLayout:
    """Positions of the digits of one page, in pixels.

    Attributes:
        width: page width, a multiple of 28.
        height: page height, a multiple of 28.
        boxes: [digits, 4] int64 (left, top, right, bottom) of each 24x24 scan, in reading order.
    """

    width: int
    height: int
    boxes: np.ndarray


def load_scans() -> Scans:
    """Read all scans from scikit-learn's package data and enlarge them to 24x24."""
    from sklearn.datasets import load_digits

    raw, labels = (np.asarray(part) for part in load_digits(return_X_y=True))
    small = np.rint(raw.reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    large = [
        np.asarray(Image.fromarray(s).resize((INK, INK), Image.Resampling.BICUBIC)) for s in small
    ]
    return Scans(np.stack(large), labels.astype(np.int64))


def split(scans: Scans, seed: int) -> tuple[Scans, Scans]:
    """Return (training scans, held-out scans), disjoint, by a permutation keyed by `seed`."""
    order = generator(seed, "digits/split", 0).permutation(len(scans.labels))
    train, held_out = order[:TRAIN_SCANS], order[TRAIN_SCANS:]
    return (
        Scans(scans.pixels[train], scans.labels[train]),
        Scans(scans.pixels[held_out], scans.labels[held_out]),
    )


def draw_layout(rng: np.random.Generator, num_digits: int, big: bool) -> PageLayout:
    """Place `num_digits` cells as a block of columns and rows at a random position on a page.

    Args:
        rng: the page's own generator.
        num_digits: 1 to 12.
        big: a page of 6x6 to 12x12 cells instead of a page that fits its digits.
    """
    cols = int(rng.integers(1, min(num_digits, 6) + 1))
    rows = math.ceil(num_digits / cols)
    if big:
        # At least the block itself, which may be a column of twelve digits.
        page_cols = max(cols, int(rng.integers(BIG_COLS[0], BIG_COLS[1] + 1)))
        page_rows = max(rows, int(rng.integers(BIG_ROWS[0], BIG_ROWS[1] + 1)))
    else:
        page_cols = cols + int(rng.choice(MARGINS, p=MARGIN_SHARES))
        page_rows = rows + int(rng.choice(MARGINS, p=MARGIN_SHARES))
    left = int(rng.integers(0, page_cols - cols + 1))
    top = int(rng.integers(0, page_rows - rows + 1))

    row, col = np.divmod(np.arange(num_digits), cols)
    corner = np.stack([(left + col) * CELL, (top + row) * CELL], axis=1)
    corner = corner + rng.integers(0, JITTER + 1, size=(num_digits, 2))
    return PageLayout(page_cols * CELL, page_rows * CELL, np.concatenate([corner, corner + INK], 1))


def draw_page(layout: PageLayout, pixels: np.ndarray) -> np.ndarray:
    """Paint scans [digits, 24, 24] into their boxes; return uint8 [height, width]."""
    page = np.zeros((layout.height, layout.width), np.uint8)
    for (left, top, right, bottom), scan in zip(layout.boxes.tolist(), pixels):
        page[top:bottom, left:right] = scan
    return page


def num_digits(rng: np.random.Generator, most: int) -> int:
    """Draw the number of digits on a page: about half have one, and none more than `most`."""
    draw = rng.random()
    if draw < SINGLE:
        return 1
    if draw < SINGLE + SHORT or most <= 4:
        return int(rng.integers(2, min(most, 4) + 1))
    return int(rng.integers(5, most + 1))


def pages(scans: Scans, seed: int, *, purpose: str, count: int, most: int) -> Iterator[CrudeSample]:
    """Yield `count` pages of 1 to `most` digits with the digits as target text.

    The prompt has no loss, so the whole loss of a page is on the digits.

    Args:
        scans: scans to choose from.
        seed: the corpus seed.
        purpose: names the generator and the sample keys, for example "digits".
        count: number of pages.
        most: maximum number of digits; big pages exist only above 4.
    """
    for item in range(count):
        rng = generator(seed, f"{purpose}/page", item)
        big = most > 4 and rng.random() < BIG_PAGES
        # A big page is mostly blank, so it gets at least four digits.
        number = int(rng.integers(4, most + 1)) if big else num_digits(rng, most)
        chosen = rng.integers(0, len(scans.labels), size=number)
        layout = draw_layout(rng, number, big)
        digits = "".join(str(d) for d in scans.labels[chosen])
        yield CrudeSample(
            f"{purpose}-{item:06d}",
            [
                ImageSegment(png(draw_page(layout, scans.pixels[chosen])), "png"),
                TextSegment(PROMPT, False),
                TextSegment("".join(f" {d}" for d in digits), True),
            ],
            {"digits": digits, "boxes": layout.boxes.tolist()},
        )


def located(scans: Scans, seed: int, *, count: int) -> Iterator[CrudeSample]:
    """Yield `count` pages of 1 to 4 digits whose target gives the box of each digit.

    The boxes are regions, so they follow the picture when it is augmented.

    Args:
        scans: scans to choose from.
        seed: the corpus seed.
        count: number of pages.
    """
    for item in range(count):
        rng = generator(seed, "where/page", item)
        number = int(rng.integers(1, 5))
        chosen = rng.integers(0, len(scans.labels), size=number)
        layout = draw_layout(rng, number, big=False)
        boxes = [
            RegionSegment("box", [[left, top], [right, bottom]], label=f" {digit}")
            for digit, (left, top, right, bottom) in zip(
                scans.labels[chosen].tolist(), layout.boxes.tolist()
            )
        ]
        picture = ImageSegment(png(draw_page(layout, scans.pixels[chosen])), "png")
        yield CrudeSample(f"where-{item:06d}", [picture, TextSegment(WHERE, False), *boxes])


def png(pixels: np.ndarray) -> bytes:
    """Encode uint8 [H, W] or [H, W, 3] as PNG."""
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, "PNG", compress_level=6)
    return out.getvalue()
