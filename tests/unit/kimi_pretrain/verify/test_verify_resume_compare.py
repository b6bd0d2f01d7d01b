"""Tests the comparison of two runs: required equality, the first difference, and its report."""

import json
import math
from dataclasses import replace

import pytest
import torch

from kimi_pretrain.verify import resume_compare
from kimi_pretrain.verify.resume_compare import compare, differences, suggestion
from kimi_pretrain.verify.traces import (
    Moment,
    Trace,
    in_model_order,
    numbers_of,
    read_trace,
    tensor_difference,
    unequal,
)

HEAD, GATE = "language_model.lm_head.weight", "language_model.model.layers.1.mlp.gate.weight"
BIAS = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
MOMENTUM = f"optim.momentum.{GATE}"
TENSORS = {HEAD: "h", GATE: "g", BIAS: "b", MOMENTUM: "m", "optim.step": "s"}
STATE = {"step": 2, "optimizer_steps": 2, "loader": {"step": 3, "packed": [1, 2]}, "losses": []}


def line(step: int, **changes) -> dict:
    return {
        "step": step,
        "loss": 5.0 / step,
        "grad_norm": 1.0 / step,
        "lr": 1e-3 * step,
        "loss_tokens": 90 + step,
        "seconds": 1.0,
        "phase_seconds": {"4 backbone": {"max": 1.0}},
        "imbalance": {"predicted": 1.5, "measured": 1.7},
        "update_rms": {"head": 1.0, "norms": 0.5},
        "max_logits": [1.0, None],
        "store": {"requests": 7, "bytes": 70},
        "anomaly": None,
        "peak_source": "measured, float32",
        **changes,
    }


def trace(steps=(1, 2, 3, 4), tensors=TENSORS, state=STATE, resumed=None, **lines) -> Trace:
    """Return the trace of a run; `lines` change single steps, such as step3={"loss": 1.0}."""
    return Trace(
        lines={step: line(step, **lines.get(f"step{step}", {})) for step in steps},
        samples={step: f"plan {step}" for step in steps},
        resumed=Moment(TENSORS, STATE) if resumed is None else resumed,
        end=Moment(tensors, state),
    )


def told(found: Trace, wanted: Trace | None = None) -> tuple[list[str], str]:
    comparison = compare(found, wanted or trace(), 2)
    assert not comparison.passed
    return differences(comparison), suggestion(comparison)


def test_one_run_is_itself():
    comparison = compare(trace(), trace(), 2)
    assert comparison.passed
    assert (comparison.steps, comparison.tensors) == (2, 5)
    assert comparison.numbers == 2 * len(numbers_of(line(3)))
    assert differences(comparison) == []
    assert compare(trace(steps=(3, 4)), trace(), 2).passed  # in its own folder


def test_what_was_measured_does_not_count():
    slow = line(3, seconds=9.0, phase_seconds={}, store={"requests": 9}, mfu=0.5,
                exposed_encoder_parts={"forward": 0.1}, exposed_encoder_share=0.2)  # fmt: skip
    slow |= {"imbalance": {"predicted": 1.5, "measured": 9.0}, "peak_source": "data sheet"}
    slow |= {"bubble_cost_ratio": {"forward": 2.4, "backward": 1.3}}
    assert numbers_of(slow) == numbers_of(line(3))
    assert numbers_of(line(3)) == {
        "step": 3, "loss": 5.0 / 3, "grad_norm": 1.0 / 3, "lr": 3e-3, "loss_tokens": 93,
        "imbalance.predicted": 1.5, "update_rms.head": 1.0, "update_rms.norms": 0.5,
        "max_logits.0": 1.0, "max_logits.1": None, "anomaly": None,
    }  # fmt: skip


def test_names_count_as_numbers_do():
    skipped, other = trace(step3={"anomaly": "spike"}), trace(step3={"anomaly": "nonfinite"})
    assert not compare(skipped, other, 2).passed


