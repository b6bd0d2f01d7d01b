"""Figures of the optimizer's division among ranks, advice, and the folded table, as text.

Means are over all ranks of the job. Ranks of different pipeline stages cannot share work, so that
stages with more layers than the mean are above it whatever the owners are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kimi_pretrain.tools.optimizer_division import (
    Balance,
    Division,
    Largest,
    balance,
    largest_tensor,
    least_possible,
    traffic,
)
from kimi_pretrain.tools.optimizer_table import Folded, assignments, fold, folded_lines, runs

# Above this ratio of largest to mean, the text says what it comes from.
GOOD_BALANCE = 1.15


class StageLoad(NamedTuple):
    """The optimizer's load on the ranks of one pipeline stage.

    Attributes:
        own_flops: mean operations of this stage's layers, without the encoder.
    """

    stage: int
    layers: tuple[int, ...]
    flops: Balance
    state_bytes: Balance
    own_flops: float


@dataclass(frozen=True)
class OptimizerSummary:
    """Figures of a step.

    Attributes:
        ranks: of the job.
        flops: of Newton-Schulz, per rank.
        least_possible: lower bound of the largest of `flops` with whole tensors.
        largest_tensor: the one that takes the most operations.
        state_bytes: per rank.
        gradient_bytes: sent by a rank to reduce gradients to owners.
        weight_bytes: sent by a rank to broadcast updated weights.
        stages: the same by pipeline stage.
        table: treatment of each tensor.
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

    def as_json(self) -> dict[str, Any]:
        """Return plain values."""
        plain = {
            name: value._asdict() if isinstance(value, Balance | Largest) else value
            for name, value in vars(self).items()
        }
        stages = [
            stage._asdict()
            | {"flops": stage.flops._asdict(), "state_bytes": stage.state_bytes._asdict()}
            for stage in self.stages
        ]
        return plain | {"stages": stages, "table": [_plain(row) for row in self.table]}


def _plain(row: Folded) -> dict[str, Any]:
    shared = row.like._asdict()
    own = {"name": row.name, "tensors": row.tensors, "owners": row.owners}
    return own | {key: value for key, value in shared.items() if key not in ("name", "owner")}


def summarise(division: Division, layers: Sequence[tuple[int, ...]]) -> OptimizerSummary:
    """Return the figures of a division.

    Args:
        division: of the whole job; the ranks of a stage are neighbours.
        layers: decoder layers of each pipeline stage.
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


def _of_stage(figures: Sequence[int], first: int, size: int) -> Balance:
    found = balance(figures[first : first + size])
    return found._replace(rank=first + found.rank)


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
    """'12.1 TFLOP', '4.2 GB'."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {prefix}{unit}"
    return f"{value:.0f} {unit}"
