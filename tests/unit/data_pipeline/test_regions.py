import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.augment.regions import (
    BOX,
    POINT,
    POLYGON,
    TURN,
    survivors,
    to_thousandths,
    written,
)
from tests.unit.data_pipeline.draws import GEOMETRY, some_draws
from tests.unit.data_pipeline.varied import move, slow_survivor

EYE = np.eye(3)
SQUARE = [[10, 10], [30, 10], [30, 30], [10, 30]]


def shifted(x, y):
    return np.array([[1.0, 0, x], [0, 1, y], [0, 0, 1]])


def survivor(shape, points, matrix, out_w, out_h, min_visible):
    """Return where a region ends up, or None; checked bit for bit against the slow reference."""
    keep, moved = survivors(
        np.array([POINT, shape]),
        np.array([0, 1, 1 + len(points)]),
        np.array([[1.0, 2.0], *points]),
        np.stack([EYE, matrix]),
        out_w,
        out_h,
        min_visible,
    )
    alone = slow_survivor(shape, points, matrix, out_w, out_h, min_visible)
    assert keep.tolist() == [True, alone is not None]
    assert alone is None or moved[1:].tobytes() == alone.tobytes()
    return moved[1:] if keep[1] else None


def place(shape, points, x=0.0, y=0.0, min_visible=0.3):
    """Return a region moved by (x, y) in a frame of 100 x 50."""
    return survivor(shape, points, shifted(x, y), 100, 50, min_visible)


# Rules ------------------------------------------------------------------------------------------


def test_points_outside_are_dropped():
    assert place(POINT, [[40, 20]], 5, 6).tolist() == [[45, 26]]
    assert place(POINT, [[0, 0]]).tolist() == [[0, 0]]
    assert place(POINT, [[100, 50]]).tolist() == [[100, 50]]
    for x, y in ((-0.1, 3), (100.1, 3), (3, -0.1), (3, 50.1)):
        assert place(POINT, [[x, y]]) is None
    # a rounding error does not move a point outside
    assert place(POINT, [[100 + 1e-9, -1e-9]]).tolist() == [[100, 0]]


def test_boxes_are_clipped_and_dropped_by_what_is_left():
    box = [[10, 10], [30, 30]]
    assert place(BOX, box, 5, 0).tolist() == [[15, 10], [35, 30]]
    assert place(BOX, box, -20, 0, 0.5).tolist() == [[0, 10], [10, 30]]
    assert place(BOX, box, -20.01, 0, 0.5) is None
    assert place(BOX, box, 80, 30, 0.25).tolist() == [[90, 40], [100, 50]]
    assert place(BOX, box, 80, 30, 0.26) is None
    assert place(BOX, box, -30, 0, 0.0) is None  # nothing is left
    assert place(BOX, [[30, 30], [10, 10]]).tolist() == [[10, 10], [30, 30]]
    assert place(BOX, [[10, 10], [10, 30]], min_visible=0) is None


def test_polygons_are_never_cut():
    assert place(POLYGON, SQUARE, 1, 2).tolist() == (np.array(SQUARE) + [1, 2]).tolist()
    assert place(POLYGON, SQUARE, -10.5, 0).tolist() == [[0, 10], [19.5, 10], [19.5, 30], [0, 30]]
    assert place(POLYGON, SQUARE, -10.6, 0) is None
    assert place(POLYGON, SQUARE, 0, 20.6) is None


def test_boxes_stay_exact_under_mirror_and_turns_and_grow_under_rotation():
    turn = np.array([[0.0, -1, 50], [1, 0, 0], [0, 0, 1]])
    mirror = np.array([[-1.0, 0, 100], [0, 1, 0], [0, 0, 1]])
    box = [[10, 5], [30, 20]]
    assert survivor(BOX, box, turn, 50, 100, 0.3).tolist() == [[30, 10], [45, 30]]
    assert survivor(BOX, box, mirror, 100, 50, 0.3).tolist() == [[70, 5], [90, 20]]
    tilt = np.array([[0.8, -0.6, 40], [0.6, 0.8, 10], [0, 0, 1]])
    corners = move([[10, 5], [30, 5], [10, 20], [30, 20]], tilt)
    expected = [corners.min(0).tolist(), corners.max(0).tolist()]
    assert survivor(BOX, box, tilt, 100, 90, 0.3).tolist() == expected


def test_orientation_follows_quarter_turns():
    draws = some_draws(GEOMETRY, 400, 60, 90)
    for i, (matrix, turns) in enumerate(zip(draws.matrices(), draws.turns)):
        for degrees in (0, 90, 180, 270):
            region = [[degrees, 0]]
            if draws.flip[i]:
                with pytest.raises(ValueError, match="orientation metadata is mirrored"):
                    survivor(TURN, region, matrix, 60, 90, 0.3)
            else:
                after = survivor(TURN, region, matrix, 60, 90, 0.3)
                assert after.tolist() == [[(degrees + 90 * turns) % 360, 0]]


