import dataclasses
import hashlib
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from data_pipeline.augment.config import (
    AffineConfig,
    AugmentConfig,
    ColourConfig,
    CropConfig,
    JpegConfig,
)
from data_pipeline.augment.draws import (
    MAX_JPEG_SIDE,
    MIN_SIDE,
    choose_variants,
    draw,
    media_keys,
    sample_keys,
    uniform,
)
from data_pipeline.augment.matrices import sine_cosine
from tests.unit.data_pipeline.draws import EVERYTHING, some_draws, some_keys

COLUMNS = [field.name for field in dataclasses.fields(some_draws(AugmentConfig(), 1, 9, 9))]
PINNED = "ddd7a1fb7531dd61"


def same(a, b):
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in COLUMNS)


def some_sizes(num, most=3000):
    return [1 + (uniform(some_keys(num, seed), 99) * most).astype(int) for seed in (7, 8)]


# Keys -------------------------------------------------------------------------------------------


def test_keys_differ_in_every_part():
    seen = [
        media_keys(
            sample_keys(seed, source, np.arange(50), np.full(50, epoch)), np.full(50, medium)
        )
        for seed in (0, 1)
        for source in ("a", "b")
        for epoch in (0, 1, 50)
        for medium in (0, 1)
    ]
    seen += [sample_keys(0, "a", np.arange(50), np.zeros(50, int))]
    assert np.unique(np.concatenate(seen)).size == 50 * len(seen)


def test_a_key_does_not_depend_on_its_neighbours():
    samples, epochs = np.arange(100)[::-1], np.arange(100) % 7
    together = sample_keys(3, "a", samples, epochs)
    one_by_one = [int(sample_keys(3, "a", [s], [e])[0]) for s, e in zip(samples, epochs)]
    assert together.tolist() == one_by_one


def test_counters_are_uniform_and_independent():
    keys = some_keys(40_000)
    table = np.stack([uniform(keys, counter) for counter in range(23)])
    assert table.min() >= 0
    assert table.max() < 1
    for row in table:
        seen = np.histogram(row, 20, (0, 1))[0]
        assert ((seen - 2000) ** 2 / 2000).sum() < 60  # chi squared, 19 degrees of freedom
    assert np.abs(np.corrcoef(table) - np.eye(23)).max() < 0.025
    assert np.abs(np.corrcoef(table[:, 1:], table[:, :-1])[:23, 23:]).max() < 0.025


def test_variants_are_chosen_evenly_and_anew_in_each_epoch():
    samples = np.arange(30_000)
    first, second = (
        choose_variants(sample_keys(0, "a", samples, np.full(30_000, epoch)), np.full(30_000, 3))
        for epoch in (0, 1)
    )
    assert np.abs(np.bincount(first, minlength=3) - 10_000).max() < 400
    assert abs((first == second).mean() - 1 / 3) < 0.02
    counts = samples % 5 + 1
    mixed = choose_variants(sample_keys(0, "a", samples, np.zeros(30_000, int)), counts)
    assert (mixed >= 0).all()
    assert (mixed < counts).all()
    assert (mixed[counts == 1] == 0).all()


# Draws ------------------------------------------------------------------------------------------


def test_nothing_is_drawn_by_default():
    height, width = some_sizes(500)
    draws = some_draws(AugmentConfig(), 500, height, width)
    assert all(draws.one(i).is_nothing for i in range(500))
    assert not AugmentConfig().changes_images
    assert (draws.matrices() == np.eye(3)).all()


@given(st.integers(0, 2**31), st.data())
@settings(max_examples=30)
def test_a_draw_depends_on_its_own_image_only(seed, data):
    num = data.draw(st.integers(2, 40))
    order = data.draw(st.permutations(range(num)))
    kept = order[: data.draw(st.integers(1, num))]
    height, width = some_sizes(num)
    flip_ok, turn_ok = np.arange(num) % 2 == 0, np.arange(num) % 3 > 0
    keys = some_keys(num, seed)
    columns = (keys, height, width, flip_ok, turn_ok)
    whole, part = draw(EVERYTHING, *columns), draw(EVERYTHING, *(c[kept] for c in columns))
    for place, i in enumerate(kept):
        assert part.one(place) == whole.one(i)
    assert part.matrices().tobytes() == whole.matrices()[kept].tobytes()


