"""Reads and writes the files of a source's index.

The index is a Parquet file with a row per sample (groups are list columns) and a small JSON
manifest with the hash of that file, the hashes of the shards and the tokenizer. The manifest is
written last, and a source exists once it has a manifest. Reading checks the manifest's schema, and
the index against the manifest; `data_pipeline/index/reads.py` reads the samples.
"""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from data_pipeline.index.columns import (
    COLUMNS,
    GROUPS,
    LISTED,
    SAMPLE_COLUMNS,
    SCHEMA,
    ShardInfo,
    SourceIndex,
)
from data_pipeline.index.own_keys import check_form, first_shards
from data_pipeline.index.redacted import with_redacted
from data_pipeline.names import did_you_mean
from data_pipeline.store.json_objects import UnsoundJson, parse_json, read_bounded, read_json
from data_pipeline.store.open import MissingBucket, MissingKey, Store, StoreError


class IndexMismatch(Exception):
    """Index, manifest and shards do not belong together, or bytes were damaged at rest."""


RUN_SOURCES = "sources.json"
"""File in a run folder with the sources that the run reads (`access.run_sources`)."""
RUN_MIXTURES = "mixtures.json"
"""File in a run folder with the mixture weights and their changes (`plan.report.mixtures`)."""
RUN_TOMBSTONES = "tombstones.json"
"""File in a run folder with the steps from which samples are excluded
(`plan.tombstones.Tombstones`)."""
RUN_BEGAN_AT = "data_began_at.json"
"""File in a run folder with the loader's state before the first step, if that is not step 1."""

MOST_SHARDS = 1 << 18
"""Maximum shards of a manifest: 67 TB at ingest's default shard size."""
_MANIFEST_BYTES = 64 << 20
# Maximum folders checked to suggest a source for a misspelt name; each check costs a request.
_MOST_LOOKED_AT = 100


def run_folders(places: Iterable[Path]) -> list[Path]:
    """Return the run folders among paths or below them, resolved and sorted.

    Raises:
        ValueError: a path neither is nor contains a run folder.
    """
    found: set[Path] = set()
    for place in places:
        inside = [place / RUN_SOURCES]
        if not inside[0].is_file():
            inside = list(place.glob(f"**/{RUN_SOURCES}"))
        if not inside:
            raise ValueError(f"{place}: no run here that has left {RUN_SOURCES}")
        found |= {file.parent.resolve() for file in inside}
    return sorted(found)


def identity_of(manifest: Mapping[str, Any]) -> str:
    """Return the hash by which runs identify a source, independent of redactions.

    Equals `SourceIndex.identity`; may be "" for an unchecked manifest.
    """
    made_as = manifest.get("redacted", {}).get("made_as")
    return str(made_as or manifest.get("content_hash", ""))


def manifest_key(name: str) -> str:
    """Return the key of a source's manifest."""
    return f"{name}/manifest.json"


def index_key(name: str) -> str:
    """Return the key of a source's index."""
    return f"{name}/index.parquet"


def provenance_key(name: str) -> str:
    """Return the key of a source's provenance."""
    return f"{name}/provenance.json"


def write_index(
    store: Store, index: SourceIndex, provenance: Mapping[str, Any] | None = None
) -> None:
    """Write provenance.json if given, index.parquet, then manifest.json; the source then exists.

    Args:
        provenance: JSON that describes the source's origin; not part of its content hash.

    Raises:
        ValueError: a source of this name exists, or there are too many shards.
    """
    refuse_finished(store, index.name)
    refuse_shards(index.name, len(index.shards))
    data = _to_parquet(index)
    if provenance is not None:
        told = json.dumps(provenance, indent=1) + "\n"  # ASCII, as file names need not be UTF-8
        store.put(provenance_key(index.name), told.encode())
    manifest = {
        "schema": SCHEMA,
        "name": index.name,
        "category": index.category,
        "tokenizer": {"name": index.tokenizer_name, "sha256": index.tokenizer_hash},
        "samples": index.num_samples,
        "items": index.num_items,
        "shards": [asdict(shard) for shard in index.shards],
        "index_sha256": hashlib.sha256(data).hexdigest(),
        "content_hash": index.content_hash,
    }
    if index.redacted:  # in the source whose shards this one references
        manifest["redacted"] = {"made_as": "", "samples": list(index.redacted), "replaced": []}
    check_form(manifest)
    store.put(index_key(index.name), data)
    text = json.dumps(manifest, indent=1, ensure_ascii=False) + "\n"
    new = store.put_new(manifest_key(index.name), text.encode())
    # If the connection breaks after the write, the store refuses the retry although it succeeded.
    if not new and store.get(manifest_key(index.name)) != text.encode():
        refuse_finished(store, index.name)


def refuse_finished(store: Store, name: str) -> None:
    """Raise ValueError if a finished source of this name exists."""
    try:
        store.head(manifest_key(name))
    except (MissingKey, MissingBucket):
        return
    raise ValueError(
        f"{store.uri}/{name}: a finished source of this name exists, and runs may be reading it; "
        "choose another name, or delete the folder first"
    )


