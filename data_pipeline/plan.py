"""What a global step consists of, from metadata alone: every rank computes the same answer.

    position -> (source, draw) -> sample -> length -> row          blend, order, layout, pack
    step     -> the next `rows_per_step` rows of the packed windows          here

Positions come in windows of `pack_window` samples; a window is packed by itself and its rows follow
those of the window before. A step takes the next rows, across window borders. Nothing depends on
ranks, workers, prefetching or on what was asked before: a step is a function of a state of a few
numbers, and the state of step k + 1 is a function of the state of step k.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.blend import Segment, append_segment, blend, weights_for_ratio
from data_pipeline.config import DataConfig
from data_pipeline.index import SourceIndex
from data_pipeline.layout import Source
from data_pipeline.pack import PackedWindow, pack_window

SCHEMA = 1
KEPT_WINDOWS = 16  # packed windows held in memory, some 50 bytes per sample

State = dict[str, Any]


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The n samples of a step, ordered by (row, start).

    Attributes:
        source: int16 [n] number of the source, in `Planner.indices` (sorted by name).
        index: int64 [n] sample in the source's index.
        position: int64 [n] position in the stream.
        epoch: int32 [n] how often the source had been gone through before.
        row: int32 [n] row of the step.
        start: int32 [n] first token in the row.
        length: int32 [n] tokens.
    """

    source: NDArray[np.int16]
    index: NDArray[np.int64]
    position: NDArray[np.int64]
    epoch: NDArray[np.int32]
    row: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class ItemTable:
    """The m media items (images, video chunks) of a step, ordered by (row, start).

    Attributes:
        sample: int32 [m] its sample, in the SampleTable.
        item: int64 [m] its line in the source's item columns.
        kind: int8 [m] KIND_IMAGE or KIND_VIDEO.
        media: int16 [m] number of its file in the sample.
        chunk: int16 [m] number of the chunk in its video.
        frames, grid_h, grid_w: int32 [m] patches along each side.
        row: int32 [m] row of the step.
        start: int32 [m] first media-pad token in the row.
        tokens: int32 [m] media-pad tokens.
    """

    sample: NDArray[np.int32]
    item: NDArray[np.int64]
    kind: NDArray[np.int8]
    media: NDArray[np.int16]
    chunk: NDArray[np.int16]
    frames: NDArray[np.int32]
    grid_h: NDArray[np.int32]
    grid_w: NDArray[np.int32]
    row: NDArray[np.int32]
    start: NDArray[np.int32]
    tokens: NDArray[np.int32]

    @property
    def patches(self) -> NDArray[np.int64]:
        """Patches of each item, int64 [m]."""
        return self.frames.astype(np.int64) * self.grid_h * self.grid_w


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """One global step: `num_rows` rows of `seq_len` tokens, their samples and media items."""

    step: int
    seq_len: int
    num_rows: int
    samples: SampleTable
    items: ItemTable

    @property
    def num_tokens(self) -> int:
        """Tokens of samples; padding is not counted."""
        return int(self.samples.length.sum(dtype=np.int64))

    @property
    def vision_tokens(self) -> int:
        """Media-pad tokens."""
        return int(self.items.tokens.sum(dtype=np.int64))

    @property
    def text_tokens(self) -> int:
        """Tokens of samples that are no media pads."""
        return self.num_tokens - self.vision_tokens

    @property
    def fill_rate(self) -> float:
        """Tokens of samples over tokens of rows."""
        return self.num_tokens / (self.num_rows * self.seq_len)

    def cu_seqlens(self, row: int) -> NDArray[np.int32]:
        """Return [0, end of each sample..., seq_len] of a row; a padding tail is the last piece."""
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row {row} of a step of {self.num_rows} rows")
        first, end = np.searchsorted(self.samples.row, [row, row + 1])
        ends = self.samples.start[first:end] + self.samples.length[first:end]
        tail = [self.seq_len] if not ends.size or ends[-1] < self.seq_len else []
        return np.concatenate([[0], ends, tail]).astype(np.int32)

    def content_hash(self) -> str:
        """Return the sha256 over every number of the plan."""
        digest = hashlib.sha256(f"{self.step} {self.seq_len} {self.num_rows}".encode())
        for table in (self.samples, self.items):
            for column in fields(table):
                values = np.ascontiguousarray(getattr(table, column.name))
                digest.update(f"\n{column.name} {values.dtype.str} {values.size}\n".encode())
                digest.update(values.tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class _Window:
    """A packed window with what stands where; columns ordered by (row, start)."""

    packed: PackedWindow
    source: NDArray[np.int16]
    index: NDArray[np.int64]
    position: NDArray[np.int64]
    epoch: NDArray[np.int64]


class Planner:
    """Plans steps from the indices of all sources.

    Args:
        indices: one per source of the config, in any order; numbered by sorted name in plans.
        config: the data config.

    Raises:
        ValueError: indices and config name different sources, a source has no usable sample, or
            the vision ratio cannot be reached.
    """

    def __init__(self, indices: Sequence[SourceIndex], config: DataConfig):
        self.config = config
        self.indices = tuple(sorted(indices, key=lambda index: index.name))
        names = tuple(index.name for index in self.indices)
        if names != config.source_names:
            raise ValueError(f"config names sources {config.source_names}, indices are {names}")
        self._sources = [
            Source(index, config.limits, config.seq_len, config.shard_window, config.seed)
            for index in self.indices
        ]
        self._totals = [source.totals for source in self._sources]
        shares = [config.sources[name] for name in names]
        self.weights = weights_for_ratio(self._totals, shares, config.vision_token_ratio)
        contents = "\n".join(f"{index.name} {index.content_hash}" for index in self.indices)
        self.manifest = hashlib.sha256(contents.encode()).hexdigest()
        limits = config.limits
        self._packing = {
            "seq_len": config.seq_len,
            "pack_window": config.pack_window,
            "shard_window": config.shard_window,
            "limits": [limits.image, limits.frame, limits.side],
        }
        self._window = lru_cache(maxsize=KEPT_WINDOWS)(self._pack)
        self._segments = lru_cache(maxsize=KEPT_WINDOWS)(self._build_segments)
        self._state = self._encode(self._segments(((0, self.weights),)), 0, 0, 0)

    def plan(self, state: Mapping[str, Any]) -> tuple[GlobalPlan, State]:
        """Return the plan of the state's step and the state after it. Pure; `state` is kept.

        Raises:
            ValueError: the state belongs to other data, another seed or another packing.
        """
        segments = self._decode(state)
        window, row, missing = state["window"], state["row"], self.config.rows_per_step
        pieces: list[tuple[_Window, int, int]] = []
        while missing:
            content = self._window(window, segments)
            if row >= content.packed.num_rows:
                raise ValueError(
                    f"state field 'row' is {row}, but window {window} has "
                    f"{content.packed.num_rows} rows"
                )
            end = min(row + missing, content.packed.num_rows)
            pieces.append((content, row, end))
            missing -= end - row
            window, row = (window + 1, 0) if end == content.packed.num_rows else (window, end)
        samples = _join(pieces)
        seq_len, num_rows = self.config.seq_len, self.config.rows_per_step
        plan = GlobalPlan(state["step"], seq_len, num_rows, samples, self._items(samples))
        return plan, self._encode(segments, window, row, state["step"] + 1)

    def state_at(self, step: int) -> State:
        """Return the state before `step` of a run that began at step 0 with this config.

        Packs every window up to there: no bytes are read, but cost grows with `step`.
        """
        segments = self._segments(((0, self.weights),))
        window, row = 0, step * self.config.rows_per_step
        while row >= (rows := self._window(window, segments).packed.num_rows):
            window, row = window + 1, row - rows
        return self._encode(segments, window, row, step)

    def state_dict(self) -> State:
        """Return the state to begin with: step 0, or what `load_state_dict` was given."""
        return json.loads(json.dumps(self._state))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Check a state and begin with it.

        Raises:
            ValueError: naming the field that does not belong to this planner.
        """
        self._decode(state)
        self._state = json.loads(json.dumps(dict(state)))

    def with_own_blend(self, state: Mapping[str, Any]) -> State:
        """Return a state that goes over to this config's shares at the next window.

        What was handed out stays; the window in progress is finished with its own shares.
        """
        segments = self._decode(state, own_blend=False)
        if segments[-1].weights == self.weights:
            return dict(state)
        start = (state["window"] + (state["row"] > 0)) * self.config.pack_window
        kept = tuple(segment for segment in segments if segment.start < start)
        segments = append_segment(kept, start, self.weights, self.config.seed)
        return self._encode(segments, state["window"], state["row"], state["step"])

    def report(self) -> dict[str, Any]:
        """Return what the blend comes to, ready for JSON.

        Per source: samples, samples too long for a row (their places are filled by others),
        longest sample, mean tokens of a draw, share of draws, of tokens, and of media tokens in its
        own tokens; for the whole: the expected share of media tokens.
        """
        rate = [w * t.tokens / t.samples for w, t in zip(self.weights, self._totals)]
        sources: dict[str, Any] = {}
        vision = 0.0
        for i, (source, total) in enumerate(zip(self._sources, self._totals)):
            inside = total.vision_tokens / total.tokens
            vision += rate[i] / sum(rate) * inside
            sources[total.name] = {
                "samples": total.samples,
                "too_long": int(source.too_long.size),
                "longest": int(source.layout.length.max()),
                "mean_tokens": total.tokens / total.samples,
                "draw_share": self.weights[i] / sum(self.weights),
                "token_share": rate[i] / sum(rate),
                "vision_share": inside,
            }
        return {"sources": sources, "vision_token_ratio": vision, "manifest": self.manifest}

    def _pack(self, window: int, segments: tuple[Segment, ...]) -> _Window:
        size = self.config.pack_window
        position = np.arange(window * size, (window + 1) * size)
        source, draw = blend(position, segments, self.config.seed)
        index, epoch, length = np.empty_like(draw), np.empty_like(draw), np.empty_like(draw)
        for number, content in enumerate(self._sources):
            chosen = np.flatnonzero(source == number)
            if chosen.size:
                index[chosen], epoch[chosen] = content.samples(draw[chosen])
                length[chosen] = content.layout.length[index[chosen]]
        packed = pack_window(length, self.config.seq_len)
        at = packed.sample
        return _Window(packed, source[at], index[at], position[at], epoch[at])

    def _items(self, samples: SampleTable) -> ItemTable:
        num_samples = samples.index.size
        first, count = np.zeros(num_samples, np.int64), np.zeros(num_samples, np.int64)
        for number, source in enumerate(self._sources):
            chosen = samples.source == number
            index, ptr = samples.index[chosen], source.index.item_ptr
            first[chosen], count[chosen] = ptr[index], ptr[index + 1] - ptr[index]
        sample = np.repeat(np.arange(num_samples), count)
        within = np.arange(sample.size) - np.repeat(np.cumsum(count) - count, count)
        item = first[sample] + within
        columns = np.zeros((sample.size, 8), np.int64)
        owner = samples.source[sample]
        for number, source in enumerate(self._sources):
            chosen = np.flatnonzero(owner == number)
            at, index = item[chosen], source.index
            columns[chosen, 0] = index.item_kind[at]
            columns[chosen, 1] = index.item_media[at]
            columns[chosen, 2] = index.item_chunk[at]
            columns[chosen, 3:6] = source.layout.grid[at]
            columns[chosen, 6] = source.layout.start[at]
            columns[chosen, 7] = source.layout.tokens[at]
        kind, media, chunk, frames, grid_h, grid_w, start, tokens = columns.T
        return ItemTable(
            sample=sample.astype(np.int32),
            item=item,
            kind=kind.astype(np.int8),
            media=media.astype(np.int16),
            chunk=chunk.astype(np.int16),
            frames=frames.astype(np.int32),
            grid_h=grid_h.astype(np.int32),
            grid_w=grid_w.astype(np.int32),
            row=samples.row[sample],
            start=(samples.start[sample] + start).astype(np.int32),
            tokens=tokens.astype(np.int32),
        )

    def _build_segments(
        self, parts: tuple[tuple[int, tuple[int, ...]], ...]
    ) -> tuple[Segment, ...]:
        segments: tuple[Segment, ...] = ()
        for start, weights in parts:
            segments = append_segment(segments, start, weights, self.config.seed)
        return segments

    def _encode(self, segments: tuple[Segment, ...], window: int, row: int, step: int) -> State:
        # Counts are left out: they follow from starts and weights, and a state has to stay small.
        return {
            "schema": SCHEMA,
            "manifest": self.manifest,
            "packing": dict(self._packing),
            "seed": self.config.seed,
            "segments": [{"start": s.start, "weights": list(s.weights)} for s in segments],
            "window": int(window),
            "row": int(row),
            "step": int(step),
        }

    def _decode(self, state: Mapping[str, Any], own_blend: bool = True) -> tuple[Segment, ...]:
        """Check a state field by field and return its blend segments."""
        expected = self._encode((), 0, 0, 0)
        if set(state) != set(expected):
            raise ValueError(f"state has fields {sorted(state)}, expected {sorted(expected)}")
        for field in ("schema", "manifest", "seed"):
            _same(field, state[field], expected[field])
        for field, value in self._packing.items():
            _same(f"packing.{field}", state["packing"].get(field), value)
        for field in ("window", "row", "step"):
            value = state[field]
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"state field {field!r} is {value!r}; expected an integer >= 0")
        segments = self._segments(
            tuple((part["start"], tuple(part["weights"])) for part in state["segments"])
        )
        if own_blend and segments[-1].weights != self.weights:
            raise ValueError(
                f"state field 'segments' ends with weights {segments[-1].weights}, this config "
                f"gives {self.weights}; to go on with the new shares from the next window on, "
                "pass the state through Planner.with_own_blend"
            )
        return segments


def _same(field: str, value: object, expected: object) -> None:
    if value != expected:
        raise ValueError(
            f"state field {field!r} is {value!r}, this run has {expected!r}: the state belongs "
            "to another run and its rows would not be continued"
        )


def _join(pieces: Sequence[tuple[_Window, int, int]]) -> SampleTable:
    """Take rows [first, end) of each window and number them through as the rows of a step."""
    parts: list[tuple[NDArray[Any], ...]] = []
    rows_before = 0
    for window, first, end in pieces:
        packed = window.packed
        part = slice(int(packed.row_ptr[first]), int(packed.row_ptr[end]))
        parts.append(
            (
                window.source[part],
                window.index[part],
                window.position[part],
                window.epoch[part].astype(np.int32),
                packed.row[part] + np.int32(rows_before - first),
                packed.start[part],
                packed.length[part],
            )
        )
        rows_before += end - first
    return SampleTable(*(np.concatenate(column) for column in zip(*parts)))
