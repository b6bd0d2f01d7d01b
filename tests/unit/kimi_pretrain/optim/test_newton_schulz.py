"""Compares Newton-Schulz with an fp64 polynomial of singular values, the SVD, and torch."""

import math

import pytest
import torch
import torch.optim._muon as torch_muon
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from kimi_pretrain.optim import newton_schulz
from kimi_pretrain.optim.newton_schulz import (
    COEFFICIENTS,
    EPSILON,
    flops,
    iterate,
    orthogonalise,
    orthogonalise_reference,
    orthogonality_error,
    segments,
    update_scale,
)

# Square, wide, tall; the direct form if nearly square, else two segments (`everything_small`).
SHAPES = [(8, 8), (8, 40), (40, 8), (1, 16), (33, 65), (65, 33), (40, 44)]


@pytest.fixture(params=["as it is", "everything small"])
def sizes(request, monkeypatch):
    """Return which limits apply: the real ones, or low ones for strips and the Gram form."""
    if request.param == "everything small":
        monkeypatch.setattr(newton_schulz, "STRIP_ROWS", 4)
        monkeypatch.setattr(newton_schulz, "GRAM_ROWS", 1)
    segments.cache_clear()
    yield request.param
    segments.cache_clear()


def direct(x: Tensor, steps: int = 5) -> Tensor:
    """Return U p(p(...p(s / |s|))) V^T, the same map without matrix iterations."""
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    s = s / (s.square().sum().sqrt() + 1e-7)
    for _ in range(steps):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ vt


def matrix(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def apart(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-11), (torch.float32, 2e-5), (torch.bfloat16, 5e-2)],
)
def test_equals_the_polynomial_of_the_singular_values(sizes, shape, dtype, tolerance):
    x = matrix(shape)
    assert apart(orthogonalise(x, 5, dtype), direct(x)) <= tolerance
    assert apart(orthogonalise_reference(x, 5, dtype), direct(x)) <= tolerance


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 6, 7])
@pytest.mark.parametrize("shape", [(6, 7), (6, 20), (20, 6)])
def test_any_number_of_steps(sizes, steps, shape):
    x = matrix(shape)
    assert apart(orthogonalise(x, steps, torch.float64), direct(x, steps)) <= 1e-10


@pytest.mark.parametrize("shape", [(16, 20), (16, 64), (64, 16)])
def test_converging_coefficients_give_the_orthogonal_factor_of_the_svd(sizes, shape, monkeypatch):
    """After 30 steps of the convergent quintic (15, -10, 3) / 8, both forms equal U V^T to fp64."""
    monkeypatch.setattr(newton_schulz, "COEFFICIENTS", (15 / 8, -10 / 8, 3 / 8))
    x = matrix(shape)
    u, _, vt = torch.linalg.svd(x, full_matrices=False)
    assert apart(orthogonalise(x, 30, torch.float64), u @ vt) <= 1e-12


SLOW_SHAPE = pytest.param((520, 1100), marks=pytest.mark.slow)


@pytest.mark.parametrize("shape", [(520, 700), SLOW_SHAPE, (1100, 520)])
def test_large_matrices_equal_torch_and_the_reference(shape):
    """Uses the real limits, so matrices run in strips and oblong ones in the Gram form."""
    x = matrix(shape).float()
    assert (segments(*shape, 5) == (3, 2)) == (1100 in shape)
    expected = orthogonalise_reference(x, 5, torch.float32).double()
    assert apart(orthogonalise(x, 5, torch.float32), expected) <= 2e-5
    theirs = torch_muon._zeropower_via_newtonschulz(x, COEFFICIENTS, 5, EPSILON)
    assert apart(theirs, expected) <= 0.02
    assert apart(orthogonalise(x, 5, torch.bfloat16), expected) <= 0.03


@pytest.mark.parametrize("shape", [(2, 3, 12, 20), (1, 12, 40), (5, 40, 12)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 5e-6)])
def test_a_batch_is_its_matrices_one_by_one(sizes, shape, dtype, tolerance):
    x = matrix(shape)
    o = orthogonalise(x, 5, dtype)
    assert o.shape == x.shape
    for one, result in zip(x.flatten(0, -3), o.flatten(0, -3)):
        assert apart(result, orthogonalise(one, 5, dtype)) <= tolerance


@pytest.mark.parametrize("shape", [(10, 11), (10, 40)])
def test_the_scale_multiplies_the_result_once(sizes, shape):
    x = matrix(shape).double()
    x = x / x.norm()
    parts = segments(*shape, 5)
    assert torch.allclose(iterate(x, parts, 3.5), 3.5 * iterate(x, parts), rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(4, 6), (4, 30), (3, 4, 30)])
