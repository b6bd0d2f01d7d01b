"""The pipeline's passes in closed form and by hand; Megatron-Core's order: `schedule_case.py`."""

import numpy as np
import pytest

from kimi_pretrain.dep.timeline import Schedule, events, timeline

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
    # All passes of a stage, and a bubble that interleaving divides by the chunks of a stage.
    whole = chunks * (forward + backward)
    assert line.total == pytest.approx((microbatches + (stages - 1) / chunks) * whole, rel=1e-12)
    # Every stage but the first waits for its turn, and nobody works twice at a time.
    assert line.start[:, 0].tolist() == [forward * stage for stage in range(stages)]
    assert (line.start[:, 1:] >= line.end[:, :-1]).all()


def test_a_pipeline_worked_out_by_hand():
    #   rank 0  F0 F1 .  .  B0 B0 .  B1 B1         F 1, B 2
    #   rank 1  .  F0 F0 B0 F1 F1 B1               F 2, B 1
    schedule, forward, backward = Schedule(2, 1, 2), np.array([1.0, 2.0]), np.array([2.0, 1.0])
    line = timeline(schedule, forward, backward)
    assert line.start.tolist() == [[0, 1, 4, 7], [1, 3, 4, 6]]
    assert line.end.tolist() == [[1, 2, 6, 9], [3, 4, 6, 7]]
    # Half a second on the way, there and back, twice in the longest chain.
    assert timeline(schedule, forward, backward, send=0.5).total == 10.0
    # Microbatch 1 takes three seconds more on its way in: F1 ends at 5, so B1 begins at 8.
    late = np.array([[0.0, 3.0], [0.0, 0.0]])
    assert timeline(schedule, forward[:, None] + late, backward).total == 10.0
    assert timeline(schedule, forward, backward[:, None] + late).total == 12.0


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), GRID)
def test_no_pass_comes_before_what_it_needs(stages, chunks, microbatches):
    schedule = Schedule(stages, chunks, microbatches)
    draw = np.random.default_rng(7)
    seconds = draw.uniform(0.1, 3.0, (2, stages * chunks, microbatches))
    line = timeline(schedule, *seconds, send=0.2)
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
