"""Small media files and samples, made without the code under test."""

import io

import av
import numpy as np
from PIL import Image

from data_pipeline.ingest.ingest import CrudeSample, ImageSegment, TextSegment, VideoSegment


def noise(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width, 3]."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def encoded(pixels: np.ndarray | Image.Image, kind: str = "PNG", **options) -> bytes:
    image = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def mp4(frames: int, fps: int = 4, height: int = 48, width: int = 64) -> bytes:
    """A clip whose frame i is a flat grey of level 8*i, so that frames can be told apart."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.bit_rate = 4_000_000
        for i in range(frames):
            grey = np.full((height, width, 3), 8 * i % 256, np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    return out.getvalue()


def samples(count: int = 6) -> list[CrudeSample]:
    """A mixture: text only, an image first, text around a video, two images."""
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
    """Call `told(key, data)` before each object that a store writes."""
    for name in ("put", "put_new"):
        write = getattr(store, name)
        setattr(store, name, lambda key, data, write=write: (told(key, data), write(key, data))[1])
