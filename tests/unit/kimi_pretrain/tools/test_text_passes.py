"""Compares the pass costs of `plan --step` with layer-by-layer sums."""

import numpy as np
import pytest

from kimi_pretrain.config import Config, load_config
from kimi_pretrain.dep.pass_costs import (
    active_parameters,
    operation_seconds,
    pass_seconds,
    routed_seconds,
)
from kimi_pretrain.memory.kept import layer_tensors
from kimi_pretrain.memory.plan import host_bytes, microbatches_in_flight
from kimi_pretrain.tools.text_passes import Traffic, text_pipeline

FREE = {"node": 1e30, "memory": 1e30, "host": 1e30}
BASE = (
    "layout.pp=2", "layout.vpp=1", "layout.dp=2", "layout.ep=1", "layout.stages=null",
    "data.rows_per_step=16", "data.seq_len=128", "dep.flops_per_second=1e9",
    "dep.ranks_per_node=2", "train.rows_per_microbatch=2", "data.limits={image: 256, frame: 64}",
)  # fmt: skip
LAYERS = [1, 2, 3, 4]  # the first is dense; each stage has two
MEASURED = (
    "dep.pass_cost={embedding_forward: 1.0e-3, embedding_backward: 2.0e-3, dense_forward: 3.0e-3, "
    "dense_backward: 5.0e-3, expert_forward: 7.0e-3, expert_backward: 11.0e-3, "
    "head_forward: 13.0e-3, head_backward: 17.0e-3}"
)
FROZEN = "train.frozen=[language_model]"


def config_of(*overrides: str) -> Config:
    return load_config("tiny_cpu", [*BASE, *overrides])


def passes(config: Config, **traffic: float) -> list[np.ndarray]:
    told = Traffic(**{"network": 1e30, **FREE, **traffic})
    found = text_pipeline(config, told)
    return [found.forward, found.backward]


def longer(config: Config, **traffic: float) -> list[np.ndarray]:
    """Return the extra time of passes over those with free exchanges, forward and backward."""
    return [slow - fast for slow, fast in zip(passes(config, **traffic), passes(config))]


