"""Megatron-Core's parameters under the names of the published checkpoint.

One fused parameter is several tensors of the checkpoint: gate and up projections, and each routed
expert. A `View` is one such tensor: a name that does not depend on the layout, and a view into the
parameter's memory. Initialisation, the optimizer, checkpoints and the dry run's counts all go
through these names, so none of them knows the layout.

Under tensor parallelism a rank's view is a slice of the checkpoint's tensor, and the view knows
which; `engine.tp_full_params` puts the slices together.
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
# Along which dimension the tensor-parallel ranks share a tensor; they hold all others whole.
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
    """One tensor of the checkpoint inside a parameter of the model.

    Attributes:
        name: of the Hugging Face checkpoint.
        param: the parameter (or buffer) that holds it.
        index: slices that cut it out: `param[index]`; () for the whole.
        tp_slice: which slice of the checkpoint's tensor this is; None if it is all of it.
    """

    name: str
    param: Tensor
    index: tuple[int | slice, ...] = ()
    tp_slice: TensorSlice | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return this view of another tensor of the parameter's shape (its gradient)."""
        return tensor[self.index] if self.index else tensor

    @property
    def data(self) -> Tensor:
        """The view of the parameter itself, outside autograd."""
        return self.of(self.param.detach())

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the checkpoint's tensor."""
        shape = list(self.data.shape)
        if self.tp_slice is not None:
            shape[self.tp_slice.dim] *= self.tp_slice.count
        return tuple(shape)

    def slice_of(self, whole: Tensor) -> Tensor:
        """Return this view's slice of a tensor of the whole shape."""
        if self.tp_slice is None:
            return whole
        return whole.chunk(self.tp_slice.count, self.tp_slice.dim)[self.tp_slice.index]


def layers_of(chunk: nn.Module) -> list[int]:
    """Return the global numbers, from 0, of a chunk's decoder layers."""
    return [layer.layer_number - 1 for layer in chunk.decoder.layers]


def views(
    chunk: nn.Module,
    first_expert: int,
    *,
    buffers: bool = False,
    tp_rank: int = 0,
    num_tp: int = 1,
) -> Iterator[View]:
    """Yield the tensors of one model chunk (a GPTModel) in its own order.

    Args:
        chunk: a GPTModel.
        first_expert: global number of this rank's first expert.
        buffers: yield the routing biases too (they are no parameters).
        tp_rank, num_tp: which slice of shared tensors this rank holds, of how many.

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
