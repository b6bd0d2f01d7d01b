"""Dry run: published counts, the balance of optimizer work, and the owners of a real job.

It runs in separate processes, because the engine patches torch for the whole process.
"""

import json

import pytest

from kimi_pretrain.checkpoint.sharding import assign_writers
from kimi_pretrain.config import load_config
from kimi_pretrain.memory.plan import plan_memory
from kimi_pretrain.memory.states import divide_config
from kimi_pretrain.optim.config import GROUPS
from kimi_pretrain.tools.step_storage import checkpoint_bytes
from tests import ROOT, fork_server
from tests.dist.jobs import SMALL, layout, run_jobs
from tests.dist.states_case import BUDGET

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

LONG = "kimi_k25_long_32k", "kimi_k25_long_256k"
COUNTS = {
    "kimi_k25_1t": dict(
        language_model=1_026_408_209_408, routing_biases=23_040,
        vision_tower=416_866_032, projector=54_277_888,
    ),
    **{preset: dict(language_model=1_026_408_209_408, routing_biases=23_040) for preset in LONG},
    "moonlight_16b_a3b": dict(
        language_model=15_960_108_544, routing_biases=1_664, vision_tower=416_866_032,
    ),
}  # fmt: skip


def read_table(lines: list[str]) -> list[dict[str, str]]:
    head, *rows = lines
    return [dict(zip(head.split("\t"), row.split("\t"), strict=True)) for row in rows]


@pytest.mark.parametrize(
    "preset",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LONG)) for name in COUNTS],
)
def test_counts_and_balance_of_the_presets(preset, tmp_path):
    table = tmp_path / "tensors.tsv"
    arguments = ["--config", f"configs/{preset}.yaml", "--dry-run", "--json", "--table", str(table)]
    done = fork_server.run(["-m", "launch.cli", "train", *arguments], 150)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    result = json.loads(last)
    for name, number in COUNTS[preset].items():
        assert result[name] == number, name
    assert result["language_model"] == sum(stage["total"] for stage in result["stages"])
    check_table(read_table(table.read_text().splitlines()), result)
    if preset == "kimi_k25_1t":
        check_one_t(result, lines)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "groups"),
    [
        ("captions_moonlight", {"vision_tower", "projector"}),
        ("projector_kimi_k25", {"projector"}),
    ],
)
def test_the_presets_of_stages_train_their_part_alone(preset, groups, tmp_path):
    table = tmp_path / "tensors.tsv"
    arguments = ["--config", preset, "--dry-run", "--json", "--table", str(table)]
    done = fork_server.run(["-m", "launch.cli", "train", *arguments], 150)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    model = "kimi_k25_1t" if "k25" in preset else "moonlight_16b_a3b"
    assert result["language_model"] == COUNTS[model]["language_model"]
    assert "fits" in next(line for line in done.stdout.splitlines() if "H100" in line)
    assert {row["group"] for row in read_table(table.read_text().splitlines())} == groups


def check_table(rows: list[dict[str, str]], result: dict) -> None:
    """Check that each parameter occurs once with an owner, and the folded table is complete."""
    assert len({row["name"] for row in rows}) == len(rows)
    elements = 0
    for row in rows:
        size = 1
        for width in json.loads(row["shape"]):
            size *= width
        elements += size
    assert elements == result["language_model"] + result["vision_tower"] + result["projector"]
    assert {row["group"] for row in rows} == set(GROUPS) - {"siglip"}
    assert all(0 <= int(row["owner"]) < result["optimizer"]["ranks"] for row in rows)
    assert all(bool(row["pieces"]) == (row["trained_by"] == "muon") for row in rows)
    assert sum(row["tensors"] for row in result["optimizer"]["table"]) == len(rows)


