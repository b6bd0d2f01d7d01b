"""Simulates a step whose vision work runs inside the pipeline's bubbles.

`kimi_pretrain.dep.bubble_plan` plans on the timeline of a text-only step with estimated item costs.
This module runs the plan with the true costs: a rank runs the pieces of each slot, then its pass,
and any delay propagates to the ranks that wait for it. The replicas of an expert group synchronize
in every layer, so their passes start together when the last replica is ready. After its last pass,
a rank contributes its gradients to the sum over all ranks as its last unit completes them.
"""

import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.sim.assumptions import Assumptions, gradient_sum_seconds
from benchmarks.sim.backbone import Pipeline, pipeline
from benchmarks.sim.corpus import Library
from benchmarks.sim.phases import BYTES, true_costs
from benchmarks.sim.study import Case, config_of
from data_pipeline.plan.step_plan import GlobalPlan
from kimi_pretrain.config import GIB, Config
from kimi_pretrain.dep.bubble_check import check
from kimi_pretrain.dep.bubble_plan import (
    OVER,
    BubblePlan,
    Filling,
    Units,
    gaps_of,
    least_waits,
    most_joined,
    plan_bubbles,
)
from kimi_pretrain.dep.cost import FORWARDS_PER_STEP
from kimi_pretrain.dep.row_order import microbatch_order
from kimi_pretrain.dep.timeline import gathered
from kimi_pretrain.parallel.ranks import Ranks
from moonvit3d.memory import kept_bytes

Floats = NDArray[np.float64]


SCATTER = 0.1  # scatter of the true costs around the planned costs


@dataclass(frozen=True)
class Bubbles:
    """One way to fill bubbles.

    Attributes:
        title: description in words.
        order_rows: value of `data.order_rows`.
        filling: parameters of the plan.
        gather: True to plan on a timeline whose short waits are merged.
        scatter: error of the planned costs, as in `Assumptions.cost_scatter`.
        put_off: True if a rank postpones backward pieces that would overrun their slot. On CUDA no
            rank does.
    """

    title: str
    order_rows: str = "light_ends"
    filling: Filling = Filling()
    gather: bool = True
    scatter: float = SCATTER
    put_off: bool = True


