"""Copies sources from one store to another: first the missing files, then the manifests.

1. Read the list of files of each source from its manifest (`contents`).
2. Find the files that the target has, and any conflicts (`survey`). Nothing is changed so far.
3. Claim the names in the target, as an ingest does, and remove the partial files of a killed sync.
4. Copy missing files in parallel, compare each with its SHA-256 on both sides (`transfer`), and
   record it (`sync_journal`).
5. Write a source's manifest, if it is missing, after all its files are in the target. So the target
   never shows an incomplete source.
"""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from data_pipeline.index.manifest import manifest_key, read_index
from data_pipeline.ingest.claim import Claim
from data_pipeline.store.objects import in_threads
from data_pipeline.store.open import Store
from data_pipeline.sync.contents import Contents, Item, RankFiles, find_sources, read_contents
from data_pipeline.sync.rate import Meter, Progress, Rate, Stopped
from data_pipeline.sync.redactions import refuse_undoing, settle
from data_pipeline.sync.survey import OtherContent, Survey, survey
from data_pipeline.sync.sync_journal import SyncJournal
from data_pipeline.sync.transfer import copy

# Concurrent requests that only check for existence.
LOOK_THREADS = 16


@dataclass(frozen=True)
class Options:
    """Settings of the transfer.

    Args:
        parallel: files at a time; each takes some 40 MiB of memory.
        bytes_per_second: of all files together, copied or read for comparison; None: no limit.
    """

    parallel: int = 8
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise ValueError(f"parallel is {self.parallel}; allowed: 1 or more")


@dataclass
class SyncReport:
    """Result of a sync.

    Attributes:
        sources: name -> "copied", "completed" (files were missing next to a manifest), "there",
            "redacted" or "redacted there" (`sync.redactions`).
        copied, there: number of files.
        bytes: size of the copied files.
        seconds: duration.
        without_tokenizer: sources whose rank file is missing in the source store.
        not_removed: shards with redacted samples that the target's store did not delete, and why.
    """

    sources: dict[str, str] = field(default_factory=dict)
    copied: int = 0
    there: int = 0
    bytes: int = 0
    seconds: float = 0.0
    without_tokenizer: list[str] = field(default_factory=list)
    not_removed: list[str] = field(default_factory=list)


def sync(
    source: Store,
    target: Store,
    wanted: Sequence[str] = (),
    options: Options | None = None,
    progress: Progress = lambda *_: None,
) -> SyncReport:
    """Copy sources to another store; existing files stay unchanged.

    Args:
        source, target: roots of sources.
        wanted: names of sources; empty: all.
        options: settings of the transfer.
        progress: called as bytes are copied or compared.

    Raises:
        ValueError: no such source, or the target has other content (OtherContent).
        IndexMismatch: the hashes of a manifest do not match; nothing was changed.
        Damaged: the bytes of a file do not match its hash. Other files may have been copied, but no
            manifest of an incomplete source was written.
        NameTaken: another process writes one of the sources in the target.
    """
    begun, options = time.monotonic(), options or Options()
    rate, meter = Rate(options.bytes_per_second), Meter(progress)
    found = read_all(source, find_sources(source, wanted))
    settled = settle(source, target, found)
    surveys = survey(source, target, settled.rest, rate, meter, LOOK_THREADS)
    refuse_undoing(source, target, _missing_shards(surveys))
    report = SyncReport(without_tokenizer=[one.name for one in found if one.tokenizer])
    if settled.todo:
        # Imported here, because a plain sync does not need its many imports.
        from data_pipeline.govern.redact import carry_out

        # Raises before it writes if a shard in the target is under a hold.
        kept = carry_out(target, settled.todo).kept
        report.not_removed = [f"{key}: {reason}" for key, reason in kept]
    report.sources |= settled.states
    work = [one for one in surveys if one.missing or one.journal or not one.published]
    for one in work:
        if one.missing or not one.published:
            check_index(source, one.contents)
    with _claimed(target, work) as claims:
        _copy_all(_Copying(source, target, rate, meter), work, options.parallel, claims)
        for one in work:
            SyncJournal(target, one.contents.name).remove()
    for one in surveys:
        state = "copied" if not one.published else "completed" if one.missing else "there"
        report.sources[one.contents.name] = state
    missing = {item.key: item.size for one in work for item in one.missing}
    report.copied, report.bytes = len(missing), sum(missing.values())
    report.there = len({item.key for one in found for item in one.items}) - len(missing)
    report.seconds = time.monotonic() - begun
    return report


def read_all(source: Store, names: Sequence[str]) -> list[Contents]:
    """Read the lists of files of some sources."""
    ranks = RankFiles(source)
    return [read_contents(source, name, ranks) for name in names]


