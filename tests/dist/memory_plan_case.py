"""Actions of worker.py that measure the live memory of a step."""

from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef


class _Attention(torch.autograd.Function):
    """Saves query, key and value, like attention without a logit matrix."""

    @staticmethod
    def forward(ctx, query, key, value):
        ctx.save_for_backward(query, key, value)
        return value.new_zeros(len(query), *value.shape[1:])


def kept_bytes(run) -> dict[str, int]:
    """Return the bytes kept after one microbatch's forward: expert layer, dense layer, and head.

    "head" is norm, head and loss. All values are differences between models. Storages are counted
    while the graph exists.
    """
    from megatron.core.transformer import multi_latent_attention

    from kimi_pretrain.engine.packed_attention import PackedCoreAttention

    def attend(self, query, key, value, *unused, **ignored):
        return _Attention.apply(query, key, value).flatten(1)

    plain = PackedCoreAttention.forward, multi_latent_attention._prepare_mla_core_attention_value
    PackedCoreAttention.forward = attend
    multi_latent_attention._prepare_mla_core_attention_value = (
        lambda attention, query, value, *rest: (value, False, None, None)
    )
    try:
        one, two, dense = (_model_bytes(run, *sizes) for sizes in ((1, 0), (2, 0), (2, 1)))
    finally:
        PackedCoreAttention.forward = plain[0]
        multi_latent_attention._prepare_mla_core_attention_value = plain[1]
    return {"experts": two - one, "dense": dense - one, "head": one - (two - one)}


def _model_bytes(run, num_layers: int, num_dense_layers: int) -> int:
    from benchmarks.memory.layer_bytes import left_bytes
    from kimi_pretrain.engine.backbone import build_backbone

    sizes = {"num_layers": num_layers, "num_dense_layers": num_dense_layers}
    language = run.config.model.language.model_copy(update=sizes)
    model = run.config.model.model_copy(update={"language": language})
    backbone = build_backbone(run.config.model_copy(update={"model": model}), run.mesh)
    return left_bytes(backbone, _microbatches(run)[0])


def planned(run) -> list[str]:
    """Return the tensors that only a combined schedule's microbatch plan keeps after its forward.

    These are tensors that the policy does not keep, or keeps elsewhere. The last layer's output is
    excluded, because it is read outside the policy, and so are single-number weights of sent
    tokens.
    """
    from megatron.core.pipeline_parallel.utils import set_streams

    backbone, microbatch = run.backbone, _microbatches(run)[0]
    chunk, policy = backbone.chunks[0], backbone.policy
    set_streams()
    policy.begin_step()
    plan = backbone.forward(microbatch, chunk, microbatch.labels, chunk.build_schedule_plan)
    loss = type(plan).run(plan, None)
    chunk.forget_plans()
    kept = {one.tensor.untyped_storage()._cdata for one in policy._kept}
    if policy.host is not None:
        on_device = [copy._original for copy in policy.host._all if copy._original is not None]
        kept |= {tensor.untyped_storage()._cdata for tensor in on_device}
    nodes = {"before": plan.pre_process}
    for number in range(plan.num_layers()):
        layer = plan.get_layer(number)
        for part in ("pre_dispatch_computation", "moe_dispatch", "mlp", "moe_combine"):
            nodes[f"{number} {part}"] = getattr(layer, part)
    *_, last = nodes
    alone = []
    for name, node in nodes.items():
        for what in ("inputs", "output", "detached", "before_detached"):
            held = getattr(node, what, None)
            for tensor in held if isinstance(held, list | tuple) else (held,):
                if tensor is None or tensor.dim() < 2 or (name, what) == (last, "output"):
                    continue
                storage = tensor.untyped_storage()
                if storage._cdata not in kept and storage.nbytes() > tensor.itemsize:
                    alone.append(f"{name} {what} {list(tensor.shape)}")
    state = plan.state.decoder_input
    if state is not None and state.untyped_storage()._cdata not in kept:
        alone.append("decoder_input")
    assert loss.grad_fn is not None
    return sorted({one for some in run.mesh.all_gather_object(alone) for one in some})


def in_flight(run) -> list[Any]:
    """Return, per rank, its stage, its peak microbatches in flight and its peak live outputs.

    Microbatches in flight are counted per chunk in a step of the real schedule. Outputs are counted
    at the end of a forward pass, without the pass's own.
    """
    backbone = run.backbone
    outputs, most = [], 0
    held, best = [0] * len(backbone.chunks), [0] * len(backbone.chunks)
    forward = backbone.forward

    def counted(batch, model, labels, *rest):
        nonlocal best, most
        out = forward(batch, model, labels, *rest)
        most = max(most, sum(not one.expired() for one in outputs))
        if out.numel() > batch.tokens.numel():  # otherwise losses, which the schedule does not send
            outputs.append(StorageWeakRef(out.untyped_storage()))
        chunk = backbone.chunks.index(getattr(model, "module", model))
        held[chunk] += 1
        if sum(held) > sum(best):
            best = list(held)

        def done(gradient):
            held[chunk] -= 1

        out.register_hook(done)
        return out

    backbone.forward = counted
    try:
        backbone.train_step(_microbatches(run), 1.0)
    finally:
        backbone.forward = forward
    assert not any(held)
    return run.mesh.all_gather_object((run.mesh.stage, tuple(best), most))


def _microbatches(run) -> list:
    from kimi_pretrain.engine.microbatch import build_microbatches

    batch, rows = next(run.loader), run.config.train.rows_per_microbatch
    return build_microbatches(batch, run.mesh, rows, np.zeros(0, np.int64))


ACTIONS = {"kept_bytes": kept_bytes, "planned": planned, "in_flight": in_flight}
