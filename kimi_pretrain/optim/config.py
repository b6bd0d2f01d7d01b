"""Every number the optimizer and its learning-rate schedule need.

Defaults are those of Moonlight (arXiv:2502.16982) and Kimi K2 (arXiv:2507.20534) where the papers
or the released toy code state them.
"""

import difflib
import math
from typing import Annotated, Any, Literal, NamedTuple, Protocol, Self, get_args

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator

from kimi_pretrain.optim.recipes import RECIPES, Segment
from typed_config.section import Finite, Section

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
    "siglip",
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
Beta = Annotated[float, Field(ge=0, lt=1)]


def _above_0(limit: float | None) -> float | None:
    if limit is not None and not limit > 0:
        raise ValueError("must be positive (or null to switch it off)")
    return limit


Limit = Annotated[float | None, AfterValidator(_above_0)]


class GroupConfig(Section):
    """What one parameter group has of its own."""

    lr_scale: Finite = Field(default=1.0, ge=0)
    """Its learning rate is the schedule's times this. 0 freezes the group (attention is not clipped
    then, either).
    [-; kimi_pretrain/optim/muon.py]"""
    weight_decay: Finite | None = Field(default=None, ge=0)
    """Instead of the general one; null keeps that. [-; kimi_pretrain/optim/muon.py]"""


class GroupValues(NamedTuple):
    """What an update takes from the parameter group of a tensor."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    eps: float


class UpdateSettings(Protocol):
    """What the update reads of its settings; `OptimConfig`, which is one, says what each is.

    `optimizer.MuonClip` reads its own from torch's parameter groups.
    """

    matrices: Literal["muon", "adamw"]
    ns_steps: int
    ns_dtype: Literal["float32", "bfloat16"]
    shard_state: bool
    bucket_elements: int
    measure_orthogonality: bool

    def group_values(self, group: str, lr: float) -> GroupValues:
        """Return the values of a parameter group where the schedule says `lr`."""
        ...


_PLAIN = GroupConfig()
_RAMP = ("lr", "min_lr", "warmup_steps", "stable_steps", "decay_steps")


class OptimConfig(Section):
    """Settings of MuonClip, of AdamW for what Muon does not train, and of the schedule.

    docs/MUONCLIP.md explains them.
    """

    lr: float | None = None
    """Peak learning rate, shared by Muon and AdamW (Muon's update is scaled to AdamW's size).
    [-; kimi_pretrain/optim/schedule.py]"""
    min_lr: float | None = None
    """Learning rate at the end of the decay and after it. [-; kimi_pretrain/optim/schedule.py]"""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Linear warm-up; lr is reached on the last of these steps.
    [optimizer steps; kimi_pretrain/optim/schedule.py]"""
    stable_steps: int | None = Field(default=None, ge=0)
    """Steps at lr after the warm-up. 0 gives a plain cosine schedule.
    [optimizer steps; kimi_pretrain/optim/schedule.py]"""
    decay_steps: int | None = Field(default=None, ge=0)
    """Steps from lr down to min_lr. 0 gives a constant schedule.
    [optimizer steps; kimi_pretrain/optim/schedule.py]"""
    decay: Literal["cosine", "linear"] = "cosine"
    """Shape of the descent. [-; kimi_pretrain/optim/schedule.py]"""
    schedule: Schedule | None = None
    """The learning rate as a list of segments, or the name of a published recipe (k2, moonlight);
    then the six keys above are not given. null: they are all given (decay has a default).
    [-; kimi_pretrain/optim/schedule.py]"""
    matrices: Literal["muon", "adamw"] = "muon"
    """What trains weight matrices. "adamw": every tensor is AdamW's, for comparison.
    [-; kimi_pretrain/optim/groups.py]"""
    weight_decay: Finite = Field(default=0.1, ge=0)
    """Decoupled, of every tensor (norms too), never scaled by a matrix' shape.
    [-; kimi_pretrain/optim/muon.py]"""
    groups: dict[str, GroupConfig] = Field(default_factory=dict)
    """Parameter group -> its own learning rate and weight decay. The groups are embedding, head,
    norms, attention, dense_mlp, experts, shared_experts, router, vision_tower, projector and
    siglip (heads and text tower of train.siglip, always AdamW's).
    [-; kimi_pretrain/optim/muon.py]"""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """mu of M = mu*M + G. [-; kimi_pretrain/optim/muon.py]"""
    nesterov: bool = True
    """Orthogonalise mu*M + G (Moonlight) instead of M (Algorithm 1 of K2).
    [-; kimi_pretrain/optim/muon.py]"""
    ns_steps: int = Field(default=5, ge=1)
    """Newton-Schulz iterations. [iterations; kimi_pretrain/optim/batched.py]"""
    ns_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the Newton-Schulz products. [-; kimi_pretrain/optim/batched.py]"""
    adam_betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay of AdamW's two moments. [-; kimi_pretrain/optim/muon.py]"""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator. [-; kimi_pretrain/optim/muon.py]"""
    max_grad_norm: Limit = 1.0
    """Global gradient norm above which gradients are scaled down; null is off.
    [-; kimi_pretrain/update.py]"""
    qk_clip_threshold: Limit = 100.0
    """Attention logit above which a head is clipped (QK-Clip); null is off.
    [logit; kimi_pretrain/update.py]"""
    shard_state: bool = True
    """Each tensor's state and update on one owner among its replicas (ZeRO-1). false: every rank
    keeps all state and does every update, the plain twin.
    [-; kimi_pretrain/optim/muonclip.py]"""
    bucket_elements: int = Field(default=2**23, ge=1)
    """Gradients are summed, and weights updated and sent, this many elements at a time; a tensor
    that is larger goes alone. Bounds the staging memory of weights to 2 * group size * this; copies
    of gradients go as their sums are complete.
    [elements; kimi_pretrain/optim/muonclip.py]"""
    deepspeed: Literal["zero1", "zero2"] | None = None
    """The stage of DeepSpeed's ZeRO that sums the encoder's gradients and shards AdamW's state;
    needs a frozen language model and matrices: adamw (a flat shard cuts matrices); docs/STAGES.md.
    null: neither needs DeepSpeed. [-; kimi_pretrain/optim/deepspeed_zero.py]"""
    measure_orthogonality: bool = True
    """Report how far Muon's updates are from orthogonal. [-; kimi_pretrain/optim/muonclip.py]"""

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

    @model_validator(mode="after")
    def _check(self) -> Self:
        _check_ramp(self)
        _check_schedule(self)
        for name in self.groups:
            near = difflib.get_close_matches(name, GROUPS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            _require(
                name in GROUPS,
                f"groups names '{name}'; the parameter groups are {', '.join(GROUPS)}{hint}",
            )
        return self


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


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(f"optim: {complaint}")
