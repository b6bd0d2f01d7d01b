"""Moves points, boxes, polygons and orientations of a sample along with the augmented pixels.

A region is a shape code and k points (x, y), finite pixels of the stored file in edge coordinates:
x right, y down, from (0, 0) to (width, height). A matrix acts on the shapes as follows:

POINT (1 point) moves; dropped if it is outside the frame.
BOX (2 points, opposite corners) becomes the bounding box of its four moved corners: exact under
    mirror, quarter turns, crop and scaling, wider than the object under rotation and shear. It is
    clipped, and dropped if less than `min_visible` of its area is left, or none.
POLYGON (3 points or more) moves; dropped if a point is more than half a pixel outside the frame,
    otherwise points outside are clamped to the edge.
TURN (1 point, (degrees, 0)) is the clockwise rotation of the content: 0, 90, 180 or 270. Quarter
    turns add to it. It is never dropped, and an image with a turn must not be mirrored.

A polygon is not clipped at the edge, because that would change the count of its written numbers and
with it the length of the sample. The surviving regions decide the lengths, which packing needs
before any pixel is read, so `survivors` handles all regions of a window at once.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

POINT, BOX, POLYGON, TURN = range(4)
NAMES = ("point", "box", "polygon", "turn")

# Tolerance in output pixels for polygon points and for POINT regions outside the frame. The second
# only absorbs rounding, so that a point exactly on the edge of the image survives.
POLYGON_SLACK = 0.5
POINT_SLACK = 2.0**-10

# Number of points, indexed by shape code.
_FEWEST_POINTS, _MOST_POINTS = np.array([1, 2, 3, 1]), np.array([1, 2, 2**15 - 1, 1])


def survivors(
    shape: NDArray[np.int8],
    point_ptr: NDArray[np.int64],
    points: NDArray[np.float64],
    matrices: NDArray[np.float64],
    out_w: ArrayLike,
    out_h: ArrayLike,
    min_visible: ArrayLike,
) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Move r regions of any images to their outputs, by the rules of the module docstring.

    Args:
        shape: [r] codes.
        point_ptr: int64 [r+1], first point of each region, and the end.
        points: float64 [p, 2].
        matrices: float64 [r, 3, 3] of the regions' images, from edge coordinates of the source to
            those of the output.
        out_w, out_h: integers [r], output sizes of the regions' images.
        min_visible: minimum share of a box's area that must stay; a number or [r].

    Returns:
        (keep bool [r], points float64 [p, 2]): the points in the output, for a box its upper left
        and lower right corner; NaN for dropped regions.

    Raises:
        ValueError: a turn in a mirrored image, or a wrong number of points for a shape.
    """
    num = shape.size
    ends = np.stack(np.broadcast_arrays(np.asarray(out_w), np.asarray(out_h)), axis=-1)
    frame = np.broadcast_to(ends.astype(np.float64), (num, 2))
    counts = np.diff(point_ptr)
    _check_counts(shape, counts)
    owner = np.repeat(np.arange(num), counts)
    moved = _move_each(points, matrices, owner)
    slack = np.where(shape == POLYGON, POLYGON_SLACK, POINT_SLACK)[owner, None]
    outside = ~((moved >= -slack) & (moved <= frame[owner] + slack)).all(axis=1)
    keep = np.bincount(owner, outside, num) == 0
    moved = _inside_each(moved, frame[owner])

    turn = np.flatnonzero(shape == TURN)
    first = point_ptr[turn]
    degrees = points[first, 0] + 90.0 * _quarters(matrices[turn], turn)
    moved[first, 0], moved[first, 1] = degrees % 360.0, 0.0
    keep[turn] = True

    box = np.flatnonzero(shape == BOX)
    first = point_ptr[box]
    share = np.broadcast_to(np.asarray(min_visible, np.float64), (num,))[box]
    keep[box], moved[first], moved[first + 1] = _clip_each(
        points[first], points[first + 1], matrices[box], frame[box], share
    )
    moved[~keep[owner]] = np.nan
    return keep, moved