def refuse_shards(name: str, count: int) -> None:
    """Raise ValueError if a source would have more than `MOST_SHARDS` shards."""
    if count > MOST_SHARDS:
        raise ValueError(
            f"source {name!r}: {count} shards, at most {MOST_SHARDS}; make larger shards "
            "(--shard-mb) or several sources"
        )


def sources_at(store: Store) -> list[str]:
    """Return the names of the finished sources under a store's root, sorted."""
    return folders_with(store.list(), "manifest.json")


def folders_with(keys: Iterable[str], file: str) -> list[str]:
    """Return the top-level folders that contain a file of this name, sorted."""
    parts = (key.split("/") for key in keys)
    return sorted(found[0] for found in parts if len(found) == 2 and found[1] == file)


def read_index(store: Store, name: str) -> SourceIndex:
    """Read and check a source.

    Raises:
        MissingKey: there is no manifest: no such source, or its ingest did not finish.
        IndexMismatch: another schema, or the index or the redactions do not match the manifest.
        ValueError: the name is that of a version in the catalogue.
    """
    where, manifest = f"{store.uri}/{name}", read_manifest(store, name)
    data = store.get(index_key(name))
    sha256 = hashlib.sha256(data).hexdigest()
    expect(where, "index_sha256", sha256, manifest["index_sha256"])
    table = read_table(data, f"{where}/index.parquet")
    index = index_of(table, manifest, sha256)
    if index.made_as:
        first = {**manifest, "shards": first_shards(manifest)}
        del first["redacted"]
        made_as = index_of(table, first, sha256).content_hash
        expect(where, "redacted.made_as", index.made_as, made_as)
    expect(where, "samples", index.num_samples, manifest["samples"])
    expect(where, "items", index.num_items, manifest["items"])
    expect(where, "content_hash", index.content_hash, manifest["content_hash"])
    return index


def read_manifest(store: Store, name: str) -> dict[str, Any]:
    """Read only a source's manifest and check its schema and form (`own_keys`).

    Raises:
        MissingKey, IndexMismatch, ValueError: as for `read_index`.
    """
    return read_manifest_file(store, name)[0]


def read_manifest_file(store: Store, name: str) -> tuple[dict[str, Any], bytes]:
    """Read a manifest as `read_manifest` does; also return the bytes of the file."""
    where = f"{store.uri}/{name}"
    if "@" in name:
        raise ValueError(
            f"{name!r} is a version in the catalogue, which is asked once, before a run's "
            f"processes start: give the folder (kimi-pretrain data catalog resolve {name} --root "
            f"{store.uri})"
        )
    try:
        data = read_bounded(store, manifest_key(name), _MANIFEST_BYTES)
        manifest = parse_json(data, f"{where}/manifest.json")
    except MissingKey as error:
        raise MissingKey(
            f"{where}: no manifest.json, so no finished source of this name; "
            f"{_others(store, name)}check the name or run the ingest (again)"
        ) from error
    except UnsoundJson as error:
        raise IndexMismatch(f"{error}; ingest the source again") from error
    found = manifest.get("schema") if isinstance(manifest, dict) else None
    if found != SCHEMA:
        raise IndexMismatch(
            f"{where}/manifest.json: schema is {found!r}, this version reads {SCHEMA!r}; ingest "
            "the source again or use the version that wrote it"
        )
    shards = manifest.get("shards")
    if isinstance(shards, list) and len(shards) > MOST_SHARDS:
        raise IndexMismatch(
            f"{where}/manifest.json: names {len(shards)} shards, expected at most {MOST_SHARDS}; "
            "ingest the source again, as several sources"
        )
    try:
        check_form(manifest)
    except ValueError as error:
        raise IndexMismatch(
            f"{where}/manifest.json: does not have its form: {error}; nothing is read, copied or "
            "removed by it: restore it, or ingest the source again"
        ) from error
    return manifest, data


def read_provenance(store: Store, name: str) -> dict[str, Any] | None:
    """Return the provenance of a source; None if an earlier version, without provenance, wrote it.

    Raises:
        IndexMismatch: the provenance is not a JSON object.
    """
    try:
        found = read_json(store, provenance_key(name), _MANIFEST_BYTES)
    except MissingKey:
        return None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise IndexMismatch(f"{store.uri}/{provenance_key(name)}: expected a JSON object")
    return found


def _others(store: Store, name: str) -> str:
    """Return a hint with similar source names for a missing source; "" if there is none."""
    found = []
    with suppress(StoreError):
        for folder in islice(store.list_folders(), _MOST_LOOKED_AT):
            with suppress(MissingKey):
                store.head(manifest_key(folder))
                found.append(folder)
    return f"{did_you_mean(name, found)}; " if found else ""


def expect(where: str, what: str, found: object, expected: object) -> None:
    """Raise IndexMismatch unless `found` equals `expected`."""
    if found != expected:
        raise IndexMismatch(
            f"{where}: {what} is {found}, expected {expected}; index and data do not belong "
            "together: restore the objects or ingest the source again"
        )


