"""Draws the augmentation of each image from a key and the index, before any pixel is read.

Packing needs the final image sizes and the regions that stay visible, so `draw` computes the
augmentations of tens of thousands of images at once. It repeats the draw later for the few images
that are decoded, and `augment.pixels` applies it to the pixels. The random numbers are
counter-based, with a key per image from (seed, source, sample, epoch, number of the media file).
They depend on nothing else. Each decision has its own counter, so enabling one operation does not
change the draws of the others.

Order of operations: mirror, quarter turns, affine on the turned canvas, crop, rescale, colour,
JPEG. Videos are not augmented.

Machines must agree to the last bit on image sizes and on the regions that leave the frame.
Therefore this module uses only operations with exact IEEE 754 rounding (+ - * / and square roots),
each as a separate numpy call, so that no compiler fuses two of them. Logarithmic ranges use only
square roots, and sine and cosine are power series (`augment.matrices`).
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from data_pipeline.augment.config import AffineConfig, AugmentConfig, ColourConfig, CropConfig
from data_pipeline.augment.matrices import placed, rescaled, warped
from data_pipeline.keyed import GOLDEN, keyed, mix
from moonvit3d.geometry import TOKEN

# Minimum side of a crop or rescaled image; a smaller image is mostly the padding of one token.
MIN_SIDE = TOKEN
# Maximum side that libjpeg can write.
MAX_JPEG_SIDE = 65500
# Images with a larger ratio of the longer to the shorter side are rotated and sheared less.
LONG = 2.0

# One counter per decision. Only append: a changed number would change the draws of existing runs.
(
    _VARIANT, _FLIP, _TURN, _TURN_BY, _AFFINE, _ANGLE, _SCALE, _SHEAR, _SHIFT_X, _SHIFT_Y,
    _CROP, _AREA, _ASPECT, _CROP_X, _CROP_Y, _RESCALE, _COLOUR, _BRIGHTNESS, _CONTRAST,
    _SATURATION, _GAMMA, _JPEG, _QUALITY,
) = range(23)  # fmt: skip
_MEDIA = keyed(0, "augment media")  # separates media keys from sample counters
_WORD = 2**64 - 1
_LOG_BITS = 16  # a logarithmic range has 2**16 steps


# Keys -------------------------------------------------------------------------------------------


def sample_keys(
    seed: int, source: str, samples: ArrayLike, epochs: ArrayLike
) -> NDArray[np.uint64]:
    """Return the keys uint64 [n] of a source's samples, from sample numbers and epochs int [n]."""
    start = np.uint64(keyed(seed, "augment", source))
    return _step(_step(start, samples), epochs)


def media_keys(keys: NDArray[np.uint64], media: ArrayLike) -> NDArray[np.uint64]:
    """Return the keys uint64 [m] of images, from their samples' keys [m] and media numbers [m]."""
    return _step(keys ^ np.uint64(_MEDIA), media)


def choose_variants(keys: NDArray[np.uint64], num_variants: ArrayLike) -> NDArray[np.int64]:
    """Draw a variant per sample: int64 [n] in 0 ... num_variants-1 (int [n], >= 1)."""
    # Take the upper half of (upper half of the word) * n, a multiplication in place of %.
    upper = _word(keys, _VARIANT) >> np.uint64(32)
    return ((upper * np.asarray(num_variants, np.uint64)) >> np.uint64(32)).astype(np.int64)


def _step(keys: Any, numbers: ArrayLike) -> NDArray[np.uint64]:
    return mix(keys + (np.asarray(numbers, np.int64).astype(np.uint64) + np.uint64(1)) * GOLDEN)


def _word(keys: NDArray[np.uint64], counter: int) -> NDArray[np.uint64]:
    return mix(keys + np.uint64((counter + 1) * int(GOLDEN) & _WORD))


