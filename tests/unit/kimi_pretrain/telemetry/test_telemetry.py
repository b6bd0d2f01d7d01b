"""Tests phases, useful FLOPs, exposed time and step lines against other counts and by hand."""

import itertools
import json
import mmap
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from data_pipeline.loader import LoaderStats
from data_pipeline.plan.step_plan import GlobalPlan, ItemTable, SampleTable
from kimi_pretrain.config import load_config
from kimi_pretrain.dep.bubble_times import RankTimes
from kimi_pretrain.dep.planner import VisionPlanner
from kimi_pretrain.optim.step_stats import UpdateFigures
from kimi_pretrain.reliability.anomaly_guard import Verdict
from kimi_pretrain.telemetry import mfu as counting
from kimi_pretrain.telemetry.exposed import exposed
from kimi_pretrain.telemetry.losses import LossSums
from kimi_pretrain.telemetry.metrics import Telemetry, rank_metrics, share_of_largest
from kimi_pretrain.telemetry.mfu import (
    Peak,
    backbone_flops,
    encoder_flops,
    peak_flops,
    step_flops,
    utilisation,
)
from kimi_pretrain.telemetry.phases import (
    PhaseClock,
    ProcessMeter,
    first_start,
    last_end,
    phase_of,
    seconds_of_phases,
)
from kimi_pretrain.telemetry.run_dir import scalars
from kimi_pretrain.telemetry.stopwatch import Sections
from moonvit3d.config import MoonViTConfig
from moonvit3d.model import VisionEncoder

CPU = torch.device("cpu")
MIB = 1 << 20


# ---- phases


def test_spans_of_nested_and_repeated_phases_are_disjoint_and_add_up():
    clock = PhaseClock(CPU)
    begin = time.perf_counter()
    with clock.phase("outer"):
        time.sleep(0.01)
        with clock.phase("inner"):
            time.sleep(0.02)
        time.sleep(0.01)
    with clock.phase("inner"):
        time.sleep(0.01)
    total = time.perf_counter() - begin
    assert list(clock.spans) == ["outer", "inner", "outer#2", "inner#2"]
    spans = list(clock.spans.values())
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))
    seconds = seconds_of_phases(clock.spans)
    assert set(seconds) == {"outer", "inner"} == set(map(phase_of, clock.spans))
    assert seconds["outer"] >= 0.02
    assert seconds["inner"] >= 0.03
    assert sum(seconds.values()) <= total + 1e-3
    assert first_start(clock.spans, "inner") == clock.spans["inner"][0]
    assert last_end(clock.spans, "outer") == clock.spans["outer#2"][1]
    assert first_start(clock.spans, "other") is last_end(clock.spans, "other") is None


def test_a_new_step_forgets_and_leaves_the_old_records_alone():
    clock = PhaseClock(CPU)
    with clock.phase("a"):
        pass
    before = clock.spans
    clock.restart()
    assert set(before) == {"a"}
    assert clock.spans == {} == clock.peak_bytes
    with pytest.raises(RuntimeError, match="inside"), clock.phase("a"):
        raise RuntimeError("inside")
    clock.restart()
    with clock.phase("a"):
        pass
    assert set(clock.spans) == {"a"}


def test_spans_are_in_seconds_of_the_wall_clock():
    clock = PhaseClock(CPU)
    before = time.time()
    with clock.phase("a"):
        pass
    (span,) = clock.spans.values()
    assert before - 1e-3 <= span[0] <= span[1] <= time.time() + 1e-3


def touch(size):
    """Make `size` bytes resident and free them; malloc might return resident pages."""
    with mmap.mmap(-1, size) as pages:
        for start in range(0, size, mmap.PAGESIZE):
            pages[start] = 1


def test_the_peak_is_that_of_the_phase():
    meter = ProcessMeter()
    meter.reset()
    if meter.read() is None:
        pytest.skip("clear_refs may not be written here")
    clock = PhaseClock(CPU, meter)
    with clock.phase("small"):
        pass
    with clock.phase("large"):
        with clock.phase("inside"):
            touch(96 * MIB)
        touch(32 * MIB)
    with clock.phase("after"), clock.phase("inside"):
        pass  # a second, smaller phase of the name does not change the peak
    peak = {name: size / MIB - clock.peak_bytes["small"] / MIB for name, size in
            clock.peak_bytes.items()}  # fmt: skip
    assert peak["inside"] == pytest.approx(96, abs=8)
    assert peak["large"] == pytest.approx(32, abs=8)
    assert peak["after"] == pytest.approx(0, abs=8)


