"""Decodes image and video files to uint8 pixels, identically on every machine and in every run.

Needs numpy and Pillow, and PyAV for videos only. Rules (docs/moonvit3d.md has the table):

* Pillow decodes PNG, JPEG, WEBP and GIF to 8-bit RGB; transparent pixels are composited on white.
Animated GIF and WEBP files are refused; of an animated PNG, the first picture is used. 16-bit grey
is refused, because no single scale to 8 bits is right. Of 16-bit colour, the high byte is used,
which is exact to one level.
* Pillow converts CMYK to RGB and expects inks as Adobe stores them (inverted), as browsers do.
* EXIF orientation and a video's rotation tag are NOT applied, because boxes and points of a sample
refer to the pixels as stored. `is_turned` reports them; to get upright pictures, rotate the files
beforehand.
* PyAV decodes MP4 from the start without seeking, because a seek may end at another frame. A chunk
is up to four of the frames sampled at 2 per second (`geometry.video_chunks`).
* Pictures or frames of more than `MAX_PIXELS` are refused by their header, before any is decoded.
So are videos whose tables claim more than `MAX_SAMPLES` pictures and packets of sound.

Every defect of a file raises one `MediaError` with a one-line message. Lack of memory is not a
defect of the file and raises `MemoryError`, even if a decoder reports it as damage (`_check_room`).
"""

import errno
import io
import mmap
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import GifImagePlugin, Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from moonvit3d.geometry import KIND_IMAGE, VideoChunk, video_chunks
from moonvit3d.mp4_tables import MAX_SAMPLES, claimed_samples

if TYPE_CHECKING:
    import av
    import av.container

# Per picture or frame. Pillow warns of decompression bombs above this; a model image has at most
# 3.2 million.
MAX_PIXELS = 80_000_000
# Modes that Pillow converts to RGB without a choice of scale.
_PLAIN_MODES = frozenset(("1", "L", "P", "RGB", "CMYK"))
_ALPHA_MODES = frozenset(("LA", "RGBA"))
# Upper bounds of the memory for decoding, excluding the file: bytes per pixel, and a constant. A
# progressive JPEG keeps its coefficients (12 bytes per CMYK pixel) in addition to the picture and
# its copies; ffmpeg keeps some frames.
_ROOM_PER_PIXEL, _ROOM = 32, 64 << 20
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_EXIF_MARKS = (b"Exif", b"eXIf", b"EXIF")  # in JPEG, PNG, WEBP
_EXIF_ORIENTATION = 0x0112


class MediaError(ValueError):
    """The file yields no pixels; the message gives the reason in one line."""


@dataclass(frozen=True)
class Probe:
    """Contents of a file by its headers. `fps` is 0 for an image; sizes are pixels as stored.

    `turned`, which only `verify` sets, is True if an EXIF orientation or a video's rotation tag
    asks for a rotation or flip (neither is applied).
    """

    format: str
    frames: int
    height: int
    width: int
    fps: float
    turned: bool = False


def probe(data: bytes, kind: int) -> Probe:
    """Read sizes from headers (and a video's packet list) without decoding a picture.

    The file is of KIND_IMAGE (PNG, JPEG, WEBP, GIF) or KIND_VIDEO (MP4).

    Raises:
        MediaError: the format is wrong, the picture is too large, or a video is cut off or has no
            frames, rate or size.
    """
    if kind == KIND_IMAGE:
        with _open_image(data) as image:
            return Probe(str(image.format), 1, image.height, image.width, 0.0)
    return _probe_video(data)


def verify(data: bytes, kind: int, check: Callable[[Probe], object] | None = None) -> Probe:
    """Probe a file and decode every picture, so that a file which passes decodes later, too.

    Args:
        check: called with the headers' values before a picture is decoded, and again after each
            frame of a video; it may raise.

    Raises:
        MediaError: the file has a defect; the message names it.
    """
    found = probe(data, kind)
    if check is not None:
        check(found)
    if kind == KIND_IMAGE:
        read_image(data)
        return replace(found, turned=is_turned(data))
    decoded, turned = 0, False
    with _open_video(data, found) as (container, stream):
        for frame in _of_one_size(container.decode(stream), found):
            decoded, turned = decoded + 1, turned or frame.rotation != 0
            if check is not None:
                check(found)
    if decoded != found.frames:
        raise MediaError(f"the file lists {found.frames} frames, {decoded} decode")
    return replace(found, turned=turned)


