"""Interpolated grid, temporal code and rotary angles against torch and plain formulas."""

import math

import pytest
import torch
from torch.nn import functional as F

from moonvit3d.positions import (
    Positions,
    bicubic_matrix,
    resample,
    rotary_angles,
    rotate,
    rotate_qkv,
    working_dtype,
)

CPU = torch.device("cpu")


def positions(side, width, dtype=torch.float32):
    module = Positions(side, width).to(dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(side, side, width, dtype=torch.float64))
    return module


def interpolated(weight, h, w):
    """Interpolate like the reference: F.interpolate over the table as an image."""
    plane = weight.detach().permute(2, 0, 1)[None]
    out = F.interpolate(plane, size=(h, w), mode="bicubic", align_corners=False)
    return out[0].permute(1, 2, 0).flatten(0, 1)


@pytest.mark.parametrize("side", [6, 64])
@pytest.mark.parametrize(
    "size", [(2, 2), (2, 30), (6, 6), (64, 64), (8, 64), (64, 6), (38, 74), (16, 512)]
)
def test_matrix_product_equals_interpolate(side, size):
    torch.manual_seed(0)
    module = positions(side, 12)
    got = resample(module.weight, *size)
    torch.testing.assert_close(got, interpolated(module.weight, *size), rtol=0, atol=1.5e-6)
    double = positions(side, 12, torch.float64)
    got = resample(double.weight, *size)
    torch.testing.assert_close(got, interpolated(double.weight, *size), rtol=0, atol=1e-13)


def test_native_grid_is_the_table_itself():
    module = positions(6, 8)
    assert torch.equal(resample(module.weight, 6, 6), module.weight.flatten(0, 1))
    # One side of native size does not skip the interpolation of the other axis.
    assert not torch.equal(resample(module.weight, 6, 8)[:6], module.weight[0, :6])


def test_matrix_born_in_inference_mode_serves_training():
    bicubic_matrix.cache_clear()
    module = positions(6, 4)
    with torch.inference_mode():
        module([(1, 4, 8)])
    module([(1, 4, 8)]).sum().backward()
    assert module.weight.grad is not None


def test_temporal_code_is_added_to_chunks_only():
    module, width = positions(4, 8), 8
    plane = resample(module.weight, 4, 2)
    out = module([(1, 4, 2), (3, 4, 2)])
    assert torch.equal(out[:8], plane)
    for frame in range(3):
        omega = [10000 ** (-k / (width / 2)) for k in range(width // 2)]
        code = [math.sin(frame * o) for o in omega] + [math.cos(frame * o) for o in omega]
        got = out[8 + 8 * frame : 16 + 8 * frame] - plane
        torch.testing.assert_close(got, torch.tensor(code).expand(8, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 2e-5), (torch.float64, 1e-12)])
def test_rotation_is_complex_multiplication(dtype, atol):
    torch.manual_seed(0)
    head_dim, theta = 72, 10000.0
    grids = [(2, 4, 6), (1, 2, 512)]
    cos, sin = rotary_angles(grids, head_dim, theta, dtype, CPU)
    x = torch.randn(cos.shape[0], 3, head_dim, dtype=dtype)
    got = rotate(x, cos, sin)
    places = [(r, c) for t, h, w in grids for _ in range(t) for r in range(h) for c in range(w)]
    for i in range(0, len(places), 37):
        row, column = places[i]
        for k in range(head_dim // 4):
            f = theta ** (-4 * k / head_dim)
            for pair, place in ((2 * k, column), (2 * k + 1, row)):
                turn = complex(math.cos(place * f), math.sin(place * f))
                for head in range(3):
                    a, b = x[i, head, 2 * pair : 2 * pair + 2].tolist()
                    want = complex(a, b) * turn
                    have = complex(*got[i, head, 2 * pair : 2 * pair + 2].tolist())
                    assert abs(want - have) < atol * (1 + place)


def test_rotation_of_low_precision_is_computed_in_float32():
    torch.manual_seed(0)
    cos, sin = rotary_angles([(1, 2, 64)], 16, 10000.0, torch.float32, CPU)
    x = torch.randn(128, 2, 16).bfloat16()
    assert torch.equal(rotate(x, cos, sin), rotate(x.float(), cos, sin).bfloat16())


@pytest.mark.parametrize(
    ("dtype", "atol"), [(torch.float32, 1e-6), (torch.float64, 1e-14), (torch.bfloat16, 0)]
)
def test_rotation_in_place_equals_the_plain_one(dtype, atol):
    heads, head_dim, grids = 3, 24, [(2, 4, 6), (1, 2, 8)]
    cos, sin = rotary_angles(grids, head_dim, 10000.0, working_dtype(dtype), CPU)
    torch.manual_seed(0)
    leaf = torch.randn(64, 3 * heads * head_dim, dtype=dtype).requires_grad_()
    push = torch.randn(64, 3 * heads * head_dim, dtype=dtype)
    q, k, v = leaf.unflatten(1, (3, heads, head_dim)).unbind(1)
    want = torch.stack([rotate(q, cos, sin), rotate(k, cos, sin), v], 1).flatten(1)
    (wanted_grad,) = torch.autograd.grad(want, leaf, push)
    doubled = leaf * 1  # a leaf itself cannot be overwritten
    got = rotate_qkv(doubled, torch.complex(cos, sin), heads, [48, 16])
    assert got.data_ptr() == doubled.data_ptr()
    kept = push.clone()
    (grad,) = torch.autograd.grad(got, leaf, push)
    assert torch.equal(push, kept)  # the incoming gradient is not overwritten
    torch.testing.assert_close(got, want, rtol=0, atol=4 * atol)
    torch.testing.assert_close(grad, wanted_grad, rtol=0, atol=4 * atol or 4e-2)
    turned = push.T.contiguous().T  # an incoming gradient with another memory layout
    (again,) = torch.autograd.grad(
        rotate_qkv(leaf * 1, torch.complex(cos, sin), heads, [48, 16]), leaf, turned
    )
    assert torch.equal(again, grad)


def test_gradients_of_many_sizes_add_up_in_float32():
    """A bfloat16 grid is resampled to 60 sizes: its gradient is rounded once, not 60 times."""
    grids = [(1, h, w) for h in range(2, 22, 2) for w in range(2, 14, 2)]
    torch.manual_seed(0)
    push = torch.randn(sum(h * w for _, h, w in grids), 8, dtype=torch.float64)
    grads = []
    for dtype in (torch.float64, torch.bfloat16):
        positions = Positions(6, 8).to(dtype)
        (positions(grids) * push).sum().backward()
        grads.append(positions.weight.grad.double())
    assert (grads[1] - grads[0]).norm() < 3e-3 * grads[0].norm()
