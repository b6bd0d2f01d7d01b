"""Simulates the pipeline of the language model with text only."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.sim.assumptions import Assumptions
from kimi_pretrain.config import Config
from kimi_pretrain.dep.pass_costs import BACKWARD, chunk_flops
from kimi_pretrain.dep.timeline import Schedule, Timeline, timeline

Floats = NDArray[np.float64]

BYTES = 2  # bytes per number between stages: bfloat16


def text_seconds(
    config: Config,
    assumed: Assumptions,
    first_forward: Floats | None = None,
    first_backward: Floats | None = None,
) -> float:
    """Return the seconds of a step's pipeline.

    Args:
        first_forward, first_backward: extra seconds of virtual stage 0, [microbatches], for an
            encoder inside the graph.
    """
    return pipeline(config, assumed, None, first_forward, first_backward).line.total


@dataclass(frozen=True)
class Pipeline:
    """Pipeline of one replica with text only.

    Attributes:
        schedule: order of the passes.
        forward, backward: seconds of a pass, [virtual stages, microbatches].
        send: seconds to send from one stage to another.
        line: start and end times of the passes.
    """

    schedule: Schedule
    forward: Floats
    backward: Floats
    send: float
    line: Timeline


def pipeline(
    config: Config,
    assumed: Assumptions,
    chunks: int | None = None,
    first_forward: Floats | None = None,
    first_backward: Floats | None = None,
) -> Pipeline:
    """Return the pipeline of one replica; see `text_seconds`.

    Args:
        chunks: number of equal chunks per rank; None uses the chunks of the layout.
    """
    seconds = chunk_flops(config) / assumed.backbone_flops
    if assumed.equal_chunks or chunks:
        virtual = config.layout.pp * (chunks or config.layout.vpp)
        seconds = np.full(virtual, seconds.sum() / virtual)
    row_bytes = config.data.seq_len * config.model.language.hidden_size * BYTES
    send = config.train.rows_per_microbatch * row_bytes / assumed.network
    stages, count = config.layout.pp, config.num_microbatches()
    schedule = Schedule(stages, len(seconds) // stages, count)
    forward = np.repeat(seconds[:, None], count, axis=1)
    backward = BACKWARD * forward
    forward[0] += 0.0 if first_forward is None else first_forward
    backward[0] += 0.0 if first_backward is None else first_backward
    line = timeline(schedule, forward, backward, send)
    return Pipeline(schedule, forward, backward, send, line)
