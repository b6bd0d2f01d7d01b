"""Small media files and samples, made without the code under test."""

import io
from collections.abc import Sequence
from fractions import Fraction

import av
import numpy as np
from PIL import Image

from data_pipeline.ingest.ingest import CrudeSample, ImageSegment, TextSegment, VideoSegment


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Return noise, uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def video(pictures: Sequence[np.ndarray], fps: float, codec: str = "mpeg4", turn: int = 0) -> bytes:
    """Return an MP4 of equal-sized frames [height, width, 3]; `turn` is its rotation in degrees."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=Fraction(fps).limit_denominator(1001))
        stream.height, stream.width = pictures[0].shape[:2]
        stream.pix_fmt, stream.bit_rate = "yuv420p", 4_000_000
        if turn:
            stream.set_display_rotation(turn)
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


def mp4(frames: int, fps: int = 4, height: int = 48, width: int = 64, turn: int = 0) -> bytes:
    """Return a clip whose frame i is a flat grey of level 8*i, so that frames can be told apart."""
    greys = [np.full((height, width, 3), 8 * i % 256, np.uint8) for i in range(frames)]
    return video(greys, fps, turn=turn)


def samples(count: int = 6) -> list[CrudeSample]:
    """Return samples of four forms: text only, an image first, text around a video, two images."""
    clip = mp4(22)
    made = []
    for i in range(count):
        picture = ImageSegment(encoded(noise(28 + i, 40, i)), "png")
        photo = ImageSegment(encoded(noise(33, 57 + i, i), "JPEG"), "jpg")
        segments = [
            [TextSegment(f"plain text number {i}, nothing else")],
            [picture, TextSegment("What is it?", False), TextSegment(" Noise.")],
            [TextSegment("Look:"), VideoSegment(clip), TextSegment("gone"), photo],
        ][i % 3]
        made.append(CrudeSample(f"s-{i:04d}", segments, {"number": i, "box": [0.5, i]}))
    return made


def watch_puts(store, told) -> None:
    """Call `told(key, data)` before each object that the store writes."""
    for name in ("put", "put_new"):
        write = getattr(store, name)
        setattr(store, name, lambda key, data, write=write: (told(key, data), write(key, data))[1])
