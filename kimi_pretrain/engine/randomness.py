"""Seeds the RNG from (seed, step, rank coordinates), so that no RNG state has to be saved.

No part of a step draws random numbers today. If a part does, for example dropout, an interrupted
run draws the same numbers as an uninterrupted one, because every step seeds every generator.
"""

import hashlib
import random

import numpy as np
import torch
from megatron.core import tensor_parallel

from kimi_pretrain.engine.mesh import Mesh


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Seed all generators of this process for a step.

    Tensor-parallel ranks draw equal numbers for replicated tensors, and Megatron-Core's RNG tracker
    gives each rank different numbers for sliced tensors. All other ranks draw different numbers.

    Args:
        seed: `train.seed`.
        step: number of steps completed before this one.
        mesh: mesh with the coordinates of this rank.
    """
    place = f"{mesh.stage} {mesh.replica} {mesh.cp_rank}"
    digest = hashlib.sha256(f"{seed} step {step} {place}".encode()).digest()
    key = int.from_bytes(digest[:4], "big")  # the tracker adds to it, and torch takes 64 bits
    tensor_parallel.model_parallel_cuda_manual_seed(key)
    torch.manual_seed(key)  # also seeds the device
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002 (libraries draw from it)
