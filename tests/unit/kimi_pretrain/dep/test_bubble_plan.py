"""Tests that plans of bubble work terminate, do all work exactly once, and are in time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from kimi_pretrain.dep import bubble_plan
from kimi_pretrain.dep.bubble_check import WaitsInACircle, check
from kimi_pretrain.dep.bubble_plan import (
    LESS,
    BubblePlan,
    Choice,
    Filling,
    Slice,
    Units,
    assign_units,
    borders_of,
    choose,
    gaps_of,
    least_waits,
    most_joined,
    place_units,
    plan_bubbles,
)
from kimi_pretrain.dep.timeline import Pass, Schedule, gathered, timeline

SEND = 0.01


def made(
    stages, chunks, microbatches, replicas=2, items=40, seed=0, load=0.3, gather=False, **filling
):
    """Return a plan and its inputs; `load` is about the seconds of an item's forward pass."""
    draw = np.random.Generator(np.random.Philox(key=seed))
    schedule = Schedule(stages, chunks, microbatches)
    virtual = stages * chunks
    line = timeline(schedule, draw.uniform(0.5, 2, virtual), draw.uniform(1, 4, virtual), SEND)
    seconds = load * draw.lognormal(0, 1, items)
    units, _ = Units(
        home=draw.integers(0, replicas, items),
        microbatch=draw.integers(0, microbatches, items),
        forward=seconds,
        again=3 * seconds,
        backward=2 * seconds,
        kept_bytes=(1e6 * seconds).astype(np.int64),
    ).joined(np.ones(items, np.int64), 1)
    stage = np.repeat(np.arange(stages), replicas)
    chosen = Filling(transport=0.02, slot_seconds=0.02, **filling)
    line = gathered(schedule, line, least_waits(units, chosen)[0], SEND) if gather else line
    _, plan = plan_bubbles(units, schedule, [line], stage, chosen)
    return plan, units, line, chosen


@given(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(1, 9)), max_size=30),
    st.integers(0, 20),
)
def test_small_items_of_a_microbatch_are_joined_in_their_order(items, most):
    home, microbatch, patches = np.array(items, np.int64).reshape(-1, 3).T
    seconds = patches / 8
    each = Units(home, microbatch, seconds, 2 * seconds, 3 * seconds, 10 * patches)
    units, unit = each.joined(patches, most)
    expected: list[list[int]] = []  # by hand
    for key in sorted(set(zip(microbatch.tolist(), home.tolist()))):
        expected.append([])
        for item, (replica, number, _) in enumerate(items):
            if (number, replica) == key:
                if expected[-1] and sum(items[i][2] for i in [*expected[-1], item]) > most:
                    expected.append([])
                expected[-1].append(item)
    assert [np.flatnonzero(unit == n).tolist() for n in range(len(units))] == expected
    sizes = np.array([sum(items[i][2] for i in mine) for mine in expected], np.int64)
    assert units.home.tolist() == [items[mine[0]][0] for mine in expected]
    assert units.microbatch.tolist() == [items[mine[0]][1] for mine in expected]
    for column, factor in (("forward", 1), ("again", 2), ("backward", 3), ("kept_bytes", 80)):
        assert np.array_equal(getattr(units, column), sizes * factor / 8)


def test_a_unit_of_several_items_is_a_picture_or_a_part_of_a_ranks_share():
    assert most_joined(8 * 100 * 4, 4) == 100
    assert most_joined(10**9, 4) == 4096
    assert most_joined(0, 4) == 0


GRID = [
    (1, 1, 4), (2, 1, 2), (2, 1, 8), (4, 1, 4), (4, 1, 16), (2, 2, 2), (2, 2, 8), (4, 2, 4),
    (4, 2, 16), (4, 4, 8), (8, 2, 16),
]  # fmt: skip
FILLINGS = {
    "cut": {}, "gathered": {"gather": True}, "whole": {"pieces": 1}, "edges": {"edges": True},
    "no margin": {"margin": 1.0}, "kept": {"room_bytes": 10**6},
    "kept, whole": {"room_bytes": 10**9, "pieces": 1},
}  # fmt: skip


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize(("stages", "chunks", "microbatches"), GRID)
def test_plans_pass_their_check_and_are_in_time(stages, chunks, microbatches, filling):
    for seed, load in enumerate((0.001, 0.1, 3.0)):
        plan, units, line, chosen = made(
            stages, chunks, microbatches, seed=seed, load=load, **FILLINGS[filling]
        )
        check(plan)
        all_pieces_once(plan, chosen)
        in_time(plan, units, line, chosen)
        nothing_fits(plan, units, line, chosen)
        enough_room(plan, units, chosen)


