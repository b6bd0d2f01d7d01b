"""When interleaved 1F1B ends: a discrete simulation, one event for each pass of each chunk.

Every rank has its passes in a fixed order (Megatron-Core's: warm-up forwards, then one forward and
one backward in turns, then the backwards that are left), and starts each as soon as it is free and
what the pass needs has arrived. Chunk c of rank r is virtual stage c * ranks + r.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Pass(NamedTuple):
    """One pass of one microbatch through one virtual stage."""

    backward: bool
    stage: int
    microbatch: int


@dataclass(frozen=True)
class Shape:
    """A pipeline: ranks, chunks of layers on each, microbatches of a step.

    Raises:
        ValueError: chunks are interleaved, and the microbatches do not come in groups of `ranks`.
    """

    ranks: int
    chunks: int
    microbatches: int

    def __post_init__(self) -> None:
        if self.chunks > 1 and self.microbatches % self.ranks:
            raise ValueError(
                f"{self.microbatches} microbatches are not a multiple of {self.ranks} pipeline "
                "ranks: interleaved 1F1B runs them in groups of as many"
            )

    @property
    def stages(self) -> int:
        """Virtual stages."""
        return self.ranks * self.chunks


def order_of(shape: Shape, rank: int) -> list[Pass]:
    """Return a rank's passes, first to last."""
    total = shape.microbatches * shape.chunks
    ahead = shape.ranks - rank - 1
    warm_up = ahead if shape.chunks == 1 else 2 * ahead + (shape.chunks - 1) * shape.ranks
    warm_up = min(warm_up, total)
    passes = [_numbered(shape, rank, n, backward=False) for n in range(warm_up)]
    for n in range(warm_up, total):
        passes.append(_numbered(shape, rank, n, backward=False))
        passes.append(_numbered(shape, rank, n - warm_up, backward=True))
    return passes + [
        _numbered(shape, rank, n, backward=True) for n in range(total - warm_up, total)
    ]


def _numbered(shape: Shape, rank: int, number: int, *, backward: bool) -> Pass:
    """Forward or backward number n of a rank: `ranks` microbatches a chunk, then the next chunk."""
    group, place = divmod(number, shape.stages)
    chunk, member = divmod(place, shape.ranks)
    if backward:
        chunk = shape.chunks - 1 - chunk
    return Pass(backward, chunk * shape.ranks + rank, group * shape.ranks + member)


def _needed(done: Pass, last: int) -> Pass | None:
    """The pass that must be over before this one can start, on whatever rank."""
    backward, stage, microbatch = done
    if not backward:
        return Pass(False, stage - 1, microbatch) if stage else None
    return Pass(True, stage + 1, microbatch) if stage < last else Pass(False, stage, microbatch)


@lru_cache(maxsize=16)
def _events(shape: Shape) -> tuple[tuple[int, Pass, Pass | None], ...]:
    """All passes as (rank, pass, what it needs), so that nothing comes before what it needs."""
    left = [order_of(shape, rank) for rank in range(shape.ranks)]
    at, done, events = [0] * shape.ranks, set(), []
    while len(events) < 2 * shape.stages * shape.microbatches:
        before = len(events)
        for rank, passes in enumerate(left):
            while at[rank] < len(passes):
                this = passes[at[rank]]
                needed = _needed(this, shape.stages - 1)
                if needed is not None and needed not in done:
                    break
                done.add(this)
                events.append((rank, this, needed))
                at[rank] += 1
        assert len(events) > before, f"the schedule of {shape} waits in a circle"
    return tuple(events)


def step_seconds(
    shape: Shape,
    forward: Floats,
    backward: Floats,
    send: float = 0.0,
    first_forward: Floats | None = None,
    first_backward: Floats | None = None,
) -> float:
    """Return the time from the first forward to the last backward.

    Args:
        shape: of the pipeline.
        forward, backward: seconds of a pass of each virtual stage, [stages].
        send: seconds from the end of a pass until its result is on another rank; nobody computes
            less meanwhile.
        first_forward, first_backward: seconds that virtual stage 0 takes longer, [microbatches]:
            an encoder inside the graph.
    """
    extra = np.zeros((2, shape.microbatches))
    extra[0] += 0.0 if first_forward is None else first_forward
    extra[1] += 0.0 if first_backward is None else first_backward
    seconds = (forward.tolist(), backward.tolist())
    more = extra.tolist()
    free = [0.0] * shape.ranks
    ended: dict[Pass, float] = {}
    for rank, this, needed in _events(shape):
        start = free[rank]
        if needed is not None:
            away = send if needed.stage != this.stage and shape.ranks > 1 else 0.0
            start = max(start, ended[needed] + away)
        took = seconds[this.backward][this.stage]
        if this.stage == 0:
            took += more[this.backward][this.microbatch]
        free[rank] = ended[this] = start + took
    return max(free)
