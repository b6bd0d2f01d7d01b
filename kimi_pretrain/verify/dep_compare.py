"""How far two runs of one training step are apart: gradients by parameter group, and counts. Pure.

A parameter whose reference gradient is zero (an expert that no token chose) must be zero in the
other run too. A group is judged by its worst parameter, so a fault in one small tensor is not lost
in a large one.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from kimi_pretrain.verify.result import Comparison, relative_error

_LAYER = r"language_model\.model\.layers\.\d+\."
# The first pattern that matches the whole name wins; the order is that of the table.
_GROUPS = {
    "vision patch embedding": r"vision_tower\.patch_embed\.proj\..+",
    "vision position table": r"vision_tower\.patch_embed\.pos_emb\..+",
    "vision blocks": r"vision_tower\.encoder\.blocks\..+",
    "vision final norm": r"vision_tower\.encoder\.final_layernorm\..+",
    "projector": r"mm_projector\..+",
    "embedding": r"language_model\.model\.embed_tokens\..+",
    "norms": r"language_model\.model\.(.+\.)?\w*norm\.weight",
    "attention": _LAYER + r"self_attn\..+",
    "dense MLP": _LAYER + r"mlp\.(gate|up|down)_proj\..+",
    "router": _LAYER + r"mlp\.gate\..+",
    "experts": _LAYER + r"mlp\.experts\..+",
    "shared experts": _LAYER + r"mlp\.shared_experts\..+",
    "head": r"language_model\.lm_head\..+",
}
GROUPS = tuple(_GROUPS)
COUNTS = ("loss_tokens", "vision_tokens", "items", "skipped_samples")  # of `StepFacts`
_PIECE = 1 << 24  # elements compared at a time: fp64 copies of a whole embedding would be gigabytes


@dataclass(frozen=True)
class Tolerance:
    """The largest relative errors that rounding explains.

    Attributes:
        matrices: of the gradient of a matrix, of the gradient norm and of the losses.
        vectors: of the gradient of a bias or of a norm's gain: sums over all tokens in which most
            cancels, so that in bfloat16 what is left is coarse.
        ties: of a router's scores: experts whose scores are no further apart are chosen by
            rounding.
    """

    matrices: float
    vectors: float
    ties: float


# By the coarsest type on the way. Measured on small models: 1.1e-15, 1.1e-6; in bfloat16 4.5e-3
# of a matrix and 5.8e-2 of a vector. Megatron-Core takes a router's scores in float32 at most.
TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 5e-7),
    "float32": Tolerance(1e-5, 1e-5, 1e-5),
    "bfloat16": Tolerance(2e-2, 2e-1, 2e-2),
}


class GradientDifference(NamedTuple):
    """One parameter's gradient in both runs; `vector`: it has one dimension."""

    error: float
    found_norm: float
    reference_norm: float
    vector: bool


@dataclass(frozen=True)
class GroupDifference:
    """The parameters of one group in both runs; its error is that of its worst parameter."""

    group: str  # one of `GROUPS`
    parameters: int  # how many
    zero: int  # how many of them have a reference gradient of zero
    error: float  # of the parameter that is worst against its tolerance
    worst: str  # its name
    norm_ratio: float  # norm of the group's gradient / of the reference's; 1.0 if both are zero
    passed: bool  # every parameter is within the tolerance
    vector: bool = False  # the worst parameter has one dimension


@dataclass(frozen=True)
class StepRoutes:
    """How a run's choices of experts compare with the reference's, in one step."""

    step: int  # counted from 1
    tokens: int  # that were sent to experts in each layer, without padding
    at_ties: int  # that chose others at a tie; there the reference followed the run
    wrong: int  # that chose others where rounding does not explain it
    first_wrong: str | None = None  # in words


@dataclass(frozen=True)
class StepFacts:
    """What a run reports of the step, apart from gradients; see `StepReport`."""

    losses: Sequence[float]  # of each step that was run; the gradients are of the last
    grad_norm: float  # of the last step's divided gradient, over encoder and backbone
    loss_tokens: int
    vision_tokens: int
    items: int
    skipped_samples: int
    differing: Sequence[str] = ()  # tensors whose copies are not the same on all ranks with one
    routes: tuple[StepRoutes, ...] = ()  # of each step, if this run followed another's


@dataclass(frozen=True)
class StepComparison(Comparison):
    """Two runs of a step compared."""

    tolerance: Tolerance
    groups: tuple[GroupDifference, ...]
    loss_errors: tuple[float, ...]  # relative, of each step
    grad_norm_error: float  # relative, of the global norm
    counts: Mapping[str, tuple[int, int]]  # name -> (found, reference) of what must be equal
    missing: tuple[str, ...]  # parameters that only the reference has
    extra: tuple[str, ...]  # parameters that only the run has
    differing: tuple[str, ...]  # as in `StepFacts`, of either run
    routes: tuple[StepRoutes, ...] = ()  # of each step, from the reference

    @property
    def passed(self) -> bool:
        """Whether the two runs are the same but for rounding. Nothing compared is no pass."""
        errors = (*self.loss_errors, self.grad_norm_error)
        return (
            bool(self.groups)
            and all(group.passed for group in self.groups)
            and all(error <= self.tolerance.matrices for error in errors)
            and all(found == wanted for found, wanted in self.counts.values())
            and not (self.missing or self.extra or self.differing)
            and not any(step.wrong for step in self.routes)
        )


