"""The short form of DEP's benchmark, and the arithmetic of its predictions and targets."""

from tests import ROOT
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest


from benchmarks.dep import predict, report, summary, targets
from benchmarks.dep.predict import Backbone, Encoder
from benchmarks.dep.settings import ALONE, COLOCATED, DEP, SETTINGS, TEXT_ONLY
from kimi_pretrain.dep.cost import CostModel

OWNER, COUNT = "DEP, by owner", "DEP, by count"


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_short_form_runs_every_variant_and_says_that_it_is_short(tmp_path):
    out, drawing = tmp_path / "found.json", tmp_path / "memory.png"
    command = [sys.executable, "benchmarks/bench_dep.py", "--quick", "--work", tmp_path / "work"]
    command += ["--out", out, "--picture", drawing]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(out.read_text())
    page = out.with_suffix(".md").read_text()
    assert "Quick form" in page
    assert str(tmp_path) not in page + out.read_text()
    assert drawing.read_bytes().startswith(b"\x89PNG")
    assert len(found["targets"]) == 3
    _check_timing(found["timing"], found["raw"]["timing"]["rounds"])
    _check_memory(found["memory"])


def _check_timing(timed, rounds):
    assert list(timed["variants"]) == list(SETTINGS)
    assert timed["losses_apart"] < 1e-5
    assert timed["encoder"]["forward_and_backward"]["min"] > 0
    (one,) = rounds
    work, items = one["work"], sorted(sum(one["work"]["microbatches"], []))
    assert len(items) == work["items"] > 1
    for name in (OWNER, COUNT, DEP):
        assert sorted(sum(work["encoded"][name], [])) == items
    assert work["encoded"][OWNER][1] == []  # the last stage owns no rows
    first, second = (len(rank) for rank in work["encoded"][COUNT])
    assert first - second in (0, 1)
    assert max(work["loads"][DEP]) <= max(work["loads"][COUNT]) <= max(work["loads"][OWNER])
    for name, run in one["runs"].items():
        assert run["seconds"] >= max(rank["own"] for rank in run["ranks"])
        encodes = [rank.get("phases", {}).get("2 vision forward", 0) for rank in run["ranks"]]
        assert any(encodes) == (name in (OWNER, COUNT, DEP)), name
        for rank in run["ranks"]:
            assert 0 < sum(rank.get("busy_phases", {"": 1e-9}).values()) <= rank["own"] * 1.05


def _check_memory(memory):
    assert set(memory["mix"]) == set(SETTINGS)
    first, last = memory["curve"]
    assert (first["images"], last["images"]) == (1, 4)
    assert last["patches"] == 4 * first["patches"] == 96
    for point in memory["curve"]:
        for ranks in point["peaks"].values():
            assert all(0 < targets.step_peak(rank) < 200 for rank in ranks)


ENCODER = Encoder(CostModel(1e-3, 1e-6, 5e-3), per_chunk=0.1, forward_share=0.25, budget=100)


def test_seconds_of_items_are_those_of_their_chunks():
    # Two chunks: 40 + 60 patches fill 128 rows, 70 fill 128.
    by_hand = 100e-3 + (40**2 + 60**2) * 1e-6 + 2 * 5e-3 + 28e-3 + 0.1
    by_hand += 70e-3 + 70**2 * 1e-6 + 5e-3 + 58e-3 + 0.1
    assert ENCODER.seconds([40, 60, 70]) == pytest.approx(by_hand)
    assert ENCODER.seconds([]) == 0


def two_stages(forward, backward):
    """End of 1F1B over two stages: [microbatches, stages] seconds, from its two lists of passes."""
    count = len(forward)
    first = [("F", 0)]
    for n in range(1, count):
        first += [("F", n), ("B", n - 1)]
    first.append(("B", count - 1))
    second = [(kind, n) for n in range(count) for kind in "FB"]
    ends, clocks, left = {}, [0.0, 0.0], [first, second]
    while any(left):
        for stage in (0, 1):
            if not left[stage]:
                continue
            kind, n = left[stage][0]
            needs = {("F", 1): ("F", n, 0), ("B", 0): ("B", n, 1)}.get((kind, stage))
            if needs is not None and needs not in ends:
                continue
            left[stage].pop(0)
            took = (forward if kind == "F" else backward)[n][stage]
            clocks[stage] = max(clocks[stage], ends.get(needs, 0.0)) + took
            ends[kind, n, stage] = clocks[stage]
    return max(clocks)


