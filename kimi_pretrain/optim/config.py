"""Every number the optimizer and its learning-rate schedule need.

Defaults are those of Moonlight (arXiv:2502.16982) and Kimi K2 (arXiv:2507.20534) where the papers
or the released toy code state them.
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Protocol, get_args

from pydantic import Discriminator, Tag

from kimi_pretrain.optim.recipes import RECIPES, Segment

Group = Literal[
    "embedding",
    "head",
    "norms",
    "attention",
    "dense_mlp",
    "experts",
    "shared_experts",
    "router",
    "vision_tower",
    "projector",
]
GROUPS: tuple[Group, ...] = get_args(Group)

# The two forms of `schedule`. They are no keys: errors leave out what stands in <>.
NAMED, LISTED = "<recipe>", "<segments>"


def _named_or_listed(schedule: Any) -> str:
    """Tell pydantic which of the two forms to check: else it complains about both."""
    return LISTED if isinstance(schedule, list | tuple) else NAMED


Schedule = Annotated[
    Annotated[str, Tag(NAMED)] | Annotated[list[Segment], Tag(LISTED)],
    Discriminator(_named_or_listed),
]


@dataclass(frozen=True)
class GroupConfig:
    """What one parameter group has of its own.

    Args:
        lr_scale: its learning rate is the schedule's times this. 0 freezes the group (attention is
            not clipped then, either).
        weight_decay: instead of the general one; None keeps that.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    lr_scale: float = 1.0
    weight_decay: float | None = None


class GroupValues(NamedTuple):
    """What an update takes from the parameter group of a tensor."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    eps: float


class UpdateSettings(Protocol):
    """What the update reads of its settings; see `OptimConfig`, which is one, for each of them.

    `optimizer.MuonClip` reads its own from torch's parameter groups.
    """

    @property
    def matrices(self) -> Literal["muon", "adamw"]:
        """What trains weight matrices."""
        ...

    @property
    def ns_steps(self) -> int:
        """Newton-Schulz iterations."""
        ...

    @property
    def ns_dtype(self) -> Literal["float32", "bfloat16"]:
        """Precision of the Newton-Schulz products."""
        ...

    @property
    def shard_state(self) -> bool:
        """Whether one rank of a replica group owns a tensor's state."""
        ...

    @property
    def bucket_elements(self) -> int:
        """Elements summed, updated or sent at a time."""
        ...

    @property
    def measure_orthogonality(self) -> bool:
        """Whether a step measures the orthogonality error."""
        ...

    def group_values(self, group: str, lr: float) -> GroupValues:
        """Return the values of a parameter group where the schedule says `lr`."""
        ...


_PLAIN = GroupConfig()
_RAMP = ("lr", "min_lr", "warmup_steps", "stable_steps", "decay_steps")


