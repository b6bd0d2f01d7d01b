"""One sample in several epochs side by side, as the augmentation of a run changes it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.decode import Decode, decode_items
from data_pipeline.plan.layout import limits_at
from data_pipeline.plan.source import Drawn, Source
from data_pipeline.plan.variation import Detail
from launch.pages.html import text
from launch.pages.pictures import Shape, Src, colour_class, drawing, unpatchify
from launch.pages.rows_page import describe_draw, drawn_points, frame_size
from moonvit3d.geometry import KIND_IMAGE, PatchLimits


def draws_body(
    source: Source,
    sample: int,
    document: Mapping[str, Any],
    file: Callable[[int], bytes],
    limits: PatchLimits,
    epochs: Sequence[int],
    src: Src,
    decode: Decode = decode_items,
) -> Iterator[str]:
    """Yield the draws of a sample, as HTML.

    Args:
        source: source as planned by a run.
        sample: number of the sample in the source.
        document: document of the sample.
        file: returns the bytes of an image by its number; called for every use, so that only one
            image is in memory.
        limits: patch limits of the run.
        epochs: epochs to show.
        src: stores the pictures.
        decode: decodes an image, possibly in another process.

    Raises:
        ValueError: the run leaves the sample out, or an image does not decode.
    """
    which = np.full(len(epochs), sample)
    drawn = source.in_epochs(which, np.array(epochs))
    details = source.variation.details(which, np.array(epochs), drawn.varied)
    segments = [one for one in document["segments"] if one["kind"] == "region"]
    yield '<div class="draws">'
    for place, epoch in enumerate(epochs):
        told = text(_facts(drawn, place))
        yield f"<article>\n<header><b>epoch {epoch}</b> &middot; {told}</header>\n<div>"
        for at in range(*(int(end) for end in drawn.layout.item_ptr[place : place + 2])):
            line = int(drawn.layout.item[at])
            if int(source.index.item_kind[line]) == KIND_IMAGE:
                number, level = int(source.index.item_media[line]), int(drawn.level[place])
                t, h, w = (int(side) for side in drawn.layout.grid[at])
                lowered, draw = limits_at(limits, level), details[place].draws.get(number)
                patches = decode(file(number), KIND_IMAGE, [0], lowered, [(t, h, w)], draw)[0]
                pixels = unpatchify(patches, (t, h, w))[0]
                stored = int(source.index.item_width[line]), int(source.index.item_height[line])
                frame = frame_size(KIND_IMAGE, draw, level, stored, limits)
                yield _picture(pixels, number, frame, details[place], segments, src)
        yield from _wordings(document["segments"], details[place])
        yield "</div>\n</article>"
    yield "</div>"


def _facts(drawn: Drawn, place: int) -> str:
    told = [f"{int(drawn.layout.length[place])} tokens"]
    told.append("augmented" if drawn.varied[place] else "as stored")
    if level := int(drawn.level[place]):
        told.append(f"shrunk {level} times to fit the row")
    return " · ".join(told)


def _picture(
    pixels: NDArray[np.uint8],
    number: int,
    frame: tuple[int, int],
    detail: Detail,
    segments: Sequence[Mapping[str, Any]],
    src: Src,
) -> str:
    draw = detail.draws.get(number)
    shapes, lines = list[Shape](), list[str]()
    for place, (segment, numbers) in enumerate(zip(segments, detail.regions, strict=True)):
        if segment["media"] != number:
            continue
        what = f"{segment['shape']}: {segment['label']}"
        if numbers is None:
            lines.append(f"&#9633; {text(what)} left the frame, not written")
            continue
        written = ",".join(f"{value:03d}" for value in numbers)
        mark = f'<span class="{colour_class(place)}">&#9632;</span>'
        lines.append(f"{mark} {text(what)}[{written}]")
        if segment["shape"] != "turn":
            points = drawn_points(numbers, frame)
            shapes.append(Shape(segment["shape"], points, place, segment["label"]))
    told = [f"file {number}", *describe_draw(draw), f"seen as {frame[0]} x {frame[1]}"]
    caption = "<br>".join([text(", ".join(told)), *lines])
    drawn = drawing(pixels, frame, shapes, src)
    return f"<figure>{drawn}<figcaption>{caption}</figcaption></figure>"


def _wordings(segments: Sequence[Mapping[str, Any]], detail: Detail) -> Iterator[str]:
    """Yield the chosen wording of each text that has several."""
    piece = 0
    for segment in segments:
        if segment["kind"] == "text" and (wordings := segment.get("texts")):
            chosen = detail.variants[piece]
            yield (
                f'<p><span class="kind">wording {chosen + 1}/{len(wordings)}</span>'
                f'<span class="words">{text(wordings[chosen])}</span></p>'
            )
        piece += len(segment.get("timestamps", [None]))