@pytest.mark.parametrize(
    "change",
    [
        {"loss": math.nextafter(5.0 / 3, 9)},
        {"loss": None},
        {"loss": math.nan},
        {"imbalance": {"predicted": 1.6, "measured": 1.7}},
        {"update_rms": {"head": 1.0, "norms": math.nextafter(0.5, 1)}},
        {"update_rms": {"head": 1.0}},
        {"max_logits": [1.0, 2.0]},
        {"anomaly": "spike"},
        {"unheard_of": 1},
    ],
)
def test_every_number_counts(change):
    assert not compare(trace(step3=change), trace(), 2).passed
    assert not compare(trace(), trace(step3=change), 2).passed
    assert compare(trace(step3=change), trace(step3=change), 2).passed


def test_every_tensor_and_the_state_count():
    for name in TENSORS:
        assert compare(trace(tensors=TENSORS | {name: "x"}), trace(), 2).end_tensors == (name,)
    assert not compare(trace(state=STATE | {"loader": {"step": 4}}), trace(), 2).passed
    fewer = {name: digest for name, digest in TENSORS.items() if name != HEAD}
    for pair in ((trace(tensors=fewer), trace()), (trace(), trace(tensors=fewer))):
        assert compare(*pair, 2).end_tensors == (HEAD,)
        assert not compare(*pair, 2, lambda name: pytest.fail(name)).passed  # only one run has it


def test_nothing_compared_is_no_pass():
    assert not compare(trace(steps=(1, 2)), trace(steps=(1, 2)), 2).passed
    assert not compare(trace(tensors={}), trace(tensors={}), 2).passed
    assert not compare(trace(steps=(1, 2, 3)), trace(), 2).passed
    assert told(trace(steps=(1, 2)))[0] == [
        "step 3 is the first that differs: the resumed run never did it"
    ]
    assert told(trace(), trace(steps=(1, 2, 3)))[0] == [
        "step 4 is the first that differs: the uninterrupted run never did it"
    ]


def test_the_first_difference_is_told_first():
    sentences, _ = told(
        trace(step4={"loss": 9.0}, step3={"grad_norm": 2.0, "update_rms": {}},
              tensors=TENSORS | {MOMENTUM: "x", HEAD: "y"})
    )  # fmt: skip
    assert sentences == [
        "step 3 is the first that differs: grad_norm is 2.0, was 0.3333333333333333 "
        "(so do update_rms.head, update_rms.norms)",
        f"at the end, 2 of 5 tensors are not the same, first {HEAD}",
    ]


def test_the_first_tensor_is_measured():
    a = torch.tensor([1.0, 2.0, math.nan, 4.0])
    b = torch.tensor([1.0, 2.5, math.nan, 4.25])
    comparison = compare(
        trace(tensors=TENSORS | {GATE: "x"}), trace(), 2, {GATE: (a, b)}.__getitem__
    )
    assert differences(comparison) == [
        f"at the end, 1 of 5 tensors are not the same, first {GATE} (2 of its 4 numbers, the "
        "largest difference is 0.5)"
    ]


