"""Order of passes, tested against Megatron-Core's own schedule functions."""

from types import SimpleNamespace

import pytest
import torch

from kimi_pretrain.dep.timeline import Pass, Schedule
from kimi_pretrain.engine import host  # must be imported before Megatron-Core
from tests.unit.kimi_pretrain.dep.test_timeline import GRID

assert host


@pytest.fixture
def schedules():
    from megatron.core.pipeline_parallel import schedules

    return schedules


class Settings:
    """A Megatron-Core config with every option off."""

    def __init__(self, **given):
        vars(self).update(given)

    def __getattr__(self, name):
        return None


class Wires:
    """A communicator without peers; every receive succeeds at once."""

    def __init__(self, stages, stage, chunks):
        self.pp_group = SimpleNamespace(size=lambda: stages, rank=lambda: stage)
        self.total_stages, self.current_stage = stages, stage
        self.is_pp_first_stage, self.is_pp_last_stage = stage == 0, stage == stages - 1
        self.virtual_pipeline_model_parallel_size = chunks if chunks > 1 else None
        self.config = Settings()

    def __getattr__(self, name):
        pair = name == "send_forward_backward_recv_forward_backward"
        return lambda *args, **options: ("came", "came") if pair else "came"


def ran_by_megatron(monkeypatch, schedules, stages, stage, chunks, microbatches):
    """Return a stage's passes in the order in which Megatron-Core's schedule functions run them."""
    from megatron.core.enums import ModelType
    from megatron.core.process_groups_config import ProcessGroupCollection

    found = []

    def forward_step(*args, current_microbatch, vp_stage=0, **options):
        found.append(Pass(False, vp_stage or 0, current_microbatch))
        return found[-1], 0

    def backward_step(received, output, gradient, config):
        found.append(output._replace(backward=True))
        return "gradient"

    monkeypatch.setattr(schedules, "forward_step", forward_step)
    monkeypatch.setattr(schedules, "backward_step", backward_step)
    wires, alone = Wires(stages, stage, chunks), SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = Settings(
        hidden_size=1, microbatch_group_size_per_vp_stage=stages,
        virtual_pipeline_model_parallel_size=wires.virtual_pipeline_model_parallel_size,
    )  # fmt: skip
    groups = ProcessGroupCollection()
    groups.tp = groups.cp = alone
    models = [torch.nn.Identity() for _ in range(chunks)]
    for model in models:
        model.config, model.model_type = config, ModelType.encoder_or_decoder
    run = schedules.forward_backward_pipelining_without_interleaving
    if chunks > 1:
        run = schedules.forward_backward_pipelining_with_interleaving
    run(
        forward_step_func=None,
        data_iterator=[None] * chunks if chunks > 1 else None,
        model=models if chunks > 1 else models[0],
        num_microbatches=microbatches,
        seq_length=1,
        micro_batch_size=1,
        p2p_communicator=wires,
        pg_collection=groups,
    )
    return found


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), GRID)
def test_passes_are_in_the_order_of_megatron_core(
    monkeypatch, schedules, stages, chunks, microbatches
):
    schedule = Schedule(stages, chunks, microbatches)
    for stage, passes in enumerate(schedule.passes):
        assert list(passes) == ran_by_megatron(
            monkeypatch, schedules, stages, stage, chunks, microbatches
        )
        assert len(set(passes)) == len(passes) == schedule.num_passes


@pytest.mark.parametrize(("stages", "chunks", "microbatches"), [(2, 2, 8), (4, 3, 16), (4, 2, 4)])
def test_with_experts_overlapped_one_more_forward_comes_first(
    schedules, stages, chunks, microbatches
):
    schedule = Schedule(stages, chunks, microbatches, ahead=True)
    for stage, passes in enumerate(schedule.passes):
        *_, warm_up, _ = schedules.get_pp_rank_microbatches(
            microbatches, chunks, stages, overlap_moe_expert_parallel_comm=True,
            p2p_communicator=Wires(stages, stage, chunks),
        )  # fmt: skip
        table = schedules.get_schedule_table(microbatches, chunks, stages)
        forwards = [Pass(False, chunk, microbatch) for microbatch, chunk in table]
        backwards = [Pass(True, chunks - 1 - chunk, microbatch) for microbatch, chunk in table]
        pairs = zip(forwards[warm_up:], backwards)
        steady = [one for pair in pairs for one in pair]
        rest = backwards[len(forwards) - warm_up :]
        assert list(passes) == forwards[:warm_up] + steady + rest
