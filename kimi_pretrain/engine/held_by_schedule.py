"""Lets go of the values that a pipeline schedule holds after a forward pass and never reads.

Megatron-Core keeps the tensor that a chunk received until its backward pass, and the plan of a
microbatch in the combined schedule (`layout.overlap_experts`) what goes into and comes out of each
of its nodes: the inputs for their gradients, the outputs as roots of a graph. What needs no
gradient's place but values is saved by autograd. So where saved tensors wait elsewhere
(`train.offload`), or nothing saves them, these references alone would keep the storages: two
residuals and the shared experts' output of every layer and microbatch.

A tensor that was hollowed keeps its shape, its place in the graph and its gradient. A reader of its
values gets NaN, so that one that nobody thought of is seen in the first loss or gradient norm.
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
    """Let the storage of a tensor go; its shape, type, graph and gradient stay, its values are NaN.

    As wide as before, not of one number as in Megatron-Core: a leaf's gradient is laid out as the
    leaf is.
    """
    # This stream may be still at work with memory that belongs to another one.
    tensor.record_stream(torch.cuda.current_stream())
    tensor.data = tensor.new_full((), math.nan).expand(tensor.shape)


def release_behind_layers(plan: TransformerModelChunkSchedulePlan, offloaded: bool) -> None:
    """Have a plan let go, behind each layer's forward pass, of what is needed no more.

    Args:
        plan: of one microbatch, which has not run.
        offloaded: whether autograd's own references are to other memory; if not, the residuals are
            what it saves, and stay.
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
    """Call `release` behind a node's forward pass, which comes once."""
    run = node.forward

    def forward(*inputs):
        # That of its class again: this one would have the node hold itself.
        node.__dict__.pop("forward", None)
        out = run(*inputs)
        release()
        return out

    node.forward = forward


def _mark_as_sent(node: ScheduleNode) -> None:
    """Tell the allocator that the stream of communication sends a chunk's output, freed then."""
    if isinstance(node.output, Tensor):
        node.output.record_stream(get_comm_stream())


def _release_shared(layer: TransformerLayerSchedulePlan) -> None:
    """Let the shared experts' output go, which was added: nothing saves it."""
    node = layer.pre_dispatch_computation
    for tensor in (*node.detached[1:], *node.before_detached[1:]):  # behind the residual
        hollow(tensor)


def _release_residuals(
    plan: TransformerModelChunkSchedulePlan,
    layer: TransformerLayerSchedulePlan,
    previous: ScheduleNode,
    dense: bool,
) -> None:
    """Let go of the layer's input, the residual in its middle, and the shared experts' output.

    Its own output is still to be read.
    """
    node = layer.pre_dispatch_computation
    plan.state.decoder_input = None  # it may be a view of the first layer's input
    held = [*node.inputs, previous.output]
    held += [*layer.mlp.inputs, node.output] if dense else [*node.detached, *node.before_detached]
    for tensor in held:
        hollow(tensor)
