"""Bytes of an image or video file to uint8 pixels, the same on every machine and every run.

Needs numpy and Pillow, and PyAV for videos only. Rules (docs/moonvit3d.md has the table):

* PNG, JPEG, WEBP and GIF by Pillow, to 8-bit RGB; transparency lies over white. An animated GIF or
  WEBP is refused, of an animated PNG the first picture counts. 16-bit grey is refused (no one scale
  to 8 bits is right); of 16-bit colour the high byte counts, which is the value to one level.
* CMYK becomes RGB by Pillow, inks taken as Adobe stores them (inverted), as browsers do.
* EXIF orientation and a video's rotation tag are NOT applied: boxes and points of a sample mean the
  pixels as stored. `is_turned` tells; who wants upright pictures turns them beforehand.
* MP4 by PyAV, read in order from the start, never by seeking (a seek may land on another frame).
  A chunk is up to four of the frames sampled at 2 per second (`geometry.video_chunks`).
* More than `MAX_PIXELS` in a picture or frame are refused from the header, before any is decoded,
  and so are tables of a video that claim more than `MAX_SAMPLES` pictures and packets of sound.

Whatever is wrong with a file is one `MediaError` of one line. Want of memory is not wrong with a
file: it is a `MemoryError`, also where a decoder calls it damage (`_check_room`).
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

# Of one picture or frame. Pillow warns of bombs above this; a model image has 3.2 million at most.
MAX_PIXELS = 80_000_000
# What Pillow turns into RGB without a choice of scale.
_PLAIN_MODES = frozenset(("1", "L", "P", "RGB", "CMYK"))
_ALPHA_MODES = frozenset(("LA", "RGBA"))
# Room that decoding takes at most, besides the file: of a pixel, and at all. A progressive JPEG
# keeps its coefficients (12 bytes of a CMYK pixel) beside the picture and its copies; ffmpeg, some
# frames.
_ROOM_PER_PIXEL, _ROOM = 32, 64 << 20
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0
_EXIF_MARKS = (b"Exif", b"eXIf", b"EXIF")  # in JPEG, PNG, WEBP
_EXIF_ORIENTATION = 0x0112


class MediaError(ValueError):
    """A file that gives no pixels, and why, in one line."""


@dataclass(frozen=True)
class Probe:
    """What a file says it holds. `fps` is 0 for an image; sizes are pixels as stored.

    `turned`, which `verify` finds, says whether an EXIF orientation or a video's rotation tag asks
    for another side up (neither is applied).
    """

    format: str
    frames: int
    height: int
    width: int
    fps: float
    turned: bool = False


def probe(data: bytes, kind: int) -> Probe:
    """Sizes from headers (and a video's packet list), without decoding a picture.

    The file is of KIND_IMAGE (PNG, JPEG, WEBP, GIF) or KIND_VIDEO (MP4).

    Raises:
        MediaError: no such file, too large, or a video without frames, rate or size, or cut off.
    """
    if kind == KIND_IMAGE:
        with _open_image(data) as image:
            return Probe(str(image.format), 1, image.height, image.width, 0.0)
    return _probe_video(data)


def verify(data: bytes, kind: int, check: Callable[[Probe], object] | None = None) -> Probe:
    """As `probe`, but decode every picture, so that a file which passes will decode later too.

    Args:
        check: called with what the headers say before a picture is decoded, and again after each
            frame of a video; it may raise.

    Raises:
        MediaError: saying what is wrong with the file.
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
    """Whether an image carries an EXIF orientation other than upright (which is not applied)."""
    if not any(mark in _bytes(data) for mark in _EXIF_MARKS):
        return False
    with _open_image(data) as image:
        try:
            return "exif" in image.info and image.getexif().get(_EXIF_ORIENTATION, 1) != 1
        except MemoryError:
            raise
        except Exception:  # Pillow raises many kinds; notes that no one can read turn nothing
            return False


def read_image(data: bytes, check: Callable[[Probe], object] | None = None) -> NDArray[np.uint8]:
    """Pixels of a PNG, JPEG, WEBP or static GIF: uint8 [H, W, 3], read-only.

    Args:
        check: called with what the header says, before room is made for any pixel; it may raise.

    Raises:
        MediaError: another format, damaged or cut off, too large, animated, 16-bit grey, or 16-bit
            colour of which one is transparent.
    """
    with _open_image(data) as image:
        if check is not None:
            check(Probe(str(image.format), 1, image.height, image.width, 0.0))
        # Bit depth and colour type lie at a fixed place; Pillow keeps 8 bits of grey with alpha.
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
    """Return which value of a PNG is transparent, in the 8 bits to which Pillow brings its pixels.

    Pillow keeps the value as it is stored, and so compares 3 with 255 in a picture of 2 bits.
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
    """Chunks of an MP4 in order, from one pass that ends at the last one needed.

    One chunk is in memory at a time. A file that is damaged further on fails when the pass arrives
    there; everything that headers tell is checked before this function returns.

    Args:
        chunks: which ones, in any order, each given once; all if not given.
        check: called with what the headers say, before any frame is decoded; it may raise.

    Returns:
        Iterator over (uint8 [t, H, W, 3] with t of 1 to 4, timestamp "HH:MM:SS.mmm").

    Raises:
        MediaError: not an MP4 that decodes to what it promises, or no such chunk.
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
    """Stops as soon as the size is read: Pillow fills a first frame to be wiped while it opens."""

    @property
    def _size(self) -> tuple[int, int]:
        return self._bounded_size

    @_size.setter
    def _size(self, size: tuple[int, int]) -> None:
        _check_size(*size)
        self._bounded_size = size


def _reader(data: bytes) -> type[ImageFile.ImageFile]:
    """Pillow's reader, not `Image.open`: that asks a limit of size which any code may change.

    (The one of WEBP asks it as well, and refuses where it is below ours.)
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
    """While any thread is inside, Pillow refuses damaged files, whatever the program has set.

    `LOAD_TRUNCATED_IMAGES` holds for the whole process: set by anyone, a cut-off file would come
    back half grey. Counted, because the loader decodes in several threads.
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
    """The opened image; Pillow's errors inside the block become MediaError."""
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
    """Return a PNG without its compressed and international texts, which say nothing of its pixels.

    Pillow unpacks them while it opens a picture, and refuses the picture if one is above 1 MiB.
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
    """Refuse what is no content of a file, such as its path."""
    if not isinstance(data, bytes | bytearray | memoryview):
        raise MediaError(
            f"{data!r:.80} is no bytes: give the content of the file, such as "
            "Path(name).read_bytes()"
        )
    return data if isinstance(data, bytes) else bytes(data)


def _check_room(pixels: int, error: Exception) -> None:
    """Raise MemoryError where a decoder may have failed for want of memory.

    libjpeg, libwebp and some of ffmpeg's decoders call that a damaged file. By now their memory is
    free again; a host on which the whole of it cannot be had says nothing about the file.

    So a limit of address space (`ulimit -v`) must leave what the largest picture takes, 2.6 GB:
    below it every damaged file that claims such a size ends who reads it.
    """
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        raise MemoryError(f"no memory to decode {pixels} pixels") from error
    try:
        # Not reserved, so that the kernel's guess at what is too much is not asked.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        mmap.mmap(-1, _ROOM + pixels * _ROOM_PER_PIXEL, flags).close()
    except (OSError, MemoryError):
        raise MemoryError(f"no memory to decode {pixels} pixels") from error


# Videos -----------------------------------------------------------------------------------------


@contextmanager
def _open_video(
    data: bytes, found: Probe | None = None
) -> Iterator[tuple["av.container.InputContainer", "av.VideoStream"]]:
    """The MP4 and its first video stream; ffmpeg's errors inside the block become MediaError.

    Args:
        found: what it holds, if that is known already.
    """
    import av  # here, so that images need no PyAV
    from av.error import FFmpegError

    # ffmpeg decodes a frame while it opens some files, so the bound must be there already.
    bound = {"max_pixels": str(MAX_PIXELS)}
    try:
        file = io.BytesIO(data)
        with av.open(
            file, "r", format="mp4", options=bound, metadata_errors="replace"
        ) as container:
            if not container.streams.video:
                raise MediaError("no video stream in the file")
            stream = container.streams.video[0]
            if stream.codec_context is None:  # which PyAV's types do not tell
                raise MediaError("a video codec that ffmpeg does not know")
            # The loader runs one decode per thread; ffmpeg's own threads would fight with them.
            stream.codec_context.thread_count = 1
            # Otherwise ffmpeg paints over damaged blocks and says nothing.
            stream.codec_context.options = bound | {"err_detect": "explode"}
            yield container, stream
    except (FFmpegError, MediaError) as error:
        # ffmpeg says that it has no memory of damaged sizes, too. It keeps a dozen frames and more.
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
        if not width or not height:  # ffmpeg gives no size where it finds one above the bound
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
    """Refuse a file that ends inside its media: ffmpeg would take it for a shorter video."""
    at = 0
    while at + 8 <= len(data):
        size = int.from_bytes(data[at : at + 4], "big")
        if size == 1:
            size = int.from_bytes(data[at + 8 : at + 16], "big")
        if data[at + 4 : at + 8] == b"mdat" and at + size > len(data):
            raise MediaError(
                f"the file ends early: {len(data)} bytes, its frames reach to {at + size}"
            )
        if size < 8:  # 0: this box is the rest of the file
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
    """Read on up to the last frame of the chunk: uint8 [t, H, W, 3]."""
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
    """One line, without memory addresses, which would differ from run to run."""
    text = re.sub(r"<[^<>]*>|\b0x[0-9a-fA-F]+", "", str(error))
    return " ".join(f"{type(error).__name__}: {text}".split())
