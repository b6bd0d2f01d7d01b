"""Rows of token ids, labels and loss mask, from the samples' documents and what the plan says.

The layout of a sample is [bos] segments [eos]. A text segment is its encoding; of variants the
plan's choice. A media item is its prefix (a video chunk's has its timestamp), one media_pad per
embedding, and media_end. A region is its label and its numbers; one that left the frame is left
out. The pads come from the plan; everything else is counted again here and compared with it,
because a row that is one token off would put every embedding after it in the wrong place without
any other sign.
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
        tokens: int64 [R, S]; the pad id fills what no sample covers.
        labels: int64 [R, S] the next token of the same sample, the pad id where there is none.
        loss_mask: bool [R, S] False in padding, at the last token of a sample, where the label is
            a media pad, and where it belongs to a segment marked loss=false.
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
        """Write a sample into a row: tokens [n], and whether each may be predicted [n]."""
        stop = start + tokens.size
        self.tokens[row, start:stop] = tokens
        self.labels[row, start : stop - 1] = tokens[1:]
        self.loss_mask[row, start : stop - 1] = loss[1:]


@dataclass(frozen=True)
class SampleLayout:
    """What the plan says of one sample.

    Attributes:
        length: tokens in the row.
        pads: media-pad tokens of each item (image or video chunk) in order.
        starts: first pad of each item, counted from bos.
        part: which part of a split text; None for a whole sample.
        variants: which text of each piece; empty takes the first ones.
        regions: the numbers of each region, None for one that is left out.
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
    """Take a sample, or a part of it, and compare it with the plan.

    Args:
        whole: the sample from `laid_out`.
        layout: of the plan.
        seq_len: tokens in a row; what a split text is cut by.

    Returns:
        tokens int64 [n] and loss bool [n] (this token may be predicted).

    Raises:
        ValueError: the sample is not what the layout says.
    """
    tokens, loss, starts = whole
    if layout.part is not None:
        span = part_span(layout.part, seq_len)
        tokens = np.concatenate([tokens[:1], tokens[1:-1][span], tokens[-1:]])
        # The text goes on in the next part: its end is not to be learnt here.
        ends = (layout.part + 1) * (seq_len - 2) >= loss.size - 2
        loss = np.concatenate([loss[:1], loss[1:-1][span], [ends]])
    if tokens.size != layout.length:
        raise ValueError(f"{tokens.size} tokens, the index says {layout.length}")
    if starts != list(layout.starts):
        raise ValueError(f"media pads begin at {starts}, the index says {list(layout.starts)}")
    return tokens, loss


def segments_of(document: bytes) -> Segments:
    """Return the segments of a sample's JSON; `laid_out` checks what they hold.

    Raises:
        ValueError: it is no JSON of a sample.
    """
    try:
        return parse_json(document, "the JSON of a sample")["segments"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"the JSON of a sample is of another form: {error!r}") from error


def laid_out(segments: Segments, tokenizer: Tokenizer, layout: SampleLayout) -> LaidOut:
    """Lay out a whole sample by the layout's pads, variants and regions.

    Returns:
        tokens int64 [n], loss bool [n], and the place of each item's first media pad.

    Raises:
        ValueError: other media items, regions or wordings than the layout has, or a segment that
            is unknown or of another form.
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
    """Return the pieces of a sample; ValueError: its JSON is not as docs/data_format.md has it."""
    try:
        return list(_pieces(segments))
    except (AttributeError, KeyError, TypeError) as error:  # of the JSON: nothing else is here
        raise ValueError(f"a segment of the sample's JSON is of another form: {error!r}") from error


def _pieces(segments: Segments) -> Iterator[tuple[str, Any, bool]]:
    """Yield (kind, content, loss) of every piece: a video gives one for each of its chunks."""
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
