"""RMSNorm and SwiGLU as autograd Functions that save little more than their inputs.

As a composition of torch operators, RMSNorm keeps four fp32 copies of its input if it has no fused
kernel, and SwiGLU keeps three extra tensors. The functions compute in fp32 (fp64 for fp64 inputs)
and round once. On CUDA each formula is compiled into one kernel, since a single fp32 copy of the
experts' tokens would take a gigabyte; RMSNorm uses torch's fused kernel there.

Shape suffixes: T tokens (any leading dimensions for the norm), H width, F half of a gated width.
"""

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def one_kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a pointwise function for CUDA tensors at its first call; on CPU it runs as is."""

    @wraps(function)
    def call(x: Tensor, *rest: Any) -> Any:
        return (_compiled(function) if x.is_cuda else function)(x, *rest)

    return call


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x_TH: Tensor, weight_H: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x^2) + eps) * weight, in the type of `x`.

    Args:
        x_TH: [..., width].
        weight_H: [width].
    """
    if x_TH.is_cuda:
        return F.rms_norm(x_TH, weight_H.shape, weight_H, eps)
    return _RmsNorm.apply(x_TH, weight_H, eps)  # type: ignore[no-any-return]


class _RmsNorm(torch.autograd.Function):
    """RMSNorm that saves its input, its weight and one number per token, like CUDA's kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(wide_dtype(x.dtype))
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale * weight.to(wide.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, scale = ctx.saved_tensors
        grad_wide = grad.to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            inner = grad_wide * weight.to(scale.dtype)
            grad_x = scale * (inner - normed * (inner * normed).mean(-1, keepdim=True))
            grad_x = grad_x.to(x.dtype)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad_wide * normed).flatten(0, -2).sum(0).to(weight.dtype)
        return grad_x, grad_weight, None


def swiglu(gate_up: Tensor, weight_T: Tensor | None = None) -> Tensor:
    """Return silu(gate) * up, with each row times its weight, in the type of `gate_up`.

    Args:
        gate_up: [..., 2F], gate first, then up.
        weight_T: one number per row, [...], any floating type; None: ones.

    Returns:
        [..., F].
    """
    return _SwiGlu.apply(gate_up, weight_T)  # type: ignore[no-any-return]


class _SwiGlu(torch.autograd.Function):
    """SwiGLU that saves its inputs only."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weight: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weight)
        return _forward(gate_up, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gate_up, weight = ctx.saved_tensors
        return _backward(gate_up, weight, grad, ctx.needs_input_grad[1])


@one_kernel
def _forward(gate_up: Tensor, weight: Tensor | None) -> Tensor:
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, -1)
    out = F.silu(gate) * up
    if weight is not None:
        out = out * weight.to(out.dtype).unsqueeze(-1)
    return out.to(gate_up.dtype)


@one_kernel
def _backward(
    gate_up: Tensor, weight: Tensor | None, grad: Tensor, of_weight: bool
) -> tuple[Tensor, Tensor | None]:
    gate, up = gate_up.to(wide_dtype(gate_up.dtype)).chunk(2, -1)
    grad = grad.to(gate.dtype)
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    grad_weight = None
    if weight is not None:
        if of_weight:
            grad_weight = (grad * silu * up).sum(-1).to(weight.dtype)
        grad = grad * weight.to(grad.dtype).unsqueeze(-1)
    grad_gate = grad * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat([grad_gate, grad * silu], -1).to(gate_up.dtype), grad_weight
