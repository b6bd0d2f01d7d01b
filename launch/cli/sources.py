"""Resolves command arguments: sources under a URI, a source's tokenizer, a sample by its key."""

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
# Number of keys compared for "did you mean"; a search of all keys would take too long.
_KEYS_COMPARED = 20_000


def split_source(uri: str) -> tuple[str, str]:
    """Return the root ("." for a bare name) and the name of a source's URI."""
    root, _, name = uri.rstrip("/").rpartition("/")
    return root or ".", name


def open_sources(uri: str, endpoint: str | None, wanted: Sequence[str]) -> tuple[Store, list[str]]:
    """Open the root that a URI names, and select sources in it.

    Args:
        uri: a root that holds sources, or one source itself.
        endpoint: endpoint of an object store; None uses the environment's.
        wanted: names of sources; empty or "all" selects every source.

    Returns:
        The store of the root, and the sorted names.

    Raises:
        ValueError: there is no source at all, or none with a wanted name; suggests the nearest.
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
        ValueError: no sample has this key; suggests the nearest.
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
    """Open a rank file, given as a key under the root, a path or a URI.

    Raises:
        StoreError: the URI names no file.
        ValueError: no file has this name, or it is not a complete rank file.
    """
    file, ranks = rank_file(name, store, endpoint)
    return Tokenizer(ranks, file)


def rank_file(name: str, store: Store, endpoint: str | None) -> tuple[str, bytes]:
    """Return name and content of a rank file; `named_tokenizer` explains the search."""
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
    """Store a rank file as tokenizer/NAME.tiktoken under the root; return its tokenizer.

    Raises:
        ValueError: the rank file is incomplete, the name is not a plain name, or a different file
            already has this name (sources may have been counted with it).
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
    """Open the training inputs of a tokenizer; show the bytes read and the samples left out.

    Args:
        inputs: finished sources, or raw inputs as for `data ingest`.
        category: category of the raw inputs.
        num_bytes: limit for all texts together; each input gets an equal part.
        endpoint: endpoint of an object store; None uses the environment's.
        follow_links: allow links out of an input's folder.

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
    """Open one input immediately, so that a missing input fails before any text is read."""
    if ("://" in where or Path(where).is_dir()) and not where.endswith(RAW_FILES):
        found = open_store(where, endpoint=endpoint)
        if _exists(found, "manifest.json"):
            store, names = open_sources(where, endpoint, ())
            return source_texts(store, read_index(store, names[0]))
    reader = open_inputs([where], category, follow_links=follow_links)
    return input_texts(reader, skipped)


def own_tokenizer(store: Store, index: SourceIndex) -> Tokenizer | None:
    """Return the tokenizer of a source, or None if the root's tokenizer/ does not have it."""
    for key in store.list("tokenizer/"):
        data = store.get(key)
        if hashlib.sha256(data).hexdigest() == index.tokenizer_hash:
            return Tokenizer(data, index.tokenizer_name)
    return None


def num_shard_bytes(indices: Iterable[SourceIndex]) -> int:
    """Return the total size in bytes of the shards of some sources."""
    return sum(shard.size for index in indices for shard in index.shards)
