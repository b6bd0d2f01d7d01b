"""Which optimizer trains a tensor, how it is cut into matrices, and which rank owns its state.

Everything here is decided by name and shape, so every rank comes to the same answer without
talking. Names are those of the Hugging Face checkpoint of Kimi K2.5. Kimi orthogonalises the parts
of a fused projection by themselves (Moonlight, arXiv:2502.16982, fig. 9 and 10): a query projection
is one matrix of all heads' content rows and one of all heads' rotary rows, and so on.
"""

import heapq
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from einops import rearrange
from torch import Tensor

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.newton_schulz import flops


@dataclass(frozen=True)
class ModelShape:
    """The sizes that say where one kind of row ends inside a fused projection."""

    num_heads: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int
    kv_lora_rank: int
    vision_heads: int


@dataclass(frozen=True)
class NamedTensor:
    """One tensor of the checkpoint as the optimizer sees it.

    Args:
        name: checkpoint name, unique on a rank; ranks of one replica group hold the same names.
        data: view into a model parameter, updated in place.
        grad: returns the gradient, same shape as data, valid when the optimizer steps and already
            summed over the replica group (the same bits on every member).
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

    def shape(self, matrix: Tensor) -> tuple[int, int]:
        """[rows, columns] of this piece of a [A, B] matrix."""
        return self.blocks * (self.stop - self.start), matrix.shape[1]

    def rows(self, matrix: Tensor) -> Tensor:
        """View [blocks, rows of a block, B] into a [A, B] matrix (splitting an axis is a view)."""
        return rearrange(matrix, "(n r) b -> n r b", n=self.blocks)[:, self.start : self.stop]


@dataclass(frozen=True)
class Rule:
    """What trains a tensor. `pieces` cover a Muon matrix exactly once; AdamW has none."""

    kind: Literal["muon", "adamw"]
    pieces: tuple[Piece, ...] = ()


def as_matrix(x: Tensor) -> Tensor:
    """View [A, ...] as [A, B]: a convolution becomes one row per output channel."""
    return x.flatten(1)


def rule_of(name: str, shape: Sequence[int], model: ModelShape) -> Rule:
    """The rule of a tensor.

    Args:
        name: checkpoint name.
        shape: its shape in the checkpoint.
        model: head counts and widths, to cut fused projections.

    Raises:
        ValueError: the name is not one of the checkpoint's, or the shape does not fit `model`.
    """
    shape = tuple(shape)
    for pattern, cut in _RULES:
        if re.fullmatch(pattern, name):
            return cut(name, shape, model)
    raise ValueError(
        f"optimizer: no rule for tensor '{name}' {shape}. Every trained tensor needs one, because "
        "a wrong default would train silently; add it to kimi_pretrain/optim/groups.py"
    )


def _adamw(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
    return Rule("adamw")


def _whole(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
    _check(name, shape, dims=2)
    return _cut(name, shape, 1, whole=shape[0])


def _convolution(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
    _check(name, shape, dims=4)
    return _cut(name, shape, 1, whole=shape[0])


def _query(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
    _check(name, shape, dims=2)
    return _cut(name, shape, model.num_heads, q_nope=model.qk_nope_dim, q_rope=model.qk_rope_dim)


def _latent(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
    _check(name, shape, dims=2)
    return _cut(name, shape, 1, latent=model.kv_lora_rank, k_rope=model.qk_rope_dim)


def _key_value(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
    _check(name, shape, dims=2)
    return _cut(name, shape, model.num_heads, k_nope=model.qk_nope_dim, v=model.v_dim)


def _vision_qkv(name: str, shape: tuple[int, ...], model: ModelShape) -> Rule:
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


def _cut(name: str, shape: tuple[int, ...], blocks: int, **parts: int) -> Rule:
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
    return Rule("muon", tuple(pieces))


_LAYER = r"language_model\.model\.layers\.\d+\."
_BLOCK = r"vision_tower\.encoder\.blocks\.\d+\."
_RULES: tuple[tuple[str, Callable[[str, tuple[int, ...], ModelShape], Rule]], ...] = (
    (r"language_model\.(model\.embed_tokens|model\.norm|lm_head)\.weight", _adamw),
    (_LAYER + r"(input_layernorm|post_attention_layernorm)\.weight", _adamw),
    (_LAYER + r"self_attn\.(q_a_layernorm|kv_a_layernorm)\.weight", _adamw),
    (_LAYER + r"self_attn\.(q_a_proj|o_proj)\.weight", _whole),
    (_LAYER + r"self_attn\.(q_b_proj|q_proj)\.weight", _query),
    (_LAYER + r"self_attn\.kv_a_proj_with_mqa\.weight", _latent),
    (_LAYER + r"self_attn\.kv_b_proj\.weight", _key_value),
    (_LAYER + r"mlp\.gate\.weight", _whole),
    (_LAYER + r"mlp\.(experts\.\d+\.|shared_experts\.)?(gate|up|down)_proj\.weight", _whole),
    (r"vision_tower\.patch_embed\.proj\.weight", _convolution),
    (r"vision_tower\.patch_embed\.(proj\.bias|pos_emb\.weight)", _adamw),
    (_BLOCK + r"(norm0|norm1)\.(weight|bias)", _adamw),
    (_BLOCK + r"wqkv\.weight", _vision_qkv),
    (_BLOCK + r"(wo|mlp\.fc0|mlp\.fc1)\.weight", _whole),
    (_BLOCK + r"(wqkv|wo|mlp\.fc0|mlp\.fc1)\.bias", _adamw),
    (r"vision_tower\.encoder\.final_layernorm\.(weight|bias)", _adamw),
    (r"mm_projector\.pre_norm\.(weight|bias)", _adamw),
    (r"mm_projector\.proj\.[02]\.weight", _whole),
    (r"mm_projector\.proj\.[02]\.bias", _adamw),
)


def choose_owners(
    named: Sequence[NamedTensor],
    model: ModelShape,
    group_sizes: Mapping[str, int],
    config: OptimConfig,
) -> dict[str, int]:
    """Give each tensor to one member of its replica group, longest job first.

    Muon tensors are spread by Newton-Schulz operations, because they are what takes the time.
    AdamW tensors then go where the least optimizer state lies, because memory is what they cost.

    Args:
        named: tensors of this rank; the members of a group must hold the same ones.
        model: head counts and widths.
        group_sizes: members of each replica group.
        config: for the number of Newton-Schulz steps.

    Returns:
        name -> index of the owner inside its replica group. Independent of the order of `named`.
    """
    owners: dict[str, int] = {}
    for group, size in sorted(group_sizes.items()):
        members = [tensor for tensor in named if tensor.replicas == group]
        rules = {t.name: rule_of(t.name, t.data.shape, model) for t in members}
        muon = [t for t in members if rules[t.name].kind == "muon"]
        costs = {t.name: muon_flops(t.data, rules[t.name], config.ns_steps) for t in muon}
        owners |= _longest_first(costs, [0] * size)
        state = [0] * size
        for tensor in muon:
            state[owners[tensor.name]] += state_bytes(tensor.data, "muon")
        adamw = [t for t in members if rules[t.name].kind == "adamw"]
        owners |= _longest_first({t.name: state_bytes(t.data, "adamw") for t in adamw}, state)
    return owners


def muon_flops(data: Tensor, rule: Rule, ns_steps: int) -> int:
    """Newton-Schulz operations of one update of a tensor."""
    matrix = as_matrix(data)
    return sum(flops(*piece.shape(matrix), ns_steps) for piece in rule.pieces)


def state_bytes(data: Tensor, kind: Literal["muon", "adamw"]) -> int:
    """Bytes of optimizer state: fp32 momentum or two moments, and a master if data is below."""
    moments = 1 if kind == "muon" else 2
    master = 1 if data.dtype.itemsize < 4 else 0
    return data.numel() * max(4, data.dtype.itemsize) * (moments + master)


def _longest_first(costs: Mapping[str, int], loads: Sequence[int]) -> dict[str, int]:
    """Longest-processing-time rule: the largest job goes to the least loaded member."""
    heap = [(load, member) for member, load in enumerate(loads)]
    heapq.heapify(heap)
    owners = {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        load, owners[name] = heap[0]
        heapq.heapreplace(heap, (load + costs[name], owners[name]))
    return owners


class Assignment(NamedTuple):
    """One line of the dry run: what happens to a tensor. `owner` counts inside `replicas`."""

    name: str
    shape: tuple[int, ...]
    pieces: tuple[str, ...]
    kind: str
    replicas: str
    owner: int


def assignment_table(
    named: Sequence[NamedTensor], owners: Mapping[str, int], model: ModelShape
) -> list[Assignment]:
    """Rows for people to read before a run, sorted by name; pieces read 'q_nope [8192, 1536]'."""
    rows = []
    for tensor in sorted(named, key=lambda tensor: tensor.name):
        rule = rule_of(tensor.name, tensor.data.shape, model)
        pieces = tuple(
            f"{piece.name} {list(piece.shape(as_matrix(tensor.data)))}" for piece in rule.pieces
        )
        shape = tuple(tensor.data.shape)
        rows.append(
            Assignment(tensor.name, shape, pieces, rule.kind, tensor.replicas, owners[tensor.name])
        )
    return rows
