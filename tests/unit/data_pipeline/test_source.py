"""Lengths under augmentation, splitting, shrinking and quarantine, against slow references."""

import numpy as np
import pytest

from data_pipeline.augment.config import AffineConfig, AugmentConfig, CropConfig
from data_pipeline.config import DataConfig
from data_pipeline.plan.layout import limits_at, num_levels
from data_pipeline.plan.planner import DataUsedUp, Planner, TooManyUnusable
from data_pipeline.plan.source import Source, _Units, part_span
from moonvit3d.geometry import PatchLimits
from tests.unit.data_pipeline.plain import made_index, slow_sample
from tests.unit.data_pipeline.varied import slow_varied, varied_index

LIMITS = PatchLimits(image=400, frame=100, side=512)
MUCH = AugmentConfig(
    flip=0.5,
    turn=0.4,
    affine=AffineConfig(probability=0.5, degrees=20, scale=(0.8, 1.2), shift=0.2),
    crop=CropConfig(probability=0.7, area=(0.2, 0.9), aspect=(0.5, 2.0), rescale=(0.5, 1.0)),
    variants=True,
)
CONFIG = DataConfig(
    root="unused",
    sources={"boxes": 1.0},
    seq_len=200,
    rows_per_step=5,
    pack_window=64,
    shard_window=2,
    seed=11,
    limits=LIMITS,
    augment={"boxes": MUCH},
)


@pytest.fixture(scope="module")
def index():
    return varied_index("boxes", [60, 50, 70], 4)


def test_lengths_and_places_equal_the_slow_twin(index):
    source = Source(index, CONFIG)
    drawn = source.draw(np.arange(4 * source.num_units))
    differ = plain = lost = 0
    for i, (sample, epoch) in enumerate(zip(drawn.sample.tolist(), drawn.epoch.tolist())):
        level = int(drawn.level[i])
        args = (index, MUCH, CONFIG.seed, sample, epoch, LIMITS, level)
        length, items, gone = slow_varied(*args)
        fits = length <= CONFIG.seq_len and not gone and not source.is_split(sample)
        assert bool(drawn.varied[i]) == fits
        plain, lost = plain + (not fits), lost + gone
        if not fits:
            length, items, _ = slow_varied(*args, applied=False)
        if not source.is_split(sample):
            assert drawn.layout.length[i] == length <= CONFIG.seq_len
        part = slice(drawn.layout.item_ptr[i], drawn.layout.item_ptr[i + 1])
        assert drawn.layout.start[part].tolist() == [start for start, _, _ in items]
        assert drawn.layout.tokens[part].tolist() == [pads for _, pads, _ in items]
        assert drawn.layout.grid[part].tolist() == [list(shape) for _, _, shape in items]
        differ += length != slow_varied(*args, applied=False)[0]
    assert differ > 100
    assert plain > 5
    assert lost > 5


def test_a_draw_is_the_same_whatever_it_is_drawn_with(index):
    source = Source(index, CONFIG)
    whole = source.draw(np.arange(500))
    for chosen in (np.arange(200, 230), np.array([7]), np.arange(499, 0, -13)):
        some = source.draw(chosen)
        for name in ("sample", "part", "epoch", "varied", "level"):
            assert np.array_equal(getattr(some, name), getattr(whole, name)[chosen])
        expected = whole.layout.of(chosen)
        for name, values in vars(expected).items():
            assert np.array_equal(getattr(some.layout, name), values), name


def test_epochs_differ_and_a_seed_too(index):
    source = Source(index, CONFIG)
    n = source.num_units
    one, two = (source.draw(np.arange(e * n, (e + 1) * n)) for e in range(2))
    lengths = [np.zeros(n), np.zeros(n)]
    for found, drawn in zip(lengths, (one, two)):
        found[drawn.sample] = drawn.layout.length
    assert (lengths[0] != lengths[1]).sum() > 50
    other = Source(index, CONFIG.replace(seed=12)).draw(np.arange(n))
    mine = np.zeros(n)
    mine[other.sample] = other.layout.length
    assert (lengths[0] != mine).sum() > 50


