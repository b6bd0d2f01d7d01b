"""Attention by torch's FlexAttention on CUDA: `train.attention: flex`.

It is one fused Triton kernel, compiled on first use (arXiv:2412.05496). It holds no logit matrix,
skips hidden keys by blocks and takes values narrower than queries without padding. Next to the
output it returns the largest logit of each query (`AuxRequest.max_scores`). Its backward pass uses
no atomics.

The non-empty blocks of 128 x 128 logits are computed from the spans once per microbatch;
`create_block_mask` would inspect every pair of the row.

Torch's public function refuses maxima and gradients on a CPU, but its operator computes both there
with a full masked matrix. Tests use it as `eager_kernel` to run everything but the Triton code.

Shape suffixes as in `blockwise`; I blocks of queries, J blocks of keys.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.nn.attention.flex_attention import BlockMask

from kimi_pretrain.attention.spans import KeySpans

BLOCK = 128

Kernel = Callable[[Tensor, Tensor, Tensor, BlockMask, float], tuple[Tensor, Tensor]]
"""Takes q, k, v [1, heads, tokens, dim], the mask and the scale; returns the output
[1, heads, queries, v dim] and the largest logits [1, heads, queries]."""


def block_mask(spans: KeySpans, device: torch.device, block: int = BLOCK) -> BlockMask:
    """Return the result of `create_block_mask`, computed from the spans only.

    Args:
        spans: keys that each query sees.
        device: of the attention.
        block: number of queries, and of keys, in a block.
    """
    some_IJ, whole_IJ = _blocks(spans, block)
    first_Q, last_Q = (
        torch.from_numpy(places).to(device, torch.int32) for places in (spans.first_Q, spans.last_Q)
    )

    def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first_Q[query]) & (key <= last_Q[query])

    return BlockMask.from_kv_blocks(
        *_ordered(some_IJ & ~whole_IJ, device),
        *_ordered(whole_IJ, device),
        BLOCK_SIZE=block,
        mask_mod=sees,
        seq_lengths=(len(spans.last_Q), spans.num_keys),
    )


def _blocks(spans: KeySpans, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Return which blocks are at least partly visible, and which fully; bool [I, J] each."""
    queries, keys = len(spans.first_Q), spans.num_keys
    first_J = np.arange(0, keys, block)
    starts = np.arange(0, queries, block)
    # A query sees one run of blocks: add +1 at its begin and -1 after its end, then cumsum.
    change = np.zeros((len(starts), len(first_J) + 1), dtype=np.int64)
    block_Q = np.arange(queries) // block
    np.add.at(change, (block_Q, spans.first_Q // block), 1)
    np.add.at(change, (block_Q, spans.last_Q // block + 1), -1)
    some_IJ = change.cumsum(1)[:, :-1] > 0
    whole_IJ = (np.maximum.reduceat(spans.first_Q, starts)[:, None] <= first_J) & (
        np.minimum.reduceat(spans.last_Q, starts)[:, None] >= first_J + block - 1
    )
    whole_IJ[queries // block :] = False  # a partial last block of queries
    return some_IJ, whole_IJ


def _ordered(blocks_IJ: np.ndarray, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the number of key blocks per query block, and the block indices with these first."""
    number_I = blocks_IJ.sum(1, dtype=np.int32)
    index_IJ = np.argsort(~blocks_IJ, axis=1, kind="stable").astype(np.int32)
    number, index = (torch.from_numpy(x)[None, None].to(device) for x in (number_I, index_IJ))
    return number, index


def flex_attention(
    q_QND: Tensor,
    k_RND: Tensor,
    v_RNV: Tensor,
    mask: BlockMask,
    scale: float,
    kernel: Kernel | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the attention of `blockwise.block_attention`, with the same shapes.

    Args:
        q_QND: [this rank's tokens, heads, qk dim].
        k_RND, v_RNV: [tokens of the row, heads, qk dim or v dim], in the row's order.
        mask: from `block_mask`.
        scale: factor of the logits before the softmax.
        kernel: by default the compiled kernel.

    Returns:
        output [this rank's tokens, heads, v dim], and the largest softmax input of each head and
        query, fp32 (fp64 for fp64) [heads, queries], without a gradient.
    """
    kernel = kernel or fused_kernel
    q, k, v = (x.transpose(0, 1)[None] for x in (q_QND, k_RND, v_RNV))
    out, max_scores = kernel(q, k, v, mask, scale)
    return out[0].transpose(0, 1), max_scores[0].detach()


def fused_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the compiled kernel; CUDA only."""
    out, aux = _compiled()(
        q, k, v, block_mask=mask, scale=scale, return_aux=torch_flex.AuxRequest(max_scores=True)
    )
    return out, aux.max_scores


@cache
def _compiled() -> Callable[..., Any]:
    # Static shapes: a run has one shape, an evaluation perhaps another. Each combination of shape,
    # dtype and grad mode compiles a kernel, up to 8 (torch._dynamo.config.recompile_limit). With
    # `fullgraph` the ninth is an error instead of a silent fallback to full matrices.
    return torch.compile(torch_flex.flex_attention, dynamic=False, fullgraph=True)


def eager_kernel(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Run the operator behind torch's function uncompiled: full matrices, on any device."""
    from torch._higher_order_ops.flex_attention import flex_attention as operator

    options = {
        "BACKEND": "AUTO", "PRESCALE_QK": False, "ROWS_GUARANTEED_SAFE": False,
        "BLOCKS_ARE_CONTIGUOUS": False, "WRITE_DQ": True, "OUTPUT_LOGSUMEXP": True,
        "OUTPUT_MAX": True,
    }  # fmt: skip
    out, _, max_scores = operator(q, k, v, torch_flex._identity, mask.as_tuple(), scale, options)
    return out, max_scores * math.log(2)  # the operator returns them in base 2