@pytest.mark.parametrize("stages", [(4.0, 4.0), (2.0, 7.0), (7.0, 2.0)])
def test_the_colocated_step_is_what_a_plain_simulation_of_two_stages_gives(stages):
    work = {"encoded": {COLOCATED: [[90, 50], []], DEP: [[90], [50]]}, "loads": {},
            "microbatches": [[], [90], [], [50, 8]]}  # fmt: skip
    backbone = Backbone(stages, microbatches=6)
    forward = np.tile(np.array(stages) / 6 / 3, (6, 1))
    backward = 2 * forward
    plain = two_stages(forward, backward)
    assert backbone.seconds() == pytest.approx(plain)
    for number, items in enumerate(work["microbatches"]):
        forward[number, 0] += ENCODER.seconds(items) / 4
        backward[number, 0] += ENCODER.seconds(items) / 2
    found = predict.added(work, ENCODER, backbone, COLOCATED)
    assert found[COLOCATED] == pytest.approx(two_stages(forward, backward) - plain)
    assert found[DEP] == pytest.approx(ENCODER.seconds([90]))


def test_a_slow_first_stage_adds_all_of_its_encoding_and_a_fast_one_its_ends():
    media = [(0.1, 0.2)] * 4
    added = [
        Backbone(stages, 4).seconds(media) - Backbone(stages, 4).seconds()
        for stages in ((9.0, 3.0), (3.0, 9.0))
    ]
    assert added[0] == pytest.approx(1.2)
    assert added[1] == pytest.approx(0.3)  # the first forward and the last backward


def test_an_undisturbed_step_is_its_slowest_ranks_one_phase_after_the_other():
    busy = [{"2": 0.1, "4": 6.0, "7": 0.3}, {"2": 0.2, "4": 6.0, "7": 0.1}]
    schedule = Backbone((6.0, 6.0), 3).seconds()
    assert predict.undisturbed(busy, 3, "4") == pytest.approx(schedule + 0.2 + 0.3)
    # 1.5 s more on the first stage, all in the second microbatch, a third of it forward.
    busy[0]["4"] = 7.5
    forward, backward = np.full((3, 2), 2 / 3), np.full((3, 2), 4 / 3)
    forward[1, 0] += 0.5
    backward[1, 0] += 1.0
    found = predict.undisturbed(busy, 3, "4", [(0, 0), (1, 2)], text_only=6.0)
    assert found == pytest.approx(two_stages(forward, backward) + 0.5)


def rank(own, **phases):
    named = {"forward": "2 vision forward", "backward": "6 vision backward", "over": "3 hand-over",
             "back": "5 hand-back", "sum": "6 gradient sum", "backbone": "4 backbone"}  # fmt: skip
    spent = {named[name]: seconds for name, seconds in phases.items()}
    return {"own": own, "busy": own, "no_core": 0.1, "sent": 0, "phases": spent,
            "busy_phases": spent}  # fmt: skip


def a_round(text=1.0, colocated=1.3, dep=1.24, own=(0.1, 0.2), loss=2.0):
    """0.3 s of forward and backward: DEP's arithmetic is 4/3 of it on two ranks, 0.2 s."""
    busy = [rank(text, backbone=0.6), rank(text, backbone=0.6)]
    encoding = [
        rank(dep, backbone=0.6, forward=0.05, backward=0.15, over=0.03, back=0.01, sum=0.02),
        rank(dep, backbone=0.6, forward=0.05, backward=0.25, over=0.004, back=0.002, sum=0.001),
    ]
    runs = {TEXT_ONLY: (text, busy), COLOCATED: (colocated, busy), DEP: (dep, encoding),
            ALONE: (max(own), [rank(seconds) for seconds in own])}  # fmt: skip
    found = {name: {"seconds": s, "ranks": ranks, "loss": 2.0} for name, (s, ranks) in runs.items()}
    found[COLOCATED]["loss"] = loss
    found[OWNER] = found[COUNT] = found[DEP]
    work = {"encoded": {name: [[30], [40]] for name in SETTINGS}, "microbatches": [[30], [40]],
            "loads": {name: [1.0, 3.0] for name in SETTINGS}}  # fmt: skip
    return {"work": work, "runs": found}


def timing_of(*rounds):
    first = {"cost": {"per_patch": 1e-3, "per_patch_squared": 0.0, "per_item": 0.0},
             "per_chunk": 0.0, "forward_share": 0.25}  # fmt: skip
    model = {"max_patches_per_chunk": 100, "microbatches": 2}
    return {"calibration": [first, first], "model": model, "rounds": list(rounds)}


