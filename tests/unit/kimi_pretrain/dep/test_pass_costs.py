"""Compares the operation counts of pipeline chunks with layer-by-layer sums."""

import pytest

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.pass_costs import (
    active_parameters,
    chunk_flops,
    sharing_ranks,
    stage_parts,
    update_seconds,
)


@pytest.mark.parametrize("vpp", [1, 2])
def test_operations_are_those_of_each_layer_and_the_head(vpp):
    stages = {1: "Et*2|t*4L", 2: "Et|t*2|t|t*2L"}[vpp]
    config = load_config(
        "tiny_cpu",
        ["layout.pp=2", f"layout.vpp={vpp}", "model.language.num_layers=6",
         "model.language.num_dense_layers=2", f"layout.stages={stages}"],
    )  # fmt: skip
    model, tokens = config.model.language, config.data.seq_len
    dense, moe, head = active_parameters(model)
    assert dense != moe
    width = model.qk_nope_dim + model.qk_rope_dim + model.v_dim
    wanted = []
    for layers, has_loss in config.chunks():
        flops = 2 * tokens * head if has_loss else 0
        for layer in layers:
            flops += 2 * tokens * (dense if layer < 2 else moe)
            flops += tokens * tokens * model.num_heads * width
        wanted.append(config.train.rows_per_microbatch * flops)
    assert chunk_flops(config).tolist() == wanted


@pytest.mark.parametrize("encoder", [0.0, 0.5, 4.0, 40.0])
def test_the_update_of_the_encoder_fills_the_least_busy_stages(encoder):
    """Compares with adding small amounts one by one to the stage with the least work so far."""
    config = load_config(
        "tiny_cpu",
        ["layout.pp=4", "layout.vpp=1", "layout.dp=2", "layout.ep=2", "model.language.num_layers=7",
         "layout.stages=Et|t*2|t*3|tL", "dep.update_cost={vocabulary: 1.5, dense_layer: 0.5, "
         f"expert_layer: 0.7, expert: 0.11, encoder: {encoder}}}"],
    )  # fmt: skip
    dense_ranks, expert_ranks = sharing_ranks(config)
    assert (dense_ranks, expert_ranks) == (2, 1)
    parts, experts = stage_parts(config), config.model.language.num_experts / 2
    busy = [
        (1.5 * (first + last) + 0.5 * dense + 0.7 * moe) / 2 + 0.11 * moe * experts
        for first, dense, moe, last in parts
    ]
    assert len({round(one, 9) for one in busy}) == 4
    drops = 10_000
    for _ in range(drops):
        busy[busy.index(min(busy))] += encoder / 2 / drops
    assert update_seconds(config) == pytest.approx(max(busy), abs=2 * encoder / drops)
