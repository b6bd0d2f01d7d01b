"""Media files to uint8 patches, the same pixels on every machine and every run.

Rules (docs/data_format.md says them to users):
* PNG and JPEG by Pillow, to 8-bit RGB. Transparency is laid over white. Of an animated PNG the
  first picture counts. 16-bit grey is refused: no one scale to 8 bits is right.
* EXIF orientation and a video's rotation tag are NOT applied: boxes and points of a sample mean
  the pixels as stored. A source that wants upright pictures turns them before ingest.
* MP4 by PyAV, read in order from the start, never by seeking (a seek may land on another frame).
  A chunk is up to four of the frames sampled at 2 per second (`moonvit3d.geometry.video_chunks`).
"""

import io
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import av
import av.container
import numpy as np
from av.error import FFmpegError
from numpy.typing import NDArray
from PIL import Image

from moonvit3d.geometry import KIND_IMAGE, PatchLimits, video_chunks
from moonvit3d.preprocess import image_patches, video_patches

# Above this Pillow warns of decompression bombs. A model image is at most 3.2 megapixels anyway.
MAX_PIXELS = 80_000_000
_IMAGE_FORMATS = ("PNG", "JPEG")
# What Pillow turns into RGB without a choice of scale.
_PLAIN_MODES = frozenset(("1", "L", "P", "RGB", "CMYK", "YCbCr"))
_ALPHA_MODES = frozenset(("LA", "RGBA"))
_EXIF_ORIENTATION = 0x0112


class DecodeError(Exception):
    """A medium that will never decode, or not to the size the index promises."""


@dataclass(frozen=True)
class Probe:
    """What a file says it holds. `fps` is 0 for an image; sizes are pixels as stored."""

    frames: int
    height: int
    width: int
    fps: float


def probe(data: bytes, kind: int) -> Probe:
    """Sizes from headers (and a video's packet list), without decoding a pixel.

    Raises:
        DecodeError: not a PNG, JPEG or MP4 that can be opened.
    """
    if kind == KIND_IMAGE:
        with _open_image(data) as image:
            return Probe(1, image.height, image.width, 0.0)
    return _probe_video(data)


def verify(data: bytes, kind: int) -> Probe:
    """As `probe`, but decode every pixel, so that a file which passes will decode later too.

    Raises:
        DecodeError: saying what is wrong with the file.
    """
    if kind == KIND_IMAGE:
        height, width, _ = _rgb(data).shape
        return Probe(1, height, width, 0.0)
    found = _probe_video(data)
    decoded = 0
    for frame in _frames(data):
        decoded += 1
        if (frame.height, frame.width) != (found.height, found.width):
            raise DecodeError(
                f"frame {decoded - 1} is {frame.width} x {frame.height} pixels, the stream "
                f"{found.width} x {found.height}; encode the video at one size"
            )
    if decoded != found.frames:
        raise DecodeError(f"the file lists {found.frames} frames, {decoded} decode")
    return found


def is_turned(data: bytes) -> bool:
    """Whether an image carries an EXIF orientation other than upright (which is not applied)."""
    if b"Exif" not in data and b"eXIf" not in data:  # the marks of JPEG and PNG
        return False
    with _open_image(data) as image:
        return "exif" in image.info and image.getexif().get(_EXIF_ORIENTATION, 1) != 1


def decode_item(
    data: bytes, kind: int, chunk: int, limits: PatchLimits, grid: Sequence[int]
) -> NDArray[np.uint8]:
    """The patches of one item.

    Args:
        data: the whole media file.
        kind: KIND_IMAGE or KIND_VIDEO.
        chunk: which chunk of a video; 0 for an image.
        limits: how far the pixels are scaled down.
        grid: (t, h, w) patches that the plan expects.

    Returns:
        uint8 [t*h*w, 3, 14, 14].

    Raises:
        DecodeError: the file does not decode, or gives another grid.
    """
    return decode_items(data, kind, [chunk], limits, [grid])[0]


def decode_items(
    data: bytes,
    kind: int,
    chunks: Sequence[int],
    limits: PatchLimits,
    grids: Sequence[Sequence[int]],
) -> list[NDArray[np.uint8]]:
    """As `decode_item` for several chunks of one file, which is decoded only once."""
    if kind == KIND_IMAGE:
        found = [image_patches(_rgb(data), limits) for _ in chunks]
    else:
        found = [video_patches(frames, limits) for frames in _video_chunks(data, chunks)]
    for chunk, (_, actual), expected in zip(chunks, found, grids, strict=True):
        if tuple(map(int, actual)) != tuple(map(int, expected)):
            raise DecodeError(
                f"chunk {chunk}: decodes to {tuple(map(int, actual))} patches (t, h, w), the "
                f"index promises {tuple(map(int, expected))}"
            )
    return [patches for patches, _ in found]


