"""Renders the tokens of a row as HTML; colours the tokens that the model learns to predict."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.collate import SampleLayout
from data_pipeline.text import Tokenizer
from launch.pages.html import text
from launch.pages.pictures import colour_class

# A UTF-8 character has at most four bytes, and a token has at least one.
_TOKENS_PER_CHARACTER = 4
_BROKEN = "\N{REPLACEMENT CHARACTER}"
_NUMBERS = re.compile(r"\[(\d{3}(?:,\d{3})*)\]$")


@dataclass(frozen=True)
class TokenRun:
    """A run of a sample's tokens that comes from one segment.

    Attributes:
        kind: "text", "region", or "media" (only the pads).
        start, stop: range of tokens, counted from the sample's BOS.
        number: index of the text or region in the document, or of the media item in the sample.
        note: text of the tooltip.
    """

    kind: str
    start: int
    stop: int
    number: int
    note: str = ""


def parts(
    segments: Sequence[Mapping[str, Any]], tokenizer: Tokenizer, layout: SampleLayout
) -> list[TokenRun]:
    """Map a sample's tokens to the segments of its document.

    Args:
        segments: segments of the document.
        tokenizer: tokenizer of the source.
        layout: layout of the sample in the plan.

    Returns:
        Runs in order, without overlap; tokens between runs are markup of media and samples.
    """
    if layout.part is not None:
        return [TokenRun("text", 1, layout.length - 1, 0, f"part {layout.part} of a longer text")]
    found: list[TokenRun] = []
    at, piece, texts, regions, items = 1, 0, 0, 0, 0
    for segment in segments:
        kind = segment["kind"]
        if kind == "text":
            wordings = segment.get("texts") or [segment["text"]]
            chosen = layout.variants[piece] if layout.variants else 0
            stop = at + len(tokenizer.encode(wordings[chosen]))
            note = f"wording {chosen + 1} of {len(wordings)}" if len(wordings) > 1 else ""
            found.append(TokenRun("text", at, stop, texts, note))
            at, texts, piece = stop, texts + 1, piece + 1
        elif kind == "region":
            numbers = layout.regions[regions]
            if numbers is not None:
                stop = at + tokenizer.region_length(segment["label"], len(numbers))
                note = f"{segment['shape']} in file {segment['media']}"
                found.append(TokenRun("region", at, stop, regions, note))
                at = stop
            regions, piece = regions + 1, piece + 1
        else:
            for _ in segment.get("timestamps", [None]):
                start, pads = layout.starts[items], layout.pads[items]
                found.append(TokenRun("media", start, start + pads, items))
                at, items, piece = start + pads + 1, items + 1, piece + 1
    return found


def written_numbers(ids: Sequence[int], tokenizer: Tokenizer) -> list[int] | None:
    """Return the coordinates in the tokens of a region, or None if there are none."""
    match = _NUMBERS.search(tokenizer.decode(ids))
    return [int(number) for number in match[1].split(",")] if match else None


def spans(
    ids: NDArray[np.int64],
    learnt: NDArray[np.bool_],
    wrong: NDArray[np.bool_],
    tokenizer: Tokenizer,
    region: int | None = None,
) -> str:
    """Return tokens as HTML; show several tokens that form one character as one.

    Args:
        ids: token ids, int64 [n].
        learnt: bool [n], True if the model is trained to predict the token.
        wrong: bool [n], True if the model is trained to predict a different token instead.
        tokenizer: tokenizer of the source.
        region: number of the tokens' region, which selects the colour; None outside of regions.
    """
    pieces = []
    for first, end in _characters(ids.tolist(), tokenizer):
        group = ids[first:end].tolist()
        # HTML allows no control characters.
        shown = "".join(c if c in "\n\t" or c >= " " else "\N{SYMBOL FOR NULL}"
                        for c in tokenizer.decode(group))  # fmt: skip
        classes = ["t"]
        classes += ["l"] * bool(learnt[first:end].any()) + ["w"] * bool(wrong[first:end].any())
        classes += ["s"] * (group[0] >= tokenizer.num_base)
        if region is not None:
            classes += ["r", colour_class(region)]
        name = " ".join(classes)
        title = " ".join(str(one) for one in group)
        pieces.append(f'<span class="{name}" title="{title}">{_visible(shown)}</span>')
    return "".join(pieces)


def _characters(ids: Sequence[int], tokenizer: Tokenizer) -> list[tuple[int, int]]:
    """Split tokens into the shortest runs that form whole characters: [(first, end), ...]."""
    found, first = [], 0
    while first < len(ids):
        end = first + 1
        if _BROKEN in tokenizer.decode(ids[first:end]):
            for longer in range(first + 2, min(first + _TOKENS_PER_CHARACTER, len(ids)) + 1):
                if _BROKEN not in tokenizer.decode(ids[first:longer]):
                    end = longer
                    break
        found.append((first, end))
        first = end
    return found


def _visible(shown: str) -> str:
    """Escape the text, and mark its line breaks."""
    return text(shown).replace("\n", "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}\n")
