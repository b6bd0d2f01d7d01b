"""The page of samples as stored in a source: documents, pictures, and their regions.

Nothing is augmented, and all wordings of a text are shown. Pictures are scaled to fit the page.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.decode import decode_items
from data_pipeline.index.columns import SourceIndex
from launch.pages.html import num_bytes, page, text
from launch.pages.pictures import Shape, colour, drawing, unpatchify
from moonvit3d.geometry import KIND_IMAGE, PatchLimits, grid, resized

# Patches, enough for the page; larger pictures are scaled down by training's own rule.
LIMITS = PatchLimits(image=1600, frame=400)

STYLE = """
.segment { margin: .5rem 0; } .kind { color: var(--muted); font-size: 12px; margin-right: .6rem; }
.learnt { background: var(--learnt); } .words { white-space: pre-wrap; overflow-wrap: anywhere; }
"""
LEGEND = (
    '<p class="note"><span class="learnt">Text on this ground</span> is learnt, other text is only '
    "read. Regions are drawn in the pixels of the file as stored.</p>"
)


@dataclass(frozen=True)
class StoredSample:
    """A sample as stored in its shard.

    Attributes:
        number: in the source's index.
        document: the parsed JSON.
        files: number of a media file -> its bytes.
    """

    number: int
    document: Mapping[str, Any]
    files: Mapping[int, bytes]


def samples_page(index: SourceIndex, samples: Sequence[StoredSample], title: str) -> str:
    """Return the page of some samples of a source."""
    body = [LEGEND]
    for sample in samples:
        body += _sample(index, sample)
    return page(title, body, STYLE)


def _sample(index: SourceIndex, sample: StoredSample) -> Iterator[str]:
    at = sample.number
    shard = index.shards[index.shard[at]].key
    first, end = int(index.piece_ptr[at]), int(index.piece_ptr[at + 1])
    tokens = int(index.piece_tokens[first:end].sum())
    facts = [f"sample {at}", shard, f"{tokens} tokens without pads"]
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
            yield _medium(index, sample, segment, regions)
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
    mark = f'<span style="color:{colour(number)}">&#9632;</span> '
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
) -> str:
    number = int(segment["file"].partition(".")[0])
    data = sample.files[number]
    first, end = (int(at) for at in index.item_ptr[sample.number : sample.number + 2])
    items = [item for item in range(first, end) if index.item_media[item] == number]
    width, height = int(index.item_width[items[0]]), int(index.item_height[items[0]])
    caption = f"{segment['file']}, {width} x {height} pixels, {num_bytes(len(data))}"
    if segment["kind"] == "video":
        caption += f", {len(items)} chunks at {', '.join(segment['timestamps'])}"
    try:
        pictures = _pictures(data, index, items)
    except ValueError as error:  # a medium that does not decode is one
        return f'<figure><span class="wrong">{text(f"{caption}: {error}")}</span></figure>'
    kind = int(index.item_kind[items[0]])
    limit = LIMITS.image if kind == KIND_IMAGE else LIMITS.frame
    frame = resized(width, height, limit, LIMITS.side)
    scale = frame[0] / width, frame[1] / height
    shapes = [
        Shape(
            region["shape"],
            [(x * scale[0], y * scale[1]) for x, y in region["points"]],
            place,
            region["label"],
        )
        for place, region in enumerate(regions)
        if region["media"] == number and region["shape"] != "turn"
    ]
    drawn = "".join(drawing(one[: frame[1], : frame[0]], frame, shapes) for one in pictures)
    return f"<figure>{drawn}<figcaption>{text(caption)}</figcaption></figure>"


def _pictures(data: bytes, index: SourceIndex, items: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
    """Yield every picture of a media file in order, uint8 [H, W, 3], decoded as in training."""
    kind = int(index.item_kind[items[0]])
    chunks = [int(index.item_chunk[item]) for item in items]
    shapes = [
        grid(kind, int(index.item_frames[item]), int(index.item_height[item]),
             int(index.item_width[item]), LIMITS)
        for item in items
    ]  # fmt: skip
    decoded = decode_items(data, kind, chunks, LIMITS, shapes)
    return (one for patches, shape in zip(decoded, shapes) for one in unpatchify(patches, shape))
