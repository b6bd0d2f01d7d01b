"""From a fetched step to the microbatches of this rank's replica.

The plan says where everything is; a rank that reads no text (a middle stage) still builds segment
borders and padding from it, because every stage attends inside documents.
"""

import numpy as np
import torch
from torch import Tensor

from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import GlobalPlan
from kimi_pretrain.dep.assign import VisionPlan
from kimi_pretrain.engine.attention import PackedRows
from kimi_pretrain.engine.backbone import Microbatch
from kimi_pretrain.engine.mesh import Mesh


def replica_rows(plan: GlobalPlan, mesh: Mesh) -> range:
    """Return the rows of a step that this rank's replica trains on: a contiguous run."""
    rows = plan.num_rows // mesh.num_replicas
    return range(mesh.replica * rows, (mesh.replica + 1) * rows)


def build_microbatches(
    batch: StepBatch,
    mesh: Mesh,
    per_microbatch: int,
    skipped: np.ndarray,
    restart_positions: bool = True,
) -> list[Microbatch]:
    """Return this replica's microbatches, without vision leaves.

    Args:
        batch: rows fetched for this rank (`batch.rows` is None on middle stages).
        per_microbatch: rows laid end to end in one microbatch.
        skipped: samples of the plan (their numbers) whose loss does not count.
        restart_positions: positions begin at 0 in every document, or in every row.
    """
    rows = replica_rows(batch.plan, mesh)
    starts = range(0, len(rows), per_microbatch)
    return [
        _microbatch(
            batch,
            rows[start : start + per_microbatch],
            start,
            mesh.device,
            skipped,
            restart_positions,
        )
        for start in starts
    ]


def _microbatch(
    batch: StepBatch,
    rows: range,
    first: int,
    device: torch.device,
    skipped: np.ndarray,
    restart_positions: bool,
) -> Microbatch:
    plan = batch.plan
    borders, documents = segments(plan, rows)
    padding = torch.zeros(1, len(rows) * plan.seq_len, dtype=torch.bool, device=device)
    for start, end, document in zip(borders[:-1], borders[1:], documents, strict=True):
        if not document:
            padding[0, start:end] = True
    positions = np.concatenate([plan.positions(row, restart_positions) for row in rows])
    packed = PackedRows.of(borders, documents, device, torch.from_numpy(positions))
    microbatch = Microbatch(packed, padding)
    if batch.rows is not None:
        local = slice(first, first + len(rows))
        loss_mask = batch.rows.loss_mask[local].copy()
        for sample in skipped[np.isin(plan.samples.row[skipped], rows)]:
            row, start = plan.samples.row[sample] - rows.start, plan.samples.start[sample]
            loss_mask[row, start : start + plan.samples.length[sample]] = False
        microbatch.tokens = _flat(batch.rows.tokens[local], device)
        microbatch.labels = _flat(batch.rows.labels[local], device)
        microbatch.loss_mask = _flat(loss_mask, device)
    return microbatch


def segments(plan: GlobalPlan, rows: range) -> tuple[list[int], list[bool]]:
    """Return the segment borders of rows laid end to end, and which segments are documents."""
    borders, documents = [0], []
    for number, row in enumerate(rows):
        first, end = np.searchsorted(plan.samples.row, [row, row + 1])
        ends = number * plan.seq_len + np.cumsum(plan.samples.length[first:end])
        borders += ends.tolist()
        documents += [True] * len(ends)
        if borders[-1] < (number + 1) * plan.seq_len:
            borders.append((number + 1) * plan.seq_len)
            documents.append(False)
    return borders, documents


def attach_leaves(
    microbatches: list[Microbatch],
    embeddings: Tensor,
    plan: GlobalPlan,
    vision: VisionPlan,
    mesh: Mesh,
) -> list[Tensor | None]:
    """Give each microbatch its vision embeddings as a fresh leaf that requires grad.

    Args:
        embeddings: what this first-stage rank received, in `vision.received_by(rank)` order.

    Returns:
        for each microbatch the rows of `embeddings` in its leaf, int64, or None without media;
        with them `leaf_gradients` puts gradients back in received order.
    """
    received = vision.received_by(mesh.rank)
    tokens = vision.tokens[received]
    begins = dict(zip(received.tolist(), (np.cumsum(tokens) - tokens).tolist(), strict=True))
    rows = replica_rows(plan, mesh)
    per_microbatch = len(rows) // len(microbatches)
    taken: list[Tensor | None] = []
    for number, microbatch in enumerate(microbatches):
        first = rows.start + number * per_microbatch
        inside = (plan.items.row >= first) & (plan.items.row < first + per_microbatch)
        items = np.flatnonzero(inside)
        if not len(items):
            taken.append(None)
            continue
        offset = (plan.items.row[items] - first) * plan.seq_len + plan.items.start[items]
        length = plan.items.tokens[items]
        source = _runs(np.array([begins[item] for item in items.tolist()]), length, mesh.device)
        microbatch.leaf = embeddings.index_select(0, source).requires_grad_()
        microbatch.leaf_positions = _runs(offset, length, mesh.device)
        taken.append(source)
    return taken


def leaf_gradients(
    microbatches: list[Microbatch], taken: list[Tensor | None], like: Tensor
) -> Tensor:
    """Return the gradients of the received embeddings, in received order; shape of `like`."""
    gradients = torch.zeros_like(like)
    for microbatch, source in zip(microbatches, taken, strict=True):
        if source is not None:
            assert microbatch.leaf is not None
            assert microbatch.leaf.grad is not None
            gradients.index_copy_(0, source, microbatch.leaf.grad)
    return gradients


def _flat(rows: np.ndarray, device: torch.device) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(rows)).reshape(1, -1).to(device)


def _runs(begins: np.ndarray, lengths: np.ndarray, device: torch.device) -> Tensor:
    """Return begin, begin+1, ... for each run, one after the other, int64."""
    runs = [np.arange(begin, begin + length) for begin, length in zip(begins, lengths, strict=True)]
    return torch.from_numpy(np.concatenate(runs).astype(np.int64)).to(device)
