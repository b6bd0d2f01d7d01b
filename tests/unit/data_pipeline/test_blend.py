from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.plan.blend import (
    UNITS,
    SourceTotals,
    append_segment,
    apportion,
    blend,
    counts_before,
    position_of,
    weights_for_ratio,
)


def weights_of(*shares):
    return apportion([Fraction(s) for s in shares], UNITS)


def some_weights(num_sources, seed):
    return weights_of(*np.random.default_rng(seed).lognormal(0, 2, num_sources).tolist())


def prefix_error(weights, positions):
    """Return the largest distance of a source's draws from its share, over all prefixes."""
    source, _ = blend(np.arange(positions), append_segment((), 0, weights))
    places = np.arange(1, positions + 1)
    return max(
        np.abs(np.cumsum(source == number) - places * weight / UNITS).max()
        for number, weight in enumerate(weights)
    )


@pytest.mark.parametrize("num_sources", [1, 2, 3, 7, 24])
def test_no_prefix_is_a_draw_off(num_sources):
    for seed in range(3):
        assert prefix_error(some_weights(num_sources, seed), 20_000) < 1


def test_no_prefix_is_a_draw_off_for_one_large_source_among_many_small_equal_ones():
    # Apportionment by quotients (Webster) is off by ten draws: the small sources come together.
    assert prefix_error((UNITS - 100 * 256, *[256] * 100), UNITS) < 1


@settings(max_examples=15)
@given(st.lists(st.integers(1, 10**6), min_size=1, max_size=12), st.integers(0, 2))
def test_no_prefix_is_a_draw_off_for_any_weights(shares, zeros):
    weights = (*apportion([Fraction(s) for s in shares], UNITS), *[0] * zeros)
    assert prefix_error(weights, 30_000) < 1


def test_shares_are_exact_in_the_long_run():
    weights = some_weights(5, 5)
    segments = append_segment((), 0, weights)
    assert counts_before(7 * UNITS, segments).tolist() == [7 * w for w in weights]
    far = 10**11 * UNITS + 12345
    assert np.abs(counts_before(far, segments) / far - np.array(weights) / UNITS).max() < 1e-12
    source, draw = blend([far], segments)
    assert draw[0] == counts_before(far, segments)[source[0]]


def test_position_of_a_draw():
    segments = append_segment((), 0, some_weights(4, 1))
    segments = append_segment(segments, 777, some_weights(4, 2))
    positions = [777, 5000, UNITS + 3000, 12 * UNITS + 5]
    for position, source, draw in zip(positions, *blend(positions, segments)):
        assert position_of(int(source), int(draw), segments[-1]) == position


def test_each_source_is_drawn_in_order_without_gaps():
    weights = some_weights(5, 1)
    segments = append_segment((), 0, weights)
    source, draw = blend(np.arange(3000), segments)
    for s in range(5):
        assert draw[source == s].tolist() == list(range((source == s).sum()))
    counts = counts_before(3000, segments)
    assert counts.tolist() == np.bincount(source, minlength=5).tolist()


def test_any_access_pattern_gives_the_same():
    segments = append_segment((), 0, some_weights(4, 2))
    segments = append_segment(segments, 1000, some_weights(4, 3))
    source, draw = blend(np.arange(2500), segments)
    mixed = np.random.default_rng(0).permutation(2500)[:600]
    for positions in (mixed, mixed[:1], mixed[::7]):
        got = blend(positions, segments)
        assert np.array_equal(got[0], source[positions])
        assert np.array_equal(got[1], draw[positions])


@pytest.mark.parametrize("start", [1, 255, 1000, 4096])
def test_a_new_segment_continues_every_source_and_keeps_the_past(start):
    before = append_segment((), 0, some_weights(3, 0))
    after = append_segment(before, start, some_weights(3, 1))
    old_source, old_draw = blend(np.arange(6000), before)
    source, draw = blend(np.arange(6000), after)
    assert np.array_equal(source[:start], old_source[:start])
    assert np.array_equal(draw[:start], old_draw[:start])
    assert not np.array_equal(source[start:], old_source[start:])
    for s in range(3):
        assert draw[source == s].tolist() == list(range((source == s).sum()))


def test_segments_are_checked():
    with pytest.raises(ValueError, match="must be 0 or more and sum to"):
        append_segment((), 0, (1, 2))
    first = append_segment((), 0, weights_of(1, 1))
    with pytest.raises(ValueError, match="does not come after"):
        append_segment(first, 0, weights_of(1, 2))
    with pytest.raises(ValueError, match="1 weights, but the blend has 2"):
        append_segment(first, 5, weights_of(1))
    with pytest.raises(ValueError, match="must start at 0"):
        append_segment((), 3, weights_of(1))


TOTALS = [
    SourceTotals("captions", samples=1000, tokens=400_000, vision_tokens=300_000),
    SourceTotals("code", samples=50, tokens=200_000, vision_tokens=0),
    SourceTotals("ocr", samples=300, tokens=900_000, vision_tokens=300_000),
    SourceTotals("web", samples=9000, tokens=4_500_000, vision_tokens=0),
]


@pytest.mark.parametrize("ratio", [0.01, 0.1, 0.3, 0.5])
def test_expected_vision_share_is_the_ratio_and_shares_hold_inside_groups(ratio):
    shares = [3.0, 1.0, 1.0, 4.0]
    weights = np.array(weights_for_ratio(TOTALS, shares, ratio))
    per_draw = np.array([[t.tokens, t.vision_tokens] for t in TOTALS]) / [
        [t.samples] for t in TOTALS
    ]
    tokens, vision = (weights[:, None] * per_draw).T
    assert vision.sum() / tokens.sum() == pytest.approx(ratio, abs=1e-5)
    assert tokens[0] / tokens[2] == pytest.approx(3, rel=3e-3)
    assert tokens[3] / tokens[1] == pytest.approx(4, rel=3e-3)


def test_without_a_ratio_shares_are_token_shares_over_all():
    weights = weights_for_ratio(TOTALS, [1.0, 2.0, 3.0, 4.0], None)
    tokens = np.array([w * t.tokens / t.samples for w, t in zip(weights, TOTALS)])
    assert np.allclose(tokens / tokens.sum(), [0.1, 0.2, 0.3, 0.4], rtol=1e-3)


def test_unreachable_ratios_name_the_reach():
    with pytest.raises(ValueError, match=r"is 0\.7, but .* hold 0\.645833 of their"):
        weights_for_ratio(TOTALS, [3.0, 1.0, 1.0, 4.0], 0.7)  # (3 * 0.75 + 1 / 3) / 4
    with pytest.raises(ValueError, match="hold 0 of their tokens"):
        weights_for_ratio([TOTALS[1]], [1.0], 0.1)
    with pytest.raises(ValueError, match=r"no source is text only, so the ratio is fixed at 0\.75"):
        weights_for_ratio([TOTALS[0]], [1.0], 0.1)
    with pytest.raises(ValueError, match="'code' would be drawn less than once"):
        weights_for_ratio(TOTALS, [1.0, 1e-7, 1.0, 1.0], None)


def test_apportion_is_largest_remainder():
    shares = [Fraction(47), Fraction(16), Fraction(158, 10), Fraction(12), Fraction(61, 10)]
    shares.append(Fraction(31, 10))
    assert apportion(shares, 10) == (5, 2, 1, 1, 1, 0)  # the textbook example: quotas 4.7 1.6 ...
    assert apportion([Fraction(1)] * 3, 10) == (4, 3, 3)