def test_zero_stays_zero_and_the_input_is_untouched(sizes, shape):
    zero = torch.zeros(shape)
    assert torch.equal(orthogonalise(zero, 5, torch.bfloat16), zero)
    x = matrix(shape)
    kept = x.clone()
    orthogonalise(x, 5, torch.float64)
    assert torch.equal(x, kept)


def test_what_lies_in_fresh_memory_does_not_matter(sizes, monkeypatch):
    x = matrix((9, 30))
    expected = orthogonalise(x, 5, torch.float64)
    plain, like = Tensor.new_empty, torch.empty_like
    monkeypatch.setattr(Tensor, "new_empty", lambda *a: plain(*a).fill_(math.nan))
    monkeypatch.setattr(torch, "empty_like", lambda x: like(x).fill_(math.nan))
    assert torch.equal(orthogonalise(x, 5, torch.float64), expected)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_the_result(sizes, bad):
    x = matrix((4, 12))
    x[1, 2] = bad
    assert not orthogonalise(x, 5, torch.float32).isfinite().any()


def test_the_form_is_chosen_by_count():
    assert segments(2048, 2048, 5) == segments(7168, 8192, 5) == (1,) * 5
    assert segments(2048, 7168, 5) == segments(7168, 2048, 5) == (3, 2)
    assert segments(2048, 7168, 6) == (3, 3)
    assert segments(2048, 7168, 7) == (3, 2, 2)
    assert segments(64, 2048, 5) == (1,) * 5  # too small to average its rounding errors
    for shape in ((1408, 2048), (2048, 2048), (512, 704), (256, 4096)):
        for steps in range(1, 12):
            assert sum(segments(*shape, steps)) == steps
            assert max(segments(*shape, steps)) <= 3
            assert flops(*shape, steps) <= steps * direct_flops(*shape)


def direct_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of one step of full products: X X^T, its square, and the product with X."""
    short, long = sorted((rows, columns))
    return 4 * short**2 * long + 2 * short**3


@pytest.mark.parametrize("shape", [(16, 17), (16, 60), (60, 16), (4, 9), (37, 90)])
@pytest.mark.parametrize("steps", [1, 5])
def test_flops_are_those_that_run(sizes, shape, steps):
    """Torch counts the products that were called."""
    with FlopCounterMode(display=False) as counter:
        orthogonalise(matrix(shape), steps, torch.float32)
    assert counter.get_total_flops() == flops(*shape, steps)


def test_flops_by_hand():
    # 2x3: Gram matrix 2*2*2*3, its square 2*2*2*2, the product 2*2*2*3; one step.
    assert flops(2, 3, 1) == 24 + 16 + 24 == flops(3, 2, 1)
    assert flops(2, 3, 5) == 5 * 64
    # As quoted in docs/MUONCLIP.md.
    for shape, ratio in (((1408, 2048), 1.50), ((2048, 7168), 2.13), ((1536, 12288), 2.54)):
        assert 5 * direct_flops(*shape) / flops(*shape, 5) == pytest.approx(ratio, abs=0.005)


def test_update_scale_by_hand():
    assert update_scale(100, 4) == pytest.approx(0.2 * 10)
    assert math.isclose(update_scale(3, 16), 0.8)


@pytest.mark.parametrize("shape", [(6, 20), (20, 6), (7, 7)])
def test_orthogonality_error_of_known_matrices(sizes, shape):
    u, _, vt = torch.linalg.svd(matrix(shape), full_matrices=False)
    values = torch.linspace(0.7, 1.2, min(shape), dtype=torch.float64)
    expected = (1 - values**2).square().mean().sqrt()
    o = torch.stack([u @ vt, u @ torch.diag(values) @ vt, torch.zeros(shape, dtype=torch.float64)])
    found = orthogonality_error(o)
    assert found.shape == (3,)
    torch.testing.assert_close(found, torch.stack([expected * 0, expected, expected * 0 + 1]))
    assert orthogonality_error(o[1]).shape == ()
    assert orthogonality_error(o[1].bfloat16()) == pytest.approx(float(expected), abs=0.01)
    assert orthogonality_error(o[None, None])[0, 0, 1] == found[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_orthogonality_error_is_summed_in_a_wide_type(dtype):
    """The Gram matrix has many entries, so sums in bfloat16 would be several percent off."""
    x = (matrix((96, 200)) / 15).to(dtype)
    found, gram = newton_schulz.orthogonality_error(x), newton_schulz._gram(x)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    wanted = (gram.double() - torch.eye(96)).to(dtype).double().norm() / math.sqrt(96)
    assert found.double().item() == pytest.approx(wanted.item(), rel=1e-5)
