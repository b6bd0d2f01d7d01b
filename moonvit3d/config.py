"""The few numbers that define a MoonViT-3D encoder and its projector.

Defaults are Kimi K2.5's (Kimi K2.5 report, section 4.2; sizes as in the released checkpoint). The
patch side (14), the 2x2 merge and the 4 frames of a chunk are fixed in ``geometry``: other values
would change every token count.
"""

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar

ROPE_PAIRS = 4  # a head is cut into groups of (x pair, y pair) = 4 channels


@dataclass(frozen=True)
class MoonViTConfig:
    """Sizes of the encoder.

    Args:
        width: channels of the tower.
        depth: number of blocks.
        heads: attention heads; ``width / heads`` must be a multiple of 4 (2-D rotary pairs).
        mlp_width: hidden channels of a block's MLP.
        pos_grid: side of the square learned position grid, in patches.
        pos_init_std: standard deviation of the position grid at initialisation. 1.0 is the
            default of Kimi's code, where the weights come from a checkpoint; from-scratch runs
            with small configs use 0.02.
        projector_width: hidden channels of the projector; 0 means ``4 * width``, as in Kimi.
        out_width: channels of the language model.
        norm_eps: epsilon of every LayerNorm.
        rope_theta: base of the rotary frequencies.

    Raises:
        ValueError: a size that no encoder can have, with the numbers.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    width: int = 1152
    depth: int = 27
    heads: int = 16
    mlp_width: int = 4304
    pos_grid: int = 64
    pos_init_std: float = 1.0
    projector_width: int = 0
    out_width: int = 7168
    norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        if self.projector_width == 0:
            object.__setattr__(self, "projector_width", 4 * self.width)
        for field in fields(self):
            value = getattr(self, field.name)
            may_be_zero = field.name in ("depth", "pos_init_std")
            if not math.isfinite(value) or value < 0 or (value == 0 and not may_be_zero):
                raise ValueError(f"MoonViTConfig.{field.name} = {value}: must be positive")
        if self.width % (ROPE_PAIRS * self.heads):
            raise ValueError(
                f"MoonViTConfig.width = {self.width} does not divide into heads = {self.heads} of "
                f"a multiple of {ROPE_PAIRS} channels (2-D rotary needs x and y pairs); use a "
                f"width that is a multiple of {ROPE_PAIRS * self.heads}"
            )

    @property
    def head_dim(self) -> int:
        """Channels of one attention head (72 in Kimi K2.5)."""
        return self.width // self.heads
