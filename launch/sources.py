"""Finding what a person means: sources under a URI, a source's tokenizer, a sample by its key."""

import difflib
import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from data_pipeline.index.columns import SourceIndex
from data_pipeline.inspect.verify import sources_at
from data_pipeline.store.open import MissingBucket, MissingKey, Store, open_store
from data_pipeline.text import Tokenizer
from launch.pages.html import num_bytes

ALL = "all"
# Looking for a similar key among more than this would take longer than the answer is worth.
_KEYS_COMPARED = 20_000
# Seconds between two lines of progress where there is no terminal.
_LINE_SECONDS = 30.0


def open_sources(uri: str, endpoint: str | None, wanted: Sequence[str]) -> tuple[Store, list[str]]:
    """Open what a URI means, and choose sources of it.

    Args:
        uri: a root that holds sources, or one source itself.
        endpoint: of an object store, None for the environment's.
        wanted: names; empty or "all" means every source.

    Returns:
        The store of the root, and the names, sorted.

    Raises:
        ValueError: there is no source, or none of a name; tells the nearest.
        StoreError: the store cannot be read.

    """
    root, _, last = uri.rstrip("/").rpartition("/")
    store = open_store(uri, endpoint=endpoint)
    if not root.endswith(":/") and _exists(store, "manifest.json"):
        store, names = open_store(root or ".", endpoint=endpoint), [last]
    else:
        names = sources_at(store)
    if not names:
        raise ValueError(
            f"{store.uri}: no finished source here (no NAME/manifest.json); give the folder that "
            "holds the sources, or a source itself"
        )
    chosen = [name for name in dict.fromkeys(wanted) if name != ALL]
    for name in chosen:
        if name not in names:
            raise ValueError(f"{store.uri}: no source {name!r}; {_nearest(name, names)}")
    return store, sorted(chosen) if chosen and ALL not in wanted else names


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except (MissingKey, MissingBucket):
        return False
    return True


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, 1)
    guess = f"did you mean {near[0]!r}? " if near else ""
    listed = ", ".join(known[:20]) + (", ..." if len(known) > 20 else "")
    return f"{guess}there are: {listed}"


def find_sample(index: SourceIndex, key: str) -> int:
    """Return the number of a sample.

    Raises:
        ValueError: there is none of this key; tells the nearest.

    """
    keys = pa.array(index.key, pa.string())
    at = keys.index(key).as_py()
    if at < 0:
        near = difflib.get_close_matches(key, keys[:_KEYS_COMPARED].to_pylist(), 1)
        guess = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(
            f"source {index.name!r}: no sample {key!r} among {index.num_samples}{guess}"
        )
    return at


def named_tokenizer(name: str, store: Store, endpoint: str | None) -> Tokenizer:
    """Open a rank file: a key under the root, or a path or URI of its own.

    Raises:
        StoreError: there is none.
        ValueError: it is no complete rank file.

    """
    if "://" in name:
        folder, _, file = name.rpartition("/")
        return Tokenizer.from_store(open_store(folder, endpoint=endpoint), file)
    if not name.startswith(("/", "~", ".")) and _exists(store, name):
        return Tokenizer.from_store(store, name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"no rank file {name!r}, neither under {store.uri} nor as a file of this machine"
        )
    return Tokenizer.from_file(path)


def own_tokenizer(store: Store, index: SourceIndex) -> Tokenizer | None:
    """Look under tokenizer/ of the root for the rank file that a source was made with."""
    for key in store.list("tokenizer/"):
        data = store.get(key)
        if hashlib.sha256(data).hexdigest() == index.tokenizer_hash:
            return Tokenizer(data, index.tokenizer_name)
    return None


@contextmanager
def total_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show progress: a bar on a terminal, otherwise a line now and then.

    Yields what to call, from any thread, with (bytes done, bytes in all).
    """
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _Lines(title, console)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


@contextmanager
def byte_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """As `total_bar` for a known total; yields what to call with each number of bytes read."""
    lock, done = threading.Lock(), 0
    with total_bar(title) as show:

        def add(more: int) -> None:
            nonlocal done
            with lock:
                done += more
                show(done, total)

        yield add


class _Lines:
    """Progress in the log of a job."""

    def __init__(self, title: str, console: Console):
        self._title, self._console, self._told = title, console, time.monotonic()

    def __call__(self, done: int, total: int) -> None:
        if time.monotonic() >= self._told + _LINE_SECONDS:
            self._told = time.monotonic()
            line = f"{self._title}: {num_bytes(done)} of {num_bytes(total)}"
            self._console.print(line, highlight=False)


def num_shard_bytes(indices: Iterable[SourceIndex]) -> int:
    """Return the bytes of all shards of some sources."""
    return sum(shard.size for index in indices for shard in index.shards)
