"""Position ids of a plan's rows, and of the microbatches that a step trains on."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist

from data_pipeline.collate import RowBatch
from data_pipeline.config import DataConfig
from data_pipeline.loader import StepBatch
from data_pipeline.plan.planner import Planner
from kimi_pretrain.config import load_config
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.engine.mesh import Mesh
from kimi_pretrain.engine.microbatch import build_microbatches, replica_rows
from kimi_pretrain.step import TrainStep
from tests.unit.data_pipeline.plain import made_index

DATA = DataConfig(
    root="unused", sources={"web": 1.0}, seq_len=256, rows_per_step=16, pack_window=64, seed=2
)


@pytest.fixture(scope="module")
def plan():
    """A step with several documents per row, most rows with padding at the end."""
    planner = Planner([made_index("web", [90], 1, text=(3, 200))], DATA)
    plan, _ = planner.plan(planner.state_dict())
    return plan


def slow_positions(plan, row, restart):
    """Compute the positions token by token."""
    if not restart:
        return list(range(plan.seq_len))
    lengths = plan.samples.length[plan.samples.row == row].tolist()
    found = [place for length in lengths for place in range(length)]
    return found + list(range(plan.seq_len - len(found)))


def one_process(replica=0, num_replicas=1):
    """Return a mesh of one-stage replicas; with a single replica its reductions work too."""
    return Mesh(
        rank=replica,
        world_size=num_replicas,
        device=torch.device("cpu"),
        stage=0,
        num_stages=1,
        replica=replica,
        num_replicas=num_replicas,
        expert_rank=0,
        num_expert_ranks=1,
        groups={},
    )


@pytest.mark.parametrize("restart", [True, False])
def test_positions_of_a_row_equal_the_plain_loop(plan, restart):
    several = padded = 0
    for row in range(plan.num_rows):
        expected = slow_positions(plan, row, restart)
        found = plan.positions(row, restart)
        assert found.dtype == np.int64
        assert found.tolist() == expected
        several += (plan.samples.row == row).sum() > 1
        padded += plan.samples.length[plan.samples.row == row].sum() < plan.seq_len
    assert several > 5
    assert padded > 2
    assert np.array_equal(plan.positions(0), plan.positions(0, True))


@pytest.mark.parametrize("restart", [True, False])
@pytest.mark.parametrize("per_microbatch", [1, 2, 4])
def test_microbatches_have_the_positions_of_their_rows(plan, restart, per_microbatch):
    batch = StepBatch(plan, None, np.zeros(0, np.int64), {}, ())
    for replica in range(2):
        mesh = one_process(replica, 2)
        none = np.zeros(0, np.int64)
        found = build_microbatches(batch, mesh, per_microbatch, none, restart)
        expected = [slow_positions(plan, row, restart) for row in replica_rows(plan, mesh)]
        together = torch.cat([microbatch.packed.positions for microbatch in found])
        assert together.tolist() == sum(expected, [])


@pytest.fixture
def lonely_group():
    """A process group of only this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Backbone:
    """Records the microbatches of a step."""

    def train_step(self, microbatches, aux_scale):
        self.microbatches = microbatches
        losses = [torch.zeros(one.labels.shape) for one in microbatches]
        return SimpleNamespace(loss_sum=0.0, losses=losses)


@pytest.mark.parametrize("restart", [True, False])
def test_a_step_trains_with_the_positions_of_the_config(plan, lonely_group, restart):
    config = load_config(
        "tiny_cpu",
        [f"data.restart_positions={restart}", "layout.pp=1", "layout.vpp=1", "layout.dp=1",
         "layout.ep=1"],
    )  # fmt: skip
    ids = np.arange(plan.num_rows)
    batch = StepBatch(plan, RowBatch.empty(plan.num_rows, plan.seq_len, 0), ids, {}, ())
    backbone, update = Backbone(), SimpleNamespace(run=lambda loss_tokens, loss: None)
    encoder = SimpleNamespace(sums=SimpleNamespace(zero=lambda: None), dtype=torch.float32)
    exchange = SimpleNamespace(bytes_sent=lambda *args: {})
    model = SimpleNamespace(encoder=encoder, backbone=backbone, exchange=exchange)
    step = TrainStep(config, one_process(), model, update, VisionPlanner(config))
    step.run(batch, text_only=True)
    found = torch.cat([microbatch.packed.positions for microbatch in backbone.microbatches])
    expected = [slow_positions(plan, row, restart) for row in range(plan.num_rows)]
    assert len(backbone.microbatches) == plan.num_rows // config.train.rows_per_microbatch
    assert found.tolist() == sum(expected, [])
