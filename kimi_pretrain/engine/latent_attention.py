"""Multi-head latent attention in Megatron-Core for packed rows that several ranks share, with
up-projections that can be recomputed.

Under sequence parallelism, a rank applies norms and small projections to its part of the tokens and
holds their full weights. The attribute `sequence_parallel` makes Megatron-Core sum the gradients of
these weights over the tensor-parallel ranks.

Under context parallelism, the ranks gather latents instead of keys and values: in K2, 576 numbers
per token instead of 20,480. Each rank up-projects the row's latents for its own queries, a few
heads at a time, and recomputes this in the backward pass; see docs/MEMORY.md and
docs/decisions/008-latents.md.

Shape suffixes: T tokens of this rank, R tokens of the row, L width of latent and rotary key.
"""

from functools import partial
from typing import Any

import torch
from megatron.core.models.common.embeddings import RotaryEmbedding, apply_rotary_pos_emb
from megatron.core.tensor_parallel.mappings import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
    gather_from_sequence_parallel_region,
)
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn

from kimi_pretrain.engine.packed_attention import PackedRows
from kimi_pretrain.memory.kept import ROW_HEADS
from kimi_pretrain.memory.pointwise import rms_norm
from kimi_pretrain.memory.saved import Saves


class RestartingRotary(nn.Module):
    """Rotary angles computed from token positions, which restart at 0 in each segment.

    Megatron-Core caches a table of angles for each requested number of positions, up to 32 tables.
    The number requested is the length of a microbatch's longest document, which varies, so this
    would take 2.1 GB at 262,144 positions. No table is needed, because an angle is the position
    times the frequency of its dimension.

    Args:
        rotary: Megatron-Core's embedding, which provides the frequencies.
    """

    def __init__(self, rotary: RotaryEmbedding):
        super().__init__()
        found = rotary.get_emb(2)
        table, self.factor = found if isinstance(found, tuple) else (found, 1.0)
        self.frequencies = table[1]

    def forward(self, positions: Tensor) -> tuple[Tensor, float]:
        """Return angles [tokens, 1, 1, dim], and YaRN's scale for queries and keys.

        Args:
            positions: int64 [tokens].
        """
        frequencies = self.frequencies.to(positions.device)
        return positions.to(frequencies.dtype)[:, None, None, None] * frequencies, self.factor


class PartNorm(Saves, nn.RMSNorm):
    """RMSNorm of a part's tokens; the local spec's norm refuses sequence parallelism."""

    weight: nn.Parameter

    def __init__(self, config, hidden_size: int, eps: float = 1e-5, **_):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """Return `x` normalised in fp32 (fp64 for fp64), [..., hidden] in the dtype of `x`."""
        with self.policy.saving():
            return self.policy.remade("norms", rms_norm, x, self.weight, self.eps)


class FirstNorm(PartNorm):
    """The first norm of a layer; tensors saved from here on belong to this layer."""

    def forward(self, x: Tensor) -> Tensor:
        """Start the layer's group of saved tensors, and apply `PartNorm`."""
        self.policy.open_group()
        return super().forward(x)


class LastNorm(PartNorm):
    """The norm before the head, which is never recomputed.

    The head is outside the memory policy and saves the norm's output. Recomputing that output would
    keep the norm's input on the device as well as on the host.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the same as `PartNorm`, without recomputation."""
        with self.policy.saving():
            return rms_norm(x, self.weight, self.eps)


