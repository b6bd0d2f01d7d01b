"""Causal attention inside packed documents, and the largest logit of each head.

Plain torch, for hosts and for GPUs without Transformer Engine; handed to Megatron-Core through its
layer spec. The maxima feed QK-Clip (K2 report, section 2.1) and come from the same logits, without
a second pass over the keys. Documents of similar length are padded to a power of two and computed
together: one row holds dozens of short documents, and one call each would be mostly overhead.

Shape suffixes: T tokens of the row(s), N heads, D query/key width, V value width, S segments of
one bucket, L padded length of the bucket.
"""

from dataclasses import dataclass

import torch
from einops import rearrange, repeat
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor, nn


@dataclass(frozen=True)
class Bucket:
    """Segments whose lengths round up to the same power of two.

    Attributes:
        tokens_SL: position of each token in the row; padding points at token 0.
        inside_SL: whether it is a token of the segment, not padding.
        counted_S: whether the segment is a document (not the padding at the end of a row).
    """

    tokens_SL: Tensor
    inside_SL: Tensor
    counted_S: Tensor


def buckets(cu_seqlens: list[int], is_document: list[bool], device: torch.device) -> list[Bucket]:
    """Group segments by padded length.

    Args:
        cu_seqlens: segment borders, from 0 to the number of tokens.
        is_document: for each segment, False for the padding at the end of a row.
    """
    by_length: dict[int, list[tuple[int, int, bool]]] = {}
    for start, end, document in zip(cu_seqlens[:-1], cu_seqlens[1:], is_document, strict=True):
        if end > start:
            padded = max(8, 1 << (end - start - 1).bit_length())
            by_length.setdefault(padded, []).append((start, end, document))
    return [_bucket(length, by_length[length], device) for length in sorted(by_length)]


def _bucket(length: int, segments: list[tuple[int, int, bool]], device: torch.device) -> Bucket:
    starts, ends, documents = (torch.tensor(column) for column in zip(*segments, strict=True))
    tokens_SL = starts[:, None] + torch.arange(length)
    inside_SL = tokens_SL < ends[:, None]
    tokens_SL = tokens_SL.masked_fill(~inside_SL, 0)
    return Bucket(tokens_SL.to(device), inside_SL.to(device), documents.bool().to(device))


