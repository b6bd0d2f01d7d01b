"""Microbatches: losses counted by source, and leaf gradients of both kinds of items."""

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_pipeline.collate import RowBatch
from data_pipeline.config import DataConfig
from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import Planner
from kimi_pretrain.dep.bubble_run import BubbleRun, _Message
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import build_microbatches
from kimi_pretrain.telemetry.losses import bins_of, merged, summed
from kimi_pretrain.telemetry.stopwatch import Stopwatch
from tests.dist.positions_case import one_process
from tests.unit.data_pipeline.plain import made_index

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def plan():
    """A step of two sources with several samples per row, some longer than a bin, and padding."""
    indices = [made_index(name, [60], seed, text=(3, 400)) for name, seed in (("a", 1), ("b", 2))]
    config = DataConfig(
        root="unused", sources={"a": 1.0, "b": 1.0}, seq_len=512, rows_per_step=8, pack_window=64,
        seed=2,
    )  # fmt: skip
    planner = Planner(indices, config)
    return planner.plan(planner.state_dict())[0]


def in_parts(replica: int, cp_rank: int, num_cp: int) -> Mesh:
    return Mesh(
        **{**vars(one_process(replica, 2)), "cp_rank": cp_rank, "num_cp": num_cp}
    )  # fmt: skip


def filled(plan, rows):
    """Return rows in which each loss equals its label; a sample's last label does not count."""
    batch = RowBatch.empty(len(rows), plan.seq_len, 0)
    draw, table = np.random.Generator(np.random.Philox(key=1)), plan.samples
    for sample in np.flatnonzero(np.isin(table.row, rows)):
        tokens = draw.integers(1, 1000, int(table.length[sample]))
        counted = draw.random(len(tokens)) < 0.7
        row = int(table.row[sample]) - rows.start
        batch.place(row, int(table.start[sample]), tokens, counted)
    return batch


def by_loop(plan, rows, batch, skipped):
    """Sum labels by (source, bin), token by token."""
    bins, sums, tokens = bins_of(plan.seq_len), np.zeros((2, 2)), np.zeros((2, 2), np.int64)
    assert len(bins) == 2
    table = plan.samples
    for sample in range(len(table)):
        if table.row[sample] not in rows or sample in skipped:
            continue
        row, start = int(table.row[sample]) - rows.start, int(table.start[sample])
        for token in range(int(table.length[sample])):
            if batch.loss_mask[row, start + token]:
                bin = next(n for n, (_, last) in enumerate(bins) if token + 1 <= last)
                sums[table.source[sample], bin] += batch.labels[row, start + token]
                tokens[table.source[sample], bin] += 1
    return sums, tokens


@pytest.mark.parametrize("num_cp", [1, 2])
@pytest.mark.parametrize("per_microbatch", [1, 2])
def test_losses_by_source_leave_out_unusable_samples(plan, per_microbatch, num_cp):
    skipped = np.arange(0, len(plan.samples), 3)
    assert len({*plan.samples.source[skipped].tolist()}) == 2
    for replica in range(2):
        rows = range(4 * replica, 4 * replica + 4)
        batch = filled(plan, rows)
        before = batch.loss_mask.copy()
        step, found, counted = StepBatch(plan, batch, np.zeros(0, np.int64), {}, ()), [], 0
        for cp_rank in range(num_cp):
            mesh = in_parts(replica, cp_rank, num_cp)
            for one in build_microbatches(step, mesh, per_microbatch, skipped):
                labels = one.labels.numpy().reshape(-1)
                assert np.array_equal(one.cells >= 0, one.loss_mask.numpy().reshape(-1))
                found.append(summed(labels, one.cells))
                counted += int(one.loss_mask.sum())
        table = merged(found, ("a", "b"), plan.seq_len)
        sums, tokens = by_loop(plan, rows, batch, {*skipped.tolist()})
        assert np.array_equal(table.tokens, tokens)
        assert np.array_equal(table.loss, sums)
        assert counted == tokens.sum() < before.sum()
        assert np.array_equal(batch.loss_mask, before)  # the loader's own rows stay unchanged


@pytest.mark.parametrize("shared_tokens", [0, 3])
def test_a_leaf_of_shared_and_bubble_items_gives_each_its_gradient(shared_tokens):
    """The leaf already holds items that several ranks encoded; units of this rank are appended."""
    sizes, width = {4: 2, 7: 5}, 6
    places = np.random.Generator(np.random.Philox(key=3)).permutation(40)
    rows = {unit: places[10 * n : 10 * n + size] for n, (unit, size) in enumerate(sizes.items())}
    embeddings = {unit: torch.randn(size, width) for unit, size in sizes.items()}
    shared = torch.randn(shared_tokens, width).requires_grad_() if shared_tokens else None
    own = torch.from_numpy(places[30 : 30 + shared_tokens]) if shared_tokens else None
    run: BubbleRun = object.__new__(BubbleRun)
    run.rank, run.ahead, run.wire = 0, 1, torch.float32
    run.plan = SimpleNamespace(microbatch={4: 0, 7: 0})
    run.encoder = SimpleNamespace(dtype=torch.float32, device=CPU, trainable=True)
    run.waits, run.phase = Stopwatch(CPU), lambda name: nullcontext()
    run._arriving = {0: [_Message(u, 0, rows[u], embeddings[u].clone()) for u in sizes]}
    run._unposted, run._returned, run._sent = deque(), {}, []
    microbatch = SimpleNamespace(leaf=shared, leaf_positions=own)
    run._leaves = [microbatch]
    run._make_leaf(0)
    row = torch.zeros(40, width).index_copy(0, microbatch.leaf_positions, microbatch.leaf)
    for unit, some in rows.items():
        assert torch.equal(row[torch.from_numpy(some)], embeddings[unit])
    weight = torch.randn(40, width)
    (row * weight).sum().backward()
    assert {*run._returned} == {*sizes}
    for unit, some in rows.items():
        assert torch.equal(run._returned[unit], weight[torch.from_numpy(some)])
    assert microbatch.leaf is shared
    if shared is not None:
        assert torch.equal(row[own], shared)
        assert torch.equal(shared.grad, weight[own])
