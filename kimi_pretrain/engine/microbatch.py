"""Builds this rank's part of its replica's microbatches, the input of phase 4.

Rows are laid end to end as one packed sequence with document borders. Middle stages read no text;
they build borders and padding only from the plan, because every stage masks attention by document.
Vision embeddings are attached later (`kimi_pretrain.dep.leaves`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import GlobalPlan
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.packed_attention import PackedRows
from kimi_pretrain.parallel.sequence import SequenceParts
from kimi_pretrain.telemetry.losses import cells_of


@dataclass
class Microbatch:
    """One microbatch of a replica: its rows laid end to end as one packed sequence.

    A rank holds a part of it (`kimi_pretrain.parallel.sequence`). Below, "own tokens" are the
    tokens of its context-parallel rank.

    Attributes:
        packed: segments of the row; every stage needs them.
        padding: True at the padding at the ends of rows, bool [1, tokens of this rank's part].
        tokens, labels: int64 [1, own tokens]; only on the first and the last stage.
        loss_mask: True where the label counts, bool [1, own tokens]; only on the same stages.
        cells: cell (source x bin) of each token's loss, int32 [own tokens] on the host, -1 where
            the loss does not count (`kimi_pretrain.telemetry.losses`); only if `mesh.counts_loss`.
        leaf: vision embeddings of this rank's part, [media tokens, hidden]; only on the first
            stage.
        leaf_positions: positions of these embeddings in the part, int64 [media tokens].
        media: computes the embeddings inside the graph, instead of a leaf. The baseline uses it:
            there, the first stage encodes the media of its own microbatches.
        number: index among the replica's microbatches in row order; they may run in another order.
    """

    packed: PackedRows
    padding: Tensor
    tokens: Tensor | None = None
    labels: Tensor | None = None
    loss_mask: Tensor | None = None
    cells: np.ndarray | None = None
    leaf: Tensor | None = None
    leaf_positions: Tensor | None = None
    media: Callable[[], Tensor] | None = None
    number: int = 0


def replica_rows(plan: GlobalPlan, mesh: Mesh) -> range:
    """Return the contiguous range of a step's rows that this rank's replica trains on."""
    rows = plan.num_rows // mesh.num_replicas
    return range(mesh.replica * rows, (mesh.replica + 1) * rows)


def build_microbatches(
    batch: StepBatch,
    mesh: Mesh,
    per_microbatch: int,
    skipped: np.ndarray,
    restart_positions: bool = True,
    order: Sequence[int] | None = None,
) -> list[Microbatch]:
    """Return this rank's parts of its replica's microbatches, without vision leaves.

    Args:
        batch: rows fetched for this rank (`batch.rows` is None on middle stages).
        per_microbatch: number of rows in one microbatch.
        skipped: indices of the plan's samples whose loss does not count.
        restart_positions: restart positions at 0 in every document; if False, in every row.
        order: numbers of the microbatches in the order of execution; None for row order.
    """
    rows = replica_rows(batch.plan, mesh)
    parts = SequenceParts(per_microbatch * batch.plan.seq_len, mesh.num_cp, mesh.num_tp)
    return [
        _microbatch(
            batch, rows[n * per_microbatch : (n + 1) * per_microbatch], n, mesh, parts, skipped,
            restart_positions,
        )
        for n in (range(len(rows) // per_microbatch) if order is None else order)
    ]  # fmt: skip


def _microbatch(
    batch: StepBatch,
    rows: range,
    number: int,
    mesh: Mesh,
    parts: SequenceParts,
    skipped: np.ndarray,
    restart_positions: bool,
) -> Microbatch:
    plan, device = batch.plan, mesh.device
    borders, documents = segments(plan, rows)
    padding = np.zeros(parts.tokens, dtype=np.bool_)
    for start, end, document in zip(borders[:-1], borders[1:], documents, strict=True):
        padding[start:end] = not document
    positions = np.concatenate([plan.positions(row, restart_positions) for row in rows])
    packed = PackedRows.of(
        borders, documents, device, torch.from_numpy(positions), parts, mesh.cp_rank
    )
    own_padding = _select(padding, parts.positions(mesh.part), device)
    microbatch = Microbatch(packed, own_padding, number=number)
    if batch.rows is not None:
        local = slice(number * len(rows), (number + 1) * len(rows))
        loss_mask = batch.rows.loss_mask[local].copy()
        for sample in skipped[np.isin(plan.samples.row[skipped], rows)]:
            row, start = plan.samples.row[sample] - rows.start, plan.samples.start[sample]
            loss_mask[row, start : start + plan.samples.length[sample]] = False
        mine = parts.positions_cp(mesh.cp_rank)
        microbatch.tokens = _select(batch.rows.tokens[local], mine, device)
        microbatch.labels = _select(batch.rows.labels[local], mine, device)
        microbatch.loss_mask = _select(loss_mask, mine, device)
        if mesh.counts_loss:
            cells = np.where(loss_mask, cells_of(plan, rows), -1)
            microbatch.cells = cells.reshape(-1)[mine]
    return microbatch


def segments(plan: GlobalPlan, rows: range) -> tuple[list[int], list[bool]]:
    """Return the segment borders of rows laid end to end, and True for each document segment."""
    borders, documents = [0], []
    for number, row in enumerate(rows):
        ends = plan.cu_seqlens(row)[1:].tolist()
        samples = int(np.count_nonzero(plan.samples.row == row))
        borders += [number * plan.seq_len + end for end in ends]
        documents += [n < samples for n in range(len(ends))]
    return borders, documents


def _select(rows: np.ndarray, places: np.ndarray, device: torch.device) -> Tensor:
    """Return the values at the given positions of rows laid end to end, [1, positions]."""
    return torch.from_numpy(rows.reshape(-1)[places])[None].to(device)