def all_pieces_once(plan, chosen):
    """Check that the plan does each piece exactly once."""
    for slices in (plan.forward, plan.backward):
        counted = np.zeros(len(plan.rank), np.int64)
        for rank, mine in enumerate(slices):
            for unit, slot, begin, end in mine:
                assert 0 <= begin < end
                assert plan.rank[unit] == rank
                assert 0 <= slot <= plan.schedule.num_passes
                counted[unit] += end - begin
        assert (counted == chosen.pieces).all()


def in_time(plan, units, line, chosen):
    """Check on a simulated clock that no work exceeds its gap or its deadline.

    Work that fits no bubble runs before the first or after the last pass, and is reported.
    """
    given = plan, units, line, chosen
    for rank in range(len(plan.stage)):
        # Forward work may have less margin where all ranks would otherwise have to start earlier.
        assert rank_in_time(*given, rank, 1.0) or (
            plan.upfront and rank_in_time(*given, rank, LESS[-1])
        )


def rank_in_time(plan, units, line, chosen, rank, times):
    """Return whether a rank is in time with the margin of its forward work scaled by `times`."""
    borders = borders_of(plan.schedule, line, chosen.transport)
    last = plan.schedule.num_passes
    gaps = {gap.slot: gap for gap in gaps_of(int(plan.stage[rank]), line, chosen)}
    clock = {slot: gap.begin for slot, gap in gaps.items()}
    clock[0] -= plan.upfront
    found = []
    for unit, slot, begin, end in plan.forward[rank]:
        ahead = max(0.0, gaps[0].begin - clock[0]) if slot == 0 else 0.0
        took = float(units.forward[unit]) / chosen.pieces * (end - begin)
        clock[slot] += took if took <= ahead else took * (1.0 + times * (gaps[slot].margin - 1.0))
        found.append(clock[slot] <= borders.need[units.microbatch[unit]] + 1e-6)
        found.append(clock[slot] <= gaps[slot].end + 1e-6 or (slot == 0 and took <= ahead))
    begun = []  # pieces
    for unit, slot, begin, end in plan.backward[rank]:
        clock[slot] = max(clock[slot], borders.done[units.microbatch[unit]])
        for piece in range(begin, end):
            begun.append(clock[slot] if slot == last else 0.0)
            clock[slot] += seconds_of(plan, units, unit, piece) * gaps[slot].margin
        limit = line.total + plan.after if slot == last else gaps[slot].end
        found.append(clock[slot] <= limit + 1e-6)
    together = len(begun) - int(plan.together[rank])
    found += [start < borders.done.max() + 1e-6 for start in begun[:together]]
    found += [start > borders.done.max() - 1e-6 for start in begun[together:]]
    return all(found)


def nothing_fits(plan, units, line, chosen):
    """Check that no gap has room for a backward piece that runs later but could run there.

    Gaps with forward work are left out, because their margin varies.
    """
    borders = borders_of(plan.schedule, line, chosen.transport)
    for rank, mine in enumerate(plan.backward):
        shared = {one.slot for one in plan.forward[rank]} | {0}
        done = dict.fromkeys(np.flatnonzero(plan.rank == rank).tolist(), 0)
        for gap in gaps_of(int(plan.stage[rank]), line, chosen)[:-1]:
            clock, before = gap.begin, chosen.pieces
            for unit, _, begin, end in [one for one in mine if one.slot == gap.slot]:
                clock = max(clock, borders.done[units.microbatch[unit]])
                took = sum(seconds_of(plan, units, unit, piece) for piece in range(begin, end))
                clock, done[unit] = clock + took * gap.margin, end
            for unit, piece in done.items():
                if piece < before and gap.slot not in shared:
                    begin = max(clock, borders.done[units.microbatch[unit]])
                    took = seconds_of(plan, units, unit, piece) * gap.margin
                    assert begin + took > gap.end - 1e-6
                before = piece


def seconds_of(plan, units, unit, piece):
    """Return the expected seconds of a backward piece."""
    work = units.backward if piece < plan.kept[unit] else units.again
    return float(work[unit]) / plan.pieces


