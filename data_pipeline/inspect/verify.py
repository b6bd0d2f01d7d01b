"""Every entry of an index against the shards it points into: what `data verify` does.

Shards are checked side by side; memory holds one part of a shard and one medium per thread. All
problems are told, in the order of the shards, whatever thread found them.
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
    """What to check.

    Args:
        tokenizer: counts tokens again; None leaves them.
        share: of the samples, evenly spread. Below 1 the shards' SHA-256 is not checked, nor what
            lies between the chosen samples: only a whole read can.
        decode: decode all media instead of reading their headers.
        threads: shards read at once.
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
    """Read a source's index, or say what is wrong with it.

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
    """Check a source: first its index by itself, then shard by shard, in order.

    `progress` is called with numbers of bytes as they have been read, from several threads.

    Raises:
        StoreError: the store does not answer; a shard that is gone or damaged is a problem.
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
