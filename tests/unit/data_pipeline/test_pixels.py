from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.augment.config import AugmentConfig, JpegConfig
from data_pipeline.augment.draws import Draw
from data_pipeline.augment.matrices import compose, inverse, rescaled
from data_pipeline.augment.pixels import FILL, _placement, apply
from tests.unit.data_pipeline.draws import EVERYTHING, GEOMETRY, some_draws
from tests.unit.data_pipeline.varied import move


def plain_draw(height, width, flip=False, turns=0, crop=None):
    canvas = (height, width) if turns % 2 else (width, height)
    crop = crop or (0, 0, *canvas)
    out = (crop[3] - crop[1], crop[2] - crop[0])  # height, width
    return Draw(height, width, flip, turns, None, crop, *out, None, 0)


def matrix(draw):
    """Return the map from source to output edge coordinates: [3, 3]."""
    left, top, right, bottom = draw.crop
    factors = draw.out_width / (right - left), draw.out_height / (bottom - top)
    return np.array([*rescaled(_placement(draw), *factors), 0.0, 0.0, 1.0]).reshape(3, 3)


def numbered(height, width):
    """Return an image in which all pixels differ."""
    number = np.arange(height * width)
    return np.stack([number % 251, number // 251 % 256, number // 64256], -1).astype(
        np.uint8
    ).reshape(height, width, 3)  # fmt: skip


def photo(height, width, seed=0):
    """Return smooth colours with some noise."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[:height, :width][..., None] / max(height, width)
    waves = 120 + 100 * np.sin(x * [[[5, 9, 4]]] + y * [[[7, 3, 8]]])
    return np.clip(waves + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)


# Whole pixels -----------------------------------------------------------------------------------


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("turns", [0, 1, 2, 3])
def test_mirror_turns_and_crop_move_every_pixel_to_where_its_point_goes(flip, turns):
    pixels = numbered(23, 31)
    for crop in (None, (3, 5, 17, 20)):
        draw = plain_draw(23, 31, flip, turns, crop)
        out = apply(draw, pixels)
        left, top, right, bottom = draw.crop
        expected = np.rot90(pixels[:, ::-1] if flip else pixels, -turns)
        assert np.array_equal(out, expected[top:bottom, left:right])
        rows, columns = np.mgrid[:23, :31].reshape(2, -1)
        moved = move(np.stack([columns + 0.5, rows + 0.5], 1), matrix(draw)) - 0.5
        assert np.array_equal(moved, np.rint(moved))
        x, y = moved.astype(int).T
        inside = (x >= 0) & (y >= 0) & (x < out.shape[1]) & (y < out.shape[0])
        assert inside.sum() == out.shape[0] * out.shape[1]
        assert np.array_equal(out[y[inside], x[inside]], pixels[rows, columns][inside])


def test_two_mirrors_and_four_turns_are_nothing():
    pixels = numbered(40, 27)
    points = np.random.default_rng(0).integers(0, 64 * 27, (50, 2)) / 64
    for flip, turns, times in ((True, 0, 2), (False, 1, 4), (False, 3, 4), (True, 1, 2)):
        out, moved = pixels, points
        for _ in range(times):
            draw = plain_draw(*out.shape[:2], flip, turns)
            out, moved = apply(draw, out), move(moved, matrix(draw))
        assert np.array_equal(out, pixels)
        assert np.array_equal(moved, points)


# Any geometry -------------------------------------------------------------------------------


def disc(x, y, radius):
    angle = np.linspace(0, 2 * np.pi, 33)[:-1]
    return np.stack([x + radius * np.cos(angle), y + radius * np.sin(angle)], 1)


def depth(corners, x, y):
    """Return the depth of points inside a convex polygon; outside it is negative."""
    ahead = np.roll(corners, -1, 0) - corners
    ahead = ahead / np.hypot(*ahead.T)[:, None]
    across = [u * (y - corner[1]) - v * (x - corner[0]) for corner, (u, v) in zip(corners, ahead)]
    return np.min(np.multiply(across, np.sign(doubled_areas(corners).sum())), axis=0)


def doubled_areas(corners):
    """Return doubled areas of the triangles between the origin and each edge."""
    x, y = corners.T
    return x * np.roll(y, -1) - np.roll(x, -1) * y


def centre(corners):
    areas = doubled_areas(corners)[:, None]
    return ((corners + np.roll(corners, -1, 0)) * areas).sum(0) / 3 / areas.sum()


def painted(height, width, shapes):
    """Paint each shape white in its own channel; edge pixels are shaded by their coverage."""
    fine = 8
    y, x = (np.mgrid[: height * fine, : width * fine] + 0.5) / fine
    channels = [(depth(corners, x, y) > 0).reshape(height, fine, width, fine) for corners in shapes]
    return np.stack([np.rint(255 * c.mean((1, 3))) for c in channels], -1).astype(np.uint8)


HEIGHT, WIDTH = 90, 120
SHAPES = [
    disc(40.3, 30.7, 9.2),
    np.array([[60.0, 20.0], [95.0, 20.0], [95.0, 48.0], [60.0, 48.0]]),
    np.array([[30.4, 55.2], [66.9, 50.1], [80.3, 68.8], [38.2, 75.6]]),
]


@cache
def scene():
    return painted(HEIGHT, WIDTH, SHAPES)


def check_scene(draw):
    """Check the shapes in the output; return the number of shapes wholly in the frame."""
    out, found = apply(draw, scene()).astype(float), 0
    assert out.shape == (draw.out_height, draw.out_width, 3)
    y, x = np.mgrid[: draw.out_height, : draw.out_width] + 0.5
    for channel, corners in enumerate(SHAPES):
        moved = move(corners, matrix(draw))
        inner = depth(moved, x, y)
        assert (out[..., channel][inner > 0.5] > 127).all()
        assert (out[..., channel][inner < -0.5] < 128).all()
        if (moved > 2).all() and (moved < [draw.out_width - 2, draw.out_height - 2]).all():
            weight = out[..., channel] / out[..., channel].sum()
            seen = np.array([(weight * x).sum(), (weight * y).sum()])
            assert np.abs(seen - centre(moved)).max() < 0.1
            found += 1
    return found


def test_shapes_are_found_where_their_coordinates_went():
    draws = some_draws(GEOMETRY, 300, HEIGHT, WIDTH)
    found = sum(check_scene(draws.one(i)) for i in range(300))
    assert found > 400  # otherwise nearly all shapes were cut


@pytest.mark.parametrize("part", ["flip", "turn", "affine", "crop"])
def test_and_under_each_operation_alone(part):
    config = AugmentConfig(**{part: getattr(GEOMETRY, part)})
    draws = some_draws(config, 40, HEIGHT, WIDTH, seed=5)
    assert sum(check_scene(draws.one(i)) for i in range(40)) > 40


def test_sizes_are_those_that_were_drawn():
    height, width = np.random.default_rng(3).integers(1, 90, (2, 2500))
    draws = some_draws(EVERYTHING, 2500, height, width, seed=2)
    pixels = photo(90, 90)
    for i in range(2500):
        out = apply(draws.one(i), pixels[: height[i], : width[i]])
        assert out.dtype == np.uint8
        assert out.shape == (draws.out_height[i], draws.out_width[i], 3)
        assert out.size <= 3 * height[i] * width[i]


def test_one_matrix_is_all_matrices_bit_for_bit():
    height, width = np.random.default_rng(4).integers(1, 4000, (2, 800))
    draws = some_draws(EVERYTHING, 800, height, width)
    together = draws.matrices()
    for i in range(800):
        assert matrix(draws.one(i)).tobytes() == together[i].tobytes()


numbers = st.floats(-50, 50).map(lambda value: round(value, 3))


@given(st.tuples(*[numbers] * 6), st.tuples(numbers, numbers))
@settings(max_examples=100)
def test_the_inverse_undoes(values, point):
    a, b, c, d, e, f = values
    if abs(a * e - b * d) < 1:
        return
    x, y = compose(inverse(values), compose(values, (1, 0, point[0], 0, 1, point[1])))[2::3]
    assert np.allclose([x, y], point, atol=1e-6)


def test_what_comes_from_outside_is_filled():
    draws = some_draws(AugmentConfig(affine=GEOMETRY.affine), 60, 50, 70)
    white = np.full((50, 70, 3), 255, np.uint8)
    frame = np.array([[0.0, 0.0], [70.0, 0.0], [70.0, 50.0], [0.0, 50.0]])
    y, x = np.mgrid[:50, :70] + 0.5
    filled = 0
    for one in map(draws.one, range(60)):
        out, inner = apply(one, white), depth(move(frame, matrix(one)), x, y)
        assert (out[inner > 0.01] == 255).all()
        assert (out[inner < -0.01] == FILL).all()
        filled += (inner < -0.01).any()
    assert filled > 20


# Colour and compression -------------------------------------------------------------------------


def toned(pixels, brightness=1.0, contrast=1.0, saturation=1.0, gamma=1.0):
    height, width = pixels.shape[:2]
    colour = (brightness, contrast, saturation, gamma)
    return apply(
        Draw(height, width, False, 0, None, (0, 0, width, height), height, width, colour, 0), pixels
    ).astype(float)


def test_colour_factors_do_what_they_say():
    pixels = photo(30, 40)
    dark = np.clip(pixels, 0, 160)
    assert np.abs(toned(dark, brightness=1.5) - dark * 1.5).max() <= 0.5
    assert np.abs(toned(pixels, contrast=0.5) - (pixels / 2 + 63.75)).max() <= 0.5
    assert np.abs(toned(pixels, gamma=1.3) - 255 * (pixels / 255) ** 1.3).max() <= 0.5
    luma = (pixels @ [0.299, 0.587, 0.114])[..., None]
    grey = np.clip(luma + 0.4 * (pixels - luma), 0, 255)
    assert np.abs(toned(pixels, saturation=0.4) - grey).max() <= 1
    assert np.array_equal(toned(pixels), pixels)


def test_jpeg_is_lossy_by_its_quality_and_leaves_things_in_place():
    pixels = photo(64, 96)
    errors = []
    for quality in (95, 60, 20):
        draws = some_draws(AugmentConfig(jpeg=JpegConfig(quality=(quality, quality))), 1, 64, 96)
        out = apply(draws.one(0), pixels).astype(float)
        errors.append(np.abs(out - pixels).mean())
    assert 0 < errors[0] < errors[1] < errors[2] < 12


def test_the_same_draw_gives_the_same_bytes():
    pixels = photo(70, 50)
    for seed in range(3):
        first, second = (some_draws(EVERYTHING, 20, 70, 50, seed) for _ in range(2))
        for i in range(20):
            same = apply(first.one(i), pixels).tobytes() == apply(second.one(i), pixels).tobytes()
            assert same


def test_nothing_drawn_is_the_same_array():
    pixels = photo(9, 12)
    assert apply(plain_draw(9, 12), pixels) is pixels


def test_pixels_of_another_size_are_refused():
    with pytest.raises(ValueError, match=r"\[9, 12, 3\], the draw was made for .*\[12, 9, 3\]"):
        apply(plain_draw(12, 9), photo(9, 12))