class ReplicatedLinear(nn.Module):
    """A linear layer replicated on every tensor-parallel rank."""

    def __init__(self, config, inner: int, out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out, inner, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """Return the projection, and None for the bias."""
        return nn.functional.linear(x, self.weight), None


class PackedLatentAttention(Saves, MLASelfAttention):
    """Megatron-Core's MLA with rotary angles computed for the packed row as a whole.

    Under tensor parallelism every rank holds the full small down projections, as with Transformer
    Engine. The local spec slices them and gathers the rotary key, but its backward pass keeps only
    this rank's heads in the gradient of that key and loses the share of the other heads.
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
        """Pass values unpadded if the core attention accepts them.

        Megatron-Core pads them to the queries' width, 128 to 192 in K2, and cuts the output.
        """
        if value is None:
            return self._attend_row(query, key, kwargs["packed_seq_params"])
        padded = self.core_attention.pads_values
        run = super()._run_core_attention if padded else self.core_attention
        return run(query, key, value, *args, **kwargs)

    def forward(self, *args, **kwargs):
        """Return the output [tokens, 1, hidden], and None for the bias."""
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

        The operators are those of Megatron-Core, but it can recompute the up-projections only by
        freeing the storage of query, key and value, which other code may still reference. Under
        context parallelism, the key is the result of `_row` and the value is None.

        Args:
            hidden_states: [tokens of this rank's part, 1, hidden].
            packed_seq_params: the row, `PackedRows`.
        """
        rows, config, remade = packed_seq_params, self.config, self.policy.remade
        query_latent, key_value = self._qkv_down_projection(hidden_states)
        latent, rotary = config.kv_lora_rank, config.qk_pos_emb_head_dim
        key_latent, key_rotary = key_value.split([latent, rotary], dim=-1)
        shared = self.pg_collection.cp.size() > 1
        if self.tp_group.size() > 1 and not shared:
            key_rotary = gather_from_sequence_parallel_region(key_rotary, group=self.tp_group)
        query_latent, key_latent, key_rotary = (
            x.squeeze(1) for x in (query_latent, key_latent, key_rotary)
        )
        if config.q_lora_rank is not None:
            query_latent = self.q_layernorm(query_latent)
        key_latent = self.kv_layernorm(key_latent)
        if shared:
            query = remade("mla_up", partial(self._query, rows=rows), query_latent)
            row_RL = remade("mla_up", partial(self._row, rows=rows), key_latent, key_rotary)
            return query, row_RL, None, query_latent, key_latent
        up = partial(self._up_projections, rows=rows)
        made = remade("mla_up", up, query_latent, key_latent, key_rotary)
        return *made, query_latent, key_latent

    def _up_projections(
        self, query_latent: Tensor, key_latent: Tensor, key_rotary: Tensor, rows: PackedRows
    ) -> tuple[Tensor, Tensor, Tensor]:
        query = self._query(query_latent, rows)
        key_value = self.linear_kv_up_proj(key_latent)[0]
        return query, *self._key_value(key_value, self._rotated(key_rotary, rows.positions))

    def _query(self, query_latent: Tensor, rows: PackedRows) -> Tensor:
        plain, rotary = self.config.qk_head_dim, self.config.qk_pos_emb_head_dim
        has_latent = self.config.q_lora_rank is not None
        to_query = self.linear_q_up_proj if has_latent else self.linear_q_proj
        query = to_query(query_latent)[0].unflatten(-1, (-1, plain + rotary))
        query_plain, query_rotary = query.split([plain, rotary], dim=-1)
        return torch.cat([query_plain, self._rotated(query_rotary, rows.positions)], dim=-1)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return `x`, [tokens, dim] or [tokens, heads, dim], rotated by its tokens' angles."""
        angles, factor = self.rotary_pos_emb(positions)  # computed here so that no layer saves them
        heads = x.unsqueeze(-2) if x.dim() == 2 else x
        turned = apply_rotary_pos_emb(
            heads.unsqueeze(1), angles, config=self.config, mscale=factor,
            cp_group=self.pg_collection.cp, mla_rotary_interleaved=True,
        )  # fmt: skip
        return turned.view_as(x)

    def _key_value(self, key_value: Tensor, key_rotary: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value [tokens, heads, dim] from the heads' projections and rotary key."""
        plain, width = self.config.qk_head_dim, self.config.v_head_dim
        key_value = key_value.unflatten(-1, (-1, plain + width))
        key_plain, value = key_value.split([plain, width], dim=-1)
        key_rotary = key_rotary.unsqueeze(-2).expand(-1, key_value.shape[1], -1)
        return torch.cat([key_plain, key_rotary], dim=-1), value.contiguous()

    def _row(self, key_latent: Tensor, key_rotary: Tensor, rows: PackedRows) -> Tensor:
        """Return latents and rotated rotary keys of the row, [row, latent + rotary]; see `_Row`.

        Each rank sends only its own part to the other context-parallel ranks.
        """
        positions = rows.positions.chunk(self.tp_group.size())[self.tp_group.rank()]
        part = torch.cat([key_latent, self._rotated(key_rotary, positions)], dim=-1)
        return _Row.apply(part, (self.pg_collection.cp, self.tp_group), rows.row_order)

    def _attend_row(self, query: Tensor, row_RL: Tensor, rows: PackedRows) -> Tensor:
        """Return the output [tokens, heads * v dim] of this rank's queries over the row.

        Keys and values exist for a few heads at a time and are always recomputed from the latents,
        whatever `train.recompute` says; otherwise autograd would keep them for all heads and
        layers.
        """
        config, remade = self.config, self.policy.remade
        widths = [config.kv_lora_rank, config.qk_pos_emb_head_dim]
        weights = self.linear_kv_up_proj.weight.split(
            ROW_HEADS * (config.qk_head_dim + config.v_head_dim)
        )

        def project(latent_RL: Tensor, rotary_RL: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
            return self._key_value(nn.functional.linear(latent_RL, weight), rotary_RL)

        outputs = []
        for number, some in enumerate(query.split(ROW_HEADS, dim=1)):
            up = partial(project, weight=weights[number])
            # Each group of heads has its own bf16 copy, so gradients of the copies are summed in
            # fp32.
            narrow_RL = remade("row", Tensor.to, row_RL, query.dtype)
            key, value = remade("row", up, *narrow_RL.split(widths, -1))
            outputs.append(
                self.core_attention(
                    some, key, value, packed_seq_params=rows, first_head=number * ROW_HEADS
                )
            )
            del narrow_RL, key, value  # free them before the next heads allocate theirs
        return remade("row", _joined, *outputs)


class _Row(torch.autograd.Function):
    """Gather of a row in the dtype of its parts, whose backward sums over the ranks in fp32.

    In bf16, sums over groups of heads and over ranks would round the gradient at every addition.
    With 64 heads, the error is three times that of one process on 4 ranks, and six times on 64
    (docs/decisions/008-latents.md). The output is therefore fp32 (fp64 for fp64).
    """

    @staticmethod
    def forward(ctx: Any, part_TL: Tensor, groups: tuple[Any, ...], order: Tensor) -> Tensor:
        """Gather the parts over each group in turn, and return them in row order, [row, width]."""
        ctx.groups, ctx.order, ctx.dtype = groups, order, part_TL.dtype
        for group in groups:
            part_TL = _gather_along_first_dim(part_TL, group)
        return part_TL.index_select(0, order).to(torch.promote_types(ctx.dtype, torch.float32))

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_RL: Tensor
    ) -> tuple[Tensor, None, None]:
        """Return this rank's part of the gradient, summed over the ranks of all queries."""
        grad = torch.empty_like(grad_RL).index_copy_(0, ctx.order, grad_RL)
        for group in reversed(ctx.groups):
            grad = _reduce_scatter_along_first_dim(grad, group)
        return grad.to(ctx.dtype), None, None


def _joined(*outputs: Tensor) -> Tensor:
    return torch.cat(outputs, dim=-1)


class PlainQueryAttention(PackedLatentAttention):
    """MLA without a query latent (Moonlight), where only the key-value latent has a norm.

    Megatron-Core 0.19.2 controls both norms with one switch. Without a query latent, it would
    request a projection fused with an extra norm of the hidden state, which this architecture does
    not have.
    """

    def _resolve_qk_norm_config(self, submodules):
        return dict(
            linear_q_proj=submodules.linear_q_proj,
            linear_q_up_proj=IdentityOp,
            linear_kv_up_proj=submodules.linear_kv_up_proj,
            q_layernorm=IdentityOp,
            kv_layernorm=submodules.kv_layernorm,
        )
