import numpy as np
import pytest

from data_pipeline.plan.pack import best_fit, pack_window
from tests.unit.data_pipeline.plain import slow_best_fit


def documents(rng, count, seq_len, median):
    return np.clip(rng.lognormal(np.log(median), 1.2, count), 1, seq_len).astype(int)


@pytest.mark.parametrize("seq_len", [1, 5, 64, 1023, 1024, 1025, 4096, 70000])
def test_best_fit_equals_looking_at_every_row(seq_len):
    rng = np.random.default_rng(seq_len)
    for count in (1, 2, 17, 300):
        for median in {1, max(1, seq_len // 40), max(1, seq_len // 3)}:
            lengths = -np.sort(-documents(rng, count, seq_len, median))
            assert best_fit(lengths.tolist(), seq_len) == slow_best_fit(lengths, seq_len)
            unsorted = rng.permutation(lengths)
            assert best_fit(unsorted.tolist(), seq_len) == slow_best_fit(unsorted, seq_len)


@pytest.mark.parametrize("count", [1, 2, 50, 1000])
def test_a_window_is_laid_out_without_gaps_or_overlap(count):
    lengths = documents(np.random.default_rng(count), count, 4096, 500)
    packed = pack_window(lengths, 4096)
    assert sorted(packed.sample.tolist()) == list(range(count))
    assert packed.length.tolist() == lengths[packed.sample].tolist()
    for row in range(packed.num_rows):
        part = slice(packed.row_ptr[row], packed.row_ptr[row + 1])
        assert (packed.row[part] == row).all()
        ends = np.cumsum(packed.length[part])
        assert packed.start[part].tolist() == [0, *ends[:-1]]
        assert 0 < ends[-1] <= 4096
        assert (np.diff(packed.sample[part]) > 0).all()  # by position inside a row
    assert packed.row_ptr[-1] == count


def test_rows_are_numbered_by_the_position_of_their_longest_sample():
    packed = pack_window(documents(np.random.default_rng(7), 400, 4096, 700), 4096)
    longest = []
    for row in range(packed.num_rows):
        part = slice(packed.row_ptr[row], packed.row_ptr[row + 1])
        lengths, samples = packed.length[part], packed.sample[part]
        longest.append(min(samples[lengths == lengths.max()]))
    assert longest == sorted(longest)


def test_row_order_says_nothing_about_size():
    lengths = documents(np.random.default_rng(0), 8000, 4096, 400)
    packed = pack_window(lengths, 4096)
    number = np.arange(packed.num_rows)
    longest = np.maximum.reduceat(packed.length, packed.row_ptr[:-1])
    count = np.diff(packed.row_ptr)
    assert longest.std() > 500
    assert abs(np.corrcoef(number, longest)[0, 1]) < 0.1
    assert abs(np.corrcoef(number, count)[0, 1]) < 0.1


def test_equal_input_equal_rows_and_ties_by_position():
    lengths = np.full(10, 3)
    packed = pack_window(lengths, 6)
    assert packed.sample.reshape(5, 2).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    again = pack_window(lengths.tolist(), 6)
    assert np.array_equal(packed.sample, again.sample)


def test_the_fill_of_a_real_window():
    rng = np.random.default_rng(0)
    for seq_len in (4096, 32768, 262144):
        lengths = documents(rng, 16384, seq_len, seq_len // 8)
        assert lengths.sum() / (pack_window(lengths, seq_len).num_rows * seq_len) > 0.99
    # no two documents fit into one row, so best fit cannot help
    assert pack_window([60] * 10, 100).num_rows == 10


def test_refusals():
    with pytest.raises(ValueError, match="run from 3 to 9; a row holds 1 to 8"):
        pack_window([3, 9], 8)
    with pytest.raises(ValueError, match="run from 0 to 3"):
        pack_window([3, 0], 8)
    with pytest.raises(ValueError, match="one or more samples"):
        pack_window([], 8)
