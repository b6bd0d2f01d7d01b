"""Compares two runs of one training step: gradients by parameter group, and counts. Pure.

A parameter whose reference gradient is zero (an expert that no token chose) must also be zero in
the other run. The worst parameter decides for its group, so that a large tensor cannot hide a fault
in a small one.
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
# The first pattern that matches the whole name wins; the printed table has the same order.
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
COUNTS = ("loss_tokens", "vision_tokens", "items", "skipped_samples")  # fields of `StepFacts`
_PIECE = 1 << 24  # elements compared at a time: fp64 copies of a whole embedding take gigabytes


@dataclass(frozen=True)
class Tolerance:
    """The largest relative errors that rounding can explain.

    Attributes:
        matrices: for gradients of matrices, for the gradient norm and for losses.
        vectors: for gradients of biases and norm gains. These are sums over all tokens in which
            most terms cancel, so the remainder is coarse in bfloat16.
        ties: for router scores: rounding decides between experts whose scores are this close.
    """

    matrices: float
    vectors: float
    ties: float


# Keyed by the coarsest dtype involved. Errors measured on small models: 1.1e-15, 1.1e-6; in
# bfloat16 4.5e-3 for a matrix and 5.8e-2 for a vector. Router scores are at most float32 in
# Megatron-Core.
TOLERANCES = {
    "float64": Tolerance(1e-10, 1e-10, 5e-7),
    "float32": Tolerance(1e-5, 1e-5, 1e-5),
    "bfloat16": Tolerance(2e-2, 2e-1, 2e-2),
}


class GradientDifference(NamedTuple):
    """One parameter's gradient in both runs; `vector` is True if it has one dimension."""

    error: float
    found_norm: float
    reference_norm: float
    vector: bool


@dataclass(frozen=True)
class GroupDifference:
    """Difference of one parameter group; its error is the error of its worst parameter."""

    group: str  # one of `GROUPS`
    parameters: int  # number of parameters
    zero: int  # number of parameters with a reference gradient of zero
    error: float  # error of the worst parameter, which is chosen relative to its tolerance
    worst: str  # name of the worst parameter
    norm_ratio: float  # gradient norm of the group / norm in the reference; 1.0 if both are zero
    passed: bool  # every parameter is within the tolerance
    vector: bool = False  # the worst parameter has one dimension


@dataclass(frozen=True)
class StepRoutes:
    """Comparison of a run's expert choices with the reference, in one step."""

    step: int  # counted from 1
    tokens: int  # tokens routed in each layer, without padding
    at_ties: int  # tokens with a different choice at a tie, where the reference followed the run
    wrong: int  # tokens with a different choice that rounding cannot explain
    first_wrong: str | None = None  # description of the first wrong token


@dataclass(frozen=True)
class StepFacts:
    """Results of a step apart from gradients; see `StepReport`."""

    losses: Sequence[float]  # loss of each step; the gradients are those of the last step
    grad_norm: float  # norm of the last step's divided gradient, over encoder and backbone
    loss_tokens: int
    vision_tokens: int
    items: int
    skipped_samples: int
    differing: Sequence[str] = ()  # tensors whose copies differ between ranks
    routes: tuple[StepRoutes, ...] = ()  # for each step, if this run followed another run


@dataclass(frozen=True)
class StepComparison(Comparison):
    """Comparison of two runs of a step."""

    tolerance: Tolerance
    groups: tuple[GroupDifference, ...]
    loss_errors: tuple[float, ...]  # relative error of each step's loss
    grad_norm_error: float  # relative error of the global norm
    counts: Mapping[str, tuple[int, int]]  # name -> (found, reference), which must be equal
    missing: tuple[str, ...]  # parameters that only the reference has
    extra: tuple[str, ...]  # parameters that only the run has
    differing: tuple[str, ...]  # as in `StepFacts`, from either run
    routes: tuple[StepRoutes, ...] = ()  # for each step, from the reference

    @property
    def passed(self) -> bool:
        """True if the runs agree up to rounding; an empty comparison does not pass."""
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
    """Return the parameter group of a checkpoint tensor.

    Raises:
        ValueError: the name belongs to no group.
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

    The error is the norm of the difference divided by the norm of the reference. It is 0 if both
    are zero, infinite if only the reference is zero or the shapes differ, and NaN if a gradient is
    not finite.
    """
    found_norm, reference_norm = _norm(found), _norm(reference)
    if found.shape != reference.shape:
        error = math.inf
    elif reference_norm == 0:
        error = math.inf if found_norm > 0 else found_norm  # 0, or NaN passed through
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
        found, reference: divided gradients by checkpoint name. They are read one at a time, so a
            mapping may load them from files.
        found_facts, reference_facts: the other results.
        tolerance: errors that rounding explains.
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
    """Return the errors that rounding explains.

    Args:
        train_dtype: `train.dtype`.
        exchange_dtype: `dep.exchange_dtype`; "model" equals `train_dtype`.
        steps: number of steps. Each update carries the rounding of earlier gradients into the
            weights, and Newton-Schulz amplifies small parts of a gradient. The tolerance after
            updates is therefore ten times as large.

    Raises:
        ValueError: after updates, rounding to bfloat16 is as large as a fault.
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
    """Return the norm of `x`, or of `x - minus`, in fp64, computed piece by piece."""
    pieces = (part.double() for part in x.reshape(-1).split(_PIECE))
    if minus is not None:
        others = minus.reshape(-1).split(_PIECE)
        pieces = (piece - other.double() for piece, other in zip(pieces, others, strict=True))
    return math.sqrt(sum(float(torch.linalg.vector_norm(piece)) ** 2 for piece in pieces))
