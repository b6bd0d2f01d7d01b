"""Maps Megatron-Core's parameters to the names of the published checkpoint.

A fused parameter holds several checkpoint tensors: gate and up projections, or the routed experts.
A `View` is one such tensor: a name that does not depend on the layout, and a view into the
parameter's memory. Initialisation, the optimizer, checkpoints and the counts of a dry run use these
names and are therefore independent of the layout.

Under tensor parallelism, a rank's view is a slice of the checkpoint tensor, described by
`View.tp_slice`; `engine.tp_full_params` joins the slices.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import Tensor, nn

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PREFIX = "language_model."
_OUTSIDE = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer.weight": "lm_head.weight",
}
_INSIDE = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_q_proj.weight": "self_attn.q_proj.weight",
    "self_attention.linear_q_down_proj.weight": "self_attn.q_a_proj.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_a_layernorm.weight",
    "self_attention.linear_q_up_proj.weight": "self_attn.q_b_proj.weight",
    "self_attention.linear_kv_down_proj.weight": "self_attn.kv_a_proj_with_mqa.weight",
    "self_attention.kv_layernorm.weight": "self_attn.kv_a_layernorm.weight",
    "self_attention.linear_kv_up_proj.weight": "self_attn.kv_b_proj.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_experts.down_proj.weight",
}
# Dimension along which tensor-parallel ranks slice a tensor; they hold all other tensors in full.
_SHARED = {
    "embed_tokens": 0,
    "lm_head": 0,
    "q_proj": 0,
    "q_b_proj": 0,
    "kv_b_proj": 0,
    "o_proj": 1,
    "gate_proj": 0,
    "up_proj": 0,
    "down_proj": 1,
}
_FUSED = {
    "mlp.linear_fc1.weight": "mlp",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_experts",
}


@dataclass(frozen=True)
class TensorSlice:
    """Slice `index` of `count` equal slices along a dimension."""

    dim: int
    index: int
    count: int


@dataclass(frozen=True)
class View:
    """One checkpoint tensor inside a parameter of the model.

    Attributes:
        name: name in the Hugging Face checkpoint.
        param: the parameter (or buffer) that holds it.
        index: the tensor is `param[index]`; () for the whole parameter.
        tp_slice: the slice of the checkpoint tensor that this view holds; None for all of it.
    """

    name: str
    param: Tensor
    index: tuple[int | slice, ...] = ()
    tp_slice: TensorSlice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this view of another tensor with the parameter's shape, such as its gradient."""
        return tensor[self.index] if self.index else tensor

    @property
    def data(self) -> Tensor:
        """The view of the parameter itself, outside autograd."""
        return self.of(self.param.detach())

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint tensor."""
        shape = list(self.data.shape)
        if self.tp_slice is not None:
            shape[self.tp_slice.dim] *= self.tp_slice.count
        return tuple(shape)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this view's slice of a tensor that has the full shape."""
        if self.tp_slice is None:
            return whole
        return whole.chunk(self.tp_slice.count, self.tp_slice.dim)[self.tp_slice.index]


def layers_of(chunk: nn.Module) -> list[int]:
    """Return the global indices, from 0, of a chunk's decoder layers."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def views(
    chunk: nn.Module,
    first_expert: int,
    *,
    buffers: bool = False,
    tp_rank: int = 0,
    num_tp: int = 1,
) -> Iterator[View]:
    """Yield the tensors of one model chunk in the order of its parameters.

    Args:
        chunk: a GPTModel.
        first_expert: global index of this rank's first expert.
        buffers: also yield the routing biases, which are buffers.
        tp_rank, num_tp: index of this rank's slice of shared tensors, number of slices.

    Raises:
        KeyError: a parameter has no name in the checkpoint.
    """
    for view in _all_views(chunk, first_expert, buffers):
        dim = None if ".mlp.experts." in view.name else _SHARED.get(view.name.split(".")[-2])
        shared = num_tp > 1 and dim is not None
        yield replace(view, tp_slice=TensorSlice(dim, tp_rank, num_tp)) if shared else view


def _all_views(chunk: nn.Module, first_expert: int, buffers: bool) -> Iterator[View]:
    for name, param in chunk.named_parameters():
        yield from _views_of(chunk, name, param, first_expert)
    if buffers:
        for name, buffer in chunk.named_buffers():
            if name.endswith("expert_bias"):
                yield from _views_of(chunk, name, buffer, first_expert)


def _views_of(chunk: nn.Module, name: str, param: Tensor, first_expert: int) -> Iterator[View]:
    match = _LAYER.fullmatch(name)
    if match is None:
        yield View(_PREFIX + _OUTSIDE[name], param)
        return
    layer, inside = chunk.decoder.layers[int(match[1])], match[2]
    prefix = f"{_PREFIX}model.layers.{layer.layer_number - 1}."
    if inside in _FUSED:
        half = param.shape[0] // 2
        yield View(f"{prefix}{_FUSED[inside]}.gate_proj.weight", param, (slice(0, half),))
        yield View(f"{prefix}{_FUSED[inside]}.up_proj.weight", param, (slice(half, None),))
    elif inside == "mlp.experts.gate_up":
        half = param.shape[1] // 2
        for local in range(param.shape[0]):
            expert = f"{prefix}mlp.experts.{first_expert + local}"
            yield View(f"{expert}.gate_proj.weight", param, (local, slice(0, half)))
            yield View(f"{expert}.up_proj.weight", param, (local, slice(half, None)))
    elif inside == "mlp.experts.down":
        for local in range(param.shape[0]):
            expert = f"{prefix}mlp.experts.{first_expert + local}"
            yield View(f"{expert}.down_proj.weight", param, (local,))
    else:
        yield View(prefix + _INSIDE[inside], param)