def test_where_memory_cannot_be_measured_nothing_fails(tmp_path):
    clock = PhaseClock(CPU, ProcessMeter(tmp_path / "nothing"))
    with clock.phase("a"):
        pass
    assert set(clock.spans) == {"a"}
    assert clock.peak_bytes == {}


# ---- useful FLOPs

LANGUAGE = {
    "num_layers": 3, "hidden_size": 64, "num_heads": 4, "dense_ffn_size": 96, "expert_ffn_size": 32,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_dim": 12, "qk_rope_dim": 4, "v_dim": 10,
    "num_experts": 8, "experts_per_token": 2, "num_shared_experts": 2, "num_dense_layers": 1,
    "vocab_size": 96,
}  # fmt: skip
VISION = MoonViTConfig(width=64, depth=3, heads=4, mlp_width=96, pos_grid=8, out_width=48)
GRIDS = np.array([(1, 8, 12), (3, 4, 6), (1, 2, 2)])


def language(**changes):
    return load_config("tiny_cpu").model.language.model_copy(update=LANGUAGE | changes)


def deepseek(q_lora_rank: int | None):
    transformers = pytest.importorskip("transformers")
    names = {
        "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads",
        "dense_ffn_size": "intermediate_size", "expert_ffn_size": "moe_intermediate_size",
        "qk_nope_dim": "qk_nope_head_dim", "qk_rope_dim": "qk_rope_head_dim",
        "v_dim": "v_head_dim", "num_experts": "n_routed_experts",
        "experts_per_token": "num_experts_per_tok", "num_shared_experts": "n_shared_experts",
        "num_dense_layers": "first_k_dense_replace",
    }  # fmt: skip
    sizes = {names.get(name, name): value for name, value in LANGUAGE.items()}
    config = transformers.DeepseekV3Config(
        **sizes | {"q_lora_rank": q_lora_rank}, n_group=1, topk_group=1, num_key_value_heads=4,
        attn_implementation="eager", experts_implementation="eager",
    )  # fmt: skip
    return transformers.DeepseekV3ForCausalLM(config)


def counted(run) -> dict[str, int]:
    with FlopCounterMode(display=False) as counter:
        run()
    return {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}


@pytest.mark.parametrize("q_lora_rank", [24, None])
@pytest.mark.parametrize("trained", [True, False])
def test_backbone_equals_what_torch_counts_in_deepseek_v3(q_lora_rank, trained):
    """Products with weights are exactly equal; torch counts full attention, twice ours."""
    model, length = deepseek(q_lora_rank).requires_grad_(trained), 40
    inputs = torch.rand(1, length, 64, requires_grad=True)  # as if an encoder came before it
    found = counted(lambda: model(inputs_embeds=inputs).logits.sum().backward())
    assert set(found) == {"aten.mm", "aten.bmm"}
    ours = backbone_flops(np.array([length]), language(q_lora_rank=q_lora_rank), trained=trained)
    assert ours == found["aten.mm"] + found["aten.bmm"] / 2
    with torch.no_grad():
        forward = counted(lambda: model(inputs_embeds=inputs))
    config = language(q_lora_rank=q_lora_rank)
    alone = backbone_flops(np.array([length]), config, trained=False, upstream=False)
    assert alone == forward["aten.mm"] + forward["aten.bmm"] / 2
    assert found["aten.mm"] == forward["aten.mm"] * (3 if trained else 2)


def test_attention_stays_inside_documents():
    config = language()
    one, two = (backbone_flops(np.array(n), config) for n in ([80], [30, 50]))
    width = 4 * (12 + 4 + 10)
    assert one - two == 3 * 3 * width * (80**2 - 30**2 - 50**2)


