"""MuonClip sharded by whole tensors (ZeRO-1): one owner updates a tensor and broadcasts it.

Newton-Schulz needs whole matrices, so optimizer state is sharded by tensor instead of by slices of
a flat buffer. The ranks of a replica group divide its tensors (`owners.choose_owners`). Only the
owner receives the summed gradient (`reduce`) and keeps momentum, moments and fp32 master. Updated
weights are broadcast once, in their own dtype, which moves as many bytes as ZeRO-1. A step runs in
rounds. Round k processes the k-th bucket of each owner in turn:

    compute   update the bucket, if this rank owns it
    launch    start its broadcast
    finish    after the last bucket: wait for round k-1, copy received weights into the model

The products of one bucket therefore overlap with the broadcast of the previous one. Buckets depend
only on names, shapes and dtypes, so all ranks of a group issue the same collectives in the same
order. A single process runs the same class and broadcasts nothing. Without `shard_state`, every
rank receives all sums, keeps all state and computes every update, as a reference.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.batched import orthogonality_errors
from kimi_pretrain.optim.broadcast import Transfer, cut_rounds, finish, launch
from kimi_pretrain.optim.config import UpdateSettings
from kimi_pretrain.optim.groups import MOMENTS, ModelShape, NamedTensor, Rule, TensorRules
from kimi_pretrain.optim.muon import adamw_update, muon_update
from kimi_pretrain.optim.owners import (
    ORDER,
    OwnerLoad,
    TensorSize,
    choose_owners,
    load_of,
    share_of,
)
from kimi_pretrain.optim.qk_clip import scale_heads_
from kimi_pretrain.optim.reduce import GradientReduction
from kimi_pretrain.optim.replica_group import ReplicaGroup
from kimi_pretrain.optim.step_stats import StepStats

ADAMW_ELEMENTS = 2**24  # per AdamW call; limits its three fp32 temporaries
# Bucket size if nothing is broadcast (a replica group of one rank); large enough for Newton-Schulz
# to batch small matrices on a GPU.
UNSENT_ELEMENTS = 2**26


class DistributedMuonClip:
    """MuonClip whose state is sharded by whole tensors inside each replica group.

    Args:
        named: tensors of this rank. All ranks of a replica group hold the same names, shapes and
            dtypes in the same order (checked here), and the same values.
        groups: process group of each name in `NamedTensor.replicas`; None for a single process.
            All ranks of a group construct this object together.
        config: settings of the update.
        rules: rule of each tensor; a `ModelShape` for Kimi's checkpoint.

    Attributes:
        steps: number of completed updates.
        missed: name -> updates without a gradient on this rank; only `optim.optimizer` passes
            `without`.
        owners: name -> index of the owner in the tensor's replica group. Without `shard_state`, it
            only selects the rank that counts a tensor (`leads`).
        bytes_moved: bytes broadcast in the last step, counted at the sender as n - 1 times the
            size. The sum over ranks is the traffic of the job. (`GradientReduction` counts
            gradients.)

    Raises:
        ValueError: a name is unknown or repeated, a shape does not fit, a group is missing, or
            ranks of a group have different tensors.
    """

    def __init__(
        self,
        named: Sequence[NamedTensor],
        groups: Mapping[str, ProcessGroup | None],
        config: UpdateSettings,
        rules: TensorRules,
    ):
        self.config = config
        self.steps = self.bytes_moved = 0
        self.missed: Counter[str] = Counter()
        self._tensors = _by_name(named, groups)
        self._rules = {t.name: rules.rule_of(t.name, t.data.shape, config.matrices) for t in named}
        self._groups = {name: ReplicaGroup.of(groups[name]) for name in ORDER if name in groups}
        for name, group in self._groups.items():
            group.check_agreement(name, [t for t in named if t.replicas == name])
        self.owners = _divide(named, self._groups, rules, config)
        limits = {
            name: config.bucket_elements if len(group.ranks) > 1 else UNSENT_ELEMENTS
            for name, group in self._groups.items()
        }
        self._rounds = cut_rounds(named, self._rules, self.owners, limits)
        self._state = {
            name: _State.zeros(tensor, self._rules[name])
            for name, tensor in sorted(self._tensors.items())
            if self.owns(name)
        }

    def owns(self, name: str) -> bool:
        """Return whether this rank keeps a tensor's state and updates it; True without sharding."""
        return not self.config.shard_state or self.leads(name)

    def leads(self, name: str) -> bool:
        """Return whether this rank is the one that counts a tensor in sums over the job."""
        return self.owners[name] == self._groups[self._tensors[name].replicas].index

    def owner_ranks(self, replicas: str) -> dict[str, int] | None:
        """Return the global rank that owns each tensor of a replica group.

        The result is None without `shard_state`, when every rank updates every tensor.
        """
        if not self.config.shard_state:
            return None
        held = [name for name, tensor in self._tensors.items() if tensor.replicas == replicas]
        ranks = self._groups[replicas].ranks
        return {name: ranks[self.owners[name]] for name in held}

    def gradient_reduction(
        self, order: Iterable[str], groups: Mapping[str, ProcessGroup | None]
    ) -> GradientReduction:
        """Return the reduction of gradients to the owners.

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
        """Return the sum of squares of the unscaled gradients of the tensors that this rank leads.

        Exactly one rank leads each tensor, so the sum over all ranks is the square of the global
        gradient norm. It is not finite if any gradient is not.

        Returns:
            0-d fp64. Each tensor's norm is computed separately, so the assignment of owners changes
            the sum only by fp64 rounding.
        """
        norms = []
        for name in filter(self.leads, self._state):
            grad = self._tensors[name].grad()
            norms.append(torch.linalg.vector_norm(grad, dtype=_state_dtype(grad)).double())
        return torch.stack(norms).square().sum() if norms else self._zero()

    @torch.no_grad()
    def step(
        self, lr: float, scale: float | Tensor = 1.0, without: Collection[str] = ()
    ) -> StepStats:
        """Update every tensor from its gradient times `scale`; all ranks of all groups call it.

        On return the weights are bit-identical on all ranks of a group (on CUDA, once the current
        stream has finished its work).

        Args:
            lr: scheduled learning rate.
            scale: clip factor times 1 / divisor; the same on all ranks.
            without: names of tensors that have no gradient on this rank. If this rank owns them,
                they and their state do not change.

        Returns:
            Statistics of this rank.
        """
        self.steps += 1
        self.missed.update(without)
        self.bytes_moved = 0
        stats = StepStats(self._zero().device)
        before: list[Transfer] = []
        for round_ in self._rounds:
            transfers = []
            for bucket in round_:
                group = self._groups[bucket.replicas]
                mine = bucket.owner == group.index
                if mine or not self.config.shard_state:
                    present = [t for t in bucket.tensors if t.name not in without]
                    self._update(present, lr, scale, stats)
                if self.config.shard_state and len(group.ranks) > 1:
                    transfers.append(launch(bucket, group))
                    self.bytes_moved += mine * transfers[-1].flat.nbytes * (len(group.ranks) - 1)
            finish(before)
            before = transfers
        finish(before)
        return stats

    def _update(
        self,
        tensors: Sequence[NamedTensor],
        lr: float,
        scale: float | Tensor,
        stats: StepStats,
    ) -> None:
        """Update owned tensors and their state, and copy masters back into the model."""
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
            stats.clock(),
        )
        for rule, update in zip(rules, updates, strict=True):
            stats.count(rule.group, [update])
        if muon and self.config.measure_orthogonality:
            stats.orthogonality(orthogonality_errors(updates, rules, self.config))
        for name in sorted(grads.keys() - set(muon)):
            rule, whole = self._rules[name], (*self._state[name].columns(), grads[name])
            # Update in parts, as fp32 temporaries of a whole embedding could exhaust the memory.
            for weight, mean, square, grad in zip(*(_parts(x) for x in whole), strict=True):
                own = self._scaled(name, grad, scale), mean, square, rule
                updates_done = self.steps - self.missed[name]
                update = adamw_update(weight, *own, updates_done, lr, self.config)
                stats.count(rule.group, [update])
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

    def apply_qk_clip(self, q_name: str, kv_b_name: str, gamma: Tensor, shape: ModelShape) -> None:
        """Clip the queries and keys of one layer, after `step`; all ranks of its group call it.

        Momentum does not change, as in Kimi K2. On a rank without the layer, this does nothing.

        Args:
            q_name: checkpoint name of the layer's q_b_proj (or q_proj) weight.
            kv_b_name: checkpoint name of its kv_b_proj weight.
            gamma: [heads] from `qk_clip.factors`, the same on all ranks.
            shape: sizes of the model.

        Raises:
            ValueError: the names are wrong, this rank holds only one of the two tensors, or sizes
                do not fit `shape`.
        """
        wanted = (r"\.self_attn\.q(_b)?_proj\.weight", r"\.self_attn\.kv_b_proj\.weight")
        names = (q_name, kv_b_name)
        held = [name in self._tensors for name in names]
        if held[0] != held[1] or not all(map(re.search, wanted, names)):
            raise ValueError(
                f"qk-clip needs q_b_proj (or q_proj) and kv_b_proj of one layer, got {names}, "
                f"of which this rank holds {held.count(True)}"
            )
        root, rope, v = gamma.sqrt(), shape.qk_rope_dim, shape.v_dim
        if all(held):
            for name, rows in zip(names, (shape.qk_nope_dim + rope, shape.qk_nope_dim + v)):
                found = tuple(self._tensors[name].data.shape)
                if gamma.shape != (shape.num_heads,) or found[0] != shape.num_heads * rows:
                    raise ValueError(
                        f"qk-clip: weight '{name}' {found} and gamma {tuple(gamma.shape)} do not "
                        f"fit {shape.num_heads} heads of {rows} rows"
                    )
            self.change_weight(q_name, lambda weight: scale_heads_(weight, root, rope, gamma))
            self.change_weight(kv_b_name, lambda weight: scale_heads_(weight, root, v))

    @torch.no_grad()
    def change_weight(self, name: str, change: Callable[[Tensor], None]) -> None:
        """Apply an in-place change to a weight, and to its master if this rank owns it.

        All ranks of the group must call it with the same change, so no communication is needed.
        """
        change(self._tensors[name].data)
        if name in self._state and self._state[name].has_master:
            change(self._state[name].weight)

    @torch.no_grad()
    def sync_masters(self) -> None:
        """Copy weights into masters; needed after weights are loaded without optimizer state."""
        for name, state in self._state.items():
            if state.has_master:
                state.weight.copy_(self._tensors[name].data)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state of the owned tensors, and the step count as 'optim.step'.

        Names do not depend on the layout: 'optim.momentum.<tensor>', 'optim.exp_avg.<tensor>',
        'optim.exp_avg_sq.<tensor>', 'optim.master.<tensor>' (only for weights below fp32). The
        union over all ranks is the whole state, for any number of ranks. Tensors are not copies:
        write or clone them before the next step.
        """
        state = {"optim.step": torch.tensor(self.steps)}
        for name in self._state:
            state |= {f"optim.{part}.{name}": tensor for part, tensor in self.parts(name).items()}
        return state

    def parts(self, name: str) -> dict[str, Tensor]:
        """Return the state of a tensor by part ('momentum', ...); empty if not owned."""
        return self._state[name].parts() if name in self._state else {}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Load the state of the tensors that this rank owns, and ignore all other entries.

        Weights are part of the model and are not loaded here.

        Raises:
            ValueError: an owned entry is missing, or has another shape or dtype; no state has
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
    """An owner's state of a tensor.

    `weight` is the fp32 master, or the model's own tensor if its dtype is not below fp32.
    """

    weight: Tensor
    has_master: bool
    moments: dict[str, Tensor]

    @staticmethod
    def zeros(tensor: NamedTensor, rule: Rule) -> "_State":
        data = tensor.data.detach()
        wide = _state_dtype(data)
        names = MOMENTS[rule.kind]
        moments = {name: torch.zeros(data.shape, dtype=wide, device=data.device) for name in names}
        if data.dtype == wide:
            return _State(data, False, moments)
        return _State(data.to(wide, memory_format=torch.contiguous_format), True, moments)

    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors that AdamW updates element by element: weight and both averages."""
        return self.weight, self.moments["exp_avg"], self.moments["exp_avg_sq"]

    def parts(self) -> dict[str, Tensor]:
        return self.moments | ({"master": self.weight} if self.has_master else {})


def _parts(x: Tensor) -> Sequence[Tensor]:
    """Cut a tensor along its first axis into views of at most `ADAMW_ELEMENTS`, or of one row."""
    row = x[:1].numel() if x.ndim else 1
    return x.split(max(1, ADAMW_ELEMENTS // max(1, row))) if x.ndim else (x,)


def _state_dtype(x: Tensor) -> torch.dtype:
    """Return fp32, or the tensor's dtype if it is wider."""
    return torch.promote_types(x.dtype, torch.float32)


