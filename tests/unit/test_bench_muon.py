"""The short form of the Muon benchmark, its counts, and the bound on the error of bf16."""

import json
import sys

import pytest

from benchmarks import bench_muon
from benchmarks.muon import accuracy, report
from benchmarks.muon.layers import k2, moonlight
from kimi_pretrain.optim.newton_schulz import segments
from tests import ROOT

COMMITTED = ROOT / "benchmarks" / "results" / "muon_cpu.json"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_short_form_measures_everything_and_says_that_it_is_short(tmp_path, monkeypatch):
    out = tmp_path / "found.json"
    monkeypatch.setattr(sys, "argv", ["bench_muon.py", "--quick", "--out", str(out)])
    bench_muon.main()
    found = json.loads(out.read_text())
    check(found)
    assert found["about"]["quick"]
    assert "no figure here is to be quoted" in out.with_suffix(".md").read_text()


@pytest.mark.skipif(not COMMITTED.exists(), reason="no result file in this checkout")
def test_the_committed_results_are_a_whole_run():
    found = json.loads(COMMITTED.read_text())
    check(found)
    assert not found["about"]["quick"]
    assert COMMITTED.with_suffix(".md").read_text() == report.page(found)


def check(found):
    """What every run writes, whatever its figures."""
    assert set(found["layers"]) == {"moonlight", "k2"}
    for layer in found["layers"].values():
        for side in ("ours", "torch"):
            step, inside = layer[side]["step"], layer[side]["newton_schulz"]
            assert 0 < inside["median"] <= step["median"] <= step["max"]
        assert set(layer["ratio"]) == {"step", "newton_schulz"}
        assert layer["flops"]["ours"] <= layer["flops"]["torch"]
        assert layer["apart_after_one_step"] < 0.05  # bf16 on both sides, the same update
    assert all(set(one["seconds"]) == {"ours", "torch"} for one in found["shapes"])
    assert all(len(study["errors"]) == 17 for study in found["accuracy"])
    assert {"5", "3+2", "1+1+1+1+1"} <= set(found["orders"]["errors"]["random"])
    assert found["matmul"]["flops_per_second"] > 0
    # Two for each layer, and one on accuracy, which no load on the machine excuses.
    assert len(found["targets"]) == 5
    assert found["targets"][-1]["met"]


def test_the_layers_are_the_published_ones():
    """Parameters by hand (kimi_facts: hidden, heads, ranks, expert widths), norms left out."""
    attention = 2048 * (16 * 192 + 512 + 64 + 16 * 128) + 512 * 16 * 256
    assert moonlight(3).parameters == attention + 2048 * (64 + 3 * 1408 * (3 + 2))
    attention = 7168 * (1536 + 512 + 64 + 64 * 128) + 1536 * 64 * 192 + 512 * 64 * 256
    assert k2(8).parameters == attention + 7168 * (384 + 3 * 2048 * (8 + 1))
    pieces = k2(8).pieces()
    assert len(pieces) == 9 * 3 + 1 + 1 + 1 + 2 + 2 + 2
    assert pieces.count((2048, 7168)) == pieces.count((7168, 2048)) / 0.5 == 18
    assert {(8192, 1536), (4096, 1536), (512, 7168), (64, 7168), (8192, 512)} <= set(pieces)


@pytest.mark.parametrize("shape", [(160, 180), (160, 400)])
def test_errors_are_bounded_for_every_kind_of_matrix(shape):
    """bf16: by torch.optim.Muon's own, which is the direct form; fp32: by our direct form."""
    assert segments(*shape, 5) == ((1,) * 5 if shape == (160, 180) else (3, 2))
    errors = accuracy.study(*shape)["errors"]
    for kind, found in errors.items():
        assert found["ours, bf16"][0] <= report.WORSE * found["torch, bf16"][0] + report.FLOOR, kind
        assert found["ours, fp32"][0] <= 2 * found["direct, fp32"][0] + 1e-5, kind
