"""The bridge into the language model: LayerNorm per patch, then a two-layer MLP per token.

Kimi K2.5's "patchmerger" projector: the norm sees each of a token's four patches by itself, before
they are joined; the GELU is the exact one (the tower's is the tanh form).
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from moonvit3d import rows
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

    def forward(self, x_T4C: Tensor, lengths: Sequence[int] | None = None) -> Tensor:
        """Project merged tokens.

        Args:
            x_T4C: [tokens, 4, width].
            lengths: tokens of each item; without, all are taken as one item, and on CPU the last
                bits may depend on what a token is packed with.

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
