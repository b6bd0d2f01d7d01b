"""Chance in a step is a function of (seed, step, where a rank stands): nothing random is saved.

Nothing in a step draws today. A part that does, dropout for example, gets the same numbers in a run
that was interrupted as in one that was not, because every generator starts anew at every step.
"""

import hashlib
import random

import numpy as np
import torch
from megatron.core import tensor_parallel

from kimi_pretrain.engine.mesh import Mesh


def seed_step(seed: int, step: int, mesh: Mesh) -> None:
    """Start all generators of this process anew for a step.

    Tensor-parallel ranks share the numbers of what they hold in common, and Megatron-Core's
    tracker gives each its own for what they cut. All other ranks differ.

    Args:
        seed: `train.seed`.
        step: steps done before.
        mesh: where this rank stands.
    """
    place = f"{mesh.stage} {mesh.replica} {mesh.cp_rank}"
    digest = hashlib.sha256(f"{seed} step {step} {place}".encode()).digest()
    key = int.from_bytes(digest[:4], "big")  # the tracker adds to it, and torch takes 64 bits
    tensor_parallel.model_parallel_cuda_manual_seed(key)
    torch.manual_seed(key)  # the device's as well
    random.seed(key)
    np.random.seed(key)  # noqa: NPY002 (libraries draw from it)
