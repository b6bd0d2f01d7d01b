"""Redacted samples: their replacement bytes in a shard and their entries in the index.

Documents and media are overwritten in place with the same number of bytes, so that the shard keeps
its length and no other sample moves. The document becomes an empty document, which tar readers
accept; media become zeros. Key, sizes and token counts stay in the index, so that past steps are
planned the same again. `index.parquet` does not change; the manifest lists the redacted samples,
and reading the index replaces their checksums.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from isal.isal_zlib import crc32  # same values as zlib, several times as fast

from data_pipeline.index.columns import SourceIndex

_DOCUMENT = b'{"meta":{},"segments":[]}'  # no document of a sample is shorter


def erased_document(length: int) -> bytes:
    """Return the replacement of a document of `length` bytes."""
    return _DOCUMENT.ljust(length) if length >= len(_DOCUMENT) else bytes(length)


def is_erased(data: bytes) -> bool:
    """Return whether the bytes are the replacement of a document or media file."""
    return data == erased_document(len(data)) or not any(data)


def erased(index: SourceIndex, sample: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the shard, new bytes) of a redacted sample: document, then media."""
    yield int(index.json_offset[sample]), erased_document(int(index.json_length[sample]))
    first, end = index.item_ptr[sample : sample + 2].tolist()
    spans = zip(index.item_offset[first:end].tolist(), index.item_length[first:end].tolist())
    for offset, length in sorted(set(spans)):  # chunks of a video share its file
        yield offset, bytes(length)


def with_redacted(index: SourceIndex, samples: Sequence[int], made_as: str) -> SourceIndex:
    """Return an index that marks samples as redacted, with the checksums of their new bytes.

    Args:
        index: index of the present shards, with the original checksums of redacted samples.
        samples: redacted samples, in the order of their redaction.
        made_as: see `SourceIndex`.

    Raises:
        ValueError: the source has no such samples, or they reach beyond their shards.
    """
    numbers = [int(sample) for sample in samples]
    if len(set(numbers)) != len(numbers) or not all(0 <= n < index.num_samples for n in numbers):
        raise ValueError(
            f"source {index.name!r}: its manifest calls samples {numbers[:20]} redacted; expected "
            f"different numbers below {index.num_samples}"
        )
    _refuse_outside(index, numbers)
    document_crc, media_crc = index.json_crc.copy(), index.item_crc.copy()
    for sample in numbers:
        document_crc[sample] = crc32(erased_document(int(index.json_length[sample])))
        for item in range(*index.item_ptr[sample : sample + 2].tolist()):
            media_crc[item] = _crc_of_zeros(int(index.item_length[item]))
    return replace(
        index, json_crc=document_crc, item_crc=media_crc, redacted=tuple(numbers), made_as=made_as
    )


def _refuse_outside(index: SourceIndex, samples: Sequence[int]) -> None:
    """Refuse samples that reach beyond their shards; redaction would overwrite other bytes."""
    for sample in samples:
        size = index.shards[index.shard[sample]].size
        first, end = index.item_ptr[sample : sample + 2].tolist()
        starts = [int(index.json_offset[sample]), *index.item_offset[first:end].tolist()]
        lengths = [int(index.json_length[sample]), *index.item_length[first:end].tolist()]
        for start, length in zip(starts, lengths):
            if start < 0 or length < 0 or start + length > size:
                raise ValueError(
                    f"source {index.name!r}, sample {index.key_of(sample)!r}: {length} bytes from "
                    f"offset {start}, but its shard has {size}; ingest the source again"
                )


@lru_cache(maxsize=4096)
def _crc_of_zeros(length: int) -> np.uint32:
    return np.uint32(crc32(bytes(length)))