def enough_room(plan, units, chosen):
    assert ((plan.kept >= 0) & (plan.kept <= chosen.pieces)).all()
    kept = units.kept_bytes * (plan.kept / chosen.pieces)
    assert np.bincount(plan.rank, kept, len(plan.stage)).max() <= chosen.room_bytes
    # No rank could keep one more piece of a unit; sizes of pieces are rounded up to bytes.
    free = chosen.room_bytes - np.bincount(plan.rank, kept, len(plan.stage))
    piece = units.kept_bytes / chosen.pieces + chosen.pieces
    assert not ((plan.kept < chosen.pieces) & (piece < free[plan.rank] - 2 * len(units))).any()


@given(st.integers(0, 10**6), st.sampled_from(GRID), st.floats(0.001, 10.0))
@settings(max_examples=40, deadline=None)
def test_a_plan_is_a_function_of_what_it_is_given(seed, shape, load):
    (plan, *_), (again, *_) = (made(*shape, items=15, seed=seed, load=load) for _ in range(2))
    assert plan.rank.tolist() == again.rank.tolist()
    assert (plan.forward, plan.backward) == (again.forward, again.backward)
    assert (plan.upfront, plan.after) == (again.upfront, again.after)


def test_little_work_needs_no_time_of_its_own():
    """Light items after the first microbatches fit into the bubbles completely."""
    plan, units, *_ = made(4, 1, 16, items=8, load=0.01)
    first = units.forward[units.microbatch == 0]
    assert plan.upfront <= 0.02 + first.sum() + first.max() / 27
    assert plan.after <= units.forward.max() * 3 + 0.1


def test_of_ranks_with_as_much_to_do_one_with_a_large_unit_gets_less():
    """A rank with one large unit may end later, because the errors of many small units cancel."""
    schedule, forward = Schedule(2, 1, 8), np.array([1.0] + 400 * [0.02])
    line, none = timeline(schedule, np.ones(2), 2 * np.ones(2)), np.zeros(401, np.int64)
    units = Units(none, none, forward, 3 * forward, 2 * forward, none)
    rank = assign_units(units, schedule, line, np.ones(4, np.int64), Filling()).rank
    late = np.bincount(rank, 3 * forward, 4)
    others = np.delete(late, rank[0])
    assert others.max() - others.min() < 0.07  # a small unit
    assert 0.15 < others.min() - late[rank[0]] < 0.45  # about a tenth of 3.0


def test_a_rank_that_keeps_a_unit_has_room_for_more_work():
    schedule, forward = Schedule(2, 1, 8), np.array([1.0, 0.9, 0.1])
    line, none = timeline(schedule, np.ones(2), 2 * np.ones(2)), np.zeros(3, np.int64)
    kept_bytes = np.array([1000, 10**9, 10**9])
    units = Units(none, none, forward, 3 * forward, 2 * forward, kept_bytes)
    filling = Filling(room_bytes=27 * 38)  # a piece takes 1,000 / 27 bytes, rounded up
    rank, kept, *_ = assign_units(units, schedule, line, np.ones(2, np.int64), filling)
    assert kept.tolist() == [27, 0, 0]
    assert rank[2] == rank[0] != rank[1]  # 2.0 s are left of the first unit, 2.7 of the second


def loads(seconds, microbatch):
    """Return the forward work of equal items that the ranks of each of four stages are given."""
    schedule, stage = Schedule(4, 1, 16), np.repeat(np.arange(4), 4)
    line = timeline(schedule, np.ones(4), 2 * np.ones(4))
    forward, none = np.full(len(microbatch), seconds), np.zeros(len(microbatch), np.int64)
    units = Units(none, microbatch, forward, 3 * forward, 2 * forward, none)
    rank = assign_units(units, schedule, line, stage, Filling()).rank
    return np.bincount(stage[rank], forward, 4)


def test_ranks_have_less_to_do_behind_the_last_pass(monkeypatch):
    """The slot after the last pass has no margin, and it is longest on the last stage."""
    microbatch = np.repeat(np.arange(6, 16), 60)
    with_margin = loads(0.03, microbatch)
    monkeypatch.setattr(bubble_plan, "LAST_MARGIN", 0.0)
    without = loads(0.03, microbatch)
    assert without[3] - without[0] > with_margin[3] - with_margin[0] + 0.4


