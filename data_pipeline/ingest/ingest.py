"""Samples to a source: shards, index and manifest, so that training never has to look twice.

Everything that planning needs is found out here, once: token counts, pixel sizes, byte ranges and
checksums. Every medium is decoded once; what does not decode is refused here, with the reason in
`<name>/rejected.jsonl`, and not in the middle of a run.

A source becomes visible with its manifest, which is put last. An ingest that is killed is taken up
again by calling it again: finished shards stay, and the result is the same bytes.
"""

import json
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict
from itertools import chain
from typing import Any

from data_pipeline.index.columns import CATEGORIES, SCHEMA, SourceIndex
from data_pipeline.index.manifest import manifest_key, read_index, write_index
from data_pipeline.index.shards import check_source_name
from data_pipeline.ingest.journal import Journal
from data_pipeline.ingest.ordered import ordered_map
from data_pipeline.ingest.parts import merged
from data_pipeline.ingest.prepare import prepare
from data_pipeline.ingest.samples import (
    CrudeSample,
    ImageSegment,
    IngestPolicy,
    Listed,
    Pending,
    Reader,
    Refused,
    RegionSegment,
    Rejection,
    Segment,
    TextSegment,
    VideoSegment,
)
from data_pipeline.ingest.shard_writer import IngestProgress, Outcome, ShardWriter
from data_pipeline.store.open import MissingBucket, MissingKey, Store
from data_pipeline.text import Tokenizer

__all__ = [
    "CrudeSample",
    "ImageSegment",
    "IngestPolicy",
    "IngestProgress",
    "Listed",
    "RegionSegment",
    "Rejection",
    "Segment",
    "TextSegment",
    "VideoSegment",
    "ingest",
]

DEFAULT_SHARD_BYTES = 256 << 20
# Samples travel to workers in batches of so many, or of so many bytes.
_BATCH, _BATCH_BYTES = 32, 4 << 20


def ingest(
    samples: Iterable[CrudeSample | Pending] | Reader,
    store: Store,
    name: str,
    tokenizer: Tokenizer,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    category: str = "text",
    policy: IngestPolicy | None = None,
    workers: int = 0,
    progress: Callable[[IngestProgress], None] | None = None,
    rejected: Callable[[Rejection], None] | None = None,
) -> SourceIndex:
    """Write a source: `<name>/000000.tar` ..., rejected.jsonl, index.parquet, manifest.json.

    The same samples in the same order with the same tokenizer give the same bytes, whatever the
    number of workers, and whether or not the ingest was killed and called again.

    Args:
        samples: read once, in order; about three shards' bytes are in memory. A Reader with an
            identity (all of `ingest.readers`, or `Listed`) is taken up where a killed ingest
            left it; anything else starts again.
        store: where to write.
        name: name of the source, letters, digits, '_' and '-'.
        tokenizer: counts the tokens; its name and hash go into the manifest.
        shard_bytes: largest size of a shard (one larger sample still makes a shard of its own).
        category: one of `data_pipeline.index.columns.CATEGORIES`; rules of augmentation go by it.
        policy: sizes above which a sample is rejected.
        workers: processes that read, decode and count; 0 does it here. A script that asks for them
            needs the usual `if __name__ == "__main__":`.
        progress: called after every shard, and a few times a second.
        rejected: called for every rejected sample, as it happens.

    Raises:
        ValueError: bad name, category or shard size, a finished source of this name, an unfinished
            one with other arguments, or no sample left.
    """
    policy = policy or IngestPolicy()
    reader = samples if isinstance(samples, Reader) else Listed(samples)
    request = None
    if reader.identity is not None:
        request = {
            "schema": SCHEMA,
            "input": reader.identity,
            "category": category,
            "tokenizer": tokenizer.hash,
            "shard bytes": shard_bytes,
            "policy": asdict(policy),
        }
    _check_request(name, shard_bytes, category)
    journal = Journal(store, name, request)
    if finished := _finished(store, name, journal):
        return finished
    with ShardWriter(store, name, journal, shard_bytes, progress, rejected) as writer:
        if not writer.complete:
            units = reader.read(writer.cursor)
            with closing(_prepared(units, category, tokenizer, policy, workers)) as batches:
                for cursor, outcome in chain.from_iterable(batches):
                    writer.add(cursor, outcome)
        parts, rejections = writer.finish()
    lines = (json.dumps(asdict(r), ensure_ascii=True) + "\n" for r in rejections)
    store.put(f"{name}/rejected.jsonl", "".join(lines).encode())
    if not parts:
        counts = dict(sorted(Counter(r.reason for r in rejections).items()))
        raise ValueError(
            f"source {name!r}: no sample left to write; rejected: {counts or 'none'}"
            + (f", first: {rejections[0]}" if rejections else "")
        )
    index = merged(name, category, tokenizer, parts)
    write_index(store, index)
    journal.remove()
    return index


def _check_request(name: str, shard_bytes: int, category: str) -> None:
    check_source_name(name)
    if shard_bytes < 1 << 12:
        raise ValueError(f"shard_bytes {shard_bytes}: a shard holds at least 4096 bytes")
    if category not in CATEGORIES:
        raise ValueError(f"category is {category!r}; known are {', '.join(CATEGORIES)}")


def _finished(store: Store, name: str, journal: Journal) -> SourceIndex | None:
    """The index, if all that a killed ingest had left to do was to tidy up."""
    try:
        store.head(manifest_key(name))
    except (MissingKey, MissingBucket):
        return None
    if journal.kept and journal.found():
        index = read_index(store, name)
        journal.remove()
        return index
    raise ValueError(
        f"{store.uri}/{name}: a finished source of this name exists, and runs may be reading it; "
        "choose another name, or delete the folder first"
    )


# Preparing, in other processes -------------------------------------------------------------------

Placed = tuple[Any, CrudeSample | Pending]  # with its cursor


def _prepared(
    units: Iterable[Placed], category: str, tokenizer: Tokenizer, policy: IngestPolicy, workers: int
) -> Generator[list[tuple[Any, Outcome]], None, None]:
    batches = _batches(units) if workers else ([unit] for unit in units)
    return ordered_map(_preparer, (category, tokenizer, policy), batches, workers)


def _batches(units: Iterable[Placed]) -> Iterator[list[Placed]]:
    batch: list[Placed] = []
    size = 0
    for cursor, unit in units:
        batch.append((cursor, unit))
        size += unit.size
        if len(batch) == _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _preparer(
    category: str, tokenizer: Tokenizer, policy: IngestPolicy
) -> Callable[[list[Placed]], list[tuple[Any, Outcome]]]:
    def one(unit: CrudeSample | Pending) -> Outcome:
        key = unit.key
        try:
            sample = unit if isinstance(unit, CrudeSample) else unit.load(policy)
            key = sample.key
            return prepare(sample, category, tokenizer, policy)
        except Refused as refusal:
            return Rejection(str(key), *refusal.args)
        except Exception as error:
            error.add_note(f"while preparing sample {key!r}")
            raise

    return lambda batch: [(cursor, one(unit)) for cursor, unit in batch]
