"""SigLIP's modules besides the vision tower: attention pooling, a text tower, scale and bias.

SigLIP is described in arXiv:2303.15343. Kimi-VL trains with its loss (Kimi-VL report, section 2.1:
L_siglip + 2 L_caption, both towers from SigLIP SO-400M). The pooling head pools each packed item
separately, at any size, which matches SigLIP 2 with padded items and a mask. The code is
single-device. Parameter names equal those of SigLIP's checkpoint, so loading needs no renaming.

Shape suffixes: L packed patches, I items, B texts, S positions, C width, N heads, H head width.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from kimi_pretrain.siglip.config import SiglipConfig

SCALE, BIAS = math.log(10.0), -10.0
"""Initial scale (as its logarithm) and bias (SigLIP, section 3.2, algorithm 1)."""


@dataclass(frozen=True)
class HeadSizes:
    """Sizes of the text tower and the pooling head; defaults of siglip-so400m-patch14-384.

    Args:
        width: width of both towers and of the compared embeddings. [channels]
        depth: depth of the text tower. [blocks]
        positions: length that a text is cut or padded to; the last one is its embedding. [tokens]
        vocabulary: vocabulary of SigLIP's tokenizer, not the language model's. [tokens]
    """

    width: int = 1152
    depth: int = 27
    heads: int = 16
    mlp_width: int = 4304
    positions: int = 64
    vocabulary: int = 32_000
    norm_eps: float = 1e-6

    @classmethod
    def of(cls, config: SiglipConfig, width: int) -> "HeadSizes":
        """Return the sizes for a vision tower of this width."""
        return cls(
            width,
            config.depth,
            config.heads,
            config.mlp_width,
            config.positions,
            config.vocabulary,
        )


class _MLP(nn.Module):
    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.fc1 = nn.Linear(sizes.width, sizes.mlp_width)
        self.fc2 = nn.Linear(sizes.mlp_width, sizes.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate="tanh"))


class PoolingHead(nn.Module):
    """Attention of one learned query over each item's patches, then an MLP with a residual."""

    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.heads = sizes.heads
        self.probe = nn.Parameter(torch.zeros(1, 1, sizes.width))
        # Only its parameters are used; the module provides the checkpoint's names.
        self.attention = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)
        self.layernorm = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.mlp = _MLP(sizes)

    def forward(self, x_LC: Tensor, lengths: Sequence[int]) -> Tensor:
        """Pool packed items.

        Args:
            x_LC: patches of all items, concatenated [L, C].
            lengths: patches of each item, at least one each, L in total; may be empty.

        Returns:
            [I, C].

        Raises:
            ValueError: the lengths do not match the patches.
        """
        if sum(lengths) != len(x_LC) or min(lengths, default=1) < 1:
            raise ValueError(f"items of {list(lengths)} patches: {len(x_LC)} patches came")
        width = x_LC.shape[-1]
        weight, bias = self.attention.in_proj_weight, self.attention.in_proj_bias
        q_C = F.linear(self.probe[0, 0], weight[:width], bias[:width])
        kv_LK = F.linear(x_LC, weight[width:], bias[width:])
        q_NsH = rearrange(q_C, "(n h) -> n 1 h", n=self.heads)
        pooled = [kv_LK[:0, :width] + q_C]  # gives all parameters a (zero) gradient without items
        for kv in kv_LK.split(list(lengths)) if lengths else ():
            k_NLH, v_NLH = rearrange(kv, "l (two n h) -> two n l h", two=2, n=self.heads)
            one = F.scaled_dot_product_attention(q_NsH[None], k_NLH[None], v_NLH[None])
            pooled.append(rearrange(one[0], "n s h -> s (n h)"))
        x_IC = self.attention.out_proj(torch.cat(pooled))
        return x_IC + self.mlp(self.layernorm(x_IC))


