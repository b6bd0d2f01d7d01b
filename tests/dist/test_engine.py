"""Our layers in Megatron-Core, against plain twins and against transformers' DeepSeek-V3.

They run in separate processes, because the host backend patches torch for the whole process.
"""

import pytest
import torch

from tests.dist.jobs import Job, layout, run_jobs

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]


# One case covers YaRN's temperature of the logits, the other that of the rotary embedding.
TEMPERATURE = "model.language.yarn={factor: 4.0, original_max_position: 32, mscale_all_dim: 0.0}"
ORACLES = {
    "query latent, YaRN": ("model.language.yarn={factor: 4.0, original_max_position: 32}",),
    "no query latent": ("model.language.q_lora_rank=null", TEMPERATURE),
}


@pytest.fixture(scope="module")
def found(data_root, tmp_path_factory):
    """Results of one process, by name."""
    data = f"data.root={data_root}", *layout()
    jobs: dict[str, Job] = {"twins": ("layers_against_twins", data)}
    jobs["ties"] = "tied_routes", data
    for name, overrides in ORACLES.items():
        jobs[name] = "language_model", (*data, "model.language.norm_eps=1e-6", *overrides)
    return run_jobs(jobs, tmp_path_factory.mktemp("engine"), 1)


def test_experts_equal_their_plain_twin(found):
    errors = found["twins"]
    assert set(errors) == {"experts", "experts_grad", "no_tokens"}
    for name, error in errors.items():
        assert error <= 1e-5, (name, error)


@pytest.mark.parametrize("name", ORACLES)
def test_logits_equal_deepseek_v3(name, found):
    """Same weights by name, three packed documents: logits of each document alone, fp32."""
    import transformers

    out = found[name]
    model = transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**out["config"]))
    weights = {name.removeprefix("language_model."): t for name, t in out["weights"].items()}
    with torch.no_grad():
        for name, value in model.state_dict().items():
            value.copy_(_weight(name, weights))
        for start, end in zip(out["borders"][:-1], out["borders"][1:], strict=True):
            logits = model(out["tokens"][:, start:end]).logits
            scale = logits.abs().max()
            assert (out["logits"][:, start:end] - logits).abs().max() <= 3e-6 * scale


def test_a_tie_is_followed_and_a_fault_is_not(found):
    """If two experts have equal weights, rounding decides the route, which is reported as a tie."""
    followed, alone, fault = (found["ties"][case] for case in ("followed", "alone", "fault"))
    assert followed["passed"], followed
    first, second = followed["routes"]  # the update after the first step separates the two experts
    assert 50 < first["at_ties"] < first["tokens"]
    assert first["wrong"] == second["wrong"] == 0
    # If the reference uses its own routes, the same runs differ ten thousand times as much.
    assert max(group["error"] for group in alone["groups"]) > 1e-2
    assert all(step["wrong"] and not step["at_ties"] for step in alone["routes"])
    assert not fault["passed"]
    assert fault["routes"][0]["at_ties"] == first["at_ties"]
    assert all(step["wrong"] for step in fault["routes"])
    assert "layer 3: experts" in fault["routes"][0]["first_wrong"]


def _weight(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """Find a weight; transformers keeps a layer's experts in two 3-D tensors."""
    if name in weights:
        return weights[name]
    layer, _, kind = name.rpartition(".mlp.experts.")
    experts = sorted(
        (key for key in weights if key.startswith(f"{layer}.mlp.experts.") and "down" in key),
        key=lambda key: int(key.split(".")[-3]),
    )
    if kind == "down_proj":
        return torch.stack([weights[key] for key in experts])
    assert kind == "gate_up_proj", name
    pairs = [
        (key.replace("down_proj", "gate_proj"), key.replace("down_proj", "up_proj"))
        for key in experts
    ]
    return torch.stack([torch.cat([weights[gate], weights[up]]) for gate, up in pairs])
