"""The page of a step's rows as the model gets them: tokens, loss mask, pictures, regions.

Tokens, masks and patches come from the loader. The documents only explain the meaning of the
tokens; regions are drawn at the coordinates in the tokens, not at those in the document.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.augment.draws import Draw
from data_pipeline.fetch import StepRequest, TextRead
from data_pipeline.index.columns import SourceIndex
from data_pipeline.loader import StepBatch
from data_pipeline.plan.layout import limits_at
from data_pipeline.text import Tokenizer
from launch.pages import tokens
from launch.pages.html import page, percent, text
from launch.pages.pictures import Shape, Src, colour_class, data_uri, drawing, unpatchify
from moonvit3d.geometry import KIND_IMAGE, PatchLimits, resized

LEGEND = (
    '<p class="note tokens"><span class="t l">learnt</span> the model is trained to predict this '
    'token; <span class="t">read</span> it is only read; <span class="t s">[BOS]</span> a special '
    "token. A token's id shows when one points at it. A dashed frame in a picture is where it ends "
    "and its padding to whole tokens begins. Shapes stand where the tokens say.</p>"
)


@dataclass(frozen=True)
class Step:
    """The data of one step to show.

    Attributes:
        batch: batch of the loader, with the rows to show.
        request: reads of these rows (`data_pipeline.fetch.resolve`).
        documents: {number of a sample in the plan: its document}, for readable samples.
        indices: indices of the sources, in the order of the plan.
        tokenizer: tokenizer of the sources.
    """

    batch: StepBatch
    request: StepRequest
    documents: Mapping[int, Mapping[str, Any]]
    indices: Sequence[SourceIndex]
    tokenizer: Tokenizer

    def source(self, sample: int) -> tuple[SourceIndex, int]:
        """Return the source of a sample and the sample's number in it."""
        table = self.batch.plan.samples
        return self.indices[table.source[sample]], int(table.index[sample])


def rows_page(step: Step, title: str) -> str:
    """Return the page of a step's rows."""
    return page(title, rows_body(step, data_uri))


def rows_body(step: Step, src: Src) -> Iterator[str]:
    """Yield the body of the page as HTML.

    Args:
        step: step to show.
        src: stores the pictures.
    """
    yield LEGEND
    for place, row in enumerate(step.batch.row_ids.tolist()):
        yield from _row(step, place, row, src)


def _row(step: Step, place: int, row: int, src: Src) -> Iterator[str]:
    plan, rows = step.batch.plan, step.batch.rows
    assert rows is not None, "only rows that were asked for are shown"
    samples = [read for read in step.request.texts if read.row == place]
    filled = sum(read.layout.length for read in samples)
    learnt = int(rows.loss_mask[place].sum())
    yield f'<section id="row-{row}">\n<h2>Row {row} of step {plan.step + 1}</h2>'
    said = (
        f"{len(samples)} document{'s' * (len(samples) != 1)}, {filled:,} of {plan.seq_len:,} "
        f"tokens ({percent(filled / plan.seq_len)} filled), {learnt:,} learnt "
        f"({percent(learnt / plan.seq_len)})"
    )
    yield f"<p>{said}</p>"
    bar = "".join(
        f'<rect x="{read.start}" width="{read.layout.length}" height="1"><title>'
        f"{text(step.source(read.sample)[0].name)}: {read.layout.length} tokens</title></rect>"
        for read in samples
    )
    yield f'<svg class="row" viewBox="0 0 {plan.seq_len} 1" preserveAspectRatio="none">{bar}</svg>'
    for read in samples:
        yield from _document(step, place, read, src)
    yield "</section>"


