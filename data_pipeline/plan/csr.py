"""Rows of different lengths in CSR form: row i of `values` is values[ptr[i]:ptr[i + 1]]."""

import numpy as np
from numpy.typing import NDArray


def gather_rows(
    ptr: NDArray[np.int64], rows: NDArray[np.integer]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of the chosen rows' values, int64 [k], and a new ptr, int64 [n + 1].

    Args:
        ptr: int64 [N + 1].
        rows: [n] row numbers in any order; repeats are allowed.
    """
    first = ptr[rows]
    count = ptr[np.asarray(rows) + 1] - first
    own = np.concatenate([[0], np.cumsum(count)])
    return np.repeat(first - own[:-1], count) + np.arange(own[-1]), own


def row_sums(
    values: NDArray[np.integer] | NDArray[np.bool_], ptr: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the sum of each row, int64 [n]; 0 for an empty row."""
    running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
    return running[ptr[1:]] - running[ptr[:-1]]
