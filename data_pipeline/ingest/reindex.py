"""Reindexes a source with another tokenizer: writes a new index over the same shards.

Only the documents of the samples are read, because a tokenizer changes only the lengths of texts,
labels and timestamps. The old index stays unchanged, because runs may be reading it; the new index
is a separate source, whose manifest references the old shards.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import (
    IndexMismatch,
    read_index,
    refuse_finished,
    write_index,
)
from data_pipeline.index.reads import document_of, read_checked
from data_pipeline.index.shards import check_source_name
from data_pipeline.ingest.claim import Claim
from data_pipeline.ingest.ordered import ordered_map
from data_pipeline.ingest.prepare import count_numbers, item_prefix
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import Store
from data_pipeline.text import Tokenizer

_BATCH = 1024  # documents read and counted at a time
# Media up to this size between two documents are read too: a second request would cost more.
_MAX_GAP = 16 << 10

# (tokens of each piece of a sample, tokens of each further variant)
Counts = tuple[list[int], list[int]]


def reindex(
    store: Store,
    name: str,
    new_name: str,
    tokenizer: Tokenizer,
    *,
    workers: int = 0,
    threads: int = 16,
    progress: Callable[[int, int], None] | None = None,
) -> SourceIndex:
    """Write `<new_name>/index.parquet` and manifest.json for source `name` with a new tokenizer.

    Args:
        store: root that holds the source.
        name: name of the source.
        new_name: name of the new source, which training configs use from then on.
        tokenizer: tokenizer of the new source.
        workers: processes that count tokens; 0 uses the calling process.
        threads: concurrent requests.
        progress: called with (samples done, samples).

    Raises:
        ValueError: a bad name, or a source of the new name exists or is being written.
        MissingKey, IndexMismatch: the old source is missing or damaged.
    """
    check_source_name(new_name)
    refuse_finished(store, new_name)
    with Claim(store, new_name) as claim:
        index = read_index(store, name)
        pieces: list[list[int]] = []
        variants: list[list[int]] = []
        batches = documents(store, index, threads)
        for counts in ordered_map(partial(_counter, tokenizer), batches, workers):
            pieces += [piece for piece, _ in counts]
            variants += [variant for _, variant in counts]
            if progress:
                progress(len(pieces), index.num_samples)
        for sample in index.redacted:  # its text is gone, so the old counts stay
            for group, column, rows in (
                ("piece", index.piece_tokens, pieces),
                ("variant", index.variant_tokens, variants),
            ):
                begin, end = getattr(index, f"{group}_ptr")[sample : sample + 2]
                rows[sample] = column[begin:end].tolist()
        _check_lengths(index, "piece", pieces)
        _check_lengths(index, "variant", variants)
        new = replace(
            index,
            name=new_name,
            piece_tokens=np.array([n for row in pieces for n in row], np.int32),
            variant_tokens=np.array([n for row in variants for n in row], np.int32),
            tokenizer_name=tokenizer.name,
            tokenizer_hash=tokenizer.hash,
            index_sha256="",
            made_as="",
        )
        claim.check()
        made_of = {"kind": "reindex", "source": name, "parent": index.content_hash}
        write_index(store, new, made_of | {"tokenizer": tokenizer.hash})
        return new


def documents(store: Store, index: SourceIndex, threads: int) -> Iterator[list[bytes]]:
    """Yield the documents (JSON) of all samples in order, in batches, without their media."""
    for start in range(0, index.num_samples, _BATCH):
        samples = range(start, min(start + _BATCH, index.num_samples))
        documents = [document_of(index, sample) for sample in samples]
        yield read_checked(store, documents, threads, _MAX_GAP)


def _counter(tokenizer: Tokenizer) -> Callable[[list[bytes]], list[Counts]]:
    def count(documents: list[bytes]) -> list[Counts]:
        parsed = (parse_json(text, "a sample's document") for text in documents)
        return [count_tokens(document["segments"], tokenizer) for document in parsed]

    return count


def count_tokens(segments: Sequence[dict[str, Any]], tokenizer: Tokenizer) -> Counts:
    """Count the tokens of each piece, and of each variant after the first, in order."""
    pieces: list[int] = []
    variants: list[int] = []
    for segment in segments:
        kind = segment["kind"]
        if kind == "text":
            texts = segment["texts"] if "texts" in segment else [segment["text"]]
            first, *others = (len(tokenizer.encode(text)) for text in texts)
            pieces.append(first)
            variants += others
        elif kind == "region":
            count = count_numbers(segment["shape"], len(segment.get("points", ())))
            pieces.append(tokenizer.region_length(segment["label"], count))
        else:
            stamps = segment["timestamps"] if kind == "video" else [""]
            pieces += [item_prefix(tokenizer, stamp) for stamp in stamps]
    return pieces, variants


def _check_lengths(index: SourceIndex, group: str, rows: Sequence[Sequence[int]]) -> None:
    expected = np.diff(getattr(index, f"{group}_ptr"))
    found = np.array([len(row) for row in rows])
    if bad := np.flatnonzero(found != expected).tolist():
        raise IndexMismatch(
            f"source {index.name!r}, sample {index.key_of(bad[0])!r}: its document has "
            f"{found[bad[0]]} {group}s, the index {expected[bad[0]]}; they do not belong together: "
            "ingest the source again"
        )
