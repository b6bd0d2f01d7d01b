"""One pre-norm transformer block of MoonViT-3D.

Layout and names are those of the released checkpoint: fused `wqkv` in the order q | k | v, each
head-major, and an MLP with the tanh form of GELU. Every layer has biases.

Shape suffixes: L packed patches, C width, N heads, H head width, P rotary pairs, K = 3 * C.
"""

from collections.abc import Sequence

from einops import rearrange
from torch import Tensor, nn

from moonvit3d import rows
from moonvit3d.attention import Attend, Segments, attend
from moonvit3d.config import MoonViTConfig
from moonvit3d.positions import rotate_qkv


class MLP(nn.Module):
    """Two linear layers with tanh-GELU between them; maps [L, C] to [L, C]."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc0 = nn.Linear(width, hidden)
        self.fc1 = nn.Linear(hidden, width)

    def forward(self, x_LC: Tensor, lengths: Sequence[int]) -> Tensor:
        """Apply the MLP, [L, C] to [L, C]; `lengths` are the rows of each item."""
        return rows.gelu_linear(self.fc0(x_LC), self.fc1, lengths, "tanh")


class Block(nn.Module):
    """Attention over an item's patches in space and time, followed by the MLP."""

    def __init__(self, config: MoonViTConfig):
        super().__init__()
        self.heads = config.heads
        self.norm0 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.norm1 = nn.LayerNorm(config.width, eps=config.norm_eps)
        self.wqkv = nn.Linear(config.width, 3 * config.width)
        self.wo = nn.Linear(config.width, config.width)
        self.mlp = MLP(config.width, config.mlp_width)

    def forward(
        self, x_LC: Tensor, rotary_LP: Tensor, segments: Segments, attend: Attend = attend
    ) -> Tensor:
        """Apply the block.

        Args:
            x_LC: packed patches [L, C].
            rotary_LP: each patch's rotation as complex numbers [L, head_dim / 2].
            segments: the items' boundaries; a patch attends only to its own item.
            attend: attention function; replaced if an item is shared with other devices.

        Returns:
            [L, C].
        """
        x_LC = x_LC + self.attention(self.norm0(x_LC), rotary_LP, segments, attend)
        return x_LC + self.mlp(self.norm1(x_LC), segments.lengths)

    def attention(
        self, x_LC: Tensor, rotary_LP: Tensor, segments: Segments, attend: Attend
    ) -> Tensor:
        """Apply the attention branch, [L, C] to [L, C]."""
        qkv_LK = rotate_qkv(self.wqkv(x_LC), rotary_LP, self.heads, segments.lengths)
        q_LNH, k_LNH, v_LNH = rearrange(
            qkv_LK, "l (three n h) -> three l n h", three=3, n=self.heads
        )
        mixed_LNH = attend(q_LNH, k_LNH, v_LNH, segments)
        return self.wo(rearrange(mixed_LNH, "l n h -> l (n h)"))
