"""Packed windows of the stream, and the rows of several windows joined into one step."""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.pack import PackedWindow
from data_pipeline.plan.step_plan import ItemTable, SampleTable

Table = TypeVar("Table", SampleTable, ItemTable)


@dataclass(frozen=True, eq=False)
class Window:
    """A packed window with its samples, ordered by (row, start), and their items."""

    packed: PackedWindow
    samples: SampleTable  # rows of the window; starts in the row
    items: ItemTable  # samples of the window; starts in the row
    item_ptr: NDArray[np.int64]  # [samples + 1]; items of sample i are item_ptr[i]:item_ptr[i + 1]

    def tokens_before(self, row: int, kept: NDArray[np.bool_]) -> tuple[int, int]:
        """Return text and vision tokens of the `kept` samples in the rows before `row`."""
        end = int(self.packed.row_ptr[row])
        items, media = int(self.item_ptr[end]), self.items
        vision = int(media.tokens[:items].sum(dtype=np.int64, where=kept[media.sample[:items]]))
        return int(self.samples.length[:end].sum(dtype=np.int64, where=kept[:end])) - vision, vision


def join(pieces: Sequence[tuple[Window, int, int]]) -> tuple[SampleTable, ItemTable]:
    """Join rows first..end-1 of each (window, first, end) into the rows of a step."""
    samples: list[SampleTable] = []
    items: list[ItemTable] = []
    rows_before = samples_before = 0
    for window, first, end in pieces:
        begin, stop = (int(window.packed.row_ptr[row]) for row in (first, end))
        part, shift = slice(begin, stop), np.int32(rows_before - first)
        chosen = _slice(window.samples, part)
        samples.append(replace(chosen, row=chosen.row + shift))
        some = _slice(window.items, slice(int(window.item_ptr[begin]), int(window.item_ptr[stop])))
        sample = some.sample + np.int32(samples_before - begin)
        items.append(replace(some, row=some.row + shift, sample=sample))
        rows_before += end - first
        samples_before += stop - begin
    return _concatenate(samples), _concatenate(items)


def _slice(table: Table, part: slice) -> Table:
    return type(table)(*(getattr(table, column.name)[part] for column in fields(table)))


def _concatenate(tables: Sequence[Table]) -> Table:
    first = tables[0]
    if len(tables) == 1:
        return first
    columns = [column.name for column in fields(first)]
    return type(first)(*(np.concatenate([getattr(t, c) for t in tables]) for c in columns))
