"""Attention in plain torch that never holds a full logit matrix: `train.attention: portable`.

Queries are processed block by block, each block with all keys that any of its queries sees. Each
softmax therefore covers whole rows and needs no rescaling. For the backward pass it keeps only
queries, keys and values and recomputes the blocks (FlashAttention, arXiv:2205.14135, section 3.1,
which also splits the keys). The memory for logits is constant up to 8,192 keys (`LOGITS` /
`QUERIES`); beyond that it is one head's block, 128 x the document. All other memory grows linearly
with the number of tokens.

Adjacent short documents share a block and are hidden from each other by a mask: a row holds dozens
of them, and a separate product for each would be mostly overhead. A longer document gets separate
blocks.

A hidden value has weight zero, but zero times NaN is NaN: a NaN or infinite value spreads to all
queries of the blocks that contain its key, including queries of adjacent documents.

Shape suffixes: Q queries of this rank, R tokens of the row, N heads, D query/key width, V value
width, L queries of a block, K keys of a block.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kimi_pretrain.attention.spans import KeySpans

# Measured on CPU with documents of 10 to 8,192 tokens, widths 32/24 and 192/128: larger blocks
# waste more time on hidden logits, smaller blocks spend more on calls.
SHARED_QUERIES = 64
"""Maximum number of queries in a block that short documents share."""
QUERIES = 128
"""Number of queries in a block of a longer document."""
LOGITS = 1 << 20
"""Logits computed at a time, 4 MiB in fp32; a block's heads are split to stay near this number."""