def _document(step: Step, place: int, read: TextRead, src: Src) -> Iterator[str]:
    index, number = step.source(read.sample)
    table = step.batch.plan.samples
    facts = [
        f"epoch {table.epoch[read.sample]}",
        f"{read.layout.length} tokens from {read.start}",
        f"position {table.position[read.sample]} of the stream",
    ]
    if read.layout.part is not None:
        facts.append(f"part {read.layout.part} of a split text")
    if table.varied[read.sample]:
        facts.append("augmented")
    yield (
        f"<article>\n<header><b>{text(index.name)}</b> ({text(index.category)}) "
        f"<b>{text(index.key_of(number))}</b> &middot; {text(' · '.join(facts))}</header>"
    )
    for bad in step.batch.bad:
        if bad.sample == read.sample:
            yield f'<div class="wrong">{text(bad.reason)}</div>'
    yield f'<div class="tokens">{_Document(step, place, read, src).html()}</div>\n</article>'


class _Document:
    """One sample of a row."""

    def __init__(self, step: Step, place: int, read: TextRead, src: Src):
        rows, stop = step.batch.rows, read.start + read.layout.length
        assert rows is not None
        self._step, self._read, self._src = step, read, src
        self._ids = rows.tokens[place, read.start : stop]
        # Token j is learnt if position j - 1 has loss; the label there should be token j.
        before = np.arange(read.start, stop) - 1
        self._learnt = rows.loss_mask[place, before] & (before >= 0)
        self._wrong = self._learnt & (rows.labels[place, before] != self._ids)
        document = step.documents.get(read.sample)
        self._segments = document["segments"] if document else []
        self._parts = tokens.parts(self._segments, step.tokenizer, read.layout) if document else []
        items = step.batch.plan.items
        self._items = np.flatnonzero(items.sample == read.sample).tolist()
        self._regions = [segment for segment in self._segments if segment["kind"] == "region"]
        self._files = {
            item: file for file in step.request.files for item in file.items
            if file.sample == read.sample
        }  # fmt: skip

    def html(self) -> str:
        """Return the tokens as HTML, with pictures in place of media pads."""
        pieces, at = [], 0
        for part in self._parts:
            pieces += [self._tokens(at, part.start), self._part(part)]
            at = part.stop
        return "".join((*pieces, self._tokens(at, len(self._ids))))

    def _tokens(self, start: int, stop: int, region: int | None = None) -> str:
        where = slice(start, stop)
        return tokens.spans(
            self._ids[where],
            self._learnt[where],
            self._wrong[where],
            self._step.tokenizer,
            region,
        )

    def _part(self, part: tokens.TokenRun) -> str:
        if part.kind == "media":
            return self._medium(part)
        inside = self._tokens(part.start, part.stop, part.number if part.kind == "region" else None)
        return f'<span title="{text(part.note)}">{inside}</span>' if part.note else inside

    def _medium(self, part: tokens.TokenRun) -> str:
        """Return the picture that replaces its media pads."""
        step = self._step
        items, item = step.batch.plan.items, self._items[part.number]
        pads = self._ids[part.start : part.stop]
        file, patches = self._files[item], step.batch.media.get(item)
        if (pads != step.tokenizer.media_pad).any():
            return self._tokens(part.start, part.stop) + _wrong("not all of these are media pads")
        name = f"file {items.media[item]}"
        if patches is None:
            return f"<figure>{_wrong(f'{name} could not be used')}</figure>"
        grid = (int(items.frames[item]), int(items.grid_h[item]), int(items.grid_w[item]))
        index, _ = step.source(self._read.sample)
        line = int(items.index_line[item])
        stored = int(index.item_width[line]), int(index.item_height[line])
        frame = frame_size(file.kind, file.draw, file.level, stored, step.request.limits)
        shapes = self._shapes(int(items.media[item]), frame)
        pictures = "".join(
            drawing(one, frame, shapes, self._src) for one in unpatchify(patches, grid)
        )
        facts = [
            f"{name}, {stored[0]} x {stored[1]} pixels",
            *([f"chunk {items.chunk[item]}"] if file.kind != KIND_IMAGE else []),
            *describe_draw(file.draw),
            f"seen as {frame[0]} x {frame[1]}",
            *([f"shrunk {file.level} times to fit the row"] if file.level else []),
            f"{len(pads)} tokens",
        ]
        caption = text(", ".join(facts)) + self._said(int(items.media[item]))
        return f"<figure>{pictures}<figcaption>{caption}</figcaption></figure>"

    def _written(self, media: int) -> Iterator[tuple[int, Mapping[str, Any], list[int] | None]]:
        """Yield (number, segment, coordinates) of each region of a file that the tokens contain."""
        for part in self._parts:
            if part.kind == "region" and self._regions[part.number]["media"] == media:
                ids = self._ids[part.start : part.stop].tolist()
                numbers = tokens.written_numbers(ids, self._step.tokenizer)
                yield part.number, self._regions[part.number], numbers

    def _shapes(self, media: int, frame: tuple[int, int]) -> list[Shape]:
        """Return the regions of a file at the coordinates in the tokens, in pixels of the frame."""
        shapes = []
        for number, region, numbers in self._written(media):
            if numbers and region["shape"] != "turn" and len(numbers) % 2 == 0:
                points = drawn_points(numbers, frame)
                shapes.append(Shape(region["shape"], points, number, region["label"]))
        return shapes

    def _said(self, media: int) -> str:
        """Return the list of a file's regions below its picture, including omitted regions."""
        lines, seen = [], set[int]()
        for number, region, numbers in self._written(media):
            seen.add(number)
            if numbers is None:
                lines.append(_wrong(f"region {number} spells no coordinates"))
                continue
            written_as = ",".join(f"{value:03d}" for value in numbers)
            what = f"{region['shape']}: {region['label']}[{written_as}]"
            mark = f'<span class="{colour_class(number)}">&#9632;</span>'
            lines.append(f"{mark} {text(what)}")
        for number, region in enumerate(self._regions):
            if region["media"] == media and number not in seen:
                what = f"{region['shape']}: {region['label']} left the frame, not written"
                lines.append(f"&#9633; {text(what)}")
        return "".join(f"<br>{line}" for line in lines)


