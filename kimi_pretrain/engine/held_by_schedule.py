"""Frees the storage of tensors that a pipeline schedule holds after a forward pass but never reads.

Megatron-Core keeps the tensor that a chunk received until the chunk's backward pass. In the
combined schedule (`layout.overlap_experts`), the plan of a microbatch also keeps the inputs of each
node, for their gradients, and its outputs, as roots of the graph. The values that the backward pass
reads are saved by autograd. If autograd saved them elsewhere (`train.offload`) or did not save them
at all, only these references keep the storage alive: two residuals and the shared experts' output
for every layer and microbatch.

A hollowed tensor keeps its shape, graph node and gradient. Its values read as NaN, so an unexpected
reader shows up in the first loss or gradient norm.
"""

import math
from functools import partial

import torch
from megatron.core.models.common.model_chunk_schedule_plan import (
    TransformerLayerSchedulePlan,
    TransformerModelChunkSchedulePlan,
)
from megatron.core.pipeline_parallel.utils import NoopScheduleNode, ScheduleNode, get_comm_stream
from torch import Tensor


def hollow(tensor: Tensor) -> None:
    """Free the storage of a tensor; its shape, dtype, graph and gradient stay, its values are NaN.

    Unlike Megatron-Core, which leaves a single element, this keeps the full shape, because a leaf's
    gradient has the layout of the leaf.
    """
    # The current stream may still use this memory, which another stream allocated.
    tensor.record_stream(torch.cuda.current_stream())
    tensor.data = tensor.new_full((), math.nan).expand(tensor.shape)


def release_behind_layers(plan: TransformerModelChunkSchedulePlan, offloaded: bool) -> None:
    """Make a plan free tensors after each layer's forward pass once they are not needed.

    Args:
        plan: plan of one microbatch, which has not run yet.
        offloaded: True if autograd's saved tensors are in host memory; if not, the residuals are
            its saved tensors, and they stay.
    """
    previous: ScheduleNode = plan.pre_process
    for number in range(plan.num_layers()):
        layer = plan.get_layer(number)
        dense = isinstance(layer.moe_combine, NoopScheduleNode)
        last = layer.mlp if dense else layer.moe_combine
        if offloaded:
            _behind(last, partial(_release_residuals, plan, layer, previous, dense))
        elif not dense:
            _behind(last, partial(_release_shared, layer))
        previous = last
    _behind(previous, partial(_mark_as_sent, previous))


def _behind(node: ScheduleNode, release) -> None:
    """Call `release` after a node's forward pass, which runs once."""
    run = node.forward

    def forward(*inputs):
        # Restore the method of the class: this closure would make the node reference itself.
        node.__dict__.pop("forward", None)
        out = run(*inputs)
        release()
        return out

    node.forward = forward


def _mark_as_sent(node: ScheduleNode) -> None:
    """Record the communication stream on a chunk's output, which is freed after the send."""
    if isinstance(node.output, Tensor):
        node.output.record_stream(get_comm_stream())


def _release_shared(layer: TransformerLayerSchedulePlan) -> None:
    """Free the shared experts' output: it has been added to the residual and is not saved."""
    node = layer.pre_dispatch_computation
    for tensor in (*node.detached[1:], *node.before_detached[1:]):  # all but the residual
        hollow(tensor)


def _release_residuals(
    plan: TransformerModelChunkSchedulePlan,
    layer: TransformerLayerSchedulePlan,
    previous: ScheduleNode,
    dense: bool,
) -> None:
    """Free the layer's input, its middle residual, and the shared experts' output.

    The layer's own output is read later.
    """
    node = layer.pre_dispatch_computation
    plan.state.decoder_input = None  # it may be a view of the first layer's input
    held = [*node.inputs, previous.output]
    held += [*layer.mlp.inputs, node.output] if dense else [*node.detached, *node.before_detached]
    for tensor in held:
        hollow(tensor)
