"""Operations of the pipeline's chunks, against sums written out layer by layer."""

import pytest

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.pass_costs import active_parameters, chunk_flops


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
