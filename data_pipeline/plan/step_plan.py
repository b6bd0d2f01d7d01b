"""Tables of a global step: its samples and media items, with their positions in the rows."""

import hashlib
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class SampleTable:
    """The n samples of a step, ordered by (row, start).

    Attributes:
        source: int16 [n] number of the source, in `Planner.indices` (sorted by name).
        index: int64 [n] sample in the source's index.
        part: int32 [n] part number of a split text; 0 for whole samples.
        position: int64 [n] position in the stream.
        epoch: int32 [n] number of completed epochs of the source.
        varied: bool [n] augmentation applies.
        row: int32 [n] row of the step.
        start: int32 [n] first token in the row.
        length: int32 [n] tokens.
    """

    source: NDArray[np.int16]
    index: NDArray[np.int64]
    part: NDArray[np.int32]
    position: NDArray[np.int64]
    epoch: NDArray[np.int32]
    varied: NDArray[np.bool_]
    row: NDArray[np.int32]
    start: NDArray[np.int32]
    length: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)


@dataclass(frozen=True, eq=False)
class ItemTable:
    """The m media items (images, video chunks) of a step, ordered by (row, start).

    Attributes:
        sample: int32 [m] sample of the item, in the SampleTable.
        index_line: int64 [m] row of the item in the source's item columns.
        kind: int8 [m] KIND_IMAGE or KIND_VIDEO.
        media: int16 [m] number of the media file in the sample.
        chunk: int16 [m] number of the chunk in its video.
        level: int16 [m] shrink level (`data_pipeline.plan.layout.limits_at`).
        frames, grid_h, grid_w: int32 [m] number of frames, and patch rows and columns per frame.
        row: int32 [m] row of the step.
        start: int32 [m] first media-pad token in the row.
        tokens: int32 [m] media-pad tokens.
    """

    sample: NDArray[np.int32]
    index_line: NDArray[np.int64]
    kind: NDArray[np.int8]
    media: NDArray[np.int16]
    chunk: NDArray[np.int16]
    level: NDArray[np.int16]
    frames: NDArray[np.int32]
    grid_h: NDArray[np.int32]
    grid_w: NDArray[np.int32]
    row: NDArray[np.int32]
    start: NDArray[np.int32]
    tokens: NDArray[np.int32]

    def __len__(self) -> int:
        return len(self.row)

    @property
    def patches(self) -> NDArray[np.int64]:
        """Patches of each item, int64 [m]."""
        return self.frames.astype(np.int64) * self.grid_h * self.grid_w


@dataclass(frozen=True, eq=False)
class GlobalPlan:
    """One global step: `num_rows` rows of `seq_len` tokens, their samples and media items.

    `step` counts from 0; messages and metrics.jsonl show step + 1.
    """

    step: int
    seq_len: int
    num_rows: int
    samples: SampleTable
    items: ItemTable

    @property
    def num_tokens(self) -> int:
        """Tokens of samples, without padding."""
        return int(self.samples.length.sum(dtype=np.int64))

    @property
    def vision_tokens(self) -> int:
        """Media-pad tokens."""
        return int(self.items.tokens.sum(dtype=np.int64))

    @property
    def text_tokens(self) -> int:
        """Tokens of samples, without media pads."""
        return self.num_tokens - self.vision_tokens

    @property
    def fill_rate(self) -> float:
        """Ratio of sample tokens to tokens of the rows."""
        return self.num_tokens / (self.num_rows * self.seq_len)

    def cu_seqlens(self, row: int) -> NDArray[np.int32]:
        """Return [0, end of each sample..., seq_len] of a row; padding counts as a last segment."""
        if not 0 <= row < self.num_rows:
            raise ValueError(f"row {row} of a step of {self.num_rows} rows")
        first, end = np.searchsorted(self.samples.row, [row, row + 1])
        ends = self.samples.start[first:end] + self.samples.length[first:end]
        tail = [self.seq_len] if not ends.size or ends[-1] < self.seq_len else []
        return np.concatenate([[0], ends, tail]).astype(np.int32)

    def positions(self, row: int, restart: bool = True) -> NDArray[np.int64]:
        """Return the position ids of a row, int64 [seq_len].

        Args:
            restart: restart at 0 in every document and in the padding tail; False counts through.
        """
        places = np.arange(self.seq_len)
        if not restart:
            return places
        borders = self.cu_seqlens(row)
        return places - np.repeat(borders[:-1], np.diff(borders))

    def content_hash(self) -> str:
        """Return the SHA-256 over all numbers of the plan."""
        digest = hashlib.sha256(f"{self.step} {self.seq_len} {self.num_rows}".encode())
        for table in (self.samples, self.items):
            for column in fields(table):
                values = np.ascontiguousarray(getattr(table, column.name))
                digest.update(f"\n{column.name} {values.dtype.str} {values.size}\n".encode())
                digest.update(values.tobytes())
        return digest.hexdigest()
