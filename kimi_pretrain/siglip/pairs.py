"""Which samples of a step are pairs of an image and its caption, and what the caption says.

A pair is a sample with exactly one medium (an image, or a video of one chunk) and text behind it
that counts for the loss; that text is its caption, regions as they are written. It follows from the
rows, so samples that are skipped, whose loss is masked, are none. A pair is named by the number of
its item in the step, which rises with row and place.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from data_pipeline.plan.step_plan import GlobalPlan
from data_pipeline.text import Tokenizer


@dataclass
class Pairs:
    """The pairs of a step as one rank knows them, and what the loss comes to.

    Attributes:
        items: of all pairs of the step, rising, int64 [B].
        counts: how many captions each rank has, in the order of `items`; they add up to B.
        ids: this rank's captions, int64 [its count, positions].
        factor: of the summed loss, before everything is divided by the loss tokens.
        loss: the sum over this rank's images, once it is known, 0-d on the host's time.
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
    """Return the captions of some rows by the numbers of their items, rising.

    Args:
        rows: numbers of the rows in the step.
        tokens: of these rows, [rows, seq_len].
        counts: where the label, which is the next token, counts for the loss, [rows, seq_len].
        tokenizer: of the rows.
    """
    items, samples, found = plan.items, plan.samples, dict[int, str]()
    alone = np.bincount(items.sample, minlength=len(samples)) == 1
    here = (items.row >= rows.start) & (items.row < rows.stop)
    for item in np.flatnonzero(here & alone[items.sample]).tolist():
        sample, row = int(items.sample[item]), int(items.row[item]) - rows.start
        mark = int(items.start[item]) + int(items.tokens[item])  # the end of the medium
        last = int(samples.start[sample]) + int(samples.length[sample]) - 1  # of the sample
        said = tokens[row, mark + 1 : last][counts[row, mark : last - 1]]
        if text := tokenizer.decode(said.tolist()).strip():
            found[item] = text
    return found
