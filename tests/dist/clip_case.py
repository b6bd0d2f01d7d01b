"""Actions of worker.py on the attention maxima and QK-Clip."""

import tempfile
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import nn

PLANTED = {0: 1, 2: 3}  # layer -> a head whose queries are scaled up
FACTOR = 60.0


@contextmanager
def _watched(backbone, documents):
    """Collect queries and keys of each layer, microbatch by microbatch.

    Padding queries and keys are made huge on input, because attention must ignore them.
    """
    from kimi_pretrain.engine.packed_attention import PackedCoreAttention

    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    hooks = []
    for chunk in backbone.chunks:
        for module in chunk.modules():
            if isinstance(module, PackedCoreAttention):
                into = seen.setdefault(module.layer_number - 1, [])

                def watch(module, inputs, into=into):
                    query, key, *rest = inputs
                    padding = torch.ones(len(query), 1, 1)
                    for begin, end in documents[len(into)]:
                        padding[begin:end] = 0
                    into.append((query.detach().clone(), key.detach().clone()))
                    return query * (1 + 99 * padding), key * (1 + 99 * padding), *rest

                hooks.append(module.register_forward_pre_hook(watch))
    yield seen
    for hook in hooks:
        hook.remove()


def _documents(plan, rows_per_microbatch: int) -> list[list[tuple[int, int]]]:
    """Return begin and end of every document in its microbatch, from the plan's sample table."""
    found = [[] for _ in range(plan.num_rows // rows_per_microbatch)]
    samples = plan.samples
    for row, start, length in zip(samples.row, samples.start, samples.length, strict=True):
        begin = int(row % rows_per_microbatch) * plan.seq_len + int(start)
        found[int(row) // rows_per_microbatch].append((begin, begin + int(length)))
    return found


def _brute_force(seen, documents, scale: float) -> torch.Tensor:
    """Return [layers, microbatches, heads]: the largest logit over all visible pairs."""
    table = []
    for layer in sorted(seen):
        of_layer = []
        for (q, k), inside in zip(seen[layer], documents, strict=True):
            largest = torch.full((q.shape[1],), -torch.inf)
            for begin, end in inside:
                for query in range(begin, end):
                    logits = (q[query] * k[begin : query + 1]).sum(-1) * scale
                    largest = torch.maximum(largest, logits.amax(0))
            of_layer.append(largest)
        table.append(torch.stack(of_layer))
    return torch.stack(table)


def _step(run, batch):
    """Run a step; return the maxima that the update used, [layers, heads], and its report."""
    taken, take = {}, run.backbone.take_max_logits

    def watch():
        taken.update(take())
        return taken

    run.backbone.take_max_logits = watch
    report = run.train_step.run(batch)
    del run.backbone.take_max_logits
    return torch.stack([taken[layer] for layer in sorted(taken)]), report.update


def clip_proof(run) -> dict:
    """Run one batch twice with a learning rate that changes nothing, so that only QK-Clip acts."""
    language, train = run.config.model.language, run.config.train
    width = language.qk_nope_dim + language.qk_rope_dim
    for view in run.backbone.views():
        for layer, head in PLANTED.items():
            if view.name.endswith(f"layers.{layer}.self_attn.q_proj.weight"):
                view.data[head * width : (head + 1) * width] *= FACTOR
    batch = next(run.loader)
    documents = _documents(batch.plan, train.rows_per_microbatch)
    with _watched(run.backbone, documents) as seen:
        first, report = _step(run, batch)
    brute = _brute_force(seen, documents, width**-0.5)
    second, _ = _step(run, batch)
    return {
        "first": first,
        "second": second,
        "brute": brute,
        "max_logits": torch.from_numpy(report.max_logits),
        "clipped_heads": report.clipped_heads,
        "padding": batch.plan.num_rows * batch.plan.seq_len - int(batch.plan.samples.length.sum()),
        "documents": sum(map(len, documents)),
        "after evaluation": _after_evaluation(run, batch),
        **_skipped(run),
    }


def _after_evaluation(run, batch) -> torch.Tensor:
    """Return the maxima that an evaluation leaves for the next update."""
    from kimi_pretrain.engine.microbatch import build_microbatches

    rows = run.config.train.rows_per_microbatch
    microbatches = build_microbatches(batch, run.mesh, rows, np.zeros(0, np.int64))
    run.backbone.evaluate(microbatches, lambda logits: None)
    return torch.stack(list(run.backbone.take_max_logits().values()))


def _skipped(run) -> dict[str, int]:
    """Return the skipped steps after one non-finite step, and after a resume from there."""
    from kimi_pretrain.run import Run
    from tests.dist.basic_case import planted_infinity

    next(run.loader)  # the steps above used one batch twice
    planted_infinity(run)
    run.step = 4  # two steps of `clip_proof`, a good one, and the one not applied
    with tempfile.TemporaryDirectory() as root:
        resumed = Run(run.config, run.mesh, run.save(Path(root)))
        resumed.close()
    return {
        "skipped": run.update.skipped_steps,
        "updates": run.update.optimizer.steps,
        "skipped when resumed": resumed.update.skipped_steps,
        "updates when resumed": resumed.update.optimizer.steps,
    }


class PlainKernel(nn.Module):
    """Plain torch twin of `TEDotProductAttention`, with the same interface.

    Documents start at `cu_seqlens_q_padded` and have the lengths of `cu_seqlens_q`; the space after
    them gives zeros. It stores maxima per head in the dtype of the output.
    """

    def __init__(self, config, layer_number, mask_type, attention_type, **options):
        super().__init__()
        assert config.log_max_attention_logit
        assert (mask_type.name, attention_type) == ("padding_causal", "self")
        self.scale = options["softmax_scale"]
        self.widths = options["k_channels"], options["v_channels"]
        self.current_max_attn_logits = None

    def forward(self, q, k, v, attention_mask, mask_type, packed_seq_params):
        rows = packed_seq_params
        assert attention_mask is None
        assert (rows.qkv_format, mask_type.name) == ("thd", "padding_causal")
        assert (k.shape[-1], v.shape[-1]) == self.widths
        ends, begins = rows.cu_seqlens_q.tolist(), rows.cu_seqlens_q_padded.tolist()
        assert rows.pad_between_seqs == (ends != begins)
        out, maxima = torch.zeros_like(v), []
        for begin, length in zip(begins[:-1], np.diff(ends).tolist(), strict=True):
            assert length <= rows.max_seqlen_q
            inside = slice(begin, begin + length)
            logits = torch.einsum("qnd,knd->nqk", q[inside].float(), k[inside].float()) * self.scale
            future = torch.ones(length, length, dtype=torch.bool).triu(1)
            logits = logits.masked_fill(future, -torch.inf)
            given = torch.einsum("nqk,knv->qnv", logits.softmax(-1).to(v.dtype), v[inside])
            out = out.index_copy(0, torch.arange(begin, begin + length), given)
            if length:
                maxima.append(logits.detach().amax(dim=(1, 2)))
        found = torch.stack(maxima).amax(0).to(out.dtype)
        if self.current_max_attn_logits is not None:
            found = torch.maximum(found, self.current_max_attn_logits)
        self.current_max_attn_logits = found
        return out.flatten(1)


def kernel_wiring(run) -> dict:
    """Run one batch through each attention.

    These are our own, `FlexCoreAttention` over torch's uncompiled operator, and
    `FusedCoreAttention` over `PlainKernel`.
    """
    from megatron.core.extensions import transformer_engine

    from kimi_pretrain.attention import flex
    from kimi_pretrain.config import ConfigError
    from kimi_pretrain.engine import backbone as backbone_module
    from kimi_pretrain.engine.backbone import build_backbone
    from kimi_pretrain.engine.fused_attention import FusedCoreAttention, kernel_rows
    from kimi_pretrain.engine.microbatch import build_microbatches
    from kimi_pretrain.engine.packed_attention import document_borders, of_all_heads
    from kimi_pretrain.update import Update

    transformer_engine.TEDotProductAttention = PlainKernel
    flex.fused_kernel = flex.eager_kernel
    refusals, backbones = {}, {"portable": run.backbone}
    for kind in ("flex", "transformer_engine"):
        train = run.config.train.model_copy(update={"attention": kind})
        config = run.config.model_copy(update={"train": train})
        try:
            build_backbone(config, run.mesh)
        except ConfigError as error:
            refusals[kind] = str(error)
        check, backbone_module.check_kind = backbone_module.check_kind, lambda config: None
        backbone = backbones[kind] = build_backbone(config, run.mesh)
        backbone_module.check_kind = check
        Update(config, run.mesh, run.encoder, backbone)  # decides where gradients are summed
    batch, rows = next(run.loader), run.config.train.rows_per_microbatch
    results = {}
    for name, one in backbones.items():
        microbatches = build_microbatches(batch, run.mesh, rows, np.zeros(0, np.int64))
        loss = float(one.train_step(microbatches, 1.0).loss_sum)
        maxima = torch.stack(list(one.take_max_logits().values()))
        again = torch.stack(list(one.take_max_logits().values()))
        grads = {view.name: one.grad_of(view).clone() for view in one.views()}
        results[name] = {"loss": loss, "maxima": maxima, "again": again, "grads": grads}
    fused = [module for module in _modules(backbone) if isinstance(module, FusedCoreAttention)]
    kinds = [type(m).__name__ for m in _modules(backbones["flex"]) if hasattr(m, "pads_values")]
    longest = max(np.diff(m.packed.documents[0]).max() for m in microbatches)
    borders = document_borders([0, 4, 10, 15, 16, 20], [False, True, True, False, True])
    kernel = kernel_rows(borders, torch.device("cpu"))
    return {
        **results,
        "refusals": refusals,
        "flex modules": kinds,
        "fused modules": len(fused),
        "kept by the kernels": [module.kernel.current_max_attn_logits for module in fused],
        "longest": int(longest),
        "sizes": [microbatch.packed.kernel.max_seqlen_q for microbatch in microbatches],
        "borders": borders,
        "plain borders": document_borders([0, 4, 9], [True, True]),
        "only padding": document_borders([0, 4, 9], [False, False]),
        "kernel": vars(kernel),  # plain values, because the test must not import Megatron-Core
        "heads": [of_all_heads(torch.arange(2.0), 6, rank, 3) for rank in range(3)],
    }


def _modules(backbone):
    return [module for chunk in backbone.chunks for module in chunk.modules()]


ACTIONS = {"clip_proof": clip_proof, "kernel_wiring": kernel_wiring}
