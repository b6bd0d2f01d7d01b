"""Reads, decodes and lays out the rows and items of a step that one process needs.

    plan + needs -> StepRequest (a few numbers for each sample and file)        resolve
    StepRequest -> ranged reads -> rows of tokens, patches of media             Fetcher

A request is self-contained: another process with a store and a tokenizer can run it without the
plan or an index.

Bytes whose checksum differs from the index are read again, directly from the store. If they are
still wrong, or an item does not decode, the sample is reported as unusable and the step continues.
If samples are redacted during a run, their shards get new names, and reads continue under these.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from data_pipeline.augment.draws import Draw
from data_pipeline.collate import (
    LaidOut,
    RowBatch,
    SampleLayout,
    laid_out,
    sample_tokens,
    segments_of,
)
from data_pipeline.decode import Decode, decode_items
from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.index.reads import Reading, document_of, medium_of, read_parts
from data_pipeline.plan.layout import limits_at
from data_pipeline.plan.planner import GlobalPlan, Planner
from data_pipeline.plan.variation import Detail
from data_pipeline.store.open import Span, Store
from data_pipeline.text import Tokenizer
from moonvit3d.geometry import PatchLimits
from moonvit3d.media import MediaError

# Cache size for split texts, in tokens: a book is encoded once instead of once per row.
_KEPT_TOKENS = 8 << 20
_PATCH_BYTES = 3 * 14 * 14
_TOKEN_BYTES = 8 + 8 + 1  # token, label, loss mask


@dataclass(frozen=True, eq=False)
class Needs:
    """Rows and items of a plan that one process needs, as numbers in the plan, int [k] each."""

    rows: NDArray[np.integer]
    items: NDArray[np.integer]


def everything(plan: GlobalPlan) -> Needs:
    """Return needs with all rows and items, for a single-process run."""
    return Needs(np.arange(plan.num_rows), np.arange(len(plan.items)))


@dataclass(frozen=True)
class TextRead:
    """Read of one sample's document, with its target in the rows.

    Attributes:
        span, crc: bytes of the document in its shard, and their CRC-32.
        name: source and sample key, for messages.
        sample: number of the sample in the step.
        row, start: row of the request, first token in that row.
        layout: planned layout of the sample's tokens, media and regions.
    """

    span: Span
    crc: int
    name: str
    sample: int
    row: int
    start: int
    layout: SampleLayout


@dataclass(frozen=True)
class FileRead:
    """Read of one media file, with the needed items of the file.

    Attributes:
        span, crc: bytes of the file in its shard, and their CRC-32.
        name: source, sample key and file, for messages.
        sample: number of the sample in the step.
        kind: KIND_IMAGE or KIND_VIDEO.
        items, chunks, grids: for each needed item, its number in the step, its chunk of the video,
            and its patch grid (frames, height, width).
        level: shrink level.
        draw: augmentation of the file; None for none.
    """

    span: Span
    crc: int
    name: str
    sample: int
    kind: int
    items: tuple[int, ...]
    chunks: tuple[int, ...]
    grids: tuple[tuple[int, int, int], ...]
    level: int
    draw: Draw | None


@dataclass(frozen=True, eq=False, repr=False)
class StepRequest:
    """All reads of a step for one process; `row_ids` holds its row numbers, int64 [R]."""

    step: int
    seq_len: int
    limits: PatchLimits
    row_ids: NDArray[np.int64]
    texts: tuple[TextRead, ...]
    files: tuple[FileRead, ...]

    def __repr__(self) -> str:
        counts = f"{len(self.texts)} texts, {len(self.files)} files"
        return f"StepRequest(step {self.step + 1}, {counts})"

    @property
    def num_bytes(self) -> int:
        """Total size in bytes of the resulting rows and patches and of the bytes read."""
        spans = {each.span for each in (*self.texts, *self.files)}
        read = sum(span.length for span in spans)
        patches = sum(t * h * w for file in self.files for t, h, w in file.grids)
        return self.row_ids.size * self.seq_len * _TOKEN_BYTES + patches * _PATCH_BYTES + read


@dataclass(frozen=True)
class BadSample:
    """An unusable sample of the plan with the reason; `item` names the bad item, if any."""

    sample: int
    reason: str
    item: int | None = None


@dataclass(frozen=True, eq=False)
class Fetched:
    """Result of a request.

    Attributes:
        rows: tokens of the requested rows; None if no rows were requested.
        media: item number in the plan -> uint8 patches [L, 3, 14, 14].
        bad: samples and items missing in `rows` or `media`, ascending by sample and item.
        bytes: payload bytes read from the store or its cache.
        requests: requests sent to the store.
        reread: reads repeated because of a wrong checksum.
    """

    rows: RowBatch | None
    media: Mapping[int, NDArray[np.uint8]]
    bad: tuple[BadSample, ...]
    bytes: int
    requests: int
    reread: int


def resolve(planner: Planner, plan: GlobalPlan, needs: Needs) -> StepRequest:
    """Return the reads of a step for the given needs.

    Raises:
        ValueError: `needs` names rows or items that the step does not have.
    """
    rows = np.asarray(needs.rows, np.int64)
    items = np.asarray(needs.items, np.int64)
    for what, wanted, total in (
        ("row", rows, plan.num_rows),
        ("item", items, len(plan.items)),
    ):
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < total:
            step = plan.step + 1
            raise ValueError(f"needs name {what}s {wanted.tolist()}, step {step} has {total}")
    items = np.unique(items)
    samples, places = _samples_of(plan, rows)
    owners = np.unique(np.concatenate([samples, plan.items.sample[items].astype(np.int64)]))
    details = _details(planner, plan, owners)
    texts = _texts(planner, plan, samples, places, details)
    files = _files(planner, plan, items, details)
    limits = planner.config.limits
    return StepRequest(plan.step, plan.seq_len, limits, rows, tuple(texts), tuple(files))


def _samples_of(
    plan: GlobalPlan, rows: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the samples of some rows, in the order of `rows`, and each one's index in `rows`."""
    first = np.searchsorted(plan.samples.row, rows)
    count = np.searchsorted(plan.samples.row, rows, side="right") - first
    before = np.cumsum(count) - count
    samples = np.repeat(first - before, count) + np.arange(count.sum())
    return samples, np.repeat(np.arange(rows.size), count)


