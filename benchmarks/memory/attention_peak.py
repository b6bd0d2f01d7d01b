"""Peak memory of attention over one document, forward and backward, in each form."""

from typing import Literal

import torch

from benchmarks.memory.live import PeakBytes
from kimi_pretrain.attention.blockwise import block_attention, blocks_of, whole_attention
from kimi_pretrain.attention.spans import KeySpans

Form = Literal["blocks", "whole"]
"""Block by block as in `train.attention=portable`, or the reference with one matrix of logits."""


def attention_peak(
    form: Form,
    tokens: int,
    heads: int,
    qk_dim: int = 192,
    v_dim: int = 128,
    dtype: torch.dtype = torch.float32,
    device: str = "meta",
) -> int:
    """Return the peak of live bytes, including inputs and gradients.

    The default widths are Kimi K2's. On the meta device nothing is computed. The bytes are those of
    any other device, except for memory that an operator allocates and frees internally.
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
