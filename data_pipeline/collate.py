"""Builds rows of token ids, labels and loss mask from the samples' documents and the plan.

A sample is laid out as [bos] segments [eos]. A text segment is the encoding of its text; if it has
variants, the plan chooses one. A media item is its prefix (with the timestamp for a video chunk),
one media_pad per embedding, and media_end. A region is its label and its numbers; a region outside
the frame is left out. The number of pads comes from the plan. This module counts everything else
again and compares it with the plan, because a row that is off by one token would silently misplace
every embedding after it.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.source import part_span
from data_pipeline.store.json_objects import parse_json
from data_pipeline.text import Tokenizer

Segments = Sequence[Mapping[str, Any]]  # the "segments" of a sample's JSON


@dataclass(frozen=True, eq=False)
class RowBatch:
    """R rows of S tokens.

    Attributes:
        tokens: int64 [R, S] token ids; the pad id fills positions without a sample.
        labels: int64 [R, S] next token of the same sample; the pad id if there is none.
        loss_mask: bool [R, S] False in padding, at the last token of a sample, where the label is
            a media pad, and where the label belongs to a segment marked loss=false.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]

    @classmethod
    def empty(cls, num_rows: int, seq_len: int, pad: int) -> "RowBatch":
        """Return rows of padding."""
        shape = (num_rows, seq_len)
        return cls(np.full(shape, pad), np.full(shape, pad), np.zeros(shape, np.bool_))

    def place(
        self, row: int, start: int, tokens: NDArray[np.int64], loss: NDArray[np.bool_]
    ) -> None:
        """Write a sample into a row: its tokens [n] and the mask of predicted tokens [n]."""
        stop = start + tokens.size
        self.tokens[row, start:stop] = tokens
        self.labels[row, start : stop - 1] = tokens[1:]
        self.loss_mask[row, start : stop - 1] = loss[1:]


@dataclass(frozen=True)
class SampleLayout:
    """Planned layout of one sample.

    Attributes:
        length: tokens in the row.
        pads: media-pad tokens of each item (image or video chunk) in order.
        starts: first pad of each item, counted from bos.
        part: part number of a split text; None for a whole sample.
        variants: index of the chosen text of each piece; if empty, the first texts are used.
        regions: numbers of each region; None for a region that is left out.
    """

    length: int
    pads: tuple[int, ...] = ()
    starts: tuple[int, ...] = ()
    part: int | None = None
    variants: tuple[int, ...] = ()
    regions: tuple[tuple[int, ...] | None, ...] = ()


LaidOut = tuple[NDArray[np.int64], NDArray[np.bool_], list[int]]


def sample_tokens(
    whole: LaidOut, layout: SampleLayout, seq_len: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return the tokens of a sample or of a part of it, after comparing them with the plan.

    Args:
        whole: the sample from `laid_out`.
        layout: the planned layout.
        seq_len: tokens in a row; determines the length of the parts of a split text.

    Returns:
        tokens int64 [n] and loss bool [n] (this token may be predicted).

    Raises:
        ValueError: the sample differs from the layout.
    """
    tokens, loss, starts = whole
    if layout.part is not None:
        span = part_span(layout.part, seq_len)
        tokens = np.concatenate([tokens[:1], tokens[1:-1][span], tokens[-1:]])
        # If the text continues in the next part, the model must not learn an end here.
        ends = (layout.part + 1) * (seq_len - 2) >= loss.size - 2
        loss = np.concatenate([loss[:1], loss[1:-1][span], [ends]])
    if tokens.size != layout.length:
        raise ValueError(f"{tokens.size} tokens, the index says {layout.length}")
    if starts != list(layout.starts):
        raise ValueError(f"media pads begin at {starts}, the index says {list(layout.starts)}")
    return tokens, loss


def segments_of(document: bytes) -> Segments:
    """Return the segments of a sample's JSON; `laid_out` checks their content.

    Raises:
        ValueError: the document is not the JSON of a sample.
    """
    try:
        return parse_json(document, "the JSON of a sample")["segments"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the JSON of a sample is of another form: {error!r}") from error


def laid_out(segments: Segments, tokenizer: Tokenizer, layout: SampleLayout) -> LaidOut:
    """Lay out a whole sample with the layout's pads, variants and regions.

    Returns:
        tokens int64 [n], loss bool [n], and the index of each item's first media pad.

    Raises:
        ValueError: media items, regions or variants differ from the layout, or a segment is
            unknown or malformed.
    """
    tokens, loss, starts = [tokenizer.bos], [False], []
    pads, regions = deque(layout.pads), deque(layout.regions)
    for piece, (kind, content, has_loss) in enumerate(_checked_pieces(segments)):
        if kind == "text":
            ids = tokenizer.encode(_wording(content, layout.variants, piece))
            tokens += ids
            loss += [has_loss] * len(ids)
        elif kind == "region":
            numbers = _next(regions, "regions", layout.regions)
            ids = [] if numbers is None else tokenizer.region(content, numbers)
            tokens += ids
            loss += [has_loss] * len(ids)
        else:
            num_pads = _next(pads, "media items", layout.pads)
            is_image = kind == "image"
            prefix = tokenizer.image_prefix() if is_image else tokenizer.video_prefix(content)
            tokens += prefix
            starts.append(len(tokens))
            tokens += [tokenizer.media_pad] * num_pads + [tokenizer.media_end]
            loss += [True] * len(prefix) + [False] * num_pads + [True]
    for what, left, named in (
        ("media items", pads, layout.pads),
        ("regions", regions, layout.regions),
    ):
        if left:
            raise ValueError(f"{len(named) - len(left)} {what}, but the index has {len(named)}")
    tokens.append(tokenizer.eos)
    loss.append(True)
    return np.array(tokens, np.int64), np.array(loss, np.bool_), starts


def _next(left: deque[Any], what: str, named: Sequence[Any]) -> Any:
    if not left:
        raise ValueError(f"more {what} than the {len(named)} of the index")
    return left.popleft()


def _wording(texts: Sequence[str], variants: Sequence[int], piece: int) -> str:
    if not variants:
        return texts[0]
    if piece >= len(variants) or variants[piece] >= len(texts):
        raise ValueError(f"other wordings of piece {piece} than the index has")
    return texts[variants[piece]]


def _checked_pieces(segments: Segments) -> list[tuple[str, Any, bool]]:
    """Return the pieces of a sample; raise ValueError if its JSON violates docs/data_format.md."""
    try:
        return list(_pieces(segments))
    except (AttributeError, KeyError, TypeError) as error:  # only malformed JSON raises these
        raise ValueError(f"a segment of the sample's JSON is of another form: {error!r}") from error


def _pieces(segments: Segments) -> Iterator[tuple[str, Any, bool]]:
    """Yield (kind, content, loss) of every piece; a video yields one piece per chunk."""
    for segment in segments:
        kind = segment["kind"]
        if kind == "text":
            texts = segment.get("texts") or [segment["text"]]
            yield kind, [_string(text) for text in texts], bool(segment["loss"])
        elif kind == "region":
            yield kind, _string(segment["label"]), bool(segment["loss"])
        elif kind == "image":
            yield kind, None, True
        elif kind == "video":
            for timestamp in segment["timestamps"]:
                yield kind, _string(timestamp), True
        else:
            raise ValueError(f"unknown segment kind {kind!r}; known are text, image, video, region")


def _string(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a text, found {value!r}")
    return value
