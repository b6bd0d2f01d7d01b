"""Sizes that define a MoonViT-3D encoder and its projector.

Defaults are those of Kimi K2.5 (Kimi K2.5 report, section 4.2; sizes as in the released
checkpoint). The patch side (14), the 2x2 merge and the 4 frames of a chunk are fixed in `geometry`,
because other values would change every token count.
"""

from typing import Self

from pydantic import Field, model_validator

from typed_config.section import Finite, Section

ROPE_PAIRS = 4  # a head consists of groups of (x pair, y pair) = 4 channels


class MoonViTConfig(Section):
    """Sizes of the encoder and its projector; impossible sizes are refused."""

    width: int = Field(default=1152, gt=0)
    """Width of the tower; a multiple of 4 x heads (2-D rotary pairs).
    [channels; moonvit3d/block.py]"""
    depth: int = Field(default=27, ge=0)
    """Number of blocks of the tower. [blocks; moonvit3d/model.py]"""
    heads: int = Field(default=16, gt=0)
    """Number of attention heads. [heads; moonvit3d/block.py]"""
    mlp_width: int = Field(default=4304, gt=0)
    """Hidden width of a block's MLP. [channels; moonvit3d/block.py]"""
    pos_grid: int = Field(default=64, gt=0)
    """Side of the square learned position grid. [patches; moonvit3d/model.py]"""
    pos_init_std: Finite = Field(default=1.0, ge=0)
    """Standard deviation of the position grid at initialisation. 1.0 is the default of Kimi's code,
    which loads weights from a checkpoint; small models trained from scratch use 0.02.
    [-; moonvit3d/model.py]"""
    projector_width: int = Field(default=0, ge=0)
    """Hidden width of the projector; 0 is 4 x width, as in Kimi.
    [channels; moonvit3d/projector.py]"""
    out_width: int = Field(default=7168, gt=0)
    """Width of the language model, equal to model.language.hidden_size.
    [channels; moonvit3d/projector.py]"""
    norm_eps: Finite = Field(default=1e-5, gt=0)
    """Epsilon of every LayerNorm. [-; moonvit3d/block.py]"""
    rope_theta: Finite = Field(default=10000.0, gt=0)
    """Base of the rotary frequencies. [-; moonvit3d/model.py]"""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.projector_width == 0:
            object.__setattr__(self, "projector_width", 4 * self.width)
        if self.width % (ROPE_PAIRS * self.heads):
            raise ValueError(
                f"width = {self.width} does not divide into heads = {self.heads} of "
                f"a multiple of {ROPE_PAIRS} channels (2-D rotary needs x and y pairs); use a "
                f"width that is a multiple of {ROPE_PAIRS * self.heads}"
            )
        return self

    @property
    def head_dim(self) -> int:
        """Channels of one attention head (72 in Kimi K2.5)."""
        return self.width // self.heads
