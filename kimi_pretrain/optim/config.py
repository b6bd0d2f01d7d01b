"""Settings of the optimizer and its learning-rate schedule: the `optim` section.

Defaults follow Moonlight (arXiv:2502.16982) and Kimi K2 (arXiv:2507.20534) where the papers or the
released toy code state them.
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

# The two forms of `schedule`. They are not keys; error messages omit names in <>.
NAMED, LISTED = "<recipe>", "<segments>"


def _named_or_listed(schedule: Any) -> str:
    """Return the tag of the form to validate, so that pydantic reports errors of only this form."""
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
    """Settings of one parameter group."""

    lr_scale: Finite = Field(default=1.0, ge=0)
    """Factor on the scheduled learning rate. 0 freezes the group; a frozen attention group is not
    clipped either.
    [-; kimi_pretrain/optim/muon.py]"""
    weight_decay: Finite | None = Field(default=None, ge=0)
    """Weight decay of this group; null uses optim.weight_decay. [-; kimi_pretrain/optim/muon.py]"""


class GroupValues(NamedTuple):
    """Hyperparameters of an update that depend on the tensor's parameter group."""

    lr: float
    weight_decay: float
    momentum: float
    nesterov: bool
    betas: tuple[float, float]
    eps: float


class UpdateSettings(Protocol):
    """Settings that the update reads; implemented by `OptimConfig`, which documents them.

    `optimizer.MuonClip` has another implementation, which reads torch's parameter groups.
    """

    matrices: Literal["muon", "adamw"]
    ns_steps: int
    ns_dtype: Literal["float32", "bfloat16"]
    shard_state: bool
    bucket_elements: int
    measure_orthogonality: bool

    def group_values(self, group: str, lr: float) -> GroupValues:
        """Return the hyperparameters of a parameter group; `lr` is the scheduled learning rate."""
        ...


_PLAIN = GroupConfig()
_RAMP = ("lr", "min_lr", "warmup_steps", "stable_steps", "decay_steps")


class OptimConfig(Section):
    """Settings of MuonClip, of AdamW for the tensors that Muon does not train, and of the schedule.

    docs/MUONCLIP.md explains them.
    """

    lr: float | None = None
    """Peak learning rate, shared by Muon and AdamW (Muon's update is scaled to AdamW's size).
    [-; kimi_pretrain/optim/schedule.py]"""
    min_lr: float | None = None
    """Learning rate at the end of the decay and after it. [-; kimi_pretrain/optim/schedule.py]"""
    warmup_steps: int | None = Field(default=None, ge=0)
    """Length of the linear warm-up; its last step has the peak learning rate.
    [optimizer steps; kimi_pretrain/optim/schedule.py]"""
    stable_steps: int | None = Field(default=None, ge=0)
    """Steps at the peak learning rate after the warm-up. 0 gives a plain cosine schedule.
    [optimizer steps; kimi_pretrain/optim/schedule.py]"""
    decay_steps: int | None = Field(default=None, ge=0)
    """Steps of the decay from lr to min_lr. 0 gives a constant schedule.
    [optimizer steps; kimi_pretrain/optim/schedule.py]"""
    decay: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay. [-; kimi_pretrain/optim/schedule.py]"""
    schedule: Schedule | None = None
    """The learning rate as a list of segments, or the name of a published recipe (k2, moonlight);
    if it is set, omit the six keys above. null: all six keys are required (decay has a default).
    [-; kimi_pretrain/optim/schedule.py]"""
    matrices: Literal["muon", "adamw"] = "muon"
    """Optimizer of weight matrices. "adamw" trains every tensor with AdamW, for comparison.
    [-; kimi_pretrain/optim/groups.py]"""
    weight_decay: Finite = Field(default=0.1, ge=0)
    """Decoupled weight decay of every tensor, including norms; not scaled by a matrix's shape.
    [-; kimi_pretrain/optim/muon.py]"""
    groups: dict[str, GroupConfig] = Field(default_factory=dict)
    """Learning rate and weight decay by parameter group. The groups are embedding, head, norms,
    attention, dense_mlp, experts, shared_experts, router, vision_tower, projector and siglip (heads
    and text tower of train.siglip, always trained by AdamW).
    [-; kimi_pretrain/optim/muon.py]"""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Momentum coefficient mu in M = mu*M + G. [-; kimi_pretrain/optim/muon.py]"""
    nesterov: bool = True
    """Orthogonalise mu*M + G (Moonlight) instead of M (Algorithm 1 of K2).
    [-; kimi_pretrain/optim/muon.py]"""
    ns_steps: int = Field(default=5, ge=1)
    """Newton-Schulz iterations. [iterations; kimi_pretrain/optim/batched.py]"""
    ns_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Precision of the Newton-Schulz products. [-; kimi_pretrain/optim/batched.py]"""
    adam_betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.95)
    """Decay rates of AdamW's two moments. [-; kimi_pretrain/optim/muon.py]"""
    adam_eps: float = Field(default=1e-8, gt=0)
    """Epsilon added to AdamW's denominator. [-; kimi_pretrain/optim/muon.py]"""
    max_grad_norm: Limit = 1.0
    """Global gradient norm above which gradients are scaled down; null disables the clip.
    [-; kimi_pretrain/update.py]"""
    qk_clip_threshold: Limit = 100.0
    """Attention logit above which a head is clipped (QK-Clip); null disables the clip.
    [logit; kimi_pretrain/update.py]"""
    shard_state: bool = True
    """One owner among the replicas of a tensor keeps its state and updates it (ZeRO-1). false:
    every rank keeps all state and computes every update, as a reference.
    [-; kimi_pretrain/optim/muonclip.py]"""
    bucket_elements: int = Field(default=2**23, ge=1)
    """Size of the buckets in which gradients are summed and weights are updated and broadcast; a
    larger tensor has its own bucket. Limits the staging memory of weights to 2 * group size * this;
    staged gradients are freed when their sums are complete.
    [elements; kimi_pretrain/optim/muonclip.py]"""
    deepspeed: Literal["zero1", "zero2"] | None = None
    """Stage of DeepSpeed's ZeRO that sums the encoder's gradients and shards AdamW's state. Needs a
    frozen language model and matrices: adamw, because a flat shard cuts matrices; docs/STAGES.md.
    null: do not use DeepSpeed. [-; kimi_pretrain/optim/deepspeed_zero.py]"""
    measure_orthogonality: bool = True
    """Report how far Muon's updates are from orthogonal. [-; kimi_pretrain/optim/muonclip.py]"""

    def lr_of(self, group: str, lr: float) -> float:
        """Return the learning rate of a parameter group; `lr` is the scheduled learning rate."""
        return lr * self.groups.get(group, _PLAIN).lr_scale

    def weight_decay_of(self, group: str) -> float:
        """Return the weight decay of a parameter group."""
        own = self.groups.get(group, _PLAIN).weight_decay
        return self.weight_decay if own is None else own

    def group_values(self, group: str, lr: float) -> GroupValues:
        """Return the hyperparameters of a parameter group; `lr` is the scheduled learning rate."""
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
    """Require either `schedule` or all of lr, min_lr and the lengths, and check the two rates."""
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
