"""What encoding one media item costs its rank in a training step: the load that DEP balances.

Seconds of a forward, a recomputed forward and a backward: a term for the projections and MLPs,
linear in the item's patches, one for attention over them, quadratic, and one for every item, small
kernels and launches. `kimi-pretrain plan --calibrate` measures the three on a machine; without
them they are counted in FLOPs.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.config import Config
from moonvit3d.config import MoonViTConfig
from moonvit3d.flops import flops

FORWARDS_PER_STEP = 4.0  # forward, recompute, and a backward of twice a forward


@dataclass(frozen=True)
class CostModel:
    """Seconds of all of a step's work on an item, as a function of its patches."""

    per_patch: float
    per_patch_squared: float
    per_item: float = 0.0

    def seconds(self, patches: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds that each item costs one rank, float64 [items]."""
        size = np.asarray(patches, dtype=np.float64)
        return size * self.per_patch + size * size * self.per_patch_squared + self.per_item

    @classmethod
    def configured(cls, config: Config) -> "CostModel":
        """Return the model that `dep.cost` gives, or the one counted in FLOPs."""
        given = config.dep.cost
        if given is None:
            return cls.from_flops(config.model.vision, config.dep.flops_per_second)
        return cls(given.per_patch, given.per_patch_squared, given.per_item)

    @classmethod
    def from_flops(cls, config: MoonViTConfig, flops_per_second: float) -> "CostModel":
        """Return the model of an encoder that computes at a steady rate.

        Args:
            flops_per_second: of one rank, as reached, not as advertised.
        """
        linear, quadratic = flops([(1, 2, 2)], config)  # four patches, one token
        factor = FORWARDS_PER_STEP / flops_per_second
        return cls(float(linear[0]) / 4 * factor, float(quadratic[0]) / 16 * factor)