@pytest.mark.parametrize("frozen", [(), ("vision_tower",), ("projector",)])
def test_encoder_equals_what_torch_counts(frozen):
    """Counts are exact except for resampling the position grid, which serves no media token."""
    with torch.device("meta"):
        model = VisionEncoder(VISION)
        model.vision_tower.requires_grad_("vision_tower" not in frozen)
        model.mm_projector.requires_grad_("projector" not in frozen)
        pixels = torch.empty(int(GRIDS.prod(1).sum()), 3, 14, 14)
        grids = [tuple(grid) for grid in GRIDS.tolist()]
        found = counted(lambda: model(pixels, grids).sum().backward())
    ours = encoder_flops(
        GRIDS, VISION, tower="vision_tower" not in frozen, projector="projector" not in frozen
    )
    heads = 4 * VISION.depth * VISION.width * float((GRIDS.prod(1) ** 2).sum())
    attention = heads * (1 if "vision_tower" in frozen else 3)
    assert ours - attention == sum(found.values()) - found["aten.bmm"]
    assert attention <= found["aten.bmm"] < 1.05 * attention


def test_a_step_counts_only_what_is_trained():
    config = load_config("tiny_cpu")
    model, lengths, grids = config.model, np.array([100, 60]), np.array([(1, 8, 8)])
    whole = step_flops(grids, lengths, model)
    text = step_flops(grids[:0], lengths, model)
    assert text.encoder == 0 < whole.encoder
    assert text.backbone == whole.backbone
    assert whole.total == whole.encoder + whole.backbone
    seen = step_flops(grids, lengths, model, ["vision_tower", "projector"])
    # This is the forward pass alone; in training no gradient is needed before the patches.
    assert 3 * seen.encoder - whole.encoder == 2 * 64 * (3 * 14 * 14) * model.vision.width
    # A frozen language model passes gradients on, but only if there are media to train on.
    through = step_flops(grids, lengths, model, ["language_model"])
    nothing = step_flops(grids[:0], lengths, model, ["language_model"])
    assert whole.backbone / 3 == pytest.approx(nothing.backbone)
    assert nothing.backbone < through.backbone < whole.backbone


