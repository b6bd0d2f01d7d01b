"""Megatron-Core's language model with a float64 loss for float64 parameters and with the padding
mask passed to the routers in the combined schedule.

Megatron-Core's cross entropy rounds logits of any dtype to float32. Because of this, the losses of
two layouts differed by 1e-8 though every gradient agreed to 1e-13.

Its combined 1F1B (`layout.overlap_experts`) calls the routers without the padding mask
(models/gpt/fine_grained_callables.py), so balance loss and routing biases would silently count
padding. Router gradients were off by up to 1.7%.
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
    """Megatron-Core's `GPTModel`, unchanged for the plain schedule in float32 and bfloat16."""

    def forward(self, *args, **kwargs):
        """Return the base class's output, and free the offloaded stage input."""
        out = super().forward(*args, **kwargs)
        if self._offloaded and torch.is_grad_enabled() and not self.pre_process:
            hollow(self.decoder.input_tensor)
        return out

    @property
    def _offloaded(self) -> bool:
        return self.policy.host is not None

    def build_schedule_plan(self, *args, padding_mask: Tensor, **kwargs):
        """Return the plan of one microbatch for the combined schedule.

        The schedule runs the plan's forward pass before it requests the chunk's next plan, so one
        mask per router is enough.

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
        """Clear the routers' masks after a schedule, because they fit only its tokens."""
        for module in self.modules():
            if isinstance(module, PaddingAwareRouter):
                module.padding_of_plan = None

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        """Return the cross entropy of each token, [1, tokens], float64 for float64 logits.

        Args:
            labels: [1, tokens].
            logits: [tokens, 1, vocabulary of this rank].
        """
        if logits.dtype != torch.float64:
            return super().compute_language_model_loss(labels, logits)
        # Every rank gathers the full logits; float64 serves to compare small models, so they fit.
        whole = gather_from_tensor_model_parallel_region(logits, group=self.tp_group)
        return F.cross_entropy(rearrange(whole, "t b v -> b v t"), labels, reduction="none")
