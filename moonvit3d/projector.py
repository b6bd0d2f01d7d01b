"""The bridge into the language model: LayerNorm per patch, then a two-layer MLP per token.

Kimi K2.5's "patchmerger" projector: the norm sees each of a token's four patches by itself, before
they are joined; the GELU is the exact one (the tower's is the tanh form).
"""

from einops import rearrange
from torch import Tensor, nn

from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import MERGE


class Projector(nn.Module):
    """[tokens, 4, width] to [tokens, out_width]."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.pre_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.proj = nn.Sequential(
            nn.Linear(MERGE * MERGE * config.width, config.projector_width),
            nn.GELU(),
            nn.Linear(config.projector_width, config.out_width),
        )

    def forward(self, x_T4C: Tensor) -> Tensor:
        """Project merged tokens [tokens, 4, width] to [tokens, out_width]."""
        return self.proj(rearrange(self.pre_norm(x_T4C), "t four c -> t (four c)"))
