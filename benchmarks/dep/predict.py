"""Predicts step times with the cost model, from calibration and timing in the same run. Pure.

    text only    as measured; the computing seconds of each stage are measured too
    co-located   each microbatch adds a forward and a backward of its media to the first stage; the
                 later stage waits according to the schedule (1F1B, `dep.timeline`)
    DEP          text only + the slowest rank's two forwards and a backward

The prediction assumes that exchanges, sums and plans take no time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kimi_pretrain.dep.cost import CostModel
from kimi_pretrain.dep.timeline import Schedule, timeline
from moonvit3d.packing import chunks
from moonvit3d.rows import BLOCK

BACKWARD = 2 / 3  # share of the backbone's computing in a step


@dataclass(frozen=True)
class Encoder:
    """Calibrated encoder of one rank, which computes with one thread.

    Attributes:
        cost: seconds of items: forward, recompute and backward.
        per_chunk: seconds to start a chunk.
        forward_share: share of one forward pass.
        budget: maximum patches of a chunk.
    """

    cost: CostModel
    per_chunk: float
    forward_share: float
    budget: int

    def seconds(self, patches: Sequence[int]) -> float:
        """Return the seconds of two forwards and a backward over items in this order."""
        total = 0.0
        for run in chunks(patches, self.budget):
            mine = np.array(patches[run], dtype=np.int64)
            filled = -int(mine.sum()) % BLOCK  # the kernels process whole blocks of rows
            total += float(self.cost.seconds(mine).sum()) + filled * self.cost.per_patch
            total += self.per_chunk
        return total


@dataclass(frozen=True)
class Backbone:
    """Pipeline of one replica.

    Attributes:
        stage_seconds: computing seconds of each stage in a text-only step.
        microbatches: microbatches of a step.
    """

    stage_seconds: Sequence[float]
    microbatches: int

    def seconds(self, media: Sequence[tuple[float, float]] = ()) -> float:
        """Return the seconds of the schedule.

        Args:
            media: extra (forward, backward) seconds of the first stage for each microbatch;
                microbatches beyond the list have no media.
        """
        schedule = Schedule(len(self.stage_seconds), 1, self.microbatches)
        each = np.array(self.stage_seconds)[:, None] / self.microbatches
        passes = np.repeat([each * (1 - BACKWARD), each * BACKWARD], self.microbatches, axis=2)
        passes[:, 0, : len(media)] += np.array(media).reshape(-1, 2).T
        return timeline(schedule, *passes).total


def added(
    work: Mapping[str, Any], encoder: Encoder, backbone: Backbone, colocated: str
) -> dict[str, float]:
    """Return the predicted extra seconds of each variant's step over a text-only step.

    Args:
        work: work of a round, see `timing`: patches by rank of each variant, and by microbatch.
        colocated: variant that encodes in the pipeline; all others encode outside it.
    """
    found = {
        name: max(encoder.seconds(patches) for patches in ranks)
        for name, ranks in work["encoded"].items()
    }
    media = inside(work, encoder)
    return found | {colocated: backbone.seconds(media) - backbone.seconds()}


def inside(work: Mapping[str, Any], encoder: Encoder) -> list[tuple[float, float]]:
    """Return the (forward, backward) seconds of each microbatch's media inside the graph."""
    share = encoder.forward_share
    whole = [encoder.seconds(patches) for patches in work["microbatches"]]
    return [(seconds * share, seconds * (1 - 2 * share)) for seconds in whole]


def undisturbed(
    busy: Sequence[Mapping[str, float]],
    microbatches: int,
    phase: str,
    media: Sequence[tuple[float, float]] = (),
    text_only: float = 0.0,
) -> float:
    """Return the seconds of a step whose ranks get a core whenever they are ready.

    Every phase takes as long as the rank that computes most in it; the backbone follows its
    schedule. This is the step time on a quiet machine, provided that computing takes equally long
    there.

    Args:
        busy: computing seconds by phase, for the rank of each stage.
        microbatches: microbatches of the step.
        phase: name of the backbone phase.
        media: predicted seconds inside the graph; only their proportions matter.
        text_only: computing seconds of the first stage in `phase` without media.
    """
    stages = [rank[phase] for rank in busy]
    if total := sum(map(sum, media)):
        extra = stages[0] - text_only
        media = [(forward * extra / total, backward * extra / total) for forward, backward in media]
        stages[0] = text_only
    others = dict.fromkeys(name for rank in busy for name in rank if name != phase)
    return Backbone(stages, microbatches).seconds(media) + sum(
        max(rank.get(name, 0.0) for rank in busy) for name in others
    )
