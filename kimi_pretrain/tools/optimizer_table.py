"""The table of each tensor's optimizer, matrices and owner, to be read before a run.

In full it has a line per tensor, 70,000 for a 1T model. Folded, tensors that differ only in numbers
of layer, block and expert share a line.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from kimi_pretrain.optim.owners import NUMBERED, Cost, TensorSize
from kimi_pretrain.tools.optimizer_division import Division


class Assignment(NamedTuple):
    """One tensor of the model.

    Attributes:
        pieces: matrices orthogonalised separately, as 'q_nope [8192, 1536]'; AdamW has none.
        trained_by: "muon" or "adamw".
        group: parameter group, see `OptimConfig.groups`.
        replicas: "dense", "expert" or "encoder".
        copies: number of ranks that hold it.
        owner: global rank; None where every holder updates it.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[str, ...]
    trained_by: str
    group: str
    replicas: str
    copies: int
    owner: int | None


class Folded(NamedTuple):
    """Tensors that differ only in their numbers.

    Attributes:
        name: with ranges for numbers: 'layers.1-60.mlp.experts.0-383'.
        tensors: number of tensors.
        owners: ranks as ranges; 'each' where every holder updates a tensor.
        like: one of them.
    """

    name: str
    tensors: int
    owners: str
    like: Assignment


def assignments(division: Division) -> list[Assignment]:
    """Return the assignment of each tensor of the job, in the model's order, encoder first."""
    rows: list[Assignment] = []
    for group, costs, owners in zip(division.groups, division.costs, division.owners, strict=True):
        for tensor in group.tensors:
            cost = costs[tensor.name]
            rows.append(
                Assignment(
                    name=tensor.name,
                    shape=tensor.shape,
                    pieces=tuple(_pieces(tensor, cost)),
                    trained_by=cost.rule.kind,
                    group=cost.rule.group,
                    replicas=group.replicas,
                    copies=len(group.ranks),
                    owner=None if owners is None else owners[tensor.name],
                )
            )
    return sorted(rows, key=_sort_key)


def _pieces(tensor: TensorSize, cost: Cost) -> Iterator[str]:
    for piece in cost.rule.pieces:
        rows, columns = piece.shape(tensor.shape)
        yield f"{piece.name} [{rows}, {columns}]"


_NUMBER = re.compile(r"\d+")
_PARTS = ("vision_tower.", "mm_projector.", "language_model.model.embed_tokens.")
_LAST = ("language_model.model.norm.", "language_model.lm_head.")


def _sort_key(row: Assignment) -> tuple[int, list[int], str]:
    """Sort key: order of the forward pass, then numbers, then name."""
    for number, prefix in enumerate(_PARTS):
        if row.name.startswith(prefix):
            return number, _numbers(row.name), row.name
    last = row.name.startswith(_LAST)
    return len(_PARTS) + last, _numbers(row.name), row.name


def _numbers(name: str) -> list[int]:
    return [int(number) for number in NUMBERED.findall(name)]


def fold(rows: Sequence[Assignment]) -> list[Folded]:
    """Group tensors that differ only in numbers of layer, block and expert, and in owner."""
    alike: dict[tuple[object, ...], list[Assignment]] = {}
    for row in rows:
        alike.setdefault((NUMBERED.sub("#", row.name), *row[1:-1]), []).append(row)
    return [_folded(some) for some in alike.values()]


def _folded(rows: Sequence[Assignment]) -> Folded:
    columns = zip(*(_numbers(row.name) for row in rows), strict=True)
    ranges = iter([runs(column) for column in columns])
    owned = [row.owner for row in rows if row.owner is not None]
    return Folded(
        name=NUMBERED.sub(lambda _: next(ranges), rows[0].name),
        tensors=len(rows),
        owners=runs(owned) if owned else "each",
        like=rows[0],
    )


def runs(numbers: Iterable[int]) -> str:
    """Return '0-1,32-33' for 0, 1, 32 and 33 in any order; 'none' for none."""
    there = set(numbers)
    starts = sorted(n for n in there if n - 1 not in there)
    ends = sorted(n for n in there if n + 1 not in there)
    return ",".join(f"{a}-{b}" if a < b else f"{a}" for a, b in zip(starts, ends)) or "none"


def folded_lines(rows: Sequence[Folded]) -> Iterator[str]:
    """Yield the folded table as text."""
    head = ("tensor", "number", "shape", "trained by", "group", "copies", "owner ranks")
    body = [
        (
            row.name,
            f"{row.tensors:,}",
            str(list(row.like.shape)),
            _trained_by(row.like),
            row.like.group,
            f"{row.like.replicas} {row.like.copies}",
            _shortened(row.owners),
        )
        for row in rows
    ]
    widths = [max(map(len, column)) for column in zip(head, *body, strict=True)]
    for row in (head, *body):
        cells = [
            cell.rjust(width) if name == "number" else cell.ljust(width)
            for name, cell, width in zip(head, row, widths, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def _trained_by(row: Assignment) -> str:
    """Return 'muon' for a whole matrix; else with the rows of its pieces, or its reshaped size."""
    if len(row.pieces) < 2:
        reshaped = [piece for piece in row.pieces if piece != f"whole {list(row.shape)}"]
        return f"{row.trained_by}: {reshaped[0]}" if reshaped else row.trained_by
    rows = [piece.replace("[", "").partition(",")[0] for piece in row.pieces]
    return f"{row.trained_by}: rows {' + '.join(rows)}"


def _shortened(owners: str, longest: int = 24) -> str:
    if len(owners) <= longest:
        return owners
    numbers = _NUMBER.findall(owners)
    spans = [span.split("-") for span in owners.split(",")]
    count = sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    return f"{count} of {numbers[0]}-{numbers[-1]}"


def tab_separated(rows: Sequence[Assignment]) -> Iterator[str]:
    """Yield the full table as tab-separated lines, a header first."""
    yield "\t".join(Assignment._fields)
    for row in rows:
        cells = (
            row.name,
            str(list(row.shape)),
            " + ".join(row.pieces),
            row.trained_by,
            row.group,
            row.replicas,
            str(row.copies),
            "each" if row.owner is None else str(row.owner),
        )
        yield "\t".join(cells)
