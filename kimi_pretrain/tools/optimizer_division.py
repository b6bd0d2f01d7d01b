"""Assigns the tensors of a whole job to owner ranks, in one process, for a dry run.

Makes the same choice as the running job (`optim.owners`) for every replica group. Also computes the
busiest rank, the bytes moved, and the best division possible with whole matrices.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape
from kimi_pretrain.optim.owners import (
    ORDER,
    Cost,
    OwnerLoad,
    TensorSize,
    choose_owners,
    costs_of,
)


@dataclass(frozen=True)
class PlannedGroup:
    """Ranks that hold identical copies of some tensors.

    Args:
        replicas: "dense", "expert" or "encoder"; a job has many groups of the first two.
        ranks: global ranks, in the process group's order.
    """

    replicas: str
    ranks: tuple[int, ...]
    tensors: tuple[TensorSize, ...]


@dataclass(frozen=True)
class Division:
    """Assignment of tensors to owners.

    Attributes:
        groups: in the order in which they were divided.
        costs: for each group, name -> the tensor's rule and load.
        owners: for each group, name -> global rank; None if every rank updates all tensors that it
            holds (`optim.shard_state` off).
    """

    groups: tuple[PlannedGroup, ...]
    costs: tuple[dict[str, Cost], ...]
    owners: tuple[dict[str, int] | None, ...]
    loads: tuple[OwnerLoad, ...]


def divide(
    groups: Sequence[PlannedGroup], num_ranks: int, model: ModelShape, config: OptimConfig
) -> Division:
    """Divide all groups of a job, in `owners.ORDER`.

    Raises:
        ValueError: no rule covers a tensor; the message names it.
    """
    ordered = sorted(groups, key=lambda group: (ORDER.index(group.replicas), group.ranks))
    costs = [costs_of(group.tensors, model, config) for group in ordered]
    wholes = [sum((one.load for one in cost.values()), OwnerLoad()) for cost in costs]
    if not config.shard_state:
        loads = _sums(num_ranks, ordered, wholes)
        return Division(tuple(ordered), tuple(costs), (None,) * len(ordered), tuple(loads))
    shares = [  # as in `owners.share_of`
        OwnerLoad(whole.flops // len(group.ranks), whole.state_bytes // len(group.ranks))
        for whole, group in zip(wholes, ordered, strict=True)
    ]
    loads = _sums(num_ranks, ordered, shares)
    owners: list[dict[str, int]] = []
    for group, cost, share in zip(ordered, costs, shares, strict=True):
        for rank in group.ranks:
            loads[rank] -= share
        members = choose_owners(group.tensors, [loads[r] for r in group.ranks], model, config)
        owners.append({name: group.ranks[member] for name, member in members.items()})
        for name, rank in owners[-1].items():
            loads[rank] += cost[name].load
    return Division(tuple(ordered), tuple(costs), tuple(owners), tuple(loads))


def _sums(
    num_ranks: int, groups: Sequence[PlannedGroup], loads: Sequence[OwnerLoad]
) -> list[OwnerLoad]:
    """Return each rank's sum of the loads of its groups."""
    found = [OwnerLoad()] * num_ranks
    for group, load in zip(groups, loads, strict=True):
        for rank in group.ranks:
            found[rank] += load
    return found


@dataclass(frozen=True)
class Balance:
    """The largest value of a per-rank figure compared with its mean over the ranks.

    Attributes:
        rank: the first rank with the largest value.
        ratio: largest / mean; 1.0 if the mean is 0.
    """

    largest: float
    mean: float
    rank: int
    ratio: float


def balance(figures: Sequence[float]) -> Balance:
    """Return the balance of a figure, given its value on each rank."""
    largest, mean = max(figures), sum(figures) / len(figures)
    return Balance(largest, mean, list(figures).index(largest), largest / mean if mean else 1.0)


@dataclass(frozen=True)
class Traffic:
    """Bytes that a rank sends in a step for the optimizer.

    A ring over n ranks moves (n - 1) / n of the tensors per rank, as ZeRO-1's reduce-scatter and
    all-gather do.

    Attributes:
        gradients: reduced to their owners, fp32 (fp64 for fp64 weights).
        weights: broadcast to all copies, in the dtype of the weights.
    """

    gradients: float
    weights: float


