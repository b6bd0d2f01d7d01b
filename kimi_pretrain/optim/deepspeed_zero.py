"""AdamW under DeepSpeed's ZeRO-1 or ZeRO-2 (`optim.deepspeed`), if only the encoder is trained.

DeepSpeed sums the gradients and keeps state and masters in flat shards, one per rank;
`muon.adamw_update` computes the update. Everything else works as without DeepSpeed. Each rank's
gradient is complete before DeepSpeed receives it, so all ranks make the same calls, with or without
media, and `kimi_pretrain.update` applies its divisor, norm, clipping and guard. DeepSpeed averages
over the ranks, so its results are multiplied by their number.

Full tensors by name exist before the first step, when a checkpoint fills them, and whenever state
is requested. Checkpoints therefore have the format of `DistributedMuonClip`, and a run can resume
with any number of ranks, or without DeepSpeed. Flat shards cut matrices anywhere, so Muon cannot
use them.
"""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from kimi_pretrain.optim.config import OptimConfig
from kimi_pretrain.optim.groups import MOMENTS, NamedTensor, Rule, TensorRules
from kimi_pretrain.optim.muon import adamw_update
from kimi_pretrain.optim.muonclip import DistributedMuonClip
from kimi_pretrain.optim.step_stats import StepStats

VERSION = "0.19.8"
"""Required version of DeepSpeed; the code reads attributes that are not public."""


class DeepSpeedAdamW(DistributedMuonClip):
    """`DistributedMuonClip` for AdamW only, with gradient sums and state in DeepSpeed.

    The arguments are the same as for `DistributedMuonClip`. All tensors must be in the replica
    group "encoder", which contains all ranks, and must not be float64. `NamedTensor.grad` is the
    local gradient of this rank, before the sum over ranks.

    Raises:
        ValueError: a tensor is float64 or trained by Muon, or DeepSpeed is missing or has another
            version.
    """

    def __init__(
        self,
        named: Sequence[NamedTensor],
        groups: Mapping[str, ProcessGroup | None],
        config: OptimConfig,
        rules: TensorRules,
    ):
        super().__init__(named, groups, config, rules)
        for name, rule in self._rules.items():
            if rule.kind != "adamw" or self._tensors[name].data.dtype == torch.float64:
                raise ValueError(f"optim.deepspeed={config.deepspeed}: {name} is not for it")
        assert {tensor.replicas for tensor in named} == {"encoder"}, "the encoder alone"
        self._zero_config = config
        self._device = named[0].data.device
        self._deepspeed = load(self._device)
        self._engine: Any = None
        self._copies: dict[str, nn.Parameter] = {}

    def owner_ranks(self, replicas: str) -> dict[str, int] | None:
        """Return no owners, because gradients stay local until DeepSpeed sums them."""
        return {}

    @torch.no_grad()
    def grad_square_sum(self) -> Tensor:
        """Sum the gradients over all ranks; return the sum of squares of this rank's shard.

        This is a collective call. The result is 0-d fp64, and its sum over all ranks is the square
        of the global gradient norm.
        """
        if not self._copies:
            self._start()
        with self._engine.coalesce_grad_reduction():
            for name, copy in self._copies.items():
                # A separate tensor on the same memory, because DeepSpeed replaces the memory of its
                # gradients.
                copy.grad = self._grad(self._tensors[name]).detach()
        shards = self._engine.optimizer.averaged_gradients.values()
        norms = [torch.linalg.vector_norm(part).double() for shard in shards for part in shard]
        return (torch.stack(norms) * self._world).square().sum()

    @torch.no_grad()
    def step(
        self, lr: float, scale: float | Tensor = 1.0, without: Collection[str] = ()
    ) -> StepStats:
        """Update every tensor from its summed gradient times `scale`.

        `grad_square_sum` must be called first.
        """
        assert not without, "every tensor has a gradient, of zeros where there are no media"
        self.steps += 1
        stats = StepStats(self._device)
        shards: _ShardedAdamW = self._engine.optimizer.optimizer
        shards.now = (self.steps, lr, scale * self._world, stats)
        self._engine.step()
        for name, copy in self._copies.items():
            self._tensors[name].data.copy_(copy)
        return stats

    @torch.no_grad()
    def state_dict(self) -> dict[str, Tensor]:
        """Return the state as `DistributedMuonClip` does; collective after the first step."""
        if self._copies:
            whole = self._deepspeed.utils.safe_get_full_optimizer_state
            for name, copy in self._copies.items():
                state = self._state.get(name)
                for part in MOMENTS["adamw"]:
                    found = whole(copy, part)
                    if state is not None:
                        state.moments[part].copy_(found)
                if state is not None and state.has_master:
                    state.weight.copy_(copy)
        return super().state_dict()

    @property
    def _world(self) -> int:
        return len(self._groups["encoder"].ranks)

    def _start(self) -> None:
        """Pass the loaded weights and state to DeepSpeed; every rank briefly holds them in full."""
        by_group: dict[str, list[str]] = {}
        for name, rule in self._rules.items():
            by_group.setdefault(rule.group, []).append(name)
        self._copies = {
            name: nn.Parameter(self._whole(name, "weight"))
            for group in sorted(by_group)
            for name in by_group[group]
        }
        shards = _ShardedAdamW(
            [
                {"params": [self._copies[name] for name in by_group[group]], "name": group}
                for group in sorted(by_group)
            ],
            self._zero_config,
        )
        model = nn.ParameterList(self._copies.values())
        config = zero_config(self._zero_config)
        self._engine, *_ = self._deepspeed.initialize(
            model=model, optimizer=shards, config=config, dist_init_required=False
        )
        zero = self._engine.optimizer
        shards.begin(zero.groups_padding)
        zero._lazy_init_hp_params_optimizer_state()  # otherwise state exists only after a step
        fill: Callable[..., None] = self._deepspeed.utils.safe_set_full_optimizer_state
        for name, copy in self._copies.items():
            for part in MOMENTS["adamw"]:
                fill(copy, self._whole(name, part), part)

    def _whole(self, name: str, part: str) -> Tensor:
        """Return a copy of the owner's tensor on every rank, fp32."""
        tensor, state, group = self._tensors[name], self._state.get(name), self._groups["encoder"]
        if state is None:
            found = torch.empty_like(tensor.data, dtype=torch.float32)
        else:
            found = (state.weight if part == "weight" else state.moments[part]).clone()
        found = found.contiguous()
        if len(group.ranks) > 1:
            dist.broadcast(found, group.ranks[self.owners[name]], group=group.group)
        return found