def check_index(source: Store, contents: Contents) -> None:
    """Read a source's index, and compare it and the shards' hashes with the manifest.

    Raises:
        IndexMismatch: they do not match; names the values found and expected.
    """
    read_index(source, contents.name)


@contextmanager
def _claimed(target: Store, work: Sequence[Survey]) -> Iterator[dict[str, Claim]]:
    """Claim all folders to write to, and remove the partial files of a killed sync there."""
    folders = sorted(set().union(*map(_folders, work)))
    claims = {name: Claim(target, name, wait=False) for name in folders}
    with ExitStack() as held:
        with ThreadPoolExecutor(LOOK_THREADS, thread_name_prefix="sync claim") as pool:
            futures = [pool.submit(held.enter_context, claim) for claim in claims.values()]
        for future in futures:
            future.result()
        for one in work:
            mine = {name: claims[name] for name in sorted(_folders(one))}
            SyncJournal(target, one.contents.name).tidy(mine)
        yield claims


def _missing_shards(surveys: Sequence[Survey]) -> dict[str, set[str]]:
    """Return source -> keys of its shards that are to be copied."""
    return {
        one.contents.name: {item.key for item in {*one.missing} & {*one.contents.shards}}
        for one in surveys
    }


def _check_still_there(target: Store, work: Sequence[Survey]) -> None:
    """Check that files found before the claims exist; a collection may have removed them.

    Call this after the claims have settled: a collection that checked before the claims is done
    then.

    Raises:
        MissingKey: a file is gone; the same command copies it.
    """
    known = {
        item.key
        for one in work
        if not one.published
        for item in {*one.contents.items} - {*one.missing}
    }
    in_threads(target.head, sorted(known), LOOK_THREADS)


def _folders(one: Survey) -> set[str]:
    """Return the source folders that copying one source writes to."""
    shards = set(one.contents.shards)
    return {one.contents.name, *(item.folder for item in one.missing if item in shards)}


class _Copying:
    """Copies files in several threads; the first error ends all copies."""

    def __init__(self, source: Store, target: Store, rate: Rate, meter: Meter) -> None:
        self.source, self.target, self._rate, self._meter = source, target, rate, meter
        self._settled: Future[None] = Future()
        self._error: BaseException | None = None
        self.futures: dict[str, Future[None]] = {}

    def begin(self, pool: ThreadPoolExecutor, one: Survey) -> None:
        """Start copies of all missing files of a source that no other source has started."""
        journal = SyncJournal(self.target, one.contents.name)
        for item in one.missing:
            if item.key not in self.futures:
                self._meter.expect(item.size)
                self.futures[item.key] = pool.submit(self._copy, item, journal)

    def _copy(self, item: Item, journal: SyncJournal) -> None:
        try:
            where = self.source, self.target
            written = copy(*where, item, self._rate, self._meter, self._settled.result)
            journal.note(item, written.info.etag)
        except BaseException as error:
            if self._error is None:
                self._error = error
            self._rate.stop()
            raise

    def settle(self, claims: Iterable[Claim]) -> None:
        """Wait for the claims, then let files appear; until then, only bytes are transferred."""
        try:
            in_threads(lambda claim: claim.settle(), list(claims), LOOK_THREADS)
        except BaseException as error:
            self._settled.set_exception(error)
            raise
        self._settled.set_result(None)

    def stop(self) -> None:
        """Stop all running copies."""
        self._rate.stop()
        if not self._settled.done():
            self._settled.set_exception(Stopped())

    def wait(self, item: Item) -> None:
        """Wait until a file is copied; raises the first error of any copy."""
        try:
            self.futures[item.key].result()
        except Stopped:
            raise self._error or Stopped from None


def _copy_all(
    copying: _Copying, work: Sequence[Survey], parallel: int, claims: Mapping[str, Claim]
) -> None:
    """Copy the missing files of all sources; write each manifest once its source is complete."""
    pool = ThreadPoolExecutor(parallel, thread_name_prefix="sync")
    try:
        for one in work:
            copying.begin(pool, one)
        copying.settle(claims.values())
        _check_still_there(copying.target, work)
        for one in work:
            for item in one.missing:
                copying.wait(item)
            if not one.published:
                for folder in _folders(one):
                    claims[folder].check()
                _publish(copying.source, copying.target, one.contents)
    finally:
        copying.stop()
        pool.shutdown(cancel_futures=True)


def _publish(source: Store, target: Store, contents: Contents) -> None:
    """Write the manifest, which makes the source visible in the target."""
    key = manifest_key(contents.name)
    if target.put_new(key, contents.manifest):
        return
    # The manifest may be this sync's own, if the answer to a first request was lost.
    if target.get(key) != contents.manifest:
        raise OtherContent(
            f"{target.uri}/{key}: another source of this name appeared during the sync, expected "
            f"content_hash {contents.content_hash} as in {source.uri}; look which is right and "
            "delete the other"
        )
