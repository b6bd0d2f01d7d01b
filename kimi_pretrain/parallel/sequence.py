"""Maps the tokens of a microbatch to the ranks of a stage that share them.

A microbatch is one row of tokens (its rows, concatenated). Under context parallelism the row is cut
into 2 * cp equal chunks, and rank r holds chunks r and 2 * cp - 1 - r, in this order. The work of a
causal token grows with its position, so a low and a high chunk together cost every rank the same.
Sequence parallelism then cuts the tokens of a context-parallel rank into tp contiguous runs.

A part is the set of tokens that one rank holds, number cp_rank * tp + tp_rank. A granule is the
longest run length such that each granule of the row is contiguous in a single part.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SequenceParts:
    """Distribution of a row over the ranks of a stage that share it.

    Attributes:
        tokens: number of tokens of the row.

    Raises:
        ValueError: the row does not divide into equal chunks and runs.
    """

    tokens: int
    num_cp: int = 1
    num_tp: int = 1

    def __post_init__(self) -> None:
        if self.tokens % self.num_chunks or self.tokens % self.num_parts:
            raise ValueError(
                f"a microbatch of {self.tokens} tokens does not divide into {self.num_chunks} "
                f"chunks and {self.num_parts} parts (layout.cp={self.num_cp}, "
                f"layout.tp={self.num_tp})"
            )

    @property
    def num_parts(self) -> int:
        """Number of ranks of a stage that share the row."""
        return self.num_cp * self.num_tp

    @property
    def num_chunks(self) -> int:
        """Number of chunks that the row is cut into for the context-parallel ranks."""
        return 2 * self.num_cp if self.num_cp > 1 else 1

    @property
    def granule(self) -> int:
        """Tokens per granule; the whole row if a single rank holds it."""
        return math.gcd(self.tokens // self.num_chunks, self.tokens // self.num_parts)

    def runs_cp(self, cp_rank: int) -> list[tuple[int, int]]:
        """Return the runs [begin, end) of the row that a cp rank holds, in its order."""
        size = self.tokens // self.num_chunks
        chunks = [0] if self.num_cp == 1 else [cp_rank, self.num_chunks - 1 - cp_rank]
        return [(chunk * size, (chunk + 1) * size) for chunk in chunks]

    def positions_cp(self, cp_rank: int) -> NDArray[np.int64]:
        """Return the row positions of a cp rank's tokens, in its order, [tokens / num_cp]."""
        return np.concatenate([np.arange(*run) for run in self.runs_cp(cp_rank)])

    def gathered(self) -> NDArray[np.int64]:
        """Return the index of each token of the row after its parts are gathered, int64 [tokens].

        The gather runs first over the context-parallel ranks, then over the tensor-parallel ranks,
        so that each tensor-parallel rank transfers only its share over the longer distance.
        """
        order = [cp * self.num_tp + tp for tp in range(self.num_tp) for cp in range(self.num_cp)]
        return np.argsort(np.concatenate([self.positions(part) for part in order]))

    def positions(self, part: int) -> NDArray[np.int64]:
        """Return the row positions of a part's tokens, in its order, [tokens / num_parts]."""
        cp_rank, tp_rank = divmod(part, self.num_tp)
        return self.positions_cp(cp_rank).reshape(self.num_tp, -1)[tp_rank]

    @cached_property
    def holder(self) -> NDArray[np.int64]:
        """Part that holds each granule of the row, in row order, int64 [granules]."""
        return self._held[0]

    @cached_property
    def offset(self) -> NDArray[np.int64]:
        """Begin of each granule inside its part, in tokens, int64 [granules]."""
        return self._held[1]

    @cached_property
    def _held(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        holder = np.empty(self.tokens // self.granule, dtype=np.int64)
        offset = np.empty_like(holder)
        for part in range(self.num_parts):
            begins = self.positions(part)[:: self.granule]
            holder[begins // self.granule] = part
            offset[begins // self.granule] = np.arange(len(begins)) * self.granule
        return holder, offset