def _open_image(data: bytes) -> Image.Image:
    try:
        image = Image.open(io.BytesIO(data), formats=_IMAGE_FORMATS)
    except Exception as error:  # Pillow's parsers raise many kinds on damaged files
        raise DecodeError(f"not a PNG or JPEG that opens: {_reason(error)}") from error
    if image.width * image.height > MAX_PIXELS:
        raise DecodeError(
            f"{image.width} x {image.height} pixels; at most {MAX_PIXELS} are read: scale the "
            "image down before ingest"
        )
    return image


def _rgb(data: bytes) -> NDArray[np.uint8]:
    """Pixels uint8 [H, W, 3]."""
    with _open_image(data) as image:
        if image.mode not in _PLAIN_MODES | _ALPHA_MODES:
            raise DecodeError(f"pixel mode {image.mode}; write the image as 8-bit grey or RGB")
        try:
            if image.mode in _ALPHA_MODES or "transparency" in image.info:
                layer = image.convert("RGBA")
                white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
                image = Image.alpha_composite(white, layer)
            return np.asarray(image.convert("RGB"))
        except Exception as error:  # as above
            raise DecodeError(f"image does not decode: {_reason(error)}") from error


@contextmanager
def _open_video(data: bytes) -> Iterator[tuple[av.container.InputContainer, av.VideoStream]]:
    """The MP4 and its first video stream; ffmpeg's errors inside the block become DecodeError."""
    try:
        with av.open(io.BytesIO(data), "r", format="mp4") as container:
            if not container.streams.video:
                raise DecodeError("no video stream in the file")
            stream = container.streams.video[0]
            # The loader runs one decode per thread; ffmpeg's own threads would fight with them.
            stream.codec_context.thread_count = 1
            # Otherwise ffmpeg paints over damaged blocks and says nothing.
            stream.codec_context.options = {"err_detect": "explode"}
            yield container, stream
    except FFmpegError as error:
        raise DecodeError(f"video does not decode: {_reason(error)}") from error


def _probe_video(data: bytes) -> Probe:
    with _open_video(data) as (container, stream):
        frames = sum(1 for packet in container.demux(stream) if packet.size)
        if not frames or not stream.average_rate or not stream.width or not stream.height:
            raise DecodeError(
                f"{frames} frames, {stream.average_rate} per second, {stream.width} x "
                f"{stream.height} pixels: a video needs frames, a rate and a size"
            )
        return Probe(frames, stream.height, stream.width, float(stream.average_rate))


def _frames(data: bytes) -> Iterator[av.VideoFrame]:
    with _open_video(data) as (container, stream):
        yield from container.decode(stream)


def _video_chunks(data: bytes, chunks: Sequence[int]) -> list[NDArray[np.uint8]]:
    """Frames uint8 [t, H, W, 3] of each chunk, from one pass that ends at the last one needed."""
    found = _probe_video(data)
    plan = video_chunks(found.frames, found.fps)
    if beyond := [chunk for chunk in chunks if not 0 <= chunk < len(plan)]:
        raise DecodeError(f"chunk {beyond[0]} asked for, the video has {len(plan)}")
    wanted = sorted({frame for chunk in chunks for frame in plan[chunk].frames})
    pixels: dict[int, NDArray[np.uint8]] = {}
    for number, frame in enumerate(_frames(data)):
        if number == wanted[len(pixels)]:
            pixels[number] = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8)
            if len(pixels) == len(wanted):
                break
    if len(pixels) < len(wanted):
        raise DecodeError(f"frame {wanted[len(pixels)]} of {found.frames} does not decode")
    if len({frame.shape for frame in pixels.values()}) > 1:
        raise DecodeError("the size of the frames changes inside the video")
    return [np.stack([pixels[frame] for frame in plan[chunk].frames]) for chunk in chunks]


def _reason(error: Exception) -> str:
    """One line, without memory addresses, which would differ from run to run."""
    text = re.sub(r"<[^<>]*>|\b0x[0-9a-fA-F]+", "", str(error))
    return " ".join(f"{type(error).__name__}: {text}".split())