def test_a_frozen_language_model_has_no_gradients_of_weights():
    """Each product keeps only the gradient of its input; attention has no weights."""
    free, frozen = config_of(), config_of(FROZEN)
    model, tokens = free.model.language, 128
    dense, moe, head = active_parameters(model)
    keys = tokens * model.num_heads * (model.qk_nope_dim + model.qk_rope_dim + model.v_dim)
    for config in (free, frozen):
        found = np.zeros((2, 2))
        for number, layer in enumerate(LAYERS):
            product = 2 * tokens * (dense if layer == 1 else moe)
            found[0, number // 2] += product + tokens * keys
            backward = product if config is frozen else 2 * product
            found[1, number // 2] += backward + 2 * tokens * keys
        found[0, 1] += 2 * tokens * head
        found[1, 1] += 2 * tokens * head * (1 if config is frozen else 2)
        assert np.array(pass_seconds(config)) == pytest.approx(2 * found / 1e9)
    routed = 2 * tokens * model.experts_per_token * 3 * model.hidden_size * model.expert_ffn_size
    layers = np.array([1, 2])
    assert np.array(routed_seconds(free)) == pytest.approx(
        2 * routed / 1e9 * np.array([layers, 2 * layers])
    )
    assert np.array(routed_seconds(frozen)) == pytest.approx(
        2 * routed / 1e9 * np.array([layers, layers])
    )
    measured = config_of(FROZEN, MEASURED)  # its passes were measured with frozen weights
    share = routed / (2 * tokens * moe + 2 * tokens * keys)
    assert routed_seconds(measured)[1] == pytest.approx(layers * share * 11e-3)
    assert pass_seconds(measured)[1] == pytest.approx([2e-3 + 5e-3 + 11e-3, 2 * 11e-3 + 17e-3])


def test_measured_passes_of_other_rows_take_as_long_a_row():
    as_run, of_four = config_of(MEASURED), config_of(MEASURED, "dep.pass_cost.rows=4")
    for whole, half in zip(pass_seconds(as_run), pass_seconds(of_four)):
        assert half == pytest.approx(whole / 2)  # this run has two rows per microbatch
    for whole, half in zip(routed_seconds(as_run), routed_seconds(of_four)):
        assert half == pytest.approx(whole / 2)
    assert operation_seconds(of_four) == pytest.approx(operation_seconds(as_run) / 2)
    assert operation_seconds(config_of()) == 1e-9


def exchanges_of_tp(config: Config) -> tuple[list[float], list[float]]:
    """Return the numbers per token of each TP exchange of a layer, without those of shared rows.

    The counts follow Megatron-Core's layers: a column-parallel product gathers its input, and a
    row-parallel product scatters the sum of its output.
    """
    model, train = config.model.language, config.train
    hidden, query = model.hidden_size, model.q_lora_rank or model.hidden_size
    column = [query] if config.layout.cp > 1 else [query, model.kv_lora_rank]
    rotary = [] if config.layout.cp > 1 else [model.qk_rope_dim]
    forward = [*column, *rotary, hidden, hidden, hidden]  # attention's output, MLP in and out
    backward = forward.copy()  # gradients go the other way
    if "language_model" not in train.frozen:
        backward += [*column, hidden]  # inputs again, for gradients of weights
    if "mla_up" in train.recompute:
        backward += column
    return forward, backward


@pytest.mark.parametrize(
    "more",
    [(), ("train.recompute=[mla_up]",), (FROZEN,), ("model.language.q_lora_rank=null",),
     ("dep.ranks_per_node=1",)],
    ids=["trained", "recompute", "frozen", "no query latent", "over nodes"],
)  # fmt: skip
def test_tensor_parallel_ranks_exchange_in_every_layer(more):
    config = config_of("layout.tp=2", "layout.dp=1", *more)
    latency, rate, other = 0.01, 1e6, 1e30
    apart = config.dep.ranks_per_node == 1
    rates = {"network": rate, "node": other} if apart else {"network": other, "node": rate}
    tokens, hidden, size = 256, config.model.language.hidden_size, 4
    found = longer(config, latency=latency, **rates)
    ends = {"frozen": (1, 0, 1), "trained": (1, 1, 2)}
    once, embedding, head = ends["frozen" if FROZEN in more else "trained"]
    for one, numbers, of_ends in zip(
        found, exchanges_of_tp(config), [(once, once), (embedding, head)], strict=True
    ):
        wanted = np.zeros(2)
        for number, _ in enumerate(LAYERS):
            for each in numbers:
                wanted[number // 2] += each * tokens * size / 2 / rate + latency
        for stage, count in enumerate(of_ends):
            wanted[stage] += count * (hidden * tokens * size / 2 / rate + latency)
        assert one == pytest.approx(wanted)


@pytest.mark.parametrize("more", [(), ("train.recompute=[mla_up]",), (FROZEN,)])
def test_context_parallel_ranks_gather_latents_and_project_the_whole_row(more):
    config = config_of("layout.cp=4", "layout.dp=1", "layout.pp=1", *more)
    model, rate, latency = config.model.language, 1e6, 0.01
    row = 256 * (model.kv_lora_rank + model.qk_rope_dim) * 4
    remade = "mla_up" in config.train.recompute
    forward, backward = longer(config, network=rate, latency=latency)  # four ranks, two per node
    each = row * 3 / 4 / rate + latency
    assert forward == pytest.approx([4 * each])
    assert backward == pytest.approx([4 * each * (1 + remade)])
    # The rest equals a quarter of the whole passes, except keys and values of the entire row.
    plain = [whole / 4 for whole in pass_seconds(config_of("layout.dp=1", "layout.pp=1", *more))]
    project = 2 * 256 * model.kv_lora_rank * model.num_heads * (model.qk_nope_dim + model.v_dim)
    project /= 1e9
    queries = 2 * 64 * (model.q_lora_rank * model.num_heads
                        * (model.qk_nope_dim + model.qk_rope_dim)) / 1e9  # fmt: skip
    found = passes(config)
    products = 1 if FROZEN in more else 2
    assert found[0] == pytest.approx(plain[0] + 4 * project * 3 / 4)
    assert found[1] == pytest.approx(
        plain[1] + 4 * (project * 3 / 4 * products + project + remade * queries)
    )


def test_ranks_that_share_rows_both_ways_gather_latents_in_two_rounds():
    config = config_of("layout.cp=2", "layout.tp=2", "layout.dp=1", "layout.pp=1",
                       "dep.ranks_per_node=2")  # fmt: skip
    model = config.model.language
    row = 256 * (model.kv_lora_rank + model.qk_rope_dim) * 4
    forward, _ = longer(config, network=1e6)  # two of the four ranks are on one node
    assert forward == pytest.approx([4 * row / 2 / 2 / 1e6])
    forward, _ = longer(config, node=1e6)
    numbers = sum(exchanges_of_tp(config)[0])
    ends = 2 * model.hidden_size
    assert forward == pytest.approx([(4 * row / 2 + (4 * numbers + ends) * 128 * 4 / 2) / 1e6])


def bytes_of(config: Config, dense: bool, *kinds: str) -> int:
    return sum(
        kept.size for kept in layer_tensors(config, dense) if kept.kind.startswith(tuple(kinds))
    )


@pytest.mark.parametrize("frozen", [(), (FROZEN,)])
def test_what_is_computed_again_takes_what_it_reads_writes_and_multiplies(frozen):
    plain, memory = config_of(*frozen), 1e6
    model = plain.model.language
    before = passes(plain)
    norms, swiglu, up = np.zeros(2), np.zeros(2), np.zeros(2)
    for number, layer in enumerate(LAYERS):
        norms[number // 2] += 2 * bytes_of(plain, layer == 1, "norms") / memory
        swiglu[number // 2] += 3 * bytes_of(plain, layer == 1, "SwiGLU of") / memory
        query = model.q_lora_rank * model.num_heads * (model.qk_nope_dim + model.qk_rope_dim)
        keys = model.kv_lora_rank * model.num_heads * (model.qk_nope_dim + model.v_dim)
        up[number // 2] += 2 * 256 * (query + keys) / 1e9
    assert (swiglu.sum() > 0) == (not frozen)  # without trained weights no product keeps it
    for kinds, wanted in (
        ("norms", norms), ("swiglu", swiglu), ("mla_up", up), ("norms, mla_up", norms + up)
    ):  # fmt: skip
        after = passes(config_of(*frozen, f"train.recompute=[{kinds}]"), memory=memory)
        assert after[0] == pytest.approx(before[0])
        assert after[1] == pytest.approx(before[1] + wanted)
    measured = config_of(*frozen, MEASURED, "train.recompute=[mla_up]")
    after = passes(measured)[1] - pass_seconds(measured)[1]
    assert after == pytest.approx(up * 1e9 * operation_seconds(measured))


def test_codes_cost_what_they_and_their_tensors_move_each_way():
    plain, coded, memory = config_of(), config_of("train.fp8_storage=true"), 1e6
    wanted, kinds = np.zeros(2), ("gate and up", "dispatched")
    for number, layer in enumerate(LAYERS):
        for config in (plain, coded):
            wanted[number // 2] += bytes_of(config, layer == 1, *kinds) / memory
    for before, after in zip(passes(plain), passes(coded, memory=memory)):
        assert after == pytest.approx(before + wanted)


def test_passes_wait_for_what_is_on_its_way_to_the_host():
    config = config_of("train.offload=true", "train.offload_min_mib=0")
    per_pass = []
    for stage, (layers, _) in enumerate(config.chunks()):
        weights = [1]  # one chunk per stage
        (in_flight,) = microbatches_in_flight(config, stage, weights)
        per_pass.append(host_bytes(config)[stage] / in_flight)
        assert len(layers) == 2
    fast = passes(config)
    for host in (1e7, 1e5):
        slow = passes(config, host=host)
        for one, alone in zip(slow, fast, strict=True):
            assert one == pytest.approx(np.maximum(alone, np.array(per_pass) / host))
    assert (slow[1] > fast[1]).all()


def test_the_bound_is_below_the_timeline_and_near_it():
    """Covers a grid of schedules with random passes."""
    random = np.random.default_rng(0)
    for stages, vpp, microbatches in ((1, 1, 3), (2, 1, 8), (4, 1, 4), (2, 2, 8), (4, 2, 16)):
        layout = (f"layout.pp={stages}", f"layout.vpp={vpp}", "layout.dp=1",
                  "train.rows_per_microbatch=1", f"data.rows_per_step={microbatches}",
                  "model.language.num_layers=8")  # fmt: skip
        pipeline = text_pipeline(config_of(*layout), Traffic(1e30, **FREE))
        for send in (0.0, 0.3):
            for _ in range(5):
                forward, backward = random.uniform(0.1, 1.0, (2, stages * vpp))
                one = type(pipeline)(pipeline.schedule, forward, backward, send)
                assert 0.5 * one.line().total < one.least() <= one.line().total * (1 + 1e-12)
    even = type(pipeline)(pipeline.schedule, np.ones(8), np.ones(8), 0.0)
    assert even.least() == 16 * 2 * 2 + 3 * 2  # the last stage also waits for the three others
