"""How far two runs of one training step are apart: gradients by parameter group, and counts. Pure.

The error of a parameter is the norm of the difference over the norm of the reference, in fp64. A
parameter whose reference gradient is zero (an expert that no token chose) must be zero in the other
run too. A group is judged by its worst parameter, so a fault in one small tensor does not drown in
a large one.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch
from torch import Tensor

_LAYER = r"language_model\.model\.layers\.\d+\."
# The first pattern that matches the whole name wins; the order is that of the table.
_GROUPS: tuple[tuple[str, str], ...] = (
    ("vision patch embedding", r"vision_tower\.patch_embed\.proj\..+"),
    ("vision position table", r"vision_tower\.patch_embed\.pos_emb\..+"),
    ("vision blocks", r"vision_tower\.encoder\.blocks\..+"),
    ("vision final norm", r"vision_tower\.encoder\.final_layernorm\..+"),
    ("projector", r"mm_projector\..+"),
    ("embedding", r"language_model\.model\.embed_tokens\..+"),
    ("norms", r"language_model\.model\.(.+\.)?\w*norm\.weight"),
    ("attention", _LAYER + r"self_attn\..+"),
    ("dense MLP", _LAYER + r"mlp\.(gate|up|down)_proj\..+"),
    ("router", _LAYER + r"mlp\.gate\..+"),
    ("experts", _LAYER + r"mlp\.experts\..+"),
    ("shared experts", _LAYER + r"mlp\.shared_experts\..+"),
    ("head", r"language_model\.lm_head\..+"),
)
GROUPS = tuple(group for group, _ in _GROUPS)
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


@dataclass(frozen=True)
class Difference:
    """One parameter in both runs.

    Attributes:
        name: of the checkpoint.
        error: norm of the difference / norm of the reference; 0 where both are zero, infinite where
            only the reference is, or where the shapes differ; NaN where a gradient is not finite.
        found_norm, reference_norm: of the two gradients.
        vector: it has one dimension.
    """

    name: str
    error: float
    found_norm: float
    reference_norm: float
    vector: bool = False


@dataclass(frozen=True)
class GroupDifference:
    """The parameters of one group in both runs.

    Attributes:
        group: one of `GROUPS`.
        parameters: compared in it.
        zero: of those, parameters whose reference gradient is zero.
        error, worst: the error that is largest against what is allowed, and its parameter.
        norm_ratio: norm of the group's gradient / that of the reference (1.0 if both are zero).
        passed: every parameter is within the tolerance.
        vector: the worst parameter has one dimension.
    """

    group: str
    parameters: int
    zero: int
    error: float
    worst: str
    norm_ratio: float
    passed: bool
    vector: bool = False


@dataclass(frozen=True)
class StepRoutes:
    """How a run's choices of experts compare with the reference's, in one step.

    Attributes:
        step: counted from 1.
        tokens: that were sent to experts in each layer, padding left out.
        at_ties: tokens that chose others at a tie; there the reference followed the run.
        wrong: tokens that chose others where rounding does not explain it.
        first_wrong: the first of those, in words.
    """

    step: int
    tokens: int
    at_ties: int
    wrong: int
    first_wrong: str | None = None


@dataclass(frozen=True)
class StepFacts:
    """What a run says of the step, apart from gradients; see `StepReport`.

    Attributes:
        losses: of each step that was run; the gradients are of the last.
        grad_norm: of the last step's divided gradient, over encoder and backbone.
        differing: tensors of which not all ranks that hold a copy hold the same.
        routes: of each step, if this run followed the routes of another.
    """

    losses: tuple[float, ...]
    grad_norm: float
    loss_tokens: int
    vision_tokens: int
    items: int
    skipped_samples: int
    differing: tuple[str, ...] = ()
    routes: tuple[StepRoutes, ...] = ()


@dataclass(frozen=True)
class Comparison:
    """The verdict.

    Attributes:
        loss_errors: relative error of each step's loss.
        grad_norm_error: relative error of the global gradient norm.
        counts: name -> (found, reference) of what must be equal.
        missing, extra: parameters that only the reference has, and that only the run has.
        differing: as in `StepFacts`, of either run.
        routes: of each step, as the reference told.
    """

    tolerance: Tolerance
    groups: tuple[GroupDifference, ...]
    loss_errors: tuple[float, ...]
    grad_norm_error: float
    counts: Mapping[str, tuple[int, int]]
    missing: tuple[str, ...]
    extra: tuple[str, ...]
    differing: tuple[str, ...]
    routes: tuple[StepRoutes, ...] = ()

    @property
    def counts_equal(self) -> bool:
        """Whether both runs saw the same step."""
        return all(found == wanted for found, wanted in self.counts.values())

    @property
    def passed(self) -> bool:
        """Whether the two runs are the same but for rounding. Nothing compared is no pass."""
        numbers = (*self.loss_errors, self.grad_norm_error)
        return (
            bool(self.groups)
            and all(group.passed for group in self.groups)
            and all(error <= self.tolerance.matrices for error in numbers)
            and self.counts_equal
            and not (self.missing or self.extra or self.differing)
            and not any(step.wrong for step in self.routes)
        )

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON; numbers that are not finite become null."""
        return {
            "passed": self.passed,
            "tolerance": asdict(self.tolerance),
            "loss_errors": [_plain(error) for error in self.loss_errors],
            "grad_norm_error": _plain(self.grad_norm_error),
            "counts": {name: list(pair) for name, pair in self.counts.items()},
            "missing": list(self.missing),
            "extra": list(self.extra),
            "differing": list(self.differing),
            "routes": [asdict(step) for step in self.routes],
            "groups": [
                {key: _plain(value) for key, value in asdict(group).items()}
                for group in self.groups
            ],
        }