def uniform(keys: NDArray[np.uint64], counter: int) -> NDArray[np.float64]:
    """Return draw number `counter` of each key: float64 [n] with 0 <= u < 1."""
    return (_word(keys, counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


# Draws ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """Augmentation of one image; `Draws` documents the fields."""

    height: int
    width: int
    flip: bool
    turns: int
    affine: tuple[float, float, float, float, float, float] | None
    crop: tuple[int, int, int, int]
    out_height: int
    out_width: int
    colour: tuple[float, float, float, float] | None
    jpeg: int

    @property
    def is_nothing(self) -> bool:
        """True if the image does not change."""
        whole = self.crop == (0, 0, self.width, self.height) and not self.turns
        same = (self.out_height, self.out_width) == (self.height, self.width)
        plain = self.affine is None and self.colour is None and not self.jpeg
        return whole and same and plain and not self.flip


@dataclass(frozen=True, eq=False)
class Draws:
    """Augmentations of m images, in the order of application.

    Attributes:
        height, width: int64 [m], size of the source image.
        flip: bool [m], True to mirror left to right.
        turns: int64 [m], quarter turns clockwise, 0 to 3.
        warped: bool [m], True if `affine` is applied.
        affine: float64 [m, 6], 2x3 matrices in row order, on the turned canvas.
        crop: int64 [m, 4], (left, top, right, bottom) on that canvas.
        out_height, out_width: int64 [m], output size; never larger than the crop.
        coloured: bool [m], True if `colour` is applied.
        colour: float64 [m, 4], brightness, contrast, saturation, gamma; 1 means no change.
        jpeg: int64 [m], quality; 0 for no compression.
    """

    height: NDArray[np.int64]
    width: NDArray[np.int64]
    flip: NDArray[np.bool_]
    turns: NDArray[np.int64]
    warped: NDArray[np.bool_]
    affine: NDArray[np.float64]
    crop: NDArray[np.int64]
    out_height: NDArray[np.int64]
    out_width: NDArray[np.int64]
    coloured: NDArray[np.bool_]
    colour: NDArray[np.float64]
    jpeg: NDArray[np.int64]

    def one(self, i: int) -> Draw:
        """Return the draw of image i, small enough to send to another process."""
        return Draw(
            height=int(self.height[i]),
            width=int(self.width[i]),
            flip=bool(self.flip[i]),
            turns=int(self.turns[i]),
            affine=tuple(self.affine[i].tolist()) if self.warped[i] else None,
            crop=tuple(self.crop[i].tolist()),
            out_height=int(self.out_height[i]),
            out_width=int(self.out_width[i]),
            colour=tuple(self.colour[i].tolist()) if self.coloured[i] else None,
            jpeg=int(self.jpeg[i]),
        )

    def matrices(self) -> NDArray[np.float64]:
        """Return matrices float64 [m, 3, 3] from source to output edge coordinates."""
        a, b, c, d, e, f = self.affine.T
        left, top, right, bottom = self.crop.T
        whole = rescaled(
            placed(self.flip, self.turns, (a, b, c, d, e, f), left, top, self.width, self.height),
            self.out_width / (right - left),
            self.out_height / (bottom - top),
        )
        out = np.zeros((self.height.size, 3, 3))
        out[:, :2] = np.stack(whole, axis=1).reshape(-1, 2, 3)
        out[:, 2, 2] = 1.0
        return out


def draw(
    config: AugmentConfig,
    keys: NDArray[np.uint64],
    height: ArrayLike,
    width: ArrayLike,
    flip_ok: ArrayLike,
    turn_ok: ArrayLike,
) -> Draws:
    """Draw the augmentations of m images.

    Args:
        config: augmentation config of their source.
        keys: uint64 [m], from `media_keys`.
        height, width: int [m], sizes of the source images in pixels.
        flip_ok, turn_ok: bool [m], flags of the index (`augment.directions`).

    Raises:
        ValueError: an image without pixels.
    """
    rows, columns = np.asarray(height, np.int64), np.asarray(width, np.int64)
    if bad := np.flatnonzero((rows < 1) | (columns < 1)).tolist():
        i = bad[0]
        raise ValueError(
            f"image {i} of {columns[i]} x {rows[i]} pixels: each side must be at least 1"
        )
    flip = (uniform(keys, _FLIP) < config.flip) & np.asarray(flip_ok, np.bool_)
    is_turned = (uniform(keys, _TURN) < config.turn) & np.asarray(turn_ok, np.bool_)
    turns = np.where(is_turned, 1 + (uniform(keys, _TURN_BY) * 3).astype(np.int64), 0)
    canvas_w = np.where(turns % 2 == 1, rows, columns)
    canvas_h = np.where(turns % 2 == 1, columns, rows)
    is_warped, affine = _draw_affine(config.affine, keys, canvas_w, canvas_h)
    crop, out_width, out_height = _draw_crop(config.crop, keys, canvas_w, canvas_h)
    coloured, colour = _draw_colour(config.colour, keys)
    jpeg = np.zeros(rows.size, np.int64)
    if config.jpeg is not None:
        least, most = config.jpeg.quality
        quality = least + (uniform(keys, _QUALITY) * (most - least + 1)).astype(np.int64)
        can = np.maximum(out_width, out_height) <= MAX_JPEG_SIDE
        jpeg = np.where(can & (uniform(keys, _JPEG) < config.jpeg.probability), quality, 0)
    return Draws(
        height=rows,
        width=columns,
        flip=flip,
        turns=turns,
        warped=is_warped,
        affine=affine,
        crop=crop,
        out_height=out_height,
        out_width=out_width,
        coloured=coloured,
        colour=colour,
        jpeg=jpeg,
    )


def _draw_affine(
    config: AffineConfig | None,
    keys: NDArray[np.uint64],
    width: NDArray[np.int64],
    height: NDArray[np.int64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return (applied bool [m], matrices [m, 6]) on canvases of width x height."""
    matrices = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (keys.size, 1))
    if config is None:
        return np.zeros(keys.size, np.bool_), matrices
    chosen = uniform(keys, _AFFINE) < config.probability
    some, w, h = keys[chosen], width[chosen], height[chosen]
    # The canvas keeps its size, so the ends of a long line of text would leave it.
    slim = np.minimum(1.0, LONG * np.minimum(w, h) / np.maximum(w, h))
    parts = warped(
        w,
        h,
        degrees=_both_ways(uniform(some, _ANGLE), config.degrees) * slim,
        scale=_log_range(uniform(some, _SCALE), *config.scale),
        shear=_both_ways(uniform(some, _SHEAR), config.shear) * slim,
        right=_both_ways(uniform(some, _SHIFT_X), config.shift),
        down=_both_ways(uniform(some, _SHIFT_Y), config.shift),
    )
    matrices[chosen] = np.stack(parts, axis=1)
    return chosen, matrices


def _draw_crop(
    config: CropConfig | None,
    keys: NDArray[np.uint64],
    width: NDArray[np.int64],
    height: NDArray[np.int64],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return (boxes [m, 4], out_width [m], out_height [m]) on canvases of width x height."""
    if config is None:
        zero = np.zeros(keys.size, np.int64)
        return np.stack([zero, zero, width, height], axis=1), width, height
    chosen = uniform(keys, _CROP) < config.probability
    area = _range(uniform(keys, _AREA), *config.area)
    aspect = _log_range(uniform(keys, _ASPECT), *config.aspect)
    across = np.clip(np.sqrt(area * aspect), area, 1.0)  # a side of at most 1 keeps the area
    factor = _range(uniform(keys, _RESCALE), *config.rescale)
    corners, ends, outs = [], [], []
    for side, share, counter in (
        (width, across, _CROP_X),
        (height, area / across, _CROP_Y),
    ):
        kept = np.where(chosen, _shrunk(side, share), side)
        first = (uniform(keys, counter) * (side - kept + 1)).astype(np.int64)
        corners.append(first)
        ends.append(first + kept)
        outs.append(np.where(chosen, _shrunk(kept, factor), kept))
    return np.stack(corners + ends, axis=1), outs[0], outs[1]


def _draw_colour(
    config: ColourConfig | None, keys: NDArray[np.uint64]
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Return (applied bool [m], factors [m, 4])."""
    if config is None:
        return np.zeros(keys.size, np.bool_), np.ones((keys.size, 4))
    chosen = uniform(keys, _COLOUR) < config.probability
    strengths = (config.brightness, config.contrast, config.saturation, config.gamma)
    counters = (_BRIGHTNESS, _CONTRAST, _SATURATION, _GAMMA)
    factors = [
        np.where(chosen, 1.0 + _both_ways(uniform(keys, counter), strength), 1.0)
        for counter, strength in zip(counters, strengths)
    ]
    return chosen, np.stack(factors, axis=1)


def _both_ways(u: NDArray[np.float64], most: float) -> NDArray[np.float64]:
    return (2.0 * u - 1.0) * most


def _range(u: NDArray[np.float64], least: float, most: float) -> NDArray[np.float64]:
    return least + u * (most - least)


def _log_range(u: NDArray[np.float64], least: float, most: float) -> NDArray[np.float64]:
    """Return least * (most/least)**u with u truncated to 16 bits.

    The power is then a product of repeated square roots; `pow` differs between C libraries.
    """
    steps = (u * 2**_LOG_BITS).astype(np.int64)
    value, root = np.full(u.size, float(least)), most / least
    for bit in reversed(range(_LOG_BITS)):
        root = math.sqrt(root)
        value = np.where(steps >> bit & 1, value * root, value)
    return value


def _shrunk(side: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return a share of a side in whole pixels, at least `MIN_SIDE` or the side if smaller."""
    return np.clip(np.floor(side * share + 0.5).astype(np.int64), np.minimum(side, MIN_SIDE), side)
