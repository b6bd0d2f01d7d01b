"""Core attention with Transformer Engine's fused kernels (`train.attention: transformer_engine`).

The kernel is Megatron-Core's `TEDotProductAttention` with `return_max_logit`, which returns the
largest logit of each head without a second pass over the keys. Megatron-Core's own QK-Clip stays
off; only its switch that records the maxima is set.

Properties of the kernel, according to the sources of Megatron-Core 0.19.2 and Transformer Engine
2.20:

- It takes packed rows as documents followed by padding (`document_borders`). Before version 2.14,
  the maxima included the uninitialised memory of that padding.
- It needs fp16 or bf16, and cuDNN 9.21. With an older cuDNN, only the unfused attention returns
  maxima; it materialises whole logit matrices and rejects rows with padding
  (`kimi_pretrain.attention.choice` refuses all this before a run).
- It needs values as wide as queries; Megatron-Core pads the values and cuts the output. On Hopper
  it would accept narrower values, which has not been run.
- It rounds maxima to the dtype of the output. In bf16, values near 100 have steps of one half, so a
  head may be clipped from 99.75 on, or stay unclipped up to 100.25 for one step.

This code has not been run, for lack of a machine with Transformer Engine; docs/MUONCLIP.md lists
what is tested.
"""

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from kimi_pretrain.engine.packed_attention import PackedCoreAttention, PackedRows


class FusedCoreAttention(PackedCoreAttention):
    """Core attention that calls Transformer Engine."""

    pads_values = True

    def __init__(self, config, layer_number, softmax_scale, pg_collection, **rest):
        # Imported here, because without Transformer Engine Megatron-Core defines only a stub.
        from megatron.core.extensions.transformer_engine import TEDotProductAttention

        super().__init__(config, layer_number, softmax_scale, pg_collection)
        self.kernel = TEDotProductAttention(
            config,
            layer_number,
            AttnMaskType.padding_causal,
            rest["attention_type"],
            softmax_scale=softmax_scale,
            # MLA first builds a core attention without widths, which it then discards.
            k_channels=rest.get("k_channels"),
            v_channels=rest.get("k_channels"),  # Megatron-Core pads the values of packed rows
            cp_comm_type=rest["cp_comm_type"],
            pg_collection=pg_collection,
        )

    def prepare(self, rows: PackedRows, device: torch.device) -> PackedSeqParams:
        """Return the rows in the kernel's format."""
        return kernel_rows(rows.documents, device)

    def attend(
        self, q_TND: Tensor, k_RND: Tensor, v_RNV: Tensor, prepared: PackedSeqParams
    ) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, heads * v dim] and the largest logits [heads of this rank]."""
        mask = AttnMaskType.padding_causal
        out = self.kernel(q_TND, k_RND, v_RNV, None, mask, packed_seq_params=prepared)
        # The base class records maxima; the kernel's own record would also include evaluations.
        max_N, self.kernel.current_max_attn_logits = self.kernel.current_max_attn_logits, None
        return out, max_N.float()


def kernel_rows(documents: tuple[list[int], list[int]], device: torch.device) -> PackedSeqParams:
    """Return document borders in Transformer Engine's format.

    Args:
        documents: from `document_borders`.
        device: device of the attention.
    """
    ends, begins = documents
    longest = max(end - start for start, end in zip(ends[:-1], ends[1:]))
    # Each size compiles another kernel; powers of two keep this to a handful per run.
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
        # Set explicitly: the kernel's own check would synchronise with the device and would miss
        # padding that is only at the end of the row.
        pad_between_seqs=ends != begins,
    )
