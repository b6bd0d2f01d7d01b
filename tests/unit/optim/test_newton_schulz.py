"""Newton-Schulz against the polynomial applied to singular values in fp64."""

import math

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.newton_schulz import flops, orthogonalise, update_scale

SHAPES = [(8, 8), (8, 40), (40, 8), (1, 16), (33, 65)]


def direct(x: Tensor, steps: int = 5) -> Tensor:
    """U p(p(...p(s / |s|))) V^T: the same map, without a single matrix iteration."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


def matrix(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)],
)
def test_equals_the_polynomial_of_the_singular_values(shape, dtype, tolerance):
    x = matrix(shape)
    expected = direct(x)
    error = torch.linalg.matrix_norm(orthogonalise(x, 5, dtype) - expected)
    assert error <= tolerance * torch.linalg.matrix_norm(expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_is_near_the_orthogonal_factor_of_a_well_conditioned_matrix(shape):
    u, _, vt = torch.linalg.svd(matrix(shape), full_matrices=False)
    x = u @ torch.diag(torch.linspace(0.5, 2, min(shape), dtype=torch.float64)) @ vt
    o = orthogonalise(x, 5, torch.float64)
    mixed = u.T @ o @ vt.T  # diagonal: the singular vectors are kept
    values = mixed.diagonal()
    assert torch.allclose(mixed, torch.diag(values), atol=1e-12)
    assert values.min() > 0.65
    assert values.max() < 1.25


def test_a_batch_is_its_matrices_one_by_one():
    x = matrix((2, 3, 12, 20))
    o = orthogonalise(x, 5, torch.float64)
    for i in range(2):
        for j in range(3):
            assert torch.allclose(o[i, j], direct(x[i, j]), atol=1e-11)


def test_transposing_commutes():
    x = matrix((12, 20))
    tall = orthogonalise(x.T, 5, torch.float64)
    assert torch.allclose(tall, orthogonalise(x, 5, torch.float64).T, atol=1e-12)


def test_zero_stays_zero_and_the_input_is_untouched():
    zero = torch.zeros(4, 6)
    assert torch.equal(orthogonalise(zero, 5, torch.bfloat16), zero)
    x = matrix((4, 6))
    kept = x.clone()
    orthogonalise(x, 5, torch.float64)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_update_has_the_size_of_an_adamw_update(shape):
    """The real RMS is 0.167 to 0.175 for gradients; random ones lie close by."""
    update = update_scale(*shape) * orthogonalise(matrix(shape), 5, torch.float64)
    assert 0.15 < update.square().mean().sqrt() < 0.21


def test_update_scale_and_flops_by_hand():
    assert update_scale(100, 4) == pytest.approx(0.2 * 10)
    assert math.isclose(update_scale(3, 16), 0.8)
    # 2x3: gram 2*2*2*3, its square 2*2*2*2, the product 2*2*2*3; one step.
    assert flops(2, 3, 1) == 24 + 16 + 24 == flops(3, 2, 1)
    assert flops(2, 3, 5) == 5 * 64