def _quarters(matrices: NDArray[np.float64], which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the clockwise quarter turns int64 [t] nearest to matrices [t, 3, 3].

    They follow from the image of the x axis: shear does not change it, and a rotation of at most 45
    degrees does not change the nearest quarter. `which` [t] are region numbers for messages.
    """
    a, b = matrices[:, 0, 0], matrices[:, 0, 1]
    d, e = matrices[:, 1, 0], matrices[:, 1, 1]
    if bad := np.flatnonzero(a * e - b * d <= 0).tolist():
        raise ValueError(
            f"region {which[bad[0]]}: an image with orientation metadata is mirrored; its sample "
            "must say flip_ok = false in the index"
        )
    level = np.abs(a) >= np.abs(d)
    return np.where(level, np.where(a > 0, 0, 2), np.where(d > 0, 1, 3))


def _check_counts(shape: NDArray[np.int8], counts: NDArray[np.int64]) -> None:
    known = (shape >= 0) & (shape < len(NAMES))
    code = np.where(known, shape, 0)
    right = known & (counts >= _FEWEST_POINTS[code]) & (counts <= _MOST_POINTS[code])
    if bad := np.flatnonzero(~right).tolist():
        i = bad[0]
        raise ValueError(
            f"region {i}: shape {shape[i]} with {counts[i]} points; expected 0, a point, with 1; "
            "1, a box, with 2; 2, a polygon, with 3 or more; 3, a turn, with 1"
        )


def _move_each(
    points: NDArray[np.float64], matrices: NDArray[np.float64], owner: NDArray[np.int64]
) -> NDArray[np.float64]:
    """Move points [p, 2] by the matrices [r, 3, 3] of their owners [p]."""
    # No matrix product, because BLAS may use another order of additions or fused multiply-adds.
    x, y = points[:, 0], points[:, 1]
    out = np.empty_like(points)
    for axis in (0, 1):
        a, b, c = (matrices[:, axis, column][owner] for column in range(3))
        out[:, axis] = a * x + b * y + c
    return out


def _inside_each(points: NDArray[np.float64], frame: NDArray[np.float64]) -> NDArray[np.float64]:
    # "+ 0.0" turns -0.0 into 0.0, because min and max of Python and numpy treat it differently.
    return np.minimum(np.maximum(points, 0.0), frame) + 0.0


def _clip_each(
    one: NDArray[np.float64],
    other: NDArray[np.float64],
    matrices: NDArray[np.float64],
    frame: NDArray[np.float64],
    min_visible: NDArray[np.float64],
) -> tuple[NDArray[np.bool_], NDArray[np.float64], NDArray[np.float64]]:
    """Move and clip boxes given by opposite corners [b, 2].

    Returns:
        (keep bool [b], upper left [b, 2], lower right [b, 2]).
    """
    every = np.arange(len(one))
    corners = np.stack(
        [
            _move_each(np.stack([x[:, 0], y[:, 1]], axis=1), matrices, every)
            for x, y in ((one, one), (other, one), (one, other), (other, other))
        ]
    )
    low, high = corners.min(axis=0), corners.max(axis=0)
    area = (high - low)[:, 0] * (high - low)[:, 1]
    low, high = _inside_each(low, frame), _inside_each(high, frame)
    seen = (high - low)[:, 0] * (high - low)[:, 1]
    return (seen > 0) & (seen >= min_visible * area), low, high


def written(shape: int, points: NDArray[np.float64], out_w: int, out_h: int) -> tuple[int, ...]:
    """Return the numbers that a region is written with.

    Args:
        shape: POINT, BOX, POLYGON or TURN.
        points: float64 [k, 2] in the output, from `survivors`.
        out_w, out_h: size of the output.

    Returns:
        x, y, x, y ... in thousandths of the frame, 0 to 999; for a turn, only its degrees.
    """
    if shape == TURN:
        return (int(points[0, 0]),)
    return tuple(to_thousandths(points, out_w, out_h).ravel().tolist())


def to_thousandths(points: ArrayLike, width: ArrayLike, height: ArrayLike) -> NDArray[np.int64]:
    """Return points [..., 2] as thousandths of the frame, rounded down, 0 to 999: int64 [..., 2].

    The multiplication comes first; it is exact for binary fractions of a pixel, so that only the
    division rounds.
    """
    size = np.stack(np.broadcast_arrays(np.asarray(width), np.asarray(height)), axis=-1)
    share = np.floor(np.asarray(points, np.float64) * 1000.0 / size)
    return np.clip(share.astype(np.int64), 0, 999)
