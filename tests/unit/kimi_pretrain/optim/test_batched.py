"""Compares Newton-Schulz over batches of matrix pieces with each piece alone."""

import pytest
import torch
from torch import Tensor

from kimi_pretrain.optim import batched
from kimi_pretrain.optim.batched import orthogonalise_pieces_, orthogonality_errors
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import Piece, Rule
from kimi_pretrain.optim.newton_schulz import orthogonalise, orthogonality_error, update_scale

WHOLE = Rule("muon", "experts", (Piece("whole", 1, 0, 12),))
HEADS = Rule("muon", "attention", (Piece("nope", 3, 0, 4), Piece("rope", 3, 4, 6)))
LATENT = Rule("muon", "attention", (Piece("latent", 1, 0, 9), Piece("k_rope", 1, 9, 12)))
RULES = [WHOLE, HEADS, WHOLE, LATENT, WHOLE]
SHAPES = [(12, 30), (18, 30), (12, 30), (12, 30), (12, 7)]
# The rows of each piece, by hand.
ROWS = [
    [list(range(12))],
    [[0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15], [4, 5, 10, 11, 16, 17]],
    [list(range(12))],
    [list(range(9)), [9, 10, 11]],
    [list(range(12))],
]


def config(dtype: str) -> OptimConfig:
    return OptimConfig(
        lr=1.0, min_lr=0.0, warmup_steps=0, stable_steps=1, decay_steps=0, ns_dtype=dtype
    )


def matrices() -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=draw) * 10.0**i for i, shape in enumerate(SHAPES)]


@pytest.mark.parametrize("limit", [1, 800, 2**18])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_each_piece_is_orthogonalised_by_itself(monkeypatch, limit, dtype, tolerance):
    """Covers batches of one piece, of two (360 elements each), and of all pieces of a shape."""
    monkeypatch.setattr(batched, "CPU_BATCH", limit)
    found = matrices()
    orthogonalise_pieces_(found, RULES, config(dtype))
    for matrix, update, pieces in zip(matrices(), found, ROWS):
        for rows in pieces:
            x = matrix[rows].double()
            expected = update_scale(*x.shape) * orthogonalise(x, 5, torch.float64)
            off = (update[rows].double() - expected).norm() / expected.norm()
            assert off <= tolerance


def test_equal_shapes_share_a_batch_and_limits_are_kept(monkeypatch):
    monkeypatch.setattr(batched, "CPU_BATCH", 800)
    sizes = [(shape, len(pieces)) for shape, pieces in batched._batches(matrices(), RULES)]
    assert sizes == [
        ((12, 30), 2), ((12, 30), 1), ((6, 30), 1), ((9, 30), 1), ((3, 30), 1), ((12, 7), 1),
    ]  # fmt: skip


def test_how_matrices_are_batched_changes_no_more_than_rounding(monkeypatch):
    results = []
    for limit in (1, 2**18):
        monkeypatch.setattr(batched, "CPU_BATCH", limit)
        results.append(matrices())
        orthogonalise_pieces_(results[-1], RULES, config("float32"))
    for alone, together in zip(*results):
        torch.testing.assert_close(alone, together, rtol=0, atol=1e-6)


def test_errors_of_every_piece_in_order():
    updates = matrices()
    orthogonalise_pieces_(updates, RULES, config("float32"))
    kept = [update.clone() for update in updates]
    found = orthogonality_errors(updates, RULES, config("float32"))
    expected = [
        orthogonality_error(update[rows] / update_scale(len(rows), update.shape[1]))
        for update, pieces in zip(updates, ROWS)
        for rows in pieces
    ]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
    rough = orthogonality_errors(updates, RULES, config("bfloat16"))
    torch.testing.assert_close(rough, found, rtol=0, atol=0.01)
    assert all(torch.equal(a, b) for a, b in zip(updates, kept))
    assert orthogonality_errors([], [], config("float32")).shape == (0,)