def test_switching_one_operation_on_leaves_the_others_as_they_were():
    height, width = some_sizes(300)
    whole = some_draws(EVERYTHING, 300, height, width)
    without = EVERYTHING.replace(affine=None, jpeg=None)
    less = some_draws(without, 300, height, width)
    for name in ("flip", "turns", "crop", "out_height", "out_width", "colour"):
        assert np.array_equal(getattr(whole, name), getattr(less, name)), name
    assert not less.warped.any()
    assert not less.jpeg.any()


def test_draws_are_pinned():
    """Draws are bit-identical on every machine; a change here changes the rows of old runs."""
    height, width = some_sizes(2000)
    draws = some_draws(EVERYTHING, 2000, height, width, seed=11)
    digest = hashlib.sha256(draws.matrices().astype("<f8").tobytes())
    for name in COLUMNS:
        column = getattr(draws, name)
        digest.update(column.astype("<f8" if column.dtype == np.float64 else "<i8").tobytes())
    assert digest.hexdigest()[:16] == PINNED


def test_probabilities_and_permissions():
    num = 20_000
    draws = some_draws(EVERYTHING, num, 400, 600)
    for share in (draws.flip, draws.turns > 0, draws.warped, draws.coloured, draws.jpeg > 0):
        assert abs(share.mean() - 0.5) < 0.02
    assert np.abs(np.bincount(draws.turns, minlength=4)[1:] - num / 6).max() < 0.01 * num
    never = some_draws(EVERYTHING, num, 400, 600, allowed=False)
    assert not never.flip.any()
    assert not never.turns.any()
    always = some_draws(AugmentConfig(flip=1.0, turn=1.0), 100, 5, 7)
    assert always.flip.all()
    assert always.turns.all()


def test_crops_have_the_areas_aspects_and_places_asked_for():
    config = CropConfig(area=(0.25, 0.9), aspect=(0.5, 2.0))
    draws = some_draws(AugmentConfig(crop=config), 20_000, 1200, 1600)
    left, top, right, bottom = draws.crop.T
    width, height = right - left, bottom - top
    area = width * height / (1200 * 1600)
    assert np.allclose(np.quantile(area, [0, 0.5, 1]), [0.25, 0.575, 0.9], atol=0.01)
    aspect = np.log2(width / height / (1600 / 1200))
    assert abs(aspect.mean()) < 0.02
    assert np.abs(aspect).max() <= 1.01
    assert aspect.std() > 0.4  # 0.577 if every aspect fits
    for first, kept, side in ((left, width, 1600), (top, height, 1200)):
        assert first.min() == 0
        assert (first + kept).max() == side
        free = kept < 0.8 * side
        assert abs((first / (side - kept).clip(1))[free].mean() - 0.5) < 0.01
    assert (draws.out_width == width).all()
    assert (draws.out_height == height).all()


def test_a_box_that_would_not_fit_keeps_its_area():
    draws = some_draws(
        AugmentConfig(crop=CropConfig(area=(0.8, 0.8), aspect=(10, 10))), 9, 500, 700
    )
    assert (draws.crop[:, 2] - draws.crop[:, 0] == 700).all()
    assert (draws.crop[:, 3] - draws.crop[:, 1] == 400).all()


def test_rotations_scales_and_shifts_lie_in_their_ranges():
    config = AffineConfig(degrees=30, scale=(0.5, 2.0), shear=0.2, shift=0.1)
    draws = some_draws(AugmentConfig(affine=config), 20_000, 400, 600)
    a, b, c, d, e, f = draws.affine.T
    angle, scale = np.degrees(np.arctan2(d, a)), np.hypot(a, d)
    assert np.allclose(np.quantile(angle, [0, 0.25, 0.5, 1]), [-30, -15, 0, 30], atol=0.7)
    assert np.allclose(np.quantile(scale, [0, 0.25, 0.5, 1]), [0.5, 2**-0.5, 1, 2], rtol=0.03)
    assert np.allclose(a * e - b * d, scale**2)  # shear keeps the area
    shear = (a * b + d * e) / scale**2
    assert np.allclose(np.quantile(shear, [0, 0.5, 1]), [-0.2, 0, 0.2], atol=0.01)
    for moved, side in ((a * 300 + b * 200 + c - 300, 600), (d * 300 + e * 200 + f - 200, 400)):
        assert np.allclose(np.quantile(moved / side, [0, 0.5, 1]), [-0.1, 0, 0.1], atol=0.003)


def test_a_line_of_text_stays_on_its_canvas():
    draws = some_draws(AugmentConfig(affine=AffineConfig(degrees=10)), 500, 40, 2000)
    middle = draws.matrices() @ np.array([[0.0, 2000.0], [20.0, 20.0], [1.0, 1.0]])
    assert middle[:, 1].min() > 10
    assert middle[:, 1].max() < 30


