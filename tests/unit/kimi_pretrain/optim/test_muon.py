"""Compares three optimizers with torch.optim.Muon and AdamW, an fp64 SVD, and planted matrices."""

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim.groups import NamedTensor
from kimi_pretrain.optim.muon import PlainMuon
from tests.unit.kimi_pretrain.optim.oracles import (
    ADAMW,
    ATTENTION,
    CONFIG,
    MATRICES,
    MLP,
    NORM,
    OPTIMIZERS,
    SHAPE,
    SHAPES,
    Fp32Gradient,
    draw,
    polynomial,
    svd_muon,
    torch_adamw,
    torch_muon,
    train,
)

# Largest distance from an fp32 oracle when only rounding differs, relative to the weight's change.
FP32 = 3e-5
PLAIN_MOMENTUM = CONFIG.replace(nesterov=False)


def distance(found: Tensor, expected: Tensor, name: str) -> float:
    """Return the distance of two results, relative to the change of the weight."""
    moved = (expected - draw(SHAPES[name], name)).norm()
    return float((found - expected).norm() / moved)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_in_fp32_equals_torch(nesterov, kind):
    """torch keeps the mean of gradients and Kimi the sum; the norm cancels this factor.

    All tensors go through one optimizer, so that equal shapes share a batch.
    """
    config = CONFIG if nesterov else PLAIN_MOMENTUM
    shapes = {name: SHAPES[name] for name in MATRICES}
    found = train(shapes, config, optimizer_of=OPTIMIZERS[kind])
    for name in MATRICES:
        expected = torch_muon(name, gradient=Fp32Gradient, nesterov=nesterov)
        assert distance(found[name], expected, name) <= FP32, name


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_muon_in_bf16_equals_torch_within_bf16(kind):
    config = CONFIG.replace(ns_dtype="bfloat16")
    shapes = {name: SHAPES[name] for name in MATRICES}
    found = train(shapes, config, optimizer_of=OPTIMIZERS[kind])
    for name in MATRICES:
        assert distance(found[name], torch_muon(name), name) <= 0.03, name


@pytest.mark.parametrize("nesterov", [True, False])
def test_muon_equals_an_svd_in_fp64(nesterov):
    config = CONFIG if nesterov else PLAIN_MOMENTUM
    found = train({name: SHAPES[name] for name in MATRICES}, config)
    for name in MATRICES:
        assert distance(found[name], svd_muon(name, nesterov=nesterov), name) <= FP32, name


def orthogonal(rows: int, columns: int, *key: object) -> Tensor:
    u, _, vt = torch.linalg.svd(draw((rows, columns), *key), full_matrices=False)
    return u @ vt


@pytest.mark.parametrize("name", sorted(MATRICES))
def test_each_piece_of_a_fused_matrix_is_orthogonalised_by_itself(name):
    """The pieces are already orthogonal and differ widely in size; the update has them at one size.

    For such pieces the iteration has converged in direction and its factor is known: every singular
    value is 1 / sqrt(rank) after the division by the norm. One step from zero weights shows the
    update.
    """
    shape, row_lists = MATRICES[name]
    grad = torch.zeros(shape).flatten(1)
    expected = torch.zeros_like(grad)
    for number, rows in enumerate(row_lists):
        piece = orthogonal(len(rows), grad.shape[1], name, number)
        rank = torch.tensor(float(min(piece.shape)))
        grad[rows] = 1000.0**number * piece
        expected[rows] = -0.01 * 0.2 * max(piece.shape) ** 0.5 * polynomial(rank**-0.5) * piece
    weight, grad = torch.zeros(shape), grad.view(shape)
    PlainMuon([NamedTensor(name, weight, lambda: grad, "dense")], CONFIG, SHAPE).step(0.01)
    torch.testing.assert_close(weight.flatten(1), expected, rtol=1e-5, atol=1e-7)


def test_views_into_one_weight_are_matrices_of_their_own():
    """An engine passes its fused gate|up and its stack of experts as views."""
    fused, stack = draw((12, 9), "fused"), draw((2, 6, 9), "stack")
    views = {
        MLP + "gate_proj.weight": fused[:6],
        MLP + "up_proj.weight": fused[6:],
        MLP + "experts.0.down_proj.weight": stack[0].T,
        MLP + "experts.1.down_proj.weight": stack[1].T,
    }
    alone = {name: view.clone() for name, view in views.items()}
    grads = {name: draw(tuple(view.shape), name) for name, view in views.items()}
    named = [NamedTensor(n, view, lambda n=n: grads[n], "dense") for n, view in views.items()]
    PlainMuon(named, CONFIG, SHAPE).step(0.02)
    for name, weight in alone.items():
        tensor = NamedTensor(name, weight, lambda name=name: grads[name], "dense")
        PlainMuon([tensor], CONFIG, SHAPE).step(0.02)
        torch.testing.assert_close(views[name], weight, rtol=1e-5, atol=1e-6)
        assert not torch.allclose(weight, torch.zeros(()))


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=["fp32", "fp64"]
)
def test_adamw_equals_torch(dtype, tolerance, kind):
    found = train(ADAMW, dtype=dtype, optimizer_of=OPTIMIZERS[kind])
    for name in ADAMW:
        expected = torch_adamw(name, dtype)
        torch.testing.assert_close(found[name], expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("name", "shape"), [(ATTENTION + "o_proj.weight", (10, 16)), (NORM, (5,))])
def test_decay_is_decoupled_unscaled_and_reaches_norms(name, shape):
    weight = torch.ones(shape)
    optimizer = PlainMuon(
        [NamedTensor(name, weight, lambda: torch.zeros(shape), "dense")], CONFIG, SHAPE
    )
    for _ in range(3):
        optimizer.step(0.02)
    torch.testing.assert_close(weight, torch.full(shape, (1 - 0.02 * 0.1) ** 3))


def test_the_scale_multiplies_gradients_and_leaves_them_alone():
    results = []
    for factor, scale in ((1.0, 0.25), (0.25, 1.0)):
        weight, grad = torch.ones(5), factor * draw((5,), "grad")
        kept = grad.clone()
        optimizer = PlainMuon([NamedTensor(NORM, weight, lambda g=grad: g, "dense")], CONFIG, SHAPE)
        optimizer.step(0.1, scale)
        assert torch.equal(grad, kept)
        results.append((weight, optimizer.exp_avg_sq[NORM]))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_a_parameter_without_a_rule_is_named_before_anything_is_trained():
    named = [NamedTensor("language_model.model.rotary.weight", torch.ones(2, 2), Tensor, "dense")]
    with pytest.raises(ValueError, match=r"no rule for tensor 'language_model\.model\.rotary"):
        PlainMuon(named, CONFIG, SHAPE)