class _ShardedAdamW(torch.optim.Optimizer):
    """AdamW on this rank's shard of each parameter group, called by DeepSpeed's step.

    Attributes:
        now: number of updates including this one, learning rate, gradient scale, statistics.
    """

    now: tuple[int, float, float | Tensor, StepStats]

    def __init__(self, groups: list[dict[str, Any]], config: OptimConfig):
        super().__init__(groups, {"lr": 0.0})  # DeepSpeed requires an lr; `step` uses `now`
        self._config = config

    def begin(self, padding: Sequence[int]) -> None:
        """Allocate zero state; `padding` is the number of padding elements at each shard's end."""
        for group, unused in zip(self.param_groups, padding, strict=True):
            (shard,) = group["params"]
            group["held"] = shard.numel() - unused
            self.state[shard] = {part: torch.zeros_like(shard) for part in MOMENTS["adamw"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        steps, lr, scale, stats = self.now
        for group in self.param_groups:
            (shard,) = group["params"]
            rule, moments = Rule("adamw", group["name"]), self.state[shard]
            grad = shard.grad * scale
            update = adamw_update(
                shard,
                grad,
                moments["exp_avg"],
                moments["exp_avg_sq"],
                rule,
                steps,
                lr,
                self._config,
            )
            stats.count(rule.group, [update[: group["held"]]])


def zero_config(config: OptimConfig) -> dict[str, Any]:
    """Return DeepSpeed's configuration.

    Its defaults would clip gradients and sum some of them in 16 bits.
    """
    stage = {"zero1": 1, "zero2": 2}[config.deepspeed or ""]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,  # the default is 1.0
        "communication_data_type": "fp32",
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "overlap_comm": False,
            "contiguous_gradients": stage == 2,
            "reduce_bucket_size": config.bucket_elements,
            "allgather_bucket_size": 2 * config.bucket_elements,
        },
        "steps_per_print": 1 << 60,
        "wall_clock_breakdown": False,
    }


def check_installed(key: str) -> None:
    """Check that the required version of DeepSpeed is installed, without importing it.

    Raises:
        ValueError: it is not installed, or has another version; the message names `key` and the
            package to install.
    """
    try:
        found = metadata.version("deepspeed")
    except metadata.PackageNotFoundError:
        found = None
    if found != VERSION:
        there = "not installed" if found is None else f"version {found}"
        raise ValueError(
            f"{key}: DeepSpeed is {there}, want {VERSION}: pip install 'kimi-pretrain[deepspeed]'"
        )


def load(device: torch.device) -> Any:
    """Import DeepSpeed for this process's device, without the op that it would compile on a CPU.

    Raises:
        ValueError: it is not installed, or has another version.
    """
    check_installed("optim.deepspeed")
    # DeepSpeed's own detection would find the CUDA device that `engine.host` simulates on a CPU.
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))  # DeepSpeed requires it
    import deepspeed
    from deepspeed import ops

    # This C++ op for shared memory between the ranks of a host takes 20 s to compile in each fresh
    # environment, and a killed process never releases the lock of the build.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").addFilter(_is_news)
    backend = "nccl" if device.type == "cuda" else "gloo"
    deepspeed.init_distributed(backend, auto_mpi_discovery=False, verbose=False)
    return deepspeed


def _is_news(record: logging.LogRecord) -> bool:
    """Return False for DeepSpeed's warning that it has not tested this AdamW; our tests have."""
    return "untested optimizer" not in record.getMessage()
