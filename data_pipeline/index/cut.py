"""A source's index on local disk in small pieces: for who looks at a few samples of millions.

index.parquet has row groups of a million samples, as it is read whole. Here it is written once more
with small ones, so that any sample's columns are read in some tens of milliseconds and megabytes.
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
_KEPT = 4  # pieces in memory
FILE = "samples.parquet"


class CutIndex:
    """The index of one source, a piece at a time, from any thread.

    Args:
        store: where the source lies.
        name: of the source.
        folder: of all such files, by content; it may be that of facts.

    Raises:
        MissingKey, IndexMismatch, ValueError: as `read_index`; nothing is left behind.
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
        """Close the file."""
        self._file.close()

    @property
    def num_samples(self) -> int:
        """Samples of the source."""
        return self.manifest["samples"]

    def around(self, sample: int) -> tuple[SourceIndex, int]:
        """Return the index of the samples around one, and the number of the first of them.

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
