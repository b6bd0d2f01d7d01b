"""Plans which rank runs which vision work in which pipeline bubble. Pure: all ranks agree.

A unit is the encoder's work on one item, or on several small items of a microbatch. Its forward
pass produces output that a first-stage rank needs when it starts the microbatch. Its backward pass
needs the gradient that this rank has once it finishes the microbatch. The encoder may stop between
its blocks, so units are cut into pieces. The backward pass recomputes each piece first, unless its
activations were kept (`unit_pass`). A rank runs piece k of its units in the order of units; it may
begin a unit before the previous unit is complete. It works in slots: slot n of a stage is between
its passes n - 1 and n; the first slot precedes all passes and the last one follows them. Work that
does not fit between the passes goes into the first and last slots; `upfront` and `after` give the
seconds that this adds to the step.

A plan must not deadlock. An order that follows one timeline cannot deadlock, whatever the real
durations of pieces and passes, so all units are placed on a single timeline of the schedule.
As a second check, `bubble_check` simulates the result without durations.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.dep.timeline import Pass, Schedule, Timeline

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Units:
    """Vision work of a step, in the order of all messages. Columns of equal length.

    Attributes:
        home: replica that needs the unit.
        microbatch: index in the replica's execution order; non-decreasing.
        forward, again, backward: seconds of the forward pass, of the backward pass with full
            recompute, and of the backward pass without recompute.
        kept_bytes: bytes of all its activations, in addition to the inputs of its pieces.
    """

    home: Ints
    microbatch: Ints
    forward: Floats
    again: Floats
    backward: Floats
    kept_bytes: Ints

    def __len__(self) -> int:
        return len(self.home)

    def joined(self, patches: Ints, most: int) -> tuple[Self, Ints]:
        """Join small items of a replica's microbatch, in their order, into units.

        Self holds one unit for each item of the step that a single rank encodes.

        Args:
            patches: patches of each item.
            most: largest number of patches in a unit of several items.

        Returns:
            units in the order of microbatches, replicas and items, and the unit of each item.
        """
        order = np.lexsort((self.home, self.microbatch))
        joined, unit, filled, last = np.empty(len(self), np.int64), -1, 0, None
        columns = (order, self.home[order], self.microbatch[order], patches[order])
        for item, home, microbatch, size in zip(*(column.tolist() for column in columns)):
            if (home, microbatch) != last or filled + size > most:
                unit, filled, last = unit + 1, 0, (home, microbatch)
            joined[item] = unit
            filled += size
        first = np.flatnonzero(np.diff(joined[order], prepend=-1))
        sums = {
            name: np.add.reduceat(column[order], first)
            for name, column in vars(self).items()
            if name not in ("home", "microbatch")
        }
        home, microbatch = self.home[order][first], self.microbatch[order][first]
        return type(self)(home, microbatch, **sums), joined

    def times(self, factors: tuple[float, float, float]) -> Self:
        """Return the units with their seconds of each kind multiplied by `factors`."""
        forward, again, backward = factors
        return replace(
            self,
            forward=self.forward * forward,
            again=self.again * again,
            backward=self.backward * backward,
        )


@dataclass(frozen=True)
class Filling:
    """Parameters for filling bubbles.

    Attributes:
        margin: factor on the planned seconds of a piece in a bubble.
        transport: seconds from the end of a forward pass until its output reaches the first stage;
            the same for the gradient.
        slot_seconds: overhead of each used bubble.
        pieces: number of pieces of a unit's forward and backward pass; 1: no cuts.
        edges: True to use only the slots before a stage's first pass and after its last.
        room_bytes: bytes of a rank for kept activations.
    """

    margin: float = 1.15
    transport: float = 0.002
    slot_seconds: float = 0.001
    pieces: int = 27
    edges: bool = False
    room_bytes: int = 0


class Slice(NamedTuple):
    """Consecutive pieces [begin, end) of a unit that a rank runs in one slot, of one kind."""

    unit: int
    slot: int
    begin: int
    end: int


@dataclass(frozen=True)
class BubblePlan:
    """Assignment of vision work to ranks and slots.

    Attributes:
        schedule: schedule of a replica's pipeline.
        stage: stage of each rank, [ranks].
        microbatch: microbatch of each unit, [units].
        rank: rank that runs each unit, [units].
        kept: number of first pieces of the backward pass whose activations are kept, [units].
        pieces: number of pieces of a unit's forward pass, and of its backward pass.
        forward: forward slices of each rank, in time order; piece k of its units in the order of
            units.
        backward: the same for backward passes.
        together: number of final backward pieces that each rank starts once all gradients have
            arrived, [ranks]. The rank runs them piece by piece over all their units, so that the
            gradients of the weights become complete one after another.
        upfront, after: seconds added before and after the passes.
    """

    schedule: Schedule
    stage: Ints
    microbatch: Ints
    rank: Ints
    kept: Ints
    pieces: int
    forward: list[list[Slice]]
    backward: list[list[Slice]]
    together: Ints
    upfront: float
    after: float


# Small items are encoded together, because each pass has a fixed cost on a device. A joined unit
# has at most JOINED_PATCHES patches, the size of a usual picture, and at most 1 / JOINED_PART of a
# rank's patches in a step, so that ranks stay balanced.
JOINED_PATCHES = 4_096
JOINED_PART = 8


def most_joined(patches: int, ranks: int) -> int:
    """Return the largest number of patches in a unit of several items.

    Args:
        patches: patches of all items of a step.
        ranks: number of ranks that encode them.
    """
    return min(JOINED_PATCHES, patches // (JOINED_PART * ranks))


# Assumed relative standard deviation of a unit's seconds, independent between units. Of two ranks
# with equal work, the one with few large units may well end later.
SCATTER = 0.1
# Standard deviations that a rank is assumed to be late: when ranks are chosen, and when the ends of
# stages are compared. The last of thousands of ranks ends the step.
CHOSEN_LATE, LAST_LATE = 1.5, 3.5
# Fraction of a backward piece that may exceed the time of its slot before the piece is postponed.
# Most passes have some slack, and a gap may be no longer than the planned seconds of a piece.
OVER = 0.5
# Margins of the first and last slot when ranks are chosen, as multiples of the margin of slots
# between passes. Late work in the first slot delays all passes. Placement uses no margin in the
# last slot, but the slowest rank there ends the step.
FIRST_MARGIN, LAST_MARGIN = 1.5, 2 / 3
# Margins for a rank's forward work after placement; the first that does not lengthen the step is
# used.
SPARE = (3.0, 2.0, 1.5)
# Margins for a rank whose work does not fit; they are tried before all ranks have to start earlier.
LESS = (1.0, 0.75, 0.5)
# Rounds in which ranks are chosen again. In each, a stage loses DAMPING of the seconds by which it
# would end later than the others. Its end is estimated on up to SAMPLE of its ranks, by trial
# placement, as the value that one in LATER of them exceeds.
ROUNDS, DAMPING = 2, 0.5
SAMPLE, LATER = 32, 8
# Smallest usable fraction of a stage's gaps when ranks are chosen, however large pieces are.
LEAST_USE = 0.25


# Free time of ranks -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A wait of a stage: its begin and end, and the planned slowdown of work in it."""

    slot: int
    begin: float
    end: float
    margin: float