def test_tensors_are_compared_bit_for_bit():
    zero = tensor_difference("x", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (zero.differing, zero.largest) == (1, 0.0)
    infinite = tensor_difference("x", torch.tensor([math.inf]), torch.tensor([1.0]))
    assert (infinite.differing, infinite.largest) == (1, None)
    assert tensor_difference("x", torch.zeros(2), torch.zeros(3)).elements == 0
    assert tensor_difference("x", torch.zeros(2), torch.zeros(2).double()).elements == 0
    count = tensor_difference("x", torch.tensor(3), torch.tensor(1))
    assert (count.elements, count.differing, count.largest) == (1, 1, 2.0)
    half = tensor_difference("x", torch.ones(5).bfloat16(), torch.ones(5).bfloat16())
    assert (half.differing, half.largest) == (0, 0.0)


RESTORED = {
    "loader": (Moment(TENSORS, STATE | {"loader": {"step": 4, "packed": [1, 2]}}), "loader"),
    "count": (Moment(TENSORS | {"optim.step": "x"}, STATE | {"optimizer_steps": 0}), "count of"),
    "bias": (Moment(TENSORS | {BIAS: "x"}, STATE), "routing biases"),
    "weights": (Moment(TENSORS | {HEAD: "x"}, STATE), "weights were not"),
    "momentum": (Moment(TENSORS | {MOMENTUM: "x"}, STATE), "Muon's momentum"),
    "losses": (Moment(TENSORS, STATE | {"losses": [1.0]}), "besides tensors"),
}


@pytest.mark.parametrize("case", RESTORED)
def test_what_was_restored_wrongly_is_named(case):
    moment, text = RESTORED[case]
    sentences, cause = told(trace(resumed=moment))
    assert sentences[0].startswith("as the run went on after step 2, ")
    assert text in cause


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"step3": {"loss_tokens": 7, "loss": 1.0}}, "other samples"),
        ({"step3": {"lr": 7.0}}, "count of updates"),
        ({"step3": {"loss": 7.0, "grad_norm": 1.0}}, "generator nothing restores"),
        ({"step3": {"grad_norm": 7.0}}, "backward pass"),
        ({"step3": {"update_rms": {}}}, "an update came out differently"),
        ({"step4": {"loss": 7.0}}, "an update came out differently"),
        ({"tensors": TENSORS | {GATE: "x"}}, "an update came out differently"),
        ({"step1": {"loss": 7.0}, "step3": {"loss": 7.0}}, "not come out the same twice"),
    ],
)
def test_what_differs_first_suggests_a_cause(changes, text):
    assert text in told(trace(**changes))[1]


def test_without_a_watcher_less_is_known():
    blind = replace(trace(step4={"loss": 7.0}), resumed=None, samples={})
    comparison = compare(blind, trace(), 2)
    assert comparison.restored_tensors is None
    assert suggestion(comparison).startswith("the optimizer's state was not")
    assert compare(replace(trace(), resumed=None, samples={}), trace(), 2).passed


def test_samples_count():
    other = replace(trace(), samples={1: "plan 1", 2: "plan 2", 3: "plan 4", 4: "plan 5"})
    sentences, cause = told(other)
    assert sentences == ["step 3 is the first that differs: samples is plan 4, was plan 3"]
    assert "other samples" in cause


def test_tensors_come_in_the_order_of_the_model():
    names = [
        "vision_tower.patch_embed.proj.weight", "vision_tower.encoder.blocks.2.wo.weight",
        "vision_tower.encoder.blocks.10.wo.weight", "mm_projector.proj.0.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.2.self_attn.o_proj.weight",
        "language_model.model.layers.10.mlp.gate.weight", "language_model.model.norm.weight",
        HEAD, "optim.exp_avg.vision_tower.patch_embed.proj.weight",
        "optim.momentum.language_model.model.layers.10.mlp.gate.weight", "optim.step",
    ]  # fmt: skip
    assert in_model_order(sorted(names)) == names
    assert list(unequal(dict.fromkeys(names, "a"), dict.fromkeys(reversed(names), "b"))) == names


def compare_layouts(found: Trace, wanted: Trace, stop: int, dtype: str):
    return resume_compare.compare_layouts(found, wanted, stop, dtype, {"dp": 2})