def check_one_t(result: dict, lines: list[str]) -> None:
    """Check the promised balance of Kimi K2.5 as shipped."""
    assert len(result["stages"]) == 16
    memory = result["memory"]["stages"]
    assert max(stage["peak"] for stage in memory) <= 141e9
    assert any("H200 (141 GB): fits" in line for line in lines)
    (searched,) = result["memory"]["searches"].values()
    assert searched["fits"][0]["ranks"] == 512
    assert "train.offload=true" in searched["fits"][0]["settings"]
    (start,) = [n for n, line in enumerate(lines) if line.startswith("under ")]
    answer = "\n".join(lines[start : start + 3 + len(searched["fits"])])
    assert answer in (ROOT / "docs" / "MEMORY.md").read_text(), answer
    assert result["language_model_activated"] == 32_861_477_888
    assert f"language model    {1_026_408_209_408:,} parameters" in lines
    optimizer = result["optimizer"]
    assert optimizer["ranks"] == 256
    flops = optimizer["flops"]
    assert flops["largest"] == max(stage["flops"]["largest"] for stage in optimizer["stages"])
    means = [stage["flops"]["mean"] for stage in optimizer["stages"]]
    assert flops["mean"] == pytest.approx(sum(means) / len(means))
    assert flops["ratio"] == pytest.approx(flops["largest"] / flops["mean"])
    assert flops["ratio"] <= 1.15
    # bf16 weights: 8 bytes of momentum and master per element for Muon, 12 for AdamW.
    adamw = 2 * 163_840 * 7_168
    assert optimizer["state_bytes"]["mean"] * 256 / 1e9 == pytest.approx(
        (8 * (result["language_model"] - adamw) + 12 * adamw) / 1e9, rel=1e-3
    )
    (line,) = [line for line in lines if ".experts.0-383.gate_proj" in line]
    assert "layers.1-60." in line
    assert "23,040" in line
    assert line.endswith("0-255")


LAYOUT = layout(pp=2, vpp=2, dp=2, ep=2)
SCRIPT = """
import json, os, sys
import torch
os.environ["CUDA_VISIBLE_DEVICES"] = ""
from kimi_pretrain.tools import dry_run
from kimi_pretrain.config import load_config
from kimi_pretrain.memory import states
from kimi_pretrain.optim import groups

def table(*overrides):
    config = load_config("tiny_cpu", overrides)
    return list(dry_run.table_lines(dry_run.dry_run(config)))

job = sys.argv[1:]
tiny = dry_run.dry_run(load_config("tiny_cpu"))
found = {"tiny": (list(dry_run.table_lines(tiny)), dry_run.as_json(tiny)), "job": table(*job)}
for kind in ("flex", "transformer_engine"):
    found[kind] = table(*job, f"train.attention={kind}", "train.dtype=bfloat16")
found["bfloat16"] = table(*job, "train.attention=portable", "train.dtype=bfloat16")
found["alone"] = table(*job, "optim.shard_state=false")
found["frozen"] = table(*job, "train.frozen=[vision_tower, language_model]")
found["planned"] = {}
for name, more in (("job", ()), ("frozen", ("train.frozen=[vision_tower, language_model]",)),
                   ("slices", ("layout.dp=1", "layout.tp=2", "layout.ep=2")),
                   ("siglip", ("train.frozen=[language_model]", "dep.max_split=1",
                               "train.siglip={tokenizer: a, heads: 2, depth: 3}"))):
    config = load_config("tiny_cpu", (*job, *more))
    built, planned = dry_run.dry_run(config), states.divide_config(config)
    found["planned"][name] = {
        "owners": planned.owners == built.division.owners,
        "loads": planned.loads == built.division.loads,
        "parameters": [stage.per_rank for stage in built.stages],
        "encoder": built.vision_tower + built.projector + built.siglip,
        "siglip": any(line.startswith("train.siglip ") for line in dry_run.lines(built)),
        "weights": [stage.weights for stage in built.memory.plan.stages],
    }
with torch.device("meta"):
    found["device"] = torch.empty(1).device.type
groups._RULES = tuple(rule for rule in groups._RULES if rule[1] != "router")
try:
    found["rule"] = table(*job)
except ValueError as error:
    found["rule"] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def tables() -> dict:
    """The tables of the small job and its variants."""
    done = fork_server.run(["-c", SCRIPT, *SMALL, *LAYOUT], 150)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_meta_device_is_heeded_beside_the_engine(tables):
    """The engine's patches hid the factories from `with torch.device`: encoders were allocated."""
    assert tables["device"] == "meta"


def test_counts_of_the_demo_s_model(tables):
    lines, result = tables["tiny"]
    assert result["routing_biases"] == 24
    check_table(read_table(lines), result)


LAYOUTS = {
    "bfloat16": (*LAYOUT, "train.dtype=bfloat16"),
    "float32": LAYOUT,
    "frozen language model": (*LAYOUT, "train.frozen=[language_model]", "train.dtype=bfloat16"),
    "without sharding": (*LAYOUT, "optim.shard_state=false", "train.dtype=bfloat16"),
    "slices": (*layout(pp=2, ep=2), "layout.tp=2", "train.dtype=bfloat16"),
}


