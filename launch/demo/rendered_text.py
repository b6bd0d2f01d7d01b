"""Rendered pages of the Python documentation with their text: the demo's OCR data.

The text is drawn with the font bundled in Pillow, so the machine needs no fonts. Font size, line
width and number of lines vary, so pages range from a few lines to a full sheet.
"""

import textwrap
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data_pipeline.ingest.samples import CrudeSample, ImageSegment, TextSegment
from launch.demo.digits import png
from launch.demo.generator import generator
from launch.demo.python_texts import topics

FONT_SIZES = (11, 13, 16)
WIDTHS = (20, 32, 48)
NUM_LINES = (2, 12)
# Picture and text together must fit a row of 256 tokens (configs/tiny_cpu.yaml).
MOST_CHARS = 220
SMALLEST_DOCUMENT = 1000
MARGIN = 10
SPACING = 4


# The bundled font has no dashes or curly quotes.
PLAIN = str.maketrans({"\u2014": "-", "\u2013": "-", "\u2019": "'", "\u201c": '"', "\u201d": '"'})


def running_text(document: str) -> str:
    """Return the paragraphs of a document that are sentences, in ASCII, with single spaces.

    Tables, underlines of headings and examples would be garbled by wrapping.
    """
    kept = []
    for paragraph in document.translate(PLAIN).split("\n\n"):
        plain = " ".join(paragraph.split())
        if plain.isascii() and plain.endswith(".") and not set("|>=+") & set(plain):
            kept.append(plain)
    return " ".join(kept)


def page_lines(text: str, start: float, width: int, num_lines: int) -> list[str]:
    """Return wrapped lines from the middle of a text.

    Args:
        text: the document.
        start: position of the first line, from 0 (start of the text) to 1 (last possible position).
        width: characters per line.
        num_lines: maximum number of lines; at most `MOST_CHARS` characters are returned.
    """
    wrapped = textwrap.wrap(text, width)
    first = int(start * max(0, len(wrapped) - num_lines))
    lines: list[str] = []
    for line in wrapped[first : first + num_lines]:
        if sum(map(len, lines)) + len(lines) + len(line) > MOST_CHARS:
            break
        lines.append(line)
    return lines


def render(lines: list[str], font_size: int) -> tuple[np.ndarray, list[list[int]]]:
    """Draw lines black on white.

    Returns:
        Pixels uint8 [H, W] and the box (left, top, right, bottom) of every line.
    """
    font = ImageFont.load_default(font_size)
    probe = ImageDraw.Draw(Image.new("L", (1, 1)))
    step = font_size + SPACING
    boxes = []
    for number, line in enumerate(lines):
        box = probe.textbbox((MARGIN, MARGIN + number * step), line, font=font)
        boxes.append([int(v) for v in box])
    width = max(box[2] for box in boxes) + MARGIN
    page = Image.new("L", (width, 2 * MARGIN + step * len(lines)), 255)
    pen = ImageDraw.Draw(page)
    for number, line in enumerate(lines):
        pen.text((MARGIN, MARGIN + number * step), line, fill=0, font=font)
    return np.asarray(page), boxes


def rendered_pages(seed: int, *, count: int) -> Iterator[CrudeSample]:
    """Yield `count` pages as PNG; the target text has the page's own line breaks."""
    documents = [t for t in map(running_text, topics()) if len(t) > SMALLEST_DOCUMENT]
    for item in range(count):
        rng = generator(seed, "pages", item)
        document = documents[rng.integers(len(documents))]
        width = int(WIDTHS[rng.integers(len(WIDTHS))])
        num_lines = round(float(np.exp(rng.uniform(*np.log(NUM_LINES)))))
        lines = page_lines(document, rng.random(), width, num_lines)
        pixels, boxes = render(lines, int(FONT_SIZES[rng.integers(len(FONT_SIZES))]))
        yield CrudeSample(
            f"pages-{item:04d}",
            [ImageSegment(png(pixels), "png"), TextSegment("\n".join(lines), True)],
            {"lines": [[line, box] for line, box in zip(lines, boxes)]},
        )
