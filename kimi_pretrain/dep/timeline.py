"""When the passes of a pipeline's schedule run: Megatron-Core's 1F1B, interleaved where a rank has
several chunks.

Every stage has its passes in a fixed order: warm-up forwards, then one forward and one backward in
turns, then the backwards that are left. It starts each as soon as it is free and what the pass
needs has arrived. Chunk c of stage s is virtual stage c * stages + s. Pure.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDING = 1e-9  # seconds; a shorter wait is none


class Pass(NamedTuple):
    """One pass of one microbatch through one chunk of a stage."""

    backward: bool
    chunk: int
    microbatch: int

    def __str__(self) -> str:
        kind = "backward" if self.backward else "forward"
        return f"{kind} of microbatch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """The passes of a replica's pipeline.

    Attributes:
        stages: pipeline ranks.
        chunks: of layers on each.
        microbatches: of a step.
        ahead: one more warm-up forward, as with `layout.overlap_experts`.

    Raises:
        ValueError: chunks are interleaved, and the microbatches do not come in groups of `stages`.
    """

    stages: int
    chunks: int
    microbatches: int
    ahead: bool = False

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.microbatches % self.stages:
            raise ValueError(
                f"{self.microbatches} microbatches are not a multiple of {self.stages} pipeline "
                "ranks: interleaved 1F1B runs them in groups of as many"
            )

    @cached_property
    def passes(self) -> tuple[tuple[Pass, ...], ...]:
        """Each stage's passes, first to last."""
        return tuple(self._of(stage) for stage in range(self.stages))

    @property
    def num_passes(self) -> int:
        """Passes of a stage; all have as many."""
        return 2 * self.chunks * self.microbatches

    def needed(self, stage: int, this: Pass) -> tuple[int, Pass] | None:
        """Return the (stage, pass) that must be over before a pass; None: nothing must be."""
        at = this.chunk * self.stages + stage + (1 if this.backward else -1)
        if this.backward and at == self.stages * self.chunks:
            return stage, Pass(False, this.chunk, this.microbatch)
        if at < 0:
            return None
        chunk, other = divmod(at, self.stages)
        return other, Pass(this.backward, chunk, this.microbatch)

    def warm_up(self, stage: int) -> int:
        """Return how many forward passes a stage runs before forward and backward take turns."""
        total, behind = self.microbatches * self.chunks, self.stages - stage - 1
        warm_up = behind if self.chunks == 1 else 2 * behind + (self.chunks - 1) * self.stages
        return min(warm_up + self.ahead, total)

    def _of(self, stage: int) -> tuple[Pass, ...]:
        total, warm_up = self.microbatches * self.chunks, self.warm_up(stage)
        passes = [self._numbered(n, backward=False) for n in range(warm_up)]
        for n in range(warm_up, total):
            passes.append(self._numbered(n, backward=False))
            passes.append(self._numbered(n - warm_up, backward=True))
        passes += [self._numbered(n, backward=True) for n in range(total - warm_up, total)]
        return tuple(passes)

    def _numbered(self, number: int, *, backward: bool) -> Pass:
        """Forward or backward number n: `stages` microbatches of a chunk, then the next chunk."""
        if self.chunks == 1:
            return Pass(backward, 0, number)
        group, place = divmod(number, self.stages * self.chunks)
        chunk, member = divmod(place, self.stages)
        chunk = self.chunks - 1 - chunk if backward else chunk
        return Pass(backward, chunk, group * self.stages + member)


@lru_cache(maxsize=16)
def events(schedule: Schedule) -> tuple[tuple[int, int, tuple[int, int] | None], ...]:
    """Return all passes as (stage, number, what it needs), nothing before what it needs.

    A pass is told by its stage and its number among the passes there.
    """
    number = [{one: n for n, one in enumerate(passes)} for passes in schedule.passes]
    at, found = [0] * schedule.stages, []
    while len(found) < schedule.stages * schedule.num_passes:
        before = len(found)
        for stage, passes in enumerate(schedule.passes):
            while at[stage] < len(passes):
                needed = schedule.needed(stage, passes[at[stage]])
                place = None if needed is None else (needed[0], number[needed[0]][needed[1]])
                if place is not None and place[1] >= at[place[0]]:
                    break
                found.append((stage, at[stage], place))
                at[stage] += 1
        assert len(found) > before, f"the passes of {schedule} wait in a circle"
    return tuple(found)


