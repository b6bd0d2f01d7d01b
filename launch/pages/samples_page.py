"""The page of samples as stored in a source: documents, pictures, and their regions.

The page shows all wordings of a text and no augmentation. It scales pictures to fit.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.decode import Decode, decode_items
from data_pipeline.index.columns import SourceIndex
from launch.pages.html import num_bytes, page, text
from launch.pages.pictures import Shape, colour_class, data_uri, drawing, unpatchify
from moonvit3d.geometry import KIND_IMAGE, PatchLimits, grid, resized

# Enough patches for the page; larger pictures are scaled down by the same rule as in training.
LIMITS = PatchLimits(image=1600, frame=400)

LEGEND = (
    '<p class="note"><span class="learnt">Text on this ground</span> is learnt, other text is only '
    "read. Regions are drawn in the pixels of the file as stored.</p>"
)


@dataclass(frozen=True)
class StoredSample:
    """A sample as stored in its shard.

    Attributes:
        number: number of the sample in the given index.
        document: parsed JSON document.
        files: {number of a media file: its bytes}; empty if the page refers to files by address.
        before: number of samples before the index, if the index is a part of the source.
    """

    number: int
    document: Mapping[str, Any]
    files: Mapping[int, bytes] = field(default_factory=dict)
    before: int = 0


@dataclass(frozen=True)
class Medium:
    """A media file of a sample.

    Attributes:
        number: number of the file in the sample.
        items: lines of its items in the index.
        name: file name, such as "0.png".
        size: (width, height) in pixels, as stored.
        shapes: regions of the file, in stored pixels.
    """

    number: int
    items: Sequence[int]
    name: str
    size: tuple[int, int]
    shapes: Sequence[Shape]


ShowMedium = Callable[[StoredSample, Medium], str]
"""Draws a media file with its regions; raises a ValueError if that is not possible."""


def samples_page(index: SourceIndex, samples: Sequence[StoredSample], title: str) -> str:
    """Return the page of some samples of a source."""
    return page(title, samples_body(index, samples, partial(_decoded, index)))


def samples_body(
    index: SourceIndex, samples: Sequence[StoredSample], show: ShowMedium
) -> Iterator[str]:
    """Yield the body of the page as HTML.

    Args:
        index: index of the source or of a part of it.
        samples: samples to show.
        show: draws a media file.
    """
    yield LEGEND
    for sample in samples:
        yield from _sample(index, sample, show)


def _sample(index: SourceIndex, sample: StoredSample, show: ShowMedium) -> Iterator[str]:
    at = sample.number
    shard = index.shards[index.shard[at]].key
    first, end = int(index.piece_ptr[at]), int(index.piece_ptr[at + 1])
    tokens = int(index.piece_tokens[first:end].sum())
    facts = [f"sample {at + sample.before}", shard, f"{tokens} tokens without pads"]
    facts += [name for name in ("flip_ok", "turn_ok") if getattr(index, name)[at]]
    yield (
        f"<article>\n<header><b>{text(index.name)}</b> ({text(index.category)}) "
        f"<b>{text(index.key_of(at))}</b> &middot; {text(' · '.join(facts))}</header>\n<div>"
    )
    regions: list[Mapping[str, Any]] = [
        segment for segment in sample.document["segments"] if segment["kind"] == "region"
    ]
    seen = 0
    for segment in sample.document["segments"]:
        if segment["kind"] == "text":
            yield from _text(segment)
        elif segment["kind"] == "region":
            yield _region(segment, seen)
            seen += 1
        else:
            yield _medium(index, sample, segment, regions, show)
    meta = json.dumps(sample.document["meta"], ensure_ascii=False, indent=1)
    yield f"<details><summary>meta</summary><pre>{text(meta)}</pre></details></div>\n</article>"


def _text(segment: Mapping[str, Any]) -> Iterator[str]:
    wordings = segment.get("texts") or [segment["text"]]
    for number, words in enumerate(wordings):
        kind = f"text {number + 1}/{len(wordings)}" if len(wordings) > 1 else "text"
        yield _line(kind, words, segment["loss"])


def _region(segment: Mapping[str, Any], number: int) -> str:
    turn = segment["shape"] == "turn"
    place = f"{segment['degrees']} degrees" if turn else json.dumps(segment["points"])
    mark = f'<span class="{colour_class(number)}">&#9632;</span> '
    said = f"{segment['label']}  {place} in file {segment['media']}"
    return _line(segment["shape"], said, segment["loss"], mark)


def _line(kind: str, words: str, learnt: bool, mark: str = "") -> str:
    name = "words learnt" if learnt else "words"
    return (
        f'<div class="segment">{mark}<span class="kind">{text(kind)}</span>'
        f'<span class="{name}">{text(words)}</span></div>'
    )


def _medium(
    index: SourceIndex,
    sample: StoredSample,
    segment: Mapping[str, Any],
    regions: Sequence[Mapping[str, Any]],
    show: ShowMedium,
) -> str:
    number = int(segment["file"].partition(".")[0])
    first, end = (int(at) for at in index.item_ptr[sample.number : sample.number + 2])
    items = [item for item in range(first, end) if index.item_media[item] == number]
    width, height = int(index.item_width[items[0]]), int(index.item_height[items[0]])
    size = int(index.item_length[items[0]])
    caption = f"{segment['file']}, {width} x {height} pixels, {num_bytes(size)}"
    if segment["kind"] == "video":
        caption += f", {len(items)} chunks at {', '.join(segment['timestamps'])}"
    shapes = [
        Shape(region["shape"], [(x, y) for x, y in region["points"]], place, region["label"])
        for place, region in enumerate(regions)
        if region["media"] == number and region["shape"] != "turn"
    ]
    try:
        drawn = show(sample, Medium(number, items, segment["file"], (width, height), shapes))
    except ValueError as error:  # such as a file that does not decode
        return f'<figure><span class="wrong">{text(f"{caption}: {error}")}</span></figure>'
    return f"<figure>{drawn}<figcaption>{text(caption)}</figcaption></figure>"


def _decoded(index: SourceIndex, sample: StoredSample, medium: Medium) -> str:
    """Draw every picture of a media file, decoded as in training; this is a `ShowMedium`."""
    pictures = pictures_of(sample.files[medium.number], index, medium.items)
    kind = int(index.item_kind[medium.items[0]])
    limit = LIMITS.image if kind == KIND_IMAGE else LIMITS.frame
    frame = resized(*medium.size, limit, LIMITS.side)
    across, down = frame[0] / medium.size[0], frame[1] / medium.size[1]
    shapes = [
        replace(shape, points=[(x * across, y * down) for x, y in shape.points])
        for shape in medium.shapes
    ]
    return "".join(drawing(one, frame, shapes, data_uri) for one in pictures)


def pictures_of(
    data: bytes,
    index: SourceIndex,
    items: Sequence[int],
    limits: PatchLimits = LIMITS,
    decode: Decode = decode_items,
) -> Iterator[NDArray[np.uint8]]:
    """Return an iterator over the pictures of some items of a media file, scaled as in training.

    Args:
        data: bytes of the whole file.
        index: index of the source or of a part of it.
        items: lines of the items in the index.
        limits: patch limits that pictures are scaled down to.
        decode: decodes the file, possibly in another process.

    Returns:
        Pictures in order, without padding, uint8 [H, W, 3].

    Raises:
        ValueError: the file does not decode, or does not match the index.
    """
    kind = int(index.item_kind[items[0]])
    width, height = int(index.item_width[items[0]]), int(index.item_height[items[0]])
    frame = resized(
        width, height, limits.image if kind == KIND_IMAGE else limits.frame, limits.side
    )
    chunks = [int(index.item_chunk[item]) for item in items]
    shapes = [
        grid(kind, int(index.item_frames[item]), int(index.item_height[item]),
             int(index.item_width[item]), limits)
        for item in items
    ]  # fmt: skip
    decoded = decode(data, kind, chunks, limits, shapes)
    return (
        one[: frame[1], : frame[0]]
        for patches, shape in zip(decoded, shapes)
        for one in unpatchify(patches, shape)
    )
