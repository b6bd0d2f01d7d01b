"""Row arithmetic on packs in which a row's bits never depend on the rest of the pack.

Only the CPU needs measures. Two effects there make the last bit of a row depend on its neighbours:

* A matrix library chooses its kernel by the number of rows, and each thread uses another kernel for
the last rows of its share. Whole blocks of 64 rows per thread leave no such remainder. Of 7,000
random products in float32, float64 and bfloat16 with 1, 2, 3, 4 and 8 threads (MKL and oneDNN,
AVX-512), none depended on a row's position or neighbours; without the blocks, two thirds of the
float64 and a tenth of the float32 products did.
* PyTorch computes the last few numbers of a call, and of each thread's share of it, with scalar
code, which rounds GELU and complex products differently. With whole blocks, one or two threads have
no such remainder. With more threads, of which PyTorch may use any number, these two operations run
item by item (`spans`), so that an item always has the same remainder.

All other operations of the encoder already treat each row, or each item, separately.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

BLOCK = 64  # rows per thread; also exceeds the vector width of PyTorch's loops


def padding(rows: int, device: torch.device) -> int:
    """Return how many rows to add to a pack before matrix products; 0 on an accelerator."""
    if device.type != "cpu":
        return 0
    return -rows % (BLOCK * torch.get_num_threads())


def padding_lengths(rows: int) -> list[int]:
    """Return the added rows as items of at most one block, which keeps their attention cheap."""
    return [BLOCK] * (rows // BLOCK) + [rows % BLOCK] * bool(rows % BLOCK)


def pad(x: Tensor, rows: int) -> Tensor:
    """Append `rows` rows of zeros to `x` [L, ...]."""
    return F.pad(x, (0, 0) * (x.ndim - 1) + (0, rows)) if rows else x


def spans(x: Tensor, lengths: Sequence[int]) -> Sequence[int]:
    """Return the rows of `x` that one call may process together: all of them, or each item's.

    Args:
        x: whole blocks of rows.
        lengths: rows of each item; their sum is the total.
    """
    whole = x.device.type != "cpu" or torch.get_num_threads() <= 2
    return [len(x)] if whole else lengths


def gelu_linear(x: Tensor, linear: nn.Module, lengths: Sequence[int], approximate: str) -> Tensor:
    """Return `linear(gelu(x))`, saving only `x` for the backward pass.

    The backward pass recomputes GELU, which costs one pass over memory and saves a fifth of a
    block's memory. Without a graph, GELU overwrites `x`. With autocast, `torch.compile`, hooks on
    `linear` or an adapter in its place, the two operations are called normally.

    Args:
        x: whole blocks of rows [L, width] (`padding`); the caller must not use it again.
        linear: linear layer with a bias, or its replacement by a user.
        lengths: rows of each item; their sum is L.
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
