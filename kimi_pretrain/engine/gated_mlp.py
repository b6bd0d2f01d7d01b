"""Megatron-Core's dense and shared MLPs with our SwiGLU, which saves only its input.

The projections are Megatron-Core's linear layers, which implement tensor parallelism.
"""

from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor

from kimi_pretrain.memory.pointwise import swiglu
from kimi_pretrain.memory.saved import Saves


class DenseMlp(Saves, MLP):
    """The SwiGLU MLP of layers without experts."""

    def forward(self, hidden_states: Tensor, per_token_scale: Tensor | None = None, **_):
        """Return the output [tokens, 1, hidden], and None for the bias."""
        assert per_token_scale is None, "weights of tokens are those of routed experts"
        policy = self.policy
        with policy.saving():
            gate_up = policy.squeezed(self.linear_fc1(hidden_states)[0])
            return self.linear_fc2(policy.remade("swiglu", swiglu, gate_up))


class SharedExperts(SharedExpertMLP, DenseMlp):
    """The shared experts, which process every token; `forward` calls `DenseMlp.forward`."""
