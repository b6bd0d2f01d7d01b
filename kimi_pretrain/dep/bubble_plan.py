"""Which rank does which vision work in which bubble of its pipeline. Pure: all ranks agree.

A unit is the encoder's work on one item, or on several small ones of a microbatch together: a
forward pass, whose output a first-stage rank needs when it starts the microbatch, and later a
backward pass, whose gradient comes when that rank is through with the microbatch. The encoder may
stop between its blocks, so a unit is cut into pieces. Each piece is computed again before it is
taken back, but for those whose activations are kept (`unit_pass`). A rank does piece k of its units
in the order of units; it may begin a unit before it is through with the one before. It works in its
slots: slot n of a stage lies between its passes n - 1 and n, the first one before all passes, the
last one behind them. What does not fit between the passes goes there: `upfront` and `after` say how
much longer the step is for it.

No plan may let ranks wait for each other in a circle. Whatever one timeline orders is free of that,
whatever pieces and passes really take; so units are placed on one timeline of the schedule, and
`bubble_check` runs the result through without durations all the same.
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
    """The vision work of a step, in the order of all messages. Columns of equal length.

    Attributes:
        home: replica that needs it.
        microbatch: of the replica, as it runs; rising.
        forward, again, backward: seconds of its forward pass, of its backward pass where all is
            computed again, and where nothing is.
        kept_bytes: what its activations take if all are kept, beside what its pieces begin with.
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
        """Join items of a replica's microbatch, in their order, while they have few patches.

        Self: a unit for each item of the step that one rank is to encode.

        Args:
            patches: of each.
            most: patches of a unit of several items.

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
        """Return the units with their seconds of each kind times these."""
        forward, again, backward = factors
        return replace(
            self,
            forward=self.forward * forward,
            again=self.again * again,
            backward=self.backward * backward,
        )


@dataclass(frozen=True)
class Filling:
    """How bubbles are filled.

    Attributes:
        margin: a piece in a bubble is planned to take so many times its seconds.
        transport: seconds from the end of a forward pass until its output is at the first stage,
            and from there back.
        slot_seconds: lost in each bubble that is used.
        pieces: into which either pass of a unit can be cut; 1: not at all.
        edges: only before a stage's first pass and behind its last.
        room_bytes: of a rank, for activations that are kept.
    """

    margin: float = 1.15
    transport: float = 0.002
    slot_seconds: float = 0.001
    pieces: int = 27
    edges: bool = False
    room_bytes: int = 0


class Slice(NamedTuple):
    """Pieces of a unit that a rank does in one slot: begin to end of all pieces of that kind."""

    unit: int
    slot: int
    begin: int
    end: int


@dataclass(frozen=True)
class BubblePlan:
    """Who does what when.

    Attributes:
        schedule: of a replica's pipeline.
        stage: of each rank, [ranks].
        microbatch: of each unit, [units].
        rank: that does it, [units].
        kept: first pieces of its backward pass whose activations are kept, [units].
        pieces: of a unit's forward pass, and of its backward pass.
        forward: of each rank its slices of forward passes, in time; piece k of its units in the
            order of units.
        backward: the same of backward passes.
        together: pieces of each rank's backward passes, the last ones, that it begins when all
            gradients are there, [ranks]. It does them piece by piece for all their units, so that
            weights' gradients are complete one after the other.
        upfront, after: seconds before and behind the passes.
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


# Small items are encoded together: each pass costs a device something whatever is in it. A unit of
# several has no more patches than this, a usual picture's; and no more than this part of what a
# rank encodes in a step, or ranks would be uneven.
JOINED_PATCHES = 4_096
JOINED_PART = 8


