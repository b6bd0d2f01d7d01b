"""Overhead of our checks around Pillow: `moonvit3d.media.read_image` against plain Pillow."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.loaders.job import PAIRS
from data_pipeline.index.manifest import read_index
from data_pipeline.store.open import FolderStore
from data_pipeline.stream.stream import SampleStream, StreamConfig
from moonvit3d.media import read_image

SAMPLES = 500


def by_pillow(jpeg: bytes) -> Any:
    """Decode a JPEG as the peers do."""
    return np.array(Image.open(io.BytesIO(jpeg)).convert("RGB"))


def overhead(root: Path, repeats: int = 5) -> dict[str, float]:
    """Return microseconds per image, the best of some repeats that take turns."""
    store = FolderStore(root / "ours")
    with SampleStream(store, [read_index(store, PAIRS)], StreamConfig(batch_size=SAMPLES)) as s:
        jpegs = [media[0] for media in next(s.batches()).media]
    times = {"pillow_us": float("inf"), "read_image_us": float("inf")}
    for _ in range(repeats):
        times["pillow_us"] = min(times["pillow_us"], _microseconds(by_pillow, jpegs))
        times["read_image_us"] = min(times["read_image_us"], _microseconds(read_image, jpegs))
    return {name: round(value, 1) for name, value in times.items()}


def _microseconds(decode: Callable[[bytes], Any], jpegs: list[bytes]) -> float:
    begin = time.perf_counter()
    for jpeg in jpegs:
        decode(jpeg)
    return 1e6 * (time.perf_counter() - begin) / len(jpegs)
