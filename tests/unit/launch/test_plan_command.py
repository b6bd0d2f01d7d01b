"""Tests of `kimi-pretrain plan` on a small real corpus against plain loops over the plan."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.pass_costs import active_parameters, chunk_flops
from launch.cli.main import app
from moonvit3d.memory import activation_bytes
from moonvit3d.model import VisionEncoder
from moonvit3d.packing import chunks
from tests.unit.launch.plan_command import (
    NO_MEDIA,
    RANKS,
    REPLICAS,
    SMALL,
    STAGES_OF_TWO,
    cost,
    found_by,
    one_line_error,
    plans_of,
    run,
    runner,
    seconds_of,
)


@pytest.mark.parametrize("overrides", [(), ("dep.max_split=2",)], ids=["whole", "split"])
def test_the_table_is_what_the_plan_says(root, overrides):
    found = found_by(root, "--steps", "3", *overrides)
    assert found["world_size"] == RANKS
    assert len(found["steps"]) == 3
    assert (found["total"]["split"] > 0) == bool(overrides)
    steps = zip(found["steps"], plans_of(root, 3, *overrides), strict=True)
    for number, (step, (plan, vision)) in enumerate(steps, 1):
        items, patches = plan.items, plan.items.patches
        assert step["step"] == plan.step + 1 == number
        assert (step["items"], step["patches"]) == (len(items), patches.sum())
        assert step["vision_tokens"] == items.tokens.sum()
        assert step["tokens"] == plan.samples.length.sum()
        owner = [int(row) // (8 // REPLICAS) for row in items.row]
        by_way = {
            "owner": seconds_of(patches, owner),
            "round_robin": seconds_of(patches, [i % RANKS for i in range(len(patches))]),
            "balanced": seconds_of(patches, vision.rank, vision.parts),
        }
        for way, seconds in by_way.items():
            assert step["loads"][way]["slowest"] == pytest.approx(max(seconds)), way
            assert step["loads"][way]["mean"] == pytest.approx(sum(seconds) / RANKS), way
        assert step["own"] == step["loads"]["balanced"]
        shared = [1.0 if many == 1 else 0.85 * many for many in vision.parts.tolist()]
        alone = [cost(size) / part for size, part in zip(patches.tolist(), shared, strict=True)]
        assert step["largest_seconds"] == pytest.approx(max(alone))
        assert step["largest_patches"] == patches[int(np.argmax(alone))]
        assert step["split"] == (vision.parts > 1).sum()
        check_travel(step, items.tokens.tolist(), vision, owner)


def check_travel(step: dict, tokens: list[int], vision, owner: list[int]) -> None:
    """Check the traffic of a step: two ranks per node, and 128 float32 values per token."""
    moved, sent, received = {"stay": 0, "inside_node": 0, "across_nodes": 0}, [0] * 4, [0] * 4
    for i, count in enumerate(tokens):
        many = int(vision.parts[i])
        for member in range(many):
            some = count * (member + 1) // many - count * member // many
            source, dest = int(vision.rank[i]) + member, owner[i]
            kind = "stay" if source == dest else "inside_node"
            kind = kind if source // 2 == dest // 2 else "across_nodes"
            moved[kind] += some
            if source != dest:
                sent[source] += some
                received[dest] += some
    assert step["moved"] == moved
    assert step["exchange_bytes"] == max(*sent, *received) * 128 * 4


def test_memory_is_enough_for_the_largest_chunk_and_all_embeddings(root):
    """The prediction is at least what the chunks of each rank need, and at most 30% more."""
    found = found_by(root, "--steps", "2", "dep.max_patches_per_chunk=300")
    vision_config = load_config("tiny_cpu").model.vision
    overrides = ("dep.max_patches_per_chunk=300",)
    for step, (plan, vision) in zip(found["steps"], plans_of(root, 2, *overrides), strict=True):
        items, least = plan.items, []
        table = np.stack([items.frames, items.grid_h, items.grid_w], 1)
        for rank in range(RANKS):
            mine = vision.encoded_by(rank).item
            cuts = chunks(items.patches[mine].tolist(), 300)
            of_chunks = [activation_bytes(table[mine[cut]], vision_config, 4).sum() for cut in cuts]
            tokens = sum(items.tokens[mine]) + 2 * sum(items.tokens[vision.home == rank])
            least.append(max(of_chunks, default=0) + int(tokens) * 128 * 4)
        assert max(least) <= step["memory_bytes"] <= 1.3 * max(least)
        assert 0 <= step["memory_rank"] < RANKS


def test_all_steps_are_added_up(root):
    found = found_by(root, "--steps", "4")
    steps, whole = found["steps"], found["total"]
    for name in ("items", "patches", "tokens", "vision_tokens", "split"):
        assert whole[name] == sum(step[name] for step in steps)
    for way in ("owner", "round_robin", "balanced"):
        for what in ("mean", "slowest"):
            added = sum(step["loads"][way][what] for step in steps)
            assert whole["loads"][way][what] == pytest.approx(added)
    assert whole["moved"]["stay"] == sum(step["moved"]["stay"] for step in steps)
    assert whole["exchange_bytes"] == max(step["exchange_bytes"] for step in steps)
    assert whole["memory_bytes"] == max(step["memory_bytes"] for step in steps)


def test_the_printed_lines_hold_the_numbers(root):
    printed = run(root, "--steps", "2", "--json").stdout.splitlines()
    found = json.loads(printed[-1])
    assert printed[0].startswith("4 ranks on nodes of 2; ")
    rows = [line for line in printed if line.split()[:1] in (["1"], ["2"], ["all"])]
    for line, step in zip(rows, [*found["steps"], found["total"]], strict=True):
        numbers, seconds, ratios, split, moved, most = line.split("|")
        assert numbers.split()[1:3] == [f"{step['items']:,}", f"{step['patches']:,}"]
        ways = [step["loads"][way] for way in ("owner", "round_robin", "balanced")]
        assert seconds.split() == [
            f"{value:.3g}" for value in (ways[0]["mean"], *(way["slowest"] for way in ways))
        ]
        assert ratios.split() == [f"{way['slowest'] / way['mean']:.2f}" for way in ways]
        assert int(split) == step["split"]
        shares = [100 * value / step["vision_tokens"] for value in step["moved"].values()]
        assert moved.split() == [f"{share:.0f}%" for share in shares]
        sizes = step["exchange_bytes"] / 2**20, step["memory_bytes"] / 2**30
        assert most.split() == [f"{size:.3g}" for size in sizes]


def test_advice_where_the_largest_item_binds(root):
    """With a quadratic cost, one image alone sets the time of the slowest rank."""
    steep = "dep.cost={per_patch: 1.0e-9, per_patch_squared: 1.0e-3, per_item: 0.0}"
    (told,) = found_by(root, steep)["advice"]
    assert "dep.max_split=2" in told  # limited by the ranks of a node
    assert "in 8 of 8 steps" in told or "of 8 steps" in told
    assert "data.limits" in told
    (told,) = found_by(root, steep, "dep.max_split=2")["advice"] or [""]
    assert "dep.max_split" not in told
    flat = "dep.cost={per_patch: 0.0, per_patch_squared: 0.0, per_item: 1.0e-3}"
    assert found_by(root, flat)["advice"] == []


def test_advice_where_memory_or_a_chunk_is_too_small(root):
    flat = "dep.cost={per_patch: 0.0, per_patch_squared: 0.0, per_item: 1.0e-3}"
    limit = found_by(root, flat)["total"]["memory_bytes"] / 2**30
    (told,) = found_by(root, flat, f"dep.memory_limit_gib={limit * 0.99}")["advice"]
    assert "in 1 of 8 steps" in told
    assert "dep.memory_limit_gib" in told
    assert found_by(root, flat, f"dep.memory_limit_gib={limit * 1.01}")["advice"] == []
    (told,) = found_by(root, flat, "dep.max_patches_per_chunk=64")["advice"]
    assert "dep.max_patches_per_chunk=64: the run would not start" in told
    (told,) = found_by(root, "dep.cost=null")["advice"][-1:]
    assert "--calibrate" in told


@pytest.mark.parametrize(
    ("override", "way"),
    [("dep.assign=owner", "owner"), ("dep.assign=round_robin", "round_robin"),
     ("dep.placement=colocated", "owner")],
)  # fmt: skip
def test_own_is_what_the_config_chooses(root, override, way):
    for step in found_by(root, "--steps", "2", override)["steps"]:
        assert step["own"] == step["loads"][way]
        assert step["loads"]["balanced"]["slowest"] < step["loads"]["owner"]["slowest"]
        assert (step["moved"]["stay"] == step["vision_tokens"]) == (way == "owner")


def test_steps_without_media(root):
    found = found_by(root, "--steps", "2", *NO_MEDIA)
    for step in found["steps"]:
        assert step["items"] == step["memory_bytes"] == step["exchange_bytes"] == 0
        assert step["own"] == {"mean": 0.0, "slowest": 0.0}
    assert found["advice"] == []


def test_the_trillion_parameter_layout_is_planned_in_one_process(root):
    overrides = ("data.seq_len=4096", "data.rows_per_step=256")
    found = found_by(root, "--steps", "1", *overrides, config="kimi_k25_1t")
    assert found["world_size"] == 256
    (step,) = found["steps"]
    assert step["items"] > 1000
    balanced, owner = (step["loads"][way] for way in ("balanced", "owner"))
    assert balanced["slowest"] / balanced["mean"] < 1.1
    assert owner["slowest"] > 10 * balanced["slowest"]  # 16 of 256 ranks would encode all


def test_planning_needs_neither_torch_nor_the_engine():
    code = (
        "import sys, kimi_pretrain.tools.predict\n"
        "sys.exit(', '.join({'torch', 'megatron'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_file_holds_what_is_printed(root, tmp_path):
    file = tmp_path / "plan.json"
    printed = run(root, "--steps", "1", "--json", "--out", str(file)).stdout.splitlines()[-1]
    assert file.read_text() == printed + "\n"


def test_errors_are_one_line(root, tmp_path):
    assert str(tmp_path / "nope") in one_line_error(run(tmp_path / "nope", code=2))
    missing = run(root, "data.sources={pictures: 1.0, maps: 1.0}", code=2)
    assert "maps" in one_line_error(missing)
    assert "no folder" in one_line_error(run(root, "--out", str(tmp_path / "a/b.json"), code=2))


VISION = "model.vision={width: 32, depth: 1, heads: 2, mlp_width: 64, pos_grid: 8, out_width: 128}"


def test_calibrate_refuses_too_few_sizes():
    small = [VISION, "data.limits={image: 4, frame: 1}", "dep.max_patches_per_chunk=8"]
    result = runner.invoke(app, ["plan", "--config", "tiny_cpu", "--calibrate", *small])
    assert result.exit_code == 2, result.output
    assert "cannot be fitted to 2 timings" in one_line_error(result)


def test_samples_that_do_not_fit_a_row_are_told(root):
    short = ("data.seq_len=64", "data.split_text=false", "--steps", "1")
    told = [line for line in run(root, *short, *NO_MEDIA).output.splitlines() if "left out" in line]
    assert len(told) == 1
    assert told[0].startswith("source 'words': of ")
    assert found_by(root, *short, *NO_MEDIA)["notices"] == told
    assert "left out" not in run(root, "--steps", "1").output


def pipeline_of_two(forward, backward, count: int, send: float) -> float:
    """Return the seconds of 1F1B on two stages; the first stage runs one forward pass ahead."""
    (f0, f1), (b0, b1) = forward, backward
    free, sent, second, came = 0.0, [0.0] * count, 0.0, [0.0] * count

    def first(n: int) -> None:
        nonlocal free
        free += f0
        sent[n] = free + send

    first(0)
    for n in range(count):
        if n + 1 < count:
            first(n + 1)
        second = max(second, sent[n]) + f1 + b1
        came[n] = second + send
        free = max(free, came[n]) + b0
    return free


def sums_of_two(config, network: float) -> float:
    """Return the slower stage's seconds to reduce gradients over 2 replicas and gather weights.

    Each replica has half of the experts, so expert gradients are not summed.
    """
    if "language_model" in config.train.frozen:
        return 0.0
    model = config.model.language
    query = model.qk_nope_dim + model.qk_rope_dim
    shapes = [
        (model.q_lora_rank, model.hidden_size), (model.num_heads * query, model.q_lora_rank),
        (model.kv_lora_rank + model.qk_rope_dim, model.hidden_size),
        (model.num_heads * (model.qk_nope_dim + model.v_dim), model.kv_lora_rank),
        (model.hidden_size, model.num_heads * model.v_dim),
    ]  # fmt: skip
    attention = sum(rows * columns for rows, columns in shapes)
    dense = 3 * model.hidden_size * model.dense_ffn_size
    moe = 3 * model.hidden_size * model.expert_ffn_size + model.num_experts * model.hidden_size
    vocabulary = model.vocab_size * model.hidden_size
    stages = [2 * attention + dense + moe + vocabulary, 2 * attention + 2 * moe + vocabulary]
    return max(stages) / 2 * (4 + 4) / network


@pytest.mark.parametrize("frozen", ["[]", "[vision_tower]", "[vision_tower, projector]"])
def test_seconds_of_a_step_are_those_of_plain_loops(root, frozen):
    """Each part of a step matches a computation by hand, on a network slow enough to matter."""
    network, overrides = 1e6, (*STAGES_OF_TWO, f"train.frozen={frozen}", "dep.flops_per_second=1e9")
    found = found_by(root, "--step", "--steps", "3", f"--network={network}", *overrides)
    config = load_config("tiny_cpu", [*SMALL, *overrides])
    assert config.num_microbatches() == 8
    forward = chunk_flops(config) / 1e9
    send = 128 * config.model.language.hidden_size * 4 / network
    passes = 8 * 3 * forward
    pipeline = pipeline_of_two(forward, 2 * forward, 8, send)
    weights = {"vision_tower": 0, "projector": 0}
    with torch.device("meta"):
        encoder = VisionEncoder(config.model.vision)
    for name, weight in encoder.named_parameters():
        part = "projector" if name.startswith("mm_projector") else "vision_tower"
        weights[part] += weight.numel() if part not in frozen else 0
    # The count omits biases and norms, which are 4% of this small encoder.
    ring = 2 * 4 * sum(weights.values()) * (RANKS - 1) / RANKS / network
    for (plan, vision), step in zip(plans_of(root, 3, *overrides), found["steps"], strict=True):
        whole = max(seconds_of(vision.patches, vision.rank))
        assert step["vision"] == pytest.approx(whole / 4 if "tower" in frozen else whole)
        away = np.zeros((2, RANKS))
        spans = vision.spans
        for source, dest, count in zip(spans.source, spans.dest, spans.count, strict=True):
            away[0, source] += count * (source != dest)
            away[1, dest] += count * (source != dest)
        ways = 1 if weights == {"vision_tower": 0, "projector": 0} else 2
        sent = away.max() * config.model.vision.out_width * 4
        assert step["exchange"] == pytest.approx(ways * sent / network)
        assert step["passes"] == pytest.approx(passes.mean())
        assert step["imbalance"] == pytest.approx(passes.max() - passes.mean())
        parts = step["passes"] + step["imbalance"] + step["bubble"]
        assert parts == pytest.approx(pipeline)
        assert step["gradient_sum"] == pytest.approx(ring + sums_of_two(config, network), rel=0.1)
        assert step["update"] == 0.0
        rest = step["vision"] + step["exchange"] + step["gradient_sum"]
        assert step["total"] == pytest.approx(pipeline + rest)
        assert step["tokens"] == plan.num_tokens
    tokens, seconds = (sum(s[key] for s in found["steps"]) for key in ("tokens", "total"))
    assert found["tokens_per_day"] == pytest.approx(86_400 * tokens / seconds)


def test_slices_gradients_are_gathered_before_they_are_summed(root):
    """The two tensor-parallel ranks of a stage gather their slices, then sum whole tensors."""
    given = (*STAGES_OF_TWO, *NO_MEDIA, "layout.dp=1", "layout.tp=2", "layout.ep=2")
    node, network = 1e6, 2e6
    found = found_by(
        root, "--step", "--steps", "1", f"--network={network}", f"--node-network={node}", *given
    )
    config = load_config("tiny_cpu", [*SMALL, *given])
    summed = sums_of_two(config, network)  # two copies, one per tensor-parallel rank
    gathered = summed * network / (4 + 4) * 4 / node
    assert found["steps"][0]["gradient_sum"] == pytest.approx(summed + gathered, rel=1e-9)
    near = found_by(root, "--step", "--steps", "1", f"--network={network}", *given)
    assert near["steps"][0]["gradient_sum"] == pytest.approx(summed, rel=1e-3)


def test_a_step_without_media_is_its_pipeline(root):
    found = found_by(root, "--step", "--steps", "1", *NO_MEDIA)
    (step,) = found["steps"]
    assert step["vision"] == step["exchange"] == step["update"] == 0.0
    assert step["total"] > 0


def test_bubbles_take_vision_work_out_of_a_step(root):
    """The vision seconds that remain are those that the bubble plan leaves outside bubbles."""
    slow = (*STAGES_OF_TWO, "dep.flops_per_second=1e9")
    before = found_by(root, "--step", "--steps", "2", *slow)["mean"]
    after = found_by(root, "--step", "--steps", "2", *slow, "dep.bubbles=all")
    plans = plans_of(root, 2, *slow, "dep.bubbles=all")
    left = [vision.bubbles.plan for _, vision in plans if vision.bubbles]
    assert len(left) == 2
    outside = np.mean([plan.upfront + plan.after for plan in left])
    assert after["mean"]["vision"] == pytest.approx(outside)
    assert after["mean"]["vision"] < before["vision"]
    assert after["mean"]["bubble"] == pytest.approx(before["bubble"])
    assert after["mean"]["exchange"] == 0.0


def test_a_step_says_what_binds(root):
    fast = "dep.flops_per_second=1e13", "data.requests_per_second=null"
    found = found_by(root, "--step", "--steps", "1", *STAGES_OF_TWO, *fast)
    assert "dep.bubbles=all" in found["advice"][0]  # encoding dominates
    found = found_by(root, "--step", "--steps", "1", *STAGES_OF_TWO, "dep.flops_per_second=1e7")
    assert not any("dep.bubbles" in line for line in found["advice"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--step", "dep.placement=colocated"), "dep.placement=decoupled"),
        (("--step", "--memory"), "--memory and --step: give one of them"),
        (("--step", "--network", "0"), "--network"),
        (("--search",), "--search without --step"),
        (("--network", "1e9"), "--network without --step"),
        (("--memory", "--network", "1e9"), "--network without --step"),
        (("--latency", "0", "--expert-imbalance", "1"), "--latency, --expert-imbalance without"),
        (("--step", "--search"), "train.memory_limit_gib=null"),
        (("--step", "--search", "train.memory_limit_gib=0.001"), "fits train.memory_limit_gib"),
    ],
)
def test_a_step_that_cannot_be_predicted_is_one_line(root, arguments, words):
    result = run(root, *arguments, code=2)
    assert words in result.output


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_travel_to_experts_on_other_nodes(root, overlap):
    """Half of the token copies cross nodes; with overlap, a pass takes the longer of both times."""
    network = 2e6
    given = ("data.rows_per_step=16", "dep.flops_per_second=1e9", "dep.ranks_per_node=1")
    given = (*given, f"layout.overlap_experts={str(overlap).lower()}")
    found = found_by(root, "--step", "--steps", "1", f"--network={network}", *given)
    model = load_config("tiny_cpu", [*SMALL, *given]).model.language
    assert (model.num_layers, model.num_dense_layers) == (4, 1)
    copies = 128 * model.experts_per_token / 2
    layer = 2 * copies * model.hidden_size * 4 / network
    forward = chunk_flops(load_config("tiny_cpu", [*SMALL, *given])) / 1e9
    moved = layer * np.array([0, 1, 1, 1])  # the layer of the first chunk is dense
    passes = 0.0
    for seconds in (forward, 2 * forward):
        passes += (np.maximum(seconds, moved) if overlap else seconds + moved).sum()
    assert found["steps"][0]["passes"] == pytest.approx(8 * passes / 2)
    if overlap:
        assert (forward < moved).any()
        assert (2 * forward > moved).any()


MEASURED = (
    "dep.pass_cost={embedding_forward: 1.0e-3, embedding_backward: 2.0e-3, dense_forward: 3.0e-3, "
    "dense_backward: 5.0e-3, expert_forward: 7.0e-3, expert_backward: 11.0e-3, "
    "head_forward: 13.0e-3, head_backward: 17.0e-3}",
    "dep.update_cost={vocabulary: 0.3, dense_layer: 0.5, expert_layer: 0.7, expert: 0.11, "
    "encoder: 2.9}",
)


def test_measured_passes_and_updates_take_the_place_of_counted_ones(root):
    given = (*STAGES_OF_TWO, *MEASURED, "dep.ranks_per_node=4")
    found = found_by(root, "--step", "--steps", "1", "--network=1e15", *given, *NO_MEDIA)
    (step,) = found["steps"]
    forward = (1e-3 + 3e-3 + 7e-3, 2 * 7e-3 + 13e-3)  # one dense and three expert layers
    backward = (2e-3 + 5e-3 + 11e-3, 2 * 11e-3 + 17e-3)
    pipeline = pipeline_of_two(forward, backward, 8, 0.0)
    assert step["passes"] + step["imbalance"] + step["bubble"] == pytest.approx(pipeline, rel=1e-3)
    # Two replicas share the update of common weights; each has four of the eight experts.
    loads = (0.3 + 0.5 + 0.7) / 2 + 4 * 0.11, (2 * 0.7 + 0.3) / 2 + 2 * 4 * 0.11
    level = (sum(loads) + 2.9 / 2) / 2  # the encoder's share evens out the ranks
    assert level > max(loads)
    assert step["update"] == pytest.approx(level)
    assert step["total"] == pytest.approx(pipeline + level, rel=1e-3)
    table = run(root, "--step", "--steps", "1", *given).output
    assert "passes as measured" in table
    assert "left out" not in table
    table = run(root, "--step", "--steps", "1", *given, "dep.update_cost=null").output
    assert "left out: update (give dep.update_cost)" in table
    alone = found_by(root, "--step", "--steps", "1", *given, "optim.shard_state=false")
    assert alone["mean"]["update"] == pytest.approx(2 * 0.7 + 0.3 + 2 * 4 * 0.11 + 2.9)
    little = MEASURED[1].replace("encoder: 2.9", "encoder: 0.0")
    assert found_by(root, "--step", "--steps", "1", *given, little)["mean"]["update"] == (
        pytest.approx(max(loads))
    )


def test_what_starting_a_chunk_costs_counts_for_steps_alone(root):
    more = "dep.cost.per_chunk=0.25"
    before, after = (found_by(root, "--step", "--steps", "2", *given) for given in ((), (more,)))
    for one, other in zip(before["steps"], after["steps"], strict=True):
        assert other["vision"] == pytest.approx(one["vision"] + 0.25)
    assert found_by(root, "--steps", "2", more)["steps"] == found_by(root, "--steps", "2")["steps"]


def test_a_busier_expert_rank_and_latency_lengthen_the_passes(root):
    """An imbalance lengthens an expert layer by its routed experts' share of the operations."""
    given = (*MEASURED, "dep.ranks_per_node=4", "data.rows_per_step=16")
    arguments = ("--step", "--steps", "1", "--network=1e15", *given, *NO_MEDIA)
    before = found_by(root, *arguments)["steps"][0]["passes"]
    after = found_by(root, *arguments, "--latency=0.001")["steps"][0]["passes"]
    assert after - before == pytest.approx(8 * 3 * (4 + 3) * 0.001 / 2)  # 3 layers, 2 stages
    after = found_by(root, *arguments, "--expert-imbalance=1.5")["steps"][0]["passes"]
    model, tokens = load_config("tiny_cpu").model.language, 128
    routed = 2 * 3 * model.hidden_size * model.expert_ffn_size
    both = [one / 1e3 for one in (7, 11)]
    _, active, _ = active_parameters(model)
    # v_dim equals qk_nope_dim.
    keys = tokens * model.num_heads * (2 * model.qk_nope_dim + model.qk_rope_dim) / 2
    share = routed / (active + keys)
    assert 0.2 < share < 0.6
    assert after - before == pytest.approx(8 * 3 * 0.5 * share * sum(both) / 2)
    alone = (*arguments, "layout.ep=1")
    assert (
        found_by(root, *alone)["steps"] == found_by(root, *alone, "--expert-imbalance=2")["steps"]
    )
