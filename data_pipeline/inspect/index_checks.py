"""Checks of an index that need no shard."""

from collections.abc import Iterator

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from data_pipeline.augment.regions import NAMES, TURN
from data_pipeline.index.columns import SourceIndex
from data_pipeline.index.shards import check_sample_key
from data_pipeline.inspect.document import SHAPES, TURN_DEGREES
from data_pipeline.inspect.problem import Problem

_EPSILON = 1e-3  # pixels; coordinates are float32 and may have been scaled
_KEYS_AT_ONCE = 1 << 16


def index_problems(index: SourceIndex) -> list[Problem]:
    """Return the problems of an index: invalid or repeated keys, wrong counts, invalid regions."""
    found = [Problem(index.name, "key", detail, sample=key) for key, detail in _key_faults(index)]
    counts = np.bincount(index.shard, minlength=len(index.shards))
    for info, count in zip(index.shards, counts.tolist(), strict=True):
        if info.samples != count:
            detail = f"the manifest counts {info.samples} samples, the index {count}"
            found.append(Problem(index.name, "index", detail, info.key))
    for sample, detail in _region_faults(index):
        shard = index.shards[index.shard[sample]].key
        found.append(Problem(index.name, "region", detail, shard, index.key_of(sample)))
    return found


def _key_faults(index: SourceIndex) -> Iterator[tuple[str, str]]:
    keys = pa.array(index.key, pa.string())
    counted = keys.value_counts()
    counts = counted.field("counts").to_numpy()
    for at in np.flatnonzero(counts > 1):
        yield str(counted.field("values")[int(at)]), f"stands {counts[at]} times in the index"
    for first in range(0, len(keys), _KEYS_AT_ONCE):
        for key in keys.slice(first, _KEYS_AT_ONCE).to_pylist():
            try:
                check_sample_key(key)
            except ValueError as error:
                yield key, str(error)


def _region_faults(index: SourceIndex) -> Iterator[tuple[int, str]]:
    """Yield (sample, message) of each region with an invalid shape, item or position."""
    sample = np.repeat(np.arange(index.num_samples), np.diff(index.region_ptr))
    items = np.diff(index.item_ptr)[sample]
    placed = (index.region_item >= 0) & (index.region_item < items)
    line = np.where(placed, index.item_ptr[sample] + index.region_item, 0)
    counts = index.region_points.astype(np.int64)
    first = np.cumsum(counts) - counts
    region = np.repeat(np.arange(len(sample)), counts)  # of each point
    # A region without a valid item must not index the sizes, which may be empty.
    sizes = [np.append(column, 0) for column in (index.item_width, index.item_height)]
    width, height = (size[np.where(placed, line, -1)] for size in sizes)
    outside = _outside(index.point_x, width[region]) | _outside(index.point_y, height[region])
    outside &= index.region_shape[region] != TURN
    leaves = np.bincount(region, weights=outside, minlength=len(sample)) > 0
    for at in np.flatnonzero(~placed | leaves | _odd_shapes(index, counts, first)):
        part = slice(int(first[at]), int(first[at] + counts[at]))
        points = list(zip(index.point_x[part].tolist(), index.point_y[part].tolist()))
        number = at - int(index.region_ptr[sample[at]])
        fault = f"region {number}, {_name(int(index.region_shape[at]))} {points}"
        if not placed[at]:
            fault += f" in item {index.region_item[at]} of {items[at]}"
        elif leaves[at]:
            fault += f" in a picture of {width[at]} x {height[at]} pixels"
        else:
            fault += ": not the points that such a shape has"
        yield int(sample[at]), fault


def _outside(values: NDArray[np.float32], size: NDArray[np.int32]) -> NDArray[np.bool_]:
    return ~((values >= -_EPSILON) & (values <= size + _EPSILON))  # True for NaN too


def _odd_shapes(
    index: SourceIndex, counts: NDArray[np.int64], first: NDArray[np.int64]
) -> NDArray[np.bool_]:
    """Return bool [R], True for regions with an unknown shape or wrong points.

    Wrong points are a wrong number of points, unordered box corners, or an invalid turn angle.
    """
    right = np.zeros(len(counts), np.bool_)
    shape, x, y = index.region_shape, index.point_x, index.point_y
    for code, allowed in SHAPES.values():
        right |= (shape == code) & (counts >= allowed.start) & (counts < allowed.stop)
    box = np.flatnonzero((shape == SHAPES["box"][0]) & right)
    at = first[box]
    right[box] = (x[at] < x[at + 1]) & (y[at] < y[at + 1])
    turn = np.flatnonzero((shape == TURN) & (counts == 1))
    right[turn] = np.isin(x[first[turn]], TURN_DEGREES)
    return ~right


def _name(shape: int) -> str:
    return NAMES[shape] if 0 <= shape < len(NAMES) else f"shape {shape}"
