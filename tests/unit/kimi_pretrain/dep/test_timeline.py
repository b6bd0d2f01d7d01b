"""Tests the pipeline's timeline in closed form and by hand.

`schedule_case.py` compares the order of passes with Megatron-Core's.
"""

import numpy as np
import pytest

from kimi_pretrain.dep.timeline import Schedule, events, gathered, latest_starts, timeline

GRID = [
    (1, 1, 5), (2, 1, 1), (2, 1, 2), (4, 1, 3), (4, 1, 16), (2, 2, 2), (2, 2, 8), (4, 2, 4),
    (4, 2, 8), (4, 3, 16), (8, 4, 16),
]  # fmt: skip


def test_interleaving_wants_whole_groups_of_microbatches():
    with pytest.raises(ValueError, match="6 microbatches are not a multiple of 4"):
        Schedule(4, 2, 6)


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [*GRID, (16, 1, 64), (16, 2, 64)])
def test_equal_stages_take_as_long_as_the_closed_form(stages, chunks, microbatches):
    if microbatches < stages:
        pytest.skip("the closed form is for a pipeline that fills")
    schedule, forward, backward = Schedule(stages, chunks, microbatches), 3.0, 5.0
    virtual = stages * chunks
    line = timeline(schedule, np.full(virtual, forward), np.full(virtual, backward))
    # All passes of a stage, and a bubble that interleaving divides by the chunks per stage.
    whole = chunks * (forward + backward)
    assert line.total == pytest.approx((microbatches + (stages - 1) / chunks) * whole, rel=1e-12)
    # Every stage but the first waits for its turn, and no stage runs two passes at a time.
    assert line.start[:, 0].tolist() == [forward * stage for stage in range(stages)]
    assert (line.start[:, 1:] >= line.end[:, :-1]).all()


def test_a_pipeline_worked_out_by_hand():
    #   rank 0  F0 F1 .  .  B0 B0 .  B1 B1         F 1, B 2
    #   rank 1  .  F0 F0 B0 F1 F1 B1               F 2, B 1
    schedule, forward, backward = Schedule(2, 1, 2), np.array([1.0, 2.0]), np.array([2.0, 1.0])
    line = timeline(schedule, forward, backward)
    assert line.start.tolist() == [[0, 1, 4, 7], [1, 3, 4, 6]]
    assert line.end.tolist() == [[1, 2, 6, 9], [3, 4, 6, 7]]
    # A transfer takes half a second, and the longest chain has two.
    assert timeline(schedule, forward, backward, send=0.5).total == 10.0
    # Microbatch 1 takes three seconds longer at first, so F1 ends at 5 and B1 begins at 8.
    late = np.array([[0.0, 3.0], [0.0, 0.0]])
    assert timeline(schedule, forward[:, None] + late, backward).total == 10.0
    assert timeline(schedule, forward, backward[:, None] + late).total == 12.0


def drawn(stages, chunks, microbatches):
    """Return a schedule, its timeline, and random seconds of forward and backward passes."""
    schedule = Schedule(stages, chunks, microbatches)
    seconds = np.random.default_rng(7).uniform(0.1, 3.0, (2, stages * chunks, microbatches))
    return schedule, timeline(schedule, *seconds, send=0.2), seconds


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), GRID)
def test_no_pass_comes_before_what_it_needs(stages, chunks, microbatches):
    schedule, line, seconds = drawn(stages, chunks, microbatches)
    ends = {
        (stage, one): line.end[stage, n]
        for stage, passes in enumerate(schedule.passes)
        for n, one in enumerate(passes)
    }
    known = set()
    for stage, number, _ in events(schedule):
        this = schedule.passes[stage][number]
        needed = schedule.needed(stage, this)
        assert needed is None or needed in known
        known.add((stage, this))
        begins = [0.0] if number == 0 else [line.end[stage, number - 1]]
        if needed is not None:
            own = this.backward and not needed[1].backward
            begins.append(ends[needed] + (0.0 if own else 0.2))
        assert line.start[stage, number] == max(begins)
        took = seconds[int(this.backward), this.chunk * stages + stage, this.microbatch]
        assert line.end[stage, number] == max(begins) + took


# Gathered gaps ------------------------------------------------------------------------------------


def started_late(schedule, line, send, stage, number, late):
    """Return the end of a simulated step in which one pass starts later than it could."""
    seconds, start, end = line.end - line.start, np.zeros_like(line.end), np.zeros_like(line.end)
    for s, n, needed in events(schedule):
        begins = [0.0, end[s, n - 1] if n else 0.0]
        if needed is not None:
            own = (
                schedule.passes[s][n].backward
                and not schedule.passes[needed[0]][needed[1]].backward
            )
            begins.append(end[needed] + (0.0 if own else send))
        start[s, n] = max(begins) + (late if (s, n) == (stage, number) else 0.0)
        end[s, n] = start[s, n] + seconds[s, n]
    return end.max()


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(1, 1, 5), (4, 1, 3), (2, 2, 4)])
def test_a_pass_may_begin_as_late_as_its_latest_start_and_no_later(stages, chunks, microbatches):
    schedule, line, _ = drawn(stages, chunks, microbatches)
    spare = latest_starts(schedule, line, 0.2) - line.start
    assert spare.min() == pytest.approx(0.0, abs=1e-9)  # the passes that the step waits for
    for (stage, number), late in np.ndenumerate(spare):
        at = schedule, line, 0.2, stage, number
        assert started_late(*at, late) == pytest.approx(line.total, abs=1e-9)
        assert started_late(*at, late + 0.01) == pytest.approx(line.total + 0.01, abs=1e-9)


@pytest.mark.parametrize("least", [0.1, 1.0, 5.0])
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), GRID)
def test_gathered_waits_are_fewer_and_the_step_no_longer(stages, chunks, microbatches, least):
    schedule, line, _ = drawn(stages, chunks, microbatches)
    found = gathered(schedule, line, least, 0.2)
    assert found.total == pytest.approx(line.total, rel=1e-12)
    assert found.end - found.start == pytest.approx(line.end - line.start)
    latest = latest_starts(schedule, line, 0.2)
    later = found.start - line.start
    assert later.min() > -1e-9
    # A pass that starts later still meets its latest start.
    assert (found.start <= np.maximum(line.start, latest) + 1e-9).all()
    number = [{one: n for n, one in enumerate(passes)} for passes in schedule.passes]
    for stage, passes in enumerate(schedule.passes):
        for n, this in enumerate(passes):
            assert n == 0 or found.start[stage, n] >= found.end[stage, n - 1] - 1e-9
            needed = schedule.needed(stage, this)
            if needed is not None:
                other, before = needed
                own = this.backward and not before.backward
                came = found.end[other, number[other][before]] + (0.0 if own else 0.2)
                assert found.start[stage, n] >= came - 1e-9


def test_short_waits_of_an_interleaved_pipeline_that_its_last_chunk_holds_up_come_together():
    schedule = Schedule(4, 2, 32)
    seconds = np.array([1.0] * 7 + [1.2])
    line = timeline(schedule, seconds, 2 * seconds)
    found = gathered(schedule, line, 2.0)

    def share_in_long_waits(which, stage):
        waits = which.start[stage, 1:] - which.end[stage, :-1]
        return waits[waits >= 2.0 - 1e-9].sum() / waits.sum()

    for stage in (1, 2):
        assert share_in_long_waits(line, stage) < 0.15
        assert share_in_long_waits(found, stage) > 0.75
