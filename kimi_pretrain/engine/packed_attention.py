"""Core attention of packed rows in Megatron-Core's layers, and the largest logit of each head.

This module adapts `kimi_pretrain.attention` to Megatron-Core: it defines the parameters of a packed
row and core attentions for the layer spec. The maxima feed QK-Clip (K2 report, section 2.1) and
come from the logits that attention computes anyway.

Under context parallelism, a rank has queries for its own tokens and keys and values for the whole
row; `latent_attention` passes keys and values for a few heads at a time.

Shape suffixes: T tokens of this rank, R tokens of the row, N heads, D query/key width, V value
width.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from einops import rearrange
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from kimi_pretrain.attention.blockwise import block_attention, blocks_of
from kimi_pretrain.attention.flex import block_mask, flex_attention
from kimi_pretrain.attention.spans import KeySpans, largest
from kimi_pretrain.parallel.sequence import SequenceParts


@dataclass
class PackedRows(PackedSeqParams):
    """Megatron-Core's packed-sequence parameters plus precomputed values for our layers.

    Attributes:
        spans: the keys that each query of this rank attends to.
        row_order: index of each token of the row in the gathered row (`SequenceParts.gathered`),
            int64 [tokens]; None without context parallelism.
        positions: positions of this context-parallel rank's tokens, for their rotary angles, int64
            [tokens].
        documents: document borders, for kernels that need them; see `document_borders`.
        kernel: the same in the format of the run's attention; the first layer computes it.
    """

    spans: KeySpans | None = None
    row_order: Tensor | None = None
    positions: Tensor | None = None
    documents: tuple[list[int], list[int]] = field(default_factory=lambda: ([0], [0]))
    kernel: Any = None

    @classmethod
    def of(
        cls,
        cu_seqlens: list[int],
        is_document: list[bool],
        device: torch.device,
        positions: Tensor | None = None,
        shared: SequenceParts | None = None,
        cp_rank: int = 0,
    ):
        """Build the parameters from segment borders; see `KeySpans.of`.

        If `positions` (int64 [tokens]) are not given, they restart at 0 in every segment.
        """
        if positions is None:
            lengths = zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)
            positions = torch.cat([torch.arange(end - start) for start, end in lengths])
        # Megatron-Core does not use our borders; it sees the row as one sequence.
        row = torch.tensor([0, cu_seqlens[-1]], dtype=torch.int32, device=device)
        gathered = None
        if shared is not None and shared.num_cp > 1:
            positions = positions[torch.from_numpy(shared.positions_cp(cp_rank))]
            gathered = torch.from_numpy(shared.gathered()).to(device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=row,
            cu_seqlens_kv=row,
            max_seqlen_q=cu_seqlens[-1],
            max_seqlen_kv=cu_seqlens[-1],
            spans=KeySpans.of(cu_seqlens, is_document, shared, cp_rank),
            row_order=gathered,
            positions=positions.to(device),
            documents=document_borders(cu_seqlens, is_document),
        )


def document_borders(cu_seqlens: list[int], is_document: list[bool]) -> tuple[list[int], list[int]]:
    """Return document borders in the format of fused kernels, without and with padding.

    Padding is assigned to the document before it, so that no kernel attends to it or counts its
    logits. Padding that no document precedes is assigned to an empty document.

    Args:
        cu_seqlens: segment borders in the row, from 0 to the number of tokens.
        is_document: one value per segment, False for the padding at the end of a row.

    Returns:
        cumulative document lengths without padding, starting with 0; and the starts of the
        documents, followed by the number of tokens. Both have one more entry than documents.
    """
    begins: list[int] = []
    lengths: list[int] = []
    for start, end, document in zip(cu_seqlens[:-1], cu_seqlens[1:], is_document, strict=True):
        if document or not begins:
            begins.append(start)
            lengths.append(end - start if document else 0)
    return [0, *accumulate(lengths)], [*begins, cu_seqlens[-1]]


def of_all_heads(local_N: Tensor, num_heads: int, rank: int, ranks: int) -> Tensor:
    """Expand the maxima of one tensor-parallel rank's heads to all heads.

    Args:
        local_N: maxima of the contiguous heads of rank `rank`, [num_heads / ranks].

    Returns:
        [num_heads]; -inf for the heads of other ranks.
    """
    if len(local_N) * ranks != num_heads:
        raise ValueError(
            f"attention gave maxima of {len(local_N)} heads on each of {ranks} ranks; the model "
            f"has {num_heads}"
        )
    all_N = local_N.new_full((num_heads,), float("-inf"))
    all_N[rank * len(local_N) : (rank + 1) * len(local_N)] = local_N
    return all_N


class PackedCoreAttention(MegatronModule):
    """Core attention for Megatron-Core's layer spec; records maxima until `take_max_logits`.

    Only training records maxima: logits of an evaluation must not change weights.

    Attributes:
        pads_values: True if values must be as wide as queries.
    """

    pads_values = False

    def __init__(self, config, layer_number, softmax_scale, pg_collection, **_):
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self._max_N: Tensor | None = None

    @abstractmethod
    def prepare(self, rows: PackedRows, device: torch.device) -> Any:
        """Return the rows in the format that `attend` needs; all layers share the result."""

    @abstractmethod
    def attend(
        self, q_TND: Tensor, k_RND: Tensor, v_RNV: Tensor, prepared: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, heads * v dim] and the largest logits [heads of this rank].

        Keys and values are in row order.
        """

    def forward(
        self, query, key, value, attention_mask=None, attn_mask_type=None, packed_seq_params=None,
        first_head=0, **_,
    ):  # fmt: skip
        """Return [tokens, heads * v dim] for packed query, key, value [tokens, heads, dim].

        Args:
            first_head: index of the first of these heads among this rank's heads.
        """
        rows: PackedRows = packed_seq_params
        if rows.kernel is None:
            rows.kernel = self.prepare(rows, query.device)
        out, max_N = self.attend(query, key, value, rows.kernel)
        if max_N.shape != query.shape[1:2]:  # a single maximum would broadcast to every head
            raise ValueError(f"attention gave maxima {list(max_N.shape)} of {query.shape[1]} heads")
        if self.training:
            if self._max_N is None:
                self._max_N = self._no_maxima(max_N.device, max_N.dtype)
            some = self._max_N[first_head : first_head + query.shape[1]]
            torch.maximum(some, max_N, out=some)
        return out

    def _no_maxima(self, device, dtype: torch.dtype | None = None) -> Tensor:
        heads = self.config.num_attention_heads // self.tp_group.size()
        return torch.full((heads,), float("-inf"), device=device, dtype=dtype)

    def take_max_logits(self) -> Tensor:
        """Return and reset the largest logit of each head since the last call, [heads].

        It is -inf for heads of other tensor-parallel ranks, and for all heads if no training
        forward ran since the last call.
        """
        local_N, self._max_N = self._max_N, None
        if local_N is None:
            local_N = self._no_maxima(torch.cuda.current_device())
        ranks, heads = self.tp_group.size(), self.config.num_attention_heads
        return of_all_heads(local_N, heads, self.tp_group.rank(), ranks)