def test_ranks_have_less_to_do_before_the_first_pass(monkeypatch):
    """Twelve ranks can each do 0.85 s of the work that is needed a second after the first pass.

    With more margin they cannot. The step then gets longer, so the other ranks have time for it.
    """
    microbatch = np.ones(12 * 84, np.int64)
    assert loads(0.01, microbatch)[0] > 0
    monkeypatch.setattr(bubble_plan, "FIRST_MARGIN", 1.0)
    assert loads(0.01, microbatch)[0] == 0


def test_forward_work_has_more_margin_where_no_step_is_longer_for_it(monkeypatch):
    plan, units, line, chosen = made(4, 2, 8, items=60, load=0.08)
    given = units, plan.rank, plan.kept, plan.schedule, line, plan.stage, chosen
    monkeypatch.setattr(bubble_plan, "SPARE", ())
    tight = place_units(*given)
    monkeypatch.setattr(bubble_plan, "SPARE", (2.0,))
    wide = place_units(*given)
    assert (wide.upfront, wide.after) == (tight.upfront, tight.after)
    assert (plan.forward, plan.backward) != (tight.forward, tight.backward)
    spared = 0
    for stage, mine, others in zip(plan.stage.tolist(), wide.forward, tight.forward, strict=True):
        gaps = {gap.slot: gap for gap in gaps_of(stage, line, chosen)}
        took = dict.fromkeys(gaps, 0.0)
        for unit, slot, begin, end in mine:
            took[slot] += float(units.forward[unit]) / chosen.pieces * (end - begin)
        if mine != others:
            spared += 1
            for slot in took.keys() - {0}:
                assert took[slot] * 1.3 <= gaps[slot].end - gaps[slot].begin + 1e-6
            assert took[0] - wide.upfront <= (gaps[0].end - gaps[0].begin) / 1.3 + 1e-6
    assert spared > 1


def test_ranks_without_room_for_all_margin_have_less_rather_than_that_all_begin_earlier(
    monkeypatch,
):
    plan, units, line, chosen = made(4, 2, 8, items=100, load=0.2)
    given = units, plan.rank, plan.kept, plan.schedule, line, plan.stage, chosen
    monkeypatch.setattr(bubble_plan, "LESS", (1.0,))
    strict = place_units(*given)
    assert 0 < plan.upfront < strict.upfront - 0.1
    assert plan.after < strict.after + 1e-9
    full = [rank_in_time(plan, units, line, chosen, rank, 1.0) for rank in range(len(plan.stage))]
    assert sum(full) == 2  # of eight ranks; those with room have the full margin
    monkeypatch.setattr(bubble_plan, "LESS", (1.0, 0.5))
    assert place_units(*given).upfront == plan.upfront


def test_stages_that_would_end_later_than_others_get_less(monkeypatch):
    """Ranks are chosen by how much of a unit gaps can hold; the plan shows how much they do."""
    plan, units, line, chosen = made(4, 2, 16, items=200, load=0.3)
    given = plan.schedule, [line], plan.stage, chosen
    monkeypatch.setattr(bubble_plan, "ROUNDS", 0)
    _, once = plan_bubbles(units, *given)
    first = assign_units(units, plan.schedule, line, plan.stage, chosen)
    assert first.rank.tolist() == once.rank.tolist()
    assert abs(first.late.mean()) < 1e-9 < np.ptp(first.late)
    latest = int(first.late.argmax())
    taken = np.where(np.arange(4) == latest, 10.0, 0.0)
    second = assign_units(units, plan.schedule, line, plan.stage, chosen, taken)
    work = units.forward + units.again
    before, after = (np.bincount(plan.stage[rank], work, 4) for rank in (first.rank, second.rank))
    assert after[latest] < before[latest] - 0.5
    gaps = [gaps_of(one, line, chosen) for one in range(4)]
    borders = borders_of(plan.schedule, line, chosen.transport)
    whole, rest = (
        bubble_plan._Room(gaps, plan.stage, borders, one) for one in (np.zeros(4), taken)
    )
    for name in ("both", "backward"):
        less = getattr(whole, name) - getattr(rest, name)
        assert less == pytest.approx(np.broadcast_to(taken[plan.stage], less.shape))
    attempts = []

    def attempt(number, taken):
        attempts.append((number, taken))
        return Choice(plan.rank, plan.kept, [3.0, 2.0, 1.0, 4.0][len(attempts) - 1], first.late)

    monkeypatch.setattr(bubble_plan, "ROUNDS", 2)
    assert choose(attempt, 2, 4)[1].longer == 1.0
    assert [number for number, _ in attempts] == [0, 1, 1, 1]
    assert np.array_equal([taken for _, taken in attempts], np.outer([0, 0, 0.5, 1.0], first.late))


