"""Which optimizer trains a tensor, in which parameter group, and how it is cut into matrices.

All of it follows from name and shape, so all ranks agree without communication. Names are those of
the Hugging Face checkpoint of Kimi K2.5. Kimi orthogonalises the parts of a fused projection
separately (Moonlight, arXiv:2502.16982, fig. 9 and 10): a query projection is one matrix of all
heads' content rows and one of all heads' rotary rows, and so on.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal, Protocol

from einops import rearrange
from torch import Tensor

from kimi_pretrain.optim.config import Group

if TYPE_CHECKING:
    from kimi_pretrain.weights.model_config import ModelConfig


@dataclass(frozen=True)
class ModelShape:
    """The sizes by which fused projections of Kimi's checkpoint are cut."""

    num_heads: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    kv_lora_rank: int
    vision_heads: int

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
            vision_heads=model.vision.heads,
        )

    def rule_of(
        self, name: str, shape: Sequence[int], matrices: Literal["muon", "adamw"] = "muon"
    ) -> "Rule":
        """Return the rule of a tensor of Kimi's checkpoint; see `rule_of` below."""
        return rule_of(name, shape, self, matrices)


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of the checkpoint as the optimizer sees it.

    Args:
        name: checkpoint name, unique on a rank; ranks of one replica group hold the same names.
        data: view into a model parameter, updated in place.
        grad: returns the gradient, same shape as data. When the optimizer steps, it has to be the
            sum over the replica group on the tensor's owner; on other ranks it is not read.
        replicas: name of the process group whose ranks hold an identical copy.
    """

    name: str
    data: Tensor
    grad: Callable[[], Tensor]
    replicas: str


@dataclass(frozen=True)
class Piece:
    """Rows of a matrix that are orthogonalised together: start:stop of each of `blocks` blocks."""

    name: str
    blocks: int
    start: int
    stop: int

    def shape(self, whole: Sequence[int]) -> tuple[int, int]:
        """[rows, columns] of this piece of a tensor of shape [A, ...], flattened to a matrix."""
        return self.blocks * (self.stop - self.start), prod(whole[1:])

    def rows(self, matrix: Tensor) -> Tensor:
        """View [blocks, rows of a block, B] into a [A, B] matrix (splitting an axis is a view)."""
        return rearrange(matrix, "(n r) b -> n r b", n=self.blocks)[:, self.start : self.stop]


@dataclass(frozen=True)
class Rule:
    """What trains a tensor, and in which parameter group it is.

    `pieces` cover a Muon matrix exactly once; AdamW has none.
    """

    kind: Literal["muon", "adamw"]
    group: str
    pieces: tuple[Piece, ...] = ()


class TensorRules(Protocol):
    """The rules of a model's tensors: `ModelShape` for Kimi's checkpoint, a user's otherwise."""

    def rule_of(
        self, name: str, shape: Sequence[int], matrices: Literal["muon", "adamw"] = "muon"
    ) -> Rule:
        """Return the rule of a tensor, by name and shape alone."""
        ...


def as_matrix(x: Tensor) -> Tensor:
    """View [A, ...] as [A, B]: a convolution becomes one row per output channel."""
    return x.flatten(1)


def replicas_of(name: str) -> Literal["dense", "expert", "encoder"]:
    """Which kind of process group holds copies of a tensor."""
    if not name.startswith("language_model."):
        return "encoder"
    return "expert" if ".mlp.experts." in name else "dense"


def rule_of(
    name: str,
    shape: Sequence[int],
    model: ModelShape,
    matrices: Literal["muon", "adamw"] = "muon",
) -> Rule:
    """The rule of a tensor.

    Args:
        name: checkpoint name.
        shape: its shape in the checkpoint.
        model: head counts and widths, to cut fused projections.
        matrices: `OptimConfig.matrices`; "adamw" gives Muon's matrices to AdamW as well.

    Raises:
        ValueError: the name is not one of the checkpoint's, or the shape does not fit `model`.
    """
    shape = tuple(shape)
    for pattern, group, cut in _RULES:
        if re.fullmatch(pattern, name):
            pieces = cut(name, shape, model)
            if matrices == "adamw" or not pieces:
                return Rule("adamw", group)
            return Rule("muon", group, pieces)
    raise ValueError(
        f"optimizer: no rule for tensor '{name}' {shape}. Every trained tensor needs one, because "
        "a wrong default would train silently; add it to kimi_pretrain/optim/groups.py"
    )


# A cut returns the pieces that Muon orthogonalises by themselves; none: the tensor is AdamW's.
_Cut = Callable[[str, tuple[int, ...], ModelShape], tuple[Piece, ...]]


