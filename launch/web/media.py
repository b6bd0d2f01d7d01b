"""Serves pictures and videos: media files and parts of them, thumbnails, and rendered pictures."""

import hashlib
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import NamedTuple

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from launch.pages.html import num_bytes
from launch.pages.pictures import Src, encoded
from launch.pages.samples_page import pictures_of
from launch.pages.turns import turn
from launch.web.auth import FILE_CSP
from launch.web.corpus import PATIENCE_S, Medium, NotHere, ShownSource
from launch.web.decoder import Decoder
from moonvit3d.geometry import KIND_IMAGE, PatchLimits

TYPES = {
    "png": "image/png",
    "jpg": "image/jpeg",
    "webp": "image/webp",
    "gif": "image/gif",
    "mp4": "video/mp4",
}
"""Suffix of a media file -> its media type; no other type is ever sent."""

WHOLE = 16 << 20
"""Largest file held in memory, in bytes; parts of larger files are sent without a checksum."""

_PIECE = 2 << 20  # most bytes of a large file in one answer or in memory
_SIDE = 176  # pixels of the longer side of a thumbnail
# Enough patches for a thumbnail, so that large pictures are never held twice.
_SMALL = PatchLimits(image=196, frame=196)
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class File(NamedTuple):
    """Bytes, their media type, and a check that their source data are unchanged."""

    data: bytes
    kind: str
    still: Callable[[], bool] = lambda: True


class Kept:
    """Cache of the most recently used files by name, up to a total size; thread-safe."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._found: OrderedDict[str, File] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> File | None:
        """Return a file, or None if the cache does not have it."""
        with self._lock:
            if name in self._found:
                self._found.move_to_end(name)
            return self._found.get(name)

    def put(self, name: str, file: File) -> None:
        """Store a file; drop the least recently used files over the limit."""
        with self._lock:
            before = self._found.pop(name, None)
            self._size += len(file.data) - (len(before.data) if before else 0)
            self._found[name] = file
            while self._size > self._most:
                _, gone = self._found.popitem(last=False)
                self._size -= len(gone.data)


class Media:
    """Media of the page; thread-safe; call `close` at the end."""

    def __init__(self) -> None:
        self.decoder = Decoder()
        self._files, self._small, self._made = Kept(32 << 20), Kept(16 << 20), Kept(32 << 20)
        self._reading = threading.BoundedSemaphore(2)  # files that wait for the decoder

    def close(self) -> None:
        """End the decoder process."""
        self.decoder.close()

    def file(self, request: Request, source: ShownSource, sample: int, name: str) -> Response:
        """Answer with a media file, or with the requested part of it.

        Raises:
            NotHere: there is no such file.
            IndexMismatch, StoreError: the file cannot be read.
        """
        number, _, suffix = name.partition(".")
        if suffix not in TYPES or not number.isdigit() or len(number) > 5:
            raise NotHere(f"source {source.name!r}, sample {sample}: it has no file {name!r}")
        medium = source.medium(sample, int(number))
        if (medium.kind == KIND_IMAGE) != TYPES[suffix].startswith("image/"):
            raise NotHere(f"source {source.name!r}, sample {sample}: it has no file {name!r}")
        if medium.size > WHOLE:
            return ranged(
                request, medium.size, TYPES[suffix], lambda a, n: source.part(medium, a, n)
            )
        data = self.whole(source, sample, medium)
        return ranged(request, medium.size, TYPES[suffix], lambda a, n: data[a : a + n], len(data))

    def whole(self, source: ShownSource, sample: int, medium: Medium) -> bytes:
        """Return all bytes of a media file of at most `WHOLE` bytes.

        Raises:
            ValueError: the file is larger. IndexMismatch, StoreError: it cannot be read.
        """
        if medium.size > WHOLE:
            raise ValueError(
                f"source {source.name!r}, sample {sample}: file {medium.number} has "
                f"{num_bytes(medium.size)}; only files of up to {num_bytes(WHOLE)} are decoded here"
            )
        key = f"{source.manifest['content_hash']} {sample} {medium.number}"
        if (kept := self._files.get(key)) is not None:
            return kept.data
        data = source.whole(sample, medium)
        self._files.put(key, File(data, ""))
        return data

    def small(self, source: ShownSource, sample: int) -> File | None:
        """Return a thumbnail of a sample's first media file, or None if it has no media.

        Raises:
            ValueError: the file does not decode, or exceeds `WHOLE` or `Bounds`.
            IndexMismatch, StoreError: the file cannot be read. ComeAgain: the decoder is busy.
        """
        key = f"{source.manifest['content_hash']} {sample}"
        if (kept := self._small.get(key)) is not None:
            return kept
        media = source.media(sample)
        if not media:
            return None
        index, _ = source.around(sample)
        until = time.monotonic() + PATIENCE_S
        with turn(self._reading, until, "other pictures are being decoded"):
            data = self.whole(source, sample, media[0])
            first = next(pictures_of(data, index, [media[0].line], _SMALL, self.decoder.decode))
            found = File(*encoded(first, _SIDE))
        self._small.put(key, found)
        return found

    def made(self, still: Callable[[], bool]) -> Src:
        """Return a function that stores the pictures of a page and returns their addresses.

        Args:
            still: returns whether the source data of the page are unchanged; after a change the
                pictures are no longer sent, so no picture of an erased sample is.
        """

        def keep(data: bytes, kind: str) -> str:
            name = hashlib.sha256(data).hexdigest()
            self._made.put(name, File(data, kind, still))
            return f"/pictures/{name}"

        return keep

    def picture(self, name: str) -> Response:
        """Answer with a picture that a page rendered.

        Raises:
            NotHere: the cache has dropped the picture, or its source data have changed.
        """
        if (found := self._made.get(name)) is None or not found.still():
            raise NotHere("this picture is not kept any more: load the page again")
        return file_answer(found)


def file_answer(file: File) -> Response:
    """Return an answer that a browser can only use as a picture."""
    return Response(file.data, media_type=file.kind, headers={"content-security-policy": FILE_CSP})


def ranged(
    request: Request,
    size: int,
    kind: str,
    read: Callable[[int, int], bytes],
    most: int = _PIECE,
) -> Response:
    """Return a file, or the part of it that the request's Range names (RFC 9110, section 14).

    Args:
        request: request with or without a Range; a Range of several parts gets the whole file.
        size: bytes of the file.
        kind: media type of the file.
        read: takes offset and length, and returns the bytes.
        most: most bytes of a part in one answer; browsers then request the next part.
    """
    headers = {"accept-ranges": "bytes", "content-security-policy": FILE_CSP}
    match = _RANGE.fullmatch(request.headers.get("range", "").strip())
    if match is None or not any(match.groups()):

        def pieces() -> Iterator[bytes]:
            for offset in range(0, size, _PIECE):
                yield read(offset, min(_PIECE, size - offset))

        length = {"content-length": str(size)}
        return StreamingResponse(pieces(), media_type=kind, headers=headers | length)
    first, last = match.groups()
    begin = int(first) if first else max(0, size - int(last))
    end = size if not first or not last else min(int(last) + 1, size)
    if begin >= size or end <= begin:
        return Response(status_code=416, headers=headers | {"content-range": f"bytes */{size}"})
    end = min(end, begin + most)
    headers["content-range"] = f"bytes {begin}-{end - 1}/{size}"
    return Response(read(begin, end - begin), 206, headers, kind)
