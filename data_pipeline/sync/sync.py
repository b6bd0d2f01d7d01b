"""Sources from one place to another: files that are missing, then the manifests.

1. What belongs to each source, by its manifest (`contents`), and whether that is sound.
2. What of it the target has, and whether anything stands in the way (`survey`). So far nothing is
   changed.
3. The names are claimed in the target, as an ingest does, and what a killed sync was writing goes.
4. Missing files are copied, side by side, each compared with its SHA-256 on both sides
   (`transfer`), and noted (`sync_journal`).
5. When all files of a source are there, its manifest is written, unless there is one. So the target
   never shows a source that is not whole.
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

# Requests that only ask whether something is there.
LOOK_THREADS = 16


@dataclass(frozen=True)
class Options:
    """How to move bytes.

    Args:
        parallel: files at a time; memory holds some 40 MiB for each.
        bytes_per_second: of all together, copied or read to be compared; None: no limit.
    """

    parallel: int = 8
    bytes_per_second: float | None = None

    def __post_init__(self) -> None:
        if self.parallel < 1:
            raise ValueError(f"parallel is {self.parallel}; allowed: 1 or more")


@dataclass
class SyncReport:
    """What a sync did.

    Attributes:
        sources: name -> "copied", "completed" (files were missing beside a manifest), "there",
            "redacted" or "redacted there" (`sync.redactions`).
        copied, there: files.
        bytes: of those copied.
        seconds: it took.
        without_tokenizer: sources whose rank file is not in the place they come from.
        not_removed: shards with redacted samples that the target's store did not let go, and why.
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
    """Copy sources to another place; files that are there stay as they are.

    Args:
        source, target: roots of sources.
        wanted: names of sources; empty: all.
        options: how to move bytes.
        progress: called as bytes are copied, or compared.

    Raises:
        ValueError: no such source, or the target holds something else (OtherContent).
        IndexMismatch: a manifest whose hashes do not match; nothing was changed.
        Damaged: a file whose bytes do not match. Other files may have been copied; no manifest
            of a source that lacks one was written.
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
        # It loads much that a plain sync does not need.
        from data_pipeline.govern.redact import carry_out

        # Refuses what is under a hold in the target, before it writes.
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
    """Read what belongs to some sources."""
    ranks = RankFiles(source)
    return [read_contents(source, name, ranks) for name in names]


def check_index(source: Store, contents: Contents) -> None:
    """Read a source's index, and compare it and the shards' hashes with the manifest.

    Raises:
        IndexMismatch: they do not belong together; names what was found and what was expected.
    """
    read_index(source, contents.name)


@contextmanager
def _claimed(target: Store, work: Sequence[Survey]) -> Iterator[dict[str, Claim]]:
    """Hold all folders that are written to, and remove what a killed sync was writing there."""
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
    """Return source -> keys of the shards that are to be copied for it."""
    return {
        one.contents.name: {item.key for item in {*one.missing} & {*one.contents.shards}}
        for one in surveys
    }


def _check_still_there(target: Store, work: Sequence[Survey]) -> None:
    """See that what was there before the names were taken still is: a collection may remove it.

    To be asked when the claims have settled: one that had looked just before them is through then.

    Raises:
        MissingKey: it is gone; the same command copies it.
    """
    known = {
        item.key
        for one in work
        if not one.published
        for item in {*one.contents.items} - {*one.missing}
    }
    in_threads(target.head, sorted(known), LOOK_THREADS)


def _folders(one: Survey) -> set[str]:
    """The folders of sources that are written to for one."""
    shards = set(one.contents.shards)
    return {one.contents.name, *(item.folder for item in one.missing if item in shards)}


class _Copying:
    """Copies single files, from several threads; the first error ends all."""

    def __init__(self, source: Store, target: Store, rate: Rate, meter: Meter) -> None:
        self.source, self.target, self._rate, self._meter = source, target, rate, meter
        self._settled: Future[None] = Future()
        self._error: BaseException | None = None
        self.futures: dict[str, Future[None]] = {}

    def begin(self, pool: ThreadPoolExecutor, one: Survey) -> None:
        """Have all missing files of a source copied that are not on their way for another."""
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
        """Let files appear once the names are surely this sync's; until then only bytes flow."""
        try:
            in_threads(lambda claim: claim.settle(), list(claims), LOOK_THREADS)
        except BaseException as error:
            self._settled.set_exception(error)
            raise
        self._settled.set_result(None)

    def stop(self) -> None:
        """End what is under way."""
        self._rate.stop()
        if not self._settled.done():
            self._settled.set_exception(Stopped())

    def wait(self, item: Item) -> None:
        """Wait until a file is there; raises the first error of any."""
        try:
            self.futures[item.key].result()
        except Stopped:
            raise self._error or Stopped from None


def _copy_all(
    copying: _Copying, work: Sequence[Survey], parallel: int, claims: Mapping[str, Claim]
) -> None:
    """Copy what is missing of all sources, and write each manifest when its source is whole."""
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
    """Write the manifest, with which the source exists in the target."""
    key = manifest_key(contents.name)
    if target.put_new(key, contents.manifest):
        return
    # This sync's own, too, if the answer to a first request was lost.
    if target.get(key) != contents.manifest:
        raise OtherContent(
            f"{target.uri}/{key}: another source of this name appeared during the sync, expected "
            f"content_hash {contents.content_hash} as in {source.uri}; look which is right and "
            "delete the other"
        )