@dataclass(frozen=True)
class Timeline:
    """When each pass of each stage begins and ends, in seconds, float64 [stages, passes] each."""

    start: Floats
    end: Floats

    @property
    def total(self) -> float:
        """The end of the last pass."""
        return float(self.end.max())


def timeline(
    schedule: Schedule,
    forward: Floats,
    backward: Floats,
    send: float = 0.0,
    before: Floats | None = None,
) -> Timeline:
    """Return when passes run, each as early as it can.

    Args:
        schedule: their order.
        forward, backward: seconds of a pass of each virtual stage, [virtual stages], or of each
            virtual stage and microbatch, [virtual stages, microbatches].
        send: seconds from the end of a pass until its result is on another stage; nobody computes
            less meanwhile.
        before: seconds of other work that a stage does before each of its passes, behind the one
            before it, [stages, passes]; None: it has none.
    """
    shape = schedule.stages * schedule.chunks, schedule.microbatches
    none = np.zeros((schedule.stages, schedule.num_passes))
    work = (none if before is None else before).tolist()
    wide = [one if one.ndim == 2 else one[:, None] for one in (forward, backward)]
    seconds = [np.broadcast_to(one, shape).tolist() for one in wide]
    begun: list[list[float]] = [[] for _ in range(schedule.stages)]
    ended: list[list[float]] = [[] for _ in range(schedule.stages)]
    for stage, number, needed in events(schedule):
        this = schedule.passes[stage][number]
        start = (ended[stage][-1] if number else 0.0) + work[stage][number]
        if needed is not None:
            other, behind = needed
            sent = send if _is_sent(schedule, this, needed) else 0.0
            start = max(start, ended[other][behind] + sent)
        begun[stage].append(start)
        virtual = this.chunk * schedule.stages + stage
        ended[stage].append(start + seconds[this.backward][virtual][this.microbatch])
    return Timeline(np.array(begun), np.array(ended))


def _is_sent(schedule: Schedule, this: Pass, needed: tuple[int, int]) -> bool:
    """Whether what a pass needs is sent: all but the last chunk's own output, for its gradient."""
    other, before = needed
    return not this.backward or schedule.passes[other][before].backward


def latest_starts(schedule: Schedule, line: Timeline, send: float = 0.0) -> Floats:
    """Return the latest start of each pass with which the last one still ends in time.

    Args:
        send: as in `timeline`.

    Returns:
        seconds, float64 [stages, passes]; a step whose passes all begin by then takes no longer.
    """
    seconds = (line.end - line.start).tolist()
    latest = np.full(line.end.shape, line.total).tolist()  # ends, until a pass is looked at
    for stage, number, needed in reversed(events(schedule)):
        start = latest[stage][number] - seconds[stage][number]
        latest[stage][number] = start
        if number:
            latest[stage][number - 1] = min(latest[stage][number - 1], start)
        if needed is not None:
            other, before = needed
            sent = send if _is_sent(schedule, schedule.passes[stage][number], needed) else 0.0
            latest[other][before] = min(latest[other][before], start - sent)
    return np.array(latest)


def gathered(schedule: Schedule, line: Timeline, least: float, send: float = 0.0) -> Timeline:
    """Return a timeline as long in which short waits lie together: fewer waits, longer ones.

    Where a stage would wait for less than `least`, its pass begins later, so that the wait is as
    long as that; what it needs then lies there already for some passes, before which it does not
    wait. No pass begins later than `least` before its latest start, so there is time for work in
    waits that takes longer than planned.

    Args:
        line: of the schedule, each pass as early as it can.
        send: as in `timeline`.
    """
    seconds, limit = line.end - line.start, latest_starts(schedule, line, send) - least
    start, end = np.zeros_like(seconds), np.zeros_like(seconds)
    for stage, number, needed in events(schedule):
        begin = free = float(end[stage, number - 1]) if number else 0.0
        if needed is not None:
            sent = send if _is_sent(schedule, schedule.passes[stage][number], needed) else 0.0
            begin = max(begin, float(end[needed]) + sent)
        if number and free + ROUNDING < begin < free + least <= limit[stage, number]:
            begin = free + least
        start[stage, number] = begin
        end[stage, number] = begin + seconds[stage, number]
    return Timeline(start, end)
