"""The short form of the loader benchmark, and the arithmetic of its results."""

from tests import ROOT
import json
import subprocess
import sys
from pathlib import Path

import pytest


from benchmarks.loaders import report, targets


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_short_form_measures_ours_and_says_that_it_is_short(tmp_path):
    out = tmp_path / "found.json"
    command = [sys.executable, "benchmarks/bench_loader.py", "--quick", "--count", "400"]
    command += ["--work", tmp_path, "--out", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(out.read_text())
    assert "Quick run: ours only" in out.with_suffix(".md").read_text()
    assert set(found["speed"]) == {"ours"}
    for cell in ("disk raw w0", "disk pixels w0", "s3 raw w0", "s3 pixels w0"):
        assert found["speed"]["ours"][cell]["median"] > 0
        assert "errors" not in found["speed"]["ours"][cell]
    (resumed,) = found["resume"]["ours"]
    assert resumed["same_samples"]
    assert resumed["same_bytes"]
    for name in ("ours", "ours, blended and packed"):
        other = found["elastic"][name]
        assert other["other_world_ordered"] == other["steps"] > 0
        assert other["resumed_ordered"] == other["resumed_steps"] > 0
    assert found["elastic"]["ours, blended and packed"]["different_rows"] == 12 * 4
    once, twice = (found["requests"]["ours"][f"epochs_{n}"] for n in (1, 2))
    shards = found["about"]["shards"]
    # One request for each shard, and now and then a second one for one that is late.
    assert shards <= once["shards"] <= shards + 4
    assert once["other"] == 2
    assert shards <= twice["shards"] <= shards + 4
    assert twice["samples"] == 800


def passes(*speeds, error=""):
    return [
        {"disk raw w0": {"samples_per_s": s, "first_s": 0.1, "seconds": 2.0, "cpu_s": 1.0,
                         "error": error}}
        for s in speeds
    ]  # fmt: skip


def test_ratios_are_taken_inside_a_round():
    rounds = {"ours": passes(10, 100, 30), "one": passes(5, 200, 30), "two": passes(1, 1, 10)}
    found = report.ratios(rounds, ["disk raw w0"], "ours", ["one", "two"])["disk raw w0"]
    assert found["one"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert found["best peer"] == {"median": 1.0, "min": 0.5, "max": 2.0}
    assert found["two"]["median"] == 10


def test_a_pass_that_failed_counts_for_nothing():
    rounds = {"ours": passes(10), "one": passes(5, error="19 different samples of 20")}
    assert report.ratios(rounds, ["disk raw w0"], "ours", ["one"]) == {"disk raw w0": {}}
    assert report.summary(rounds, ["disk raw w0"])["one"]["disk raw w0"] == {
        "errors": ["19 different samples of 20"]
    }


def test_targets_that_are_missed_are_told():
    found = {
        "about": {"cells": ["disk raw w0", "s3 raw w0"]},
        "ratios": {
            "disk raw w0": {"litdata": {"median": 0.99}},
            "s3 raw w0": {"best peer": {"median": 1.5}},
        },
        "requests": {
            name: {"epochs_1": {"shards": n, "other": 2, "error": ""},
                   "epochs_2": {"shards": n, "other": 0, "error": ""}}
            for name, n in (("ours", 20), ("one", 19), ("two", 30))
        },
        "resume": {"ours": [{"later_by_ms": 5.1, "same_samples": True, "same_bytes": False,
                             "state_bytes": 1023}]},
        "elastic": {"ours": {"steps": 250, "other_world_ordered": 250, "resumed_steps": 125,
                             "resumed_ordered": 124}},
    }  # fmt: skip
    met = [target["met"] for target in targets.targets(found, ["one", "two"])]
    assert met == [False, True, False, False, False, False, False, True, False]