def gaps_of(stage: int, line: Timeline, filling: Filling) -> list[Gap]:
    """Return the slots of a stage that have time, and always the first and the last slot.

    The first and last slot can extend beyond the passes; work placed there has no margin.
    """
    start, end = line.start[stage], line.end[stage]
    inside = [
        Gap(n, float(end[n - 1]), float(start[n]) - filling.slot_seconds, filling.margin)
        for n in range(1, len(start))
        if not filling.edges and start[n] - end[n - 1] > filling.slot_seconds
    ]
    first = Gap(0, 0.0, max(0.0, float(start[0]) - filling.slot_seconds), filling.margin)
    return [first, *inside, Gap(len(start), float(end[-1]), line.total, 1.0)]


def least_waits(units: Units, filling: Filling) -> list[float]:
    """Return candidate minimum lengths of waits; shorter waits are merged (`timeline.gathered`).

    Each candidate fits the largest piece. With kept activations pieces have two sizes, and only a
    comparison of the plans shows which length loses least: a wait may fit two of the shorter
    pieces, or two of the longer ones.
    """
    again, backward = float(units.again.max(initial=0.0)), float(units.backward.max(initial=0.0))
    work = [again, 2 * backward, 2 * again] if filling.room_bytes else [again]
    each = filling.margin * (1 + 1e-9) / filling.pieces
    return [filling.slot_seconds + seconds * each for seconds in work]


