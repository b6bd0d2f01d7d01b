"""Finds the samples of a step that pair one item with a caption, and the text of the captions.

A pair is a sample with exactly one item (an image, or a video of one chunk) followed by text that
counts for the loss. This text, including region markup as written, is the caption. Pairs follow
from the rows, so skipped samples, whose loss is masked, are not pairs. The number of its item in
the step identifies a pair; it rises with row and position.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.plan.step_plan import GlobalPlan
from data_pipeline.text import Tokenizer


@dataclass
class Pairs:
    """Pairs of a step as seen by one rank, and their loss.

    Attributes:
        items: items of all pairs of the step, rising, int64 [B].
        counts: number of captions of each rank, in the order of `items`; the sum is B.
        ids: token ids of this rank's captions, int64 [its count, positions].
        factor: factor on the summed loss, before the division by the loss tokens.
        loss: sum over this rank's images, a 0-d tensor; None until it is computed.
    """

    items: NDArray[np.int64]
    counts: list[int]
    ids: Tensor
    factor: float
    loss: Tensor | None = field(default=None)


def captions(
    plan: GlobalPlan,
    rows: range,
    tokens: NDArray[np.int64],
    counts: NDArray[np.bool_],
    tokenizer: Tokenizer,
) -> dict[int, str]:
    """Return the captions of some rows as a mapping from item number to text, in rising order.

    Args:
        rows: numbers of the rows in the step.
        tokens: tokens of these rows, [rows, seq_len].
        counts: True where the label, the next token, counts for the loss, [rows, seq_len].
        tokenizer: tokenizer of the rows.
    """
    items, samples, found = plan.items, plan.samples, dict[int, str]()
    alone = np.bincount(items.sample, minlength=len(samples)) == 1
    here = (items.row >= rows.start) & (items.row < rows.stop)
    for item in np.flatnonzero(here & alone[items.sample]).tolist():
        sample, row = int(items.sample[item]), int(items.row[item]) - rows.start
        mark = int(items.start[item]) + int(items.tokens[item])  # end of the item
        last = int(samples.start[sample]) + int(samples.length[sample]) - 1  # end of the sample
        said = tokens[row, mark + 1 : last][counts[row, mark : last - 1]]
        if text := tokenizer.decode(said.tolist()).strip():
            found[item] = text
    return found
