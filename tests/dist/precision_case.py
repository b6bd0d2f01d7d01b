"""Action of worker.py that compares bfloat16 attention implementations in a whole model."""

from functools import partial

import numpy as np
import torch

from kimi_pretrain.attention.blockwise import block_attention, blocks_of, whole_attention
from kimi_pretrain.attention.flex import block_mask, eager_kernel, flex_attention
from tests.dist.overlap_case import Recorded

FORMS = {
    "portable": (blocks_of, block_attention),
    "whole matrix": (lambda spans, device: spans, whole_attention),
    "flex": (block_mask, partial(flex_attention, kernel=eager_kernel)),
}


def attention_precision(run) -> dict[str, dict[str, float]]:
    """Return each form's relative distance of bfloat16 loss and gradients from float64's.

    The weights are equal, and every token goes to every expert, so that rounding cannot change
    routes. All gradients are compared as one long vector.
    """
    from kimi_pretrain.engine import model_builder
    from kimi_pretrain.engine.backbone import build_backbone
    from kimi_pretrain.engine.microbatch import build_microbatches
    from kimi_pretrain.engine.packed_attention import SpanCoreAttention

    batch, rows = next(run.loader), run.config.train.rows_per_microbatch

    def step(form, dtype):
        layout, function = FORMS[form]
        parts = {"layout": staticmethod(layout), "function": staticmethod(function)}
        kinds = {"portable": type("Core", (SpanCoreAttention,), parts)}
        before, model_builder.CORE_ATTENTION = model_builder.CORE_ATTENTION, kinds
        train = run.config.train.model_copy(update={"dtype": dtype, "attention": "portable"})
        try:
            config = run.config.model_copy(update={"train": train})
            backbone = build_backbone(config, run.mesh)
        finally:
            model_builder.CORE_ATTENTION = before
        backbone.reduction = Recorded()
        with torch.no_grad():
            for view in backbone.views():
                view.data.copy_(view.data.to(torch.bfloat16))
        microbatches = build_microbatches(batch, run.mesh, rows, np.zeros(0, np.int64))
        loss = float(backbone.train_step(microbatches, 1.0).loss_sum)
        grads = [backbone.grad_of(view).double().flatten() for view in backbone.views()]
        return loss, torch.cat(grads)

    loss, grads = step("whole matrix", "float64")
    found = {}
    for form in FORMS:
        of_form, of_grads = step(form, "bfloat16")
        found[form] = {
            "loss": abs(of_form - loss) / loss,
            "gradients": float((of_grads - grads).norm() / grads.norm()),
        }
    return found


ACTIONS = {"attention_precision": attention_precision}