@pytest.fixture(scope="module")
def jobs(data_root, tmp_path_factory) -> dict:
    """Owners and memory of real jobs of four processes."""
    data = f"data.root={data_root}"
    more = data, *LAYOUT, "data.rows_per_step=8"  # media for every rank
    actions = {"owners": ("owners", (data, *LAYOUT)), "exchange": ("exchange", more)}
    actions |= {name: ("states", (data, *settings)) for name, settings in LAYOUTS.items()}
    return run_jobs(actions, tmp_path_factory.mktemp("jobs"), 4)


def test_owners_are_those_of_a_real_job(tables, jobs):
    """Four processes, PP2 x EP2 x DP2: every tensor has the planned owner."""
    rows = read_table(tables["job"])
    assert {row["name"]: int(row["owner"]) for row in rows} == jobs["owners"]
    assert set(jobs["owners"].values()) == {0, 1, 2, 3}


@pytest.mark.parametrize("name", LAYOUTS)
def test_states_of_the_plan_are_those_of_a_real_job(name, jobs):
    """Storages after a step agree to the byte: weights, gradients, optimizer state.

    Weights and gradients are compared on every rank, the state on each stage's fullest rank, which
    is the reported one.
    """
    plan = plan_memory(load_config("tiny_cpu", [*SMALL, *LAYOUTS[name]]))
    for stage in plan.stages:
        ranks = {rank: held for rank, held in enumerate(jobs[name]) if held["stage"] == stage.stage}
        assert len(ranks) == 2
        assert {held["weights"] for held in ranks.values()} == {stage.weights}
        assert {held["gradients"] for held in ranks.values()} == {stage.gradients}
        assert max(held["optimizer"] for held in ranks.values()) == stage.optimizer
        assert ranks[stage.rank]["optimizer"] == stage.optimizer
        assert (stage.optimizer > 0) == (stage.gradients > 0)


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_rank_writes_as_much_of_a_checkpoint_as_is_planned(name, jobs):
    """The writers that a save picks among the holders of a tensor write the planned bytes."""
    config = load_config("tiny_cpu", [*SMALL, *LAYOUTS[name]])
    small = ("e_score_correction_bias", "optim.step")  # excluded from the plan
    held = [
        {name: size for name, size in rank["saved"].items() if not name.endswith(small)}
        for rank in jobs[name]
    ]
    written = [0] * 4
    for tensor, rank in assign_writers(held).items():
        written[rank] += held[rank][tensor]
    assert checkpoint_bytes(config, divide_config(config)).tolist() == written
    assert min(written) > 0


def test_the_exchange_takes_what_the_plan_counts(jobs):
    """In rounds: the received bytes, at most twice the encoded bytes, and two buffers."""
    for held in jobs["exchange"]:
        encoded, received = held["encoded"], held["received"]
        assert (received > 0) == (held["stage"] == 0)
        assert encoded > 4 * BUDGET  # enough for several rounds
        for way in ("over", "back"):
            assert encoded + received < held[way] <= 2 * encoded + received + 2 * BUDGET
        assert held["leaves"] == received


@pytest.mark.parametrize("kind", ["flex", "transformer_engine"])
def test_an_attention_that_cannot_run_here_is_counted(kind, tables):
    """A cluster's config can be inspected on a laptop."""
    assert tables[kind] == tables["bfloat16"]


def test_without_sharding_each_rank_updates_what_it_holds(tables):
    rows = read_table(tables["alone"])
    assert {row["owner"] for row in rows} == {"each"}
    assert len(rows) == len(tables["job"]) - 1


def test_frozen_parts_have_no_owner(tables):
    assert {row["group"] for row in read_table(tables["frozen"])} == {"projector"}


@pytest.mark.parametrize("name", ["job", "frozen", "slices", "siglip"])
def test_the_plan_of_memory_counts_what_is_built(name, tables):
    """Needs only names and shapes for owners, and weights of every stage in float32."""
    planned = tables["planned"][name]
    assert planned["owners"]
    assert planned["loads"]
    for weights, parameters in zip(planned["weights"], planned["parameters"], strict=True):
        whole = weights // 4 - planned["encoder"] - parameters
        assert (whole == 0) == (name != "slices")  # besides its slices, a rank keeps whole tensors
        assert whole >= 0
    assert planned["siglip"] == (name == "siglip")


def test_a_parameter_without_a_rule_is_an_error(tables):
    wanted = "no rule for tensor 'language_model.model.layers.2.mlp.gate.weight' (8, 64)"
    assert wanted in tables["rule"]
