"""Time costs of the memory settings for a pass: recompute, FP8 storage, offload. Pure.

Uses the sizes of the memory plan (`memory.kept`): tensors that are not kept are recomputed. The
time of matrix products follows from their operations at the rate of the passes. The time of norms,
SwiGLU and FP8 codes follows from the bytes that they read and write, at the speed of device memory.
Offload copies overlap with compute, and a pass waits only for copies that take longer.
"""

from collections import Counter

import numpy as np

from kimi_pretrain.config import Config
from kimi_pretrain.dep.pass_costs import Floats, chunk_parts, operation_seconds, up_projections
from kimi_pretrain.memory.kept import Tokens, layer_tensors
from kimi_pretrain.memory.plan import moved_bytes

NORMS, SWIGLU = "norms", "SwiGLU of "


def recompute_seconds(config: Config, memory: float) -> Floats:
    """Return the seconds that `train.recompute` adds to backward passes, float64 [virtual stages].

    Gathers for recomputed up-projections are counted with the other traffic (`text_passes`).

    Args:
        memory: device memory bandwidth for reads and writes, bytes/s.
    """
    kinds, parts = config.train.recompute, chunk_parts(config)
    found = np.zeros(len(parts))
    for column, dense in ((1, True), (2, False)):
        sizes = _plain_sizes(config, dense)
        seconds = 0.0
        if "norms" in kinds:  # one number read for each number written
            seconds += 2 * sizes[NORMS] / memory
        if "swiglu" in kinds:  # two numbers read for each number written
            swiglu = sum(size for kind, size in sizes.items() if kind.startswith(SWIGLU))
            seconds += 3 * swiglu / memory
        if "mla_up" in kinds:
            seconds += up_seconds(config)
        found += parts[:, column] * seconds
    return found


def up_seconds(config: Config) -> float:
    """Return the seconds of a layer's up-projections of queries, keys and values on a rank.

    If ranks share rows, only queries count: keys and values are recomputed in any case.
    """
    queries, keys = up_projections(config.model.language)
    weights = queries + (keys if config.layout.cp == 1 else 0)
    return 2.0 * weights * Tokens.of(config).cp / config.layout.tp * operation_seconds(config)


def storage_seconds(config: Config, memory: float) -> Floats:
    """Return the extra seconds of each pass under FP8 storage, float64 [virtual stages].

    The forward pass makes the codes and the backward pass reads them; both move as many bytes.

    Args:
        memory: device memory bandwidth for reads and writes, bytes/s.
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
    """Return the seconds that a pass's offloaded tensors take one way, float64 [virtual stages].

    Args:
        host: bandwidth between device and host, each way, bytes/s.
    """
    return np.array(moved_bytes(config), np.float64) / host


def _plain_sizes(config: Config, dense: bool) -> Counter[str]:
    train = config.train.replace(recompute=[], fp8_storage=False)
    return _sizes(config.replace(train=train), dense)


def _sizes(config: Config, dense: bool) -> Counter[str]:
    """Return kind -> bytes that a layer keeps per microbatch."""
    sizes = Counter[str]()
    for kept in layer_tensors(config, dense):
        sizes[kept.kind] += kept.size
    return sizes
