"""Batched Newton-Schulz over the pieces of many matrices; pieces of equal shape share a call.

Each piece is read, normalised and rounded once, and its result is written back once. The last
product includes the scale of the update.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from kimi_pretrain.optim.config import UpdateSettings
from kimi_pretrain.optim.groups import Rule
from kimi_pretrain.optim.newton_schulz import (
    EPSILON,
    iterate,
    orthogonality_error,
    segments,
    update_scale,
)

# Maximum elements of a batch; a larger matrix has its own batch. On CPUs a batch only saves call
# overhead, which matters for small matrices. A GPU needs enough work for all its processors, and
# memory sets its limit.
CPU_BATCH, GPU_BATCH = 2**18, 2**29


@torch.no_grad()
def orthogonalise_pieces_(
    matrices: Sequence[Tensor], rules: Sequence[Rule], config: UpdateSettings
) -> None:
    """Replace every piece of every matrix by update_scale * orthogonalise(piece), in place.

    Args:
        matrices: [A, B] each, fp32 or wider, all on one device.
        rules: rule of each matrix, which lists its pieces.
        config: `ns_dtype` and `ns_steps` are read.
    """
    dtype = getattr(torch, config.ns_dtype)
    for (rows, columns), pieces in _batches(matrices, rules):
        x = torch.empty((len(pieces), rows, columns), dtype=dtype, device=pieces[0].device)
        for slot, piece in zip(x, pieces):
            piece.div_(torch.linalg.vector_norm(piece) + EPSILON)
            slot.view(piece.shape).copy_(piece)
        alone = len(pieces) == 1
        parts = segments(rows, columns, config.ns_steps)
        o = iterate(x[0] if alone else x, parts, update_scale(rows, columns))
        for part, piece in zip(o[None] if alone else o, pieces):
            piece.copy_(part.view(piece.shape))


def _batches(
    matrices: Sequence[Tensor], rules: Sequence[Rule]
) -> Iterator[tuple[tuple[int, int], list[Tensor]]]:
    """Yield shapes [rows, columns] with their pieces, as views [blocks, rows of a block, columns].

    Shapes are in order of first occurrence, pieces in the order of their matrices.
    """
    shapes: dict[tuple[int, int], list[Tensor]] = {}
    for matrix, rule in zip(matrices, rules, strict=True):
        for piece in rule.pieces:
            shapes.setdefault(piece.shape(matrix.shape), []).append(piece.rows(matrix))
    for (rows, columns), pieces in shapes.items():
        limit = CPU_BATCH if pieces[0].device.type == "cpu" else GPU_BATCH
        size = max(1, limit // (rows * columns))
        for start in range(0, len(pieces), size):
            yield (rows, columns), pieces[start : start + size]


@torch.no_grad()
def orthogonality_errors(
    updates: Sequence[Tensor], rules: Sequence[Rule], config: UpdateSettings
) -> Tensor:
    """Return `orthogonality_error` for every piece of updates from `orthogonalise_pieces_`.

    This costs about as much as one of the iteration's twenty products.

    Args:
        updates: [A, B] each, with their scale; not modified.
        rules: rule of each update.
        config: `ns_dtype` sets the dtype of the product.

    Returns:
        [pieces] fp32 (or wider), in the order of the updates; empty if there are none.
    """
    dtype = getattr(torch, config.ns_dtype)
    errors = []
    for update, rule in zip(updates, rules, strict=True):
        for piece in rule.pieces:
            rows, columns = piece.shape(update.shape)
            # Round before removing the scale, so that the division reads half the bytes.
            o = piece.rows(update).to(dtype).reshape(rows, columns).div(update_scale(rows, columns))
            errors.append(orthogonality_error(o))
    return torch.stack(errors) if errors else torch.empty(0)