def traffic(division: Division) -> list[Traffic]:
    """Return each rank's traffic."""
    found = [Traffic(0.0, 0.0)] * len(division.loads)
    for group, owners in zip(division.groups, division.owners, strict=True):
        share = (len(group.ranks) - 1) / len(group.ranks)
        gradients = share * sum(t.elements * max(4, t.itemsize) for t in group.tensors)
        weights = share * sum(t.elements * t.itemsize for t in group.tensors)
        if owners is None:  # gradients are all-reduced, weights are not sent
            gradients, weights = 2 * gradients, 0.0
        for rank in group.ranks:
            before = found[rank]
            found[rank] = Traffic(before.gradients + gradients, before.weights + weights)
    return found


@dataclass(frozen=True)
class Largest:
    """The tensor with the most Newton-Schulz operations."""

    name: str
    flops: int


def largest_tensor(division: Division) -> Largest:
    """Return the tensor with the most Newton-Schulz operations; among equals the first by name."""
    works = (
        Largest(name, cost.load.flops) for costs in division.costs for name, cost in costs.items()
    )
    return min(works, key=lambda tensor: (-tensor.flops, tensor.name), default=Largest("none", 0))


def least_possible(division: Division) -> float:
    """Return a lower bound on the busiest rank's Newton-Schulz operations, with whole tensors.

    The tensors of a group and of the groups inside it stay on the group's ranks: their mean is one
    bound. The second bound: some rank owns a group's largest tensor, and this rank also belongs to
    smaller groups; take the mean of such a group together with this tensor.
    """
    works = [[cost.load.flops for cost in costs.values()] for costs in division.costs]
    sums = [sum(work) for work in works]
    smaller: list[list[tuple[int, int]]] = [[] for _ in division.loads]  # by rank: work, ranks
    for group, work in zip(division.groups, sums, strict=True):
        for rank in group.ranks:
            smaller[rank].append((work, len(group.ranks)))
    bounds = [0.0]
    for group, work in zip(division.groups, works, strict=True):
        ranks = set(group.ranks)
        inside = sum(s for g, s in zip(division.groups, sums) if ranks.issuperset(g.ranks))
        bounds.append(inside / len(ranks))
        bounds.append(_least_with(max(work, default=0), group.ranks, smaller))
    return max(bounds)


def _least_with(
    most: int, ranks: Sequence[int], smaller: Sequence[Sequence[tuple[int, int]]]
) -> float:
    """Return the bound from a tensor of `most` operations, on the rank where it is lowest."""
    return min(
        max([most, *((work + most) / n for work, n in smaller[rank] if n < len(ranks))])
        for rank in ranks
    )


def stage_groups(
    stage: int,
    ranks_per_stage: int,
    num_slices: int,
    tensors: Mapping[str, Sequence[TensorSize]],
) -> Iterator[PlannedGroup]:
    """Yield the groups of a pipeline stage: one dense, and one for each slice of the experts.

    Args:
        ranks_per_stage: number of ranks; they are consecutive.
        num_slices: number of expert slices; rank r of a stage holds slice r % num_slices.
        tensors: "dense" tensors, and "expert" tensors of the first slice. All slices have the same
            shapes.
    """
    first = stage * ranks_per_stage
    ranks = range(first, first + ranks_per_stage)
    yield PlannedGroup("dense", tuple(ranks), tuple(tensors["dense"]))
    numbers = {_expert_number(tensor.name) for tensor in tensors["expert"]}
    for number in range(num_slices):
        mine = tuple(
            TensorSize(_renumbered(t.name, number * len(numbers)), t.shape, t.itemsize)
            for t in tensors["expert"]
        )
        yield PlannedGroup("expert", tuple(ranks[number::num_slices]), mine)


def _expert_number(name: str) -> int:
    return int(name.partition(".experts.")[2].partition(".")[0])


def _renumbered(name: str, more: int) -> str:
    """Return the tensor's name with `more` added to its expert number."""
    before, _, rest = name.partition(".experts.")
    number, _, after = rest.partition(".")
    return f"{before}.experts.{int(number) + more}.{after}"
