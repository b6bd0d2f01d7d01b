"""What passes and vision work in bubbles really take: measured by each rank, believed by all.

The plan of a step's bubbles begins with what the configuration says that passes and items cost.
Each rank measures both; the ranks' figures meet in the report of the step, so that all have the
same ones, and the slots of later steps follow them. Who encodes what does not: it decides in which
order gradients are added, and no bit may depend on a clock.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import Config

Floats = NDArray[np.float64]

WINDOW = 8  # steps whose median is believed


@dataclass(frozen=True)
class RankTimes:
    """What a rank measured in a step.

    Attributes:
        stage: of the pipeline.
        passes: of each chunk the seconds of a (forward, backward) pass, mean of the microbatches.
        pieces: of each of `step_bubbles.KINDS` the seconds that its items' pieces took, and those
            that the cost model has for them.
    """

    stage: int
    passes: tuple[tuple[float, float], ...]
    pieces: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Learned:
    """What slots are planned with.

    Attributes:
        forward, backward: seconds of a pass of each virtual stage, float64 [virtual stages].
        factors: of the seconds that the cost model has for each of `step_bubbles.KINDS`.
    """

    forward: Floats
    backward: Floats
    factors: tuple[float, float, float] = (1.0, 1.0, 1.0)


class Learning:
    """Costs of each step from those measured before it, the same on all ranks.

    A step is planned ahead of time, on each rank when its loader comes to it. So it is planned with
    what was measured so many steps before that no loader can have been earlier.
    """

    def __init__(self, config: Config):
        self.stages, self.chunks = config.layout.pp, config.layout.vpp
        self.delay = config.data.prefetch_steps + 2  # one is being planned, one is running
        self._measured: deque[tuple[Floats, Floats]] = deque(maxlen=WINDOW)
        self._known: dict[int, Learned] = {}
        self._planned = -1
        self._warm = False

    def of(self, step: int) -> Learned | None:
        """Return what a step is planned with; None: the configuration's own costs."""
        self._planned = max(self._planned, step)
        known = [number for number in list(self._known) if number <= step - self.delay]
        return self._known[max(known)] if known else None

    def add(self, step: int, ranks: Sequence[RankTimes | None]) -> None:
        """Take what all ranks measured in a step; every rank says the same.

        Args:
            step: counted as in `GlobalPlan`.
            ranks: None where no vision work ran in bubbles, on all or none.
        """
        # Another rank's loader may have come to it before, and planned it without.
        assert self._planned < step + self.delay, (self._planned, step, self.delay)
        found = [one for one in ranks if one is not None]
        if not found:
            return
        if not self._warm:  # the first step of a process allocates, and compiles
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
        """Return the mean of the ranks of each stage, float64 [2, virtual stages]."""
        found = np.zeros((2, self.chunks * self.stages))
        for stage in range(self.stages):
            mine = np.mean([one.passes for one in ranks if one.stage == stage], axis=0)
            found[:, stage :: self.stages] = mine.T
        return found