def units_of(
    plan: GlobalPlan, config: Config, assumed: Assumptions, off: Floats | float = 1.0
) -> Units:
    """Return a step's units with their costs.

    Args:
        off: true cost over planned cost of each item.
    """
    seconds = true_costs(config, assumed).seconds(plan.items.patches) / FORWARDS_PER_STEP * off
    per_microbatch = config.train.rows_per_microbatch
    number = plan.items.row.astype(np.int64) // per_microbatch
    home, number = np.divmod(number, plan.num_rows // (config.layout.dp * per_microbatch))
    place = np.argsort(microbatch_order(plan, config), axis=1)
    patches = plan.items.patches.astype(np.int64)
    each = Units(
        home=home,
        microbatch=place[home, number],
        forward=seconds,
        again=3 * seconds,
        backward=2 * seconds,
        kept_bytes=kept_bytes(patches, config.model.vision, BYTES),
    )
    return each.joined(patches, most_joined(int(patches.sum()), config.layout.world_size()))[0]


def scattered(items: int, step: int, seed: int, scatter: float) -> Floats:
    """Return true over planned cost of each item, from the same draws as `phases.true_plan`."""
    draw = np.random.Generator(np.random.Philox(key=(seed, step)))
    return np.exp(scatter * draw.standard_normal(items))


def run_through(
    plan: BubblePlan,
    units: Units,
    text: Pipeline,
    filling: Filling,
    experts: int,
    put_off: bool = True,
    sum_seconds: float = 0.0,
) -> float:
    """Return the end of a step in seconds from its start.

    Args:
        plan: assignment of pieces to slots.
        units: units of the plan, with true costs.
        text: pipeline without vision work.
        filling: parameters of the plan: pieces, transport, and the overhead of a used bubble.
        experts: replicas that synchronize in every layer.
        put_off: as in `Bubbles`.
        sum_seconds: seconds to sum the encoder's gradients over all ranks. Every piece has the same
            number of gradients; they are summed once the last unit of every rank has run that
            piece.
    """
    schedule, line = text.schedule, text.line
    replicas = len(plan.stage) // schedule.stages
    work = _work(plan, units, replicas)
    order: list[tuple[float, int, int, int]] = []
    for stage in range(schedule.stages):
        for slot in range(schedule.num_passes + 1):
            last = slot == schedule.num_passes
            begin = line.end[stage, slot - 1] if slot else -np.inf
            start = np.inf if last else line.start[stage, slot]
            order += [(begin, stage, 0, slot)] if (stage, slot, 0) in work else []
            order += [(start, stage, 1, slot)] if last or (stage, slot, 1) in work else []
            order += [] if last else [(start, stage, 2, slot)]
    numbers = [{one: n for n, one in enumerate(passes)} for passes in schedule.passes]
    lengths = [
        {gap.slot: gap.end - gap.begin for gap in gaps_of(stage, line, filling)}
        for stage in range(schedule.stages)
    ]
    groups, together = replicas // experts, plan.together.reshape(-1, replicas)
    busy = np.zeros((schedule.stages, replicas))
    opened = np.zeros((schedule.stages, replicas))  # start of the current slot
    ended = np.zeros((schedule.stages, schedule.num_passes, groups))
    ready = np.zeros((schedule.microbatches, replicas))
    done = np.zeros((schedule.microbatches, groups))
    left: dict[tuple[int, int], deque[list[Any]]] = defaultdict(deque)
    complete = np.zeros(plan.pieces)  # time at which the last rank has a piece's gradients
    for _, stage, kind, slot in sorted(order):
        inside = 0 < slot < schedule.num_passes
        lost = filling.slot_seconds if inside else 0.0
        if kind == 0:
            for _, replica, home, microbatch, runs, last in work[stage, slot, 0]:
                if busy[stage, replica] == opened[stage, replica]:
                    busy[stage, replica] += lost
                busy[stage, replica] += sum(count * seconds for count, seconds in runs)
                if last:
                    at = busy[stage, replica] + filling.transport
                    ready[microbatch, home] = max(ready[microbatch, home], at)
        elif kind == 1:
            for unit, replica, home, microbatch, runs, _ in work[stage, slot, 1]:
                more = [[unit, home // experts, microbatch, *run] for run in runs]
                left[stage, replica] += more
            for replica in range(replicas):
                ends = np.inf
                if inside and put_off:
                    ends = opened[stage, replica] + lost + lengths[stage][slot]
                if left[stage, replica] and busy[stage, replica] == opened[stage, replica]:
                    busy[stage, replica] += lost
                mine, time = left[stage, replica], float(busy[stage, replica])
                if slot == schedule.num_passes:
                    begin = float(opened[stage, replica])
                    count = int(together[stage, replica])
                    time, over = _behind(mine, count, plan.pieces, begin, time, done)
                    complete = np.maximum(complete, over)
                else:
                    time = _spent(mine, time, ends, done)
                busy[stage, replica] = time
        else:
            backward, chunk, microbatch = this = schedule.passes[stage][slot]
            start = busy[stage].reshape(groups, experts).max(axis=1)
            needed = schedule.needed(stage, this)
            if needed is not None:
                other, before = needed
                own = backward and not before.backward
                came = ended[other, numbers[other][before]] + (0.0 if own else text.send)
                start = np.maximum(start, came)
            first = stage == 0 and chunk == 0
            if first and not backward:
                media = ready[microbatch].reshape(groups, experts).max(axis=1)
                start = np.maximum(start, media)
            table = text.backward if backward else text.forward
            end = start + table[chunk * schedule.stages + stage, microbatch]
            ended[stage, slot] = end
            busy[stage] = opened[stage] = np.repeat(end, experts)
            if first and backward:
                done[microbatch] = end + filling.transport
    end = 0.0
    for one in complete.tolist():
        end = max(end, one) + sum_seconds / plan.pieces
    return max(end, float(busy.max()))


def _behind(
    left: deque[list[Any]], together: int, pieces: int, begin: float, time: float, done: Floats
) -> tuple[float, Floats]:
    """Run the pieces that a rank has left after its last pass.

    Args:
        left: as in `_spent`.
        together: number of last pieces that run piece by piece across all their units.
        pieces: pieces of a unit.
        begin: start of the slot; no weight gradient is sent earlier.
        time: when the rank is free.
        done: as in `_spent`.

    Returns:
        when the rank is free again, and when its gradients of each piece are complete, [pieces].
    """
    found, behind, each = np.full(pieces, begin), defaultdict[int, int](int), []
    for unit, group, microbatch, count, seconds in reversed(left):
        for _ in range(count):
            behind[unit] += 1
            each.append((pieces - behind[unit], float(done[microbatch, group]), seconds))
    left.clear()
    each.reverse()
    first = len(each) - together
    for piece, arrived, seconds in each[:first] + sorted(each[first:], key=lambda one: one[0]):
        found[piece] = time = max(time, arrived) + seconds
    return time, found


def _spent(left: deque[list[Any]], time: float, ends: float, done: Floats) -> float:
    """Run pieces that wait for gradients until a slot is full; return when the rank is free.

    A rank may postpone these pieces, because no rank waits for them before the end of the step.

    Args:
        left: (unit, group, microbatch, pieces, seconds of each), in order; finished entries are
            removed.
        ends: end of the slot; no piece starts that would overrun it by more than `OVER` of its
            length.
        done: arrival time of a microbatch's gradients, [microbatches, groups].
    """
    while left:
        _, group, microbatch, count, seconds = left[0]
        start = max(time, float(done[microbatch, group]))
        over = ends + OVER * seconds
        fits = count if start + count * seconds <= over else int(max(0.0, over - start) // seconds)
        if fits:
            time = start + fits * seconds
        if fits < count:
            left[0][3] -= fits
            break
        left.popleft()
    return time


Runs = list[tuple[int, float]]  # (number of pieces, seconds of each)
_Slice = tuple[int, int, int, int, Runs, bool]


def _work(
    plan: BubblePlan, units: Units, replicas: int
) -> Mapping[tuple[int, int, int], list[_Slice]]:
    """Return the ordered work of each (stage, slot, 0 for forward or 1 for backward).

    An entry is (unit, replica, home replica, microbatch, runs, True if it completes a unit's
    forward).
    """
    cut = plan.pieces
    home, microbatch = units.home.tolist(), units.microbatch.tolist()
    columns = (units.forward / cut, units.again / cut, units.backward / cut)
    forward, again, backward = (column.tolist() for column in columns)
    kept = plan.kept.tolist()
    found: dict[tuple[int, int, int], list[_Slice]] = defaultdict(list)
    for rank, stage in enumerate(plan.stage.tolist()):
        replica = rank % replicas
        for unit, slot, begin, end in plan.forward[rank]:
            runs = [(end - begin, forward[unit])]
            entry = (unit, replica, home[unit], microbatch[unit], runs, end == cut)
            found[stage, slot, 0].append(entry)
        for unit, slot, begin, end in plan.backward[rank]:
            spared = max(0, min(end, kept[unit]) - begin)
            runs = [(spared, backward[unit]), (end - begin - spared, again[unit])]
            runs = [run for run in runs if run[0]]
            entry = (unit, replica, home[unit], microbatch[unit], runs, False)
            found[stage, slot, 1].append(entry)
    return found


@dataclass(frozen=True)
class BubbleStep:
    """A step with vision work in its bubbles, in seconds unless stated otherwise.

    Attributes:
        text: step with text only.
        load: vision work, mean of all ranks.
        bubble: bubble of the text-only pipeline, mean of all ranks.
        upfront, after: planned work before and after the passes.
        total: the whole step.
        kept_gib: largest sum of kept activations on a rank, in GiB, as if all were live at once.
        planning: time of one core to plan the units and check the plan.
    """

    text: float
    load: float
    bubble: float
    upfront: float
    after: float
    total: float
    kept_gib: float
    planning: float


def bubble_step(
    plan: GlobalPlan, case: Case, way: Bubbles, chunks: int | None = None
) -> BubbleStep:
    """Plan a step's vision work into the bubbles, check the plan and run it.

    Args:
        chunks: as in `backbone.pipeline`.
    """
    config = config_of(case)
    config = config.replace(data=config.data.replace(order_rows=way.order_rows))
    text = pipeline(config, case.assumed, chunks)
    stage = np.arange(case.ranks) // config.layout.dp
    assert np.array_equal(np.arange(case.ranks) % config.layout.dp, Ranks(config.layout, 8).replica)
    begin = time.process_time()
    units = units_of(plan, config, case.assumed)
    lines = [text.line]
    if way.gather:
        waits = least_waits(units, way.filling)
        lines = [gathered(text.schedule, text.line, least, text.send) for least in waits]
    best, found = plan_bubbles(units, text.schedule, lines, stage, way.filling)
    text = replace(text, line=lines[best])
    check(found)
    planning = time.process_time() - begin
    off = scattered(len(plan.items), plan.step, case.seed, way.scatter)
    true = units_of(plan, config, case.assumed, off)
    sums = gradient_sum_seconds(config, case.assumed)
    seconds = run_through(found, true, text, way.filling, config.layout.ep, way.put_off, sums)
    passes = (text.forward + text.backward).sum() / config.layout.pp
    share = found.kept / found.pieces
    spent = true.forward + true.again - share * (true.again - true.backward)
    kept = np.bincount(found.rank, share * units.kept_bytes, case.ranks)
    return BubbleStep(
        text=text.line.total,
        load=float(spent.sum()) / case.ranks,
        bubble=text.line.total - float(passes),
        upfront=found.upfront,
        after=found.after,
        total=seconds + 2 * case.assumed.phase_seconds,
        kept_gib=float(kept.max()) / GIB if len(kept) else 0.0,
        planning=planning,
    )


KEPT_GIB = 40


def _kept(gib: int, pieces: int = Filling.pieces) -> Filling:
    return Filling(room_bytes=gib * GIB, pieces=pieces)


WAYS = {
    "drawn": Bubbles("rows as they are drawn", order_rows="as_drawn"),
    "light": Bubbles("light rows first and last"),
    "short": Bubbles("the same, short waits left as they are", gather=False),
    "all": Bubbles("light rows, nothing put off, as on CUDA", put_off=False),
    "kept8": Bubbles("light rows, activations kept in 8 GiB", filling=_kept(8)),
    "kept16": Bubbles("light rows, activations kept in 16 GiB", filling=_kept(16)),
    "kept": Bubbles(f"light rows, activations kept in {KEPT_GIB} GiB", filling=_kept(KEPT_GIB)),
    "halves": Bubbles("the same, blocks cut in equal halves", filling=_kept(KEPT_GIB, 54)),
    "whole": Bubbles("light rows, items in one piece", filling=Filling(pieces=1)),
    "edges": Bubbles(
        "light rows, only in the first and the last slot", filling=Filling(edges=True)
    ),
    "known": Bubbles(
        "light rows, costs known, no margin", filling=Filling(margin=1.0), scatter=0.0
    ),
}


@dataclass(frozen=True)
class BubbleCase:
    """Steps to simulate, and the ways to fill their bubbles; `chunks` as in `backbone.pipeline`."""

    case: Case
    chunks: int | None
    ways: tuple[str, ...]


def bubble_grid(quick: bool) -> Iterator[BubbleCase]:
    """Yield the cases of the tables."""
    shares, more = (0.1, 0.3, 0.5), ("light", "all", "kept8", "kept16", "kept")
    if quick:
        yield BubbleCase(Case(64, shares[0], 1), None, ("light",))
        return
    for vision in shares:
        yield BubbleCase(Case(256, vision, 4), None, tuple(WAYS))
        yield BubbleCase(Case(256, vision, 4), 4, ("drawn", *more))
    for ranks in (1024, 4096):
        for vision in shares:
            yield BubbleCase(Case(ranks, vision, 4), None, more)


def run_bubbles(one: BubbleCase, library: Library) -> dict[str, dict[str, Any]]:
    """Simulate a case; return efficiency, its error and mean seconds of the parts, by way."""
    found: dict[str, dict[str, Any]] = {}
    for name in one.ways:
        steps = [
            bubble_step(plan, one.case, WAYS[name], one.chunks)
            for plan in library.steps(config_of(one.case).data, one.case.num_steps)
        ]
        totals = np.array([step.total for step in steps])
        spread = float(totals.std(ddof=1)) if len(totals) > 1 else 0.0
        efficiency = steps[0].text / float(totals.mean())
        found[name] = {
            "efficiency": efficiency,
            "error": efficiency * spread / float(totals.mean()) / np.sqrt(len(totals)),
            "parts": {
                key: float(np.mean([asdict(step)[key] for step in steps]))
                for key in asdict(steps[0])
            },
        }
    return found
