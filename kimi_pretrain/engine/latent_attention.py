"""Multi-head latent attention in Megatron-Core: what its local spec lacks for packed rows that
several ranks share, and its up-projections as one computation that may be done again.

Under sequence parallelism a rank applies norms and small projections to the tokens of its part and
holds their weights whole: the mark `sequence_parallel` has Megatron-Core sum their gradients over
the tensor-parallel ranks.
"""

from functools import partial

import torch
from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from kimi_pretrain.engine.packed_attention import PackedRows
from kimi_pretrain.memory.pointwise import rms_norm
from kimi_pretrain.memory.saved import Saves


class RestartingRotary(nn.Module):
    """Rotary angles for every token of a packed row, starting over in each segment.

    Given a table as long as the longest segment, Megatron-Core rotates segment by segment, and a
    row holds dozens. Given one angle for each token of the row it rotates all at once, and under
    context parallelism takes those of its rank's tokens.
    """

    def __init__(self, rotary: nn.Module):
        super().__init__()
        self.rotary = rotary

    def forward(self, rows: PackedRows, packed_seq: bool = True):
        """Return angles [tokens, 1, 1, dim]; with YaRN also its factor on queries and keys."""
        found = self.rotary(rows.num_positions, packed_seq=packed_seq)
        if isinstance(found, tuple):
            return found[0].index_select(0, rows.positions), found[1]
        return found.index_select(0, rows.positions)


class PartNorm(Saves, nn.RMSNorm):
    """RMSNorm of a part's tokens; that of the local spec refuses sequence parallelism."""

    weight: nn.Parameter

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., hidden] of `x`'s type, computed in fp32 (fp64 for fp64)."""
        with self.policy.saving():
            return self.policy.remade("norms", rms_norm, x, self.weight, self.eps)


class FirstNorm(PartNorm):
    """The first norm of a layer: what is saved from here on is this layer's."""

    def forward(self, x: Tensor) -> Tensor:
        """See `PartNorm`."""
        self.policy.open_group()
        return super().forward(x)


class ReplicatedLinear(nn.Module):
    """A linear layer that every tensor-parallel rank holds whole."""

    def __init__(self, config, inner: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inner, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the projection, and no bias."""
        return nn.functional.linear(x, self.weight), None


class PackedLatentAttention(Saves, MLASelfAttention):
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

    def forward(self, *args, **kwargs):
        """Return [tokens, 1, hidden], and no bias."""
        with self.policy.saving():
            return super().forward(*args, **kwargs)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states=None,
        position_ids=None,
        packed_seq_params=None,
        inference_context=None,
    ):
        """Return query and key [tokens, heads, qk dim], value [tokens, heads, v dim], both latents.

        As in Megatron-Core, operator by operator; there the up-projections can be done again only
        by a mechanism that frees the storages of query, key and value while others may hold them.

        Args:
            hidden_states: [tokens of this rank's part, 1, hidden].
            packed_seq_params: the row, `PackedRows`.
        """
        rows, config = packed_seq_params, self.config
        query_latent, key_value = self._qkv_down_projection(hidden_states)
        latent, rotary = config.kv_lora_rank, config.qk_pos_emb_head_dim
        key_latent, key_rotary = key_value.split([latent, rotary], dim=-1)
        if self.tp_group.size() > 1:
            key_rotary = gather_from_sequence_parallel_region(key_rotary, group=self.tp_group)
        query_latent, key_latent, key_rotary = (
            x.squeeze(1) for x in (query_latent, key_latent, key_rotary)
        )
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(query_latent)
        key_latent = self.kv_layernorm(key_latent)
        up = partial(self._up_projections, rows=rows)
        made = self.policy.remade("mla_up", up, query_latent, key_latent, key_rotary)
        return *made, query_latent, key_latent

    def _up_projections(
        self, query_latent: Tensor, key_latent: Tensor, key_rotary: Tensor, rows: PackedRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        angles = self.rotary_pos_emb(rows)  # here: else every layer would hold its own
        angles, factor = angles if isinstance(angles, tuple) else (angles, 1.0)
        config, heads = self.config, self.num_attention_heads_per_partition
        plain, rotary, width = config.qk_head_dim, config.qk_pos_emb_head_dim, config.v_head_dim
        has_latent = config.q_lora_rank is not None
        to_query = self.linear_q_up_proj if has_latent else self.linear_q_proj
        query = to_query(query_latent)[0].unflatten(-1, (heads, plain + rotary))
        key_value = self.linear_kv_up_proj(key_latent)[0].unflatten(-1, (heads, plain + width))
        query_plain, query_rotary = query.split([plain, rotary], dim=-1)
        key_plain, value = key_value.split([plain, width], dim=-1)
        # Under context parallelism there is an angle for each token of the row, else of this part.
        own = angles if config.context_parallel_size > 1 else angles[: len(query)]

        def rotate(x: Tensor, borders: Tensor) -> Tensor:
            return apply_rotary_pos_emb(
                x, own, config=config, cu_seqlens=borders, mscale=factor,
                cp_group=self.pg_collection.cp, mla_rotary_interleaved=True,
            )  # fmt: skip

        query_rotary = rotate(query_rotary, rows.cu_seqlens_q)
        key_rotary = rotate(key_rotary.unsqueeze(-2), rows.cu_seqlens_kv).expand(-1, heads, -1)
        query = torch.cat([query_plain, query_rotary], dim=-1)
        key = torch.cat([key_plain, key_rotary], dim=-1)
        return query, key, value.contiguous()


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
