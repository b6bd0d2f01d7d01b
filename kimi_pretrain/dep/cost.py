"""Cost model of encoding one media item in a training step: the load that DEP balances.

The seconds of forward, recompute and backward have three terms: projections and MLPs are linear in
the item's patches, attention is quadratic, and small kernels and launches cost a constant per item.
`kimi-pretrain plan --calibrate` measures the three coefficients on a machine; without a calibration
they are derived from FLOPs.
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
    """Seconds of a step's encoder work on an item, as a function of its patches."""

    per_patch: float
    per_patch_squared: float
    per_item: float = 0.0

    def seconds(self, patches: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the seconds of each item on one rank, float64 [items]."""
        size = np.asarray(patches, dtype=np.float64)
        return size * self.per_patch + size * size * self.per_patch_squared + self.per_item

    @classmethod
    def configured(cls, config: Config) -> "CostModel":
        """Return the model configured in `dep.cost`, or one derived from FLOPs."""
        given = config.dep.cost
        if given is None:
            return cls.from_flops(config.model.vision, config.dep.flops_per_second)
        return cls(given.per_patch, given.per_patch_squared, given.per_item)

    @classmethod
    def from_flops(cls, config: MoonViTConfig, flops_per_second: float) -> "CostModel":
        """Return the model of an encoder with constant throughput.

        Args:
            flops_per_second: achieved throughput of one rank, not the peak.
        """
        linear, quadratic = flops([(1, 2, 2)], config)  # four patches, one token
        factor = FORWARDS_PER_STEP / flops_per_second
        return cls(float(linear[0]) / 4 * factor, float(quadratic[0]) / 16 * factor)