class SpanCoreAttention(PackedCoreAttention):
    """Core attention that calls a function of `kimi_pretrain.attention`.

    Attributes:
        layout: (spans, device) -> description of the rows in the format of `function`.
        function: (query, key, value, layout, scale) -> output, largest logits [heads, tokens].
    """

    layout: Callable[[KeySpans, torch.device], Any]
    function: Callable[..., tuple[Tensor, Tensor]]

    def prepare(self, rows: PackedRows, device: torch.device) -> Any:
        """Return the layout, and a mask of the queries whose logits count."""
        return self.layout(rows.spans, device), rows.spans.counted(device)

    def attend(
        self, q_TND: Tensor, k_RND: Tensor, v_RNV: Tensor, prepared: Any
    ) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, heads * v dim] and the largest logits [heads of this rank]."""
        layout, counted_T = prepared
        out_TNV, max_NT = self.function(q_TND, k_RND, v_RNV, layout, self.softmax_scale)
        return rearrange(out_TNV, "t n v -> t (n v)"), largest(max_NT, counted_T)


class PortableCoreAttention(SpanCoreAttention):
    """Blockwise attention in plain torch; see `kimi_pretrain.attention.blockwise`."""

    layout, function = staticmethod(blocks_of), staticmethod(block_attention)


class FlexCoreAttention(SpanCoreAttention):
    """Attention with torch's FlexAttention; see `kimi_pretrain.attention.flex`."""

    layout, function = staticmethod(block_mask), staticmethod(flex_attention)