def test_a_step_is_taken_to_be_longer_by_what_its_last_rank_may_be_late(monkeypatch):
    """Unit costs err independently: 3.5 deviations of a tenth of the root of the sum of squares."""
    schedule, forward = Schedule(2, 1, 8), np.array([3.0, 4.0])
    line, none = timeline(schedule, np.ones(2), 2 * np.ones(2)), np.zeros(2, np.int64)
    units = Units(none + 7, none + 7, forward, 3 * forward, 2 * forward, none)
    given = units, schedule, line, np.zeros(1, np.int64), Filling(edges=True)
    risky = assign_units(*given)
    monkeypatch.setattr(bubble_plan, "LAST_LATE", 0.0)
    assert risky.longer - assign_units(*given).longer == pytest.approx(0.35 * 15.0)
    assert np.array_equal(risky.late, [0.0, 0.0])  # the other stage has no rank


def test_a_pipeline_without_bubbles_does_it_before_and_after():
    plan, units, *_ = made(1, 1, 4, replicas=1, items=6)
    slots = {one.slot for one in plan.forward[0]}, {one.slot for one in plan.backward[0]}
    assert slots == ({0}, {plan.schedule.num_passes})
    work = units.forward.sum()
    assert work <= plan.upfront + 1e-9 <= work + 0.03
    assert 3 * work <= plan.after + 1e-9 <= 3 * work + 0.1


def test_a_step_without_media_has_an_empty_plan():
    plan, *_ = made(4, 2, 8, items=0)
    check(plan)
    assert (plan.upfront, plan.after) == (0.0, 0.0)
    assert not any(plan.forward) and not any(plan.backward)  # noqa: PT018


# Plans that would deadlock ------------------------------------------------------------------------


def by_hand(schedule, *work):
    """Return a plan of whole units (rank = stage, microbatch, forward slot, backward slot)."""
    stages = range(schedule.stages)
    numbered = list(enumerate(work))
    return BubblePlan(
        schedule=schedule,
        stage=np.arange(schedule.stages),
        microbatch=np.array([m for _, m, *_ in work]),
        rank=np.array([rank for rank, *_ in work]),
        kept=np.ones(len(work), bool),
        pieces=1,
        forward=[[Slice(u, w[2], 0, 1) for u, w in numbered if w[0] == s] for s in stages],
        backward=[[Slice(u, w[3], 0, 1) for u, w in numbered if w[0] == s] for s in stages],
        together=np.zeros(schedule.stages, np.int64),
        upfront=0.0,
        after=0.0,
    )


TWO = Schedule(2, 1, 3)  # stage 0: F0 F1 B0 F2 B1 B2; stage 1: F0 B0 F1 B1 F2 B2


def test_a_unit_behind_the_pass_that_leads_to_it_is_refused():
    check(by_hand(TWO, (1, 0, 0, 6)))
    with pytest.raises(WaitsInACircle, match="stage 0 before the forward of microbatch 0, chunk 0"):
        check(by_hand(TWO, (1, 0, 1, 6)))  # stage 1's first pass needs this unit's output


def test_a_gradient_that_needs_a_later_pass_of_the_same_stage_is_refused():
    check(by_hand(TWO, (0, 0, 0, 3)))
    with pytest.raises(WaitsInACircle, match="stage 0 before the backward of microbatch 0"):
        check(by_hand(TWO, (0, 0, 0, 2)))


def test_two_units_that_are_valid_each_alone_can_be_circular_together():
    """In slot 4 the last stage waits for the first stage's backward pass of microbatch 1.

    That pass follows the first stage's forward pass of microbatch 4, whose media are encoded in
    slot 5.
    """
    schedule = Schedule(4, 1, 6)
    early, late = (3, 1, 0, 4), (3, 4, 5, 12)
    check(by_hand(schedule, early))
    check(by_hand(schedule, late))
    with pytest.raises(WaitsInACircle, match="stage 0 before the forward of microbatch 4"):
        check(by_hand(schedule, early, late))


def comes_to_its_end(plan) -> bool:
    try:
        check(plan)
    except WaitsInACircle:
        return False
    return True


