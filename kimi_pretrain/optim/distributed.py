"""MuonClip over replica groups: every tensor is updated whole by one owner and sent to the rest.

Newton-Schulz needs whole matrices, so optimizer state is sharded by tensor and not by slices of a
flat buffer: the members of a replica group divide its tensors among them (`groups.choose_owners`),
the owner keeps momentum, moments and fp32 master, and the updated weights travel once, in the
weights' own dtype, as in ZeRO-1. A step works in rounds. In round k

    launch    start to receive the k-th bucket of every other owner
    compute   update the own k-th bucket, start to send it
    finish    round k-1: wait, and copy what came in into the model

so the products of one bucket run while the one before is on its way. Buckets are cut from names,
shapes and dtypes alone, so all members issue the same collectives in the same order.
A process alone runs the same class; it has nothing to send.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import (
    Assignment,
    ModelShape,
    NamedTensor,
    Rule,
    assignment_table,
    choose_owners,
    rule_of,
)
from kimi_pretrain.optim.muon import adamw_update, muon_update
from kimi_pretrain.optim.qk_clip import clip_key_, clip_query_
from kimi_pretrain.optim.report import StepReport


class DistributedMuonClip:
    """MuonClip whose state is sharded by whole tensors inside each replica group.

    Args:
        named: tensors of this rank. The members of a replica group hold the same names, shapes and
            dtypes (checked here), and the same values.
        groups: process group of each name in `NamedTensor.replicas`; None is this process alone.
            All members of a group construct this object together.
        config: settings.
        shape: head counts and widths.

    Attributes:
        steps: updates done.
        owners: name -> index of the owner inside the tensor's replica group.

    Raises:
        ValueError: unknown or repeated name, a shape that does not fit, a group that is missing,
            or members that disagree about their tensors.
    """

    def __init__(
        self,
        named: Sequence[NamedTensor],
        groups: Mapping[str, ProcessGroup | None],
        config: OptimConfig,
        shape: ModelShape,
    ):
        self.config = config
        self.shape = shape
        self.steps = 0
        self._tensors = _by_name(named, groups)
        self._rules = {t.name: rule_of(t.name, t.data.shape, shape) for t in named}
        self._members = {name: _Members.of(group) for name, group in sorted(groups.items())}
        for name, members in self._members.items():
            members.check_agreement(name, [t for t in named if t.replicas == name])
        sizes = {name: len(members.ranks) for name, members in self._members.items()}
        self.owners = choose_owners(named, shape, sizes, config)
        self._rounds = _cut_rounds(named, self._rules, self.owners, config.bucket_elements)
        self._state = {
            name: _State.zeros(tensor, self._rules[name])
            for name, tensor in sorted(self._tensors.items())
            if self.owners[name] == self._members[tensor.replicas].index
        }

    def assignments(self) -> list[Assignment]:
        """The table of the dry run: every tensor of this rank with its pieces and its owner."""
        return assignment_table(list(self._tensors.values()), self.owners, self.shape)

    @torch.no_grad()
    def grad_square_sum(self) -> Tensor:
        """Sum of squares of the gradients of the owned tensors, unscaled.

        Every tensor of the model has one owner, so a SUM over all ranks is the square of the global
        gradient norm.

        Returns:
            0-d fp64. Each tensor's norm is taken by itself, so the figure depends on who owns what
            only by fp64 rounding.
        """
        norms = []
        for name in self._state:
            grad = self._tensors[name].grad()
            norms.append(torch.linalg.vector_norm(grad, dtype=_state_dtype(grad)).double())
        return torch.stack(norms).square().sum() if norms else self._zero()

    @torch.no_grad()
    def step(self, lr: float, scale: float | Tensor = 1.0) -> StepReport:
        """Update every tensor from its gradient times `scale`; all members of all groups call it.

        Args:
            lr: learning rate of this step.
            scale: clip factor and divisor in one; the same on all ranks.

        Returns:
            Figures of this rank. On return the weights of all members are equal bit for bit (on
            CUDA: once the current stream has caught up).
        """
        self.steps += 1
        report = StepReport(self._zero())
        before: list[_Parcel] = []
        for round_ in self._rounds:
            parcels = []
            for bucket in round_:
                members = self._members[bucket.replicas]
                if bucket.owner == members.index:
                    self._update(bucket.tensors, lr, scale, report)
                parcels += _launch(bucket, members)
            _finish(before)
            before = parcels
        _finish(before)
        return report

    def _update(
        self,
        tensors: Sequence[NamedTensor],
        lr: float,
        scale: float | Tensor,
        report: StepReport,
    ) -> None:
        """Update owned tensors and their state; write masters back into the model."""
        grads = {t.name: self._scaled_grad(t, scale) for t in tensors}
        muon = [t.name for t in tensors if self._rules[t.name].kind == "muon"]
        updates = muon_update(
            [self._state[name].weight for name in muon],
            [grads[name] for name in muon],
            [self._state[name].moments["momentum"] for name in muon],
            [self._rules[name] for name in muon],
            lr,
            self.config,
            report.clock(),
        )
        report.count(updates)
        for name in sorted(grads.keys() - set(muon)):
            state = self._state[name]
            moments = state.moments["exp_avg"], state.moments["exp_avg_sq"]
            adamw_update(state.weight, grads[name], *moments, self.steps, lr, self.config)
        for tensor in tensors:
            if self._state[tensor.name].has_master:
                tensor.data.copy_(self._state[tensor.name].weight)

    def _scaled_grad(self, tensor: NamedTensor, scale: float | Tensor) -> Tensor:
        grad = tensor.grad()
        if grad.shape != tensor.data.shape:
            raise ValueError(
                f"optimizer: gradient of '{tensor.name}' is {tuple(grad.shape)}, "
                f"the tensor is {tuple(tensor.data.shape)}"
            )
        return grad.to(self._state[tensor.name].weight.dtype) * scale

    def _zero(self) -> Tensor:
        device = next((t.data.device for t in self._tensors.values()), torch.device("cpu"))
        return torch.zeros((), dtype=torch.float64, device=device)

    def apply_qk_clip(self, q_name: str, kv_b_name: str, gamma: Tensor) -> None:
        """Clip the queries and keys of one layer, after `step`; all members of its group call it.

        The model's weights are clipped on every member, the masters on their owners, so nothing is
        sent and all members stay equal. Momentum is left as it is, as in Kimi K2. A rank that does
        not hold the layer has nothing to do.

        Args:
            q_name: checkpoint name of the layer's q_b_proj (or q_proj) weight.
            kv_b_name: checkpoint name of its kv_b_proj weight.
            gamma: [heads] from `qk_clip.factors`, the same on all members.

        Raises:
            ValueError: not such names, only one of the two is held, or sizes do not fit.
        """
        wanted = (r"\.self_attn\.q(_b)?_proj\.weight", r"\.self_attn\.kv_b_proj\.weight")
        names = (q_name, kv_b_name)
        held = [name in self._tensors for name in names]
        if held[0] != held[1] or not all(map(re.search, wanted, names)):
            raise ValueError(
                f"qk-clip needs q_b_proj (or q_proj) and kv_b_proj of one layer, got {names}, "
                f"of which this rank holds {held.count(True)}"
            )
        for name, clip in zip(names, (clip_query_, clip_key_)) if all(held) else ():
            clip(self._tensors[name].data, gamma, self.shape)
            if name in self._state and self._state[name].has_master:
                clip(self._state[name].weight, gamma, self.shape)

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Copy weights into masters: for weights that were loaded without optimizer state."""
        for name, state in self._state.items():
            if state.has_master:
                state.weight.copy_(self._tensors[name].data)

    def state_dict(self) -> dict[str, Tensor]:
        """State of the owned tensors, and the step count under 'optim.step' (same on all ranks).

        Names do not depend on the layout: 'optim.momentum.<tensor>', 'optim.exp_avg.<tensor>',
        'optim.exp_avg_sq.<tensor>', 'optim.master.<tensor>' (only for weights below fp32). The
        union over all ranks is the whole state, whatever the number of ranks. Tensors are the live
        ones: write or clone them before the next step.
        """
        state = {"optim.step": torch.tensor(self.steps)}
        for name, owned in self._state.items():
            state |= {f"optim.{part}.{name}": tensor for part, tensor in owned.parts().items()}
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over what this rank owns; entries of other ranks' tensors are ignored.

        Weights are not touched: load the model's own as well.

        Raises:
            ValueError: an owned entry is missing, or has another shape or dtype. Nothing has been
                changed then.
        """
        own = self.state_dict()
        for name, tensor in own.items():
            if name not in state:
                raise ValueError(
                    f"optimizer: the checkpoint lacks '{name}'. To start from weights alone, skip "
                    "load_state_dict and call sync_masters()"
                )
            found = state[name]
            if found.shape != tensor.shape or found.dtype != tensor.dtype:
                raise ValueError(
                    f"optimizer: '{name}' is {found.dtype} {tuple(found.shape)} in the checkpoint, "
                    f"{tensor.dtype} {tuple(tensor.shape)} in this run"
                )
        for name, tensor in own.items():
            tensor.copy_(state[name])
        self.steps = int(state["optim.step"])


@dataclass(frozen=True)
class _Members:
    """The ranks of one replica group; a process alone has no group."""

    group: ProcessGroup | None
    ranks: tuple[int, ...]
    index: int

    @staticmethod
    def of(group: ProcessGroup | None) -> "_Members":
        if group is None:
            return _Members(None, (0,), 0)
        return _Members(group, tuple(dist.get_process_group_ranks(group)), dist.get_rank(group))

    def check_agreement(self, name: str, tensors: Sequence[NamedTensor]) -> None:
        """Refuse members with different tensors: they would wait for each other for ever."""
        if len(self.ranks) == 1:
            return
        lines = sorted(f"{t.name} {tuple(t.data.shape)} {t.data.dtype}" for t in tensors)
        mine = (len(lines), blake2b("\n".join(lines).encode(), digest_size=8).hexdigest())
        found: list[tuple[int, str]] = [mine] * len(self.ranks)
        dist.all_gather_object(found, mine, group=self.group)
        if len(set(found)) > 1:
            raise ValueError(
                f"optimizer: the ranks of replica group '{name}' hold different tensors; "
                f"(count, digest) by rank: {dict(zip(self.ranks, found))}"
            )


@dataclass(frozen=True)
class _State:
    """What an owner keeps of one tensor. `weight` is the master, or the model's own if wide."""

    weight: Tensor
    has_master: bool
    moments: dict[str, Tensor]

    @staticmethod
    def zeros(tensor: NamedTensor, rule: Rule) -> "_State":
        data = tensor.data.detach()
        wide = _state_dtype(data)
        names = ("momentum",) if rule.kind == "muon" else ("exp_avg", "exp_avg_sq")
        moments = {name: torch.zeros(data.shape, dtype=wide, device=data.device) for name in names}
        if data.dtype == wide:
            return _State(data, False, moments)
        return _State(data.to(wide, memory_format=torch.contiguous_format), True, moments)

    def parts(self) -> dict[str, Tensor]:
        return self.moments | ({"master": self.weight} if self.has_master else {})


