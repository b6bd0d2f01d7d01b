"""Which keys each query of a rank sees: causal attention inside packed documents, as two numbers.

A query sees the keys of its own segment up to its own place: one run of the row. Under context
parallelism a rank's queries are those of its own tokens, its keys and values those of the whole
row, in the row's order.

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
    """For each query the run of keys that it sees.

    Attributes:
        first_Q, last_Q: of these keys, both included, places in the row, int64; `last_Q` is the
            query's own place.
        counted_Q: whether it belongs to a document, not to the padding at the end of a row; bool.
        num_keys: tokens of the row.
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
        """Build from segment borders.

        Args:
            cu_seqlens: segment borders in the row, from 0 to the number of tokens.
            is_document: for each segment, False for the padding at the end of a row.
            shared: which context-parallel rank holds which tokens; by default one holds all.
            cp_rank: this one.
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
    """Return the largest logit of each head over the queries that count, [heads]; -inf of none.

    Args:
        max_NQ: largest logit of each head and query, [heads, queries].
        counted_Q: bool [queries].
    """
    return max_NQ.masked_fill(~counted_Q, float("-inf")).amax(1)
