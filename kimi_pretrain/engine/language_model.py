"""Megatron-Core's language model, with its loss in float64 where its parameters are, and with
padding told to the routers in the combined schedule.

Megatron-Core's cross entropy rounds the logits to float32 whatever their type is: the losses of two
layouts were 1e-8 apart where every gradient agreed to 1e-13.

Its combined 1F1B (`layout.overlap_experts`) calls the routers without the padding mask
(models/gpt/fine_grained_callables.py): balance loss and routing biases would count padding, without
an error. Router gradients were off by up to 1.7%.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor

from kimi_pretrain.engine.experts import PaddingAwareRouter
from kimi_pretrain.engine.held_by_schedule import hollow, release_behind_layers
from kimi_pretrain.memory.saved import Saves


class LanguageModel(Saves, GPTModel):
    """Megatron-Core's `GPTModel`; the plain schedule in float32 and bfloat16 is as it was."""

    def forward(self, *args, **kwargs):
        """Return what the base class does."""
        out = super().forward(*args, **kwargs)
        if self._offloaded and torch.is_grad_enabled() and not self.pre_process:
            hollow(self.decoder.input_tensor)
        return out

    @property
    def _offloaded(self) -> bool:
        return self.policy.host is not None

    def build_schedule_plan(self, *args, padding_mask: Tensor, **kwargs):
        """Return the plan of one microbatch for the combined schedule.

        The schedule runs the plan's forward pass before it asks for the chunk's next plan, so one
        mask a router is enough.

        Args:
            padding_mask: True at padding, bool [1, tokens of this rank's part].
        """
        for module in self.modules():
            if isinstance(module, PaddingAwareRouter):
                module.padding_of_plan = padding_mask
        plan = super().build_schedule_plan(*args, padding_mask=padding_mask, **kwargs)
        release_behind_layers(plan, self._offloaded)
        return plan

    def forget_plans(self) -> None:
        """Take the mask from the routers when a schedule has ended: it is of no other tokens."""
        for module in self.modules():
            if isinstance(module, PaddingAwareRouter):
                module.padding_of_plan = None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the cross entropy of each token, [1, tokens], float64 for float64 logits.

        Args:
            labels: [1, tokens].
            logits: [tokens, 1, this rank's part of the vocabulary].
        """
        if logits.dtype != torch.float64:
            return super().compute_language_model_loss(labels, logits)
        # Whole on every rank: float64 is for comparing small models, so this may take memory.
        whole = gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return F.cross_entropy(rearrange(whole, "t b v -> b v t"), labels, reduction="none")
