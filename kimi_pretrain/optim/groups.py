"""Assigns each tensor an optimizer and a parameter group, and cuts it into matrices for Muon.

The assignment depends only on name and shape, so all ranks agree without communication. Names are
those of the Hugging Face checkpoint of Kimi K2.5. Kimi orthogonalises the parts of a fused
projection separately (Moonlight, arXiv:2502.16982, fig. 9 and 10). For example, the content rows of
all heads of a query projection form one matrix, and the rotary rows of all heads form another.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import TYPE_CHECKING, Literal, Protocol

from einops import rearrange
from torch import Tensor

from kimi_pretrain.optim.config import Group

if TYPE_CHECKING:
    from kimi_pretrain.weights.model_config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """Sizes for cutting the fused projections of Kimi's checkpoint."""

    num_heads: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    kv_lora_rank: int

    @staticmethod
    def of(model: "ModelConfig") -> "ModelShape":
        """Return the sizes of a configured model."""
        language = model.language
        return ModelShape(
            num_heads=language.num_heads,
            qk_nope_dim=language.qk_nope_dim,
            qk_rope_dim=language.qk_rope_dim,
            v_dim=language.v_dim,
            kv_lora_rank=language.kv_lora_rank,
        )

    def rule_of(
        self, name: str, shape: Sequence[int], matrices: Literal["muon", "adamw"] = "muon"
    ) -> "Rule":
        """Return the rule of a tensor.

        Args:
            name: checkpoint name of the tensor.
            shape: shape of the tensor.
            matrices: `OptimConfig.matrices`; "adamw" also assigns Muon's matrices to AdamW.

        Raises:
            ValueError: the checkpoint has no such name, or the shape does not fit.
        """
        shape = tuple(shape)
        for pattern, group, cut in _RULES:
            if re.fullmatch(pattern, name):
                pieces = _pieces(name, shape, self, cut)
                if matrices == "adamw" or not pieces:
                    return Rule("adamw", group)
                return Rule("muon", group, pieces)
        raise ValueError(
            f"optimizer: no rule for tensor '{name}' {shape}. Every trained tensor needs one, "
            "because a wrong default would train silently; add it to kimi_pretrain/optim/groups.py"
        )


MOMENTS: dict[str, tuple[str, ...]] = {"muon": ("momentum",), "adamw": ("exp_avg", "exp_avg_sq")}
"""Kind of a rule -> state tensors that the owner keeps in addition to the master copy."""


@dataclass(frozen=True)
class NamedTensor:
    """One checkpoint tensor as the optimizer sees it.

    Args:
        name: checkpoint name, unique on a rank; ranks of one replica group hold the same names.
        data: view into a model parameter, updated in place.
        grad: returns the gradient, in the shape of `data`. In an optimizer step, it must return the
            sum over the replica group on the tensor's owner; other ranks do not read it.
        replicas: name of the process group whose ranks hold identical copies.
    """

    name: str
    data: Tensor
    grad: Callable[[], Tensor]
    replicas: str


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix that are orthogonalised together: rows start:stop of each of its blocks."""

    name: str
    blocks: int
    start: int
    stop: int

    def shape(self, whole: Sequence[int]) -> tuple[int, int]:
        """Return [rows, columns] of this piece in a tensor [A, ...] flattened to a matrix."""
        return self.blocks * (self.stop - self.start), prod(whole[1:])

    def rows(self, matrix: Tensor) -> Tensor:
        """Return the piece as a view [blocks, rows of a block, B] into a matrix [A, B]."""
        return rearrange(matrix, "(n r) b -> n r b", n=self.blocks)[:, self.start : self.stop]


@dataclass(frozen=True)
class Rule:
    """Optimizer, parameter group and pieces of a tensor.

    `pieces` cover a Muon matrix exactly once; an AdamW tensor has none.
    """

    kind: Literal["muon", "adamw"]
    group: str
    pieces: tuple[Piece, ...] = ()


class TensorRules(Protocol):
    """Rules of a model's tensors: `ModelShape` for Kimi's checkpoint, or a user's own rules."""

    def rule_of(
        self, name: str, shape: Sequence[int], matrices: Literal["muon", "adamw"] = "muon"
    ) -> Rule:
        """Return the rule of a tensor; it depends only on name and shape."""
        ...


def as_matrix(x: Tensor) -> Tensor:
    """Return [A, ...] as a view [A, B]; a convolution has one row per output channel."""
    return x.flatten(1)


def replicas_of(name: str) -> Literal["dense", "expert", "encoder"]:
    """Return the kind of process group that holds copies of a tensor."""
    if not name.startswith("language_model."):
        return "encoder"
    return "expert" if ".mlp.experts." in name else "dense"


