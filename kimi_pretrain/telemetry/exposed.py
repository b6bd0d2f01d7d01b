"""Exposed encoder time: what a step would save if it had no encoder.

The backbone starts when the hand-over has brought the embeddings, on all ranks at about the same
time; had there been no encoder, it could have started when the last rank came to phase 2. So the
exposed part of the forward is the common end minus the latest start: the shortest, over the ranks,
of their own times from the start of phase 2 to the end of phase 3. Each rank reads its own clock
twice, so clocks of machines are never compared. The same from phase 5 to the end of the gradient
sum. The exchange and the waiting for slower encoders are in it; time in which a rank waits for
others anyway (late data, another stage) is not.
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
    """The two stretches of a step that are the encoder's alone.

    Attributes:
        forward, backward: (start, end) in seconds of the wall clock of the rank that was the last
            to start; None where the step had no such phases.
    """

    forward: Span | None
    backward: Span | None

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each; 0.0 for none."""
        both = {"forward": self.forward, "backward": self.backward}
        return {name: span[1] - span[0] if span else 0.0 for name, span in both.items()}


def exposed(everyone: Sequence[Spans], scopes: Iterable[NDArray[np.int64]] = ()) -> Exposed:
    """Return the exposed encoder time of a step.

    Args:
        scopes: the ranks of each group that shares its media; a hand-over ends for one group
            alone, and the step waits for the slowest. Default: all ranks together.
    """
    groups = [ranks.tolist() for ranks in scopes] or [list(range(len(everyone)))]
    forwards = [_shortest([everyone[rank] for rank in ranks], *FORWARD) for ranks in groups]
    # The gradient is summed over all ranks, whatever the scope.
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