def is_turned(data: bytes) -> bool:
    """Return True if an image has an EXIF orientation other than upright (which is not applied)."""
    if not any(mark in _bytes(data) for mark in _EXIF_MARKS):
        return False
    with _open_image(data) as image:
        try:
            return "exif" in image.info and image.getexif().get(_EXIF_ORIENTATION, 1) != 1
        except MemoryError:
            raise
        except Exception:  # Pillow raises many kinds; unreadable EXIF data rotates nothing
            return False


def read_image(data: bytes, check: Callable[[Probe], object] | None = None) -> NDArray[np.uint8]:
    """Return the pixels of a PNG, JPEG, WEBP or static GIF: uint8 [H, W, 3], read-only.

    Args:
        check: called with the header's values before memory for pixels is allocated; it may raise.

    Raises:
        MediaError: the image is of another format, damaged or cut off, too large, animated, 16-bit
            grey, or 16-bit colour with one transparent colour.
    """
    with _open_image(data) as image:
        if check is not None:
            check(Probe(str(image.format), 1, image.height, image.width, 0.0))
        # Bit depth and colour type are at fixed offsets; Pillow keeps 8 bits of grey with alpha.
        grey_16 = image.format == "PNG" and data[24] == 16 and data[25] in (0, 4)
        if grey_16 or image.mode not in _PLAIN_MODES | _ALPHA_MODES:
            depth = "16-bit grey" if grey_16 else f"mode {image.mode}"
            raise MediaError(f"pixels of {depth}; write the image as 8-bit grey or RGB")
        if image.format != "PNG" and getattr(image, "is_animated", False):
            raise MediaError(f"animated {image.format}; store it as a video (MP4)")
        if image.format == "PNG" and "transparency" in image.info:
            image.info["transparency"] = _transparent(image, depth=data[24])
        if image.mode in _ALPHA_MODES or "transparency" in image.info:
            layer = image.convert("RGBA")
            white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
            return np.asarray(Image.alpha_composite(white, layer).convert("RGB"))
        return np.asarray(image.convert("RGB"))


def _transparent(image: Image.Image, depth: int) -> object:
    """Return the transparent value of a PNG in the 8-bit scale of Pillow's pixels.

    Pillow keeps the value as stored, and so it would compare 3 with 255 in a 2-bit picture.
    """
    value, levels = image.info["transparency"], (1 << depth) - 1
    if image.mode == "RGB":
        if depth == 16:
            raise MediaError(
                "16-bit colour of which one value is transparent; write the image as 8-bit RGB or "
                "with an alpha channel"
            )
        return tuple(part & levels for part in value)
    return (value & levels) * 255 // levels if image.mode == "L" else value


def read_video(
    data: bytes,
    chunks: Iterable[int] | None = None,
    check: Callable[[Probe], object] | None = None,
) -> Iterator[tuple[NDArray[np.uint8], str]]:
    """Yield chunks of an MP4 in order, in one pass that ends at the last chunk needed.

    One chunk is in memory at a time. Damage further on in a file raises when the pass reaches it;
    everything in the headers is checked before this function returns.

    Args:
        chunks: numbers of the chunks to read, in any order, each yielded once; None: all.
        check: called with the headers' values before any frame is decoded; it may raise.

    Returns:
        Iterator over (uint8 [t, H, W, 3] with t of 1 to 4, timestamp "HH:MM:SS.mmm").

    Raises:
        MediaError: the file is not an MP4 that decodes as its headers state, or has no such chunk.
    """
    found = _probe_video(data)
    if check is not None:
        check(found)
    plan = video_chunks(found.frames, found.fps)
    wanted = range(len(plan)) if chunks is None else sorted(set(chunks))
    if beyond := [chunk for chunk in wanted if not 0 <= chunk < len(plan)]:
        raise MediaError(f"chunk {beyond[0]} asked for, the video has {len(plan)}")
    return _read_chunks(data, found, [plan[chunk] for chunk in wanted])


# Images -----------------------------------------------------------------------------------------


class _Gif(GifImagePlugin.GifImageFile):
    """GIF reader that checks the size first: Pillow fills a first frame while it opens the file."""

    @property
    def _size(self) -> tuple[int, int]:
        return self._bounded_size

    @_size.setter
    def _size(self, size: tuple[int, int]) -> None:
        _check_size(*size)
        self._bounded_size = size


