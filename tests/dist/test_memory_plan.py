"""Memory plan against measurements: bytes kept of a layer, microbatches in flight."""

import pytest

from kimi_pretrain.config import load_config
from kimi_pretrain.memory.kept import head_tensors, layer_tensors
from kimi_pretrain.memory.plan import microbatches_in_flight, moves
from tests.dist.jobs import SMALL, layout, run_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

# K2's shape with small widths, all different.
K2 = (
    "model.language.hidden_size=96", "model.vision.out_width=96", "model.language.num_heads=4",
    "model.language.qk_nope_dim=16", "model.language.qk_rope_dim=8", "model.language.v_dim=20",
    "model.language.q_lora_rank=28", "model.language.kv_lora_rank=36",
    "model.language.expert_ffn_size=136", "model.language.dense_ffn_size=52",
    "model.language.num_experts=16", "model.language.experts_per_token=3",
    "model.language.num_shared_experts=2", "train.attention=portable", "data.rows_per_step=8",
)  # fmt: skip
EVERYTHING = "train.recompute=[norms, swiglu, mla_up]"
SLOW = ("all", "CP2, mla_up", "PP2")  # other cases cover each part of these
POLICIES = {
    "none": ("train.dtype=bfloat16",),
    "none, float32, no query latent": ("train.dtype=float32", "model.language.q_lora_rank=null"),
    "norms": ("train.dtype=bfloat16", "train.recompute=[norms]"),
    "swiglu": ("train.dtype=bfloat16", "train.recompute=[swiglu]"),
    "mla_up": ("train.dtype=bfloat16", "train.recompute=[mla_up]"),
    "fp8": ("train.dtype=bfloat16", "train.fp8_storage=true"),
    "all": ("train.dtype=bfloat16", EVERYTHING, "train.fp8_storage=true"),
    "all, offload": ("train.dtype=bfloat16", EVERYTHING, "train.fp8_storage=true",
                     "train.offload=true", "train.offload_min_mib=1e-4"),  # everything but scalars
    # Gradients pass through and products keep nothing; recomputation and router keep their inputs.
    "frozen": ("train.dtype=bfloat16", "train.frozen=[language_model]"),
    "frozen, mla_up, no query latent": (
        "train.dtype=bfloat16", "train.frozen=[language_model]", "train.recompute=[mla_up]",
        "model.language.q_lora_rank=null"),
    "frozen, all": ("train.dtype=bfloat16", "train.frozen=[language_model]", EVERYTHING,
                    "train.fp8_storage=true"),
}  # fmt: skip
# Six heads, with keys and values of four at a time. Attention's output is kept in as many pieces.
# In the last case only the first piece is large enough to be offloaded.
SHARED = {
    "CP2": (),
    "CP2, frozen": ("train.frozen=[language_model]",),
    "CP2, mla_up": ("train.recompute=[mla_up]",),
    "CP2, all": (EVERYTHING,),
    "CP2, all, offload": (EVERYTHING, "train.offload=true", "train.offload_min_mib=0.008"),
}
SHARED = {
    name: ("layout.cp=2", "train.dtype=bfloat16", "model.language.num_heads=6", *settings)
    for name, settings in SHARED.items()
}
PLANNED = {
    "plan, all": (EVERYTHING, "train.fp8_storage=true"),
    "plan, offload": (EVERYTHING, "train.offload=true", "train.offload_min_mib=0"),
}
SCHEDULES = {
    "PP2 x VPP2": layout(pp=2, vpp=2),
    "PP2 x VPP2, few": (*layout(pp=2, vpp=2), "train.rows_per_microbatch=2"),
    "PP2": layout(pp=2),
}


def run(data_root, folder, wanted: set[str]):
    """Return the results of some jobs, by name."""
    data = f"data.root={data_root}"
    kept = {
        name: ("kept_bytes", (data, *layout(), *K2, *settings))
        for name, settings in POLICIES.items()
        if name in wanted
    }
    flight = {name: ("in_flight", (data, *settings)) for name, settings in SCHEDULES.items()}
    for name, settings in SHARED.items():
        flight[name] = "kept_bytes", (data, *layout(), *K2, *settings)
    for name, settings in PLANNED.items():
        flight[name] = "planned", (data, *layout(dp=2, ep=2), *settings)
    flight = {name: job for name, job in flight.items() if name in wanted}
    return run_jobs(kept, folder / "kept", 1) | run_jobs(flight, folder / "flight", 2)


@pytest.fixture(scope="module")
def runs(data_root, tmp_path_factory):
    """A function that returns results; it runs the slow jobs on first request."""
    slow, known = set(SLOW), {}
    fast = {*POLICIES, *SHARED, *PLANNED, *SCHEDULES} - slow

    def find(name):
        if name not in known:
            wanted = slow if name in slow else fast
            known.update(run(data_root, tmp_path_factory.mktemp("memory_plan"), wanted))
        return known[name]

    return find


@pytest.fixture
def found(name, runs):
    return runs(name)


def names(*known):
    """Return parameters for all these cases; the slow ones run in `make test-all`."""
    marks = {name: pytest.mark.slow for name in SLOW}
    return [pytest.param(name, marks=marks.get(name, ())) for some in known for name in some]


@pytest.mark.parametrize("name", names(POLICIES, SHARED))
def test_kept_bytes_are_those_of_the_formulas(name, found):
    """With offload, only the bytes on the device count."""
    config = load_config("tiny_cpu", [*SMALL, *layout(), *K2, *(POLICIES | SHARED)[name]])
    parts = {
        "experts": layer_tensors(config, dense=False),
        "dense": layer_tensors(config, dense=True),
        "head": head_tensors(config),
    }
    assert found == {
        part: sum(tensor.size for tensor in kept if not moves(config, tensor))
        for part, kept in parts.items()
    }


@pytest.mark.parametrize("name", names(SCHEDULES))
def test_microbatches_in_flight_are_those_of_the_schedule(name, found):
    config = load_config("tiny_cpu", [*SMALL, *SCHEDULES[name]])
    for stage, held, outputs in found:
        assert held == microbatches_in_flight(config, stage, [1] * config.layout.vpp)
        assert outputs <= 1  # an output is released once it is sent


@pytest.mark.parametrize("name", PLANNED)
def test_the_plan_of_a_microbatch_keeps_nothing_alone(name, found):
    """Earlier, only the plan kept the shared experts' output and, with offload, the residuals."""
    assert found == []
