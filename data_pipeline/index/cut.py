"""Local copy of a source's index in small row groups, for random access to single samples.

index.parquet has row groups of a million samples, because it is read whole. This module rewrites it
with small row groups, so that the columns of any sample load in tens of milliseconds and tens of
megabytes.
"""

import os
import secrets
import threading
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.manifest import read_manifest, table_of
from data_pipeline.index.parts import index_parts, part_of
from data_pipeline.store.open import Store

PIECE = 1 << 14  # samples
_KEPT = 4  # maximum pieces in memory
FILE = "samples.parquet"


class CutIndex:
    """The index of one source, read piece by piece; usable from any thread.

    Args:
        store: root that holds the source.
        name: name of the source.
        folder: folder of all such files, keyed by content hash; may be the folder of facts.

    Raises:
        MissingKey, IndexMismatch, ValueError: as for `read_index`; no files are left behind.
        OSError: the folder cannot be written.
    """

    def __init__(self, store: Store, name: str, folder: Path) -> None:
        self.manifest = read_manifest(store, name)
        path = folder / self.manifest["content_hash"] / FILE
        if not path.exists():
            _write(store, name, path)
        self._file = pq.ParquetFile(path)
        self._pieces: OrderedDict[int, SourceIndex] = OrderedDict()
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the index file."""
        self._file.close()

    @property
    def num_samples(self) -> int:
        """Number of samples in the source."""
        return self.manifest["samples"]

    def around(self, sample: int) -> tuple[SourceIndex, int]:
        """Return the index of the piece around a sample, and the number of its first sample.

        Raises:
            ValueError: the source has no such sample.
        """
        if not 0 <= sample < self.num_samples:
            raise ValueError(
                f"source {self.manifest['name']!r}: no sample {sample}; it has {self.num_samples}"
            )
        number = sample // PIECE
        with self._lock:
            if number not in self._pieces:
                rows = self._file.read_row_group(number)
                sha256 = self.manifest["index_sha256"]
                self._pieces[number] = part_of(rows, self.manifest, sha256, number * PIECE)
                if len(self._pieces) > _KEPT:
                    self._pieces.popitem(last=False)
            self._pieces.move_to_end(number)
            return self._pieces[number], number * PIECE


def _write(store: Store, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{os.getpid()}-{secrets.token_hex(4)}"
    copy, unfinished = (path.with_name(f".{kind}-{mark}") for kind in ("index", "samples"))
    writer: Any = None
    try:
        for part in index_parts(store, name, copy, PIECE):
            rows = table_of(part)
            writer = writer or pq.ParquetWriter(unfinished, rows.schema, compression="zstd")
            writer.write_table(rows, row_group_size=PIECE)
        if writer is None:  # a source without samples
            pq.write_table(pq.ParquetFile(copy).read(), unfinished)
        else:
            writer.close()
        os.replace(unfinished, path)
    finally:
        for one in (copy, unfinished):
            one.unlink(missing_ok=True)
