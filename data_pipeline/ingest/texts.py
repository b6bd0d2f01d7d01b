"""Training texts for a tokenizer, from raw inputs as ingest reads them or from finished sources.

Texts come in the order of the inputs, so the same inputs give the same tiktoken rank file. Media
are not read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from data_pipeline.index.columns import SourceIndex
from data_pipeline.ingest.reindex import documents
from data_pipeline.ingest.samples import (
    CrudeSample,
    IngestPolicy,
    Reader,
    Refused,
    RegionSegment,
    TextSegment,
)
from data_pipeline.store.json_objects import parse_json
from data_pipeline.store.open import Store

_POLICY = replace(IngestPolicy(), texts_only=True)


def sample_texts(sample: CrudeSample) -> Iterator[str]:
    """Yield the text of every text segment, including all variants, and every region's label."""
    for segment in sample.segments:
        if isinstance(segment, TextSegment):
            yield from segment.texts or (segment.text,)
        elif isinstance(segment, RegionSegment):
            yield segment.label


def input_texts(reader: Reader, skipped: Counter[str]) -> Iterator[str]:
    """Yield the texts of raw samples; count unusable samples by reason in `skipped`."""
    for _, found in reader.read():
        try:
            sample = found if isinstance(found, CrudeSample) else found.load(_POLICY)
            texts = list(sample_texts(sample))
            _check(texts)
        except Refused as error:
            skipped[str(error.args[0])] += 1
            continue
        yield from texts


def source_texts(store: Store, index: SourceIndex, threads: int = 16) -> Iterator[str]:
    """Yield the texts of a finished source.

    Raises:
        StoreError: a shard cannot be read. IndexMismatch: a document is damaged.
    """
    for batch in documents(store, index, threads):
        for document in batch:
            for segment in parse_json(document, f"{store.uri}/{index.name}")["segments"]:
                yield from _stored_texts(segment)


def _stored_texts(segment: dict[str, Any]) -> Sequence[str]:
    if segment["kind"] == "text":
        return segment["texts"] if "texts" in segment else [segment["text"]]
    return [segment["label"]] if segment["kind"] == "region" else []


def _check(texts: Sequence[object]) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise Refused("bad text", f"{text!r:.60} is not a text")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise Refused("not UTF-8", str(error)) from None


def at_most(texts: Iterable[str], num_bytes: int) -> Iterator[str]:
    """Yield texts up to a total of `num_bytes` UTF-8 bytes; the last text is cut."""
    for text in texts:
        data = text.encode()
        if len(data) >= num_bytes:
            yield data[:num_bytes].decode(errors="ignore")
            return
        num_bytes -= len(data)
        yield text
