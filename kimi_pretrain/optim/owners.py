"""Chooses the rank of a replica group that owns each tensor: keeps its state and updates it.

These are pure functions of names, shapes and loads, so all ranks compute the same owners. Groups
are divided one after the other. The load of a rank is its share of the groups already divided plus
a mean share of the remaining groups. A rank with many attention matrices therefore gets fewer
experts, and the encoder goes to stages with few layers. Within a group, Muon tensors are divided by
Newton-Schulz operations, which dominate the time; then AdamW tensors by bytes of optimizer state.
Both go to the least-loaded rank, largest first (Graham's longest processing time, at most 4/3 of
the best division). Then the most loaded rank hands over or swaps tensors while this lowers its
load. Matrices are never split, so no division goes below max(mean, largest matrix).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from torch import Tensor

from kimi_pretrain.optim.config import UpdateSettings
from kimi_pretrain.optim.groups import Rule, TensorRules
from kimi_pretrain.optim.newton_schulz import flops
from kimi_pretrain.parallel.balance import least_loaded

# Groups are divided in this order. The few large matrices of the dense part and the encoder come
# first; if experts have copies, they are many and small and even out the remaining differences.
ORDER = ("dense", "encoder", "expert")

# Indices of layer, block and expert in a name; tensors that differ only in these have equal costs.
NUMBERED = re.compile(r"(?<=\.layers\.)\d+|(?<=\.blocks\.)\d+|(?<=\.experts\.)\d+")

Kind = Literal["muon", "adamw"]


@dataclass(frozen=True)
class TensorSize:
    """Name and shape of a checkpoint tensor, and the bytes per element of the weight."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(name: str, data: Tensor) -> "TensorSize":
        """Return the size of a tensor, which may be on the meta device."""
        return TensorSize(name, tuple(data.shape), data.dtype.itemsize)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class OwnerLoad:
    """Load of a rank from its tensors: Newton-Schulz FLOPs per step, bytes of optimizer state."""

    flops: int = 0
    state_bytes: int = 0

    def __add__(self, other: "OwnerLoad") -> "OwnerLoad":
        return OwnerLoad(self.flops + other.flops, self.state_bytes + other.state_bytes)

    def __sub__(self, other: "OwnerLoad") -> "OwnerLoad":
        return OwnerLoad(self.flops - other.flops, self.state_bytes - other.state_bytes)


def choose_owners(
    tensors: Sequence[TensorSize],
    loads: Sequence[OwnerLoad],
    model: TensorRules,
    config: UpdateSettings,
) -> dict[str, int]:
    """Assign each tensor of one replica group to one of its ranks.

    Args:
        tensors: the tensors of the group, which every rank holds; names are unique.
        loads: load of each rank, in the group's order: its tensors of earlier groups in `ORDER`,
            plus `share_of` the later groups.
        model: rules of the tensors.
        config: `ns_steps` and `matrices` are read.

    Returns:
        name -> index of the owner in `loads`. Independent of the order of `tensors`.

    Raises:
        ValueError: no rule covers a tensor, or the group is empty.
    """
    if not loads:
        raise ValueError(f"optimizer: {len(tensors)} tensors and no member to own them")
    costs = costs_of(tensors, model, config)
    muon = {name: (c.load.flops, c.load.state_bytes) for name, c in costs.items() if c.is_muon}
    owners = _spread(muon, [(load.flops, load.state_bytes) for load in loads])
    bytes_so_far = [(load.state_bytes, 0) for load in loads]
    for name, owner in owners.items():
        bytes_so_far[owner] = (bytes_so_far[owner][0] + costs[name].load.state_bytes, 0)
    adamw = {name: (c.load.state_bytes, 0) for name, c in costs.items() if not c.is_muon}
    return owners | _spread(adamw, bytes_so_far)