def _reader(data: bytes) -> type[ImageFile.ImageFile]:
    """Return Pillow's reader for a file; `Image.open` has a size limit that any code may change.

    (The WEBP reader applies that limit, too, and refuses the file if the limit is below ours.)
    """
    if _bytes(data).startswith(b"\x89PNG\r\n\x1a\n"):
        return PngImagePlugin.PngImageFile
    if data.startswith(b"\xff\xd8\xff"):
        return JpegImagePlugin.JpegImageFile
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return WebPImagePlugin.WebPImageFile
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _Gif
    raise MediaError("not a PNG, JPEG, WEBP or GIF: the first bytes are those of none")


class _Strict:
    """Makes Pillow refuse damaged files while any thread is inside, whatever the program has set.

    `LOAD_TRUNCATED_IMAGES` applies to the whole process: if any code sets it, a truncated file
    decodes half grey. Threads are counted, because the loader decodes in several of them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._found = False

    def __enter__(self) -> None:
        with self._lock:
            if not self._inside:
                self._found = ImageFile.LOAD_TRUNCATED_IMAGES
                ImageFile.LOAD_TRUNCATED_IMAGES = False
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
            if not self._inside:
                ImageFile.LOAD_TRUNCATED_IMAGES = self._found


_STRICT = _Strict()


@contextmanager
def _open_image(data: bytes) -> Iterator[Image.Image]:
    """Yield the opened image; turn Pillow's errors inside the block into MediaError."""
    reader, pixels = _reader(data), 0
    try:
        if reader is PngImagePlugin.PngImageFile:
            data = _without_texts(data)
        with _STRICT, reader(io.BytesIO(data)) as image:
            _check_size(image.width, image.height)
            pixels = image.width * image.height
            yield image
    except (MediaError, MemoryError):
        raise
    except Exception as error:  # Pillow's parsers raise many kinds on damaged files
        _check_room(pixels, error)
        raise MediaError(f"{reader.format} does not decode: {_reason(error)}") from error


def _without_texts(data: bytes) -> bytes:
    """Return a PNG without its compressed and international texts, which do not affect its pixels.

    Pillow decompresses them while it opens a picture, and refuses the picture if a text exceeds 1
    MiB.
    """
    at, kept, begin = 8, [], 0
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] in (b"zTXt", b"iTXt") and end <= len(data):
            kept.append(data[begin:at])
            begin = end
        at = end
    return b"".join([*kept, data[begin:]]) if kept else data


def _check_size(width: int, height: int) -> None:
    if width * height > MAX_PIXELS:
        raise MediaError(
            f"{width} x {height} pixels; at most {MAX_PIXELS} are read: scale it down beforehand"
        )


def _bytes(data: bytes) -> bytes:
    """Return file contents as bytes; raise MediaError for anything else, such as a path."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MediaError(
            f"{data!r:.80} is no bytes: give the content of the file, such as "
            "Path(name).read_bytes()"
        )
    return data if isinstance(data, bytes) else bytes(data)


def _check_room(pixels: int, error: Exception) -> None:
    """Raise MemoryError if a decoder may have failed for lack of memory.

    libjpeg, libwebp and some of ffmpeg's decoders report this as a damaged file. Their memory is
    free again at this point. If the host still cannot allocate the full amount, the failure says
    nothing about the file.

    So a limit of address space (`ulimit -v`) must leave room for the largest picture, 2.6 GB. Below
    that, every damaged file that claims such a size ends its reader with a MemoryError.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        raise MemoryError(f"no memory to decode {pixels} pixels") from error
    try:
        # Not reserved, so that the kernel's overcommit heuristic does not apply.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mmap.mmap(-1, _ROOM + pixels * _ROOM_PER_PIXEL, flags).close()
    except (OSError, MemoryError):
        raise MemoryError(f"no memory to decode {pixels} pixels") from error


# Videos -----------------------------------------------------------------------------------------