def _details(
    planner: Planner, plan: GlobalPlan, samples: NDArray[np.int64]
) -> dict[int, Detail | None]:
    """Return the random draws per sample (augmentation, variants, regions); None without draws."""
    found: dict[int, Detail | None] = dict.fromkeys(samples.tolist())
    table = plan.samples
    for number, source in enumerate(planner.sources):
        mine = samples[table.source[samples] == number]
        ptr, at = source.index.region_ptr, table.index[mine]
        changed = mine[(ptr[at + 1] > ptr[at]) | table.varied[mine]]
        if changed.size:
            details = source.variation.details(
                table.index[changed], table.epoch[changed], table.varied[changed]
            )
            found.update(zip(changed.tolist(), details))
    return found


def _texts(
    planner: Planner,
    plan: GlobalPlan,
    samples: NDArray[np.int64],
    places: NDArray[np.int64],
    details: Mapping[int, Detail | None],
) -> list[TextRead]:
    first, end = (
        np.searchsorted(plan.items.sample, samples, side=side).tolist()
        for side in ("left", "right")
    )
    table, reads = plan.samples, []
    for number, place, begin, stop in zip(samples.tolist(), places.tolist(), first, end):
        source = planner.sources[table.source[number]]
        index, at = source.index, int(table.index[number])
        detail = details[number]
        start = int(table.start[number])
        layout = SampleLayout(
            length=int(table.length[number]),
            pads=tuple(plan.items.tokens[begin:stop].tolist()),
            starts=tuple((plan.items.start[begin:stop] - start).tolist()),
            part=int(table.part[number]) if source.is_split(at) else None,
            variants=detail.variants if detail else (),
            regions=detail.regions if detail else (),
        )
        reads.append(TextRead(*document_of(index, at), number, place, start, layout))
    return reads


def _files(
    planner: Planner,
    plan: GlobalPlan,
    items: NDArray[np.int64],
    details: Mapping[int, Detail | None],
) -> list[FileRead]:
    """Return one read per file, so that the needed chunks of a video are decoded together."""
    table = plan.items
    groups: dict[tuple[int, int], list[int]] = {}
    for item in items.tolist():
        groups.setdefault((int(table.sample[item]), int(table.media[item])), []).append(item)
    reads: list[FileRead] = []
    for (sample, media), group in groups.items():
        index = planner.indices[plan.samples.source[sample]]
        line = int(table.index_line[group[0]])
        detail = details[sample]
        shapes = zip(table.frames[group], table.grid_h[group], table.grid_w[group])
        reads.append(
            FileRead(
                *medium_of(index, line),
                sample=sample,
                kind=int(table.kind[group[0]]),
                items=tuple(group),
                chunks=tuple(table.chunk[group].tolist()),
                grids=tuple((int(t), int(h), int(w)) for t, h, w in shapes),
                level=int(table.level[group[0]]),
                draw=detail.draws.get(media) if detail else None,
            )
        )
    return reads


