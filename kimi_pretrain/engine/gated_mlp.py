"""Megatron-Core's dense and shared MLPs with our SwiGLU, which saves its input alone.

Their tensor parallelism is Megatron-Core's: the projections are its linear layers.
"""

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from kimi_pretrain.memory.pointwise import swiglu
from kimi_pretrain.memory.saved import Saves


class DenseMlp(Saves, MLP):
    """The SwiGLU MLP of layers without experts."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_):
        """Return [tokens, 1, hidden], and no bias."""
        assert per_token_scale is None, "weights of tokens are those of routed experts"
        policy = self.policy
        with policy.saving():
            gate_up = policy.squeezed(self.linear_fc1(hidden_states)[0])
            return self.linear_fc2(policy.remade("swiglu", swiglu, gate_up))


class SharedExperts(SharedExpertMLP, DenseMlp):
    """The experts that every token passes; its `forward` calls that of `DenseMlp`."""
