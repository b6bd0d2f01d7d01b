"""Phase 7: one divisor, one norm over encoder and backbone, MuonClip, then QK-Clip.

Gradients arrive as sums over the tokens of the global batch. They are divided here, once, by the
global number of loss tokens, together with the clipping factor. A step whose norm is not finite
changes nothing, neither encoder nor backbone.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kimi_pretrain.config import Config
from kimi_pretrain.dep.encoder import DecoupledEncoder
from kimi_pretrain.engine.backbone import Backbone
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.optim.distributed import DistributedMuonClip
from kimi_pretrain.optim.groups import ModelShape, NamedTensor
from kimi_pretrain.optim.qk_clip import factors
from kimi_pretrain.optim.schedule import learning_rate


@dataclass(frozen=True)
class UpdateReport:
    """What an update did; the same on every rank.

    Attributes:
        lr: learning rate used.
        grad_norm: global norm of the divided gradient, before clipping.
        applied: False when the norm was not finite and nothing was changed.
        max_logit: largest softmax input of the step, over all layers and heads.
        clipped_heads: heads that QK-Clip shrank.
    """

    lr: float
    grad_norm: float
    applied: bool
    max_logit: float
    clipped_heads: int


def model_shape(config: Config) -> ModelShape:
    """Return the sizes by which the optimizer cuts fused matrices."""
    language = config.model.language
    return ModelShape(
        num_heads=language.num_heads,
        qk_nope_dim=language.qk_nope_dim,
        qk_rope_dim=language.qk_rope_dim,
        v_dim=language.v_dim,
        kv_lora_rank=language.kv_lora_rank,
        vision_heads=config.model.vision.heads,
    )


def named_tensors(encoder: DecoupledEncoder, backbone: Backbone) -> list[NamedTensor]:
    """Return every trained tensor of this rank under its checkpoint name."""
    vision = [
        NamedTensor(name, param.detach(), lambda name=name: encoder.sums.views[name], "encoder")
        for name, param in encoder.trained().items()
    ]
    if not backbone.trainable:
        return vision
    language = [
        NamedTensor(
            view.name,
            view.data,
            lambda view=view: backbone.grad_of(view),
            "expert" if ".mlp.experts." in view.name else "dense",
        )
        for view in backbone.views()
    ]
    return vision + language


class Update:
    """The optimizer with everything that comes before and after its step."""

    def __init__(self, config: Config, mesh: Mesh, encoder: DecoupledEncoder, backbone: Backbone):
        self.config, self.mesh, self.backbone = config, mesh, backbone
        self.named = named_tensors(encoder, backbone)
        self.optimizer = DistributedMuonClip(
            self.named, mesh.groups, config.optim, model_shape(config)
        )

    def check_replicas(self) -> None:
        """Compare a checksum of every tensor over the ranks that hold a copy of it.

        Copies that differ at the start train on, with wrong gradients and no other sign.

        Raises:
            RuntimeError: names the first tensor that differs.
        """
        for group in sorted(self.mesh.groups):
            held = [tensor for tensor in self.named if tensor.replicas == group]
            sums = [float(tensor.data.double().sum()) for tensor in held]
            if differing := self.mesh.differing(group, sums):
                name = held[differing[0]].name
                raise RuntimeError(f"{name} is not the same on all ranks that hold a copy of it")

    def run(self, loss_tokens: int) -> UpdateReport:
        """Update all parameters from the summed gradients of a step.

        Args:
            loss_tokens: of the global batch: the one divisor.
        """
        divisor = max(1, loss_tokens)
        (squares,) = self.mesh.sum([float(self.optimizer.grad_square_sum())])
        grad_norm = math.sqrt(squares) / divisor
        lr = learning_rate(self.optimizer.steps, self.config.optim)
        max_logits = self._max_logits()
        applied = math.isfinite(grad_norm)
        clipped = 0
        if applied:
            limit = self.config.optim.max_grad_norm
            clip = 1.0 if limit is None else min(1.0, limit / max(grad_norm, 1e-30))
            self.optimizer.step(lr, clip / divisor)
            clipped = self._qk_clip(max_logits)
        else:
            self.backbone.undo_routing_biases()
        return UpdateReport(lr, grad_norm, applied, float(max_logits.max()), clipped)

    def _max_logits(self) -> Tensor:
        """Return the largest logits of the step over all ranks, [layers, heads]."""
        language = self.config.model.language
        local = self.backbone.take_max_logits()
        table = torch.full((language.num_layers, language.num_heads), -math.inf)
        for layer, max_N in local.items():
            table[layer] = max_N.cpu()
        seen = self.mesh.max(table.flatten().tolist())
        return torch.tensor(seen).reshape(table.shape)

    def _qk_clip(self, max_logits: Tensor) -> int:
        """Clip the heads over the threshold; the number of them in the whole model."""
        threshold = self.config.optim.qk_clip_threshold
        if threshold is None or not self.backbone.trainable:
            return 0
        gamma = factors(max_logits, threshold).to(self.mesh.device)
        query = "q_proj" if self.config.model.language.q_lora_rank is None else "q_b_proj"
        for layer in range(len(gamma)):
            prefix = f"language_model.model.layers.{layer}.self_attn."
            if bool((gamma[layer] < 1).any()):
                self.optimizer.apply_qk_clip(
                    f"{prefix}{query}.weight", f"{prefix}kv_b_proj.weight", gamma[layer]
                )
        return int((gamma < 1).sum())
