"""Report on the optimizer's division among ranks: figures, advice and a table of owners.

Means are over all ranks of the job. Ranks of different pipeline stages cannot share work, so a
stage with more layers than average is above the mean for any choice of owners. The table has one
row per tensor, 70,000 for a 1T model; in the folded table, tensors that differ only in the numbers
of layer, block and expert share a row.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from kimi_pretrain.optim.owners import NUMBERED, Cost, TensorSize
from kimi_pretrain.tools.optimizer_division import (
    Balance,
    Division,
    Largest,
    balance,
    largest_tensor,
    least_possible,
    traffic,
)

# Above this ratio of largest to mean, the report explains the cause.
GOOD_BALANCE = 1.15


@dataclass(frozen=True)
class Assignment:
    """One tensor of the model.

    Attributes:
        pieces: matrices orthogonalised separately, as 'q_nope [8192, 1536]'; AdamW has none.
        trained_by: "muon" or "adamw".
        group: parameter group, see `OptimConfig.groups`.
        replicas: "dense", "expert" or "encoder".
        copies: number of ranks that hold it.
        owner: global rank; None if every holder updates it.
    """

    name: str
    shape: tuple[int, ...]
    pieces: tuple[str, ...]
    trained_by: str
    group: str
    replicas: str
    copies: int
    owner: int | None


@dataclass(frozen=True)
class Folded:
    """Tensors that differ only in their numbers.

    Attributes:
        name: with ranges in place of numbers: 'layers.1-60.mlp.experts.0-383'.
        owners: ranks as ranges; 'each' if every holder updates a tensor.
    """

    name: str
    tensors: int
    owners: str
    like: Assignment


@dataclass(frozen=True)
class StageLoad:
    """The optimizer's load on the ranks of one pipeline stage.

    Attributes:
        own_flops: mean operations per rank for this stage's layers, without the encoder.
    """

    stage: int
    layers: tuple[int, ...]
    flops: Balance
    state_bytes: Balance
    own_flops: float


@dataclass(frozen=True)
class OptimizerSummary:
    """Figures of the optimizer for one step.

    Attributes:
        flops: Newton-Schulz operations, per rank.
        least_possible: lower bound on the largest of `flops` with whole tensors.
        state_bytes: per rank.
        gradient_bytes: sent by a rank to reduce gradients to owners.
        weight_bytes: sent by a rank to broadcast updated weights.
    """

    ranks: int
    flops: Balance
    least_possible: float
    largest_tensor: Largest
    state_bytes: Balance
    gradient_bytes: Balance
    weight_bytes: Balance
    stages: tuple[StageLoad, ...]
    table: tuple[Folded, ...]


def summarise(division: Division, layers: Sequence[tuple[int, ...]]) -> OptimizerSummary:
    """Return the figures of a division.

    Args:
        division: of the whole job; the ranks of a stage are consecutive.
        layers: decoder layers of each stage.
    """
    moved = traffic(division)
    flops = [load.flops for load in division.loads]
    state = [load.state_bytes for load in division.loads]
    size = len(flops) // len(layers)
    stages = [
        StageLoad(
            stage,
            some,
            _of_stage(flops, stage * size, size),
            _of_stage(state, stage * size, size),
            _own_work(division, range(stage * size, (stage + 1) * size)) / size,
        )
        for stage, some in enumerate(layers)
    ]
    return OptimizerSummary(
        ranks=len(flops),
        flops=balance(flops),
        least_possible=least_possible(division),
        largest_tensor=largest_tensor(division),
        state_bytes=balance(state),
        gradient_bytes=balance([rank.gradients for rank in moved]),
        weight_bytes=balance([rank.weights for rank in moved]),
        stages=tuple(stages),
        table=tuple(fold(assignments(division))),
    )


def summary_as_json(summary: OptimizerSummary) -> dict[str, Any]:
    """Return plain values; a row of the table holds the values that its tensors share."""
    plain = asdict(summary)
    for row in plain["table"]:
        shared = row.pop("like")
        row |= {name: shared[name] for name in shared if name not in ("name", "owner")}
    return plain


def _of_stage(figures: Sequence[int], first: int, size: int) -> Balance:
    found = balance(figures[first : first + size])
    return replace(found, rank=first + found.rank)


def _own_work(division: Division, ranks: range) -> int:
    return sum(
        cost.load.flops
        for group, costs in zip(division.groups, division.costs, strict=True)
        if group.replicas != "encoder" and group.ranks[0] in ranks
        for cost in costs.values()
    )


def summary_lines(summary: OptimizerSummary) -> Iterator[str]:
    """Yield figures, advice and table as text."""
    yield ""
    sharded = not any(row.owners == "each" for row in summary.table)
    if not sharded:
        yield "optim.shard_state is off: every rank updates all that it holds"
    yield f"optimizer, a step        mean of {summary.ranks} ranks         largest  ratio  on rank"
    for label, found, unit in (
        ("Newton-Schulz", summary.flops, "FLOP"),
        ("state", summary.state_bytes, "B"),
        ("gradients to owners", summary.gradient_bytes, "B"),
        ("weights to copies", summary.weight_bytes, "B"),
    ):
        mean, most = _amount(found.mean, unit), _amount(found.largest, unit)
        yield f"{label:20s} {mean:>20s} {most:>19s} {found.ratio:6.2f} {found.rank:8d}"
    if sharded and summary.flops.mean:
        least = summary.least_possible / summary.flops.mean
        yield f"  (of Newton-Schulz, no division of whole tensors has a ratio below {least:.2f})"
    yield "stage  layers        Newton-Schulz: mean      largest        state: mean      largest"
    for stage in summary.stages:
        yield (
            f"{stage.stage:5d}  {runs(stage.layers):12s} {_amount(stage.flops.mean, 'FLOP'):>20s} "
            f"{_amount(stage.flops.largest, 'FLOP'):>12s} "
            f"{_amount(stage.state_bytes.mean, 'B'):>18s} "
            f"{_amount(stage.state_bytes.largest, 'B'):>12s}"
        )
    yield from advice(summary)
    yield ""
    yield from folded_lines(summary.table)


def advice(summary: OptimizerSummary) -> Iterator[str]:
    """Yield causes of an uneven division of Newton-Schulz, and remedies."""
    flops = summary.flops
    if flops.ratio <= GOOD_BALANCE:
        return
    yield f"note: rank {flops.rank} has {flops.ratio:.2f} times the mean work of Newton-Schulz"
    fullest = max(summary.stages, key=lambda stage: (stage.own_flops, -stage.stage))
    if fullest.own_flops > 1.02 * flops.mean:
        yield (
            f"  the {len(fullest.layers)} layers of stage {fullest.stage} are "
            f"{fullest.own_flops / flops.mean:.2f} times the mean of all ranks, and stages cannot "
            "share them; layout.stages says which stage has which layers"
        )
    name, most = summary.largest_tensor.name, summary.largest_tensor.flops / flops.mean
    if most > 0.1:
        end = ": no number of ranks makes the update faster" if most > 1 else ""
        yield f"  '{name}' alone is {most:.2f} of the mean, and has one owner{end}"


def _amount(value: float, unit: str) -> str:
    """Return a value with a unit prefix, as '12.1 TFLOP' or '4.2 GB'."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"


