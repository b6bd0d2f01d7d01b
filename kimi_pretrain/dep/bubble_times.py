"""Measured seconds of passes and of vision work in bubbles, shared by all ranks.

The first plans use the configured costs of passes and items. Each rank measures both. The step
reports carry the measurements to all ranks, and the slots of later steps use them. The assignment
of items to ranks ignores them, because it determines the order in which gradients are added, and
results must not depend on a clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import Config

Floats = NDArray[np.float64]

WINDOW = 8  # steps in the median


@dataclass(frozen=True)
class RankTimes:
    """Measurements of a rank in a step.

    Attributes:
        stage: pipeline stage of the rank.
        passes: seconds of a (forward, backward) pass of each virtual stage, mean over microbatches.
        pieces: for each of `step_bubbles.KINDS`, the measured seconds of its pieces and the seconds
            by the cost model.
    """

    stage: int
    passes: tuple[tuple[float, float], ...]
    pieces: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Learned:
    """Costs used to plan slots.

    Attributes:
        forward, backward: seconds of a pass of each virtual stage, float64 [virtual stages].
        factors: factors on the cost model's seconds for each of `step_bubbles.KINDS`.
    """

    forward: Floats
    backward: Floats
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Learning:
    """Costs for each step, learned from earlier steps and equal on all ranks.

    Each rank plans a step ahead of time, whenever its loader gets there. So the plan uses only
    measurements that are old enough for every loader to have them (`delay`).
    """

    def __init__(self, config: Config):
        self.stages, self.chunks = config.layout.pp, config.layout.vpp
        self.delay = config.data.prefetch_steps + 2  # one step in planning, one step running
        self._measured: deque[tuple[Floats, Floats]] = deque(maxlen=WINDOW)
        self._known: dict[int, Learned] = {}
        self._planned = -1
        self._warm = False

    def of(self, step: int) -> Learned | None:
        """Return the costs for planning a step; None: the configured costs."""
        self._planned = max(self._planned, step)
        known = [number for number in list(self._known) if number <= step - self.delay]
        return self._known[max(known)] if known else None

    def add(self, step: int, ranks: Sequence[RankTimes | None]) -> None:
        """Add the measurements of all ranks in a step; every rank passes the same values.

        Args:
            step: counted as in `GlobalPlan`.
            ranks: None where no vision work ran in bubbles, which holds on all ranks or none.
        """
        # Another rank's loader may already have planned the step without these measurements.
        assert self._planned < step + self.delay, (self._planned, step, self.delay)
        found = [one for one in ranks if one is not None]
        if not found:
            return
        if not self._warm:  # the first step of a process includes allocation and compilation
            self._warm = True
            return
        pieces = np.array([one.pieces for one in found]).sum(axis=0)
        self._measured.append((self._passes(found), pieces))
        passes = np.median([passes for passes, _ in self._measured], axis=0)
        took, believed = np.sum([pieces for _, pieces in self._measured], axis=0).T
        factors = np.divide(took, believed, out=np.ones(3), where=(believed > 0) & (took > 0))
        oldest = max([n for n in self._known if n <= step + 1 - self.delay], default=0)
        known = {n: one for n, one in self._known.items() if n >= oldest}
        first, second, third = factors.tolist()
        self._known = known | {step: Learned(passes[0], passes[1], (first, second, third))}

    def _passes(self, ranks: Sequence[RankTimes]) -> Floats:
        """Return the mean over the ranks of each stage, float64 [2, virtual stages]."""
        found = np.zeros((2, self.chunks * self.stages))
        for stage in range(self.stages):
            mine = np.mean([one.passes for one in ranks if one.stage == stage], axis=0)
            found[:, stage :: self.stages] = mine.T
        return found
