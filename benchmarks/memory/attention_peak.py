"""Peak memory of the attention of one document, forward and backward, in each of its forms."""

from typing import Literal

import torch

from benchmarks.memory.live import PeakBytes
from kimi_pretrain.attention.blockwise import block_attention, blocks_of, whole_attention
from kimi_pretrain.attention.spans import KeySpans

Form = Literal["blocks", "whole"]
"""Block by block as `train.attention=portable`, or its twin, one matrix of logits."""


def attention_peak(
    form: Form,
    tokens: int,
    heads: int,
    qk_dim: int = 192,
    v_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
) -> int:
    """Return the most bytes that live at a time, inputs and gradients included.

    The widths are Kimi K2's by default. On the meta device nothing is computed: bytes are those of
    any other device, but for what an operator takes and frees within itself.
    """
    spans = KeySpans.of([0, tokens], [True])
    blocks = blocks_of(spans, torch.device(device))
    with PeakBytes() as live:
        q, k, v, grad = (
            torch.empty(tokens, heads, width, dtype=dtype, device=device)
            for width in (qk_dim, qk_dim, v_dim, v_dim)
        )
        leaves = [x.requires_grad_() for x in (q, k, v)]
        if form == "blocks":
            out, _ = block_attention(*leaves, blocks, 0.1)
        else:
            out, _ = whole_attention(*leaves, spans, 0.1)
        out.backward(grad)
    return live.peak
