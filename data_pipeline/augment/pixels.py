"""Applies the drawn augmentation of an image to its pixels, with numpy and Pillow.

The steps, in order:

1. Geometry. Mirror, quarter turns and crop move whole pixels. If an affine was drawn, mirror,
   turns, affine and crop are one bicubic resampling; pixels from outside the source become black,
   like the padding to whole tokens.
2. Rescale to the drawn size, bicubic with antialiasing.
3. Brightness, contrast about middle grey and gamma, as one table of 256 values. Then saturation.
4. JPEG compression at the drawn quality with 4:2:0, and decompression.

The same draw gives the same bytes with the same version of Pillow and its libjpeg; other versions
may round pixels differently. Sizes and coordinates do not depend on the version.
"""

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from data_pipeline.augment.draws import Draw
from data_pipeline.augment.matrices import Affine, inverse, placed
from moonvit3d.media import read_image

FILL = (0, 0, 0)
JPEG_SUBSAMPLING = "4:2:0"

_IDENTITY = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as in JPEG
# (mirrored, then quarter turns clockwise) -> Pillow's operation, which rotates counterclockwise.
_MOVES = {
    (False, 1): Image.Transpose.ROTATE_270,
    (False, 2): Image.Transpose.ROTATE_180,
    (False, 3): Image.Transpose.ROTATE_90,
    (True, 0): Image.Transpose.FLIP_LEFT_RIGHT,
    (True, 1): Image.Transpose.TRANSVERSE,
    (True, 2): Image.Transpose.FLIP_TOP_BOTTOM,
    (True, 3): Image.Transpose.TRANSPOSE,
}


def apply(draw: Draw, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Apply a draw to an image.

    Args:
        draw: draw for an image of this size.
        pixels: uint8 [draw.height, draw.width, 3].

    Returns:
        uint8 [draw.out_height, draw.out_width, 3], read-only; `pixels` itself if nothing was drawn.

    Raises:
        ValueError: `pixels` does not have the size or dtype that the draw was made for.
    """
    if pixels.dtype != np.uint8 or pixels.shape != (draw.height, draw.width, 3):
        raise ValueError(
            f"pixels are {pixels.dtype} {list(pixels.shape)}, the draw was made for uint8 "
            f"{[draw.height, draw.width, 3]}: index and file do not belong together"
        )
    if draw.is_nothing:
        return pixels
    image = _framed(draw, Image.fromarray(pixels))
    if image.size != (draw.out_width, draw.out_height):
        image = image.resize((draw.out_width, draw.out_height), Image.Resampling.BICUBIC)
    if draw.colour is not None:
        image = _coloured(image, *draw.colour)
    return _compressed(image, draw.jpeg) if draw.jpeg else np.asarray(image)


def _placement(draw: Draw) -> Affine:
    """Return the matrix from the source to the unscaled crop."""
    affine = _IDENTITY if draw.affine is None else draw.affine
    return placed(draw.flip, draw.turns, affine, *draw.crop[:2], draw.width, draw.height)


def _framed(draw: Draw, image: Image.Image) -> Image.Image:
    left, top, right, bottom = draw.crop
    if draw.affine is not None:
        # Pillow needs the matrix from output to source, also in edge coordinates.
        source = tuple(float(value) for value in inverse(_placement(draw)))
        return image.transform(
            (right - left, bottom - top),
            Image.Transform.AFFINE,
            source,
            Image.Resampling.BICUBIC,
            fillcolor=FILL,
        )
    if draw.flip or draw.turns:
        image = image.transpose(_MOVES[draw.flip, draw.turns])
    return image if draw.crop == (0, 0, *image.size) else image.crop(draw.crop)


def _coloured(
    image: Image.Image, brightness: float, contrast: float, saturation: float, gamma: float
) -> Image.Image:
    """Apply the drawn factors and exponent; 1 means no change."""
    if (brightness, contrast, gamma) != (1.0, 1.0, 1.0):
        values = np.clip(np.arange(256) * brightness, 0, 255)
        values = np.clip((values - 127.5) * contrast + 127.5, 0, 255)
        values = np.rint(255 * (values / 255) ** gamma)
        image = image.point(values.astype(int).tolist() * 3)
    if saturation != 1.0:
        rows = []
        for channel in range(3):
            row = [(1.0 - saturation) * weight for weight in _LUMA]
            row[channel] += saturation
            rows += [*row, 0.0]
        image = image.convert("RGB", tuple(rows))
    return image


def _compressed(image: Image.Image, quality: int) -> NDArray[np.uint8]:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality, subsampling=JPEG_SUBSAMPLING)
    return read_image(file.getvalue())
