"""Sums losses by source and by position in the document, on the host. Pure.

    token of a microbatch -> cell: a source and a bin of positions     cells_of
    losses of a rank's tokens -> sums per cell                         summed
    sums of all ranks -> the means in a line of metrics                merged, by_source, ...

Each rank that computes losses sums those of its own tokens in fp64, in the order of its rows; the
sums are added in rank order. So they agree in every layout up to rounding, and bit for bit in a
repeated run. Training does not use them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_pipeline.plan.step_plan import GlobalPlan

# Width of the first bin; each later bin is as wide as all before it: 0-255, 256-511, 512-1023, ...
FIRST_BIN = 256


def bins_of(seq_len: int) -> list[tuple[int, int]]:
    """Return the [first, last] position of each bin of a document of at most `seq_len` tokens.

    The position of a loss is the number of tokens in its document before the predicted token.
    """
    starts = [0]
    while (start := max(FIRST_BIN, 2 * starts[-1])) < seq_len:
        starts.append(start)
    ends = [*(start - 1 for start in starts[1:]), seq_len - 1]
    return list(zip(starts, ends, strict=True))


def cells_of(plan: GlobalPlan, rows: range) -> NDArray[np.int32]:
    """Return the cell of the loss at every token of some rows, [rows, seq_len]; 0 at padding.

    A cell is source x bins + bin; the source is that of the token's sample.
    """
    table, seq_len = plan.samples, plan.seq_len
    bins = bins_of(seq_len)
    cells = np.zeros((len(rows), seq_len), np.int32)
    first, end = np.searchsorted(table.row, [rows.start, rows.stop])
    length = table.length[first:end].astype(np.int64)
    inside = np.arange(length.sum()) - np.repeat(np.cumsum(length) - length, length)
    begin = (table.row[first:end].astype(np.int64) - rows.start) * seq_len + table.start[first:end]
    # The loss at a token is that of predicting the next token.
    which = np.searchsorted([start for start, _ in bins], inside + 1, side="right") - 1
    source = np.repeat(table.source[first:end].astype(np.int64), length)
    cells.reshape(-1)[np.repeat(begin, length) + inside] = source * len(bins) + which
    return cells


@dataclass(frozen=True, eq=False)
class LossSums:
    """Sums over the loss tokens of k cells, in ascending order.

    Attributes:
        cell: int64 [k].
        loss: fp64 [k], nats.
        tokens: int64 [k].
    """

    cell: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    loss: NDArray[np.float64] = field(default_factory=lambda: np.zeros(0))
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))


def summed(losses: NDArray[np.floating], cells: NDArray[np.int32]) -> LossSums:
    """Sum the losses of tokens [n] by their cells [n]; losses in cell -1 do not count."""
    counted = cells >= 0
    cells = cells[counted]
    tokens = np.bincount(cells)
    weights = losses[counted].astype(np.float64)
    loss: NDArray[np.float64] = np.bincount(cells, weights).astype(np.float64)
    found = np.flatnonzero(tokens)
    return LossSums(found, loss[found], tokens[found])


@dataclass(frozen=True, eq=False)
class LossTable:
    """Losses of one or more global batches.

    Attributes:
        sources: names, in the order of their numbers.
        bins: [first, last] position of each.
        loss: fp64 [sources, bins], summed.
        tokens: int64 [sources, bins].
    """

    sources: tuple[str, ...]
    bins: Sequence[tuple[int, int]]
    loss: NDArray[np.float64]
    tokens: NDArray[np.int64]

    def by_source(self) -> dict[str, float | None]:
        """Return the mean loss of each source; None if none of its tokens was trained on."""
        return self._means(self.sources, 1)

    def by_position(self) -> dict[str, float | None]:
        """Return the mean loss of each bin, "256-511" -> nats; None for an empty bin."""
        return self._means(self._bin_names, 0)

    def by_both(self) -> dict[str, dict[str, float | None]]:
        """Return source -> bin -> mean loss, for the bins that have tokens."""
        found = {}
        for name, loss, tokens in zip(self.sources, self.loss, self.tokens, strict=True):
            means = _means(self._bin_names, loss, tokens)
            found[name] = {bin: mean for bin, mean in means.items() if mean is not None}
        return found

    def as_line(self) -> dict[str, Mapping[str, Any]]:
        """Return the means by source and by position, with their numbers of tokens, for a line."""
        counts = dict(zip(self.sources, self.tokens.sum(1).tolist(), strict=True))
        places = dict(zip(self._bin_names, self.tokens.sum(0).tolist(), strict=True))
        return {
            "loss_by_source": self.by_source(),
            "loss_tokens_by_source": counts,
            "loss_by_position": self.by_position(),
            "loss_tokens_by_position": places,
        }

    @property
    def _bin_names(self) -> list[str]:
        return [f"{first}-{last}" for first, last in self.bins]

    def _means(self, names: Sequence[str], axis: int) -> dict[str, float | None]:
        return _means(names, self.loss.sum(axis), self.tokens.sum(axis))


def merged(everyone: Iterable[LossSums], sources: Sequence[str], seq_len: int) -> LossTable:
    """Add the sums of all ranks, in rank order."""
    bins = bins_of(seq_len)
    loss = np.zeros(len(sources) * len(bins))
    tokens = np.zeros(loss.size, np.int64)
    for one in everyone:
        loss[one.cell] += one.loss
        tokens[one.cell] += one.tokens
    shape = len(sources), len(bins)
    return LossTable(tuple(sources), bins, loss.reshape(shape), tokens.reshape(shape))


def _means(
    names: Sequence[str], loss: NDArray[np.float64], tokens: NDArray[np.int64]
) -> dict[str, float | None]:
    pairs = zip(names, loss.tolist(), tokens.tolist(), strict=True)
    return {name: total / number if number else None for name, total, number in pairs}
