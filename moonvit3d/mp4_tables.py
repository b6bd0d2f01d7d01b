"""Counts the samples that an MP4's tables claim, before ffmpeg allocates memory for them.

ffmpeg keeps an entry in memory for every sample (a picture, a packet of sound), and a table of
equal sizes claims billions of samples in twenty bytes: 80 million took 4.8 GB. Boxes follow ISO/IEC
14496-12: each consists of its size (4 bytes), its name (4 bytes) and its contents.
"""

from collections.abc import Iterator

# Eighteen hours at 60 frames a second; about 300 MB of entries.
MAX_SAMPLES = 1 << 22

# Boxes that ffmpeg searches for boxes (libavformat/mov.c); no valid file nests them deeper.
_HOLD_BOXES = frozenset(
    (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"mvex", b"moof", b"traf")
    + (b"edts", b"udta", b"dinf", b"tref", b"wave", b"sinf", b"schi")
)
_DEEPEST = 12


def claimed_samples(data: bytes) -> int:
    """Return the number of samples that the tables of all tracks and fragments claim.

    Raises:
        ValueError: the tables are compressed, so the counts cannot be read.
    """
    return sum(_claimed(data, name, start) for name, start in _boxes(data, 0, len(data), 0))


def _claimed(data: bytes, name: bytes, start: int) -> int:
    if name == b"cmov":
        raise ValueError("its header is compressed (cmov); write the file anew")
    if name in (b"stsz", b"stz2"):  # version and flags, size of all, count
        return int.from_bytes(data[start + 8 : start + 12], "big")
    if name == b"trun":  # version and flags, count
        return int.from_bytes(data[start + 4 : start + 8], "big")
    return 0


def _boxes(data: bytes, at: int, end: int, depth: int) -> Iterator[tuple[bytes, int]]:
    """Yield (name, offset of the contents) of every box, including nested boxes."""
    while at + 8 <= end:
        size, name, head = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8], 8
        if size == 1:
            size, head = int.from_bytes(data[at + 8 : at + 16], "big"), 16
        if size == 0:  # the box extends to the end
            size = end - at
        if size < head:
            return
        yield name, at + head
        if name in _HOLD_BOXES and depth < _DEEPEST:
            yield from _boxes(data, at + head, min(at + size, end), depth + 1)
        at += size
