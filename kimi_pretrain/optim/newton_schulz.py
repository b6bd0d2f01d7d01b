"""Newton-Schulz orthogonalisation of a matrix, the core of Muon.

X <- a X + b (X X^T) X + c (X X^T)^2 X, started from X / ||X||_F, moves every singular value towards
one and keeps the singular vectors. The coefficients (Moonlight, arXiv:2502.16982, eq. 2) maximise
the slope at zero instead of converging: after five steps the singular values are in about
[0.7, 1.2], which is accurate enough for training and halves the number of steps.
`orthogonalise_reference` is this loop.

`orthogonalise` computes the same with fewer operations, in two ways (after the Gram Newton-Schulz
of Dao-AILab, dao-lab.ai/blog/2026/gram-newton-schulz):

* Consecutive steps form a segment, which runs on the Gram matrix R = X X^T of the short side. With
  U = b R + c R^2, a step is X <- (a I + U) X, and R <- (a I + U)^2 R. The factors are accumulated
  in Q, which is multiplied with X once, at the end of the segment. A segment of one step is the
  direct form. Each segment computes R from X again: rounding in bf16 shifts small eigenvalues of R
  by a fraction of the largest, even below zero, and every further step multiplies this error by up
  to a^2.
* R, U and Q are symmetric, so only strips of rows up to the diagonal are computed, and the upper
  triangle is mirrored.
"""

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-7
# Maximum steps on one Gram matrix. With four, bf16 fails on matrices with a few large singular
# values (errors of 1 where the direct form has 0.02); see benchmarks/results/muon_cpu.md.
LONGEST_SEGMENT = 3
GRAM_ROWS = 128  # minimum short side for the Gram form; below, rounding errors do not average out
STRIP_ROWS, MOST_STRIPS = 256, 8  # strips of a symmetric product; thinner strips run slower


