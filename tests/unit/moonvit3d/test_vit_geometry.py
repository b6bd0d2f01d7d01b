"""Sizes, token counts and video sampling against external code and hand-made cases."""

import math
from datetime import UTC, datetime
from fractions import Fraction

import numpy as np
import pytest

from moonvit3d.geometry import (
    KIND_IMAGE,
    KIND_VIDEO,
    PatchLimits,
    grid,
    grids,
    num_tokens,
    resized,
    video_chunks,
)
from tests.unit.moonvit3d.plain import functions_of_transformers

LIMITS = PatchLimits()
TIGHT = PatchLimits(image=256, frame=64, side=32)
ODD = PatchLimits(image=1000, frame=100, side=20)


@pytest.fixture(scope="module")
def navit_resize():
    """Return transformers' own function."""
    return functions_of_transformers("navit_resize")["navit_resize"]


def random_sizes(count, seed=0):
    """Return heights and widths from one pixel to far beyond the limits, including edge cases."""
    rng = np.random.default_rng(seed)
    sizes = np.exp(rng.uniform(0, np.log(40000), (count, 2))).astype(np.int64)
    edges = np.array([1, 13, 14, 15, 27, 28, 29, 896, 1792, 1793, 7167, 7168, 7169, 20000])
    pairs = np.stack(np.meshgrid(edges, edges), -1).reshape(-1, 2)
    return np.concatenate([sizes, pairs])


@pytest.mark.parametrize("limits", [LIMITS, TIGHT, ODD])
def test_scalar_rule_equals_transformers(navit_resize, limits):
    for height, width in random_sizes(1500).tolist():
        for kind, limit in ((KIND_IMAGE, limits.image), (KIND_VIDEO, limits.frame)):
            size, padded = navit_resize(height, width, 14, 2, limit, limits.side)
            assert resized(width, height, limit, limits.side) == size[::-1], (height, width)
            assert grid(kind, 1, height, width, limits) == (1, padded[0] // 14, padded[1] // 14)


@pytest.mark.parametrize("limits", [LIMITS, PatchLimits(image=300, frame=77, side=26)])
def test_vector_rule_equals_scalar_rule(limits):
    sizes = random_sizes(4000, seed=1)
    rng = np.random.default_rng(2)
    kinds = rng.integers(0, 2, len(sizes))
    frames = np.where(kinds == KIND_IMAGE, 1, rng.integers(1, 5, len(sizes)))
    got = grids(kinds, frames, sizes[:, 0], sizes[:, 1], limits)
    want = [grid(*row, limits) for row in np.column_stack([kinds, frames, sizes]).tolist()]
    assert got.dtype == np.int64
    assert got.tolist() == [list(row) for row in want]
    assert num_tokens(*got.T).tolist() == [num_tokens(*row) for row in want]


@pytest.mark.parametrize(
    ("kind", "frames", "height", "width", "want", "tokens"),
    [
        (KIND_IMAGE, 1, 48, 32, (1, 4, 4), 4),  # golden image A of the released processor
        (KIND_IMAGE, 1, 33, 57, (1, 4, 6), 6),  # golden image B
        (KIND_IMAGE, 1, 1, 1, (1, 2, 2), 1),
        (KIND_IMAGE, 1, 28, 29, (1, 2, 4), 2),
        (KIND_IMAGE, 1, 1792, 1792, (1, 128, 128), 4096),  # exactly the limit
        (KIND_IMAGE, 1, 14336, 14, (1, 512, 2), 256),  # the side limit: 1024 to 512 patches
        (KIND_VIDEO, 4, 1792, 1792, (4, 64, 64), 1024),  # native position grid
        (KIND_VIDEO, 3, 896, 896, (3, 64, 64), 1024),
    ],
)
def test_golden_grids(kind, frames, height, width, want, tokens):
    assert grid(kind, frames, height, width, LIMITS) == want
    assert num_tokens(*want) == tokens


def test_empty_table():
    assert grids([], [], [], [], LIMITS).shape == (0, 3)


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ((2, 1, 28, 28), "kind 2"),
        ((KIND_IMAGE, 2, 28, 28), "2 frames"),
        ((KIND_VIDEO, 5, 28, 28), "5 frames"),
        ((KIND_VIDEO, 0, 28, 28), "0 frames"),
        ((KIND_IMAGE, 1, 0, 28), "28 x 0"),
    ],
)
def test_impossible_items_are_refused(item, message):
    with pytest.raises(ValueError, match=message):
        grid(*item, LIMITS)
    with pytest.raises(ValueError, match=message):
        grids(*([value] for value in item), LIMITS)


