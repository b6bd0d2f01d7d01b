"""Batches of samples out of the parts of a stretch: bytes, checked, and pixels where wanted."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from isal.isal_zlib import crc32  # zlib's numbers in a fraction of its time
from numpy.typing import NDArray

from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.stream.extents import Parts
from data_pipeline.stream.stretch import DOCUMENT, Stretch
from moonvit3d.geometry import KIND_IMAGE
from moonvit3d.media import MediaError, read_image, read_video


class Sample(NamedTuple):
    """One sample.

    Attributes:
        source: name of the source.
        key: its key there.
        document: bytes of its JSON, or the JSON parsed.
        media: bytes of each media file, or its pixels: uint8 [H, W, 3] of an image, a tuple of
            uint8 [t, H, W, 3] of a video's chunks.
    """

    source: str
    key: str
    document: Any
    media: tuple[Any, ...]


@dataclass(slots=True)
class Batch:
    """One rank's samples of a step, as columns of n entries; iterates over `Sample`s.

    Attributes:
        position: position of the step's first sample in the stream, the same on all ranks.
        source, key, document, media: as in `Sample`.
        index: int64 [n] number of each sample in its source's index.
        epoch: int64 [n] how often its source had been gone through before.
    """

    position: int
    source: list[str]
    key: list[str]
    document: list[Any]
    media: list[tuple[Any, ...]]
    index: NDArray[np.int64]
    epoch: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key)

    def __iter__(self) -> Iterator[Sample]:
        return map(Sample, self.source, self.key, self.document, self.media)


class Assembly:
    """A stretch as steps, ready to be made into batches, in any order and from any thread.

    Args:
        stretch: its samples, step by step, equally many in each.
        parts: their bytes.
        keys: their keys [n].
        names: of the sources.
        first: position of the first step's first sample in the stream.
        num_steps: steps in the stretch.
        batch_size: samples of a step, over all ranks.
        check, parse, decode: see `data_pipeline.stream.stream.StreamConfig`.
    """

    def __init__(
        self,
        stretch: Stretch,
        parts: Parts,
        keys: list[str],
        names: Sequence[str],
        *,
        first: int,
        num_steps: int,
        batch_size: int,
        check: bool,
        parse: bool,
        decode: bool,
    ) -> None:
        self.first, self.num_steps, self.batch_size = first, num_steps, batch_size
        self._stretch, self._parts, self._keys = stretch, parts, keys
        self._names = np.array(names, object)[stretch.source].tolist()
        self._ptr = stretch.part_ptr.tolist()
        self._crc = stretch.crc.tolist()
        self._check, self._parse, self._decode = check, parse, decode
        self._per_step = len(keys) // num_steps

    def end(self, step: int) -> int:
        """The position after a step of the stretch."""
        return self.first + (step + 1) * self.batch_size

    def batch(self, step: int) -> Batch:
        """Make the batch of a step; waits for its bytes.

        Raises:
            StoreError, IndexMismatch, MediaError: as `SampleStream.__next__` says.
        """
        begin, end = step * self._per_step, (step + 1) * self._per_step
        first = self._ptr[begin]
        bodies: list[Any] = self._parts.read(first, self._ptr[end])
        if self._check and list(map(crc32, bodies)) != self._crc[first : self._ptr[end]]:
            raise self._damaged(first, bodies)
        if self._parse or self._decode:
            bodies = [self._open(first + at, body) for at, body in enumerate(bodies)]
        starts = [part - first for part in self._ptr[begin : end + 1]]
        return Batch(
            position=self.first + step * self.batch_size,
            source=self._names[begin:end],
            key=self._keys[begin:end],
            document=[bodies[a] for a in starts[:-1]],
            media=[tuple(bodies[a + 1 : b]) for a, b in zip(starts, starts[1:])],
            index=self._stretch.sample[begin:end],
            epoch=self._stretch.epoch[begin:end],
        )

    def _open(self, part: int, body: bytes) -> Any:
        kind = self._stretch.kind[part]
        try:
            if kind == DOCUMENT:
                return json.loads(body) if self._parse else body
            if not self._decode:
                return body
            if kind == KIND_IMAGE:
                return read_image(body)
            return tuple(frames for frames, _ in read_video(body))
        except MediaError as error:
            raise MediaError(f"{self._where(part)}: {error}") from error
        except ValueError as error:
            raise IndexMismatch(f"{self._where(part)}: the document is not JSON") from error

    def _damaged(self, first: int, bodies: Sequence[bytes]) -> IndexMismatch:
        found = map(crc32, bodies)
        part, crc = next((p, c) for p, c in enumerate(found, first) if c != self._crc[p])
        return IndexMismatch(
            f"{self._where(part)}: CRC-32 is {crc:08x}, expected {self._crc[part]:08x}; restore "
            "the shard or ingest the source again"
        )

    def _where(self, part: int) -> str:
        stretch = self._stretch
        at = int(np.searchsorted(stretch.part_ptr, part, side="right")) - 1
        shard = stretch.shards[stretch.slot[part]].key
        number = part - self._ptr[at] - 1
        what = "document" if number < 0 else f"media file {number}"
        return f"source {self._names[at]!r}, sample {self._keys[at]!r} in {shard!r}, {what}"
