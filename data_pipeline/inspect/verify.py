"""Verifies every entry of an index against its shards, for `data verify`.

Shards are checked in parallel; memory holds one part of a shard and one media file per thread. All
problems are reported in the order of the shards, independent of the threads.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import IndexMismatch, read_index
from data_pipeline.inspect.index_checks import index_problems
from data_pipeline.inspect.problem import Problem
from data_pipeline.inspect.shard import ShardCheck, ShardReport
from data_pipeline.store.open import MissingKey, Store
from data_pipeline.text import Tokenizer


@dataclass(frozen=True)
class Checks:
    """Options of a verification.

    Args:
        tokenizer: recounts the tokens; None skips this check.
        share: share of the samples to check, evenly spread. Below 1, the SHA-256 of shards and the
            bytes between the chosen samples are not checked, because that needs a full read.
        decode: True to decode all media; otherwise only their headers are read.
        threads: shards read concurrently.
    """

    tokenizer: Tokenizer | None = None
    share: float = 1.0
    decode: bool = False
    threads: int = 4

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ValueError(f"sample share is {self.share}; allowed: above 0, at most 1")
        if self.threads < 1:
            raise ValueError(f"threads is {self.threads}; allowed: 1 or more")


def open_source(store: Store, name: str) -> SourceIndex | Problem:
    """Read a source's index; return a Problem if that fails.

    Raises:
        StoreError: the store cannot be read at all.
    """
    try:
        return read_index(store, name)
    except (IndexMismatch, MissingKey, ValueError) as error:
        return Problem(name, "index", str(error))
    except KeyError as error:
        return Problem(name, "index", f"manifest.json does not have its form: no field {error}")
    except TypeError as error:
        return Problem(name, "index", f"manifest.json does not have its form: {error}")


def verify_source(
    store: Store,
    index: SourceIndex,
    checks: Checks,
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[ShardReport]:
    """Check a source: first only its index, then its shards in order.

    `progress` is called from several threads with the number of bytes read since its last call.

    Raises:
        StoreError: the store does not respond; a missing or damaged shard is a Problem instead.
    """
    tokenizer = checks.tokenizer
    problems = index_problems(index)
    if tokenizer is not None and tokenizer.hash != index.tokenizer_hash:
        detail = (
            f"made with {index.tokenizer_name!r} ({index.tokenizer_hash[:12]}), given is "
            f"{tokenizer.name!r} ({tokenizer.hash[:12]}); tokens were not counted"
        )
        problems.append(Problem(index.name, "tokenizer", detail))
        tokenizer = None
    yield ShardReport("", problems=tuple(problems))

    def check(number: int) -> ShardReport:
        shard = ShardCheck(store, index, number, tokenizer, checks.decode, progress)
        return shard.run(checks.share)

    pool = ThreadPoolExecutor(checks.threads, thread_name_prefix="verify")
    try:
        yield from pool.map(check, range(len(index.shards)))
    finally:
        pool.shutdown(cancel_futures=True)