@dataclass(frozen=True)
class OptimConfig:
    """Settings of MuonClip, of AdamW for what Muon does not train, and of the schedule.

    Args:
        lr: peak learning rate, shared by Muon and AdamW (Muon's update is scaled to AdamW's size).
        min_lr: learning rate at the end of the decay and after it.
        warmup_steps: linear warm-up, lr is reached on the last of these steps.
        stable_steps: steps at lr after the warm-up. 0 gives a plain cosine schedule.
        decay_steps: steps from lr down to min_lr. 0 gives a constant schedule.
        decay: shape of the descent.
        schedule: the learning rate as a list of segments, or the name of a published recipe; then
            the six fields above are not given. None: they are all given (decay has a default).
        matrices: what trains weight matrices. "adamw": every tensor is AdamW's, for comparison.
        weight_decay: decoupled, of every tensor (norms too), never scaled by a matrix' shape.
        groups: learning rate and weight decay of single parameter groups; see GROUPS.
        momentum: mu of M = mu*M + G.
        nesterov: orthogonalise mu*M + G (Moonlight) instead of M (Algorithm 1 of K2).
        ns_steps: Newton-Schulz iterations.
        ns_dtype: precision of the Newton-Schulz products.
        adam_betas: decay of AdamW's two moments.
        adam_eps: added to AdamW's denominator.
        max_grad_norm: global gradient norm above which the caller scales down; None is off.
        qk_clip_threshold: attention logit above which a head is clipped; None is off.
        shard_state: each tensor's state and update on one owner among its replicas (ZeRO-1).
            False: every rank keeps all state and does every update, the plain twin.
        bucket_elements: gradients are summed, and weights updated and sent, this many elements at a
            time. A tensor that is larger goes alone. Bounds the staging memory of weights to
            2 * group size * this; copies of gradients go as their sums are complete.
        measure_orthogonality: report how far Muon's updates are from orthogonal.

    Raises:
        ValueError: a value outside its range, an unknown group or recipe, or both or neither of
            `schedule` and the fields above it.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    lr: float | None = None
    min_lr: float | None = None
    warmup_steps: int | None = None
    stable_steps: int | None = None
    decay_steps: int | None = None
    decay: Literal["cosine", "linear"] = "cosine"
    schedule: Schedule | None = None
    matrices: Literal["muon", "adamw"] = "muon"
    weight_decay: float = 0.1
    groups: dict[str, GroupConfig] = field(default_factory=dict)
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    qk_clip_threshold: float | None = 100.0
    shard_state: bool = True
    bucket_elements: int = 2**23
    measure_orthogonality: bool = True

    def lr_of(self, group: str, lr: float) -> float:
        """Return the learning rate of a parameter group where the schedule says `lr`."""
        return lr * self.groups.get(group, _PLAIN).lr_scale

    def weight_decay_of(self, group: str) -> float:
        """Return the weight decay of a parameter group."""
        own = self.groups.get(group, _PLAIN).weight_decay
        return self.weight_decay if own is None else own

    def group_values(self, group: str, lr: float) -> GroupValues:
        """See `UpdateSettings`."""
        return GroupValues(
            self.lr_of(group, lr),
            self.weight_decay_of(group),
            self.momentum,
            self.nesterov,
            self.adam_betas,
            self.adam_eps,
        )

    def __post_init__(self) -> None:
        _check_ramp(self)
        _check_schedule(self)
        _check_groups(self.groups)
        _require(
            self.matrices in ("muon", "adamw"),
            f"matrices must be 'muon' or 'adamw', got {self.matrices!r}",
        )
        _require_not_negative("weight_decay", self.weight_decay)
        _require(0 <= self.momentum < 1, f"momentum must lie in [0, 1), got {self.momentum}")
        _require(self.ns_steps >= 1, f"ns_steps must be at least 1, got {self.ns_steps}")
        _require(
            self.ns_dtype in ("float32", "bfloat16"),
            f"ns_dtype must be 'float32' or 'bfloat16', got {self.ns_dtype!r}",
        )
        _require(
            len(self.adam_betas) == 2 and all(0 <= beta < 1 for beta in self.adam_betas),
            f"adam_betas must be two numbers in [0, 1), got {self.adam_betas}",
        )
        _require(self.adam_eps > 0, f"adam_eps must be positive, got {self.adam_eps}")
        for name in ("max_grad_norm", "qk_clip_threshold"):
            limit = getattr(self, name)
            _require(
                limit is None or limit > 0,
                f"{name} must be positive (or null to switch it off), got {limit}",
            )
        _require(
            self.bucket_elements >= 1,
            f"bucket_elements must be at least 1, got {self.bucket_elements}",
        )


def _check_ramp(config: OptimConfig) -> None:
    """Either `schedule` or all of lr, min_lr and the lengths; those in their ranges."""
    given = [name for name in _RAMP if getattr(config, name) is not None]
    if config.schedule is not None:
        given += [] if config.decay == "cosine" else ["decay"]
        _require(
            not given,
            f"schedule already says what {', '.join(given)} would; remove them or set them null",
        )
        return
    missing = [name for name in _RAMP if name not in given]
    _require(not missing, f"{', '.join(missing)} must be given, unless schedule is")
    lr, min_lr = config.lr or 0.0, config.min_lr or 0.0
    _require(0 < lr < math.inf, f"lr must be positive, got {config.lr}")
    _require(0 <= min_lr <= lr, f"min_lr must lie in [0, lr={lr}], got {config.min_lr}")
    for name in ("warmup_steps", "stable_steps", "decay_steps"):
        _require_not_negative(name, getattr(config, name))
    _require(
        config.decay in ("cosine", "linear"),
        f"decay must be 'cosine' or 'linear', got {config.decay!r}",
    )


def _check_schedule(config: OptimConfig) -> None:
    if isinstance(config.schedule, str):
        _require(
            config.schedule in RECIPES,
            f"schedule must be one of {', '.join(RECIPES)} or a list of segments, "
            f"got {config.schedule!r}",
        )
    elif config.schedule is not None:
        _require(
            any(segment.lr > 0 for segment in config.schedule),
            "schedule has no segment with a positive lr: nothing would be trained",
        )


def _check_groups(groups: Mapping[str, GroupConfig]) -> None:
    for name, group in groups.items():
        near = difflib.get_close_matches(name, GROUPS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        _require(
            name in GROUPS,
            f"groups names '{name}'; the parameter groups are {', '.join(GROUPS)}{hint}",
        )
        _require_not_negative(f"groups.{name}.lr_scale", group.lr_scale)
        if group.weight_decay is not None:
            _require_not_negative(f"groups.{name}.weight_decay", group.weight_decay)


def _require_not_negative(name: str, value: float) -> None:
    _require(0 <= value < math.inf, f"{name} must not be negative, got {value}")


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(f"optim: {complaint}")
