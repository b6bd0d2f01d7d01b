"""Compares both sides of a sync byte for byte without changes (`data sync --verify-only`)."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from data_pipeline.index.manifest import IndexMismatch, manifest_key
from data_pipeline.store.open import FolderStore, MissingBucket, MissingKey, Store
from data_pipeline.sync.contents import Contents, Item, find_sources
from data_pipeline.sync.rate import Meter, Progress, Rate
from data_pipeline.sync.survey import distinct
from data_pipeline.sync.sync import Options, check_index, read_all
from data_pipeline.sync.transfer import hash_of

T = TypeVar("T")


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes:
        sources: names of the compared sources.
        files: number of files compared on both sides, manifests included.
        bytes: size of these files on one side.
        problems: one line per problem: file, value found, value expected.
    """

    sources: tuple[str, ...]
    files: int
    bytes: int
    problems: tuple[str, ...]


def compare(
    source: Store,
    target: Store,
    wanted: Sequence[str] = (),
    options: Options | None = None,
    progress: Progress = lambda *_: None,
) -> Comparison:
    """Read all files of some sources on both sides, and compare them with the manifests' hashes.

    Args:
        source, target, wanted, options, progress: as in `sync.sync`.

    Raises:
        ValueError: no such source.
        StoreError: a side does not answer; missing and damaged files count as problems instead.
    """
    options = options or Options()
    rate, meter = Rate(options.bytes_per_second), Meter(progress)
    found = read_all(source, find_sources(source, wanted))
    items = distinct(found)
    problems = [problem for one in found for problem in _of_source(source, target, one)]
    pool = ThreadPoolExecutor(options.parallel, thread_name_prefix="sync compare")
    try:
        check = partial(_of_file, source, target, rate=rate, meter=meter)
        for more in pool.map(check, items):
            problems += more
    finally:
        rate.stop()
        pool.shutdown(cancel_futures=True)
    size = sum(item.size for item in items) + sum(len(one.manifest) for one in found)
    names = tuple(one.name for one in found)
    return Comparison(names, len(items) + len(found), size, tuple(problems))


def _of_source(source: Store, target: Store, one: Contents) -> list[str]:
    """Return the problems of a source's manifest and index."""
    problems = []
    key = manifest_key(one.name)
    there = _found(target, lambda: target.get(key))
    if there is None:
        problems.append(f"{target.uri}/{key}: not there, expected as in {source.uri}")
    elif there != one.manifest:
        problems.append(f"{target.uri}/{key}: has other bytes, expected those of {source.uri}")
    try:
        check_index(source, one)
    except (IndexMismatch, ValueError) as error:
        problems.append(str(error))
    return problems


def _of_file(source: Store, target: Store, item: Item, *, rate: Rate, meter: Meter) -> list[str]:
    """Compare a file on both sides with its hash, or with each other if the manifest has none."""
    problems: list[str] = []
    expected = item.sha256
    for store in (source, target):
        where = f"{store.uri}/{item.key}"
        info = _found(store, lambda store=store: store.head(item.key))
        if info is None:
            problems.append(f"{where}: not there, expected {item.size} bytes")
            continue
        if info.size != item.size:
            problems.append(f"{where}: size is {info.size}, expected {item.size}")
            continue
        found = hash_of(store, item, rate, meter)
        if expected is None:
            expected = found
        elif found != expected:
            problems.append(f"{where}: sha256 is {found}, expected {expected}")
    return problems


def _found(store: Store, ask: Callable[[], T]) -> T | None:
    """Return the result of a request, or None if the object or its folder does not exist."""
    try:
        return ask()
    except MissingKey:
        return None
    except MissingBucket:
        if isinstance(store, FolderStore):
            return None
        raise
