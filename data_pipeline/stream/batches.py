"""Turns the parts of a stretch into batches, or into samples in webdataset's form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from isal.isal_zlib import adler32, crc32  # same results as zlib, but much faster
from numpy.typing import NDArray

from data_pipeline.index.manifest import IndexMismatch
from data_pipeline.index.reads import Part, read_checked
from data_pipeline.store.open import Span, Store
from data_pipeline.stream.extents import HEADER, BufferParts, FileParts
from data_pipeline.stream.stretch import Stretch

_CHECKSUM = slice(148, 156)  # checksum field of a tar header; it counts as eight spaces


@dataclass(slots=True)
class Batch:
    """One rank's samples of a step, as columns of n entries.

    Attributes:
        position: position of the step's first sample in the stream, the same on all ranks.
        source: name of each sample's source.
        key: key of each sample.
        document: bytes of each JSON document.
        media: bytes of each sample's media files.
        index: int64 [n] number of each sample in its source's index.
        epoch: int64 [n] number of completed epochs of each sample's source.
    """

    position: int
    source: list[str]
    key: list[str]
    document: list[bytes]
    media: list[tuple[bytes, ...]]
    index: NDArray[np.int64]
    epoch: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.key)


class Assembly:
    """Steps of a stretch, which may be read in any order and from any thread.

    Args:
        stretch: samples of the steps, in order, with the same number in each step.
        parts: bytes of the samples.
        keys: keys of the samples [n].
        names: names of the sources.
        store: store with the shards; damaged bytes are read from it again.
        first: position of the first step's first sample in the stream.
        num_steps: number of steps in the stretch.
        stride: distance in positions between the first samples of consecutive steps.
        batch_size: samples in a step, over all ranks.
        check: True to compare all bytes with their CRC-32.
    """

    def __init__(
        self,
        stretch: Stretch,
        parts: FileParts | BufferParts,
        keys: list[str],
        names: Sequence[str],
        store: Store,
        *,
        first: int,
        num_steps: int,
        stride: int,
        batch_size: int,
        check: bool,
    ) -> None:
        self.first, self.num_steps, self.stride = first, num_steps, stride
        self._stretch, self._parts, self._keys, self._store = stretch, parts, keys, store
        self._names = np.array(names, object)[stretch.source].tolist()
        self._ptr = stretch.part_ptr.tolist()
        self._crc = stretch.crc.tolist()
        self._check, self._batch_size = check, batch_size
        self._per_step = len(keys) // num_steps

    def end(self, step: int) -> int:
        """Return the position after a step of the stretch."""
        return self.first + step * self.stride + self._batch_size

    def batch(self, step: int) -> Batch:
        """Read a step; wait for its bytes.

        Raises:
            StoreError, IndexMismatch: as in `SampleStream.__iter__`.
        """
        begin, end = step * self._per_step, (step + 1) * self._per_step
        bodies, starts = self._bodies(begin, end)
        return Batch(
            position=self.first + step * self.stride,
            source=self._names[begin:end],
            key=self._keys[begin:end],
            document=[bodies[a] for a in starts[:-1]],
            media=[tuple(bodies[a + 1 : b]) for a, b in zip(starts, starts[1:])],
            index=self._stretch.sample[begin:end],
            epoch=self._stretch.epoch[begin:end],
        )

    def samples(self, step: int) -> list[dict[str, Any]]:
        """Read a step as samples in the form of webdataset's tar reader.

        Raises:
            StoreError, IndexMismatch: as in `SampleStream.__iter__`.
        """
        begin, end = step * self._per_step, (step + 1) * self._per_step
        bodies, starts = self._bodies(begin, end)
        first = self._ptr[begin]
        headers = self._parts.headers(first, self._ptr[end])
        samples: list[dict[str, Any]] = []
        for key, a, b in zip(self._keys[begin:end], starts, starts[1:]):
            shard = self._stretch.shards[int(self._stretch.slot[first + a])].key
            sample: dict[str, Any] = {"__key__": key, "__url__": f"{self._store.uri}/{shard}"}
            for at in range(a, b):
                name = member_name(headers[at])
                if name is None or not name.startswith(f"{key}."):
                    raise IndexMismatch(
                        f"{self._where(first + at)}: its tar header is damaged; restore the shard "
                        "or ingest the source again"
                    )
                sample[name[len(key) + 1 :].lower()] = bodies[at]
            samples.append(sample)
        return samples

    def _bodies(self, begin: int, end: int) -> tuple[list[bytes], list[int]]:
        """Return checked bytes of the parts of samples begin ... end - 1, and each first part."""
        first, last = self._ptr[begin], self._ptr[end]
        bodies = self._parts.read(first, last)
        if self._check and list(map(crc32, bodies)) != self._crc[first:last]:
            bodies = [self._intact(part, body) for part, body in enumerate(bodies, first)]
        return bodies, [part - first for part in self._ptr[begin : end + 1]]

    def _intact(self, part: int, body: bytes) -> bytes:
        """Read a part again if it is damaged; raise IndexMismatch if it stays damaged."""
        stretch, crc = self._stretch, self._crc[part]
        if crc32(body) == crc:
            return body
        shard = stretch.shards[stretch.slot[part]].key
        span = Span(shard, int(stretch.offset[part]), int(stretch.length[part]))
        return read_checked(self._store, [Part(span, crc, self._where(part))])[0]

    def _where(self, part: int) -> str:
        stretch = self._stretch
        at = int(np.searchsorted(stretch.part_ptr, part, side="right")) - 1
        shard = stretch.shards[stretch.slot[part]].key
        number = part - self._ptr[at] - 1
        what = "document" if number < 0 else f"media file {number}"
        return f"source {self._names[at]!r}, sample {self._keys[at]!r} in {shard!r}, {what}"


def member_name(header: bytes) -> str | None:
    """Return the name in a ustar header of 512 bytes; None if the header's checksum is wrong."""
    # With start value 0, the low half of an Adler-32 is the sum of the bytes modulo 65521.
    total = (adler32(header, 0) & 0xFFFF) - (adler32(header[_CHECKSUM], 0) & 0xFFFF) + 8 * ord(" ")
    try:
        intact = len(header) == HEADER and (total - int(header[148:154], 8)) % 65521 == 0
        return header[:100].rstrip(b"\0").decode() if intact else None
    except ValueError:
        return None
