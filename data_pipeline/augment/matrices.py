"""From edge coordinates of a source image to those of what is left of it: 2x3 matrices.

Edge coordinates: x right, y down, the top left corner of the picture is (0, 0), its bottom right
corner (width, height), the middle of the first pixel (0.5, 0.5). In them a mirror is exactly
x -> width - x, and scaling needs no half pixels.

Every function takes numbers or arrays [m] alike. Each operation is one IEEE 754 addition,
multiplication or division, in a fixed order, so numbers and arrays give the same bits, on any
machine (BLAS products would not, nor would the sine of a C library).
"""

from typing import Any

import numpy as np

# The rows of a 2x3 matrix one after the other.
Affine = tuple[Any, Any, Any, Any, Any, Any]

# Of 0 to 3 quarter turns clockwise. No -0.0: signs of zero would otherwise depend on the path.
_COSINE = np.array([1.0, 0.0, -1.0, 0.0])
_SINE = np.array([0.0, 1.0, 0.0, -1.0])
_MINUS_SINE = np.array([0.0, -1.0, 0.0, 1.0])
_RADIANS = 0.017453292519943295  # in a degree


def compose(after: Affine, before: Affine) -> Affine:
    """The matrix that does `before`, then `after`."""
    a, b, c, d, e, f = after
    g, h, i, j, k, l = before
    return (
        *(a * g + b * j, a * h + b * k, a * i + b * l + c),
        *(d * g + e * j, d * h + e * k, d * i + e * l + f),
    )


def inverse(matrix: Affine) -> Affine:
    """The matrix that undoes an invertible one."""
    a, b, c, d, e, f = matrix
    area = a * e - b * d
    return (
        e / area,
        -b / area,
        (b * f - c * e) / area,
        -d / area,
        a / area,
        (c * d - a * f) / area,
    )


def mirrored(flip: Any, width: Any) -> Affine:
    """Left to right where `flip`: x -> width - x."""
    flip = flip * 1.0
    return 1.0 - 2.0 * flip, 0.0, flip * width, 0.0, 1.0, 0.0


def turned(turns: Any, width: Any, height: Any) -> Affine:
    """`turns` quarter turns clockwise of a width x height picture; once is (height - y, x)."""
    right = height * (turns == 1) + width * (turns == 2)
    down = height * (turns == 2) + width * (turns == 3)
    cosine = _COSINE[turns]
    return cosine, _MINUS_SINE[turns], right, _SINE[turns], cosine, down


def warped(
    width: Any, height: Any, degrees: Any, scale: Any, shear: Any, right: Any, down: Any
) -> Affine:
    """Shear, scale and turn clockwise about the middle, then shift by shares of the sides.

    Args:
        width, height: of the canvas.
        degrees: -45 to 45.
        scale: enlargement.
        shear: x -> x + shear * y, from the middle.
        right, down: shares of width and height.
    """
    sine, cosine = sine_cosine(degrees)
    a, b = scale * cosine, scale * (cosine * shear - sine)
    d, e = scale * sine, scale * (sine * shear + cosine)
    x, y = width / 2.0, height / 2.0
    return a, b, x + right * width - (a * x + b * y), d, e, y + down * height - (d * x + e * y)


def sine_cosine(degrees: Any) -> tuple[Any, Any]:
    """(sine, cosine) of -45 to 45 degrees by their power series: within 3e-16, never another bit.

    The terms left out are below 0.8**18 / 18!, which is 3e-18.
    """
    angle = degrees * _RADIANS
    square = angle * angle
    sine = cosine = 0.0
    for n in (16, 14, 12, 10, 8, 6, 4, 2):  # Horner, from the smallest term
        cosine = (1.0 + cosine) * square / (-n * (n - 1.0))
        sine = (1.0 + sine) * square / (-n * (n + 1.0))
    return angle + angle * sine, 1.0 + cosine


def placed(
    flip: Any, turns: Any, affine: Affine, left: Any, top: Any, width: Any, height: Any
) -> Affine:
    """Mirror, turn, warp, then take the crop's corner (left, top) for the origin.

    Args:
        flip: whether a source of width x height is mirrored.
        turns: quarter turns clockwise, 0 to 3.
        affine: on the canvas that the turns leave.
        left, top: of the crop on that canvas.
        width, height: of the source.
    """
    turn = turned(turns, width, height)
    a, b, c, d, e, f = compose(affine, compose(turn, mirrored(flip, width)))
    return a, b, c - left, d, e, f - top


def rescaled(matrix: Affine, x_factor: Any, y_factor: Any) -> Affine:
    """`matrix`, then both axes scaled."""
    a, b, c, d, e, f = matrix
    return a * x_factor, b * x_factor, c * x_factor, d * y_factor, e * y_factor, f * y_factor