def _divide(
    named: Sequence[NamedTensor],
    groups: Mapping[str, ReplicaGroup],
    rules: TensorRules,
    config: UpdateSettings,
) -> dict[str, int]:
    """Return the owners, name -> index in its replica group, chosen group by group in `ORDER`.

    The ranks of a group exchange their load from earlier groups and their expected load from later
    groups, so all compute the same owners.
    """
    owners: dict[str, int] = {}
    sizes = [(t.replicas, TensorSize.of(t.name, t.data)) for t in named]
    held = {name: [size for replicas, size in sizes if replicas == name] for name in groups}
    shares = {n: share_of(held[n], len(g.ranks), rules, config) for n, g in groups.items()}
    load = sum(shares.values(), OwnerLoad())
    for name, group in groups.items():
        load -= shares[name]
        found = choose_owners(held[name], group.all_gather_object(load), rules, config)
        load += load_of(held[name], found, group.index, rules, config)
        owners |= found
    return owners


def _by_name(
    named: Sequence[NamedTensor], groups: Mapping[str, ProcessGroup | None]
) -> dict[str, NamedTensor]:
    tensors: dict[str, NamedTensor] = {}
    for tensor in named:
        if tensor.name in tensors:
            raise ValueError(f"optimizer: tensor '{tensor.name}' was given twice")
        if tensor.replicas not in groups or tensor.replicas not in ORDER:
            raise ValueError(
                f"optimizer: tensor '{tensor.name}' is replicated over '{tensor.replicas}', "
                f"groups are {sorted(groups)}, of which optim.owners divides {ORDER} alone"
            )
        tensors[tensor.name] = tensor
    return tensors
