"""Packs the samples of one window into rows by best-fit decreasing, from lengths only.

Every window is packed separately, with no state from the window before, so a resume repacks one
window regardless of the position. From longest to shortest, each sample goes to the row whose free
space it fills best; ties go to the row that was used last. Best-fit decreasing never needs more
than 11/9 of the optimal number of rows (plus a constant; Johnson 1973).

Rows are then numbered by the position of their longest sample. Positions are keyed-random and
independent of length, so full and half-full rows, and rows with few and with many samples, are
mixed over the steps. In the order of opening, rows would be sorted by size. Inside a row, samples
are ordered by position.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

# Free spaces are bit sets in words of this width, so finding the best row costs two small shifts
# for rows of 4,096 tokens as well as of 262,144.
WORD = 1024


@dataclass(frozen=True)
class PackedWindow:
    """Rows of a window with its n samples; columns are ordered by (row, start).

    Attributes:
        sample: int64 [n] index of the sample in the window.
        row: int32 [n] row in the window.
        start: int32 [n] first token in the row.
        length: int32 [n] tokens.
        row_ptr: int64 [rows + 1] first entry of each row in the columns, and the end.
    """

    sample: NDArray[np.int64]
    row: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]
    row_ptr: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        """Number of rows in the window."""
        return self.row_ptr.size - 1


def pack_window(lengths: Sequence[int] | NDArray[np.integer], seq_len: int) -> PackedWindow:
    """Pack samples of the given lengths, in window order, into rows of `seq_len` tokens.

    Args:
        lengths: integers [n], n >= 1, each in 1..seq_len.
        seq_len: tokens in a row.

    Raises:
        ValueError: there are no samples, or a length does not fit a row.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.ndim != 1 or sizes.size == 0:
        raise ValueError(f"cannot pack lengths of shape {sizes.shape}; need one or more samples")
    if sizes.min() < 1 or sizes.max() > seq_len:
        raise ValueError(
            f"lengths run from {sizes.min()} to {sizes.max()}; a row holds 1 to {seq_len} tokens"
        )
    # stable: equal lengths keep their order of position
    longest_first = np.argsort(-sizes, kind="stable")
    opened = np.array(best_fit(sizes[longest_first].tolist(), seq_len), np.int64)
    num_rows = int(opened.max()) + 1
    # A row's first sample in this order is its longest; in reverse, it is written last and stays.
    longest = np.empty(num_rows, np.int64)
    longest[opened[::-1]] = longest_first[::-1]
    number = np.empty(num_rows, np.int64)
    number[np.argsort(longest)] = np.arange(num_rows)

    row = np.empty(sizes.size, np.int64)
    row[longest_first] = number[opened]
    sample = np.argsort(row, kind="stable")
    row, sizes = row[sample], sizes[sample]
    row_ptr = np.searchsorted(row, np.arange(num_rows + 1))
    ends = np.cumsum(sizes)
    before = (ends - sizes)[row_ptr[:-1]]
    return PackedWindow(
        sample=sample,
        row=row.astype(np.int32),
        start=(ends - sizes - before[row]).astype(np.int32),
        length=sizes.astype(np.int32),
        row_ptr=row_ptr,
    )


def best_fit(lengths: Sequence[int], seq_len: int) -> list[int]:
    """Return the row of each length, processed in the given order; rows are numbered as opened.

    Rows of equal free space form a stack. `words[w]` has bit b set when the stack of free space
    w * WORD + b is not empty; `summary` has bit w set when words[w] is not zero.
    """
    words = [0] * (seq_len // WORD + 1)
    summary = 0
    stacks: dict[int, list[int]] = {}
    rows: list[int] = []
    num_rows = 0
    for length in lengths:
        word, bit = divmod(length, WORD)
        found = words[word] >> bit
        if found:
            free = length + (found & -found).bit_length() - 1
        elif above := summary >> (word + 1):
            word += (above & -above).bit_length()
            found = words[word]
            free = word * WORD + (found & -found).bit_length() - 1
        else:
            free = 0
        if free:
            stack = stacks[free]
            row = stack.pop()
            if not stack:
                words[free // WORD] &= ~(1 << free % WORD)
                if not words[free // WORD]:
                    summary &= ~(1 << free // WORD)
            left = free - length
        else:
            row, left = num_rows, seq_len - length
            num_rows += 1
        rows.append(row)
        if left:
            stack = stacks.setdefault(left, [])
            if not stack:
                words[left // WORD] |= 1 << left % WORD
                summary |= 1 << left // WORD
            stack.append(row)
    return rows