def test_details_say_what_the_plan_counted(index):
    """Every written piece has the number of tokens that the plan reserved for it."""
    source = Source(index, CONFIG)
    drawn = source.draw(np.arange(300))
    whole = np.flatnonzero(~np.array([source.is_split(s) for s in drawn.sample.tolist()]))
    details = source.variation.details(drawn.sample[whole], drawn.epoch[whole], drawn.varied[whole])
    moved = 0
    for i, detail in zip(whole.tolist(), details):
        sample = int(drawn.sample[i])
        begin, end = index.piece_ptr[sample], index.piece_ptr[sample + 1]
        kinds = index.piece_kind[begin:end]
        variant, tokens = int(index.variant_ptr[sample]), 2
        for piece, chosen in zip(range(begin, end), detail.variants, strict=True):
            if index.piece_kind[piece] == 0:
                first = int(index.piece_tokens[piece])
                tokens += first if chosen == 0 else int(index.variant_tokens[variant + chosen - 1])
                variant += int(index.piece_variants[piece]) - 1
        regions = np.flatnonzero(kinds == 2) + begin
        for piece, numbers in zip(regions, detail.regions, strict=True):
            tokens += int(index.piece_tokens[piece]) if numbers is not None else 0
            assert numbers is None or all(0 <= number <= 999 for number in numbers)
        part = slice(drawn.layout.item_ptr[i], drawn.layout.item_ptr[i + 1])
        tokens += int((drawn.layout.tokens[part] + 1).sum())
        tokens += int(index.piece_tokens[begin:end][kinds == 1].sum())
        assert tokens == drawn.layout.length[i]
        moved += len(detail.draws)
        if not drawn.varied[i]:
            assert not detail.draws
            assert not any(detail.variants)
    assert moved > 50


TEXTS = CONFIG.replace(sources={"web": 1.0}, augment={}, seq_len=50)


def test_texts_are_split_into_whole_rows_and_a_rest():
    index = made_index("web", [30, 20], 1, text=(3, 400))
    source = Source(index, TEXTS)
    counts = source.counts
    assert counts["split"] > 20
    assert counts["refused"] == 0
    drawn = source.draw(np.arange(source.num_units))
    for sample in range(50):
        mine = drawn.sample == sample
        parts = np.argsort(drawn.part[mine])
        lengths = drawn.layout.length[mine][parts]
        assert drawn.part[mine][parts].tolist() == list(range(mine.sum()))
        assert (lengths[:-1] == 50).all()
        assert 3 <= lengths[-1] <= 50 or index.text_tokens[sample] <= 48
        assert (lengths - 2).sum() == index.text_tokens[sample]
        assert source.is_split(sample) == (mine.sum() > 1)
    assert part_span(2, 50) == slice(96, 144)
    refusing = Source(index, TEXTS.replace(split_text=False))
    assert refusing.counts["refused"] == counts["split"]
    assert refusing.num_units == 50


def test_pictures_are_shrunk_no_further_than_needed():
    index = made_index("shots", [80], 3, media=0.4, text=(3, 40), video=0.2, side=1500)
    config = CONFIG.replace(sources={"shots": 1.0}, augment={}, seq_len=80)
    source = Source(index, config)
    assert source.counts["shrunk"] > 10
    levels = num_levels(LIMITS)
    for sample in range(80):
        lengths = [
            len(slow_sample(index, sample, limits_at(LIMITS, level))[0])
            for level in range(levels + 1)
        ]
        fitting = [level for level, length in enumerate(lengths) if length <= 80]
        if fitting and np.diff(index.item_ptr)[sample]:
            assert source.level_of(np.array([sample]))[0] == fitting[0]
        elif not fitting:
            assert source.level_of(np.array([sample]))[0] == 0
    drawn = source.draw(np.arange(source.num_units))
    assert drawn.layout.length.max() <= 80
    none = Source(index, config.replace(shrink_media=False))
    assert none.counts["shrunk"] == 0
    assert none.counts["refused"] == source.counts["refused"] + source.counts["shrunk"]


