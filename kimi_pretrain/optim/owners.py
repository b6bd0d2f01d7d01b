"""Chooses which rank of a replica group owns each tensor: keeps its state and updates it.

Pure functions of names, shapes and loads, so all ranks compute the same owners. Groups are divided
one after the other. The load of a rank is what it owns of the groups before, and a mean share of
those to come: a rank that is busy with attention matrices gets fewer experts, and the encoder goes
to stages with few layers. Within a group, Muon tensors are divided by the operations of
Newton-Schulz, which take the time; then AdamW tensors by bytes of optimizer state. Both go to the
least loaded rank, largest first (Graham's longest processing time, at most 4/3 of the best
division). Then the most loaded rank gives away, or swaps, what lowers its load. Whole matrices are
the unit: no division goes below max(mean, largest matrix).
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

# Groups are divided in this order. The few large matrices of the dense part and of the encoder come
# first: where experts have copies, they are many and small, and even out what large ones leave.
ORDER = ("dense", "encoder", "expert")

# Numbers of layer, block and expert in a name; tensors that differ in nothing else are alike.
NUMBERED = re.compile(r"(?<=\.layers\.)\d+|(?<=\.blocks\.)\d+|(?<=\.experts\.)\d+")

Kind = Literal["muon", "adamw"]


@dataclass(frozen=True)
class TensorSize:
    """Name and shape of a tensor in the checkpoint, and the bytes of an element of the weight."""

    name: str
    shape: tuple[int, ...]
    itemsize: int

    @staticmethod
    def of(name: str, data: Tensor) -> "TensorSize":
        """Return the size of a tensor (also one on the meta device)."""
        return TensorSize(name, tuple(data.shape), data.dtype.itemsize)

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)


@dataclass(frozen=True)
class OwnerLoad:
    """Load of a rank by what it owns: Newton-Schulz FLOPs a step, bytes of optimizer state."""

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
    """Give each tensor of one replica group to one of its ranks.

    Args:
        tensors: of every rank of the group; names are unique.
        loads: of each rank, in the group's order: what it owns of groups before in `ORDER`, and
            `share_of` those that are still to be divided.
        config: `ns_steps` and `matrices` are read.

    Returns:
        name -> index of the owner in `loads`. Independent of the order of `tensors`.

    Raises:
        ValueError: a tensor that no rule covers, or an empty group.
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
    """Return the mean load of a group's ranks: what each may expect before the division."""
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
    """The rule of a tensor and the load it is for its owner."""

    rule: Rule
    load: OwnerLoad

    @property
    def is_muon(self) -> bool:
        """Whether it is updated by Muon."""
        return self.rule.kind == "muon"


def costs_of(
    tensors: Sequence[TensorSize], model: TensorRules, config: UpdateSettings
) -> dict[str, Cost]:
    """Return each tensor's rule and cost by name.

    Looked up once for tensors that differ only in numbers of layer, block and expert: a 1T model
    has 70,000 tensors.

    Raises:
        ValueError: names a tensor that no rule covers.
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
    """Newton-Schulz operations of one update of a tensor."""
    return sum(flops(*piece.shape(shape), ns_steps) for piece in rule.pieces)


def state_bytes(tensor: TensorSize, kind: Kind) -> int:
    """Bytes of optimizer state: fp32 momentum or two moments, and a master if the weight is below.

    fp64 weights have fp64 moments.
    """
    moments = 1 if kind == "muon" else 2
    master = 1 if tensor.itemsize < 4 else 0
    return tensor.elements * max(4, tensor.itemsize) * (moments + master)


# A cost or a load: what is balanced, then what decides between equals.
_Pair = tuple[int, int]


def _spread(costs: Mapping[str, _Pair], loads: Sequence[_Pair]) -> dict[str, int]:
    """Divide jobs among members with loads, the longest first, then improve."""
    return _swap(_longest_first(costs, loads), costs, loads)


def _longest_first(costs: Mapping[str, _Pair], loads: Sequence[_Pair]) -> dict[str, int]:
    """The largest job goes to the least loaded member; equal ones by name, and to the first."""
    highest = sum(second for _, second in costs.values()) + max(second for _, second in loads)
    bits = highest.bit_length()  # a pair as one integer: sums of the second stay below the first

    def packed(pair: _Pair) -> int:
        return (pair[0] << bits) | pair[1]

    names = sorted(costs, key=lambda name: (-packed(costs[name]), name))
    owners = least_loaded((packed(costs[name]) for name in names), [packed(load) for load in loads])
    return dict(zip(names, owners, strict=True))


def _swap(
    owners: dict[str, int], costs: Mapping[str, _Pair], loads: Sequence[_Pair]
) -> dict[str, int]:
    """Let the most loaded member hand a job over, or swap it for a smaller one, while it helps.

    Longest-first is not the best for few jobs on few members: 3, 3, 2, 2, 2 on two becomes 7 and 5.
    Jobs of equal cost are one choice, so the search is over pairs of costs and not of jobs.
    """
    totals = [first for first, _ in loads]
    held: list[dict[_Pair, list[str]]] = [{} for _ in loads]
    for name, owner in owners.items():
        totals[owner] += costs[name][0]
        held[owner].setdefault(costs[name], []).append(name)
    for _ in costs:  # each round lowers the largest load, or the number of members that have it
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
    """Return (cost given, cost taken back, partner) that leaves the two of them lowest."""
    if not held[most]:
        return None
    partners: dict[_Pair, int] = {}  # cost -> the least loaded other member that holds such a job
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
