"""Pictures and videos of the page: parts of files, small pictures, and pictures that pages made."""

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
"""Suffix of a media file -> its type; nothing else is ever shown as what it says it is."""

WHOLE = 16 << 20
"""Larger files are not held in memory: their parts are sent as they lie, without a checksum."""

_PIECE = 2 << 20  # most of a large file in one answer, or at once in memory
_SIDE = 176  # pixels of a small picture
# Enough patches for a small picture; so large ones are never held twice.
_SMALL = PatchLimits(image=196, frame=196)
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class File(NamedTuple):
    """Bytes, their type, and whether what they were made of is still as it was."""

    data: bytes
    kind: str
    still: Callable[[], bool] = lambda: True


class Kept:
    """Files by a name, the latest ones, up to a size; from any thread."""

    def __init__(self, most: int) -> None:
        self._most, self._size = most, 0
        self._found: OrderedDict[str, File] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, name: str) -> File | None:
        """Return a file; None if it is not kept."""
        with self._lock:
            if name in self._found:
                self._found.move_to_end(name)
            return self._found.get(name)

    def put(self, name: str, file: File) -> None:
        """Keep a file."""
        with self._lock:
            before = self._found.pop(name, None)
            self._size += len(file.data) - (len(before.data) if before else 0)
            self._found[name] = file
            while self._size > self._most:
                _, gone = self._found.popitem(last=False)
                self._size -= len(gone.data)


class Media:
    """What the page shows of media; from any thread; `close` it."""

    def __init__(self) -> None:
        self.decoder = Decoder()
        self._files, self._small, self._made = Kept(32 << 20), Kept(16 << 20), Kept(32 << 20)
        self._reading = threading.BoundedSemaphore(2)  # files that wait for the decoder

    def close(self) -> None:
        """End the process that decodes."""
        self.decoder.close()

    def file(self, request: Request, source: ShownSource, sample: int, name: str) -> Response:
        """Answer with a media file, or with a part of it that is asked for.

        Raises:
            NotHere: there is no such file.
            IndexMismatch, StoreError: it cannot be read.
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
        """Return the bytes of a media file of a size that may be held in memory.

        Raises:
            ValueError: it is larger. IndexMismatch, StoreError: it cannot be read.
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
        """Return a small picture of a sample's first medium and its type; None if it has none.

        Raises:
            ValueError: the medium does not decode, or is larger than `WHOLE` or `Bounds` allow.
            IndexMismatch, StoreError: it cannot be read. ComeAgain: others are being decoded.
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
        """Return what keeps the pictures of a page and gives them addresses.

        Args:
            still: whether what the page was made of is still as it was: no picture of an erased
                sample is given out.
        """

        def keep(data: bytes, kind: str) -> str:
            name = hashlib.sha256(data).hexdigest()
            self._made.put(name, File(data, kind, still))
            return f"/pictures/{name}"

        return keep

    def picture(self, name: str) -> Response:
        """Answer with a picture that a page made.

        Raises:
            NotHere: it is not kept any more, or what it was made of has changed.
        """
        if (found := self._made.get(name)) is None or not found.still():
            raise NotHere("this picture is not kept any more: load the page again")
        return file_answer(found)


def file_answer(file: File) -> Response:
    """Return an answer that is a picture and can be nothing else."""
    return Response(file.data, media_type=file.kind, headers={"content-security-policy": FILE_CSP})


def ranged(
    request: Request,
    size: int,
    kind: str,
    read: Callable[[int, int], bytes],
    most: int = _PIECE,
) -> Response:
    """Return a file, or that part of it which the request's Range asks for (RFC 9110, 14).

    Args:
        request: with or without a Range; one of several parts gets the whole file.
        size: of the file.
        kind: its media type.
        read: takes offset and length, and returns the bytes.
        most: of a part in one answer: a browser asks for what follows.
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