def test_levels_are_whole_numbers_down_to_the_least():
    for limits in (LIMITS, PatchLimits(), PatchLimits(image=30, frame=10)):
        levels = [limits_at(limits, level) for level in range(num_levels(limits) + 1)]
        assert levels[0] == limits
        images = [level.image for level in levels]
        assert images == sorted(images, reverse=True)
        for last, first in ((levels[-1].image, limits.image), (levels[-1].frame, limits.frame)):
            assert last == min(64, first)


def test_a_source_wholly_in_quarantine_is_an_error():
    index = made_index("web", [2], 2, text=(3, 30))
    planner = Planner([index], TEXTS.replace(rows_per_step=1, pack_window=4))
    for sample in range(2):
        planner.quarantine(0, sample, step=0)
    with pytest.raises(DataUsedUp, match="every sample that fits a row is in quarantine"):
        planner.state_at(300)


def test_too_many_unusable_samples_are_an_error_of_the_data():
    config = TEXTS.replace(max_quarantined=1)
    planner = Planner([made_index("web", [2], 2, text=(3, 30))], config)
    before = planner._quarantine
    planner.quarantine(0, 0, step=0)
    assert before == ()  # another thread may be reading the old tuple: it must not change in place
    with pytest.raises(TooManyUnusable, match="data.max_quarantined=1 samples are unusable"):
        planner.quarantine(0, 1, step=0)


@pytest.mark.parametrize("shrink", [True, False])
def test_what_does_not_fit_a_row_is_told(index, shrink):
    config = CONFIG.replace(augment={}, shrink_media=shrink, split_text=False, seq_len=120)
    planner = Planner([index], config)
    (source,) = planner.sources
    # The slow reference decides which samples fit unshrunk and which fit at some shrink level.
    lengths = {
        (sample, level): len(slow_sample(index, sample, limits_at(LIMITS, level))[0])
        for sample in range(index.num_samples)
        for level in range(num_levels(LIMITS) + 1)
    }
    fits = {
        sample: [level for level in range(num_levels(LIMITS) + 1) if lengths[sample, level] <= 120]
        for sample in range(index.num_samples)
    }
    refused = [sample for sample, levels in fits.items() if not (levels if shrink else 0 in levels)]
    shrunk = [sample for sample, levels in fits.items() if levels and 0 not in levels]
    assert refused
    assert shrunk
    (notice,) = planner.notices()
    assert f"of {index.num_samples} samples {len(refused)} are left out" in notice
    assert repr(index.key_of(refused[0])) in notice
    assert (f"the media of {len(shrunk)} are shrunk" in notice) == shrink
    assert Planner([index], config.replace(seq_len=source.longest)).notices() == []


def test_units_count_every_sample_by_its_parts():
    """Compare with a list of all units; the first and last samples may have an odd count."""
    for seed in range(30):
        rng = np.random.default_rng(seed)
        parts = rng.choice([0, 1, 1, 1, 3], rng.integers(1, 12))
        odd = np.flatnonzero(parts != 1)
        units = _Units(odd, parts[odd], len(parts))
        samples = np.repeat(np.arange(len(parts)), parts)
        first = np.cumsum(parts) - parts
        assert units.number == len(samples)
        sample, part = units.of(np.arange(units.number))
        assert sample.tolist() == samples.tolist()
        assert part.tolist() == (np.arange(len(samples)) - first[samples]).tolist()
        assert units.first(np.arange(len(parts))).tolist() == first.tolist()
        some = np.flatnonzero(rng.random(len(parts)) < 0.5)
        assert units.all_of(some).tolist() == np.flatnonzero(np.isin(samples, some)).tolist()