@torch.no_grad()
def orthogonalise(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Replace the singular values of each matrix by values near one.

    Args:
        x: [..., A, B] any floating dtype. A zero matrix stays zero; a matrix whose norm is not well
            above 1e-7 yields a result that is too small.
        steps: number of iterations.
        dtype: dtype of the products. The norm is computed in x's dtype, before rounding to this
            one.

    Returns:
        [..., A, B] in x's dtype; a new tensor. Batching with other matrices changes a result only
        by the rounding of its products.
    """
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True)
    y = (x / (norm + EPSILON)).to(dtype).reshape(-1, *x.shape[-2:])
    y = y[0] if len(y) == 1 else y
    parts = segments(*x.shape[-2:], steps)
    return iterate(y, parts).view(x.shape).to(x.dtype)


def orthogonalise_reference(x: Tensor, steps: int, dtype: torch.dtype) -> Tensor:
    """Return the result of `orthogonalise`, computed with the loop of the paper."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonalise_reference(x.mT, steps, dtype).mT
    a, b, c = COEFFICIENTS
    y = (x / (torch.linalg.matrix_norm(x, keepdim=True) + EPSILON)).to(dtype)
    for _ in range(steps):
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y.to(x.dtype)


def iterate(x: Tensor, parts: Sequence[int], scale: float = 1.0) -> Tensor:
    """Run Newton-Schulz on matrices of Frobenius norm one (or zero), in their own dtype.

    Args:
        x: [A, B] or [n, A, B]; not modified.
        parts: steps of each segment, see `segments`.
        scale: factor on the result.

    Returns:
        A new tensor with the shape and dtype of x.
    """
    rows, columns = x.shape[-2:]
    for i, length in enumerate(parts):
        factor = scale if i == len(parts) - 1 else 1.0
        beta, q = _polynomial(_gram(x), length)
        # For a tall matrix, multiply with the Gram polynomial from the right.
        left, right = (q, x) if rows <= columns else (x, q)
        x = _sum(x, left, right, factor * beta, factor, torch.empty_like(x))
    return x


def _gram(x: Tensor) -> Tensor:
    """Return X X^T of the short side: [..., A, B] -> [..., min(A, B), min(A, B)]."""
    x = x if x.shape[-2] <= x.shape[-1] else x.mT
    return _symmetric(x, x.mT, x.new_empty(*x.shape[:-1], x.shape[-2]))


def _polynomial(r: Tensor, steps: int) -> tuple[float, Tensor]:
    """Return the product of the factors a I + U of several steps, from the Gram matrix R.

    Args:
        r: [..., r, r]; overwritten.
        steps: number of steps.

    Returns:
        (beta, Q), where the product is beta I + Q. For one step, beta I stays separate and exact,
        as in the direct form. For more steps it is part of Q, because rounding rotates the
        eigenvectors of such a Q less than those of a Q without it.
    """
    a, b, c = COEFFICIENTS
    u = _symmetric(r, r, torch.empty_like(r), r, beta=b, alpha=c)
    if steps == 1:
        return a, u
    q, spare = u.clone(), torch.empty_like(r)
    q.diagonal(dim1=-2, dim2=-1).add_(a)
    for _ in range(steps - 1):
        _symmetric(u, r, spare, r, beta=a)
        _symmetric(u, spare, r, spare, beta=a)
        _symmetric(r, r, u, r, beta=b, alpha=c)
        _symmetric(u, q, spare, q, beta=a)
        q, spare = spare, q
    return 0.0, q


def _symmetric(
    x: Tensor,
    y: Tensor,
    out: Tensor,
    base: Tensor | None = None,
    beta: float = 0.0,
    alpha: float = 1.0,
) -> Tensor:
    """Write beta base + alpha X Y to `out` [..., r, r] and return it.

    The product of X [..., r, k] and Y [..., k, r] must be symmetric, and `out` must not be one of
    the other tensors.
    """
    for start, stop in _strips(x.shape[-2]):
        strip = out[..., start:stop, :stop]
        # With beta 0, torch ignores the values of the base, even NaN.
        before = strip if base is None else base[..., start:stop, :stop]
        _sum(before, x[..., start:stop, :], y[..., :stop], beta, alpha, strip)
        if start:
            # Make it dense first: torch transposes dense matrices up to twice as fast as strips.
            out[..., :start, start:stop] = strip[..., :start].contiguous().mT
    return out


def _sum(base: Tensor, x: Tensor, y: Tensor, beta: float, alpha: float, out: Tensor) -> Tensor:
    """Write beta base + alpha X Y to `out`; all are [rows, columns] or all [n, rows, columns]."""
    # On CPUs, a batch of one takes several times as long if an operand is transposed.
    add = torch.addmm if x.ndim == 2 else torch.baddbmm
    return add(base, x, y, beta=beta, alpha=alpha, out=out)


def _strips(size: int) -> list[tuple[int, int]]:
    """Return (first row, end row) of each strip of a symmetric [size, size] product."""
    number = min(max(1, size // STRIP_ROWS), MOST_STRIPS)
    cuts = [size * i // number for i in range(number + 1)]
    return list(zip(cuts, cuts[1:]))


@cache
def segments(rows: int, columns: int, steps: int) -> tuple[int, ...]:
    """Return the lengths of the segments that each run on one Gram matrix; they sum to `steps`.

    Small and near-square matrices use the direct form, segments of length one. The Gram form must
    save a tenth of the operations, because its products are smaller and less exact. Longer segments
    come first, which halves the error compared with the opposite order.
    """
    short, long = sorted((rows, columns))
    number = -(-steps // LONGEST_SEGMENT)
    cuts = [-(-steps * i // number) for i in range(number + 1)]
    gram = tuple(stop - start for start, stop in zip(cuts, cuts[1:]))
    direct = (1,) * steps
    saves = _operations(short, long, gram) <= 0.9 * _operations(short, long, direct)
    return gram if saves and short >= GRAM_ROWS else direct


def flops(rows: int, columns: int, steps: int) -> int:
    """Return the floating-point operations of the products of `orthogonalise` for one matrix.

    This counts the form that `segments` chooses, and only the computed strips of symmetric
    products.
    """
    short, long = sorted((rows, columns))
    return _operations(short, long, segments(rows, columns, steps))


def _operations(short: int, long: int, parts: Sequence[int]) -> int:
    computed = sum((stop - start) * stop for start, stop in _strips(short))
    total = 0
    for length in parts:
        gram, small, whole = computed * long, (4 * length - 3) * computed * short, short**2 * long
        total += 2 * (gram + small + whole)
    return total


def orthogonality_error(o: Tensor) -> Tensor:
    """Return the distance from orthogonal, ||I - O O^T||_F / sqrt(min(A, B)) of the short side.

    Args:
        o: [..., A, B], without the scale of the update.

    Returns:
        [...] fp32 (or wider): 0 for orthonormal rows (or columns), 1 for zero, and 0.25 to 0.4 for
        the result of `orthogonalise` on a matrix of full rank.
    """
    rows, columns = o.shape[-2:]
    gram = _gram(o.reshape(-1, rows, columns) if o.ndim > 3 else o)
    gram.diagonal(dim1=-2, dim2=-1).sub_(1)
    wide = torch.promote_types(o.dtype, torch.float32)
    error = torch.linalg.vector_norm(gram, dim=(-2, -1), dtype=wide) / math.sqrt(min(rows, columns))
    return error.view(o.shape[:-2])


def update_scale(rows: int, columns: int) -> float:
    """Return 0.2 * sqrt(max(A, B)), which brings an update's RMS near AdamW's 0.2 for any shape."""
    return 0.2 * math.sqrt(max(rows, columns))