@dataclass(frozen=True)
class Block:
    """Consecutive queries, and all keys that any of them sees.

    Attributes:
        queries: positions among the rank's queries.
        keys: positions in the row.
        shown: number of leading keys that every query sees.
        hidden_LK: True where a query does not see one of the other keys, bool
            [queries, keys - shown].
    """

    queries: slice
    keys: slice
    shown: int
    hidden_LK: Tensor

    def heads(self, num_heads: int) -> Iterator[slice]:
        """Yield runs of heads with about `LOGITS` logits each."""
        size = (self.queries.stop - self.queries.start) * (self.keys.stop - self.keys.start)
        step = max(1, LOGITS // size)
        for first in range(0, num_heads, step):
            yield slice(first, first + step)


def blocks_of(spans: KeySpans, device: torch.device) -> list[Block]:
    """Split a rank's queries into blocks, in order; every query is in exactly one block."""
    # Blocks inside one document only differ in size, because their queries are consecutive. So
    # blocks of one size share a mask.
    diagonal: dict[int, Tensor] = {}
    blocks = []
    for begin, end in _runs(spans):
        first_L, last_L = spans.first_Q[begin:end], spans.last_Q[begin:end]
        assert last_L[-1] - last_L[0] == end - begin - 1  # consecutive; see `diagonal`
        keys = slice(int(first_L[0]), int(last_L[-1]) + 1)
        if first_L[-1] == first_L[0]:  # one document: a causal mask suffices
            shown = int(last_L[0]) + 1 - keys.start
            if end - begin not in diagonal:
                diagonal[end - begin] = _hidden(first_L, last_L, keys, shown, device)
            hidden = diagonal[end - begin]
        else:
            shown, hidden = 0, _hidden(first_L, last_L, keys, 0, device)
        blocks.append(Block(slice(begin, end), keys, shown, hidden))
    return blocks


def _hidden(
    first_L: np.ndarray, last_L: np.ndarray, keys: slice, shown: int, device: torch.device
) -> Tensor:
    key_K = np.arange(keys.start + shown, keys.stop)
    hidden_LK = (key_K < first_L[:, None]) | (key_K > last_L[:, None])
    return torch.from_numpy(hidden_LK).to(device)


def _runs(spans: KeySpans) -> Iterator[tuple[int, int]]:
    """Yield the queries [begin, end) of each block."""
    first_Q, last_Q = spans.first_Q, spans.last_Q
    # Consecutive in the row, too; False where the rank's next context-parallel chunk begins.
    follows_Q = np.diff(last_Q) == 1
    cuts = np.flatnonzero((np.diff(first_Q) != 0) | ~follows_Q) + 1
    shared: tuple[int, int] | None = None  # an unfinished block of short documents
    for begin, end in pairwise([0, *cuts.tolist(), len(first_Q)]):
        short = last_Q[end - 1] - first_Q[begin] < SHARED_QUERIES
        if shared is not None:
            if short and follows_Q[begin - 1] and end - shared[0] <= SHARED_QUERIES:
                shared = shared[0], end
                continue
            yield shared
            shared = None
        if short:
            shared = begin, end
        else:
            for start in range(begin, end, QUERIES):
                yield start, min(start + QUERIES, end)
    if shared is not None:
        yield shared


def block_attention(
    q_QND: Tensor, k_RND: Tensor, v_RNV: Tensor, blocks: list[Block], scale: float
) -> tuple[Tensor, Tensor]:
    """Compute causal softmax attention inside each segment, in fp32 (fp64 for fp64 inputs).

    In bf16, logits near QK-Clip's threshold of 100 would be rounded to steps of 0.5.

    Args:
        q_QND: [this rank's tokens, heads, qk dim].
        k_RND, v_RNV: [tokens of the row, heads, qk dim or v dim], in the row's order.
        blocks: from `blocks_of`.
        scale: factor of the logits before the softmax.

    Returns:
        output [this rank's tokens, heads, v dim] in the type of the values, and the largest
        softmax input of each head and query, fp32 or fp64 [heads, queries], without a gradient.
    """
    return _BlockAttention.apply(q_QND, k_RND, v_RNV, blocks, scale)


class _BlockAttention(torch.autograd.Function):
    """Saves its inputs only; both passes compute a block's softmax with the same operations."""

    @staticmethod
    def forward(
        ctx: Any, q_QND: Tensor, k_RND: Tensor, v_RNV: Tensor, blocks: list[Block], scale: float
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(q_QND, k_RND, v_RNV)
        ctx.blocks, ctx.scale = blocks, scale
        wide, (queries, heads, _) = _wide(q_QND), q_QND.shape
        out_QNV = v_RNV.new_empty(queries, heads, v_RNV.shape[2])
        max_NQ = q_QND.new_empty(heads, queries, dtype=wide)
        q, k, v, out = (x.transpose(0, 1) for x in (q_QND, k_RND, v_RNV, out_QNV))
        for block in blocks:
            for some in block.heads(heads):
                mine, seen = (some, block.queries), (some, block.keys)
                logits_NLK = _logits(q[mine].to(wide), k[seen].to(wide), block, scale)
                max_NQ[mine] = logits_NLK.amax(-1)
                out[mine] = logits_NLK.softmax(-1) @ v[seen].to(wide)
        ctx.mark_non_differentiable(max_NQ)
        return out_QNV, max_NQ

    @staticmethod
    @once_differentiable  # pyright reads the decorated function's `ctx` as unnamed
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_QNV, (q_QND, k_RND, v_RNV) = grad_outputs[0], ctx.saved_tensors
        wide, scale = _wide(q_QND), ctx.scale
        dq_QND = torch.empty_like(q_QND)  # a query is in one block, a key in several
        dk_RND, dv_RNV = (torch.zeros_like(x, dtype=wide) for x in (k_RND, v_RNV))
        q, k, v, grad, dq, dk, dv = (
            x.transpose(0, 1) for x in (q_QND, k_RND, v_RNV, grad_QNV, dq_QND, dk_RND, dv_RNV)
        )
        for block in ctx.blocks:
            for some in block.heads(q_QND.shape[1]):
                mine, seen = (some, block.queries), (some, block.keys)
                q_NLD, g_NLV = q[mine].to(wide), grad[mine].to(wide)
                k_NKD, v_NKV = k[seen].to(wide), v[seen].to(wide)
                p_NLK = _logits(q_NLD, k_NKD, block, scale).softmax(-1)
                dv[seen].baddbmm_(p_NLK.mT, g_NLV)
                dp_NLK = g_NLV @ v_NKV.mT
                ds_NLK = torch.ops.aten._softmax_backward_data(dp_NLK, p_NLK, -1, wide)
                dq[mine] = (ds_NLK @ k_NKD).mul_(scale)
                dk[seen].baddbmm_(ds_NLK.mT, q_NLD, alpha=scale)
        return dq_QND, dk_RND.to(k_RND.dtype), dv_RNV.to(v_RNV.dtype), None, None


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _logits(q_NLD: Tensor, k_NKD: Tensor, block: Block, scale: float) -> Tensor:
    unused = q_NLD.new_empty(1, 1, 1)
    logits_NLK = torch.baddbmm(unused, q_NLD, k_NKD.mT, beta=0, alpha=scale)
    logits_NLK[:, :, block.shown :].masked_fill_(block.hidden_LK, float("-inf"))
    return logits_NLK


def whole_attention(
    q_QND: Tensor, k_RND: Tensor, v_RNV: Tensor, spans: KeySpans, scale: float
) -> tuple[Tensor, Tensor]:
    """Return the result of `block_attention` from one full logit matrix: the reference of tests.

    The logits are fp32, as in `block_attention`; probabilities are rounded to the type of the
    values.
    """
    wide, key_R = _wide(q_QND), torch.arange(spans.num_keys, device=q_QND.device)
    first_Q, last_Q = (
        torch.from_numpy(x).to(q_QND.device)[:, None] for x in (spans.first_Q, spans.last_Q)
    )
    logits_NQR = torch.einsum("qnd,rnd->nqr", q_QND.to(wide), k_RND.to(wide)) * scale
    logits_NQR = logits_NQR.masked_fill((key_R < first_Q) | (key_R > last_Q), float("-inf"))
    out_QNV = torch.einsum("nqr,rnv->qnv", logits_NQR.softmax(-1).to(v_RNV.dtype), v_RNV)
    return out_QNV, logits_NQR.detach().amax(-1)
