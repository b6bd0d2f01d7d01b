"""Causal attention inside packed documents, and the largest logit of each head.

Plain torch, for hosts and for GPUs without Transformer Engine; handed to Megatron-Core through its
layer spec. The maxima feed QK-Clip (K2 report, section 2.1) and come from the same logits, without
a second pass over the keys. Documents of similar length are padded to a power of two and computed
together: one row holds dozens of short documents, and one call each would be mostly overhead.

Under context parallelism a rank's queries are those of its own tokens, its keys and values those of
the whole row, gathered. Of a document that begins before the rank's tokens do, the keys reach
further back than the queries; keys behind the last query are not looked at.

Shape suffixes: T tokens of this rank, R tokens of the row, N heads, D query/key width, V value
width, S segments of one batch, L padded number of queries, K padded number of keys.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
from einops import rearrange, repeat
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from kimi_pretrain.parallel.sequence import SequenceParts


@dataclass(frozen=True)
class SegmentBatch:
    """Segments, as far as this rank holds them, of similar numbers of queries and keys.

    Attributes:
        queries_SL: place of each query among this rank's tokens; padding points at token 0.
        inside_SL: whether it is a token of the segment, not padding.
        keys_SK: place of each key among the gathered keys; padding points at key 0.
        ahead_S: keys of the segment before its first query here.
        counted_S: whether the segment is a document (not the padding at the end of a row).
    """

    queries_SL: Tensor
    inside_SL: Tensor
    keys_SK: Tensor
    ahead_S: Tensor
    counted_S: Tensor


@dataclass(frozen=True)
class _Piece:
    """What a rank holds of one segment: queries [begin, end) of the row, keys from `start` on.

    `place` is that of its first query among the rank's tokens.
    """

    start: int
    begin: int
    end: int
    place: int
    document: bool

    @property
    def padded(self) -> tuple[int, int]:
        """Queries and keys, each rounded up to a power of two."""
        sizes = self.end - self.begin, self.end - self.start
        queries, keys = (max(8, 1 << (size - 1).bit_length()) for size in sizes)
        return queries, keys


def segment_batches(
    cu_seqlens: list[int],
    is_document: list[bool],
    device: torch.device,
    shared: SequenceParts | None = None,
    cp_rank: int = 0,
) -> list[SegmentBatch]:
    """Group segments by padded length.

    Args:
        cu_seqlens: segment borders in the row, from 0 to the number of tokens.
        is_document: for each segment, False for the padding at the end of a row.
        shared: which context-parallel rank holds which tokens; by default one holds all.
        cp_rank: this one.
    """
    shared = shared or SequenceParts(cu_seqlens[-1])
    by_length: dict[tuple[int, int], list[_Piece]] = {}
    place = 0
    for first, last in shared.runs_cp(cp_rank):
        for start, stop, document in zip(cu_seqlens[:-1], cu_seqlens[1:], is_document, strict=True):
            begin, end = max(start, first), min(stop, last)
            if end > begin:
                piece = _Piece(start, begin, end, place + begin - first, document)
                by_length.setdefault(piece.padded, []).append(piece)
        place += last - first
    gathered = torch.from_numpy(shared.gathered_cp())
    return [
        _segment_batch(padded, by_length[padded], gathered, device) for padded in sorted(by_length)
    ]


def _segment_batch(
    padded: tuple[int, int], pieces: list[_Piece], gathered_R: Tensor, device: torch.device
) -> SegmentBatch:
    start, begin, end, place, document = (
        torch.tensor([getattr(piece, name) for piece in pieces])
        for name in ("start", "begin", "end", "place", "document")
    )
    queries_SL, inside_SL = _padded(place, end - begin, padded[0])
    keys_SK, _ = _padded(start, end - start, padded[1])
    return SegmentBatch(
        queries_SL.to(device),
        inside_SL.to(device),
        gathered_R[keys_SK].to(device),
        (begin - start).to(device),
        document.to(device),
    )


def _padded(first_S: Tensor, length_S: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Return first, first + 1, ... for each segment, 0 behind its length; and what is inside."""
    count_L = torch.arange(padded)
    inside_SL = count_L < length_S[:, None]
    return (first_S[:, None] + count_L).masked_fill(~inside_SL, 0), inside_SL