@dataclass(frozen=True)
class Borders:
    """Times at which the first stage starts and finishes each microbatch, [microbatches].

    Media must be encoded before `need`; their gradients are available from `done` on. Both include
    the transport.
    """

    need: Floats
    done: Floats


def borders_of(schedule: Schedule, line: Timeline, transport: float) -> Borders:
    """Return the borders of all microbatches on a timeline."""
    place = {one: n for n, one in enumerate(schedule.passes[0])}
    numbers = range(schedule.microbatches)
    need = line.start[0][[place[Pass(False, 0, m)] for m in numbers]] - transport
    done = line.end[0][[place[Pass(True, 0, m)] for m in numbers]] + transport
    return Borders(need, done)


# Assignment to ranks ------------------------------------------------------------------------------


class _Room:
    """Remaining capacity of ranks in seconds without margin, for every potentially binding set.

    Forward passes with deadlines, earliest first, fit a rank if for each microbatch all work due
    before it fits into the earlier bubbles. The same holds for backward passes from the other end.
    In addition, both together must fit into all bubbles. `upfront` and `after` are extra seconds of
    all ranks.

    Attributes:
        forward, backward: [microbatches, ranks]; `forward[m]` is the least capacity before any
            deadline from m on, `backward[m]` the least capacity after any release up to m.
        both: [ranks].
    """

    def __init__(self, gaps: Sequence[Sequence[Gap]], stage: Ints, borders: Borders, taken: Floats):
        """`taken`: seconds after all passes to remove from each stage's capacity, [stages]."""
        forward, backward, both = [], [], []
        for mine in gaps:
            begin, end, margin = np.array([(g.begin, g.end, g.margin) for g in mine]).T
            before = np.minimum(end, borders.need[:, None]) - begin
            behind = end - np.maximum(begin, borders.done[:, None])
            forward.append((np.maximum(before, 0.0) / margin).sum(axis=1))
            backward.append((np.maximum(behind, 0.0) / margin).sum(axis=1))
            both.append(((end - begin) / margin).sum())
        # A deadline before the first microbatch's start leaves zero capacity, not a negative one.
        self.forward = np.array(forward).T[:, stage]
        self.backward = np.array(backward).T[:, stage]
        self.forward = np.minimum.accumulate(self.forward[::-1], axis=0)[::-1].copy()
        self.backward = np.minimum.accumulate(self.backward, axis=0).copy()
        self.backward -= taken[stage]
        self.both = np.array(both)[stage] - taken[stage]
        self.upfront = self.after = 0.0

    def rank_for(self, microbatch: int, forward: Floats, backward: Floats) -> int:
        """Return the rank that keeps most capacity, or else lengthens the step least.

        Args:
            forward, backward: seconds that a unit needs on each rank, [ranks].
        """
        before = self.forward[microbatch] - forward + self.upfront
        behind = self.backward[microbatch] - backward + self.after
        both = self.both - forward - backward + (self.upfront + self.after)
        least = np.minimum(both, np.minimum(3 * before, 1.5 * behind))
        rank = int(least.argmax())
        if least[rank] >= 0:
            return rank
        early, late = np.maximum(-before, 0.0), np.maximum(-behind, 0.0)
        late += np.maximum(-both - early - late, 0.0)
        rank = int((early + late).argmin())
        self.upfront += float(early[rank])
        self.after += float(late[rank])
        return rank

    def take(self, rank: int, microbatch: int, forward: float, backward: float) -> None:
        """Assign a unit to a rank."""
        column = self.forward[:, rank]
        column[microbatch:] -= forward
        np.minimum(column[:microbatch], column[microbatch], out=column[:microbatch])
        column = self.backward[:, rank]
        column[: microbatch + 1] -= backward
        np.minimum(column[microbatch:], column[microbatch], out=column[microbatch:])
        self.both[rank] -= forward + backward


