"""Compares losses by source and position with a loop over tokens."""

import numpy as np
import pytest

from data_pipeline.plan.step_plan import GlobalPlan, ItemTable, SampleTable
from kimi_pretrain.telemetry.losses import LossSums, bins_of, cells_of, merged, summed

SEQ_LEN = 1000
# (row, start, length, source): rows of several samples, an empty row, and a full row.
SAMPLES = [(0, 0, 300, 1), (0, 300, 3, 0), (0, 303, 600, 1), (1, 0, 1000, 2), (3, 0, 257, 0)]


def plan_of(samples) -> GlobalPlan:
    row, start, length, source = (np.array(column) for column in zip(*samples, strict=True))
    n = np.zeros(len(row), np.int64)
    table = SampleTable(
        source.astype(np.int16), n, n.astype(np.int32), n, n.astype(np.int32), n > 0,
        row.astype(np.int32), start.astype(np.int32), length.astype(np.int32),
    )  # fmt: skip
    none = np.zeros(0, np.int32)
    return GlobalPlan(0, SEQ_LEN, 4, table, ItemTable(*[none] * 12))


def test_bins_double_up_to_the_longest_document():
    assert bins_of(100) == [(0, 99)]
    assert bins_of(256) == [(0, 255)]
    assert bins_of(257) == [(0, 255), (256, 256)]
    assert bins_of(SEQ_LEN) == [(0, 255), (256, 511), (512, 999)]
    assert bins_of(262_144)[-1] == (131_072, 262_143)


@pytest.mark.parametrize("rows", [range(4), range(1, 3), range(2, 3), range(3, 4)])
def test_every_token_is_counted_where_its_sample_is(rows):
    """The loss at a token is for the next token, which is this far after the sample's first."""
    cells = cells_of(plan_of(SAMPLES), rows)
    expected = np.zeros((len(rows), SEQ_LEN), int)
    for row, start, length, source in SAMPLES:
        for token in range(length if row in rows else 0):
            bin = 0 if token + 1 < 256 else 1 if token + 1 < 512 else 2
            expected[row - rows.start, start + token] = 3 * source + bin
    assert (cells == expected).all()


def test_sums_of_ranks_are_those_of_all_tokens():
    random = np.random.default_rng(3)
    losses = random.random((4, SEQ_LEN)).astype(np.float32)
    counts = random.random((4, SEQ_LEN)) < 0.7
    plan = plan_of(SAMPLES)
    ranks = []
    for rank in range(2):
        rows = range(2 * rank, 2 * rank + 2)
        here = slice(rows.start, rows.stop)
        inside = np.zeros_like(counts[here])
        for row, start, length, _ in SAMPLES:
            if row in rows:
                inside[row - rows.start, start : start + length] = True
        counts[here] &= inside
        cells = np.where(counts[here], cells_of(plan, rows), -1).astype(np.int32)
        ranks.append(summed(losses[here].ravel(), cells.ravel()))
    table = merged([LossSums(), *ranks], ("a", "b", "c", "never"), SEQ_LEN)
    found = {name: [0.0, 0] for name in ("a", "b", "c")}
    places = {"0-255": [0.0, 0], "256-511": [0.0, 0], "512-999": [0.0, 0]}
    for row, start, length, source in SAMPLES:
        for token in range(length):
            if counts[row, start + token]:
                far = sum(token + 1 >= edge for edge in (256, 512))
                for sums in (found["abc"[source]], list(places.values())[far]):
                    sums[0] += float(losses[row, start + token])
                    sums[1] += 1
    line = table.as_line()
    means = {name: total / number for name, (total, number) in found.items()}
    assert line["loss_by_source"].pop("never") is None
    assert line["loss_by_source"] == pytest.approx(means, rel=1e-12)
    tokens = {name: number for name, (_, number) in found.items()}
    assert line["loss_tokens_by_source"] == tokens | {"never": 0}
    means = {name: total / number for name, (total, number) in places.items()}
    assert line["loss_by_position"] == pytest.approx(means, rel=1e-12)
    assert sum(line["loss_tokens_by_position"].values()) == counts.sum()
    assert set(table.by_both()["a"]) == {"0-255", "256-511"} - (
        set() if counts[3, 255:257].any() else {"256-511"}
    )
    assert table.by_both()["never"] == {}


def test_a_rank_without_loss_tokens_adds_nothing():
    nothing = summed(np.zeros(5, np.float32), np.full(5, -1, np.int32))
    assert len(nothing.cell) == 0
    assert merged([nothing], ("a",), 100).by_source() == {"a": None}