def _adamw(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    return ()


def _whole(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    _check(name, shape, dims=2)
    return _cut(name, shape, 1, whole=shape[0])


def _convolution(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    _check(name, shape, dims=4)
    return _cut(name, shape, 1, whole=shape[0])


def _query(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    _check(name, shape, dims=2)
    return _cut(name, shape, model.num_heads, q_nope=model.qk_nope_dim, q_rope=model.qk_rope_dim)


def _latent(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    _check(name, shape, dims=2)
    return _cut(name, shape, 1, latent=model.kv_lora_rank, k_rope=model.qk_rope_dim)


def _key_value(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    _check(name, shape, dims=2)
    return _cut(name, shape, model.num_heads, k_nope=model.qk_nope_dim, v=model.v_dim)


def _vision_qkv(name: str, shape: tuple[int, ...], model: ModelShape) -> tuple[Piece, ...]:
    _check(name, shape, dims=2)
    width = shape[1]
    if width % model.vision_heads:
        raise ValueError(
            f"optimizer: '{name}' {shape} has {width} columns, which "
            f"{model.vision_heads} vision heads do not divide"
        )
    return _cut(name, shape, 1, q=width, k=width, v=width)


def _check(name: str, shape: tuple[int, ...], dims: int) -> None:
    if len(shape) != dims or 0 in shape:
        raise ValueError(f"optimizer: '{name}' must have {dims} non-empty dimensions, got {shape}")


def _cut(name: str, shape: tuple[int, ...], blocks: int, **parts: int) -> tuple[Piece, ...]:
    """Cut a block of rows into named parts, in order, the same way in each block."""
    if shape[0] != blocks * sum(parts.values()):
        raise ValueError(
            f"optimizer: '{name}' {shape} should have {blocks} x {parts} = "
            f"{blocks * sum(parts.values())} rows; the model shape does not fit the checkpoint"
        )
    pieces, start = [], 0
    for part, size in parts.items():
        pieces.append(Piece(part, blocks, start, start + size))
        start += size
    return tuple(pieces)


_LAYER = r"language_model\.model\.layers\.\d+\."
_BLOCK = r"vision_tower\.encoder\.blocks\.\d+\."
# Name, parameter group (`optim.groups` of the configuration), and how Muon cuts it.
_RULES: tuple[tuple[str, Group, _Cut], ...] = (
    (r"language_model\.model\.embed_tokens\.weight", "embedding", _adamw),
    (r"language_model\.lm_head\.weight", "head", _adamw),
    (r"language_model\.model\.norm\.weight", "norms", _adamw),
    (_LAYER + r"(input_layernorm|post_attention_layernorm)\.weight", "norms", _adamw),
    (_LAYER + r"self_attn\.(q_a_layernorm|kv_a_layernorm)\.weight", "norms", _adamw),
    (_LAYER + r"self_attn\.(q_a_proj|o_proj)\.weight", "attention", _whole),
    (_LAYER + r"self_attn\.(q_b_proj|q_proj)\.weight", "attention", _query),
    (_LAYER + r"self_attn\.kv_a_proj_with_mqa\.weight", "attention", _latent),
    (_LAYER + r"self_attn\.kv_b_proj\.weight", "attention", _key_value),
    (_LAYER + r"mlp\.gate\.weight", "router", _whole),
    (_LAYER + r"mlp\.(gate|up|down)_proj\.weight", "dense_mlp", _whole),
    (_LAYER + r"mlp\.experts\.\d+\.(gate|up|down)_proj\.weight", "experts", _whole),
    (_LAYER + r"mlp\.shared_experts\.(gate|up|down)_proj\.weight", "shared_experts", _whole),
    (r"vision_tower\.patch_embed\.proj\.weight", "vision_tower", _convolution),
    (r"vision_tower\.patch_embed\.(proj\.bias|pos_emb\.weight)", "vision_tower", _adamw),
    (_BLOCK + r"(norm0|norm1)\.(weight|bias)", "vision_tower", _adamw),
    (_BLOCK + r"wqkv\.weight", "vision_tower", _vision_qkv),
    (_BLOCK + r"(wo|mlp\.fc0|mlp\.fc1)\.weight", "vision_tower", _whole),
    (_BLOCK + r"(wqkv|wo|mlp\.fc0|mlp\.fc1)\.bias", "vision_tower", _adamw),
    (r"vision_tower\.encoder\.final_layernorm\.(weight|bias)", "vision_tower", _adamw),
    (r"mm_projector\.pre_norm\.(weight|bias)", "projector", _adamw),
    (r"mm_projector\.proj\.[02]\.weight", "projector", _whole),
    (r"mm_projector\.proj\.[02]\.bias", "projector", _adamw),
)