def frame_size(
    kind: int, draw: Draw | None, level: int, stored: tuple[int, int], limits: PatchLimits
) -> tuple[int, int]:
    """Return (width, height) of an item as the model gets it, without padding.

    Args:
        kind: KIND_IMAGE or KIND_VIDEO.
        draw: random augmentation of the item; None without augmentation.
        level: number of times its limits were lowered to fit the row.
        stored: (width, height) of the file in pixels.
        limits: patch limits of the run.
    """
    lowered = limits_at(limits, level)
    width, height = (draw.out_width, draw.out_height) if draw else stored
    most = lowered.image if kind == KIND_IMAGE else lowered.frame
    return resized(width, height, most, lowered.side)


def drawn_points(numbers: Sequence[int], frame: tuple[int, int]) -> list[tuple[float, float]]:
    """Return pixel coordinates for numbers in thousandths, at the middle of each thousandth."""
    return [
        ((x + 0.5) / 1000 * frame[0], (y + 0.5) / 1000 * frame[1])
        for x, y in zip(numbers[::2], numbers[1::2])
    ]


def describe_draw(draw: Draw | None) -> list[str]:
    """Return a description of an image's augmentation in words; empty without augmentation."""
    if draw is None:
        return []
    left, top, right, bottom = draw.crop
    turned = (draw.height, draw.width) if draw.turns % 2 else (draw.width, draw.height)
    cut = (left, top, right, bottom) != (0, 0, *turned)
    scaled = (draw.out_width, draw.out_height) != (right - left, bottom - top)
    said = {
        "mirrored": draw.flip,
        f"turned by {90 * draw.turns} degrees": draw.turns,
        "warped": draw.affine is not None,
        f"cut to ({left}, {top}, {right}, {bottom})": cut,
        f"scaled to {draw.out_width} x {draw.out_height}": scaled,
        "colours changed": draw.colour is not None,
        f"JPEG quality {draw.jpeg}": draw.jpeg,
    }
    return [what for what, done in said.items() if done]


def _wrong(message: str) -> str:
    return f'<span class="wrong">{text(message)}</span>'
