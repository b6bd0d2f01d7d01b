"""Compares RMSNorm and SwiGLU with torch's operators and checks what their graphs keep."""

import pytest
import torch
import torch.nn.functional as F

from kimi_pretrain.memory import pointwise
from kimi_pretrain.memory.pointwise import rms_norm, swiglu

# dtype -> tolerance of outputs and gradients, relative to the largest value
CLOSE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 1e-2}


def leaf(*shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def plain_swiglu(gate_up, weight):
    gate, up = gate_up.chunk(2, -1)
    out = F.silu(gate) * up
    return out if weight is None else out * weight[:, None].to(out.dtype)


def assert_same(found, wanted, dtype):
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        difference = (one.double() - other.double()).abs().max()
        assert difference <= CLOSE[dtype] * other.double().abs().max()


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("shape", [(7, 1, 24), (5, 24)])
def test_rms_norm_is_torchs(dtype, shape):
    x, weight, grad = leaf(*shape, dtype=dtype), leaf(24, dtype=dtype), leaf(*shape, dtype=dtype)
    out, wanted = rms_norm(x, weight, 1e-5), F.rms_norm(x, (24,), weight, 1e-5)
    assert_same([out], [wanted], dtype)
    found = torch.autograd.grad(out, (x, weight), grad)
    assert_same(found, torch.autograd.grad(wanted, (x, weight), grad), dtype)


@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_is_torchs(dtype, weighted):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gate_up, grad = leaf(6, 20, dtype=dtype), leaf(6, 10, dtype=dtype)
    weight = leaf(6, dtype=wide, seed=1) if weighted else None
    inputs = [gate_up] if weight is None else [gate_up, weight]
    out, wanted = swiglu(gate_up, weight), plain_swiglu(gate_up, weight)
    assert_same([out], [wanted], dtype)
    found = torch.autograd.grad(out, inputs, grad)
    assert_same(found, torch.autograd.grad(wanted, inputs, grad), dtype)


def test_gradients_by_differences():
    weight = leaf(4, dtype=torch.float64)
    assert torch.autograd.gradcheck(rms_norm, (leaf(3, 4, dtype=torch.float64), weight, 1e-5))
    assert torch.autograd.gradcheck(swiglu, (leaf(4, 6, dtype=torch.float64), weight))


def test_graphs_keep_inputs_alone():
    held: dict[int, int] = {}

    def count(tensor):
        held[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    x, weight = leaf(128, 64, dtype=torch.bfloat16), leaf(64, dtype=torch.bfloat16)
    probs = leaf(128, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        normed = rms_norm(x, weight, 1e-5)
        assert sum(held.values()) == x.nbytes + weight.nbytes + 128 * 4
        held.clear()
        out = swiglu(normed, probs)
        assert sum(held.values()) == normed.nbytes + probs.nbytes
    assert out.shape == (128, 32)


def test_a_frozen_weight_has_no_gradient():
    x = leaf(3, 4, dtype=torch.float32)
    frozen = leaf(4, dtype=torch.float32).detach()
    rms_norm(x, frozen, 1e-5).sum().backward()
    assert x.grad is not None


@pytest.mark.parametrize("function", ["_forward", "_backward"])
def test_the_formulas_can_be_compiled_whole(function):
    """Compiles as for CUDA, but without the kernels: no graph breaks, and any number of rows."""
    formula = getattr(pointwise, function).__wrapped__
    compiled = torch.compile(formula, backend="eager", fullgraph=True, dynamic=True)
    for rows in (5, 9):
        arguments = [leaf(rows, 8, dtype=torch.bfloat16), leaf(rows, dtype=torch.float32)]
        arguments = [x.detach() for x in arguments]
        if function == "_backward":
            arguments += [leaf(rows, 4, dtype=torch.bfloat16).detach(), True]
        found, wanted = compiled(*arguments), formula(*arguments)
        if function == "_forward":
            found, wanted = [found], [wanted]
        assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
