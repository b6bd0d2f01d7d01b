"""2x3 matrices from edge coordinates of a source image to those of its augmented output.

In edge coordinates x points right and y down, the top left corner of the image is (0, 0), its
bottom right corner is (width, height), and the center of the first pixel is (0.5, 0.5). A mirror is
then exactly x -> width - x, and scaling needs no half-pixel offsets.

Every function accepts numbers or arrays [m]. Each operation is one IEEE 754 addition,
multiplication or division, in a fixed order, so numbers and arrays give the same bits on any
machine. BLAS products and the sine of a C library would not.
"""

from typing import Any

import numpy as np

# A 2x3 matrix in row order.
Affine = tuple[Any, Any, Any, Any, Any, Any]

# For 0 to 3 quarter turns clockwise. They contain no -0.0, so that the signs of zeros do not depend
# on the code path.
_COSINE = np.array([1.0, 0.0, -1.0, 0.0])
_SINE = np.array([0.0, 1.0, 0.0, -1.0])
_MINUS_SINE = np.array([0.0, -1.0, 0.0, 1.0])
_RADIANS = 0.017453292519943295  # per degree


def compose(after: Affine, before: Affine) -> Affine:
    """Return the matrix that applies `before`, then `after`."""
    a, b, c, d, e, f = after
    g, h, i, j, k, l = before
    return (
        *(a * g + b * j, a * h + b * k, a * i + b * l + c),
        *(d * g + e * j, d * h + e * k, d * i + e * l + f),
    )


def inverse(matrix: Affine) -> Affine:
    """Return the inverse of an invertible matrix."""
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
    """Return the mirror x -> width - x where `flip` is set, the identity elsewhere."""
    flip = flip * 1.0
    return 1.0 - 2.0 * flip, 0.0, flip * width, 0.0, 1.0, 0.0


def turned(turns: Any, width: Any, height: Any) -> Affine:
    """Return the matrix of clockwise quarter turns of a width x height image.

    One turn maps (x, y) to (height - y, x).
    """
    right = height * (turns == 1) + width * (turns == 2)
    down = height * (turns == 2) + width * (turns == 3)
    cosine = _COSINE[turns]
    return cosine, _MINUS_SINE[turns], right, _SINE[turns], cosine, down


def warped(
    width: Any, height: Any, degrees: Any, scale: Any, shear: Any, right: Any, down: Any
) -> Affine:
    """Return the matrix that shears, scales and rotates about the center, then shifts.

    Args:
        width, height: size of the canvas.
        degrees: clockwise rotation, -45 to 45.
        scale: scale factor.
        shear: x -> x + shear * y, relative to the center.
        right, down: shift, as shares of width and height.
    """
    sine, cosine = sine_cosine(degrees)
    a, b = scale * cosine, scale * (cosine * shear - sine)
    d, e = scale * sine, scale * (sine * shear + cosine)
    x, y = width / 2.0, height / 2.0
    return a, b, x + right * width - (a * x + b * y), d, e, y + down * height - (d * x + e * y)


def sine_cosine(degrees: Any) -> tuple[Any, Any]:
    """Return (sine, cosine) of -45 to 45 degrees, accurate to 3e-16 and bit-exact on any machine.

    They are power series; the omitted terms are below 0.8**18 / 18!, which is 3e-18.
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
    """Return the matrix that mirrors, turns, warps, then moves the crop's corner to the origin.

    Args:
        flip: True to mirror the source.
        turns: quarter turns clockwise, 0 to 3.
        affine: matrix on the turned canvas.
        left, top: corner of the crop on that canvas.
        width, height: size of the source.
    """
    turn = turned(turns, width, height)
    a, b, c, d, e, f = compose(affine, compose(turn, mirrored(flip, width)))
    return a, b, c - left, d, e, f - top


def rescaled(matrix: Affine, x_factor: Any, y_factor: Any) -> Affine:
    """Return `matrix` followed by a scaling of both axes."""
    a, b, c, d, e, f = matrix
    return a * x_factor, b * x_factor, c * x_factor, d * y_factor, e * y_factor, f * y_factor
