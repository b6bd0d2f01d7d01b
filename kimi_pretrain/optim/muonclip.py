"""MuonClip over replica groups: every tensor is updated whole by one owner and sent to the rest.

Newton-Schulz needs whole matrices, so optimizer state is sharded by tensor and not by slices of a
flat buffer: the members of a replica group divide its tensors among them (`owners.choose_owners`),
the owner alone gets the summed gradient (`reduce`) and keeps momentum, moments and fp32 master, and
the updated weights travel once, in the weights' own dtype. That is what ZeRO-1 sends, too. A step
works in rounds. In round k

    launch    start to receive the k-th bucket of every other owner
    compute   update the own k-th bucket, start to send it
    finish    round k-1: wait, and copy what came in into the model

so the products of one bucket run while the one before is on its way. Buckets are cut from names,
shapes and dtypes alone, so all members issue the same collectives in the same order.
A process alone runs the same class; it has nothing to send. With `shard_state` off every rank gets
all sums, keeps all state and does every update: the plain twin, which sends nothing either.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.batched import orthogonality_errors
from kimi_pretrain.optim.broadcast import Parcel, cut_rounds, finish, launch
from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import ModelShape, NamedTensor, Rule, rule_of
from kimi_pretrain.optim.muon import adamw_update, muon_update
from kimi_pretrain.optim.owners import (
    ORDER,
    Load,
    TensorSize,
    choose_owners,
    load_of,
    share_of,
)
from kimi_pretrain.optim.qk_clip import clip_key_, clip_query_
from kimi_pretrain.optim.reduce import GradientReduction
from kimi_pretrain.optim.replica_group import Members
from kimi_pretrain.optim.step_stats import StepReport

ADAMW_ELEMENTS = 2**24  # that AdamW updates at a time: three copies of so many in fp32
# That are updated at a time where nothing is sent, as experts of which there is one copy: enough
# for Newton-Schulz to batch small matrices on a GPU.
UNSENT_ELEMENTS = 2**26


class DistributedMuonClip:
    """MuonClip whose state is sharded by whole tensors inside each replica group.

    Args:
        named: tensors of this rank. The members of a replica group hold the same names, shapes and
            dtypes in the same order (checked here), and the same values.
        groups: process group of each name in `NamedTensor.replicas`; None is this process alone.
            All members of a group construct this object together.
        config: settings.
        shape: head counts and widths.

    Attributes:
        steps: updates done.
        owners: name -> index of the owner inside the tensor's replica group. With `shard_state`
            off it only says who speaks for a tensor (`leads`).
        bytes_moved: by the last step's weights over the network, counted at their sender: n - 1
            times their size. Over all ranks: what the job moved. (Gradients count theirs.)

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
        self.steps = self.bytes_moved = 0
        self._tensors = _by_name(named, groups)
        self._rules = {t.name: rule_of(t.name, t.data.shape, shape, config.matrices) for t in named}
        self._members = {name: Members.of(groups[name]) for name in ORDER if name in groups}
        for name, members in self._members.items():
            members.check_agreement(name, [t for t in named if t.replicas == name])
        self.owners = _divide(named, self._members, shape, config)
        limits = {
            name: config.bucket_elements if len(members.ranks) > 1 else UNSENT_ELEMENTS
            for name, members in self._members.items()
        }
        self._rounds = cut_rounds(named, self._rules, self.owners, limits)
        self._state = {
            name: _State.zeros(tensor, self._rules[name])
            for name, tensor in sorted(self._tensors.items())
            if self.owns(name)
        }

    def owns(self, name: str) -> bool:
        """Whether this rank keeps a tensor's state and updates it; without sharding all do."""
        return not self.config.shard_state or self.leads(name)

    def leads(self, name: str) -> bool:
        """Whether this rank, of all that hold a tensor, counts it in sums over the job."""
        return self.owners[name] == self._members[self._tensors[name].replicas].index

    def owner_ranks(self, replicas: str) -> dict[str, int] | None:
        """Return the rank in the whole job that owns each tensor of a replica group.

        None says that every rank does (`shard_state` is off).
        """
        if not self.config.shard_state:
            return None
        held = [name for name, tensor in self._tensors.items() if tensor.replicas == replicas]
        ranks = self._members[replicas].ranks
        return {name: ranks[self.owners[name]] for name in held}

    def gradient_reduction(
        self, order: Iterable[str], groups: Mapping[str, ProcessGroup | None]
    ) -> GradientReduction:
        """Return what sums gradients to the owners chosen here.

        Args:
            order: names in the order in which a backward pass completes their gradients.
            groups: see `GradientReduction`.
        """
        tensors = [self._tensors[name] for name in order]
        owners: dict[str, int] | None = None
        if self.config.shard_state:
            owners = {}
            for replicas in groups:
                owners |= self.owner_ranks(replicas) or {}
        return GradientReduction(tensors, owners, groups, self.config.bucket_elements)

    @torch.no_grad()
    def grad_square_sum(self) -> Tensor:
        """Sum of squares of the gradients of the tensors that this rank leads, unscaled.

        Every tensor of the model is led by one rank, so a SUM over all ranks is the square of the
        global gradient norm, and is not finite as soon as any gradient is not.

        Returns:
            0-d fp64. Each tensor's norm is taken by itself, so the figure depends on who owns what
            only by fp64 rounding.
        """
        norms = []
        for name in filter(self.leads, self._state):
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
        self.bytes_moved = 0
        report = StepReport(self._zero().device)
        before: list[Parcel] = []
        for round_ in self._rounds:
            parcels = []
            for bucket in round_:
                members = self._members[bucket.replicas]
                mine = bucket.owner == members.index
                if mine or not self.config.shard_state:
                    self._update(bucket.tensors, lr, scale, report)
                if self.config.shard_state and len(members.ranks) > 1:
                    parcels.append(launch(bucket, members))
                    self.bytes_moved += mine * parcels[-1].flat.nbytes * (len(members.ranks) - 1)
            finish(before)
            before = parcels
        finish(before)
        return report

    def _update(
        self,
        tensors: Sequence[NamedTensor],
        lr: float,
        scale: float | Tensor,
        report: StepReport,
    ) -> None:
        """Update owned tensors and their state; write masters back into the model."""
        grads = {t.name: self._grad(t) for t in tensors}
        muon = [t.name for t in tensors if self._rules[t.name].kind == "muon"]
        rules = [self._rules[name] for name in muon]
        updates = muon_update(
            [self._state[name].weight for name in muon],
            [self._scaled(name, grads[name], scale) for name in muon],
            [self._state[name].moments["momentum"] for name in muon],
            rules,
            lr,
            self.config,
            report.clock(),
        )
        for rule, update in zip(rules, updates, strict=True):
            report.count(rule.group, [update])
        if muon and self.config.measure_orthogonality:
            report.orthogonality(orthogonality_errors(updates, rules, self.config))
        for name in sorted(grads.keys() - set(muon)):
            rule, whole = self._rules[name], (*self._state[name].columns(), grads[name])
            # A part at a time: an embedding's copies in fp32 would fill the rank that owns it.
            for weight, mean, square, grad in zip(*(_parts(x) for x in whole), strict=True):
                own = self._scaled(name, grad, scale), mean, square, rule
                update = adamw_update(weight, *own, self.steps, lr, self.config)
                report.count(rule.group, [update])
        for tensor in tensors:
            if self._state[tensor.name].has_master:
                tensor.data.copy_(self._state[tensor.name].weight)

    def _scaled(self, name: str, grad: Tensor, scale: float | Tensor) -> Tensor:
        return grad.to(self._state[name].weight.dtype) * scale

    def _grad(self, tensor: NamedTensor) -> Tensor:
        grad = tensor.grad()
        if grad.shape != tensor.data.shape:
            raise ValueError(
                f"optimizer: gradient of '{tensor.name}' is {tuple(grad.shape)}, "
                f"the tensor is {tuple(tensor.data.shape)}"
            )
        return grad

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

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """What AdamW updates: weight and both averages, element beside element."""
        return self.weight, self.moments["exp_avg"], self.moments["exp_avg_sq"]

    def parts(self) -> dict[str, Tensor]:
        return self.moments | ({"master": self.weight} if self.has_master else {})


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Cut a tensor along its first axis into views of at most `ADAMW_ELEMENTS`, or of one row."""
    row = x[:1].numel() if x.ndim else 1
    return x.split(max(1, ADAMW_ELEMENTS // max(1, row))) if x.ndim else (x,)


def _state_dtype(x: Tensor) -> torch.dtype:
    """fp32, or wider if the tensor is."""
    return torch.promote_types(x.dtype, torch.float32)


def _divide(
    named: Sequence[NamedTensor],
    members: Mapping[str, Members],
    shape: ModelShape,
    config: OptimConfig,
) -> dict[str, int]:
    """Choose the owners, group after group in `ORDER`: name -> index inside its replica group.

    The members of a group tell each other what they own of the groups before it, and may expect of
    those after it, so that all come to the same answer.
    """
    owners: dict[str, int] = {}
    sizes = [(t.replicas, TensorSize.of(t.name, t.data)) for t in named]
    held = {name: [size for replicas, size in sizes if replicas == name] for name in members}
    shares = {n: share_of(held[n], len(m.ranks), shape, config) for n, m in members.items()}
    load = sum(shares.values(), Load())
    for name, group in members.items():
        load -= shares[name]
        found = choose_owners(held[name], group.gather(load), shape, config)
        load += load_of(held[name], found, group.index, shape, config)
        owners |= found
    return owners


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
        if tensor.replicas not in ORDER:
            raise ValueError(
                f"optimizer: tensor '{tensor.name}' is replicated over '{tensor.replicas}'; "
                f"optim.owners divides {ORDER} alone"
            )
        tensors[tensor.name] = tensor
    return tensors
