"""What settings of memory cost a pass in time: recompute, FP8 storage, host memory. Pure.

Sizes are those that the plan of memory counts (`memory.kept`): what is not kept is what is made
again. Products take their operations, at the rate of the passes; norms, SwiGLU and FP8 codes what
they read and write, at the speed of the device's memory; what waits in host memory goes there and
back beside the computing, and is waited for where it takes longer.
"""

from collections import Counter

import numpy as np

from kimi_pretrain.config import Config
from kimi_pretrain.dep.pass_costs import Floats, chunk_parts, operation_seconds, up_projections
from kimi_pretrain.memory.kept import Tokens, layer_tensors
from kimi_pretrain.memory.plan import moved_bytes

NORMS, SWIGLU = "norms", "SwiGLU of "


def recompute_seconds(config: Config, memory: float) -> Floats:
    """Return how much longer backward passes are by `train.recompute`, float64 [virtual stages].

    Gathers of what is projected up again are with the other traffic (`text_passes`).

    Args:
        memory: bytes a second that a device reads and writes.
    """
    kinds, parts = config.train.recompute, chunk_parts(config)
    found = np.zeros(len(parts))
    for column, dense in ((1, True), (2, False)):
        sizes = _plain_sizes(config, dense)
        seconds = 0.0
        if "norms" in kinds:  # one number is read for each that is written
            seconds += 2 * sizes[NORMS] / memory
        if "swiglu" in kinds:  # and here two
            swiglu = sum(size for kind, size in sizes.items() if kind.startswith(SWIGLU))
            seconds += 3 * swiglu / memory
        if "mla_up" in kinds:
            seconds += up_seconds(config)
        found += parts[:, column] * seconds
    return found


def up_seconds(config: Config) -> float:
    """Return the seconds of a layer's up-projections of queries, keys and values on a rank.

    Of a row that ranks share, of queries alone: its keys and values are made again anyway.
    """
    queries, keys = up_projections(config.model.language)
    weights = queries + (keys if config.layout.cp == 1 else 0)
    return 2.0 * weights * Tokens.of(config).cp / config.layout.tp * operation_seconds(config)


def storage_seconds(config: Config, memory: float) -> Floats:
    """Return how much longer passes are by FP8 storage, each way, float64 [virtual stages].

    Codes are made in the forward pass, and read in the backward pass: as many bytes either way.

    Args:
        memory: bytes a second that a device reads and writes.
    """
    parts = chunk_parts(config)
    if not config.train.fp8_storage:
        return np.zeros(len(parts))
    found = np.zeros(len(parts))
    for column, dense in ((1, True), (2, False)):
        plain = config.replace(train=config.train.replace(fp8_storage=False))
        wide, codes = (_sizes(some, dense) for some in (plain, config))
        squeezed = [kind for kind in wide if codes[kind] < wide[kind]]
        moved = sum(wide[kind] + codes[kind] for kind in squeezed)
        found += parts[:, column] * moved / memory
    return found


def host_seconds(config: Config, host: float) -> Floats:
    """Return how long what a pass has in host memory is on its way, float64 [virtual stages].

    Args:
        host: bytes a second between device and host, each way.
    """
    return np.array(moved_bytes(config), np.float64) / host


def _plain_sizes(config: Config, dense: bool) -> Counter[str]:
    train = config.train.replace(recompute=[], fp8_storage=False)
    return _sizes(config.replace(train=train), dense)


def _sizes(config: Config, dense: bool) -> Counter[str]:
    """Return kind -> bytes that a layer keeps of a microbatch."""
    sizes = Counter[str]()
    for kept in layer_tensors(config, dense):
        sizes[kept.kind] += kept.size
    return sizes
