"""Packs prepared samples into shards of bounded size; uploads a shard while the next one fills.

The shard is written before its journal part, so every part describes a complete shard.
"""

import time
from collections import Counter
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.index.columns import ShardInfo
from data_pipeline.index.erased import Erased
from data_pipeline.index.manifest import refuse_shards
from data_pipeline.index.shards import ShardBuilder
from data_pipeline.ingest.claim import Claim
from data_pipeline.ingest.journal import Journal
from data_pipeline.ingest.parts import Columns, Part
from data_pipeline.ingest.prepare import Prepared
from data_pipeline.ingest.samples import Rejection
from data_pipeline.store.open import Store

_SECONDS = 0.25  # between two calls of `progress`

Outcome = Prepared | Rejection


@dataclass(frozen=True)
class IngestProgress:
    """Counts so far, including those of a killed ingest that is being resumed.

    Attributes:
        samples, rejected: samples written and rejected.
        items: images and video chunks.
        shards: tar files written.
        bytes: bytes of all tar files, including those not written yet.
        turned: images and clips with an orientation tag, which is never applied.
    """

    samples: int = 0
    rejected: int = 0
    items: int = 0
    shards: int = 0
    bytes: int = 0
    turned: int = 0


@dataclass
class _Filling:
    """The shard that is being filled."""

    builder: ShardBuilder = field(default_factory=ShardBuilder)
    columns: Columns = field(default_factory=Columns)
    rejections: list[Rejection] = field(default_factory=list)
    turned: int = 0

    def counts(self) -> dict[str, int]:
        return {
            "samples": len(self.columns.keys),
            "rejected": len(self.rejections),
            "items": self.columns.num_items,
            "bytes": self.builder.size if self.builder.samples else 0,
            "turned": self.turned,
        }


def _counts(part: Part) -> dict[str, int]:
    return {
        "samples": len(part.keys),
        "rejected": len(part.rejections),
        "items": len(part.columns["item_kind"]),
        "bytes": part.shard.size,
        "turned": part.turned,
    }


class ShardWriter:
    """Writes the shards of one source; a context whose exit waits for the upload thread.

    It resumes from an existing journal or starts a new one, and checks the claim before each shard.
    `taken` are keys that no sample may have, `erased` are samples that must not come back. See
    `data_pipeline.ingest.ingest.ingest` for the other arguments.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        journal: Journal,
        claim: Claim,
        shard_bytes: int,
        progress: Callable[[IngestProgress], None] | None = None,
        rejected: Callable[[Rejection], None] | None = None,
        taken: Collection[str] = (),
        erased: Erased | None = None,
    ) -> None:
        self._store, self._name, self._journal = store, name, journal
        self._claim = claim
        self._shard_bytes, self._progress, self._rejected = shard_bytes, progress, rejected
        self._parts = journal.parts() if journal.found() else []
        if not self._parts:
            # A missing write permission shows here, not after a shard's worth of work.
            store.put(f"{name}/rejected.jsonl", b"")
            journal.begin()
        self.rejections = [rejection for part in self._parts for rejection in part.rejections]
        self._keys = {key for part in self._parts for key in part.keys}
        self._taken, self._erased = taken, erased or Erased()
        self._done: Counter[str] = Counter()
        for part in self._parts:
            self._done.update(_counts(part))
        self._filling = _Filling()
        self._thread = ThreadPoolExecutor(1, "ingest-upload")
        self._uploading: Future[Part] | None = None
        self._tell(now=True)

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()

    @property
    def cursor(self) -> Any:
        """Input cursor to resume from; None at the start."""
        return self._parts[-1].cursor if self._parts else None

    @property
    def num_seen(self) -> int:
        """Number of samples so far, written and rejected."""
        return len(self._keys) + len(self.rejections)

    @property
    def complete(self) -> bool:
        """True if the last shard of the input is already written."""
        return bool(self._parts) and self._parts[-1].last

    def add(self, cursor: Any, outcome: Outcome) -> None:
        """Append one sample; close the shard first if it would exceed its limit.

        `cursor` is the input position of this sample.
        """
        if isinstance(outcome, Prepared):
            if outcome.key in self._keys:
                outcome = Rejection(outcome.key, "key twice", "an earlier sample has this key")
            elif outcome.key in self._taken:
                told = "the source that this is appended to has this key"
                outcome = Rejection(outcome.key, "key twice", told)
            elif self._erased.has(outcome.key, outcome.sums):
                told = "this very sample was redacted here: it does not come back"
                outcome = Rejection(outcome.key, "erased", told)
        if isinstance(outcome, Rejection):
            self._filling.rejections.append(outcome)
            self.rejections.append(outcome)
            if self._rejected:
                self._rejected(outcome)
        else:
            builder = self._filling.builder
            if builder.samples and builder.size + len(outcome.blocks) > self._shard_bytes:
                self._close(cursor, last=False)
            filling = self._filling
            filling.columns.add(outcome, filling.builder.append(outcome.blocks))
            filling.turned += outcome.turned
            self._keys.add(outcome.key)
        self._tell()

    def _close(self, cursor: Any, *, last: bool) -> None:
        """Pass the shard to the upload thread after the previous upload has finished."""
        self._settle()
        number, filling = len(self._parts), self._filling
        refuse_shards(self._name, number + 1)
        self._done.update(filling.counts())
        self._filling = _Filling()
        self._uploading = self._thread.submit(self._put, number, filling, cursor, last)

    def _put(self, number: int, filling: _Filling, cursor: Any, last: bool) -> Part:
        shard = filling.builder.finish()
        key = f"{self._name}/{number:06d}.tar"
        self._claim.check()
        self._store.put(key, shard.data)
        part = Part(
            shard=ShardInfo(key, len(shard.data), shard.sha256, shard.samples),
            keys=filling.columns.keys,
            columns=filling.columns.arrays(),
            rejections=filling.rejections,
            turned=filling.turned,
            cursor=cursor,
            last=last,
        )
        self._journal.write(number, part)
        return part

    def _settle(self) -> None:
        """Wait for the running upload and raise its errors."""
        if self._uploading is not None:
            part, self._uploading = self._uploading.result(), None
            self._parts.append(part)
            self._tell(now=True)

    def _tell(self, *, now: bool = False) -> None:
        if self._progress and (now or time.monotonic() >= self._told + _SECONDS):
            self._told = time.monotonic()
            counts = self._done + Counter(self._filling.counts())
            self._progress(IngestProgress(**counts, shards=len(self._parts)))

    def finish(self) -> tuple[list[Part], list[Rejection]]:
        """Write the last shard; return all parts (none without samples) and all rejections."""
        if self._filling.builder.samples:
            self._close(None, last=True)
        self._settle()
        return self._parts, self.rejections
