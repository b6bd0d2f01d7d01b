"""Ingest of one source: writes shards, index and manifest from samples.

Ingest computes everything that planning needs, once: token counts, pixel sizes, byte ranges and
checksums. It decodes every media file once. A file that does not decode is rejected here, with the
reason in `<name>/rejected.jsonl`, and so cannot fail in the middle of a run.

The manifest is written last and makes the source visible. Calling a killed ingest again resumes
it: finished shards stay, and the result has the same bytes.
"""

import json
import traceback
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import PurePath
from typing import Any

import pyarrow as pa

from data_pipeline.index.columns import CATEGORIES, SCHEMA, SourceIndex
from data_pipeline.index.erased import read_erased
from data_pipeline.index.manifest import (
    IndexMismatch,
    expect,
    manifest_key,
    read_index,
    read_manifest,
    refuse_finished,
    sources_at,
    write_index,
)
from data_pipeline.index.own_keys import is_shard
from data_pipeline.index.shards import check_source_name
from data_pipeline.ingest.append import appended, check_appendable
from data_pipeline.ingest.claim import Claim
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
from data_pipeline.store.open import MissingBucket, MissingKey, Store, StoreError
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
# Samples are sent to workers in batches of at most this many samples, or about this many bytes.
_BATCH, _BATCH_BYTES = 32, 4 << 20


# If the length of the input is unknown, `max_rejected` counts it as at least this many samples.
_FEW = 1000


class TooManyRejected(ValueError):
    """More samples were rejected than `max_rejected` allows."""


def ingest(
    samples: Iterable[CrudeSample | Pending] | Reader,
    store: Store,
    name: str,
    tokenizer: Tokenizer,
    shard_bytes: int = DEFAULT_SHARD_BYTES,
    *,
    category: str = "text",
    policy: IngestPolicy | None = None,
    append_to: str | None = None,
    max_rejected: float = 1.0,
    workers: int = 0,
    progress: Callable[[IngestProgress], None] | None = None,
    rejected: Callable[[Rejection], None] | None = None,
) -> SourceIndex:
    """Write a source: `<name>/000000.tar` ..., and the other files of docs/data_format.md.

    The same samples in the same order with the same tokenizer give the same bytes, independent of
    the number of workers and of restarts. Ingest checks at the end that every sample it read was
    either written or rejected.

    Args:
        samples: read once, in order; about three shards' bytes are in memory. If this is a Reader
            with an identity (all of `ingest.readers`, or `Listed`), a second call resumes a killed
            ingest; with any other iterable it starts from the beginning.
        store: root to write to.
        name: name of the source: letters, digits, '_' and '-'.
        tokenizer: counts the tokens; its name and hash are written to the manifest.
        shard_bytes: maximum size of a shard; a sample larger than that gets its own shard.
        category: one of `data_pipeline.index.columns.CATEGORIES`; selects the augmentation rules.
        policy: sizes above which a sample is rejected.
        append_to: name of a source in the store whose samples precede these in the new source. It
            must have the same category and tokenizer. Its shards are referenced, not copied.
        max_rejected: share of samples that may be rejected. Above it the ingest ends; the same
            call with a higher share resumes it.
        workers: processes that read, decode and count; 0 uses the calling process. With workers,
            the samples must not be of classes that the main script defines.
        progress: called after every shard, and a few times a second.
        rejected: called for every rejected sample, immediately.

    Raises:
        RuntimeError: a sample was read but neither written nor rejected.
        ValueError: bad name, category or shard size, a finished source of this name, an unfinished
            one with other arguments, a folder with shards of another source, or no sample left.
            NameTaken: another process is writing a source of this name. TooManyRejected: gives the
            numbers and the reasons.
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
    old, made_of = None, {"kind": "ingest", "parent": None}
    if append_to is not None:
        old = read_index(store, append_to)
        check_appendable(old, category, tokenizer)
        made_of = {"kind": "append", "source": append_to, "parent": old.content_hash}
        if request is not None:
            request["append to"] = old.content_hash
    journal = Journal(store, name, request)
    if not journal.begun():
        refuse_finished(store, name)  # before anything is written to its folder
    with Claim(store, name) as claim:
        if finished := _finished(store, name, journal):
            return finished
        _refuse_shards_of_others(store, name)
        if old is not None:  # check again under the claim: a collection may have begun before
            _refuse_changed(store, old)
        taken = set() if old is None else set(pa.array(old.key, pa.string()).to_pylist())
        shown = (progress, rejected, taken, read_erased(store))
        with ShardWriter(store, name, journal, claim, shard_bytes, *shown) as writer:
            given = _Given(reader, writer)
            if not writer.complete:
                units = given.read()
                with closing(_prepared(units, category, tokenizer, policy, workers)) as batches:
                    for cursor, outcome in chain.from_iterable(batches):
                        writer.add(cursor, outcome)
                        seen = reader.total or max(_FEW, writer.num_seen)
                        _check_rejected(name, writer.rejections, seen, max_rejected)
            parts, rejections = writer.finish()
        num_seen = len(rejections) + sum(len(part.keys) for part in parts)
        given.check(name, num_seen)
        claim.check()
        lines = (json.dumps(asdict(r), ensure_ascii=True) + "\n" for r in rejections)
        store.put(f"{name}/rejected.jsonl", "".join(lines).encode())
        if not parts:
            raise _nothing_left(name, rejections)
        _check_rejected(name, rejections, num_seen, max_rejected)
        index = merged(name, category, tokenizer, parts)
        if old is not None:
            index = appended(old, index)
        write_index(store, index, {**made_of, **(request or {})})
        journal.remove()
        return index


class _Given:
    """Counts the samples that a reader yields, including those of the killed ingest it resumes."""

    def __init__(self, reader: Reader, writer: ShardWriter) -> None:
        self._reader, self._cursor, self._count = reader, writer.cursor, writer.num_seen

    def read(self) -> "Iterator[Placed]":
        """Yield samples from the writer's cursor on."""
        for placed in self._reader.read(self._cursor):
            self._count += 1
            yield placed

    def check(self, name: str, num_seen: int) -> None:
        """Raise RuntimeError unless each sample was written or rejected with a reason."""
        total = self._count if self._reader.total is None else self._reader.total
        if not num_seen == self._count == total:
            raise RuntimeError(
                f"source {name!r}: {total:,} samples are in the input, {self._count:,} were read, "
                f"and {num_seen:,} were written or rejected; these must be equal, so samples were "
                "lost and the source is not finished. If the input changed meanwhile, delete "
                f"{name}/.ingest and ingest it again; otherwise please report it"
            )


