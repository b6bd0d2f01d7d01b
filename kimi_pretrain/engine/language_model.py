"""Megatron-Core's language model, with its loss in float64 where its parameters are.

Megatron-Core's cross entropy rounds the logits to float32 whatever their type is: the losses of two
layouts were 1e-8 apart where every gradient agreed to 1e-13.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import gather_from_tensor_model_parallel_region
from torch import Tensor


class LanguageModel(GPTModel):
    """Megatron-Core's `GPTModel`; in float32 and bfloat16 nothing is different."""

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