def packed_attention(
    q_TND: Tensor, k_TND: Tensor, v_TNV: Tensor, parts: list[Bucket], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention inside each segment.

    Args:
        q_TND, k_TND: [tokens, heads, qk dim]; v_TNV: [tokens, heads, v dim].
        parts: from `buckets`; together they cover every token once.
        scale: of the logits, before the softmax.

    Returns:
        output [tokens, heads, v dim] and the largest softmax input of each head over all valid
        pairs of documents, fp32 (fp64 for fp64 inputs) [heads]; -inf where there is no document.
    """
    wide = torch.float64 if q_TND.dtype == torch.float64 else torch.float32
    max_N = q_TND.new_full((q_TND.shape[1],), float("-inf"), dtype=wide)
    rows, tokens = [], []
    for part in parts:
        flat = part.tokens_SL.flatten()
        shape = {"S": part.tokens_SL.shape[0]}
        q, k, v = (
            rearrange(x.index_select(0, flat), "(S L) N D -> S N L D", **shape)
            for x in (q_TND, k_TND, v_TNV)
        )
        # In fp32 throughout: rounded to bf16, logits near QK-Clip's threshold of 100 come in steps
        # of a half.
        logits = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
        length = logits.shape[-1]
        # Padding is at the end, so a token of the segment never looks at it: causal is enough.
        future = torch.ones(length, length, dtype=torch.bool, device=flat.device).triu(1)
        logits = logits.masked_fill(future, float("-inf"))
        counted = repeat(part.inside_SL & part.counted_S[:, None], "S L -> S 1 L 1")
        seen = logits.detach().masked_fill(~counted, float("-inf"))
        max_N = torch.maximum(max_N, seen.amax(dim=(0, 2, 3)))
        out = logits.softmax(-1).to(v.dtype) @ v
        inside = part.inside_SL.flatten()
        rows.append(rearrange(out, "S N L V -> (S L) N V")[inside])
        tokens.append(flat[inside])
    order = torch.cat(tokens).argsort()
    return torch.cat(rows).index_select(0, order), max_N


def packed_attention_reference(
    q_TND: Tensor, k_TND: Tensor, v_TNV: Tensor, cu_seqlens: list[int], scale: float
) -> Tensor:
    """Return the same output by a plain loop over segments: the twin that tests compare with."""
    out = []
    for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        q, k, v = (rearrange(x[start:end], "t n d -> n t d") for x in (q_TND, k_TND, v_TNV))
        future = torch.ones(end - start, end - start, dtype=torch.bool, device=q.device).triu(1)
        logits = (q @ k.transpose(-1, -2) * scale).masked_fill(future, float("-inf"))
        out.append(rearrange(logits.softmax(-1) @ v, "n t v -> t n v"))
    return torch.cat(out)


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron-Core's packed-sequence parameters plus what our layers want precomputed.

    Attributes:
        parts: segments grouped for `packed_attention`.
        positions: of each token, for its rotary angle, int64 [tokens].
        num_positions: one more than the largest of them.
    """

    parts: list[Bucket] | None = None
    positions: Tensor | None = None
    num_positions: int = 0

    @classmethod
    def of(
        cls,
        cu_seqlens: list[int],
        is_document: list[bool],
        device: torch.device,
        positions: Tensor | None = None,
    ):
        """Build from segment borders; see `buckets`. Positions begin at 0 in every segment unless
        they are given, int64 [tokens].
        """
        borders = torch.tensor(cu_seqlens, dtype=torch.int32, device=device)
        lengths = [end - start for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:])]
        longest = max(lengths)
        if positions is None:
            positions = torch.cat([torch.arange(length) for length in lengths])
        return cls(
            qkv_format="thd",
            cu_seqlens_q=borders,
            cu_seqlens_kv=borders,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
            parts=buckets(cu_seqlens, is_document, device),
            positions=positions.to(device),
            num_positions=int(positions.max()) + 1,
        )


class PackedCoreAttention(MegatronModule):
    """Core attention for Megatron-Core's layer spec; remembers the maxima since the last `take`."""

    def __init__(self, config, layer_number, softmax_scale, pg_collection, **_):
        super().__init__(config=config)
        if pg_collection.cp.size() > 1:
            raise ValueError("context parallelism is not supported by this attention yet")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self._max_N: Tensor | None = None

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_
    ):
        """Return [tokens, heads * v dim] for packed query, key, value [tokens, heads, dim]."""
        out_TNV, max_N = packed_attention(
            query, key, value, packed_seq_params.parts, self.softmax_scale
        )
        self._max_N = max_N if self._max_N is None else torch.maximum(self._max_N, max_N)
        return rearrange(out_TNV, "t n v -> t (n v)")

    def take_max_logits(self) -> Tensor:
        """Return the largest logit of each head since the last call, and forget it; [heads]."""
        if self._max_N is None:
            heads = self.config.num_attention_heads
            device = torch.cuda.current_device()
            return torch.full((heads,), float("-inf"), device=device)
        max_N, self._max_N = self._max_N, None
        return max_N


class RestartingRotary(nn.Module):
    """Rotary angles for every token of a packed row, starting over in each segment.

    Given a table as long as the longest segment, Megatron-Core rotates segment by segment, and a
    row holds dozens. Given one angle for each token of the row it rotates all at once.
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


class PackedLatentAttention(MLASelfAttention):
    """Megatron-Core's MLA with rotary angles computed for the packed row as a whole."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = RestartingRotary(self.rotary_pos_emb)


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