def _pieces(
    name: str, shape: tuple[int, ...], model: ModelShape, cut: "_Cut | None"
) -> tuple[Piece, ...]:
    """Cut each block of rows into the same named parts, in order."""
    if cut is None:
        return ()
    dims, of = cut
    if len(shape) != dims or 0 in shape:
        raise ValueError(f"optimizer: '{name}' must have {dims} non-empty dimensions, got {shape}")
    blocks, parts = of(shape, model)
    if shape[0] != blocks * sum(parts.values()):
        raise ValueError(
            f"optimizer: '{name}' {shape} should have {blocks} x {parts} = "
            f"{blocks * sum(parts.values())} rows; the model shape does not fit the checkpoint"
        )
    stops = list(accumulate(parts.values(), initial=0))
    return tuple(
        Piece(part, blocks, start, stop) for part, start, stop in zip(parts, stops, stops[1:])
    )


# Cut of a tensor for Muon: its number of dimensions, and (blocks, part -> its rows in a block).
_Cut = tuple[int, Callable[[tuple[int, ...], ModelShape], tuple[int, dict[str, int]]]]
_WHOLE: _Cut = (2, lambda shape, model: (1, {"whole": shape[0]}))
_CONVOLUTION: _Cut = (4, _WHOLE[1])
_QUERY: _Cut = (
    2,
    lambda shape, m: (m.num_heads, {"q_nope": m.qk_nope_dim, "q_rope": m.qk_rope_dim}),
)
_LATENT: _Cut = (2, lambda shape, m: (1, {"latent": m.kv_lora_rank, "k_rope": m.qk_rope_dim}))
_KEY_VALUE: _Cut = (2, lambda shape, m: (m.num_heads, {"k_nope": m.qk_nope_dim, "v": m.v_dim}))
_VISION_QKV: _Cut = (2, lambda shape, model: (1, dict.fromkeys("qkv", shape[1])))
_ADAMW = None

_LAYER = r"language_model\.model\.layers\.\d+\."
_BLOCK = r"vision_tower\.encoder\.blocks\.\d+\."
# Name, parameter group (`optim.groups` of the configuration), and cut for Muon.
_RULES: tuple[tuple[str, Group, _Cut | None], ...] = (
    (r"language_model\.model\.embed_tokens\.weight", "embedding", _ADAMW),
    (r"language_model\.lm_head\.weight", "head", _ADAMW),
    (r"language_model\.model\.norm\.weight", "norms", _ADAMW),
    (_LAYER + r"(input_layernorm|post_attention_layernorm)\.weight", "norms", _ADAMW),
    (_LAYER + r"self_attn\.(q_a_layernorm|kv_a_layernorm)\.weight", "norms", _ADAMW),
    (_LAYER + r"self_attn\.(q_a_proj|o_proj)\.weight", "attention", _WHOLE),
    (_LAYER + r"self_attn\.(q_b_proj|q_proj)\.weight", "attention", _QUERY),
    (_LAYER + r"self_attn\.kv_a_proj_with_mqa\.weight", "attention", _LATENT),
    (_LAYER + r"self_attn\.kv_b_proj\.weight", "attention", _KEY_VALUE),
    (_LAYER + r"mlp\.gate\.weight", "router", _WHOLE),
    (_LAYER + r"mlp\.(gate|up|down)_proj\.weight", "dense_mlp", _WHOLE),
    (_LAYER + r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", "experts", _WHOLE),
    (_LAYER + r"mlp\.shared_experts\.(gate|up|down)_proj\.weight", "shared_experts", _WHOLE),
    (r"siglip\..+", "siglip", _ADAMW),
    (r"vision_tower\.patch_embed\.proj\.weight", "vision_tower", _CONVOLUTION),
    (r"vision_tower\.patch_embed\.(proj\.bias|pos_emb\.weight)", "vision_tower", _ADAMW),
    (_BLOCK + r"(norm0|norm1)\.(weight|bias)", "vision_tower", _ADAMW),
    (_BLOCK + r"wqkv\.weight", "vision_tower", _VISION_QKV),
    (_BLOCK + r"(wo|mlp\.fc0|mlp\.fc1)\.weight", "vision_tower", _WHOLE),
    (_BLOCK + r"(wqkv|wo|mlp\.fc0|mlp\.fc1)\.bias", "vision_tower", _ADAMW),
    (r"vision_tower\.encoder\.final_layernorm\.(weight|bias)", "vision_tower", _ADAMW),
    (r"mm_projector\.pre_norm\.(weight|bias)", "projector", _ADAMW),
    (r"mm_projector\.proj\.[02]\.weight", "projector", _WHOLE),
    (r"mm_projector\.proj\.[02]\.bias", "projector", _ADAMW),
)
