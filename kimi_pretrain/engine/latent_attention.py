"""Multi-head latent attention in Megatron-Core: what its local spec lacks for packed rows that
several ranks share.

Under sequence parallelism a rank applies norms and small projections to the tokens of its part and
holds their weights whole: the mark `sequence_parallel` has Megatron-Core sum their gradients over
the tensor-parallel ranks.
"""

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from kimi_pretrain.engine.packed_attention import PackedRows
from kimi_pretrain.memory.pointwise import rms_norm


class RestartingRotary(nn.Module):
    """Rotary angles for every token of a packed row, starting over in each segment.

    Given a table as long as the longest segment, Megatron-Core rotates segment by segment, and a
    row holds dozens. Given one angle for each token of the row it rotates all at once, and under
    context parallelism takes those of its rank's tokens.
    """

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def get_rotary_seq_len(self, context, block, hidden, config, packed_seq_params) -> PackedRows:
        """Return what `forward` needs: the row itself takes the place of a length."""
        return packed_seq_params

    def forward(self, rows: PackedRows, packed_seq: bool = True):
        """Return angles [tokens, 1, 1, dim]; with YaRN also its factor on queries and keys."""
        found = self.rotary(rows.num_positions, packed_seq=packed_seq)
        if isinstance(found, tuple):
            return found[0].index_select(0, rows.positions), found[1]
        return found.index_select(0, rows.positions)


class PartNorm(nn.RMSNorm):
    """RMSNorm of a part's tokens; that of the local spec refuses sequence parallelism."""

    weight: nn.Parameter

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden] of `x`'s type, computed in fp32 (fp64 for fp64)."""
        return rms_norm(x, self.weight, self.eps)


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole."""

    def __init__(self, config, inner: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inner, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the projection, and no bias."""
        return nn.functional.linear(x, self.weight), None


class PackedLatentAttention(MLASelfAttention):
    """Megatron-Core's MLA with rotary angles computed for the packed row as a whole.

    Under tensor parallelism every rank has all of the small down projections, as with Transformer
    Engine. The local spec cuts them, gathers the rotary key, and in the backward pass keeps of that
    key's gradient what this rank's heads give: the other heads' share is lost.
    """

    def __init__(self, config, *args, **kwargs):
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb = RestartingRotary(self.rotary_pos_emb)
        if config.tensor_model_parallel_size > 1:
            rotary = config.kv_lora_rank + config.qk_pos_emb_head_dim
            self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, rotary)
            if config.q_lora_rank is not None:
                self.linear_q_down_proj = ReplicatedLinear(
                    config, config.hidden_size, config.q_lora_rank
                )

    def _run_core_attention(self, query, key, value, *args, **kwargs):
        """Hand values over as narrow as they are, where the core attention takes them so.

        Megatron-Core pads them to the queries' width, 128 to 192 in K2, and cuts the output.
        """
        padded = self.core_attention.pads_values
        run = super()._run_core_attention if padded else self.core_attention
        return run(query, key, value, *args, **kwargs)


class PlainQueryAttention(PackedLatentAttention):
    """MLA without a query latent (Moonlight): the latent of keys and values alone has a norm.

    Megatron-Core 0.19.2 ties both norms to one switch and, without a query latent, would ask for a
    projection fused with an extra norm of the hidden state, which this architecture does not have.
    """

    def _resolve_qk_norm_config(self, submodules):
        return dict(
            linear_q_proj=submodules.linear_q_proj,
            linear_q_up_proj=IdentityOp,
            linear_kv_up_proj=submodules.linear_kv_up_proj,
            q_layernorm=IdentityOp,
            kv_layernorm=submodules.kv_layernorm,
        )