@given(st.integers(0, 10**6), st.integers(1, 80_000), st.integers(1, 1000))
@settings(max_examples=60)
def test_outputs_are_never_larger_than_their_source(seed, height, width):
    draws = some_draws(EVERYTHING, 30, height, width, seed)
    left, top, right, bottom = draws.crop.T
    turned = draws.turns % 2 == 1
    assert (left >= 0).all()
    assert (top >= 0).all()
    assert (right <= np.where(turned, height, width)).all()
    assert (bottom <= np.where(turned, width, height)).all()
    assert (draws.out_width <= right - left).all()
    assert (draws.out_height <= bottom - top).all()
    least = np.minimum(MIN_SIDE, [height, width]).min()
    assert np.minimum(draws.out_width, draws.out_height).min() >= least


def test_what_jpeg_cannot_hold_is_not_compressed():
    config = AugmentConfig(jpeg=JpegConfig(quality=(50, 60)))
    sides = np.array([MAX_JPEG_SIDE, MAX_JPEG_SIDE + 1])
    for height, width in ((sides, 9), (9, sides)):
        quality = some_draws(config, 2, height, width).jpeg
        assert 50 <= quality[0] <= 60
        assert quality[1] == 0


def test_a_draw_travels_between_processes():
    one = some_draws(EVERYTHING, 5, 300, 200).one(3)
    assert pickle.loads(pickle.dumps(one)) == one
    assert len(pickle.dumps(one)) < 700


def test_images_without_pixels_are_refused():
    with pytest.raises(ValueError, match="image 1 of 0 x 5 pixels"):
        some_draws(EVERYTHING, 2, np.array([5, 5]), np.array([5, 0]))


def test_the_series_is_the_sine():
    angles = np.linspace(-45, 45, 20_001)
    sine, cosine = sine_cosine(angles)
    assert np.abs(sine - np.sin(np.radians(angles))).max() < 3e-16
    assert np.abs(cosine - np.cos(np.radians(angles))).max() < 3e-16
    single = [sine_cosine(float(angle)) for angle in angles[::100]]
    assert np.array(single).tobytes() == np.stack([sine, cosine], 1)[::100].tobytes()


# Configuration ----------------------------------------------------------------------------------


def test_yaml_values_become_a_config():
    values = {
        "flip": 1,
        "crop": {"area": [0.5, 1]},
        "affine": {"probability": 0.5, "degrees": 10, "scale": [0.9, 1.1]},
        "colour": {"gamma": 0.2},
        "jpeg": {"quality": [40, 95]},
        "variants": True,
    }
    config = TypeAdapter(AugmentConfig).validate_python(values)
    assert config.crop == CropConfig(area=(0.5, 1.0))
    assert config.jpeg == JpegConfig(quality=(40, 95))
    assert config.changes_images
    with pytest.raises(ValueError, match="crop.areas"):
        TypeAdapter(AugmentConfig).validate_python({"crop": {"areas": [0.5, 1]}})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AugmentConfig(flip=1.5), "flip\n.* less than or equal to 1"),
        (lambda: AugmentConfig(turn=math.nan), "turn\n"),
        (lambda: AugmentConfig(flip=True), "flip\n.* valid number"),
        (lambda: AugmentConfig(min_visible=-0.1), "min_visible\n"),
        (lambda: AffineConfig(degrees=60), "degrees\n.* equal to 45"),
        (
            lambda: AffineConfig(scale=(0.1, 1.0)),
            r"scale\n.*\], both from 0.5 to 2",
        ),
        (
            lambda: AffineConfig(probability=0.5),
            "changes nothing; give it some of degrees, scale",
        ),
        (lambda: CropConfig(area=(0.9, 0.5)), r"area\n.*allowed: \[least, most\] in this order"),
        (lambda: CropConfig(area=(0.0, 0.5)), "area\n"),
        (lambda: CropConfig(rescale=(0.5, 1.2)), "rescale\n"),
        (lambda: CropConfig(), "changes nothing; give it some of area"),
        (lambda: ColourConfig(brightness=1.0), "brightness\n.* equal to 0.9"),
        (lambda: JpegConfig(quality=(0, 90)), "quality\n.*both from 5 to 100"),
        (lambda: JpegConfig(quality=(50.5, 90)), "quality.0\n.* valid integer"),
    ],
)
def test_bad_values_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