def test_impossible_limits_are_refused():
    with pytest.raises(ValueError, match="multiple of 2"):
        PatchLimits(side=33)
    with pytest.raises(ValueError, match="greater than or equal to 1"):
        PatchLimits(image=0)


# Video sampling ---------------------------------------------------------------------------------


def test_half_frames_round_to_even():
    # 5 frames at 4/s sampled at 2/s: 2.5 wanted frames become 2, not 3.
    assert [c.frames for c in video_chunks(5, 4.0)] == [(0, 4)]
    # 6 frames at 4/s: 3 frames at 0, 2.5, 5; the middle one becomes 2.
    assert [c.frames for c in video_chunks(6, 4.0)] == [(0, 2, 5)]
    # 7 frames at 4/s: 3.5 becomes 4.
    assert [c.frames for c in video_chunks(7, 4.0)] == [(0, 2, 4, 6)]


def test_chunks_of_four_and_their_times():
    chunks = video_chunks(240, 24.0)  # ten seconds, 20 sampled frames
    assert [len(c.frames) for c in chunks] == [4] * 5
    assert [c.frames[0] for c in chunks] == [0, 50, 101, 151, 201]
    assert [c.timestamp for c in chunks] == [
        "00:00:00.000", "00:00:02.083", "00:00:04.208", "00:00:06.291", "00:00:08.375",
    ]  # fmt: skip


def test_slow_videos_keep_every_frame():
    chunks = video_chunks(9, 0.5)
    assert [c.frames for c in chunks] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert chunks[2].timestamp == "00:00:16.000"
    assert video_chunks(1, 30.0)[0].frames == (0,)


def test_milliseconds_are_truncated():
    stamps = {c.frames[0]: c.timestamp for c in video_chunks(200, 7.04)}
    assert stamps[14] == "00:00:01.988"  # 1.98864 s
    # The reference truncates a float: 41 / 20 is 2.05 s, whose fraction is 0.04999...
    assert video_chunks(600, 20.0)[1].timestamp == "00:00:02.049"


def test_the_clock_wraps_at_a_day():
    last = video_chunks(97, 0.001)[-1]
    assert last.frames == (96,)  # 96,000 s: a day and 2 h 40 min
    assert last.timestamp == "02:40:00.000"


def test_sampling_against_exact_arithmetic():
    """Frames are computed with fractions and the reference's clock, over many rates and lengths."""
    rng = np.random.default_rng(3)
    for fps in (0.7, 1.0, 2.0, 3.0, 6.25, 23.976, 24.0, 25.0, 30000 / 1001, 59.94, 120.0):
        for num_frames in rng.integers(1, 3000, 12).tolist():
            chunks = video_chunks(num_frames, fps)
            # The reference rounds the count in floating point, so the test does, too.
            count = max(round(num_frames * min(2.0, fps) / fps), 1)
            step = Fraction(num_frames - 1, count - 1) if count > 1 else Fraction(0)
            want = [round(step * i) for i in range(count)]  # Fraction rounds half to even
            assert [f for c in chunks for f in c.frames] == want
            assert all(len(c.frames) == 4 for c in chunks[:-1])
            for chunk in chunks:
                seconds = chunk.frames[0] / fps
                clock = datetime.fromtimestamp(seconds, tz=UTC).strftime("%H:%M:%S")
                assert chunk.timestamp == clock + f".{int((seconds % 1) * 1000):03d}"


@pytest.mark.parametrize(("frames", "fps"), [(0, 24.0), (10, 0.0), (10, math.nan), (10, -1.0)])
def test_impossible_videos_are_refused(frames, fps):
    with pytest.raises(ValueError, match="must be > 0"):
        video_chunks(frames, fps)
