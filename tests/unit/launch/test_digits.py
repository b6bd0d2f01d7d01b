"""Tests of the digit pages: their digits, boxes, source scans and sizes."""

import io

import numpy as np
import pytest
from PIL import Image

from data_pipeline.ingest.ingest import ImageSegment, TextSegment
from launch.demo import digits
from launch.demo.generator import generator


@pytest.fixture(scope="module")
def scans():
    return digits.load_scans()


@pytest.fixture(scope="module")
def pages(scans):
    train, _ = digits.split(scans, 0)
    return list(digits.pages(train, 0, purpose="digits", count=1500, most=12))


def pixels_of(sample) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(sample.segments[0].data)))


def test_boxes_hold_all_ink_and_the_right_scans(scans, pages):
    train, _ = digits.split(scans, 0)
    labels_of_scan = {scan.tobytes(): int(label) for scan, label in zip(train.pixels, train.labels)}
    for sample in pages[:300]:
        page, boxes = pixels_of(sample), sample.meta["boxes"]
        seen = ""
        outside = page.copy()
        for left, top, right, bottom in boxes:
            seen += str(labels_of_scan[page[top:bottom, left:right].tobytes()])
            outside[top:bottom, left:right] = 0
        assert not outside.any()
        assert seen == sample.meta["digits"]


def test_boxes_lie_in_cells_in_reading_order(pages):
    for sample in pages:
        height, width = pixels_of(sample).shape
        assert height % 28 == 0
        assert width % 28 == 0
        boxes = np.array(sample.meta["boxes"])
        cells = boxes[:, 1] // 28 * 1000 + boxes[:, 0] // 28
        assert (np.diff(cells) > 0).all()
        # A digit never leaves its cell, so one merged token sees it whole.
        assert (boxes[:, :2] // 28 == (boxes[:, 2:] - 1) // 28).all()
        assert boxes.min() >= 0
        assert boxes[:, 2].max() <= width
        assert boxes[:, 3].max() <= height


def test_only_the_digits_carry_loss(pages):
    for sample in pages[:50]:
        image, prompt, answer = sample.segments
        assert isinstance(image, ImageSegment)
        assert prompt == TextSegment("digits:", False)
        assert answer.loss
        assert answer.text == "".join(f" {d}" for d in sample.meta["digits"])


def test_split_is_by_scan_and_complete(scans):
    train, held_out = digits.split(scans, 0)
    assert len(train.labels) == 1500
    assert len(held_out.labels) == 297
    again = np.concatenate([train.pixels, held_out.pixels])
    assert sorted(s.tobytes() for s in again) == sorted(s.tobytes() for s in scans.pixels)
    other, _ = digits.split(scans, 1)
    assert not np.array_equal(other.labels, train.labels)


def test_scans_are_the_package_s(scans):
    from sklearn.datasets import load_digits  # takes a second, so only where needed

    raw, labels = load_digits(return_X_y=True)
    assert np.array_equal(scans.labels, labels)
    # Enlarging keeps the ink in place: the mean of each 3x3 block follows its source pixel.
    small = scans.pixels.reshape(-1, 8, 3, 8, 3).mean(axis=(2, 4)) / 255 * 16
    assert np.abs(small - raw.reshape(-1, 8, 8)).mean() < 1.0


def test_pages_are_short_with_a_heavy_tail(pages):
    from launch.demo.corpus import tail_share

    lengths = np.array([len(s.meta["digits"]) for s in pages])
    assert 0.48 < (lengths == 1).mean() < 0.58
    assert lengths.max() == 12
    patches = np.array([pixels_of(s).size // 196 for s in pages])
    assert 450 <= patches.max() <= 576
    assert np.median(patches) <= 16
    assert tail_share(patches) >= 0.4


def test_held_out_pages_have_at_most_four_digits(scans):
    _, held_out = digits.split(scans, 0)
    made = list(digits.pages(held_out, 0, purpose="digits_heldout", count=300, most=4))
    lengths = {len(s.meta["digits"]) for s in made}
    assert lengths == {1, 2, 3, 4}
    assert max(pixels_of(s).size for s in made) <= 6 * 6 * 28 * 28


def test_a_page_does_not_depend_on_how_many_are_made(scans, pages):
    train, _ = digits.split(scans, 0)
    few = list(digits.pages(train, 0, purpose="digits", count=5, most=12))
    assert few == pages[:5]
    other = list(digits.pages(train, 1, purpose="digits", count=5, most=12))
    assert [s.segments for s in other] != [s.segments for s in few]


def test_generators_are_keyed_by_all_three_fields():
    draws = {
        generator(*key).integers(2**62)
        for key in [(0, "a", 1), (1, "a", 1), (0, "b", 1), (0, "a", 2), (0, "a\x001", 1)]
    }
    assert len(draws) == 5
    assert generator(0, "a", 1).integers(2**62) == generator(0, "a", 1).integers(2**62)