def share_of(
    tensors: Sequence[TensorSize], num_members: int, model: TensorRules, config: UpdateSettings
) -> OwnerLoad:
    """Return the mean load of a group's ranks, the expected load of a rank before the division."""
    costs = costs_of(tensors, model, config).values()
    whole = sum((cost.load for cost in costs), OwnerLoad())
    return OwnerLoad(whole.flops // num_members, whole.state_bytes // num_members)


def load_of(
    tensors: Sequence[TensorSize],
    owners: Mapping[str, int],
    member: int,
    model: TensorRules,
    config: UpdateSettings,
) -> OwnerLoad:
    """Return the load of one rank (index `member`) after `choose_owners`."""
    mine = [tensor for tensor in tensors if owners[tensor.name] == member]
    return sum((cost.load for cost in costs_of(mine, model, config).values()), OwnerLoad())


@dataclass(frozen=True)
class Cost:
    """The rule of a tensor, and its load for the owner."""

    rule: Rule
    load: OwnerLoad

    @property
    def is_muon(self) -> bool:
        """True if Muon updates the tensor."""
        return self.rule.kind == "muon"


def costs_of(
    tensors: Sequence[TensorSize], model: TensorRules, config: UpdateSettings
) -> dict[str, Cost]:
    """Return each tensor's rule and cost by name.

    Tensors that differ only in the indices of layer, block and expert share one lookup, because a
    1T model has 70,000 tensors.

    Raises:
        ValueError: no rule covers a tensor; the message names it.
    """
    known: dict[tuple[str, tuple[int, ...], int], Cost] = {}
    costs = {}
    for tensor in tensors:
        kin = NUMBERED.sub("#", tensor.name), tensor.shape, tensor.itemsize
        if kin not in known:
            rule = model.rule_of(tensor.name, tensor.shape, config.matrices)
            work = muon_flops(tensor.shape, rule, config.ns_steps)
            known[kin] = Cost(rule, OwnerLoad(work, state_bytes(tensor, rule.kind)))
        costs[tensor.name] = known[kin]
    return costs


def muon_flops(shape: Sequence[int], rule: Rule, ns_steps: int) -> int:
    """Return the Newton-Schulz operations of one update of a tensor."""
    return sum(flops(*piece.shape(shape), ns_steps) for piece in rule.pieces)


def state_bytes(tensor: TensorSize, kind: Kind) -> int:
    """Return the bytes of a tensor's optimizer state.

    The state is momentum or two moments, in fp32 (fp64 for fp64 weights), and a master for weights
    below fp32.
    """
    moments = 1 if kind == "muon" else 2
    master = 1 if tensor.itemsize < 4 else 0
    return tensor.elements * max(4, tensor.itemsize) * (moments + master)


# A cost or a load: the value to balance, then the tie-breaker.
_Pair = tuple[int, int]


def _spread(costs: Mapping[str, _Pair], loads: Sequence[_Pair]) -> dict[str, int]:
    """Divide jobs among members with initial loads: longest first, then by exchanges."""
    return _swap(_longest_first(costs, loads), costs, loads)


def _longest_first(costs: Mapping[str, _Pair], loads: Sequence[_Pair]) -> dict[str, int]:
    """Assign jobs to the least-loaded member, largest first.

    Equal jobs are ordered by name; among equally loaded members, the first one gets the job.
    """
    highest = sum(second for _, second in costs.values()) + max(second for _, second in loads)
    bits = highest.bit_length()  # pack pairs into one integer; sums of the second part fit its bits

    def packed(pair: _Pair) -> int:
        return (pair[0] << bits) | pair[1]

    names = sorted(costs, key=lambda name: (-packed(costs[name]), name))
    owners = least_loaded((packed(costs[name]) for name in names), [packed(load) for load in loads])
    return dict(zip(names, owners, strict=True))


def _swap(
    owners: dict[str, int], costs: Mapping[str, _Pair], loads: Sequence[_Pair]
) -> dict[str, int]:
    """Hand jobs of the most loaded member over, or swap them for smaller jobs, while this helps.

    Longest-first is not optimal for few jobs on few members: it divides 3, 3, 2, 2, 2 into 7 and 5.
    Jobs of equal cost are interchangeable, so the search runs over pairs of costs instead of jobs.
    """
    totals = [first for first, _ in loads]
    held: list[dict[_Pair, list[str]]] = [{} for _ in loads]
    for name, owner in owners.items():
        totals[owner] += costs[name][0]
        held[owner].setdefault(costs[name], []).append(name)
    for _ in costs:  # each round lowers the largest load, or the number of members with this load
        most = max(range(len(totals)), key=lambda member: (totals[member], -member))
        exchange = _best_exchange(most, totals, held)
        if exchange is None:
            break
        given, taken, other = exchange
        _hand_over(given, held[most], held[other])
        if taken != _NOTHING:
            _hand_over(taken, held[other], held[most])
        totals[most] -= given[0] - taken[0]
        totals[other] += given[0] - taken[0]
    return {
        name: member
        for member, jobs in enumerate(held)
        for names in jobs.values()
        for name in names
    }


_NOTHING: _Pair = (0, 0)


def _best_exchange(
    most: int, totals: Sequence[int], held: Sequence[Mapping[_Pair, Sequence[str]]]
) -> tuple[_Pair, _Pair, int] | None:
    """Return (cost given, cost received, partner) that minimises the larger load of the two."""
    if not held[most]:
        return None
    partners: dict[_Pair, int] = {}  # cost -> the least-loaded other member with such a job
    for member in sorted(range(len(totals)), key=lambda member: (totals[member], member)):
        if member != most:
            for cost in (_NOTHING, *held[member]):
                partners.setdefault(cost, member)
    best, found = totals[most], None
    for given in sorted(held[most]):
        for taken, other in sorted(partners.items()):
            more = given[0] - taken[0]
            highest = max(totals[most] - more, totals[other] + more)
            if highest < best:
                best, found = highest, (given, taken, other)
    return found


def _hand_over(cost: _Pair, giver: dict[_Pair, list[str]], taker: dict[_Pair, list[str]]) -> None:
    names = giver[cost]
    taker.setdefault(cost, []).append(names.pop())
    if not names:
        del giver[cost]
