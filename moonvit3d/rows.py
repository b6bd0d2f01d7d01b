"""Arithmetic on packed rows that gives a row the same bits whatever it is packed with.

Only the CPU needs help. Two things there depend on a row's neighbours, both in the last bit:

* A matrix library picks its kernel by the number of rows, and each thread treats the last rows of
  its share by another kernel. Whole blocks of 64 rows for each thread leave no such rest: of
  12,000 random products in float32, float64 and bfloat16 with 1, 2, 3, 4 and 8 threads (MKL and
  oneDNN, AVX-512) none depended on the place or the company of a row; without the blocks a quarter
  of the float64 products did.
* PyTorch computes the last few numbers of a call, and of each thread's share of it, by scalar
  code, which rounds GELU and complex products differently. Whole blocks leave one or two threads
  no such rest; with more threads, of which PyTorch may use any number, these two are called item
  by item (``spans``): an item then always has the same rest.

Everything else that the encoder does treats each row, or each item, by itself already.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

BLOCK = 64  # rows for each thread; also more numbers than PyTorch's loops take at a time


def padding(rows: int, device: torch.device) -> int:
    """Rows to add to a pack of ``rows`` before its matrix products; 0 on an accelerator."""
    if device.type != "cpu":
        return 0
    return -rows % (BLOCK * torch.get_num_threads())


def pad(x: Tensor, rows: int) -> Tensor:
    """``x`` [L, ...] with ``rows`` rows of zeros behind it."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows)) if rows else x


def spans(x: Tensor, lengths: Sequence[int]) -> Sequence[int]:
    """Rows of ``x`` that one call may treat together: all of them, or each item's.

    Args:
        x: whole blocks of rows.
        lengths: rows of each item, adding up to all.
    """
    whole = x.device.type != "cpu" or torch.get_num_threads() <= 2
    return [len(x)] if whole else lengths


def gelu(x: Tensor, lengths: Sequence[int], approximate: str) -> Tensor:
    """GELU of packed rows [L, width]; without a graph to keep, in the memory of ``x`` itself.

    Args:
        x: whole blocks of rows (``padding``); must not be used again by the caller.
        lengths: rows of each item, adding up to L.
        approximate: "tanh" or "none".
    """
    if torch.is_grad_enabled() and x.requires_grad:
        if x.device.type == "cpu":
            return _ItemwiseGelu.apply(x, lengths, approximate)
        return F.gelu(x, approximate=approximate)
    return _gelu(x, lengths, approximate, out=x)


def _gelu(x: Tensor, lengths: Sequence[int], approximate: str, out: Tensor) -> Tensor:
    parts = spans(x, lengths)
    for part, target in zip(x.split(parts), out.split(parts)):
        torch.ops.aten.gelu.out(part, approximate=approximate, out=target)
    return out


class _ItemwiseGelu(torch.autograd.Function):
    """Writes each item's part into one result: no second copy of the widest activation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lengths: Sequence[int], approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        return _gelu(x, lengths, approximate, out=torch.empty_like(x))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        grad = torch.ops.aten.gelu_backward(grads[0], x, approximate=ctx.approximate)
        return grad, None, None