def test_overhead_is_what_is_left_after_text_and_arithmetic():
    found = summary.overhead([a_round()])
    assert found["seconds"]["median"] == pytest.approx(0.04)
    assert found["share"]["median"] == pytest.approx(0.04 / 1.24)
    parts = {name: 1.24 * part["median"] for name, part in found["parts"].items()}
    assert parts == pytest.approx(
        {"arithmetic": 0.2, "imbalance": 0.05, "exchange": 0.006, "gradient sum": 0.001}
    )


def test_figures_are_compared_inside_a_round():
    rounds = [a_round(), a_round(2.0, 2.6, 2.0, loss=2.002), a_round(1.0, 1.5, 1.2)]
    found = summary.summarise(timing_of(*rounds))
    assert found["ratio"]["measured"] == {
        "median": pytest.approx(1.25), "min": pytest.approx(1.3 / 1.24), "max": pytest.approx(1.3)
    }  # fmt: skip
    # Each rank's items fill 64 rows: DEP adds 0.064 s. Co-located, a first stage that is no slower
    # waits for each of two microbatches: only the first forward and the last backward show.
    assert found["variants"][DEP]["predicted_seconds"]["median"] == pytest.approx(1.064)
    assert found["variants"][COLOCATED]["predicted_seconds"]["median"] == pytest.approx(1.048)
    assert found["variants"][COLOCATED]["efficiency"]["median"] == pytest.approx(1 / 1.3)
    assert found["variants"][DEP]["imbalance"]["predicted"]["median"] == pytest.approx(1.5)
    assert found["variants"][DEP]["imbalance"]["measured"]["median"] == pytest.approx(1.2)
    assert found["variants"][COLOCATED]["imbalance"] is None
    assert found["losses_apart"] == pytest.approx(1e-3)
    # Computing in the first round: 0.9 s of schedule, and in DEP 0.05, 0.25, 0.03, 0.01 and 0.02 s
    # of the rank that computes most; the encoder alone 0.3 s.
    first = summary.summarise(timing_of(rounds[0]))
    assert first["variants"][TEXT_ONLY]["undisturbed_seconds"]["median"] == pytest.approx(0.9)
    assert first["variants"][DEP]["undisturbed_seconds"]["median"] == pytest.approx(1.26)
    assert first["overhead"]["undisturbed"]["median"] == pytest.approx(1 - (0.9 + 0.2) / 1.26)


def curve(dep, colocated):
    def point(images, more_dep, more_colocated):
        peaks = {
            TEXT_ONLY: [{"4 backbone": 100 << 20}, {"4 backbone": 0}],
            COLOCATED: [{"4 backbone": (100 + more_colocated) << 20}, {"4 backbone": 0}],
            DEP: [{"4 backbone": (100 + more_dep) << 20}, {"4 backbone": 0}],
        }
        return {"images": images, "patches": 36 * images, "microbatches": 2, "chunk": 1024,
                "embedding_bytes": 1 << 20, "peaks": peaks}  # fmt: skip

    return [point(1, 0, 0), point(64, dep, colocated)]


@pytest.mark.parametrize(
    ("timed", "points", "met"),
    [
        ((1.1, 1.09, 0.02), (5, 100), [True, True, True]),
        ((1.1, 0.89, 0.031), (6, 100), [False, False, False]),
        ((0.99, 1.0, -0.01), (0, 100), [False, True, True]),
        ((1.1, 1.11, 0.03), (-1, 100), [False, True, True]),
    ],
)
def test_targets_that_are_missed_are_told(timed, points, met):
    measured, off, share = timed
    one = {"median": 1.0}
    ratio = {"measured": {"median": measured}, "predicted": {"median": measured / off},
             "measured_over_predicted": {"median": off},
             "undisturbed": {"measured": one, "predicted": one}}  # fmt: skip
    overhead = {"share": {"median": share}, "undisturbed": one}
    found = {"timing": {"ratio": ratio, "overhead": overhead}, "memory": {"curve": curve(*points)}}
    assert [row["met"] for row in targets.targets(found)] == met


@pytest.mark.parametrize(
    ("load", "share", "said"), [(0.1, 0.001, None), (3.0, 0.001, "load was 3"), (0.1, 0.2, "20%")]
)
def test_the_page_says_when_others_were_in_the_way(load, share, said):
    found = {"about": {"load_before": [load, 0, 0]}, "timing": {"no_core_share": share}}
    told = report.disturbed(found)
    assert (told is None) if said is None else (said in told)
