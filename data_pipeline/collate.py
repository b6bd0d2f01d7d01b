"""Rows of token ids, labels and loss mask, from the samples' documents and the plan.

The layout of a sample is [bos] segments [eos]. A text segment is its encoding. A media item is its
prefix (a video chunk's has its timestamp), one media_pad per embedding, and media_end. The pads
come from the plan; everything else is counted again here and compared with it, because a row that
is one token off would put every embedding after it in the wrong place without any other sign.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.index import SourceIndex
from data_pipeline.plan import GlobalPlan
from data_pipeline.text import Tokenizer

Document = Sequence[Mapping[str, Any]]  # the "segments" of a sample's JSON


@dataclass(frozen=True, eq=False)
class RowBatch:
    """R rows of S tokens.

    Attributes:
        tokens: int64 [R, S]; the pad id fills what no sample covers.
        labels: int64 [R, S] the next token of the same sample, the pad id where there is none.
        loss_mask: bool [R, S] False in padding, at the last token of a sample, where the label is
            a media pad, and where it belongs to a text segment marked loss=false.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]


def sample_tokens(
    segments: Document, tokenizer: Tokenizer, pads: Sequence[int]
) -> tuple[NDArray[np.int64], NDArray[np.bool_], list[int]]:
    """Lay out one sample.

    Args:
        segments: the document's segments in order.
        tokenizer: of the index.
        pads: media-pad tokens of each item (image or video chunk) in order.

    Returns:
        tokens int64 [n], loss bool [n] (this token may be predicted), and the place of each item's
        first media pad.

    Raises:
        ValueError: an unknown kind of segment, or another number of items than of `pads`.
    """
    tokens, loss, starts = [tokenizer.bos], [False], []
    for segment in segments:
        if segment["kind"] == "text":
            ids = tokenizer.encode(segment["text"])
            tokens += ids
            loss += [bool(segment["loss"])] * len(ids)
            continue
        for prefix in _prefixes(segment, tokenizer):
            if len(starts) == len(pads):
                raise ValueError(f"more media items than the {len(pads)} of the index")
            num_pads = pads[len(starts)]
            tokens += prefix
            starts.append(len(tokens))
            tokens += [tokenizer.media_pad] * num_pads + [tokenizer.media_end]
            loss += [True] * len(prefix) + [False] * num_pads + [True]
    if len(starts) != len(pads):
        raise ValueError(f"{len(starts)} media items, but the index has {len(pads)}")
    tokens.append(tokenizer.eos)
    loss.append(True)
    return np.array(tokens, np.int64), np.array(loss, np.bool_), starts


def _prefixes(segment: Mapping[str, Any], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the tokens before the pads, for each item of a media segment."""
    if segment["kind"] == "image":
        return [tokenizer.image_prefix()]
    if segment["kind"] == "video":
        if "timestamps" not in segment:
            raise ValueError(f"video segment {segment['file']!r} has no 'timestamps' of its chunks")
        return [tokenizer.video_prefix(timestamp) for timestamp in segment["timestamps"]]
    raise ValueError(f"unknown segment kind {segment['kind']!r}; known are text, image, video")


def rows_batch(
    plan: GlobalPlan,
    rows: Sequence[int] | NDArray[np.integer],
    documents: Mapping[int, Document],
    tokenizer: Tokenizer,
    indices: Sequence[SourceIndex],
) -> RowBatch:
    """Build rows of a step.

    Args:
        plan: the step.
        rows: row numbers in the step, [R].
        documents: sample number in the plan -> segments, for every sample of those rows.
        tokenizer: of the indices.
        indices: sources as the plan numbers them (`Planner.indices`).

    Raises:
        ValueError: a sample does not have the tokens the index says; names source and sample key.
    """
    shape = (len(rows), plan.seq_len)
    tokens = np.full(shape, tokenizer.pad, np.int64)
    labels = np.full(shape, tokenizer.pad, np.int64)
    loss_mask = np.zeros(shape, np.bool_)
    for place, row in enumerate(rows):
        first, end = np.searchsorted(plan.samples.row, [row, row + 1])
        for sample in range(first, end):
            ids, loss = _checked(plan, sample, documents[sample], tokenizer, indices)
            start = plan.samples.start[sample]
            stop = start + ids.size
            tokens[place, start:stop] = ids
            labels[place, start : stop - 1] = ids[1:]
            loss_mask[place, start : stop - 1] = loss[1:]
    return RowBatch(tokens, labels, loss_mask)


def _checked(
    plan: GlobalPlan,
    sample: int,
    document: Document,
    tokenizer: Tokenizer,
    indices: Sequence[SourceIndex],
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Lay out a sample of the plan and compare it with the plan."""
    first, end = np.searchsorted(plan.items.sample, [sample, sample + 1])
    planned = plan.items.start[first:end] - plan.samples.start[sample]
    length = int(plan.samples.length[sample])
    fault = None
    try:
        ids, loss, starts = sample_tokens(
            document, tokenizer, plan.items.tokens[first:end].tolist()
        )
        if ids.size != length:
            fault = f"{ids.size} tokens, the index says {length}"
        elif starts != planned.tolist():
            fault = f"media pads begin at {starts}, the index says {planned.tolist()}"
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{_name(plan, sample, indices)}: {error!r}") from error
    if fault:
        raise ValueError(
            f"{_name(plan, sample, indices)}: {fault}; the index was made with another tokenizer "
            "or from other data: ingest the source again"
        )
    return ids, loss


def _name(plan: GlobalPlan, sample: int, indices: Sequence[SourceIndex]) -> str:
    index = indices[plan.samples.source[sample]]
    return f"source {index.name!r}, sample {index.key_of(plan.samples.index[sample])!r}"