@contextmanager
def _open_video(
    data: bytes, found: Probe | None = None
) -> Iterator[tuple["av.container.InputContainer", "av.VideoStream"]]:
    """Yield the MP4 and its first video stream; turn ffmpeg's errors in the block into MediaError.

    Args:
        found: result of an earlier probe, if any.
    """
    import av  # imported here, so that images need no PyAV
    from av.error import FFmpegError

    # ffmpeg decodes a frame while it opens some files, so the bound must be set before.
    bound = {"max_pixels": str(MAX_PIXELS)}
    try:
        file = io.BytesIO(data)
        with av.open(
            file, "r", format="mp4", options=bound, metadata_errors="replace"
        ) as container:
            if not container.streams.video:
                raise MediaError("no video stream in the file")
            stream = container.streams.video[0]
            if stream.codec_context is None:  # PyAV's types omit this case
                raise MediaError("a video codec that ffmpeg does not know")
            # The loader decodes in several threads; ffmpeg's own threads would compete with them.
            stream.codec_context.thread_count = 1
            # Otherwise ffmpeg conceals damaged blocks without an error.
            stream.codec_context.options = bound | {"err_detect": "explode"}
            yield container, stream
    except (FFmpegError, MediaError) as error:
        # ffmpeg also reports lack of memory for damaged sizes. It keeps a dozen frames and more.
        _check_room(6 * found.width * found.height if found else MAX_PIXELS, error)
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"video does not decode: {_reason(error)}") from error


def _probe_video(data: bytes) -> Probe:
    _check_not_cut(_bytes(data))
    _check_tables(data)
    with _open_video(data) as (container, stream):
        width, height, rate = stream.width, stream.height, stream.average_rate
        _check_size(width, height)
        if not width or not height:  # ffmpeg gives no size if it exceeds the bound
            raise MediaError(f"no size, or more than {MAX_PIXELS} pixels in a frame")
        if not rate or rate < 0:
            raise MediaError(f"{rate} frames a second: a video needs a rate above 0")
        packets = [packet.is_corrupt for packet in container.demux(stream) if packet.size]
    if not packets:
        raise MediaError("no frames in the video")
    if any(packets):
        raise MediaError(f"frame {packets.index(True)} is cut off: the file ends early")
    return Probe("MP4", len(packets), height, width, float(rate))


def _check_not_cut(data: bytes) -> None:
    """Refuse a file that ends inside its media, which ffmpeg would treat as a shorter video."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if data[at + 4 : at + 8] == b"mdat" and at + size > len(data):
            raise MediaError(
                f"the file ends early: {len(data)} bytes, its frames reach to {at + size}"
            )
        if size < 8:  # 0: this box extends to the end of the file
            return
        at += size


def _check_tables(data: bytes) -> None:
    try:
        claimed = claimed_samples(data)
    except ValueError as error:
        raise MediaError(f"video is not read: {error}") from None
    if claimed > MAX_SAMPLES:
        raise MediaError(
            f"its tables claim {claimed} pictures and packets of sound; at most {MAX_SAMPLES} are "
            "read: cut it into shorter videos, or leave the sound away"
        )


def _read_chunks(
    data: bytes, found: Probe, plan: Sequence[VideoChunk]
) -> Iterator[tuple[NDArray[np.uint8], str]]:
    with _open_video(data, found) as (container, stream):
        numbered = enumerate(_of_one_size(container.decode(stream), found))
        for chunk in plan:
            yield _collect(numbered, chunk, found), chunk.timestamp


def _collect(
    numbered: Iterator[tuple[int, "av.VideoFrame"]], chunk: VideoChunk, found: Probe
) -> NDArray[np.uint8]:
    """Read up to the last frame of the chunk; return uint8 [t, H, W, 3]."""
    pixels = np.empty((len(chunk.frames), found.height, found.width, 3), np.uint8)
    for target, wanted in zip(pixels, chunk.frames):
        frame = next((frame for number, frame in numbered if number == wanted), None)
        if frame is None:
            raise MediaError(f"frame {wanted} of {found.frames} does not decode")
        target[:] = frame.to_ndarray(format="rgb24")
    return pixels


def _of_one_size(frames: Iterable["av.VideoFrame"], found: Probe) -> Iterator["av.VideoFrame"]:
    for number, frame in enumerate(frames):
        if (frame.height, frame.width) != (found.height, found.width):
            raise MediaError(
                f"frame {number} is {frame.width} x {frame.height} pixels, the stream "
                f"{found.width} x {found.height}; encode the video at one size"
            )
        yield frame


def _reason(error: Exception) -> str:
    """Return the error in one line, without memory addresses, which differ from run to run."""
    text = re.sub(r"<[^<>]*>|\b0x[0-9a-fA-F]+", "", str(error))
    return " ".join(f"{type(error).__name__}: {text}".split())
