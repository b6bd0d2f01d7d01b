"""Sizes and token counts of images and video chunks, in plain integers.

The single definition of an item's size on the patch grid and of its number of language-model
tokens; data pipeline, planners and model all use it. The rules are those of Kimi K2.5's released
processor (`navit_resize` and its video sampling): shrink, never enlarge, until the patch limits
hold, then pad right and bottom to whole 28-pixel tokens. The limits bound the size *before*
padding. An image shrunk to 16,384 patches can be padded to a few per cent more, so a row for the
largest image needs more than `limits.image / 4` tokens.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import Field

from typed_config.section import Section

PATCH = 14  # side of a patch in pixels
MERGE = 2  # side of a token in patches
MAX_FRAMES = 4  # maximum frames per video chunk, pooled into the tokens of one frame
TOKEN = PATCH * MERGE  # side of a token in pixels
SAMPLE_FPS = 2.0  # sampling rate of videos

KIND_IMAGE = 0
KIND_VIDEO = 1


class PatchLimits(Section):
    """Maximum patches per image, per video frame and per side; larger media are shrunk."""

    image: int = Field(default=16384, ge=1)
    """Maximum number of patches per image. [patches; moonvit3d/geometry.py]"""
    frame: int = Field(default=4096, ge=1)
    """Maximum number of patches per video frame. [patches; moonvit3d/geometry.py]"""
    side: int = Field(default=512, ge=MERGE, multiple_of=MERGE)
    """Maximum number of patches per side of an image or frame. [patches; moonvit3d/geometry.py]"""


def resized(width: int, height: int, patch_limit: int, side_limit: int) -> tuple[int, int]:
    """Return the size in pixels after shrinking, before padding.

    Args:
        width, height: source pixels, at least 1.
        patch_limit: maximum number of patches, counted in whole 14-pixel patches of the source.
        side_limit: maximum number of patches per side.

    Returns:
        (width, height) in pixels; equal to the source if no limit binds.

    Raises:
        ValueError: a side is below one pixel.
    """
    if width < 1 or height < 1:
        raise ValueError(f"image of {width} x {height} pixels: each side must be at least 1")
    side = side_limit * PATCH
    patches = max(1, width // PATCH) * max(1, height // PATCH)
    scale = min(1.0, math.sqrt(patch_limit / patches), side / width, side / height)
    new_width, new_height = max(1, int(width * scale)), max(1, int(height * scale))
    return min(new_width, side), min(new_height, side)


def grid(
    kind: int, frames: int, height: int, width: int, limits: PatchLimits
) -> tuple[int, int, int]:
    """Return the patch grid (t, h, w) of one item; h and w are even.

    Args:
        kind: `KIND_IMAGE` or `KIND_VIDEO` (one chunk of a video).
        frames: 1 for an image, 1 to 4 for a video chunk.
        height, width: source pixels (note the order).
        limits: patch limits; `limits.image` bounds an image, `limits.frame` a chunk's frame.

    Raises:
        ValueError: unknown kind, or a frame count that the kind cannot have.
    """
    _check_frames(np.asarray([kind]), np.asarray([frames]))
    patch_limit = limits.image if kind == KIND_IMAGE else limits.frame
    new_width, new_height = resized(width, height, patch_limit, limits.side)
    return frames, MERGE * -(-new_height // TOKEN), MERGE * -(-new_width // TOKEN)


def grids(
    kinds: ArrayLike,
    frames: ArrayLike,
    heights: ArrayLike,
    widths: ArrayLike,
    limits: PatchLimits,
) -> np.ndarray:
    """Return the grids of many items, int64 [n, 3], equal to `grid` for each item.

    Arguments are integer arrays [n]; errors are those of `grid` and name the first bad item.
    """
    kind, frame, height, width = (
        np.asarray(a, dtype=np.int64) for a in (kinds, frames, heights, widths)
    )
    _check_frames(kind, frame)
    if bad := np.flatnonzero((height < 1) | (width < 1)).tolist():
        i = bad[0]
        raise ValueError(
            f"item {i} of {width[i]} x {height[i]} pixels: each side must be at least 1"
        )
    side = limits.side * PATCH
    patch_limit = np.where(kind == KIND_IMAGE, limits.image, limits.frame)
    patches = np.maximum(1, width // PATCH) * np.maximum(1, height // PATCH)
    # Same IEEE operations as the scalar rule (sqrt and division are correctly rounded in both).
    scale = np.minimum(
        np.minimum(1.0, np.sqrt(patch_limit / patches)), np.minimum(side / width, side / height)
    )
    new_height, new_width = (
        np.minimum(np.maximum(1, (pixels * scale).astype(np.int64)), side)
        for pixels in (height, width)
    )
    return np.stack([frame, MERGE * -(-new_height // TOKEN), MERGE * -(-new_width // TOKEN)], 1)


def _check_frames(kinds: np.ndarray, frames: np.ndarray) -> None:
    if bad := np.flatnonzero((kinds != KIND_IMAGE) & (kinds != KIND_VIDEO)).tolist():
        raise ValueError(f"item {bad[0]}: kind {kinds[bad[0]]} is neither image (0) nor video (1)")
    most = np.where(kinds == KIND_IMAGE, 1, MAX_FRAMES)
    if bad := np.flatnonzero((frames < 1) | (frames > most)).tolist():
        i = bad[0]
        raise ValueError(
            f"item {i}: {frames[i]} frames; an image has 1, a video chunk 1 to {MAX_FRAMES}"
        )


def num_tokens(t: Any, h: Any, w: Any) -> Any:
    """Return the language-model tokens of a (t, h, w) patch grid; frames are pooled.

    Accepts integers and integer arrays.
    """
    return (h // MERGE) * (w // MERGE)


@dataclass(frozen=True)
class VideoChunk:
    """Up to four sampled frames that are encoded together.

    Args:
        frames: indices into the video's frames, ascending.
        timestamp: time of the first frame, "HH:MM:SS.mmm".
    """

    frames: tuple[int, ...]
    timestamp: str


def video_chunks(num_frames: int, fps: float) -> list[VideoChunk]:
    """Return the sampled frames of a video in groups of four.

    The sampling rate is `min(2, fps)` frames a second, spread evenly from the first to the last
    frame. Both roundings are half to even (Python's and numpy's `round`), as in the reference.

    Args:
        num_frames: frames of the video, at least 1.
        fps: frame rate of the video, above 0.

    Returns:
        Chunks in order; only the last chunk may have fewer than 4 frames.

    Raises:
        ValueError: no frames, or a rate that is not a positive number.
    """
    if num_frames < 1 or not (math.isfinite(fps) and fps > 0):
        raise ValueError(f"video of {num_frames} frames at {fps} frames a second: both must be > 0")
    wanted = max(round(num_frames * min(SAMPLE_FPS, fps) / fps), 1)
    sampled: Sequence[int] = np.linspace(0, num_frames - 1, wanted).round().astype(int).tolist()
    groups = [tuple(sampled[i : i + MAX_FRAMES]) for i in range(0, wanted, MAX_FRAMES)]
    return [VideoChunk(group, _timestamp(group[0] / fps)) for group in groups]


def _timestamp(seconds: float) -> str:
    """Return "HH:MM:SS.mmm", milliseconds truncated; hours wrap at a day, as in the reference."""
    clock = time.strftime("%H:%M:%S", time.gmtime(seconds))
    return f"{clock}.{int(seconds % 1 * 1000):03d}"