def _refuse_shards_of_others(store: Store, name: str) -> None:
    """Refuse a folder in which another source has shards: they would be written over.

    Such a source was made of one of this name, which is gone or was not copied with it.

    Raises:
        ValueError: names the other source.
    """
    there = {key for key in store.list(f"{name}/") if is_shard(key)}
    for other in sources_at(store) if there else ():
        shards: list[dict[str, Any]] = []
        with suppress(MissingKey, IndexMismatch, ValueError):  # what is unsound nobody reads
            shards = read_manifest(store, other)["shards"]
        if lost := there & {shard["key"] for shard in shards}:
            raise ValueError(
                f"{store.uri}/{name}: source {other!r} has shards in this folder, such as "
                f"{min(lost)}, which would be written over; choose another name"
            )


def _refuse_changed(store: Store, old: SourceIndex) -> None:
    """Refuse to append to a source that has changed since it was read.

    Raises:
        IndexMismatch, MissingKey: the source was redacted or removed meanwhile.
    """
    found = read_manifest(store, old.name)["content_hash"]
    expect(f"{store.uri}/{old.name}", "content_hash", found, old.content_hash)


def _nothing_left(name: str, rejections: Sequence[Rejection]) -> ValueError:
    counts = sorted(Counter(r.reason for r in rejections).items())
    told = ", ".join(f"{count:,} x {reason}" for reason, count in counts) or "none"
    first = rejections[0] if rejections else None
    return ValueError(
        f"source {name!r}: no sample left to write; rejected: {told}"
        + (f"; the first is {first.key!r}: {first.reason}: {first.detail}" if first else "")
    )


def _check_rejected(name: str, rejections: Sequence[Rejection], samples: int, share: float) -> None:
    if len(rejections) <= share * samples:
        return
    reasons = Counter(r.reason for r in rejections).most_common()
    raise TooManyRejected(
        f"source {name!r}: {len(rejections):,} of {samples:,} samples rejected, the limit "
        f"(max-rejected) is {share:g}: "
        + ", ".join(f"{reason} {count:,}" for reason, count in reasons)
        + f"; the first: {rejections[0].key}: {rejections[0].detail}. What is done is kept: the "
        "same command with a higher limit goes on. For another input, delete "
        f"{name}/.ingest or choose another name"
    )


def _check_request(name: str, shard_bytes: int, category: str) -> None:
    check_source_name(name)
    if shard_bytes < 1 << 12:
        raise ValueError(f"shard_bytes {shard_bytes}: a shard holds at least 4096 bytes")
    if category not in CATEGORIES:
        raise ValueError(f"category is {category!r}; known are {', '.join(CATEGORIES)}")


def _finished(store: Store, name: str, journal: Journal) -> SourceIndex | None:
    """Return the index if a killed ingest had finished all but the cleanup, else None."""
    try:
        store.head(manifest_key(name))
    except (MissingKey, MissingBucket):
        return None
    if not (journal.kept and journal.found()):
        refuse_finished(store, name)
    index = read_index(store, name)
    journal.remove()
    return index


# Preparation in worker processes -----------------------------------------------------------------

Placed = tuple[Any, CrudeSample | Pending]  # (cursor, sample)


def _prepared(
    units: Iterable[Placed], category: str, tokenizer: Tokenizer, policy: IngestPolicy, workers: int
) -> Generator[list[tuple[Any, Outcome]], None, None]:
    batches = _batches(units) if workers else ([unit] for unit in units)
    return ordered_map(partial(_preparer, category, tokenizer, policy), batches, workers)


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
            return _rejection(key, *refusal.args)
        except (MemoryError, OSError, ImportError, StoreError) as error:
            error.add_note(f"while preparing sample {key!r}")
            raise  # caused by the machine, not by the sample
        except Exception as error:
            # Unforeseen, but caused by this sample: the ingest continues without it.
            return _rejection(key, "failed", _described(error))

    return lambda batch: [(cursor, one(unit)) for cursor, unit in batch]


def _described(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    file = PurePath(place.filename).name
    return f"{type(error).__name__}: {error} ({file}, line {place.lineno})"


def _rejection(key: object, reason: str, detail: str) -> Rejection:
    """Return a rejection whose key and detail are cut to a bounded length."""
    return Rejection(f"{key:.200}", reason, detail if len(detail) <= 1000 else f"{detail[:997]}...")