def _waste(gaps: Sequence[Sequence[Gap]], piece: Floats) -> Floats:
    """Return the ratio of needed capacity to a unit's seconds on each stage, [units, stages].

    Gaps are filled with whole pieces. The remainder counts as lost, although later units use some.
    """
    found = []
    for mine in gaps:
        size = np.array([(gap.end - gap.begin) / gap.margin for gap in mine])
        used = np.floor(size / piece[:, None]) * piece[:, None]
        whole = float(size.sum())
        found.append(used.sum(axis=1) / whole if whole else np.ones(len(piece)))
    return 1.0 / np.maximum(np.array(found).T, LEAST_USE)


def _assigned(
    units: Units, room: _Room, gaps: Sequence[Sequence[Gap]], stage: Ints, filling: Filling
) -> tuple[Ints, Ints]:
    """Return the rank and the number of kept pieces of each unit, assigning the largest first."""
    cut = filling.pieces
    forward, again, backward = (
        seconds[:, None] * _waste(gaps, seconds / cut)
        for seconds in (units.forward, units.again, units.backward)
    )
    spared, keeps = again - backward, np.zeros(len(room.both), np.int64)
    rank, kept = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64)
    piece_bytes = np.maximum(-(-units.kept_bytes // cut), 1)
    free = np.full(len(room.both), filling.room_bytes, np.int64)
    squares = np.zeros(len(room.both))  # sums of squared backward seconds of each rank
    roots = np.zeros(len(room.both))  # square roots of these sums
    for unit in np.argsort(-(units.forward + units.again), kind="stable").tolist():
        microbatch, size = int(units.microbatch[unit]), int(piece_bytes[unit])
        early, late = forward[unit].take(stage), again[unit].take(stage)
        if filling.room_bytes:
            keeps = np.minimum(free // size, cut)
            late -= keeps / cut * spared[unit].take(stage)
        more = squares + late**2
        late += CHOSEN_LATE * SCATTER * (np.sqrt(more) - roots)
        one = room.rank_for(microbatch, early, late)
        room.take(one, microbatch, float(early[one]), float(late[one]))
        rank[unit], kept[unit], squares[one] = one, keeps[one], more[one]
        roots[one] = np.sqrt(more[one])
        free[one] -= size * keeps[one]
    return rank, kept


# Placement in slots -------------------------------------------------------------------------------


class _Job(NamedTuple):
    """Pieces of a unit as runs of (end of the run, seconds each), with release and deadline."""

    unit: int
    runs: tuple[tuple[int, float], ...]
    after: float
    before: float


def _filled(
    jobs: Sequence[_Job], cursor: list[float], gaps: Sequence[Gap]
) -> tuple[list[Slice], float]:
    """Put pieces into gaps, in order and as early as possible.

    If a job's next piece does not fit the rest of a gap, later jobs use the rest, each only as far
    as the previous job has progressed. So piece k of all jobs runs in the order of jobs, which is
    the order in which gradients of its weights are added.

    Args:
        cursor: start of the free time in each gap; updated.

    Returns:
        the slices, and the seconds of the first job that does not fit before its deadline; 0 if all
        jobs fit.
    """
    found: list[Slice] = []
    done = [0] * len(jobs)
    at = 0

    def put(number: int, until: int) -> None:
        job, gap, piece = jobs[number], gaps[at], done[number]
        begin = max(cursor[at], job.after)
        room = min(gap.end, job.before) - begin
        if piece == until or room < 0:
            return
        for end, seconds in job.runs:
            left = min(end, until) - done[number]
            if left > 0:
                took = seconds * gap.margin
                fits = _fitting(left, took, room)
                room -= fits * took
                begin += fits * took
                done[number] += fits
                if fits < left:
                    break
        if done[number] > piece:
            cursor[at] = begin
            found.append(Slice(job.unit, gap.slot, piece, done[number]))

    for number, job in enumerate(jobs):
        pieces, seconds = job.runs[-1]
        while True:
            if at == len(gaps) or gaps[at].begin >= job.before:
                return found, (pieces - done[number]) * seconds
            put(number, pieces)
            if done[number] == pieces:
                break
            for behind in range(number + 1, len(jobs)):
                if not done[behind - 1]:
                    break
                put(behind, done[behind - 1])
            at += 1
    return found, 0.0


def _fitting(pieces: int, seconds: float, room: float) -> int:
    """Return the number of pieces, at most `pieces`, that fit into `room` seconds."""
    return pieces if pieces * seconds <= room else max(0, int((room + 1e-9) // seconds))


def _placed(
    forward: Sequence[_Job],
    backward: Sequence[_Job],
    gaps: Sequence[Gap],
    wider: Sequence[Gap],
    upfront: float,
) -> tuple[list[Slice], list[Slice], float, float]:
    """Place the work of one rank.

    Args:
        forward: jobs in the order of units, each with the deadline of its output.
        backward: jobs in the order of units, each released when its gradient arrives.
        gaps: gaps of its stage; `wider`: the same with the margin of forward passes.
        upfront: initial seconds before the passes; increased if they are not enough.

    Returns:
        the slices of both kinds, the seconds needed before the passes, and the end.
    """
    while True:
        first = Gap(gaps[0].slot, gaps[0].begin - upfront, gaps[0].begin, 1.0)
        wide = [first, *gaps]
        cursor = [gap.begin for gap in wide]
        early, short = _filled(forward, cursor, [first, *wider])
        if not short:
            break
        upfront += short * (1 + 1e-9)
    late, _ = _filled(backward, cursor, wide)
    return early, late, upfront, cursor[-1]


def _widened(margin: float, times: float) -> float:
    """Return a margin whose excess over 1 is multiplied by `times`."""
    return 1.0 + times * (margin - 1.0)


class _Work:
    """Work of each rank, as jobs."""

    def __init__(
        self, units: Units, rank: Ints, kept: Ints, gaps: Sequence[Sequence[Gap]],
        stage: Ints, borders: Borders, filling: Filling,
    ):  # fmt: skip
        cut = filling.pieces
        # The last gap has no end. A rank with less work than the others then has slack at the end
        # of the step, where underestimated costs do least harm.
        self.gaps = [[*mine[:-1], replace(mine[-1], end=math.inf)] for mine in gaps]
        self.stage = stage.tolist()
        self._with_margin: dict[tuple[int, float], Sequence[Gap]] = {}
        self.jobs: list[tuple[_Job, _Job]] = []
        columns = (units.forward, units.again, units.backward, units.microbatch, kept)
        for unit, (forward, again, backward, microbatch, keeps) in enumerate(
            zip(*(column.tolist() for column in columns))
        ):
            need, done = float(borders.need[microbatch]), float(borders.done[microbatch])
            early = _Job(unit, ((cut, forward / cut),), -math.inf, need)
            late = _Job(unit, ((keeps, backward / cut), (cut, again / cut)), done, math.inf)
            self.jobs.append((early, late))
        self.units: list[list[int]] = [[] for _ in self.stage]
        for unit, one in enumerate(rank.tolist()):
            self.units[one].append(unit)

    def placed(
        self, rank: int, upfront: float, spare: float = 1.0
    ) -> tuple[list[Slice], list[Slice], float, float]:
        """Place the units of a rank; see `_placed`."""
        units = self.units[rank]
        early, late = zip(*(self.jobs[unit] for unit in units)) if units else ((), ())
        stage = self.stage[rank]
        return _placed(early, late, self.gaps[stage], self._wider(stage, spare), upfront)

    def _wider(self, stage: int, spare: float) -> Sequence[Gap]:
        """Return a stage's gaps with `spare` times the margin."""
        found = self._with_margin.get((stage, spare))
        if found is None:
            found = [replace(one, margin=_widened(one.margin, spare)) for one in self.gaps[stage]]
            self._with_margin[stage, spare] = found
        return found

    def widest(
        self, rank: int, upfront: float, end: float, margins: Sequence[float]
    ) -> tuple[list[Slice], list[Slice], float, float] | None:
        """Place a rank's units with the first of `margins` that does not lengthen the step."""
        for spare in margins:
            found = self.placed(rank, upfront, spare)
            if found[2] <= upfront and found[3] <= end:
                return found
        return None

    def ends(self) -> tuple[float, Floats]:
        """Return the seconds that ranks need before the passes, and each stage's end, [stages].

        The ends are estimated on a sample of ranks, for units that take longer than planned. A
        stage without ranks gets the mean end of the others.
        """
        upfront, found = 0.0, np.full(len(self.gaps), np.nan)
        for stage in sorted(set(self.stage)):
            ranks = [rank for rank, one in enumerate(self.stage) if one == stage]
            last = []
            for rank in ranks[:: -(-len(ranks) // SAMPLE)]:
                _, late, needed, end = self.placed(rank, 0.0)
                upfront = max(upfront, needed)
                last.append(end + LAST_LATE * SCATTER * self._root(late))
            found[stage] = sorted(last)[-1 - len(last) // LATER]
        return upfront, np.where(np.isnan(found), np.nanmean(found), found)

    def _root(self, late: Sequence[Slice]) -> float:
        """Return the root of the summed squares of the units' seconds after all passes."""
        took: dict[int, float] = defaultdict(float)
        for unit, seconds in self._behind(late):
            took[unit] += seconds
        return math.sqrt(sum(seconds**2 for seconds in took.values()))

    def _behind(self, late: Sequence[Slice]) -> Iterator[tuple[int, float]]:
        """Yield (unit, seconds) of a rank's pieces after all passes, last piece first."""
        for unit, slot, begin, end in reversed(late):
            if slot != self.gaps[0][-1].slot:
                return
            (kept, spared), (_, again) = self.jobs[unit][1].runs
            for piece in reversed(range(begin, end)):
                yield unit, spared if piece < kept else again

    def pieces_within(self, late: Sequence[Slice], seconds: float) -> int:
        """Return how many of a rank's last pieces after all passes fit into `seconds` together."""
        found = 0
        for _, piece in self._behind(late):
            seconds -= piece
            if seconds < 0:
                break
            found += 1
        return found


class Choice(NamedTuple):
    """Assignment of units to ranks.

    Attributes:
        rank: rank of each unit, [units].
        kept: number of each unit's pieces whose activations are kept, [units].
        longer: seconds added to the step, if units take longer than planned.
        late: seconds by which the ranks of each stage end later than the mean, [stages].
    """

    rank: Ints
    kept: Ints
    longer: float
    late: Floats


def assign_units(
    units: Units, schedule: Schedule, line: Timeline, stage: Ints, filling: Filling,
    taken: Floats | None = None,
) -> Choice:  # fmt: skip
    """Choose a rank for each unit.

    Args:
        units: units from `Units.joined`.
        schedule: schedule of a replica's pipeline.
        line: timeline of the schedule with text only.
        stage: pipeline stage of each participating rank, [ranks].
        filling: parameters for filling bubbles.
        taken: seconds by which the ranks of each stage should end earlier, [stages].
    """
    borders = borders_of(schedule, line, filling.transport)
    gaps, careful = [gaps_of(one, line, filling) for one in range(schedule.stages)], []
    for first, *inside, last in gaps:
        first = replace(first, margin=_widened(filling.margin, FIRST_MARGIN))
        last = replace(last, margin=_widened(filling.margin, LAST_MARGIN))
        careful.append([first, *inside, last])
    taken = np.zeros(schedule.stages) if taken is None else taken
    room = _Room(careful, stage, borders, taken)
    rank, kept = _assigned(units, room, careful, stage, filling)
    work = _Work(units, rank, kept, gaps, stage, borders, filling)
    upfront, ends = work.ends()
    longer = upfront + max(0.0, float(ends.max()) - line.total)
    return Choice(rank, kept, longer, ends - ends.mean())


def choose(attempt: Callable[[int, Floats], Choice], lines: int, stages: int) -> tuple[int, Choice]:
    """Choose ranks on several timelines, then refine the choice on the one with the shortest step.

    Args:
        attempt: calls `assign_units` for the timeline of this index, with `taken`.
        lines: number of timelines.
        stages: number of pipeline stages.

    Returns:
        the index of the timeline, and the choice with the shortest step.
    """
    taken = np.zeros(stages)
    found = [attempt(number, taken) for number in range(lines)]
    number = min(range(lines), key=lambda one: found[one].longer)
    best = last = found[number]
    for _ in range(ROUNDS if best.longer else 0):
        taken = taken + DAMPING * last.late
        last = attempt(number, taken)
        best = min(best, last, key=lambda one: one.longer)
    return number, best


def place_units(
    units: Units, rank: Ints, kept: Ints, schedule: Schedule, line: Timeline,
    stage: Ints, filling: Filling,
) -> BubblePlan:  # fmt: skip
    """Place each unit into slots of its rank.

    Args:
        units, schedule, line, stage, filling: as for `assign_units`.
        rank, kept: rank and number of kept pieces of each unit.
    """
    borders = borders_of(schedule, line, filling.transport)
    gaps = [gaps_of(one, line, filling) for one in range(schedule.stages)]
    work = _Work(units, rank, kept, gaps, stage, borders, filling)
    ranks = range(len(stage))
    placed = [work.placed(one, 0.0) for one in ranks]
    short = [one for one in ranks if placed[one][2]]
    # All ranks start as early as the slowest rank needs.
    upfront = max((work.placed(one, 0.0, LESS[-1])[2] for one in short), default=0.0)
    for one in ranks if upfront else short:
        placed[one] = work.widest(one, upfront, math.inf, LESS) or placed[one]
    end = max(line.total, *(last for *_, last in placed))
    for one in ranks:
        placed[one] = work.widest(one, upfront, end, SPARE) or placed[one]
    forward, backward, _, _ = zip(*placed)
    arrived = float(borders.done.max())
    together = [work.pieces_within(late, last - arrived) for _, late, _, last in placed]
    return BubblePlan(
        schedule, stage, units.microbatch, rank, kept, filling.pieces, list(forward),
        list(backward), np.array(together), upfront, end - line.total,
    )  # fmt: skip


def plan_bubbles(
    units: Units, schedule: Schedule, lines: Sequence[Timeline], stage: Ints, filling: Filling
) -> tuple[int, BubblePlan]:
    """Choose ranks and slots of all units; see `assign_units`.

    Args:
        lines: candidate timelines; the one with the shortest step is used.

    Returns:
        the index of that timeline, and the plan.
    """

    def attempt(number: int, taken: Floats) -> Choice:
        return assign_units(units, schedule, lines[number], stage, filling, taken)

    number, choice = choose(attempt, len(lines), schedule.stages)
    given = schedule, lines[number], stage, filling
    return number, place_units(units, choice.rank, choice.kept, *given)
