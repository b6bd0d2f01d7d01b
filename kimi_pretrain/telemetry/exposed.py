"""Exposed encoder time: the time that a step would save without an encoder.

The backbone starts when the hand-over has delivered the embeddings, on all ranks at about the same
time. Without an encoder, it could have started when the last rank reached phase 2. The exposed part
of the forward pass is therefore the common end minus the latest start, which equals the minimum
over the ranks of the time from the start of phase 2 to the end of phase 3. Each rank only compares
times of its own clock. The exposed backward part is the same from phase 5 to the end of the
gradient sum. Both include the exchange and the wait for slower encoders, but no time in which a
rank waits for another reason (late data, another stage).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kimi_pretrain.telemetry.phases import Span, Spans, first_start, last_end

FORWARD = ("2 vision forward", "3 hand-over")
BACKWARD = ("5 hand-back", "6 gradient sum")


@dataclass(frozen=True)
class Exposed:
    """The two intervals of a step in which only the encoder makes progress.

    Attributes:
        forward, backward: (start, end) in seconds of the wall clock of the rank that started last;
            None if the step has no such phases.
    """

    forward: Span | None
    backward: Span | None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each interval; 0.0 if there is none."""
        both = {"forward": self.forward, "backward": self.backward}
        return {name: span[1] - span[0] if span else 0.0 for name, span in both.items()}


def exposed(everyone: Sequence[Spans], scopes: Iterable[NDArray[np.int64]] = ()) -> Exposed:
    """Return the exposed encoder time of a step.

    Args:
        everyone: spans of all ranks.
        scopes: the ranks of each group that shares its media; a hand-over ends separately for each
            group, and the step waits for the slowest. Default: one group of all ranks.
    """
    groups = [ranks.tolist() for ranks in scopes] or [list(range(len(everyone)))]
    forwards = [_shortest([everyone[rank] for rank in ranks], *FORWARD) for ranks in groups]
    # The gradient is summed over all ranks for any scope.
    return Exposed(
        forward=max((span for span in forwards if span), key=_seconds, default=None),
        backward=_shortest(everyone, *BACKWARD),
    )


def _shortest(everyone: Sequence[Spans], first: str, last: str) -> Span | None:
    found: list[Span] = []
    for spans in everyone:
        start, end = first_start(spans, first), last_end(spans, last)
        if start is not None and end is not None:
            found.append((start, end))
    return min(found, key=_seconds, default=None)


def _seconds(span: Span) -> float:
    return span[1] - span[0]
