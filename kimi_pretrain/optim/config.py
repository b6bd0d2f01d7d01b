"""Every number the optimizer and its learning-rate schedule need.

Defaults are those of Moonlight (arXiv:2502.16982) and Kimi K2 (arXiv:2507.20534) where the papers
or the released toy code state them. Lengths are in optimizer steps.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal


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
        weight_decay: decoupled, of every tensor (norms too), never scaled by a matrix' shape.
        momentum: mu of M = mu*M + G.
        nesterov: orthogonalise mu*M + G (Moonlight) instead of M (Algorithm 1 of K2).
        ns_steps: Newton-Schulz iterations.
        ns_dtype: precision of the Newton-Schulz products.
        adam_betas: decay of AdamW's two moments.
        adam_eps: added to AdamW's denominator.
        max_grad_norm: global gradient norm above which the caller scales down; None is off.
        qk_clip_threshold: attention logit above which a head is clipped; None is off.
        bucket_elements: a rank updates, then sends, this many elements at a time. A tensor that is
            larger goes alone. Bounds the staging memory to 2 * group size * this.

    Raises:
        ValueError: a value outside its range.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}

    lr: float
    min_lr: float
    warmup_steps: int
    stable_steps: int
    decay_steps: int
    decay: Literal["cosine", "linear"] = "cosine"
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    ns_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    adam_betas: tuple[float, float] = (0.9, 0.95)
    adam_eps: float = 1e-8
    max_grad_norm: float | None = 1.0
    qk_clip_threshold: float | None = 100.0
    bucket_elements: int = 2**23

    @property
    def total_steps(self) -> int:
        """Steps until the schedule rests at min_lr."""
        return self.warmup_steps + self.stable_steps + self.decay_steps

    def __post_init__(self) -> None:
        _require(self.lr > 0, f"lr must be positive, got {self.lr}")
        _require(
            0 <= self.min_lr <= self.lr,
            f"min_lr must lie in [0, lr={self.lr}], got {self.min_lr}",
        )
        for name in ("warmup_steps", "stable_steps", "decay_steps"):
            steps = getattr(self, name)
            _require(steps >= 0, f"{name} must not be negative, got {steps}")
        _require(
            self.decay in ("cosine", "linear"),
            f"decay must be 'cosine' or 'linear', got {self.decay!r}",
        )
        _require(self.weight_decay >= 0, f"weight_decay must be >= 0, got {self.weight_decay}")
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


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise ValueError(f"optim: {complaint}")