def test_another_layout_may_round_and_nothing_else():
    rounded = trace(step3={"loss": 5.0 / 3 * (1 + 5e-6), "update_rms": {}},
                    step4={"loss": 1.25 * (1 + 5e-4), "grad_norm": 0.25 * (1 + 2e-4)})  # fmt: skip
    found = compare_layouts(rounded, trace(), 2, "float32")
    assert found.passed
    assert found.loss_errors == pytest.approx((5e-6, 5e-4))
    assert found.norm_errors == pytest.approx((0.0, 2e-4))
    for errors in ((0.0, math.nan), (math.nan, 0.0)):
        assert not replace(found, loss_errors=errors).passed
    assert not compare_layouts(rounded, trace(), 2, "float64").passed
    # The first step starts from the same weights, so rounding explains less there.
    assert not compare_layouts(trace(step3={"loss": 1.7}), trace(), 2, "float32").passed
    early = trace(step3={"loss": 5.0 / 3 * (1 + 5e-4)})
    assert not compare_layouts(early, trace(), 2, "float32").passed
    for change in ({"loss_tokens": 7}, {"loss": None}, {"grad_norm": 0.3}):
        assert not compare_layouts(trace(step4=change), trace(), 2, "bfloat16").passed
    endless = compare_layouts(trace(step4={"loss": None}), trace(), 2, "float32").as_dict()
    assert endless["loss_errors"] == [0.0, None]
    other = replace(trace(), samples=dict.fromkeys((1, 2, 3, 4), "x"))
    assert not compare_layouts(other, trace(), 2, "bfloat16").passed
    assert not compare_layouts(trace(steps=(1, 2, 3)), trace(), 2, "bfloat16").passed
    assert not compare_layouts(trace(steps=(1, 2)), trace(steps=(1, 2)), 2, "bfloat16").passed


HELDOUT = {"step": 4, "loss": 3.0, "loss_tokens": 70, "loss_by_source": {"words": 3.0}}


def test_held_out_losses_count():
    """Held-out losses must be bit-identical; in another layout they may differ by rounding."""
    whole = trace(step4={"heldout": HELDOUT | {"seconds": 1.0}})
    assert compare(trace(step4={"heldout": HELDOUT | {"seconds": 2.0}}), whole, 2).passed
    for change in (
        {"loss": math.nextafter(3.0, 9)},
        {"loss_by_source": {"words": 3.5}},
        {"loss_tokens": 71},
    ):
        other = trace(step4={"heldout": HELDOUT | change})
        sentences, cause = told(other, whole)
        assert sentences[0].startswith("step 4 is the first that differs: heldout.")
        assert "held-out loss did not" in cause
        assert compare_layouts(other, whole, 2, "float32").passed == ("loss_tokens" not in change)
    assert not compare(trace(), whole, 2).passed
    assert not compare_layouts(trace(), whole, 2, "float32").passed
    rounded = trace(step4={"heldout": HELDOUT | {"loss": 3.0 * (1 + 5e-4)}})
    found = compare_layouts(rounded, whole, 2, "float32")
    assert found.passed
    assert found.heldout_errors == pytest.approx((5e-4,))
    far = trace(step4={"heldout": HELDOUT | {"loss": 3.01}})
    assert not compare_layouts(far, whole, 2, "float32").passed


def test_a_trace_is_what_a_run_left(tmp_path):
    hashes = {"step": 4, "loader": "l", "per_tensor": TENSORS}
    (tmp_path / "state_hashes.json").write_text(json.dumps(hashes))
    lines = [line(3), line(4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    found = read_trace(tmp_path)
    assert dict(found.lines) == {3: lines[0], 4: lines[1]}
    validated = [HELDOUT | {"step": 2}, HELDOUT]  # the first one is from before the first step here
    (tmp_path / "heldout.jsonl").write_text("".join(json.dumps(one) + "\n" for one in validated))
    found = read_trace(tmp_path)
    assert dict(found.lines) == {3: lines[0], 4: lines[1] | {"heldout": HELDOUT}}
    assert found.end == Moment(TENSORS, {"step": 4, "loader": "l"})
    assert (found.samples, found.began, found.resumed) == ({}, None, None)
    watched = [{"step": step, "samples": f"plan {step}", "began": 2} for step in (3, 4)]
    (tmp_path / "watched.jsonl").write_text("".join(json.dumps(one) + "\n" for one in watched))
    moment = {"tensors": TENSORS, "state": STATE}
    (tmp_path / "resumed.json").write_text(json.dumps(moment))
    found = read_trace(tmp_path)
    assert found.samples == {3: "plan 3", 4: "plan 4"}
    assert found.began == 2
    assert found.resumed == Moment(TENSORS, STATE)
