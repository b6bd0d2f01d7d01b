"""Core attention by Transformer Engine's fused kernels (`train.attention: transformer_engine`).

The kernel is Megatron-Core's `TEDotProductAttention`, asked for the largest logit of each head
(`return_max_logit`), so no second pass over the keys is needed here either. Megatron-Core's own
clip stays unused: of its two switches we take the one that only records.

What the kernel wants, read from the sources of Megatron-Core 0.19.2 and Transformer Engine 2.20:

- packed rows as documents with room behind them (`document_borders`); before version 2.14 maxima
  were taken over that room too, which nothing had been written to;
- fp16 or bf16, and cuDNN 9.21: with an older one, maxima come from its unfused attention alone,
  which holds whole logit matrices and refuses rows with padding (`kimi_pretrain.attention.choice`
  refuses all this before a run);
- values as wide as queries: Megatron-Core pads them and cuts the output. On Hopper it would take
  them as they are, which has not been run;
- maxima are handed over rounded to the type of the output: in bf16 those near 100 come in steps of
  a half, so a head may be clipped from 99.75 on or go unclipped up to 100.25 for a step.

Not run by us: there was no machine with Transformer Engine. docs/MUONCLIP.md says what is tested.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from kimi_pretrain.engine.packed_attention import PackedCoreAttention, PackedRows


class FusedCoreAttention(PackedCoreAttention):
    """Core attention of `PackedCoreAttention`'s kind that lets Transformer Engine do the work."""

    pads_values = True

    def __init__(self, config, layer_number, softmax_scale, pg_collection, **rest):
        # Here, because without Transformer Engine the name is a stand-in of Megatron-Core's.
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config, layer_number, softmax_scale, pg_collection)
        self.kernel = TEDotProductAttention(
            config,
            layer_number,
            AttnMaskType.padding_causal,
            rest["attention_type"],
            softmax_scale=softmax_scale,
            # Its attention builds one for other architectures first, without widths, and drops it.
            k_channels=rest.get("k_channels"),
            v_channels=rest.get("k_channels"),  # it pads the values of packed rows
            cp_comm_type=rest["cp_comm_type"],
            pg_collection=pg_collection,
        )

    def prepare(self, rows: PackedRows, device: torch.device) -> PackedSeqParams:
        """Return the rows as the kernel takes them."""
        return kernel_rows(rows.documents, device)

    def attend(
        self, q_TND: Tensor, k_RND: Tensor, v_RNV: Tensor, prepared: PackedSeqParams
    ) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, heads * v dim] and the largest logits [heads of this rank]."""
        mask = AttnMaskType.padding_causal
        out = self.kernel(q_TND, k_RND, v_RNV, None, mask, packed_seq_params=prepared)
        # The kernel's own memory would keep growing through evaluations; ours is in the base class.
        max_N, self.kernel.current_max_attn_logits = self.kernel.current_max_attn_logits, None
        return out, max_N.float()


def kernel_rows(documents: tuple[list[int], list[int]], device: torch.device) -> PackedSeqParams:
    """Return the borders of documents as Transformer Engine takes them.

    Args:
        documents: from `document_borders`.
        device: of the attention.
    """
    ends, begins = documents
    longest = max(end - start for start, end in zip(ends[:-1], ends[1:]))
    # Each size is a kernel to build: a power of two leaves a handful over a run.
    size = 1 << max(longest - 1, 0).bit_length()
    borders, room = (torch.tensor(places, dtype=torch.int32, device=device) for places in documents)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=borders,
        cu_seqlens_kv=borders,
        cu_seqlens_q_padded=room,
        cu_seqlens_kv_padded=room,
        max_seqlen_q=size,
        max_seqlen_kv=size,
        # Said rather than left to be found: that would wait for the device, and miss padding that
        # is at the end of the row alone.
        pad_between_seqs=ends != begins,
    )
