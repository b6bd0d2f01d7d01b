"""Checks that a plan of vision work in bubbles terminates and does all work once. Pure function."""

from functools import lru_cache

import numpy as np

from kimi_pretrain.dep.bubble_plan import BubblePlan
from kimi_pretrain.dep.timeline import Pass, Schedule


class WaitsInACircle(ValueError):
    """A plan in which ranks would deadlock, waiting for each other."""


Progress = tuple[int, int]
"""Progress of a stage: the number of finished passes, and the state of the slot that follows them:
`ENTERED` (the receivers of its blocking sends are ready), `WORKED` (its work is done), or 0."""

ENTERED, WORKED = 1, 2


def check(plan: BubblePlan) -> None:
    """Simulate a plan without durations, with every wait blocking and all replicas in step.

    In a slot, a rank runs its forward pieces, then the pieces that wait for a gradient. The output
    of a pass also needs a receiver in another stage; see `_sends`.

    Raises:
        WaitsInACircle: the plan does not terminate; the message names the passes.
        ValueError: a piece is not done exactly once, or not in the order of units.
    """
    _check_slices(plan)
    schedule, slots = plan.schedule, plan.schedule.num_passes + 1
    # Per stage and slot: units whose last forward piece runs there, microbatches to wait for.
    made: list[list[list[int]]] = [[[] for _ in range(slots)] for _ in range(schedule.stages)]
    waits: list[list[set[int]]] = [[set() for _ in range(slots)] for _ in range(schedule.stages)]
    missing = np.bincount(plan.microbatch, minlength=schedule.microbatches).tolist()
    for stage, forward, backward in zip(plan.stage.tolist(), plan.forward, plan.backward):
        last = {one.unit: one.slot for one in forward}
        for unit, slot in last.items():
            made[stage][slot].append(int(plan.microbatch[unit]))
        for one in backward:
            waits[stage][one.slot].add(int(plan.microbatch[one.unit]))
    sends = _sends(schedule)
    at: list[Progress] = [(0, 0)] * schedule.stages
    done: set[tuple[int, Pass]] = set()

    def goes_on(stage: int) -> bool:
        """Advance a stage as far as possible; return whether it made progress."""
        passes, before = schedule.passes[stage], at[stage]
        while (slot := at[stage][0]) < slots:
            first, then = sends[stage][slot]
            if at[stage] < (slot, ENTERED):
                if any(at[taker] < where for taker, where in first):
                    break
                for microbatch in made[stage][slot]:
                    missing[microbatch] -= 1
                at[stage] = (slot, ENTERED)
            if at[stage] < (slot, WORKED):
                if any((0, Pass(True, 0, m)) not in done for m in waits[stage][slot]):
                    break
                if any(at[taker] < where for taker, where in then):
                    break
                at[stage] = (slot, WORKED)
            if slot < len(passes):
                this = passes[slot]
                needed = schedule.needed(stage, this)
                media = stage == 0 and this.chunk == 0 and not this.backward
                if (needed is not None and needed not in done) or (
                    media and missing[this.microbatch]
                ):
                    break
                done.add((stage, this))
            at[stage] = (slot + 1, 0)
        return at[stage] > before

    while any([goes_on(stage) for stage in range(schedule.stages)]):
        pass
    stuck = [
        f"stage {stage} before the {passes[at[stage][0]] if at[stage][0] < len(passes) else 'end'}"
        for stage, passes in enumerate(schedule.passes)
        if at[stage][0] < slots
    ]
    if stuck:
        raise WaitsInACircle(
            f"this plan of vision work lets stages wait for each other: {'; '.join(stuck)}"
        )


Takers = list[tuple[int, Progress]]


@lru_cache(maxsize=16)
def _sends(schedule: Schedule) -> tuple[tuple[tuple[Takers, Takers], ...], ...]:
    """Return the progress that other stages must have reached, for each stage and slot: before the
    slot's work, and before the next pass.

    This models Megatron-Core's order of calls (schedules.py). Megatron posts a send together with
    the next receive and waits for both after the slot's work. It waits for a send at once if no
    receive is paired with it, or, with interleaved chunks, after a forward pass in the steady 1F1B
    phase. With interleaved chunks, it posts a receive after the previous pass of the same kind, and
    waits for the send of a steady-state backward pass after the next one.
    """
    plain = schedule.chunks == 1
    posted: dict[tuple[int, Pass], tuple[int, Progress]] = {}
    for stage, passes in enumerate(schedule.passes):
        warm_up = schedule.warm_up(stage)
        turns = warm_up < schedule.microbatches * schedule.chunks
        behind: dict[bool, Progress] = {
            False: (0, 0),
            True: (warm_up, WORKED if turns else ENTERED),
        }
        for number, one in enumerate(passes):
            needed = schedule.needed(stage, one)
            if needed is not None and needed[0] != stage:
                posted[needed] = stage, (number, ENTERED) if plain else behind[one.backward]
            behind[one.backward] = number + 1, 0
    found = []
    for stage, passes in enumerate(schedule.passes):
        slots: list[tuple[Takers, Takers]] = [([], []) for _ in range(len(passes) + 1)]
        warm_up = schedule.warm_up(stage)
        cool_down = len(passes) - warm_up
        late: tuple[int, Progress] | None = None
        for number, one in enumerate(passes):
            first, then = slots[number + 1]
            taker = posted.get((stage, one))
            in_turns = warm_up <= number < cool_down
            if not plain and in_turns and one.backward:
                first.extend([late] if late else [])
                late = taker
            elif taker is not None:
                following = passes[number + 1] if number + 1 < len(passes) else None
                if plain:
                    together = in_turns and number + 1 < cool_down
                elif one.backward or number >= warm_up:
                    together = one.backward
                else:
                    together = (
                        following is not None
                        and not following.backward
                        and schedule.needed(stage, following) is not None
                    )
                (then if together else first).append(taker)
        slots[-1][0].extend([late] if late else [])
        found.append(tuple(slots))
    return tuple(found)


def _check_slices(plan: BubblePlan) -> None:
    """Refuse a plan that does not run each piece once, with piece k of units in order.

    The order matters because gradients of a piece's weights are added in this order, and messages
    of units are sent with the last forward piece and received with the first backward piece.
    """
    for kind, slices in (("forward", plan.forward), ("backward", plan.backward)):
        done = np.zeros(len(plan.rank), np.int64)
        for rank, mine in enumerate(slices):
            slots = [one.slot for one in mine]
            if slots != sorted(slots):
                raise ValueError(f"rank {rank} does its {kind} pieces out of order")
            units = sorted({one.unit for one in mine})
            before = dict(zip(units[1:], units))
            for one in mine:
                if plan.rank[one.unit] != rank or done[one.unit] != one.begin:
                    raise ValueError(
                        f"unit {one.unit}, {kind}: pieces {one.begin} to {one.end} on rank {rank} "
                        "do not follow those before"
                    )
                done[one.unit] = one.end
                other = before.get(one.unit)
                if other is not None and done[other] < one.end:
                    raise ValueError(
                        f"unit {one.unit}, {kind}: pieces {one.begin} to {one.end} on rank {rank} "
                        f"come before those of unit {other}"
                    )
        if (done != plan.pieces).any():
            unit = int(np.flatnonzero(done != plan.pieces)[0])
            raise ValueError(
                f"unit {unit}, {kind}: {done[unit]} of {plan.pieces} pieces are in the plan"
            )