def most_joined(patches: int, ranks: int) -> int:
    """Return how many patches a unit of several items may have.

    Args:
        patches: of all items of a step.
        ranks: that encode them.
    """
    return min(JOINED_PATCHES, patches // (JOINED_PART * ranks))


# How far off a unit's seconds are taken to be, each by itself, as a share of them (one standard
# deviation): of two ranks with as much to do, one with few large units may well end later.
SCATTER = 0.1
# How many of those a rank is taken to be late: in the choice of ranks, and where ends of stages are
# compared. Of thousands of ranks the last one ends the step.
CHOSEN_LATE, LAST_LATE = 1.5, 3.5
# How much of a backward piece may lie beyond the time of its slot before it is put off: most passes
# may begin somewhat later, and a gap may be no longer than a piece should take.
OVER = 0.5
# Margins as multiples of that of slots between passes. In the choice of ranks: before the first
# pass, where work that takes longer makes all passes late, and behind the last one, which is placed
# without any, and where the slowest rank ends the step.
FIRST_MARGIN, LAST_MARGIN = 1.5, 2 / 3
# Of a rank's forward work, once it is placed: the first of these with which no step is longer.
SPARE = (3.0, 2.0, 1.5)
# And where it has no room with all of its margin, before all ranks have to begin earlier for it.
LESS = (1.0, 0.75, 0.5)
# How often ranks are chosen again, and what part of the seconds by which a stage would end later
# than others is taken from its room then. A stage's end is seen on so many of its ranks, placed on
# trial: it is the one that one in `LATER` of them is later than.
ROUNDS, DAMPING = 2, 0.5
SAMPLE, LATER = 32, 8
# What gaps of a stage are used for at least, in the choice of ranks, however large pieces are.
LEAST_USE = 0.25


# Where a rank is free -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """A wait of a stage: from when to when, and how much slower work is planned to be there."""

    slot: int
    begin: float
    end: float
    margin: float


def gaps_of(stage: int, line: Timeline, filling: Filling) -> list[Gap]:
    """Return the slots of a stage that have room, in time, and the first and the last one anyway.

    The first and the last one can grow beyond the passes: what is put there has no margin.
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
    """Return how long waits could last at least, shorter ones gathered (`timeline.gathered`).

    The largest piece is to fit each of them. Where activations are kept pieces are of two sizes,
    and which waits lose least is seen when the plans are made: two of the shorter ones may fit, or
    two of the longer ones.
    """
    again, backward = float(units.again.max(initial=0.0)), float(units.backward.max(initial=0.0))
    work = [again, 2 * backward, 2 * again] if filling.room_bytes else [again]
    each = filling.margin * (1 + 1e-9) / filling.pieces
    return [filling.slot_seconds + seconds * each for seconds in work]


@dataclass(frozen=True)
class Borders:
    """When the first stage starts each microbatch, and when it is through with it, [microbatches].

    Media must be done before `need`, their gradients are there from `done` on; both with transport.
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


# Who does what ------------------------------------------------------------------------------------


class _Room:
    """What ranks can still take: seconds without margin, for all sets of units that may bind.

    Forward passes with deadlines, earliest first, fit a rank if for each microbatch all that is
    needed until then fits into the bubbles before. Backward passes the same from the other end. And
    both together must fit into all bubbles. `upfront` and `after` are seconds that all ranks have.

    Attributes:
        forward, backward: [microbatches, ranks]; `forward[m]` is the least room before any deadline
            from m on, `backward[m]` the least room behind any release up to m.
        both: [ranks].
    """

    def __init__(self, gaps: Sequence[Sequence[Gap]], stage: Ints, borders: Borders, taken: Floats):
        """`taken`: seconds behind all passes that a stage has less, [stages]."""
        forward, backward, both = [], [], []
        for mine in gaps:
            begin, end, margin = np.array([(g.begin, g.end, g.margin) for g in mine]).T
            before = np.minimum(end, borders.need[:, None]) - begin
            behind = end - np.maximum(begin, borders.done[:, None])
            forward.append((np.maximum(before, 0.0) / margin).sum(axis=1))
            backward.append((np.maximum(behind, 0.0) / margin).sum(axis=1))
            both.append(((end - begin) / margin).sum())
        # Deadlines before the first microbatch's own start leave no room, not less than none.
        self.forward = np.array(forward).T[:, stage]
        self.backward = np.array(backward).T[:, stage]
        self.forward = np.minimum.accumulate(self.forward[::-1], axis=0)[::-1].copy()
        self.backward = np.minimum.accumulate(self.backward, axis=0).copy()
        self.backward -= taken[stage]
        self.both = np.array(both)[stage] - taken[stage]
        self.upfront = self.after = 0.0

    def rank_for(self, microbatch: int, forward: Floats, backward: Floats) -> int:
        """Return the rank that keeps most room, or makes the step longer by the least.

        Args:
            forward, backward: room that a unit takes on each rank, [ranks].
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
        """Give a unit to a rank."""
        column = self.forward[:, rank]
        column[microbatch:] -= forward
        np.minimum(column[:microbatch], column[microbatch], out=column[:microbatch])
        column = self.backward[:, rank]
        column[: microbatch + 1] -= backward
        np.minimum(column[microbatch:], column[microbatch], out=column[microbatch:])
        self.both[rank] -= forward + backward


def _waste(gaps: Sequence[Sequence[Gap]], piece: Floats) -> Floats:
    """Return how much more room than its seconds a unit takes on each stage, [units, stages].

    Gaps are filled with whole pieces. What is left of them counts as lost: units behind use some.
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
    """Return the rank of each unit, and how many of its pieces are kept there: largest first."""
    cut = filling.pieces
    forward, again, backward = (
        seconds[:, None] * _waste(gaps, seconds / cut)
        for seconds in (units.forward, units.again, units.backward)
    )
    spared, keeps = again - backward, np.zeros(len(room.both), np.int64)
    rank, kept = np.zeros(len(units), np.int64), np.zeros(len(units), np.int64)
    piece_bytes = np.maximum(-(-units.kept_bytes // cut), 1)
    free = np.full(len(room.both), filling.room_bytes, np.int64)
    squares = np.zeros(len(room.both))  # of what ranks have to do late
    roots = np.zeros(len(room.both))  # of these
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


# When it is done ----------------------------------------------------------------------------------


class _Job(NamedTuple):
    """Pieces of a unit: runs of (end of the run, seconds of each), and between which times."""

    unit: int
    runs: tuple[tuple[int, float], ...]
    after: float
    before: float


def _filled(
    jobs: Sequence[_Job], cursor: list[float], gaps: Sequence[Gap]
) -> tuple[list[Slice], float]:
    """Put pieces into gaps, in order and as early as can be.

    What is left of a gap where a job's next piece does not fit is used for those behind it, each as
    far as the one before it has come: piece k of all jobs is done in the order of jobs, in which
    gradients of its weights are added up.

    Args:
        cursor: where each gap is free from; moved.

    Returns:
        the slices, and the seconds of the first job that has no room in its time; 0 if all have.
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
    """Return how many of so many pieces fit."""
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
        forward: in the order of units, each until its output is needed.
        backward: the same, each from when its gradient comes.
        gaps: of its stage; `wider`: the same, with the margin of forward passes.
        upfront: seconds before the passes to begin with; more is taken where they do not do.

    Returns:
        the slices of both kinds, the seconds that were needed before the passes, and the end.
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
    """Return a margin with so many times as much to spare."""
    return 1.0 + times * (margin - 1.0)


class _Work:
    """What each rank has to do, as jobs."""

    def __init__(
        self, units: Units, rank: Ints, kept: Ints, gaps: Sequence[Sequence[Gap]],
        stage: Ints, borders: Borders, filling: Filling,
    ):  # fmt: skip
        cut = filling.pieces
        # The last gap has no end. A rank that needs less than the others has then time to spare at
        # the end of the step, where costs that turn out higher do least harm.
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
        """Return a stage's gaps with so many times as much margin."""
        found = self._with_margin.get((stage, spare))
        if found is None:
            found = [replace(one, margin=_widened(one.margin, spare)) for one in self.gaps[stage]]
            self._with_margin[stage, spare] = found
        return found

    def widest(
        self, rank: int, upfront: float, end: float, margins: Sequence[float]
    ) -> tuple[list[Slice], list[Slice], float, float] | None:
        """Place the units of a rank with the first of some margins with which no step is longer."""
        for spare in margins:
            found = self.placed(rank, upfront, spare)
            if found[2] <= upfront and found[3] <= end:
                return found
        return None

    def ends(self) -> tuple[float, Floats]:
        """Return the seconds that ranks need before the passes, and when each stage ends, [stages].

        Seen on some ranks of each, if units take longer than planned. A stage without any rank ends
        when the others do in the mean.
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
        """Return the root of the squares of what units take behind all passes."""
        took: dict[int, float] = defaultdict(float)
        for unit, seconds in self._behind(late):
            took[unit] += seconds
        return math.sqrt(sum(seconds**2 for seconds in took.values()))

    def _behind(self, late: Sequence[Slice]) -> Iterator[tuple[int, float]]:
        """Yield (unit, seconds) of a rank's pieces behind all passes, the last one first."""
        for unit, slot, begin, end in reversed(late):
            if slot != self.gaps[0][-1].slot:
                return
            (kept, spared), (_, again) = self.jobs[unit][1].runs
            for piece in reversed(range(begin, end)):
                yield unit, spared if piece < kept else again

    def pieces_within(self, late: Sequence[Slice], seconds: float) -> int:
        """Return how many of a rank's last pieces behind all passes take no longer together."""
        found = 0
        for _, piece in self._behind(late):
            seconds -= piece
            if seconds < 0:
                break
            found += 1
        return found


class Choice(NamedTuple):
    """Who does what.

    Attributes:
        rank: of each unit, [units].
        kept: how many of its pieces have their activations kept there, [units].
        longer: by how many seconds the step is, where units take longer than planned.
        late: how much later than in the mean the ranks of each stage would end, [stages].
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
        units: as `Units.joined` has them.
        schedule: of a replica's pipeline.
        line: of the schedule with text alone.
        stage: pipeline stage of each rank that may take part, [ranks].
        filling: how.
        taken: seconds that the ranks of each stage are to end earlier, [stages].
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
    """Choose ranks on several timelines, and on the one with the shortest step some times more.

    Args:
        attempt: as `assign_units`, on a timeline of this number, with `taken`.
        lines: number of timelines.
        stages: of the pipeline.

    Returns:
        the number of the timeline, and the choice with the shortest step.
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
    """Put each unit into slots of its rank.

    Args:
        units, schedule, line, stage, filling: as for `assign_units`.
        rank, kept: of each unit.
    """
    borders = borders_of(schedule, line, filling.transport)
    gaps = [gaps_of(one, line, filling) for one in range(schedule.stages)]
    work = _Work(units, rank, kept, gaps, stage, borders, filling)
    ranks = range(len(stage))
    placed = [work.placed(one, 0.0) for one in ranks]
    short = [one for one in ranks if placed[one][2]]
    # What the slowest rank needs before its passes, all have.
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
        lines: timelines of which the one with the shortest step is taken.

    Returns:
        its number, and the plan.
    """

    def attempt(number: int, taken: Floats) -> Choice:
        return assign_units(units, schedule, lines[number], stage, filling, taken)

    number, choice = choose(attempt, len(lines), schedule.stages)
    given = schedule, lines[number], stage, filling
    return number, place_units(units, choice.rank, choice.kept, *given)
