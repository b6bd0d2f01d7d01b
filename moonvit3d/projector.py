"""Projector into the language model: LayerNorm per patch, then a two-layer MLP per token.

This is Kimi K2.5's "patchmerger" projector. The norm applies to each of a token's four patches
separately, before they are concatenated. The GELU is the exact form (the tower's is the tanh form).
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from moonvit3d import rows
from moonvit3d.config import MoonViTConfig
from moonvit3d.geometry import MERGE


class Projector(nn.Module):
    """Maps [tokens, 4, width] to [tokens, out_width]."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.pre_norm = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.proj = nn.Sequential(
            nn.Linear(MERGE * MERGE * config.width, config.projector_width),
            nn.GELU(),
            nn.Linear(config.projector_width, config.out_width),
        )

    def forward(self, x_T4C: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Project merged tokens.

        Args:
            x_T4C: [tokens, 4, width].
            lengths: tokens of each item. If None, all tokens count as one item, and on CPU the last
                bits of a token may depend on the rest of its pack.

        Returns:
            [tokens, out_width].
        """
        tokens = len(x_T4C)
        spans = [tokens] if lengths is None else list(lengths)
        padding = rows.padding(tokens, x_T4C.device)
        x_TK = rearrange(rows.pad(self.pre_norm(x_T4C), padding), "t four c -> t (four c)")
        inner, _, outer = self.proj
        spans += rows.padding_lengths(padding)
        return rows.gelu_linear(inner(x_TK), outer, spans, "none")[:tokens]