@dataclass
class _Bucket:
    """Tensors of one owner that are updated, then sent, together; all of one dtype."""

    replicas: str
    owner: int
    tensors: list[NamedTensor]

    @property
    def elements(self) -> int:
        return sum(tensor.data.numel() for tensor in self.tensors)


@dataclass(frozen=True)
class _Parcel:
    """A bucket on its way. `unpack` is what still has to be copied into the model."""

    work: Work
    flat: Tensor
    unpack: list[NamedTensor]


def _state_dtype(x: Tensor) -> torch.dtype:
    """fp32, or wider if the tensor is."""
    return torch.promote_types(x.dtype, torch.float32)


def _by_name(
    named: Sequence[NamedTensor], groups: Mapping[str, ProcessGroup | None]
) -> dict[str, NamedTensor]:
    tensors: dict[str, NamedTensor] = {}
    for tensor in named:
        if tensor.name in tensors:
            raise ValueError(f"optimizer: tensor '{tensor.name}' was given twice")
        if tensor.replicas not in groups:
            raise ValueError(
                f"optimizer: tensor '{tensor.name}' is replicated over '{tensor.replicas}', "
                f"groups are {sorted(groups)}"
            )
        tensors[tensor.name] = tensor
    return tensors


def _cut_rounds(
    named: Sequence[NamedTensor],
    rules: Mapping[str, Rule],
    owners: Mapping[str, int],
    limit: int,
) -> list[list[_Bucket]]:
    """Round k of a group and dtype holds the k-th bucket of each owner, in the owners' order.

    Inside an owner, equal shapes lie side by side so that they share a Newton-Schulz call.
    """
    lanes: dict[tuple[str, str], dict[int, list[_Bucket]]] = {}
    for t in sorted(named, key=lambda t: (rules[t.name].kind, tuple(t.data.shape), t.name)):
        lane = lanes.setdefault((t.replicas, str(t.data.dtype)), {})
        buckets = lane.setdefault(owners[t.name], [])
        if not buckets or buckets[-1].elements + t.data.numel() > limit:
            buckets.append(_Bucket(t.replicas, owners[t.name], []))
        buckets[-1].tensors.append(t)
    rounds = []
    for _, lane in sorted(lanes.items()):
        for k in range(max(len(buckets) for buckets in lane.values())):
            rounds.append([lane[owner][k] for owner in sorted(lane) if k < len(lane[owner])])
    return rounds


