"""Phase 7: applies the divisor and the global norm, then runs MuonClip and QK-Clip.

Gradients arrive as sums over the tokens of the global batch. This module divides them, once, by the
global number of loss tokens, together with the clipping factor. If the guard rejects a step
(`kimi_pretrain.reliability.anomaly_guard`: not finite, or a spike), encoder and backbone stay
unchanged and the step is counted as skipped.

The host reads two reductions over all ranks at once: the gradient's sum of squares, and the largest
attention logit of each layer and head.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_pretrain.config import Config
from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.engine.backbone import Backbone
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.model import trained_tensors
from kimi_pretrain.optim.deepspeed_zero import DeepSpeedAdamW
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.muonclip import DistributedMuonClip
from kimi_pretrain.optim.qk_clip import factors, table_of_maxima
from kimi_pretrain.optim.schedule import learning_rate
from kimi_pretrain.optim.step_stats import UpdateFigures
from kimi_pretrain.reliability.anomaly_guard import Guard, Verdict
from kimi_pretrain.reliability.replica_check import CopyHash, hash_order


@dataclass(frozen=True)
class UpdateReport:
    """Outcome of an update; the same on every rank except for `own` and `copies`.

    Attributes:
        lr: learning rate of the schedule; a parameter group may scale it.
        grad_norm: global norm of the divided gradient, before clipping.
        applied: False if nothing changed; `verdict` has the reason.
        max_logits: largest softmax input of each layer over all tokens and heads, fp64 [layers];
            -inf if there was no document.
        clipped_heads: number of heads that QK-Clip shrank, in the whole model.
        skipped_steps: steps of the run that were not applied, including this one.
        own: statistics of the tensors that this rank updates; `step_stats.merge_figures` merges
            the statistics of all ranks for the metrics.
        copies: hashes of some of this rank's tensors, taken before the update.
    """

    lr: float
    grad_norm: float
    applied: bool
    max_logits: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    clipped_heads: int = 0
    skipped_steps: int = 0
    own: UpdateFigures = field(default_factory=UpdateFigures)
    verdict: Verdict = Verdict()
    copies: tuple[CopyHash, ...] = ()

    @property
    def max_logit(self) -> float:
        """Largest softmax input of the step, over all layers and heads."""
        return float(self.max_logits.max(initial=-math.inf))


class Update:
    """The optimizer, with norm, clipping and guard before its step and QK-Clip after it.

    Attributes:
        skipped_steps: steps done minus updates applied, over the run so far.
        before_change: called before the first tensor changes.
        hash_copies: called in each step before any change, because the broadcasts of an update with
            `shard_state` would overwrite a copy that has drifted.
    """

    def __init__(self, config: Config, mesh: Mesh, encoder: DecoupledEncoder, backbone: Backbone):
        self.config, self.mesh, self.backbone = config, mesh, backbone
        self.skipped_steps = 0
        self.guard = Guard(config.guard)
        self.before_change: Callable[[], None] = lambda: None
        self.hash_copies: Callable[[], tuple[CopyHash, ...]] = lambda: ()
        self.named = trained_tensors(encoder, backbone)
        self.shape = ModelShape.of(config.model)
        make = DistributedMuonClip if config.optim.deepspeed is None else DeepSpeedAdamW
        self.optimizer = make(self.named, mesh.groups, config.optim, self.shape)
        order, groups = backbone.gradient_order(), backbone.sum_groups()
        backbone.reduction = self.optimizer.gradient_reduction(order, groups)
        encoder.sums.to_owners(self.optimizer.owner_ranks("encoder"))

    def run(self, loss_tokens: int, loss: float) -> UpdateReport:
        """Update all parameters from the summed gradients of a step, unless the guard rejects it.

        Args:
            loss_tokens: loss tokens of the global batch, the divisor of loss and gradients.
            loss: mean loss over these tokens.
        """
        divisor = max(1, loss_tokens)
        squares, max_logits = self._norm_and_maxima()
        grad_norm = math.sqrt(squares) / divisor
        lr = learning_rate(self.optimizer.steps, self.config.optim, self.config.tokens_per_step())
        limit = self.config.optim.max_grad_norm
        clip = 1.0 if limit is None else min(1.0, limit / max(grad_norm, 1e-30))
        verdict = self.guard.judge(loss, grad_norm * clip)
        copies, clipped, own = self.hash_copies(), 0, UpdateFigures()
        if verdict.applies:
            self.before_change()
            report = self.optimizer.step(lr, clip / divisor)
            clipped = self._qk_clip(max_logits)
            own = report.figures()
        else:
            self.backbone.undo_routing_biases()
            self.skipped_steps += 1
        return UpdateReport(
            lr=lr,
            grad_norm=grad_norm,
            applied=verdict.applies,
            max_logits=max_logits.amax(1).numpy(),
            clipped_heads=clipped,
            skipped_steps=self.skipped_steps,
            own=own,
            verdict=verdict,
            copies=copies,
        )

    def _norm_and_maxima(self) -> tuple[float, Tensor]:
        """Reduce the gradient norm and the largest logits over all ranks, with one device sync.

        Returns:
            the sum of squares of the undivided gradient, and the largest logits of the step, fp64
            [layers, heads] on the host.
        """
        size = self.config.model.language.num_layers, self.config.model.language.num_heads
        maxima = table_of_maxima(self.backbone.take_max_logits(), *size).to(self.mesh.device)
        squares = self.optimizer.grad_square_sum().reshape(1).to(self.mesh.device)
        self.mesh.sum_(squares)
        self.mesh.max_(maxima)
        found = torch.cat([squares, maxima.flatten()]).cpu()
        return float(found[0]), found[1:].reshape(maxima.shape)

    def _qk_clip(self, max_logits: Tensor) -> int:
        """Clip the heads above the threshold and return their number in the whole model."""
        optim = self.config.optim
        threshold, frozen = optim.qk_clip_threshold, optim.lr_of("attention", 1.0) == 0
        if threshold is None or frozen or not self.backbone.trainable:
            return 0
        gamma = factors(max_logits, threshold)
        clipped = gamma < 1
        query = "q_proj" if self.config.model.language.q_lora_rank is None else "q_b_proj"
        for layer in clipped.any(1).nonzero().flatten().tolist():
            prefix = f"language_model.model.layers.{layer}.self_attn."
            self.optimizer.apply_qk_clip(
                f"{prefix}{query}.weight",
                f"{prefix}kv_b_proj.weight",
                gamma[layer].to(self.mesh.device),
                self.shape,
            )
        return int(clipped.sum())

    def resume(self, steps: int, updates: int) -> None:
        """Continue after `steps` steps of a run, of which `updates` were applied."""
        self.optimizer.steps = updates
        self.skipped_steps = steps - updates

    def check_replicas(self) -> None:
        """Compare the bits of every trained tensor over the ranks that hold a copy of it.

        Copies that differ at the start would train with wrong gradients and no error.

        Raises:
            RuntimeError: names the first tensor that differs.
        """
        if found := self.differing(lambda tensor: tensor.data):
            raise RuntimeError(f"{found[0]} is not the same on all ranks that hold a copy of it")

    def differing(self, value: Callable[[NamedTensor], Tensor]) -> list[str]:
        """Return the tensors whose copies differ in the bits of `value`. Collective.

        The result is the same within a replica group.
        """
        found: list[str] = []
        for group in sorted(self.mesh.groups):
            held = [tensor for tensor in self.named if tensor.replicas == group]
            if not held:
                continue
            hashes = torch.stack([hash_order(value(tensor)) for tensor in held])
            # fp64 holds each of the two 32-bit halves exactly.
            halves = torch.cat([hashes >> 32, hashes & 0xFFFFFFFF]).tolist()
            different = {at % len(held) for at in self.mesh.differing(group, halves)}
            found += [held[at].name for at in sorted(different)]
        return found