def _to_parquet(index: SourceIndex) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table_of(index), sink, compression="zstd")
    return sink.getvalue()


@contextmanager
def refused_parquet(where: str) -> Iterator[None]:
    """Raise IndexMismatch for what Arrow cannot read; errors of the disk pass."""
    try:
        yield
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        told = " ".join(str(error).split())
        raise IndexMismatch(
            f"{where}: no Parquet file that can be read: {told:.200}; restore it, or ingest the "
            "source again"
        ) from error


def read_table(data: bytes, where: str = "index.parquet") -> pa.Table:
    """Return the rows of an index file.

    Arrow reads a copy in its own memory, because its threads may release the file's bytes after the
    last row has been read. If Python owned these bytes, a process that exits at that moment would
    abort, because the thread would need the GIL.
    """
    copy = pa.allocate_buffer(len(data))
    memoryview(copy).cast("B")[:] = data
    with refused_parquet(where):
        return pq.ParquetFile(pa.BufferReader(copy)).read()


def check_columns(table: pa.Table, name: str) -> None:
    """Refuse a table without the columns of an index; additional columns are allowed.

    Raises:
        IndexMismatch: a column is missing, has another type, or lacks values.
    """
    for column in ("key", *COLUMNS):
        wanted = pa.string() if column == "key" else pa.from_numpy_dtype(COLUMNS[column])
        wanted = pa.large_list(wanted) if column in LISTED else wanted
        found = table.schema.field(column).type if column in table.column_names else None
        if found != wanted:
            told = "missing" if found is None else f"of type {found}"
            raise IndexMismatch(
                f"source {name!r}: index.parquet: column {column} is {told}, expected {wanted}; "
                "ingest the source again"
            )
        for chunk in table.column(column).chunks:
            refuse_nulls(chunk, f"source {name!r}: index.parquet: column {column}")


def refuse_nulls(values: pa.Array, where: str) -> None:
    """Raise IndexMismatch if a column lacks values, or lists of it do."""
    listed = pa.types.is_large_list(values.type)
    if values.null_count or (listed and values.flatten().null_count):
        raise IndexMismatch(f"{where} lacks values; ingest the source again")


def table_of(index: SourceIndex) -> pa.Table:
    """Return the columns of an index in the form of its file, a row per sample."""
    columns: dict[str, pa.Array] = {"key": pa.array(index.key, pa.string())}
    columns |= {name: pa.array(getattr(index, name)) for name in SAMPLE_COLUMNS}
    for group, names in GROUPS.items():
        pointer = getattr(index, f"{group}_ptr")
        columns |= {name: _lists(pointer, getattr(index, name)) for name in names}
    return pa.table(columns)


def _lists(pointer: NDArray[np.int64], values: NDArray[Any]) -> pa.Array:
    return pa.LargeListArray.from_arrays(pa.array(pointer), pa.array(values))


def attributes_of(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a `SourceIndex` that the manifest alone determines."""
    return {
        "name": manifest["name"],
        "category": manifest["category"],
        "shards": tuple(ShardInfo(**shard) for shard in manifest["shards"]),
        "tokenizer_name": manifest["tokenizer"]["name"],
        "tokenizer_hash": manifest["tokenizer"]["sha256"],
    }


def numbers_of(values: pa.Array) -> NDArray[Any]:
    """Return the values of a column without nulls; bools become uint8.

    Arrow's `to_numpy` would load pandas if that is installed, which takes 0.2 s.
    """
    bits = pa.types.is_boolean(values.type)
    return np.from_dlpack(values.cast(pa.uint8()) if bits else values)


def index_of(table: pa.Table, manifest: Mapping[str, Any], sha256: str) -> SourceIndex:
    """Return the index of these rows, which may be some or all rows of its file.

    Args:
        table: rows of `index.parquet`.
        manifest: manifest of the source.
        sha256: SHA-256 (hex) of the file.

    Raises:
        IndexMismatch: as `check_columns`.
        ValueError: as `SourceIndex` and `with_redacted`.
    """
    check_columns(table, manifest["name"])

    def flat(name: str, kind: Any) -> NDArray[Any]:
        column = table.column(name).combine_chunks()
        values = column.flatten() if pa.types.is_large_list(column.type) else column
        return numbers_of(values).astype(kind)

    def pointer(group: str) -> NDArray[np.int64]:
        column = table.column(next(iter(GROUPS[group]))).combine_chunks()
        lengths = numbers_of(column.value_lengths())
        return np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])

    columns: dict[str, Any] = {f"{group}_ptr": pointer(group) for group in GROUPS}
    columns |= {name: flat(name, kind) for name, kind in COLUMNS.items()}
    keys = table.column("key").combine_chunks()
    index = SourceIndex(**attributes_of(manifest), key=keys, index_sha256=sha256, **columns)
    if (redacted := manifest.get("redacted")) is None:
        return index
    return with_redacted(index, redacted["samples"], redacted["made_as"])