def test_no_coordinate_is_minus_zero():
    """The sign of zero depends on the way of computing, and hashes include it."""
    minus = np.array([[1.0, -0.0, -0.0], [-0.0, 1.0, -0.0], [0, 0, 1]])
    for shape, points in ((POINT, [[-0.0, 3]]), (BOX, [[-0.0, -0.0], [5, 5]])):
        assert not np.signbit(survivor(shape, points, minus, 9, 9, 0.3)).any()


# Random regions ---------------------------------------------------------------------------------

coordinate = st.floats(-30, 130) | st.integers(-10, 120).map(float)
sizes = st.integers(1, 120)


@st.composite
def regions(draw):
    shape = draw(st.sampled_from([POINT, BOX, POLYGON, TURN]))
    if shape == TURN:
        points = [[draw(st.sampled_from([0.0, 90.0, 180.0, 270.0])), 0.0]]
    else:
        count = {POINT: 1, BOX: 2, POLYGON: draw(st.integers(3, 6))}[shape]
        points = draw(st.lists(st.tuples(coordinate, coordinate), min_size=count, max_size=count))
    image = draw(st.integers(0, 49))
    visible = draw(st.sampled_from([0.0, 0.3, 0.5, 1.0]))
    return shape, [list(point) for point in points], image, visible


MIRRORED = some_draws(GEOMETRY, 50, 70, 100, seed=1)
UPRIGHT = some_draws(GEOMETRY, 50, 70, 100, seed=1, allowed=False)


@given(st.lists(regions(), max_size=30))
@settings(max_examples=150)
def test_all_at_once_equal_one_by_one_bit_for_bit(given_regions):
    draws = UPRIGHT if any(shape == TURN for shape, *_ in given_regions) else MIRRORED
    matrices = draws.matrices()
    shape = np.array([region[0] for region in given_regions], np.int8)
    image = np.array([region[2] for region in given_regions], np.int64)
    ptr = np.append(0, np.cumsum([len(region[1]) for region in given_regions])).astype(np.int64)
    points = np.array([p for region in given_regions for p in region[1]]).reshape(-1, 2)
    keep, moved = survivors(
        shape,
        ptr,
        points,
        matrices[image],
        draws.out_width[image],
        draws.out_height[image],
        np.array([region[3] for region in given_regions]),
    )
    for i, (code, own, j, visible) in enumerate(given_regions):
        size = int(draws.out_width[j]), int(draws.out_height[j])
        alone = slow_survivor(code, own, matrices[j], *size, visible)
        part = moved[ptr[i] : ptr[i + 1]]
        assert keep[i] == (alone is not None)
        assert np.isnan(part).all() if alone is None else part.tobytes() == alone.tobytes()


@given(regions())
@settings(max_examples=150)
def test_what_survives_lies_in_the_frame(region):
    shape, points, image, visible = region
    draws = UPRIGHT
    size = int(draws.out_width[image]), int(draws.out_height[image])
    found = survivor(shape, points, draws.matrices()[image], *size, visible)
    if found is not None and shape != TURN:
        assert len(found) == len(points)
        assert (found >= 0).all()
        assert (found <= size).all()
        assert all(0 <= number <= 999 for number in written(shape, found, *size))


def test_mirrored_orientations_and_wrong_counts_are_refused():
    mirror = np.array([[[-1.0, 0, 9], [0, 1, 0], [0, 0, 1]]])
    with pytest.raises(ValueError, match="flip_ok = false in the index"):
        survivors(np.array([TURN]), np.array([0, 1]), np.zeros((1, 2)), mirror, [9], [9], 0.3)
    for shape, count in ((POINT, 2), (BOX, 1), (POLYGON, 2), (7, 1)):
        with pytest.raises(ValueError, match=f"region 0: shape {shape} with {count} points"):
            survivors(
                np.array([shape]), np.array([0, count]), np.zeros((count, 2)), EYE[None], 9, 9, 0.3
            )


# Numbers ----------------------------------------------------------------------------------------


def test_thousandths():
    found = to_thousandths([[0, 0], [640, 480], [639.99, 240], [-3, 500], [0.64, 0.4799]], 640, 480)
    assert found.tolist() == [[0, 0], [999, 999], [999, 500], [0, 999], [1, 0]]
    exact = np.arange(1000)
    for width in (1000, 500, 125):  # whole thousandths stay unchanged
        points = np.stack([exact * width, exact * width], 1) / 1000
        assert (to_thousandths(points, width, width)[:, 0] - exact).tolist() == [0] * 1000


@given(st.integers(1, 8000), st.integers(0, 2**20))
@settings(max_examples=200)
def test_thousandths_round_down_exactly(width, place):
    x = width * 64 * place // 2**20 / 64
    number = int(to_thousandths([[x, 0]], width, 1)[0, 0])
    assert number == min(999, int(x * 64) * 1000 // (64 * width))


def test_written_numbers():
    assert written(POINT, np.array([[5.0, 5.0]]), 10, 20) == (500, 250)
    assert written(BOX, np.array([[0.0, 0.0], [10.0, 20.0]]), 10, 20) == (0, 0, 999, 999)
    assert len(written(POLYGON, np.ones((5, 2)), 10, 20)) == 10
    assert written(TURN, np.array([[270.0, 0.0]]), 10, 20) == (270,)
