"""Arithmetic on packed rows that gives a row the same bits whatever it is packed with.

Only the CPU needs help. Two things there depend on a row's neighbours, both in the last bit:

* A matrix library picks its kernel by the number of rows, and each thread treats the last rows of
  its share by another kernel. Whole blocks of 64 rows for each thread leave no such rest: of
  7,000 random products in float32, float64 and bfloat16 with 1, 2, 3, 4 and 8 threads (MKL and
  oneDNN, AVX-512) none depended on the place or the company of a row; without the blocks two
  thirds of the float64 and a tenth of the float32 products did.
* PyTorch computes the last few numbers of a call, and of each thread's share of it, by scalar
  code, which rounds GELU and complex products differently. Whole blocks leave one or two threads
  no such rest; with more threads, of which PyTorch may use any number, these two are called item
  by item (`spans`): an item then always has the same rest.

Everything else that the encoder does treats each row, or each item, by itself already.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = 64  # rows for each thread; also more numbers than PyTorch's loops take at a time


def padding(rows: int, device: torch.device) -> int:
    """Rows to add to a pack of `rows` before its matrix products; 0 on an accelerator."""
    if device.type != "cpu":
        return 0
    return -rows % (BLOCK * torch.get_num_threads())


def padding_lengths(rows: int) -> list[int]:
    """Added rows as items of at most a block: what they attend to each other stays small."""
    return [BLOCK] * (rows // BLOCK) + [rows % BLOCK] * bool(rows % BLOCK)


def pad(x: Tensor, rows: int) -> Tensor:
    """`x` [L, ...] with `rows` rows of zeros behind it."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows)) if rows else x


def spans(x: Tensor, lengths: Sequence[int]) -> Sequence[int]:
    """Rows of `x` that one call may treat together: all of them, or each item's.

    Args:
        x: whole blocks of rows.
        lengths: rows of each item, adding up to all.
    """
    whole = x.device.type != "cpu" or torch.get_num_threads() <= 2
    return [len(x)] if whole else lengths


def gelu_linear(x: Tensor, linear: nn.Module, lengths: Sequence[int], approximate: str) -> Tensor:
    """`linear(gelu(x))`, keeping `x` alone for the backward pass.

    GELU is computed again there: one pass over memory for a fifth of what a block keeps. Without a
    graph it is written over `x`. Where others have a hand in it (autocast, `torch.compile`,
    hooks on `linear`, an adapter in its place), the two are called plainly.

    Args:
        x: whole blocks of rows [L, width] (`padding`); must not be used again by the caller.
        linear: with a bias, or what a user put in its place.
        lengths: rows of each item, adding up to L.
        approximate: "tanh" or "none".

    Returns:
        [L, out_features].
    """
    parts = spans(x, lengths)
    if _others_watch(x, linear):
        return linear(torch.cat([F.gelu(part, approximate=approximate) for part in x.split(parts)]))
    assert isinstance(linear, nn.Linear)
    if torch.is_grad_enabled():
        return _GeluLinear.apply(x, linear.weight, linear.bias, parts, approximate)
    return F.linear(_gelu(x, parts, approximate, out=x), linear.weight, linear.bias)


def _others_watch(x: Tensor, linear: nn.Module) -> bool:
    kind = x.device.type
    hooks = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks
    return (
        type(linear) is not nn.Linear
        or bool(hooks or linear._backward_pre_hooks)
        or (torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
        or torch.compiler.is_compiling()
    )


def _gelu(x: Tensor, parts: Sequence[int], approximate: str, out: Tensor) -> Tensor:
    for part, target in zip(x.split(parts), out.split(parts)):
        torch.ops.aten.gelu.out(part, approximate=approximate, out=target)
    return out


class _GeluLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, parts: Sequence[int], approximate: str
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.parts, ctx.approximate = parts, approximate
        return F.linear(_gelu(x, parts, approximate, torch.empty_like(x)), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        d_x = d_weight = d_bias = None
        if for_weight:
            d_weight = grad.T @ _gelu(x, ctx.parts, ctx.approximate, torch.empty_like(x))
        if for_bias:
            d_bias = grad.sum(0)
        if for_x:
            d_x = torch.ops.aten.gelu_backward(grad @ weight, x, approximate=ctx.approximate)
        return d_x, d_weight, d_bias, None, None