def packed_attention(
    q_TND: Tensor, k_RND: Tensor, v_RNV: Tensor, batches: list[SegmentBatch], scale: float
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention inside each segment.

    Args:
        q_TND: [this rank's tokens, heads, qk dim].
        k_RND, v_RNV: [tokens of the row, heads, qk dim or v dim], as gathered: the tokens of all
            context-parallel ranks, one rank's after the other's.
        batches: from `segment_batches`; together they cover every token of this rank once.
        scale: of the logits, before the softmax.

    Returns:
        output [this rank's tokens, heads, v dim] and the largest softmax input of each head over
        all valid pairs of documents, fp32 (fp64 for fp64 inputs) [heads]; -inf where there is no
        document.
    """
    wide = torch.float64 if q_TND.dtype == torch.float64 else torch.float32
    max_N = q_TND.new_full((q_TND.shape[1],), float("-inf"), dtype=wide)
    rows, tokens = [], []
    for batch in batches:
        flat, keys = batch.queries_SL.flatten(), batch.keys_SK.flatten()
        shape = {"S": batch.queries_SL.shape[0]}
        q, k, v = (
            rearrange(x.index_select(0, places), "(S L) N D -> S N L D", **shape)
            for x, places in ((q_TND, flat), (k_RND, keys), (v_RNV, keys))
        )
        # In fp32 throughout: rounded to bf16, logits near QK-Clip's threshold of 100 come in steps
        # of a half.
        logits = (q.to(wide) @ k.to(wide).transpose(-1, -2)) * scale
        logits = logits.masked_fill(_future(batch), float("-inf"))
        counted = repeat(batch.inside_SL & batch.counted_S[:, None], "S L -> S 1 L 1")
        seen = logits.detach().masked_fill(~counted, float("-inf"))
        max_N = torch.maximum(max_N, seen.amax(dim=(0, 2, 3)))
        out = logits.softmax(-1).to(v.dtype) @ v
        inside = batch.inside_SL.flatten()
        rows.append(rearrange(out, "S N L V -> (S L) N V")[inside])
        tokens.append(flat[inside])
    order = torch.cat(tokens).argsort()
    return torch.cat(rows).index_select(0, order), max_N


def _future(batch: SegmentBatch) -> Tensor:
    """Return which keys lie behind a query, bool [S, 1, L, K].

    Padding is at the end, so a token of the segment never looks at it: causal is enough.
    """
    query_L = torch.arange(batch.queries_SL.shape[1], device=batch.ahead_S.device)
    key_K = torch.arange(batch.keys_SK.shape[1], device=batch.ahead_S.device)
    future_SLK = key_K > (batch.ahead_S[:, None] + query_L)[:, :, None]
    return rearrange(future_SLK, "S L K -> S 1 L K")


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
        batches: segments grouped for `packed_attention`.
        positions: of each token of the row, for its rotary angle, int64 [tokens].
        num_positions: one more than the largest of them.
        documents: the borders of the documents, for kernels that want these; see
            `document_borders`.
        kernel: the same as such a kernel takes it, once one has asked.
    """

    batches: list[SegmentBatch] | None = None
    positions: Tensor | None = None
    num_positions: int = 0
    documents: tuple[list[int], list[int]] = field(default_factory=lambda: ([0], [0]))
    kernel: PackedSeqParams | None = None

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
        """Build from segment borders; see `segment_batches`.

        Positions begin at 0 in every segment unless they are given, int64 [tokens].
        """
        if positions is None:
            lengths = zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)
            positions = torch.cat([torch.arange(end - start) for start, end in lengths])
        # Megatron-Core needs borders only to rotate. Every token has an angle of its own, so the
        # row is one sequence to it, and what it takes for a context-parallel rank are the chunks
        # of `SequenceParts`.
        row = torch.tensor([0, cu_seqlens[-1]], dtype=torch.int32, device=device)
        return cls(
            qkv_format="thd",
            cu_seqlens_q=row,
            cu_seqlens_kv=row,
            max_seqlen_q=cu_seqlens[-1],
            max_seqlen_kv=cu_seqlens[-1],
            batches=segment_batches(cu_seqlens, is_document, device, shared, cp_rank),
            positions=positions.to(device),
            num_positions=int(positions.max()) + 1,
            documents=document_borders(cu_seqlens, is_document),
        )


def document_borders(cu_seqlens: list[int], is_document: list[bool]) -> tuple[list[int], list[int]]:
    """Return documents in the form of fused kernels: without padding, and with it.

    Padding is room behind the document before it, so that no kernel attends in it or counts its
    logits. Padding that no document precedes is room of a document without tokens.

    Args:
        cu_seqlens: segment borders in the row, from 0 to the number of tokens.
        is_document: for each segment, False for the padding at the end of a row.

    Returns:
        running sums of the documents' lengths, and the places where documents begin followed by
        the number of tokens; both one longer than there are documents.
    """
    begins: list[int] = []
    lengths: list[int] = []
    for start, end, document in zip(cu_seqlens[:-1], cu_seqlens[1:], is_document, strict=True):
        if document or not begins:
            begins.append(start)
            lengths.append(end - start if document else 0)
    return [0, *accumulate(lengths)], [*begins, cu_seqlens[-1]]


def of_all_heads(local_N: Tensor, num_heads: int, rank: int, ranks: int) -> Tensor:
    """Lay the maxima of one tensor-parallel rank's heads out among those of all heads.

    Args:
        local_N: [num_heads / ranks], of the heads of rank `rank`: a contiguous run.

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
    """Core attention for Megatron-Core's layer spec; remembers the maxima since the last `take`.

    Maxima are those of training: what an evaluation sees is no reason to change weights.
    Under context parallelism it gathers keys and values of the row; in the backward pass their
    gradients are summed over the ranks and scattered.
    """

    def __init__(self, config, layer_number, softmax_scale, pg_collection, **_):
        super().__init__(config=config)
        self.cp_group, self.tp_group = pg_collection.cp, pg_collection.tp
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale
        self._max_N: Tensor | None = None

    def forward(
        self, query, key, value, attention_mask, attn_mask_type=None, packed_seq_params=None, **_
    ):
        """Return [tokens, heads * v dim] for packed query, key, value [tokens, heads, dim]."""
        if self.cp_group.size() > 1:
            key, value = (
                gather_from_sequence_parallel_region(x, group=self.cp_group) for x in (key, value)
            )
        out, max_N = self.attend(query, key, value, packed_seq_params)
        if self.training:
            self._max_N = max_N if self._max_N is None else torch.maximum(self._max_N, max_N)
        return out

    def attend(
        self, q_TND: Tensor, k_RND: Tensor, v_RNV: Tensor, rows: PackedRows
    ) -> tuple[Tensor, Tensor]:
        """Return the output [tokens, heads * v dim] and the largest logits [heads of this rank]."""
        assert rows.batches is not None  # made by PackedRows.of
        out_TNV, max_N = packed_attention(q_TND, k_RND, v_RNV, rows.batches, self.softmax_scale)
        return rearrange(out_TNV, "t n v -> t (n v)"), max_N

    def take_max_logits(self) -> Tensor:
        """Return the largest logit of each head since the last call, and forget it; [heads].

        -inf for the heads of other tensor-parallel ranks, and for all before the first forward.
        """
        ranks, heads = self.tp_group.size(), self.config.num_attention_heads
        local_N, self._max_N = self._max_N, None
        if local_N is None:
            device = torch.cuda.current_device()
            local_N = torch.full((heads // ranks,), float("-inf"), device=device)
        return of_all_heads(local_N, heads, self.tp_group.rank(), ranks)
