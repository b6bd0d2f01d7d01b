"""Key spans: the first and last key that each query sees under causal attention in packed rows.

A query sees the keys of its own segment up to its own position: one contiguous run of the row.
Under context parallelism a rank has the queries of its own tokens, and the keys and values of the
whole row, in row order.

Shape suffixes: Q queries of this rank, R tokens of the row.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kimi_pretrain.parallel.sequence import SequenceParts


@dataclass(frozen=True)
class KeySpans:
    """The run of keys that each query sees.

    Attributes:
        first_Q, last_Q: positions of its first and last key in the row, inclusive, int64; `last_Q`
            is the query's own position.
        counted_Q: True if the query belongs to a document, False for padding at the end of a row;
            bool.
        num_keys: number of tokens in the row.
    """

    first_Q: NDArray[np.int64]
    last_Q: NDArray[np.int64]
    counted_Q: NDArray[np.bool_]
    num_keys: int

    @classmethod
    def of(
        cls,
        cu_seqlens: list[int],
        is_document: list[bool],
        shared: SequenceParts | None = None,
        cp_rank: int = 0,
    ) -> "KeySpans":
        """Return the spans for segment borders.

        Args:
            cu_seqlens: segment borders in the row, from 0 to the number of tokens.
            is_document: for each segment, False for the padding at the end of a row.
            shared: assignment of tokens to context-parallel ranks; by default one rank holds all.
            cp_rank: this context-parallel rank.
        """
        shared = shared or SequenceParts(cu_seqlens[-1])
        lengths, places_Q = np.diff(cu_seqlens), shared.positions_cp(cp_rank)
        first_R = np.repeat(np.asarray(cu_seqlens[:-1], dtype=np.int64), lengths)
        counted_R = np.repeat(np.asarray(is_document, dtype=np.bool_), lengths)
        return cls(first_R[places_Q], places_Q, counted_R[places_Q], cu_seqlens[-1])

    def counted(self, device: torch.device) -> Tensor:
        """Return `counted_Q` as a tensor, bool [queries]."""
        return torch.from_numpy(self.counted_Q).to(device)


def largest(max_NQ: Tensor, counted_Q: Tensor) -> Tensor:
    """Return the largest logit of each head over the counted queries, [heads]; -inf without any.

    Args:
        max_NQ: largest logit of each head and query, [heads, queries].
        counted_Q: bool [queries].
    """
    return max_NQ.masked_fill(~counted_Q, float("-inf")).amax(1)