class Fetcher:
    """Executor of step requests; `close` it after use.

    Args:
        store: store rooted at the folder of the sources.
        tokenizer: tokenizer of the indices.
        threads: number of request threads and of decoding threads.
    """

    def __init__(self, store: Store, tokenizer: Tokenizer, threads: int):
        self._store, self._tokenizer, self._threads = store, tokenizer, threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._split: OrderedDict[tuple[Span, int], LaidOut] = OrderedDict()
        self._lock = threading.Lock()
        self._moved: dict[str, str] = {}  # shards replaced by redactions during this run

    def __call__(self, request: StepRequest, decode: Decode = decode_items) -> Fetched:
        """Read, decode and lay out a request.

        Args:
            request: the reads to execute.
            decode: decodes a media file; web pages pass a function that uses another process.

        Raises:
            StoreError: a read failed after the store's retries; the message names the key.
            IndexMismatch: the tokens of a text differ from the index; names source and sample key.
        """
        reads, before = [*request.texts, *request.files], self._num_requests()
        reading = read_parts(self._store, reads, self._threads, moved=self._moved)
        read_bytes = sum(len(body) for body in reading.data.values())
        decoding = [
            self._pool.submit(_decode, file, reading, request.limits, decode)
            for file in request.files
        ]
        bad: list[BadSample] = []
        rows = self._rows(request, reading, bad) if request.row_ids.size else None
        media: dict[int, NDArray[np.uint8]] = {}
        for future in decoding:
            for item, found in future.result():
                if isinstance(found, BadSample):
                    bad.append(found)
                else:
                    media[item] = found
        bad.sort(key=lambda entry: (entry.sample, -1 if entry.item is None else entry.item))
        sent = self._num_requests() - before
        return Fetched(
            rows, dict(sorted(media.items())), tuple(bad), read_bytes, sent, reading.reread
        )

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(cancel_futures=True)

    def _num_requests(self) -> int:
        return self._store.stats.requests

    def _rows(self, request: StepRequest, reading: Reading, bad: list[BadSample]) -> RowBatch:
        rows = RowBatch.empty(request.row_ids.size, request.seq_len, self._tokenizer.pad)
        for read in request.texts:
            if reason := reading.damage(read):
                bad.append(BadSample(read.sample, reason))
                continue
            try:
                whole = self._laid_out(read, reading.data[read.span])
                tokens, loss = sample_tokens(whole, read.layout, request.seq_len)
            except ValueError as error:
                raise IndexMismatch(
                    f"{read.name}: {error}; the index was made with another tokenizer or from "
                    "other data: ingest or reindex the source again"
                ) from error
            rows.place(read.row, read.start, tokens, loss)
        return rows

    def _laid_out(self, read: TextRead, body: bytes) -> LaidOut:
        """Lay out a sample; cache a split sample, because its other parts follow soon."""
        if read.layout.part is None:
            return laid_out(segments_of(body), self._tokenizer, read.layout)
        key = (read.span, read.crc)
        with self._lock:
            if (found := self._split.get(key)) is not None:
                self._split.move_to_end(key)
                return found
        found = laid_out(segments_of(body), self._tokenizer, read.layout)
        with self._lock:
            self._split[key] = found
            while len(self._split) > 1 and self._num_tokens() > _KEPT_TOKENS:
                self._split.popitem(last=False)
        return found

    def _num_tokens(self) -> int:
        return sum(tokens.size for tokens, _, _ in self._split.values())


def _decode(
    read: FileRead, reading: Reading, limits: PatchLimits, decode: Decode
) -> list[tuple[int, NDArray[np.uint8] | BadSample]]:
    """Decode the items of one file into (item, patches or BadSample) pairs."""
    if reason := reading.damage(read):
        return [(item, BadSample(read.sample, reason, item)) for item in read.items]
    data, lowered = reading.data[read.span], limits_at(limits, read.level)
    every = list(zip(read.items, read.chunks, read.grids))
    try:
        found = decode(data, read.kind, read.chunks, lowered, read.grids, read.draw)
        return list(zip(read.items, found))
    except MediaError as error:
        if len(every) == 1:
            return [(read.items[0], BadSample(read.sample, f"{read.name}: {error}", read.items[0]))]
    # Decode each chunk separately, because one bad chunk must not lose the good ones.
    answers: list[tuple[int, NDArray[np.uint8] | BadSample]] = []
    for item, chunk, grid in every:
        try:
            patches = decode(data, read.kind, [chunk], lowered, [grid], read.draw)
            answers.append((item, patches[0]))
        except MediaError as error:
            answers.append((item, BadSample(read.sample, f"{read.name}: {error}", item)))
    return answers
