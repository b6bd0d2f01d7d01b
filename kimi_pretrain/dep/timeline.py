"""Computes when the passes of Megatron-Core's 1F1B schedule run, plain or interleaved. Pure.

Every stage has its passes in a fixed order: warm-up forwards, then forwards and backwards in turn,
then the remaining backwards. Each pass starts as soon as the stage is free and the pass's input has
arrived. Chunk c of stage s is virtual stage c * stages + s.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUNDING = 1e-9  # seconds; shorter waits are ignored


class Pass(NamedTuple):
    """One pass of one microbatch through one virtual stage."""

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
        stages: number of pipeline ranks.
        chunks: number of virtual stages on each.
        microbatches: number of microbatches of a step.
        ahead: True for one more warm-up forward, as with `layout.overlap_experts`.

    Raises:
        ValueError: chunks are interleaved, and the microbatches are not a multiple of `stages`.
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
        """Passes of each stage, in execution order."""
        return tuple(self._of(stage) for stage in range(self.stages))

    @property
    def num_passes(self) -> int:
        """Number of passes of a stage; equal for all stages."""
        return 2 * self.chunks * self.microbatches

    def needed(self, stage: int, this: Pass) -> tuple[int, Pass] | None:
        """Return the (stage, pass) that must finish before this pass; None if there is none."""
        at = this.chunk * self.stages + stage + (1 if this.backward else -1)
        if this.backward and at == self.stages * self.chunks:
            return stage, Pass(False, this.chunk, this.microbatch)
        if at < 0:
            return None
        chunk, other = divmod(at, self.stages)
        return other, Pass(this.backward, chunk, this.microbatch)

    def warm_up(self, stage: int) -> int:
        """Return the number of warm-up forward passes of a stage, before the 1F1B turns."""
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
        """Return pass number n of a kind: `stages` microbatches of a chunk, then the next chunk."""
        if self.chunks == 1:
            return Pass(backward, 0, number)
        group, place = divmod(number, self.stages * self.chunks)
        chunk, member = divmod(place, self.stages)
        chunk = self.chunks - 1 - chunk if backward else chunk
        return Pass(backward, chunk, group * self.stages + member)


@lru_cache(maxsize=16)
def events(schedule: Schedule) -> tuple[tuple[int, int, tuple[int, int] | None], ...]:
    """Return all passes as (stage, number, dependency), each after its dependency.

    The stage and the number among the stage's passes identify a pass.
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
    """Start and end of each pass of each stage in seconds, float64 [stages, passes] each."""

    start: Floats
    end: Floats

    @property
    def total(self) -> float:
        """End of the last pass."""
        return float(self.end.max())


def timeline(
    schedule: Schedule,
    forward: Floats,
    backward: Floats,
    send: float = 0.0,
    before: Floats | None = None,
) -> Timeline:
    """Return the timeline in which each pass runs as early as possible.

    Args:
        schedule: order of the passes.
        forward, backward: seconds of a pass of each virtual stage, [virtual stages], or of each
            virtual stage and microbatch, [virtual stages, microbatches].
        send: seconds from the end of a pass until its result reaches another stage; the transfer
            does not slow down computation.
        before: seconds of other work of a stage immediately before each of its passes, [stages,
            passes]; None: no other work.
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
    """Return whether a pass's input is sent; the last virtual stage keeps its output locally."""
    other, before = needed
    return not this.backward or schedule.passes[other][before].backward


def latest_starts(schedule: Schedule, line: Timeline, send: float = 0.0) -> Floats:
    """Return the latest start of each pass that does not delay the end of the last pass.

    Args:
        send: as in `timeline`.

    Returns:
        seconds, float64 [stages, passes]; a step whose passes all start by then takes no longer.
    """
    seconds = (line.end - line.start).tolist()
    latest = np.full(line.end.shape, line.total).tolist()  # latest ends of passes not visited yet
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
    """Return a timeline of equal length with short waits merged into fewer, longer waits.

    If a stage would wait for less than `least`, its pass starts later, so that the wait lasts
    `least`. The inputs of some later passes are then ready early, and the stage does not wait for
    them. Each pass starts at least `least` before its latest start, which leaves time for work in
    waits that takes longer than planned.

    Args:
        line: timeline of the schedule with each pass as early as possible.
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