def group_of(name: str) -> str:
    """Return the parameter group of a tensor of the checkpoint.

    Raises:
        ValueError: the name belongs to none.
    """
    for group, pattern in _GROUPS:
        if re.fullmatch(pattern, name):
            return group
    raise ValueError(
        f"verify: tensor {name!r} belongs to no parameter group; "
        "add it to kimi_pretrain/verify/compare.py"
    )


def difference(name: str, found: Tensor, reference: Tensor) -> Difference:
    """Compare one parameter's gradients, two tensors of one shape and any dtypes, in fp64."""
    found_norm, reference_norm = _norm(found), _norm(reference)
    if found.shape != reference.shape:
        error = math.inf
    elif reference_norm == 0:
        error = math.inf if found_norm > 0 else found_norm  # 0, or NaN as it came
    else:
        error = _norm(found, reference) / reference_norm
    return Difference(name, error, found_norm, reference_norm, reference.dim() < 2)


def summarise(
    differences: Sequence[Difference], tolerance: Tolerance
) -> tuple[GroupDifference, ...]:
    """Return one line for each group that has parameters, in the order of `GROUPS`."""
    members: dict[str, list[Difference]] = {group: [] for group in GROUPS}
    for one in differences:
        members[group_of(one.name)].append(one)
    return tuple(_summary(group, found, tolerance) for group, found in members.items() if found)


def compare(
    found: Mapping[str, Tensor],
    reference: Mapping[str, Tensor],
    found_facts: StepFacts,
    reference_facts: StepFacts,
    tolerance: Tolerance,
) -> Comparison:
    """Compare two runs of the same step.

    Args:
        found, reference: divided gradients by checkpoint name; read one at a time, so that a
            mapping may fetch them from files.
        found_facts, reference_facts: the rest.
        tolerance: what rounding explains.
    """
    common = sorted(set(found) & set(reference))
    differences = [difference(name, found[name], reference[name]) for name in common]
    names = ("loss_tokens", "vision_tokens", "items", "skipped_samples")
    counts = {name: (getattr(found_facts, name), getattr(reference_facts, name)) for name in names}
    counts["steps"] = (len(found_facts.losses), len(reference_facts.losses))
    return Comparison(
        tolerance=tolerance,
        groups=summarise(differences, tolerance),
        loss_errors=tuple(
            relative_error(*pair)
            for pair in zip(found_facts.losses, reference_facts.losses, strict=False)
        ),
        grad_norm_error=relative_error(found_facts.grad_norm, reference_facts.grad_norm),
        counts=counts,
        missing=tuple(sorted(set(reference) - set(found))),
        extra=tuple(sorted(set(found) - set(reference))),
        differing=tuple(sorted({*found_facts.differing, *reference_facts.differing})),
        routes=reference_facts.routes,
    )


def relative_error(found: float, reference: float) -> float:
    """Return |found - reference| / |reference|; 0 where both are zero."""
    if reference == 0:
        return 0.0 if found == 0 else math.inf
    return abs(found - reference) / abs(reference)


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


def _summary(group: str, members: Sequence[Difference], tolerance: Tolerance) -> GroupDifference:
    allowed = {True: tolerance.vectors, False: tolerance.matrices}
    worst = max(members, key=lambda one: _order(one.error / allowed[one.vector]))
    found = math.hypot(*(one.found_norm for one in members))
    reference = math.hypot(*(one.reference_norm for one in members))
    return GroupDifference(
        group=group,
        parameters=len(members),
        zero=sum(one.reference_norm == 0 for one in members),
        error=worst.error,
        worst=worst.name,
        norm_ratio=found / reference if reference else (1.0 if found == 0 else math.inf),
        passed=all(one.error <= allowed[one.vector] for one in members),
        vector=worst.vector,
    )


def _norm(x: Tensor, minus: Tensor | None = None) -> float:
    """Return the norm of `x`, or of `x - minus`, in fp64, piece by piece."""
    pieces = (part.double() for part in x.reshape(-1).split(_PIECE))
    if minus is not None:
        others = minus.reshape(-1).split(_PIECE)
        pieces = (piece - other.double() for piece, other in zip(pieces, others, strict=True))
    return math.sqrt(sum(float(torch.linalg.vector_norm(piece)) ** 2 for piece in pieces))


def _order(error: float) -> float:
    """Sort key in which an error that is not a number is the worst of all."""
    return math.inf if math.isnan(error) else error


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