def test_peaks(monkeypatch):
    assert peak_flops(CPU, torch.float32, 1.5) == Peak(1.5e12, "train.peak_tflops")
    measured = peak_flops(CPU, torch.float32)
    assert measured.source == "measured, float32"
    assert 1e8 < measured.flops_per_second < 1e14
    cuda = torch.device("cuda", 0)
    for name, kind, tflops in (
        ("NVIDIA H200", torch.bfloat16, 989),
        ("NVIDIA H100 80GB HBM3", torch.bfloat16, 989),
        ("NVIDIA H100 PCIe", torch.bfloat16, 756),
        ("NVIDIA A100-SXM4-80GB", torch.float32, 19.5),
        ("A100-SXM4-40GB", torch.bfloat16, 312),  # the name that older drivers report
        ("NVIDIA A100 80GB PCIe", torch.bfloat16, 312),
        ("NVIDIA B200", torch.bfloat16, 2250),
        ("NVIDIA GB200", torch.bfloat16, 2500),
        ("NVIDIA H200", torch.float64, 67),
    ):
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, kind).flops_per_second == tflops * 1e12, name
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    assert peak_flops(cuda, torch.float32).flops_per_second == 494e12
    monkeypatch.setattr(counting, "measured_flops", lambda device, dtype: 7.0)
    for name in (
        "A GPU of tomorrow", "NVIDIA RTX A1000", "NVIDIA RTX A1000 Laptop GPU", "NVIDIA A100X",
        "NVIDIA A100-SXM4-80GB MIG 1g.10gb", "NVIDIA H200 MIG 3g.71gb", "NVIDIA GH200 480GB",
        "GRID A100-10C", "NVIDIA H100 PCIe MIG 1g.10gb",
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert peak_flops(cuda, torch.bfloat16) == Peak(7.0, "measured, bfloat16"), name


# ---- exposed encoder time


def step_spans(start: float, over: float, back: float, end: float) -> dict:
    """Return a rank's phases: vision from `start`, backbone `over` to `back`, sums until `end`."""
    middle, last = (start + over) / 2, (back + end) / 2
    return {
        "2 vision forward": (start, middle),
        "3 hand-over": (middle, over),
        "4 backbone": (over, back),
        "5 hand-back": (back, last - 0.1),
        "6 vision backward": (last - 0.1, last),
        "6 gradient sum": (last, end),
    }


def test_exposed_is_from_the_latest_start_to_the_common_end():
    # Rank 1 starts 2 s late; the clock of rank 2 is an hour ahead.
    everyone = [
        step_spans(0.0, 5.0, 9.0, 12.0),
        step_spans(2.0, 5.0, 9.5, 12.0),
        step_spans(3601.0, 3605.0, 3608.0, 3612.0),
    ]
    found = exposed(everyone)
    assert found.forward == (2.0, 5.0)
    assert found.backward == (9.5, 12.0)
    assert found.seconds == {"forward": 3.0, "backward": 2.5}


def test_groups_that_share_their_media_wait_for_the_slowest_group():
    everyone = [step_spans(0, 1, 5, 6), step_spans(0.5, 1, 5, 6), step_spans(0, 3, 5, 6)]
    everyone.append(step_spans(0, 2.5, 5.5, 6))
    groups = [np.array([0, 1]), np.array([2, 3])]
    assert exposed(everyone, groups).seconds == {"forward": 2.5, "backward": 0.5}
    assert exposed(everyone).seconds["forward"] == 0.5


def test_steps_without_vision_phases_expose_nothing():
    found = exposed([{"4 backbone": (0.0, 1.0)}] * 2)
    assert found.forward is found.backward is None
    frozen = {"2 vision forward": (0.0, 1.0), "3 hand-over": (1.0, 1.5), "4 backbone": (1.5, 2.0)}
    assert exposed([frozen]).seconds == {"forward": 1.5, "backward": 0.0}


# ---- the line of a step

RANKS = 4
CONFIG = load_config(
    "tiny_cpu",
    ["train.peak_tflops=0.01", "dep.max_split=2", "dep.cost={per_patch: 1.0e-3, per_patch_squared: "
     "0.0, per_item: 0.0}"],
)  # fmt: skip


def global_plan(grids: list[tuple[int, int, int]]) -> GlobalPlan:
    """Return a plan of sixteen rows with one document of 200 tokens each; item i is in row i."""
    rows, n, m = np.arange(16, dtype=np.int32), 16, len(grids)
    zeros = np.zeros(16, np.int64)
    t, h, w = np.array(grids, dtype=np.int32).reshape(-1, 3).T
    few = zeros[:m]
    return GlobalPlan(
        step=1, seq_len=256, num_rows=n,
        samples=SampleTable(zeros, zeros, zeros, zeros, zeros, zeros > 0, rows, zeros, zeros + 200),
        items=ItemTable(
            rows[:m], few, few, few, few, few, t, h, w, rows[:m], few + 10,
            (h * w // 4).astype(np.int32),
        ),
    )  # fmt: skip


def own_figures(rank: int) -> UpdateFigures:
    """Return figures: rank 0 owns attention, 1 and 2 own experts, 2 is slow, 3 owns nothing."""
    if rank == 3:
        return UpdateFigures()
    group, square, count = ("attention", 0.4, 10) if rank == 0 else ("experts", 0.1 * rank, 2)
    return UpdateFigures({group: square}, {group: count}, 0.5 * rank, 0.25 + 0.01 * rank)


def own_losses(rank: int) -> LossSums:
    """Return losses of ranks 2 and 3: both count source 1, and rank 3 also counts source 2."""
    cells = {2: [1], 3: [1, 2]}.get(rank, [])  # rows of 256 tokens have one bin
    numbers = np.arange(1, len(cells) + 1)
    return LossSums(np.array(cells, int), 3.0 * numbers, numbers)


def reports(
    plan: GlobalPlan, spans: list[dict], siglip=None, bubbles=(None,) * RANKS, times=(None,) * RANKS
) -> list[SimpleNamespace]:
    """Return the step reports of the ranks of a layout with 2 stages and 2 replicas."""
    vision = VisionPlanner(CONFIG).plan(plan)
    return [
        SimpleNamespace(
            loss=1.0, loss_tokens=3000, text_tokens=plan.text_tokens,
            vision_tokens=plan.vision_tokens, items=len(plan.items), skipped=np.zeros(0, int),
            update=SimpleNamespace(
                grad_norm=1.0, lr=0.1, applied=True, clipped_heads=5, skipped_steps=2,
                max_logit=2.0, max_logits=np.array([2.0, -np.inf, 0.5]), own=own_figures(rank),
                verdict=Verdict(),
            ),
            vision=vision, spans=spans[rank], kept_patches=10 * rank,
            peak_bytes={"4 backbone": (rank + 1) << 30, "7 update": (8 - rank) << 29},
            exchange_bytes={"over": 100 * rank, "back": 30 - rank}, losses=own_losses(rank),
            siglip=siglip, bubble_seconds=bubbles[rank], bubble_times=times[rank],
            bubble_sections=(),
        )
        for rank in range(RANKS)
    ]  # fmt: skip


def line_of(plan: GlobalPlan, spans: list[dict], seconds: float = 12.0, **told_of) -> dict:
    told = reports(plan, spans, **told_of)
    stats = LoaderStats(requests=3, bytes=1000)
    saves = [{}, {"stall": 0.5}, {"stall": 0.25, "background": 3.0}, {}]
    everyone = [
        rank_metrics(report, seconds - rank, stats, first_stage=rank < 2, save=saves[rank])
        for rank, report in enumerate(told)
    ]
    return Telemetry.on(CONFIG, CPU).line(7, plan, told[0], everyone)


def test_pairs_are_in_the_line_where_they_are_trained_alone():
    plan, spans = global_plan(GRIDS_OF_STEP), [step_spans(1.0, 5.0, 9.0, 12.0)] * RANKS
    assert not {"siglip_loss", "pairs"} & line_of(plan, spans).keys()
    line = line_of(plan, spans, siglip=(2.5, 4, 64))
    assert (line["siglip_loss"], line["pairs"]) == (2.5, 4)


def test_bubbles_are_in_the_line_where_work_ran_in_them():
    """The encoder's exposed time is then unknown, because it is part of the backbone's."""
    plan, spans = global_plan(GRIDS_OF_STEP), [step_spans(1.0, 5.0, 9.0, 12.0)] * RANKS
    line = line_of(plan, spans)
    assert not {"bubble_seconds", "bubble_seconds_per_rank"} & line.keys()
    assert line["exposed_encoder_seconds"] is not None
    each = [{"filled": 1.0 + rank, "wasted": 4.0 - rank} for rank in range(RANKS)]
    each[2]["overrun"] = 0.5
    pieces = ((0.5, 1.0), (0.0, 0.0), (3.0, 2.0))
    times = [RankTimes(rank // 2, ((0.1, 0.2),), pieces) for rank in range(RANKS)]
    line = line_of(plan, spans, bubbles=each, times=times)
    assert line["bubble_cost_ratio"] == {"forward": 0.5, "backward": 1.5}
    assert line["bubble_seconds"] == {
        "filled": {"max": 4.0, "rank": 3, "mean": 2.5},
        "wasted": {"max": 4.0, "rank": 0, "mean": 2.5},
        "overrun": {"max": 0.5, "rank": 2, "mean": 0.125},
    }
    assert line["bubble_seconds_per_rank"]["overrun"] == [0.0, 0.0, 0.5, 0.0]
    assert line["exposed_encoder_seconds"] is None
    line = line_of(plan, [{"4 backbone": (1.0, 12.0)}] * RANKS, bubbles=each)
    assert line["imbalance"]["measured"] == pytest.approx(4.0 / 2.5)  # of the filled seconds


def test_sections_say_what_ran_when_on_the_wall_clock():
    began = time.time()
    sections = Sections(CPU)
    with sections.running("a"):
        time.sleep(0.02)
    time.sleep(0.01)
    with sections.running("b"):
        pass
    (a, first, second), (b, third, fourth) = sections.all()
    assert (a, b) == ("a", "b")
    assert began - 1e-3 <= first <= second - 0.02 <= third - 0.03
    assert third <= fourth <= time.time() + 1e-3


GRIDS_OF_STEP = [(1, 16, 16), (1, 4, 4), (1, 4, 4), (1, 4, 4), (1, 4, 4), (1, 4, 4)]


def test_a_line_says_what_the_ranks_measured():
    spans = [step_spans(0.5 * rank, 5.0, 9.0, 12.0) for rank in range(RANKS)]
    plan = global_plan(GRIDS_OF_STEP)
    line = line_of(plan, spans)
    assert (line["step"], line["items"], line["seconds"]) == (7, 6, 12.0)
    assert line["exposed_encoder_parts"] == {"forward": 3.5, "backward": 3.0}
    assert line["exposed_encoder_seconds"] == 6.5
    assert line["exposed_encoder_share"] == 6.5 / 12
    busy = [(5.0 - 0.5 * rank) / 2 + 0.1 for rank in range(RANKS)]
    assert line["imbalance"]["measured"] == pytest.approx(max(busy) / np.mean(busy))
    assert line["phase_seconds"]["2 vision forward"]["max"] == 2.5
    assert line["phase_seconds"]["2 vision forward"]["mean"] == np.mean([2.5, 2.25, 2.0, 1.75])
    assert line["exchange_bytes"] == {
        "over": {"max": 300, "rank": 3, "sum": 600},
        "back": {"max": 30, "rank": 0, "sum": 114},
    }
    assert line["peak_gib"]["4 backbone"] == {"max": 4.0, "rank": 3, "first_stage": 2.0}
    assert line["peak_gib"]["7 update"] == {"max": 4.0, "rank": 0, "first_stage": 4.0}
    assert line["peak_gib_step"] == {"max": 4.0, "rank": 0, "first_stage": 4.0}
    assert line["kept_patches"] == 60
    assert line["store"] == {"requests": 12, "bytes": 4000}
    assert line["checkpoint"] == {"stall_seconds": 0.5, "background_seconds": 3.0}
    assert line["anomaly"] is None
    first, second, third, *others = CONFIG.data.source_names
    nothing = dict.fromkeys([first, *others])
    assert line["loss_by_source"] == {second: 3.0, third: 3.0} | nothing
    nothing = dict.fromkeys(nothing, 0)
    assert line["loss_tokens_by_source"] == {second: 2, third: 2} | nothing
    assert line["loss_tokens_by_position"] == {"0-255": 4}


def test_the_optimizer_s_figures_are_those_of_all_ranks():
    line = line_of(global_plan([]), [{"4 backbone": (0.0, 9.0)}] * RANKS)
    assert line["update_rms"] == pytest.approx({"attention": 0.2, "experts": (0.3 / 4) ** 0.5})
    assert line["newton_schulz_seconds"] == 1.0
    assert line["orthogonality_error"] == 0.27
    assert line["max_logits"] == [2.0, None, 0.5]
    assert (line["max_logit"], line["clipped_heads"], line["skipped_steps"]) == (2.0, 5, 2)
    json.loads(json.dumps(line), parse_constant=pytest.fail)  # no infinity, which is not valid JSON
    drawn = scalars(line)
    assert (drawn["max_logits/layer_00"], drawn["max_logits/layer_02"]) == (2.0, 0.5)
    assert "max_logits/layer_01" not in drawn
    assert drawn["update_rms/attention"] == pytest.approx(0.2)
    for name in ("newton_schulz_seconds", "orthogonality_error", "clipped_heads", "skipped_steps"):
        assert drawn[name] == line[name]


def test_a_step_that_was_not_applied_has_no_figures():
    told = reports(global_plan([]), [{"4 backbone": (0.0, 9.0)}] * RANKS)
    for report in told:
        report.update.own = UpdateFigures()
        report.update.max_logits = np.full(3, -np.inf)
        report.update.max_logit = -np.inf
    everyone = [rank_metrics(report, 1.0, LoaderStats(), first_stage=True) for report in told]
    line = Telemetry.on(CONFIG, CPU).line(7, global_plan([]), told[0], everyone)
    assert line["update_rms"] == {}
    assert line["orthogonality_error"] is line["max_logit"] is None
    assert line["newton_schulz_seconds"] == 0.0


def test_the_planned_balance_is_that_of_the_vision_plan():
    """Two ranks share the page of 256 patches, each at 0.85 of its speed."""
    plan = global_plan(GRIDS_OF_STEP)
    line = line_of(plan, [step_spans(0, 5, 9, 12)] * RANKS)
    assert line["split_items"] == 1
    vision, loads = VisionPlanner(CONFIG).plan(plan), np.zeros(RANKS)
    for item, patches in enumerate([256, 16, 16, 16, 16, 16]):
        share = patches / 2 / 0.85 if item == 0 else patches
        loads[vision.rank[item] : vision.rank[item] + (2 if item == 0 else 1)] += share
    assert line["imbalance"]["predicted"] == pytest.approx(loads.max() / loads.mean())
    assert loads.max() / loads.mean() < 2.7  # the ratio if the page were not shared
    assert sum(line["patches_per_rank"]["dep"]) == 256 + 80
    # Rows 0 to 7 belong to the replica whose first stage is rank 0.
    assert line["patches_per_rank"]["naive"] == [336, 0, 0, 0]
    assert line["balance"]["naive"] == 4.0
    seconds = line["predicted_seconds_per_rank"]
    assert max(seconds["dep"]) / np.mean(seconds["dep"]) == pytest.approx(
        loads.max() / loads.mean()
    )
    assert seconds["naive"] == pytest.approx([vision.costs.sum(), 0, 0, 0])
    assert sum(seconds["round_robin"]) == pytest.approx(vision.costs.sum())
    assert line["balance"]["naive_among_owners"] == 2.0
    assert line["largest_tenth_of_items"] == 256 / 336


def test_speed_is_useful_flops_over_the_peak_of_all_ranks():
    plan = global_plan(GRIDS_OF_STEP)
    line = line_of(plan, [step_spans(0, 5, 9, 12)] * RANKS)
    useful = step_flops(np.array(GRIDS_OF_STEP), np.full(16, 200), CONFIG.model).total
    assert line["model_tflops_per_gpu"] == pytest.approx(useful / 12 / RANKS / 1e12)
    assert line["mfu"] == pytest.approx(useful / (12 * RANKS * 0.01e12))
    assert line["peak_source"] == "train.peak_tflops"
    assert sum(line["model_tflops"].values()) == pytest.approx(useful / 1e12)


def test_a_text_only_step_exposes_nothing_and_is_balanced():
    line = line_of(global_plan([]), [{"4 backbone": (0.0, 9.0)}] * RANKS)
    assert line["exposed_encoder_seconds"] == line["exposed_encoder_share"] == 0.0
    assert line["imbalance"] == {"predicted": 1.0, "measured": 1.0}
    assert line["model_tflops"]["encoder"] == 0
    assert line["largest_tenth_of_items"] is None
    assert line["split_items"] == 0
    assert line["mfu"] > 0


def test_the_co_located_baseline_cannot_tell_its_encoder_s_time():
    spans = [{"4 backbone": (0.0, 9.0), "6 gradient sum": (9.0, 9.5)}] * RANKS
    line = line_of(global_plan(GRIDS_OF_STEP), spans)
    for name in ("exposed_encoder_seconds", "exposed_encoder_share", "exposed_encoder_parts"):
        assert line[name] is None
    assert line["imbalance"]["measured"] is None
    assert line["imbalance"]["predicted"] > 1


def test_board_draws_every_number_under_a_plain_name():
    line = line_of(global_plan(GRIDS_OF_STEP), [step_spans(0, 5, 9, 12)] * RANKS)
    drawn = scalars(line | {"balance": {"naive": 2.0, "dep": 1.0}})
    for tag in ("loss", "mfu", "exposed_encoder_seconds", "exposed_encoder_parts/forward",
                "phase_seconds/4 backbone", "imbalance/predicted", "balance/naive",
                "exchange_bytes/over", "exchange_bytes/over/sum", "peak_gib/4 backbone",
                "peak_gib/4 backbone/first_stage", "peak_gib_step", "store/bytes",
                f"loss_by_source/{CONFIG.data.source_names[1]}",
                "loss_by_position/0-255"):  # fmt: skip
        assert tag in drawn, tag
    assert drawn["exchange_bytes/over"] == 300
    assert f"loss_by_source/{CONFIG.data.source_names[0]}" not in drawn
    assert scalars({"loss_by_source": {"max": 2.0, "step": 1.0}}) == {
        "loss_by_source/max": 2.0,
        "loss_by_source/step": 1.0,
    }
    assert not [tag for tag in drawn if tag == "step" or tag.endswith(("/rank", "/mean", "/max"))]
    assert all(isinstance(value, int | float) for value in drawn.values())


def test_utilisation():
    assert utilisation(6e12, 2.0, 4, Peak(1.5e12, "")) == 0.5


def test_a_phase_in_pieces_counts_whole():
    pieces = {"4 backbone": (0.0, 2.0), "other": (2.0, 3.0), "4 backbone#2": (3.0, 4.5)}
    line = line_of(global_plan([]), [pieces] * RANKS)
    assert line["phase_seconds"]["4 backbone"] == {"max": 3.5, "mean": 3.5}


def test_share_of_largest():
    sizes = np.array([1, 9, 5, 5, 5, 5, 5, 5, 5, 5])
    assert share_of_largest(sizes, 0.1) == 9 / 50
    assert share_of_largest(sizes[:0], 0.1) is None