# The table -------------------------------------------------------------------------------------


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


_PARTS = ("vision_tower.", "mm_projector.", "language_model.model.embed_tokens.")
_LAST = ("language_model.model.norm.", "language_model.lm_head.")


def _sort_key(row: Assignment) -> tuple[int, list[int], str]:
    """Return the sort key: order of the forward pass, then numbers, then name."""
    for number, prefix in enumerate(_PARTS):
        if row.name.startswith(prefix):
            return number, _numbers(row.name), row.name
    last = row.name.startswith(_LAST)
    return len(_PARTS) + last, _numbers(row.name), row.name


def _numbers(name: str) -> list[int]:
    return [int(number) for number in NUMBERED.findall(name)]


def fold(rows: Sequence[Assignment]) -> list[Folded]:
    """Group tensors that differ only in numbers of layer, block and expert, and in owner."""
    alike: dict[Assignment, list[Assignment]] = {}
    for row in rows:
        alike.setdefault(replace(row, name=NUMBERED.sub("#", row.name), owner=None), []).append(row)
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
    """Return numbers as ranges: '0-1,32-33' for 0, 1, 32 and 33 in any order; 'none' if empty."""
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
    """Return the optimizer's name, with the pieces' rows or the reshaped size if it has any."""
    if len(row.pieces) < 2:
        reshaped = [piece for piece in row.pieces if piece != f"whole {list(row.shape)}"]
        return f"{row.trained_by}: {reshaped[0]}" if reshaped else row.trained_by
    rows = [piece.replace("[", "").partition(",")[0] for piece in row.pieces]
    return f"{row.trained_by}: rows {' + '.join(rows)}"


def _shortened(owners: str, longest: int = 24) -> str:
    if len(owners) <= longest:
        return owners
    spans = [span.split("-") for span in owners.split(",")]
    count = sum(int(span[-1]) - int(span[0]) + 1 for span in spans)
    return f"{count} of {spans[0][0]}-{spans[-1][-1]}"


def tab_separated(rows: Sequence[Assignment]) -> Iterator[str]:
    """Yield the full table as tab-separated lines, starting with a header."""
    yield "\t".join(field.name for field in fields(Assignment))
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
