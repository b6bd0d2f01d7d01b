"""Actions of worker.py that measure the bytes of persistent state and of the exchange."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.memory.live import PeakBytes

BUDGET = 1024  # bytes per send, so that every exchange takes several rounds


def states(run) -> list[dict[str, Any]]:
    """Take a step; return, per rank, its stage and the bytes of its state and checkpoint tensors.

    State bytes are those of all storages of weights, gradients and optimizer state.
    """
    backbone, encoder, optimizer = run.backbone, run.encoder, run.update.optimizer
    run.train_step.run(next(run.loader))
    parameters = [p for chunk in backbone.chunks for p in chunk.parameters()]
    buffers = [
        buffer.grad_data
        for model in backbone.models
        for buffer in (*model.buffers, *model.expert_parallel_buffers)
    ]
    wholes = backbone.full_params
    kinds = {
        "weights": [*parameters, *encoder.module.parameters(), *wholes.data.values()],
        "gradients": [*buffers, encoder.sums.buffer, *wholes.grads.values()],
        "optimizer": [
            part for tensor in run.update.named for part in optimizer.parts(tensor.name).values()
        ],
    }
    sizes = {kind: sum(_storages(tensors).values()) for kind, tensors in kinds.items()}
    saved = {name: tensor.nbytes for name, tensor in run.tensors().items()}
    return run.mesh.all_gather_object({"stage": run.mesh.stage, "saved": saved, **sizes})


def _storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    storages = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in storages}


def exchange(run) -> list[dict[str, int]]:
    """Return, per rank, the bytes it encodes and receives, the exchange peaks, and the leaf bytes.

    The peaks are those of the hand-over and the hand-back.
    """
    from kimi_pretrain.dep.leaves import attach_leaves
    from kimi_pretrain.engine.microbatch import build_microbatches

    batch, rank = next(run.loader), run.mesh.rank
    plan = run.planner.plan(batch.plan)
    width, exchange = run.config.model.vision.out_width, run.model.exchange
    exchange.budget_bytes = BUDGET
    embeddings = torch.zeros(int(plan.tokens_sent()[rank]), width, dtype=run.encoder.dtype)
    with PeakBytes() as over:
        received = exchange.hand_over(embeddings, plan, rank)
    with PeakBytes() as back:
        exchange.hand_back(received, plan, rank)
    rows, none = run.config.train.rows_per_microbatch, np.zeros(0, np.int64)
    microbatches = build_microbatches(batch, run.mesh, rows, none)
    taken = microbatches if run.mesh.is_first_stage else []
    attach_leaves(taken, received, plan.received_by(rank))
    leaves = _storages(one.leaf for one in taken if one.leaf is not None)
    return run.mesh.all_gather_object(
        {
            "stage": run.mesh.stage,
            "encoded": embeddings.nbytes,
            "received": received.nbytes,
            "over": over.peak,
            "back": back.peak,
            "leaves": sum(leaves.values()),
        }
    )


ACTIONS = {"states": states, "exchange": exchange}