def _launch(bucket: _Bucket, members: _Members) -> list[_Parcel]:
    """Start to send (owner) or to receive (others) a bucket; nothing to do for a process alone."""
    if len(members.ranks) == 1:
        return []
    mine = bucket.owner == members.index
    data = [tensor.data.detach() for tensor in bucket.tensors]
    in_place = len(data) == 1 and data[0].is_contiguous()
    if in_place:  # a large tensor: no staging memory, no copies
        flat = data[0].view(-1)
    elif mine:
        flat = torch.cat([x.reshape(-1) for x in data])
    else:
        flat = data[0].new_empty(bucket.elements)
    source = members.ranks[bucket.owner]
    work = dist.broadcast(flat, source, group=members.group, async_op=True)
    assert work is not None  # async_op gives a handle to every member
    return [_Parcel(work, flat, [] if mine or in_place else bucket.tensors)]


def _finish(parcels: Sequence[_Parcel]) -> None:
    """Wait for a round and copy what came in into the model."""
    for parcel in parcels:
        parcel.work.wait()
        sizes = [tensor.data.numel() for tensor in parcel.unpack]
        for tensor, part in zip(parcel.unpack, parcel.flat.split(sizes) if sizes else ()):
            tensor.data.copy_(part.view_as(tensor.data))