def group_of(name: str) -> str:
    """Return the parameter group of a tensor of the checkpoint.

    Raises:
        ValueError: the name belongs to none.
    """
    for group, pattern in _GROUPS.items():
        if re.fullmatch(pattern, name):
            return group
    raise ValueError(
        f"verify: tensor {name!r} belongs to no parameter group; "
        "add it to kimi_pretrain/verify/dep_compare.py"
    )


def difference(found: Tensor, reference: Tensor) -> GradientDifference:
    """Compare one parameter's gradients, of any dtypes, in fp64.

    The error is the norm of the difference / norm of the reference: 0 where both are zero, infinite
    where only the reference is, or where the shapes differ; NaN where a gradient is not finite.
    """
    found_norm, reference_norm = _norm(found), _norm(reference)
    if found.shape != reference.shape:
        error = math.inf
    elif reference_norm == 0:
        error = math.inf if found_norm > 0 else found_norm  # 0, or NaN as it came
    else:
        error = _norm(found, reference) / reference_norm
    return GradientDifference(error, found_norm, reference_norm, reference.dim() < 2)


def compare(
    found: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    found_facts: StepFacts,
    reference_facts: StepFacts,
    tolerance: Tolerance,
) -> StepComparison:
    """Compare two runs of the same step.

    Args:
        found, reference: divided gradients by checkpoint name; read one at a time, so that a
            mapping may fetch them from files.
        found_facts, reference_facts: the rest.
        tolerance: what rounding explains.
    """
    members: dict[str, dict[str, GradientDifference]] = {group: {} for group in GROUPS}
    for name in sorted(set(found) & set(reference)):
        members[group_of(name)][name] = difference(found[name], reference[name])
    counts = {name: (getattr(found_facts, name), getattr(reference_facts, name)) for name in COUNTS}
    losses = found_facts.losses, reference_facts.losses
    counts["steps"] = (len(losses[0]), len(losses[1]))
    return StepComparison(
        tolerance=tolerance,
        groups=tuple(_summary(group, held, tolerance) for group, held in members.items() if held),
        loss_errors=tuple(relative_error(*pair) for pair in zip(*losses, strict=False)),
        grad_norm_error=relative_error(found_facts.grad_norm, reference_facts.grad_norm),
        counts=counts,
        missing=tuple(sorted(set(reference) - set(found))),
        extra=tuple(sorted(set(found) - set(reference))),
        differing=tuple(sorted({*found_facts.differing, *reference_facts.differing})),
        routes=reference_facts.routes,
    )


def tolerance_for(train_dtype: str, exchange_dtype: str, steps: int = 1) -> Tolerance:
    """Return what rounding explains.

    Args:
        train_dtype: `train.dtype`.
        exchange_dtype: `dep.exchange_dtype`; "model" is the same as `train_dtype`.
        steps: that were run. Each update carries the rounding of the gradients before it into the
            weights, and Newton-Schulz lifts what is small in a gradient: ten times as much is
            allowed after updates.

    Raises:
        ValueError: after updates, rounding to bfloat16 is no smaller than a fault.
    """
    exchanged = train_dtype if exchange_dtype == "model" else exchange_dtype
    coarsest = next(name for name in reversed(TOLERANCES) if name in (train_dtype, exchanged))
    rounding = TOLERANCES[coarsest]
    if steps == 1:
        return rounding
    if coarsest == "bfloat16":
        raise ValueError(
            f"--steps {steps} with train.dtype={train_dtype}, dep.exchange_dtype={exchange_dtype}: "
            "after updates, rounding to bfloat16 is as large as a fault; take train.dtype=float32 "
            "and dep.exchange_dtype=model, or --steps 1"
        )
    return Tolerance(*(10 * bound for bound in astuple(rounding)))


def _summary(
    group: str, members: Mapping[str, GradientDifference], tolerance: Tolerance
) -> GroupDifference:
    allowed = {True: tolerance.vectors, False: tolerance.matrices}
    over = {name: one.error / allowed[one.vector] for name, one in members.items()}
    worst = max(over, key=lambda name: math.inf if math.isnan(over[name]) else over[name])
    found = math.hypot(*(one.found_norm for one in members.values()))
    reference = math.hypot(*(one.reference_norm for one in members.values()))
    return GroupDifference(
        group=group,
        parameters=len(members),
        zero=sum(one.reference_norm == 0 for one in members.values()),
        error=members[worst].error,
        worst=worst,
        norm_ratio=found / reference if reference else (1.0 if found == 0 else math.inf),
        passed=all(one.error <= allowed[one.vector] for one in members.values()),
        vector=members[worst].vector,
    )


def _norm(x: Tensor, minus: Tensor | None = None) -> float:
    """Return the norm of `x`, or of `x - minus`, in fp64, piece by piece."""
    pieces = (part.double() for part in x.reshape(-1).split(_PIECE))
    if minus is not None:
        others = minus.reshape(-1).split(_PIECE)
        pieces = (piece - other.double() for piece, other in zip(pieces, others, strict=True))
    return math.sqrt(sum(float(torch.linalg.vector_norm(piece)) ** 2 for piece in pieces))