class _Attention(nn.Module):
    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.heads = sizes.heads
        self.q_proj = nn.Linear(sizes.width, sizes.width)
        self.k_proj = nn.Linear(sizes.width, sizes.width)
        self.v_proj = nn.Linear(sizes.width, sizes.width)
        self.out_proj = nn.Linear(sizes.width, sizes.width)

    def forward(self, x_BSC: Tensor) -> Tensor:
        q, k, v = (
            rearrange(proj(x_BSC), "b s (n h) -> b n s h", n=self.heads)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(
            rearrange(F.scaled_dot_product_attention(q, k, v), "b n s h -> b s (n h)")
        )


class _Layer(nn.Module):
    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.self_attn = _Attention(sizes)
        self.layer_norm2 = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.mlp = _MLP(sizes)

    def forward(self, x_BSC: Tensor) -> Tensor:
        x_BSC = x_BSC + self.self_attn(self.layer_norm1(x_BSC))
        return x_BSC + self.mlp(self.layer_norm2(x_BSC))


class _Embeddings(nn.Module):
    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.token_embedding = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position_embedding = nn.Embedding(sizes.positions, sizes.width)

    def forward(self, ids_BS: Tensor) -> Tensor:
        return self.token_embedding(ids_BS) + self.position_embedding.weight


class _Encoder(nn.Module):
    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.layers = nn.ModuleList(_Layer(sizes) for _ in range(sizes.depth))

    def forward(self, x_BSC: Tensor) -> Tensor:
        for layer in self.layers:
            x_BSC = layer(x_BSC)
        return x_BSC


class TextTower(nn.Module):
    """Embeds texts without a mask: padding is attended to; the last position is the embedding."""

    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.sizes = sizes
        self.embeddings = _Embeddings(sizes)
        self.encoder = _Encoder(sizes)
        self.final_layer_norm = nn.LayerNorm(sizes.width, eps=sizes.norm_eps)
        self.head = nn.Linear(sizes.width, sizes.width)

    def forward(self, ids_BS: Tensor) -> Tensor:
        """Embed texts.

        Args:
            ids_BS: token ids of SigLIP's tokenizer, padded with its padding token to `positions` as
                in SigLIP's training [B, S], int64; B may be 0.

        Returns:
            [B, C].

        Raises:
            ValueError: texts of another length, because visible padding changes the embedding.
        """
        if ids_BS.shape[1:] != (self.sizes.positions,):
            raise ValueError(
                f"texts of shape {list(ids_BS.shape)}: want [texts, {self.sizes.positions}], "
                "padded as SigLIP was trained"
            )
        x_BSC = self.encoder(self.embeddings(ids_BS))
        return self.head(self.final_layer_norm(x_BSC)[:, -1])


class SiglipHeads(nn.Module):
    """Both heads with scale and bias; the returned embeddings have unit length."""

    def __init__(self, sizes: HeadSizes):
        super().__init__()
        self.sizes = sizes
        self.vision_model = nn.ModuleDict({"head": PoolingHead(sizes)})
        self.text_model = TextTower(sizes)
        self.logit_scale = nn.Parameter(torch.full((1,), SCALE))
        self.logit_bias = nn.Parameter(torch.full((1,), BIAS))

    def images(self, x_LC: Tensor, lengths: Sequence[int]) -> Tensor:
        """Embed packed items, [I, C]; arguments as for `PoolingHead`."""
        return _unit(self.vision_model["head"](x_LC, lengths))

    def texts(self, ids_BS: Tensor) -> Tensor:
        """Embed texts, [B, C]; arguments as for `TextTower`."""
        return _unit(self.text_model(ids_BS))


@torch.no_grad()
def initialise_heads(heads: SiglipHeads, seed: int) -> None:
    """Initialise every parameter except scale and bias, equally on every rank, by its name.

    The rules are those of the tower (`moonvit3d.model.initialise`): biases are 0, norms 1 and 0,
    matrices have Glorot's standard deviation, embeddings and the query 1 / sqrt(width).
    """
    for name, parameter in heads.named_parameters():
        if name in ("logit_scale", "logit_bias"):
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            digest = hashlib.blake2b(f"siglip/{seed}/{name}".encode(), digest_size=8).digest()
            draw = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
            rows = parameter.shape[-2] // (3 if "in_proj" in name else 1)
            std = math.sqrt(2 / (parameter.shape[-1] + rows))
            if "embedding" in name or name.endswith("probe"):
                std = heads.sizes.width**-0.5
            weight = torch.empty(parameter.shape, device="cpu")
            nn.init.trunc_normal_(weight, 0.0, std, -2 * std, 2 * std, generator=draw)
            parameter.copy_(weight)


def _unit(x: Tensor) -> Tensor:
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # bfloat16 cosines have only two digits
    return x / x.norm(dim=-1, keepdim=True)
