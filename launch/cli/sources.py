"""Finds what an argument names: sources under a URI, a source's tokenizer, a sample by its key."""

import difflib
import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import pyarrow as pa
from rich.console import Console

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import read_index, sources_at
from data_pipeline.ingest.readers import RAW_FILES, open_inputs
from data_pipeline.ingest.texts import at_most, input_texts, source_texts
from data_pipeline.names import did_you_mean
from data_pipeline.store.open import MissingBucket, MissingKey, Store, open_store
from data_pipeline.text import Tokenizer
from launch.cli.progress import byte_bar

ALL = "all"
# Keys compared for "did you mean": with more it would take too long.
_KEYS_COMPARED = 20_000


def split_source(uri: str) -> tuple[str, str]:
    """Return the root ("." for a name alone) and the name of one source's URI."""
    root, _, name = uri.rstrip("/").rpartition("/")
    return root or ".", name


def open_sources(uri: str, endpoint: str | None, wanted: Sequence[str]) -> tuple[Store, list[str]]:
    """Open the root that a URI names, and choose sources in it.

    Args:
        uri: a root that holds sources, or one source itself.
        endpoint: of an object store, None for the environment's.
        wanted: names; empty or "all" means every source.

    Returns:
        The store of the root, and the names, sorted.

    Raises:
        ValueError: there is no source, or none of a wanted name; suggests the nearest.
        StoreError: the store cannot be read.
    """
    root, last = split_source(uri)
    store = open_store(uri, endpoint=endpoint)
    if not root.endswith(":/") and _exists(store, "manifest.json"):
        store, names = open_store(root, endpoint=endpoint), [last]
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
            raise ValueError(f"{store.uri}: no source {name!r}; {did_you_mean(name, names)}")
    return store, sorted(chosen) if chosen and ALL not in wanted else names


def _exists(store: Store, key: str) -> bool:
    try:
        store.head(key)
    except (MissingKey, MissingBucket):
        return False
    return True


def find_sample(index: SourceIndex, key: str) -> int:
    """Return the number of a sample.

    Raises:
        ValueError: there is none of this key; suggests the nearest.
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
    file, ranks = rank_file(name, store, endpoint)
    return Tokenizer(ranks, file)


def rank_file(name: str, store: Store, endpoint: str | None) -> tuple[str, bytes]:
    """Return name and content of a rank file, found as by `named_tokenizer`."""
    if "://" in name:
        folder, _, file = name.rpartition("/")
        return file, open_store(folder, endpoint=endpoint).get(file)
    if not name.startswith(("/", "~", ".")) and _exists(store, name):
        return name.rpartition("/")[2], store.get(name)
    path = Path(name).expanduser()
    if not path.is_file():
        raise ValueError(
            f"no rank file {name!r}, neither under {store.uri} nor as a file of this machine"
        )
    return path.name, path.read_bytes()


def store_tokenizer(store: Store, name: str, ranks: bytes) -> Tokenizer:
    """Store a rank file as tokenizer/NAME.tiktoken under the root of sources; returns it opened.

    Raises:
        ValueError: it is no complete rank file, or another file has this name, with which sources
            may have been counted.
    """
    file = f"{name}.tiktoken"
    tokenizer, key = Tokenizer(ranks, file), f"tokenizer/{file}"
    if "/" in name or name.startswith("."):
        raise ValueError(f"--name {name}: a plain name such as mine; it becomes a file's name")
    if _exists(store, key):
        if store.get(key) != ranks:
            raise ValueError(
                f"{store.uri}/{key}: another rank file has this name, and sources may have been "
                "counted with it; choose another --name"
            )
    else:
        store.put(key, ranks)
    return tokenizer


@contextmanager
def training_texts(
    inputs: Sequence[str],
    category: str,
    num_bytes: int,
    endpoint: str | None,
    *,
    follow_links: bool = False,
) -> Iterator[Iterator[str]]:
    """Open inputs to train a tokenizer on; shows how much text is read and what is left out.

    Args:
        inputs: finished sources, or raw inputs as `data ingest` takes them.
        category: of the raw ones.
        num_bytes: at most, of all texts together; an equal part for each input.
        endpoint: of an object store, None for the environment's.
        follow_links: links may lead out of an input's folder.

    Yields:
        The texts, in the order of the inputs.
    """
    share = max(1, num_bytes // max(1, len(inputs)))
    skipped: Counter[str] = Counter()
    opened = [
        _texts_of(where, category, endpoint, skipped, follow_links=follow_links) for where in inputs
    ]
    texts = chain.from_iterable(at_most(found, share) for found in opened)
    with byte_bar("texts", num_bytes) as read:

        def counted() -> Iterator[str]:
            for text in texts:
                read(len(text.encode()))
                yield text

        yield counted()
    console = Console(stderr=True, markup=False)
    for reason, count in sorted(skipped.items()):
        console.print(f"left out: {count:,} samples, {reason}", highlight=False)


def _texts_of(
    where: str, category: str, endpoint: str | None, skipped: Counter[str], *, follow_links: bool
) -> Iterator[str]:
    """Open one input now, so that a missing one fails before any text is read."""
    if ("://" in where or Path(where).is_dir()) and not where.endswith(RAW_FILES):
        found = open_store(where, endpoint=endpoint)
        if _exists(found, "manifest.json"):
            store, names = open_sources(where, endpoint, ())
            return source_texts(store, read_index(store, names[0]))
    reader = open_inputs([where], category, follow_links=follow_links)
    return input_texts(reader, skipped)


def own_tokenizer(store: Store, index: SourceIndex) -> Tokenizer | None:
    """Return the tokenizer that a source was made with, if it is under tokenizer/ of the root."""
    for key in store.list("tokenizer/"):
        data = store.get(key)
        if hashlib.sha256(data).hexdigest() == index.tokenizer_hash:
            return Tokenizer(data, index.tokenizer_name)
    return None


def num_shard_bytes(indices: Iterable[SourceIndex]) -> int:
    """Return the bytes of all shards of some sources."""
    return sum(shard.size for index in indices for shard in index.shards)
