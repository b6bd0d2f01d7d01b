"""Whether a plan of vision work in bubbles comes to its end, and does all work once. Pure."""

import numpy as np

from kimi_pretrain.dep.bubble_plan import BubblePlan
from kimi_pretrain.dep.timeline import Pass, Schedule


class WaitsInACircle(ValueError):
    """A plan in which ranks would wait for each other."""


def check(plan: BubblePlan) -> None:
    """Run a plan without durations, every wait blocking and all replicas in step.

    In a slot a rank does its forward pieces, then those that wait for a gradient. What a pass sends
    to another stage must be taken: the stage does not go on before the other has come to the slot
    where it receives. (With interleaved chunks Megatron-Core waits for that one pass of the kind
    later.)

    Raises:
        WaitsInACircle: it does not come to its end; names the passes.
        ValueError: a unit is not done once and in order, or out of the order of messages.
    """
    _check_slices(plan)
    schedule, slots = plan.schedule, plan.schedule.num_passes + 1
    # Of each stage and slot: units whose last forward piece is there, microbatches it waits for.
    made: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in range(schedule.stages)]
    waits: list[list[set[int]]] = [[set() for _ in range(slots)] for _ in range(schedule.stages)]
    missing = np.bincount(plan.microbatch, minlength=schedule.microbatches).tolist()
    for stage, forward, backward in zip(plan.stage.tolist(), plan.forward, plan.backward):
        last = {one.unit: one.slot for one in forward}
        for unit, slot in last.items():
            made[stage][slot].append(int(plan.microbatch[unit]))
        for one in backward:
            waits[stage][one.slot].add(int(plan.microbatch[one.unit]))
    takers = _takers(schedule)
    at, worked = [0] * schedule.stages, [False] * schedule.stages
    done: set[tuple[int, Pass]] = set()
    moved = True
    while moved:
        moved = False
        for stage, passes in enumerate(schedule.passes):
            while at[stage] < slots:
                slot = at[stage]
                taker, where = takers[stage][slot]
                if at[taker] < where:
                    break
                if not worked[stage]:
                    for microbatch in made[stage][slot]:
                        missing[microbatch] -= 1
                    worked[stage] = moved = True
                if any((0, Pass(True, 0, m)) not in done for m in waits[stage][slot]):
                    break
                if slot < len(passes):
                    this = passes[slot]
                    needed = schedule.needed(stage, this)
                    first = stage == 0 and this.chunk == 0 and not this.backward
                    if (needed is not None and needed not in done) or (
                        first and missing[this.microbatch]
                    ):
                        break
                    done.add((stage, this))
                at[stage], worked[stage], moved = slot + 1, False, True
    stuck = [
        f"stage {stage} before the {passes[at[stage]] if at[stage] < len(passes) else 'end'}"
        for stage, passes in enumerate(schedule.passes)
        if at[stage] < slots
    ]
    if stuck:
        raise WaitsInACircle(
            f"this plan of vision work lets stages wait for each other: {'; '.join(stuck)}"
        )


def _takers(schedule: Schedule) -> list[list[tuple[int, int]]]:
    """Return for each stage and slot which stage must have come to which slot before.

    That of the pass before the slot, or with interleaved chunks of the one of its kind before that.
    """
    receives = {
        needed: (stage, number)
        for stage, passes in enumerate(schedule.passes)
        for number, one in enumerate(passes)
        if (needed := schedule.needed(stage, one)) is not None
    }
    found: list[list[tuple[int, int]]] = []
    for stage, passes in enumerate(schedule.passes):
        mine = [(0, 0)]
        last: dict[bool, Pass | None] = {False: None, True: None}
        for one in passes:
            sent = one if schedule.chunks == 1 else last[one.backward]
            last[one.backward] = one
            taker = (0, 0) if sent is None else receives.get((stage, sent), (0, 0))
            mine.append((0, 0) if taker[0] == stage else taker)
        found.append(mine)
    return found


def _check_slices(plan: BubblePlan) -> None:
    """Refuse a plan that does a piece not once, or units not in the order of their messages."""
    again = np.where(plan.kept, 1, 2) * plan.pieces
    for kind, slices, whole in (
        ("forward", plan.forward, np.full(len(plan.rank), plan.pieces)),
        ("backward", plan.backward, again),
    ):
        done = np.zeros(len(plan.rank), np.int64)
        for rank, mine in enumerate(slices):
            order = [(one.unit, one.begin) for one in mine]
            slots = [one.slot for one in mine]
            if order != sorted(order) or slots != sorted(slots):
                raise ValueError(f"rank {rank} does its {kind} pieces out of order")
            for one in mine:
                if plan.rank[one.unit] != rank or done[one.unit] != one.begin:
                    raise ValueError(
                        f"unit {one.unit}, {kind}: pieces {one.begin} to {one.end} on rank {rank} "
                        "do not follow those before"
                    )
                done[one.unit] = one.end
        if (done != whole).any():
            unit = int(np.flatnonzero(done != whole)[0])
            raise ValueError(
                f"unit {unit}, {kind}: {done[unit]} of {whole[unit]} pieces are in the plan"
            )
