"""Errors of Newton-Schulz in bf16 and fp32 against the same iteration in fp64.

`kinds` yields matrices that resemble gradients or are known to break the Gram form. Errors are
relative in the Frobenius norm. As a check on single directions, the spectral norm of the difference
is reported too (the result has singular values near one).
"""

from collections.abc import Callable, Iterator

import torch
import torch.optim._muon as torch_muon
from torch import Tensor

from kimi_pretrain.optim.newton_schulz import (
    COEFFICIENTS,
    EPSILON,
    iterate,
    orthogonalise,
    orthogonalise_reference,
    segments,
)

STEPS = 5


def kinds(rows: int, columns: int) -> Iterator[tuple[str, Tensor]]:
    """Yield named fp32 matrices [rows, columns] with rows <= columns, the same in every run."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw)

    def with_values(values: Tensor) -> Tensor:
        left, _ = torch.linalg.qr(random(rows, rows))
        right, _ = torch.linalg.qr(random(columns, rows))
        return left * values @ right.mT

    place = torch.arange(rows) / rows
    yield "random", random(rows, columns)
    yield "singular values from 1 to 1e-2, even in the logarithm", with_values(10 ** (-2 * place))
    yield "... from 1 to 1e-4", with_values(10 ** (-4 * place))
    yield "... from 1 to 1e-8", with_values(10 ** (-8 * place))
    yield "singular values 1/k", with_values(1 / (1 + torch.arange(rows)))
    yield "singular values 1/k^2", with_values(1 / (1 + torch.arange(rows)) ** 2)
    yield (
        "one large, the rest 1e-3 of it",
        with_values(torch.where(torch.arange(rows) == 0, 1.0, 1e-3)),
    )
    low = random(rows, rows // 4) @ random(rows // 4, columns)
    yield "rank a quarter", low
    yield "rank a quarter, and noise of 1e-2", low + 0.01 * low.std() * random(rows, columns)
    yield "rank one", random(rows, 1) @ random(1, columns)
    twins = random(rows, columns)
    twins[rows // 2 :] = twins[: rows - rows // 2]
    yield "every row twice", twins
    yield "rows of very different size", random(rows, columns) * torch.exp(3 * random(rows, 1))
    yield (
        "few rows with a gradient",
        random(rows, columns) * (torch.arange(rows) % 16 == 0)[:, None],
    )
    yield "heavy tails", random(rows, columns) * torch.exp(2 * random(rows, columns))
    plain = random(rows, columns)
    yield "random, norm 1e-4", plain * (1e-4 / plain.norm())
    yield "random, times 1e12", 1e12 * random(rows, columns)
    yield "zero", torch.zeros(rows, columns)


def exact(x: Tensor) -> Tensor:
    """Return the result of the direct iteration in fp64."""
    return orthogonalise_reference(x.double(), STEPS, torch.float64)


def of_torch(x: Tensor) -> Tensor:
    """Return the result of torch.optim.Muon's Newton-Schulz in bf16."""
    return torch_muon._zeropower_via_newtonschulz(x, COEFFICIENTS, STEPS, EPSILON)


FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "ours, bf16": lambda x: orthogonalise(x, STEPS, torch.bfloat16),
    "direct, bf16": lambda x: orthogonalise_reference(x, STEPS, torch.bfloat16),
    "torch, bf16": of_torch,
    "ours, fp32": lambda x: orthogonalise(x, STEPS, torch.float32),
    "direct, fp32": lambda x: orthogonalise_reference(x, STEPS, torch.float32),
}


def errors(found: Tensor, expected: Tensor) -> tuple[float, float]:
    """Return the relative Frobenius error and the spectral norm of the difference."""
    off = found.double() - expected
    if not off.any():
        return 0.0, 0.0
    largest = torch.linalg.eigvalsh(off @ off.mT)[-1]
    return float(off.norm() / expected.norm()), float(largest.sqrt())


def study(rows: int, columns: int) -> dict[str, object]:
    """Return the errors of one shape as [Frobenius, spectral], by kind and form."""
    table = {}
    for kind, x in kinds(rows, columns):
        expected = exact(x)
        table[kind] = {name: errors(form(x), expected) for name, form in FORMS.items()}
    return {
        "shape": (rows, columns),
        "segments": segments(rows, columns, STEPS),
        "errors": table,
    }


ORDERS = ((5,), (4, 1), (2, 3), (3, 2), (2, 2, 1), (1, 1, 1, 1, 1))


def orders(rows: int, columns: int) -> dict[str, object]:
    """Return the relative Frobenius error in bf16, by kind and by the steps on each Gram matrix."""
    table = {}
    for kind, x in kinds(rows, columns):
        expected = exact(x)
        y = (x / (x.norm() + EPSILON)).bfloat16()
        table[kind] = {
            "+".join(map(str, parts)): errors(iterate(y, parts), expected)[0] for parts in ORDERS
        }
    return {"shape": (rows, columns), "errors": table}
