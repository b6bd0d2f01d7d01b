"""Redacted samples: what lies in a shard in their place, and what an index says of them.

The bytes of their documents and media are overwritten by others of the same length, so that a shard
keeps its length and no other sample moves. The document becomes an empty one, which readers of tar
files take as it is; media become zeros. Key, sizes and token counts stay in the index: steps that
were planned with them are planned the same again. `index.parquet` itself stays as it is; the
manifest names the samples, and their checksums are put in when it is read.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from isal.isal_zlib import crc32  # zlib's numbers in a fraction of its time

from data_pipeline.index.columns import SourceIndex

_DOCUMENT = b'{"meta":{},"segments":[]}'  # as short as that of any sample


def erased_document(length: int) -> bytes:
    """Return what stands in the place of a document of so many bytes."""
    return _DOCUMENT.ljust(length) if length >= len(_DOCUMENT) else bytes(length)


def is_erased(data: bytes) -> bool:
    """Return whether this is what stands in the place of a document or medium."""
    return data == erased_document(len(data)) or not any(data)


def erased(index: SourceIndex, sample: int) -> Iterator[tuple[int, bytes]]:
    """Yield (offset in the shard, bytes to be there) of a redacted sample: document, then media."""
    yield int(index.json_offset[sample]), erased_document(int(index.json_length[sample]))
    first, end = index.item_ptr[sample : sample + 2].tolist()
    spans = zip(index.item_offset[first:end].tolist(), index.item_length[first:end].tolist())
    for offset, length in sorted(set(spans)):  # chunks of a video share its file
        yield offset, bytes(length)


def with_redacted(index: SourceIndex, samples: Sequence[int], made_as: str) -> SourceIndex:
    """Return an index whose samples are redacted as named.

    Args:
        index: as its shards are now, checksums of redacted samples apart.
        samples: in the order in which they were redacted.
        made_as: see `SourceIndex`.

    Raises:
        ValueError: the source does not have such samples, or they do not lie in their shards.
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
    """Refuse samples that do not lie in their shards: bytes of others would be overwritten."""
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