@pytest.mark.parametrize("microbatches", [4, 6, 8])
def test_with_interleaved_chunks_a_forward_pass_waits_until_its_output_is_taken(microbatches):
    """Stage 1 receives its input of microbatch 3 after the pass before.

    Stage 0 waits for that and does not begin the backward pass that stage 1 would wait for.
    """
    schedule = Schedule(2, 2, microbatches)
    assert schedule.passes[1][8] == Pass(False, 0, 3)
    assert not comes_to_its_end(by_hand(schedule, (1, 0, 0, 8)))
    assert comes_to_its_end(by_hand(schedule, (1, 0, 0, 9)))


@pytest.mark.parametrize("microbatches", [4, 6, 8])
def test_in_turns_a_stage_works_before_it_waits_for_what_it_sends(microbatches):
    """Stage 1 encodes microbatch 2 before stage 0 has received the gradient that it sends.

    Stage 0 receives it after its forward pass of that microbatch.
    """
    schedule = Schedule(2, 1, microbatches)
    assert comes_to_its_end(by_hand(schedule, (1, 2, 4, 4 * microbatches // 2)))
    assert not comes_to_its_end(by_hand(schedule, (1, 2, 5, 4 * microbatches // 2)))


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), GRID)
def test_first_and_last_slots_alone_always_come_to_their_end(stages, chunks, microbatches):
    schedule, last = Schedule(stages, chunks, microbatches), 2 * chunks * microbatches
    work = [(s, m, 0, last) for m in range(microbatches) for s in range(stages)]
    check(by_hand(schedule, *work))


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_forwards_may_come_earlier_and_the_rest_later(data):
    """A rank may move work like this when costs turn out wrong."""
    shape = data.draw(st.sampled_from(GRID))
    plan, *_ = made(*shape, items=10, seed=data.draw(st.integers(0, 10**6)), load=0.5, pieces=1)
    assume(comes_to_its_end(plan))
    last = plan.schedule.num_passes
    forward = [_moved(mine, data, 0, None) for mine in plan.forward]
    backward = [_moved(mine, data, None, last) for mine in plan.backward]
    check(replace(plan, forward=forward, backward=backward))


def _moved(mine, data, first, last):
    """Move slices to other slots in the same order, down to `first` or up to `last`."""
    found = []
    for one in mine if last is None else reversed(mine):
        low = found[-1].slot if found and last is None else (first if last is None else one.slot)
        high = one.slot if last is None else (found[-1].slot if found else last)
        found.append(one._replace(slot=data.draw(st.integers(low, max(low, high)))))
    return found if last is None else found[::-1]


FAULTS = {
    "lost": "26 of 27 pieces are in the plan", "doubled": "do not follow those before",
    "elsewhere": "do not follow those before", "early": "out of order", "swapped": "out of order",
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_does_not_do_all_work_once_and_in_time_is_refused(fault):
    plan, *_ = made(2, 1, 8, replicas=1, items=10)
    rank = max(range(2), key=lambda r: len(plan.backward[r]))
    mine, other = list(plan.backward[rank]), list(plan.backward[1 - rank])
    if fault == "lost":
        mine[-1] = mine[-1]._replace(end=mine[-1].end - 1)
    elif fault == "doubled":
        mine.append(mine[-1])
    elif fault == "swapped":
        mine[0], mine[-1] = mine[-1], mine[0]
    elif fault == "early":
        mine[-1] = mine[-1]._replace(slot=mine[-2].slot - 1)
    else:
        other.append(mine.pop())
    both = [mine, other] if rank == 0 else [other, mine]
    with pytest.raises(ValueError, match=FAULTS[fault]):
        check(replace(plan, backward=both))


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_units_may_take_turns_and_none_is_ahead_of_the_one_before_it(way):
    """Otherwise the gradients of a block's weights would be added in another order."""
    plan, *_ = made(2, 1, 8, replicas=1, items=10, edges=True)  # keeps all work out of the pipeline
    first, second, *rest = getattr(plan, way)[0]
    assert first[1:] == second[1:] == (first.slot, 0, 27)

    def turns(*order):
        mine = [unit._replace(begin=begin, end=end) for unit, begin, end in order]
        return replace(plan, **{way: [[*mine, *rest], getattr(plan, way)[1]]})

    check(turns((first, 0, 5), (second, 0, 5), (first, 5, 27), (second, 5, 27)))
    with pytest.raises(
        ValueError, match=f"0 to 6 on rank 0 come before those of unit {first.unit}"
    ):
        check(turns((first, 0, 5), (second, 0, 6), (first, 5, 27), (second, 6, 27)))
