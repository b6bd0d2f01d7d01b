"""What is done to each image, drawn before any pixel is read: from a key and the index alone.

Packing needs the sizes that images will have and the regions that will still be in view, so `draw`
says what happens to tens of thousands of images at once, and says it again later for the few of
them that are decoded; `augment.pixels` does to the pixels what was drawn. Draws are counters
under the image's key, made from (seed, source, sample, epoch, number of the medium): they depend
on nothing else, and each decision has a counter of its own, so that switching one operation on
leaves the draws of the others as they were.

Order of operations: mirror, quarter turns, affine on the canvas they leave, crop, rescale, colour,
JPEG. Only images are changed, not videos.

Machines must agree to the last bit on sizes and on what leaves the frame. Therefore all of this
uses only what IEEE 754 rounds in one way (+ - * / and square roots), one numpy call for each, so
that no compiler fuses two: a range is drawn from on a logarithmic scale by square roots alone,
sine and cosine are sums of powers (`augment.matrices`).
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

# No crop or rescaling goes below this side: what is smaller is mostly the padding of one token.
MIN_SIDE = TOKEN
# libjpeg writes no longer side.
MAX_JPEG_SIDE = 65500
# An image longer than this, either way, is rotated and sheared less.
LONG = 2.0

# One counter for each decision. Only append: another number is another draw in every old run.
(
    _VARIANT, _FLIP, _TURN, _TURN_BY, _AFFINE, _ANGLE, _SCALE, _SHEAR, _SHIFT_X, _SHIFT_Y,
    _CROP, _AREA, _ASPECT, _CROP_X, _CROP_Y, _RESCALE, _COLOUR, _BRIGHTNESS, _CONTRAST,
    _SATURATION, _GAMMA, _JPEG, _QUALITY,
) = range(23)  # fmt: skip
_MEDIA = keyed(0, "augment media")  # keeps the keys of media apart from the counters of a sample
_WORD = 2**64 - 1
_LOG_BITS = 16  # a logarithmic range is cut into 2**16 steps


# Keys -------------------------------------------------------------------------------------------


def sample_keys(
    seed: int, source: str, samples: ArrayLike, epochs: ArrayLike
) -> NDArray[np.uint64]:
    """Keys of samples: uint64 [n] from sample numbers int [n] and epochs int [n] of a source."""
    start = np.uint64(keyed(seed, "augment", source))
    return _step(_step(start, samples), epochs)


def media_keys(keys: NDArray[np.uint64], media: ArrayLike) -> NDArray[np.uint64]:
    """Keys of images: uint64 [m] from their samples' keys [m] and numbers in the sample [m]."""
    return _step(keys ^ np.uint64(_MEDIA), media)


def choose_variants(keys: NDArray[np.uint64], num_variants: ArrayLike) -> NDArray[np.int64]:
    """Which of its variants a sample shows: int64 [n] in 0 ... num_variants-1 (int [n], >= 1)."""
    # The upper half of the word times n, without its lower half: a multiplication in place of %.
    upper = _word(keys, _VARIANT) >> np.uint64(32)
    return ((upper * np.asarray(num_variants, np.uint64)) >> np.uint64(32)).astype(np.int64)


def _step(keys: Any, numbers: ArrayLike) -> NDArray[np.uint64]:
    return mix(keys + (np.asarray(numbers, np.int64).astype(np.uint64) + np.uint64(1)) * GOLDEN)


def _word(keys: NDArray[np.uint64], counter: int) -> NDArray[np.uint64]:
    return mix(keys + np.uint64((counter + 1) * int(GOLDEN) & _WORD))


def uniform(keys: NDArray[np.uint64], counter: int) -> NDArray[np.float64]:
    """Draw number `counter` of each key: float64 [n], in 0 <= u < 1."""
    return (_word(keys, counter) >> np.uint64(11)).astype(np.float64) * 2.0**-53


# Draws ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Draw:
    """What is done to one image; `Draws` has the meaning of each field."""

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
        """Whether the image comes out as it went in."""
        whole = self.crop == (0, 0, self.width, self.height) and not self.turns
        same = (self.out_height, self.out_width) == (self.height, self.width)
        plain = self.affine is None and self.colour is None and not self.jpeg
        return whole and same and plain and not self.flip


@dataclass(frozen=True, eq=False)
class Draws:
    """What is done to m images, in this order.

    Attributes:
        height, width: int64 [m], of the source.
        flip: bool [m], mirrored left to right.
        turns: int64 [m], quarter turns clockwise, 0 to 3.
        warped: bool [m], whether `affine` is anything but the identity.
        affine: float64 [m, 6], 2x3 matrices by rows, on the canvas that the turns leave.
        crop: int64 [m, 4], (left, top, right, bottom) on that canvas.
        out_height, out_width: int64 [m], what the crop is scaled to; never more than the crop.
        coloured: bool [m], whether any of `colour` is done.
        colour: float64 [m, 4], brightness, contrast, saturation, gamma; 1 leaves as is.
        jpeg: int64 [m], quality; 0 for none.
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
        """The draw of image i, small enough to be sent to another process."""
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
        """From edge coordinates of the source to those of the output: float64 [m, 3, 3]."""
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
    """Draw what is done to m images.

    Args:
        config: of their source.
        keys: uint64 [m], from `media_keys`.
        height, width: int [m], pixels of the sources.
        flip_ok, turn_ok: bool [m], what the index allows (`augment.directions`).

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
    """(whether [m], matrices [m, 6]) on canvases of width x height."""
    matrices = np.tile([1.0, 0.0, 0.0, 0.0, 1.0, 0.0], (keys.size, 1))
    if config is None:
        return np.zeros(keys.size, np.bool_), matrices
    chosen = uniform(keys, _AFFINE) < config.probability
    some, w, h = keys[chosen], width[chosen], height[chosen]
    # Otherwise the ends of a long line of text would leave the canvas, which keeps its size.
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
    """(boxes [m, 4], out_width [m], out_height [m]) on canvases of width x height."""
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
    """(whether [m], factors [m, 4])."""
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
    """least * (most/least)**u with u cut to 16 binary places, which makes the power exact to write
    as a product of square roots; `pow` differs between C libraries.
    """
    steps = (u * 2**_LOG_BITS).astype(np.int64)
    value, root = np.full(u.size, float(least)), most / least
    for bit in reversed(range(_LOG_BITS)):
        root = math.sqrt(root)
        value = np.where(steps >> bit & 1, value * root, value)
    return value


def _shrunk(side: NDArray[np.int64], share: NDArray[np.float64]) -> NDArray[np.int64]:
    """The share of a side in whole pixels, not below `MIN_SIDE` if the side is not."""
    return np.clip(np.floor(side * share + 0.5).astype(np.int64), np.minimum(side, MIN_SIDE), side)
