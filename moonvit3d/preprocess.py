"""Converts pixels to patches: resize, pad, cut. numpy and Pillow only.

The rule is that of the Kimi K2.5 processor: bicubic resize by Pillow to `geometry.resized`, zeros
to the right and below up to whole tokens, 14x14 patches in row order, channels first inside a
patch. Padding precedes normalisation, so padding is exactly uint8 0 and patches are transferred as
bytes; `moonvit3d.model.normalise` converts them to floats where they are used.
"""

import numpy as np
from einops import rearrange
from PIL import Image

from moonvit3d.geometry import KIND_IMAGE, KIND_VIDEO, PATCH, PatchLimits, grid, resized

_DEFAULT_LIMITS = PatchLimits()


def image_patches(
    pixels: np.ndarray, limits: PatchLimits = _DEFAULT_LIMITS
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the patches of one RGB image.

    Args:
        pixels: uint8 [H, W, 3].

    Returns:
        (uint8 [h * w, 3, 14, 14], grid (1, h, w)).

    Raises:
        ValueError: not uint8 [H, W, 3], or a side of 0.
    """
    _check(pixels, "image", "height, width, 3")
    return _patches(pixels[None], KIND_IMAGE, limits.image, limits)


def video_patches(
    frames: np.ndarray, limits: PatchLimits = _DEFAULT_LIMITS
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """Return the patches of one video chunk, frame by frame; see `image_patches`.

    Args:
        frames: uint8 [t, H, W, 3] with 1 <= t <= 4.

    Returns:
        (uint8 [t * h * w, 3, 14, 14], grid (t, h, w)).
    """
    _check(frames, "chunk", "frames, height, width, 3")
    return _patches(frames, KIND_VIDEO, limits.frame, limits)


def _check(pixels: np.ndarray, name: str, wanted: str) -> None:
    """Refuse anything but bytes: the scale of floats would be unknown, and they may be NaN."""
    if not isinstance(pixels, np.ndarray):
        raise ValueError(f"{name} is a {type(pixels).__name__}: want numpy uint8 [{wanted}]")
    dims = wanted.count(",") + 1
    if pixels.dtype != np.uint8 or pixels.ndim != dims or pixels.shape[-1] != 3:
        shape = list(pixels.shape)
        raise ValueError(f"{name} is {pixels.dtype} {shape}: want uint8 [{wanted}]")


def _patches(
    frames: np.ndarray, kind: int, patch_limit: int, limits: PatchLimits
) -> tuple[np.ndarray, tuple[int, int, int]]:
    count, height, width, _ = frames.shape
    t, h, w = grid(kind, count, height, width, limits)
    new_size = resized(width, height, patch_limit, limits.side)
    canvas = np.zeros((t, h * PATCH, w * PATCH, 3), dtype=np.uint8)
    for frame, target in zip(frames, canvas):
        target[: new_size[1], : new_size[0]] = _resize(frame, new_size)
    patches = rearrange(canvas, "t (h p) (w q) c -> (t h w) c p q", p=PATCH, q=PATCH)
    return np.ascontiguousarray(patches), (t, h, w)


def _resize(pixels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    if pixels.shape[1::-1] == size:
        return pixels
    return np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC))
