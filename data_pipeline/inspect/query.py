"""Queries the facts of a source with DuckDB; only this module uses DuckDB.

Each query is one pass over a few columns of the file. A connection can read only its facts files,
no other file and no network, and its configuration is locked.
"""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import duckdb
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.inspect.distribution import ValueCounts
from data_pipeline.inspect.facts import CHUNK, IMAGE, SAMPLE, FactsFile

SAMPLES = f"kind = {SAMPLE}"
ITEMS = f"kind <> {SAMPLE}"
IMAGE_FILES = f"kind = {IMAGE} AND chunk = 0"
VIDEO_FILES = f"kind = {CHUNK} AND chunk = 0"
FILES = f"kind <> {SAMPLE} AND chunk = 0"

MEMORY = "1GB"


class FactsError(ValueError):
    """The facts cannot be read; the message names the file and the remedy."""


class Facts:
    """The facts of one source, open for queries from any thread.

    Args:
        file: facts file from `write_facts`.
        other: facts of another source, available as table `other`.
        threads: DuckDB threads; None for one per core.
        memory: DuckDB's memory limit; above it DuckDB spills to disk, next to the facts.

    Raises:
        FactsError: a file cannot be read.
    """

    def __init__(
        self,
        file: FactsFile,
        other: FactsFile | None = None,
        threads: int | None = None,
        memory: str = MEMORY,
    ) -> None:
        self.file, self._lock, self._memory = file, threading.Lock(), memory
        paths = {"facts": file.path} | ({} if other is None else {"other": other.path})
        allowed = ", ".join(_quoted(path) for path in paths.values())
        self._connection = duckdb.connect(":memory:")
        for setting in (
            "autoinstall_known_extensions = false",
            "autoload_known_extensions = false",
            f"memory_limit = '{memory}'",
            "enable_external_file_cache = false",  # it counts toward the limit
            f"temp_directory = {_quoted(file.path.parent / '.spill')}",
            *(() if threads is None else (f"threads = {threads}",)),
            f"allowed_paths = [{allowed}]",
            "enable_external_access = false",
            "lock_configuration = true",
        ):
            self._connection.execute(f"SET {setting}")
        for name, path in paths.items():
            self._run(f"CREATE VIEW {name} AS SELECT * FROM read_parquet({_quoted(path)})")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the memory and the file."""
        self._connection.close()

    def columns(self, query: str, values: Sequence[object] = ()) -> dict[str, NDArray[Any]]:
        """Return the columns of a query's result, which must not contain nulls."""
        return self._run(query, values, "fetchnumpy")

    def rows(self, query: str, values: Sequence[object] = ()) -> list[tuple[Any, ...]]:
        """Return the rows of a query's result."""
        return self._run(query, values, "fetchall")

    def sums(self, columns: Sequence[str], where: str) -> dict[str, int]:
        """Return the number of rows that match, and the sum of each column or expression."""
        parts = ", ".join(f"coalesce(sum({column}), 0)::BIGINT" for column in columns)
        (row,) = self.rows(f"SELECT count(*), {parts} FROM facts WHERE {where}")
        return dict(zip(("rows", *columns), row, strict=True))

    def counted(self, column: str, where: str, table: str = "facts") -> ValueCounts:
        """Return the counts of each value of an integer column or expression."""
        found = self.columns(
            f"SELECT {column} AS value, count(*) AS n FROM {table} WHERE {where} "
            "GROUP BY value ORDER BY value"
        )
        return ValueCounts(found["value"].astype(np.int64), found["n"].astype(np.int64))

    def keys(self, samples: Sequence[int]) -> dict[int, str]:
        """Return a map from sample numbers to keys."""
        if not samples:
            return {}
        # Literal numbers in the query let DuckDB skip most of the file.
        numbers = ", ".join(str(int(sample)) for sample in samples)
        return dict(
            self.rows(f"SELECT sample, key FROM facts WHERE {SAMPLES} AND sample IN ({numbers})")
        )

    def members(
        self, columns: str, where: str, fingerprints: NDArray[np.uint64]
    ) -> dict[str, NDArray[Any]]:
        """Return columns of the rows whose fingerprint is in `fingerprints`."""
        query = f"SELECT {columns} FROM facts SEMI JOIN wanted USING (fingerprint) WHERE {where}"
        return self._run(query, (), "fetchnumpy", pa.table({"fingerprint": fingerprints}))

    def _run(
        self,
        query: str,
        values: Sequence[object] = (),
        fetch: str = "fetchall",
        wanted: pa.Table | None = None,
    ) -> Any:
        # An open result occupies its connection, so each query uses a separate cursor.
        with self._lock:
            cursor = self._connection.cursor()
        try:
            if wanted is not None:
                cursor.register("wanted", wanted)
            return getattr(cursor.execute(query, values), fetch)()
        except duckdb.OutOfMemoryException as error:
            raise FactsError(
                f"{self.file.path}: DuckDB may use {self._memory} and the disk beside the file, "
                f"which did not suffice ({_reason(error)})"
            ) from error
        except (
            duckdb.IOException,
            duckdb.InvalidInputException,
            duckdb.PermissionException,
            duckdb.SerializationException,
        ) as error:
            raise FactsError(
                f"{self.file.path}: not facts as they were written ({_reason(error)}); delete it, "
                "and it is written again"
            ) from error
        finally:
            cursor.close()


def _reason(error: duckdb.Error) -> str:
    return str(error).splitlines()[0]


def _quoted(path: Path) -> str:
    """Return a path as an SQL string literal."""
    return "'" + str(path.resolve()).replace("'", "''") + "'"
