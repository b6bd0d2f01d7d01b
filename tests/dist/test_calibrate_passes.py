"""`plan --calibrate` in a separate process: output that can be pasted, parts that sum up."""

import json

import pytest
import yaml

from kimi_pretrain.config import load_config
from kimi_pretrain.dep.pass_costs import pass_seconds
from tests import fork_server

pytestmark = [pytest.mark.dist, pytest.mark.timeout(180)]

SMALL = (
    "model.vision={width: 32, depth: 1, heads: 2, mlp_width: 64, pos_grid: 8, out_width: 128}",
    "data.limits={image: 64, frame: 16}", "dep.max_patches_per_chunk=256", "train.threads=1",
)  # fmt: skip


def calibrate(*arguments: str, code: int = 0):
    given = ["-m", "launch.cli", "plan", "--config", "tiny_cpu", "--calibrate", *SMALL, *arguments]
    done = fork_server.run(given, 150)
    assert done.returncode == code, done.stderr
    return done


def test_calibrate_prints_lines_to_paste(tmp_path):
    file = tmp_path / "cost.json"
    done = calibrate("--max-seconds", "10", "--json", "--out", str(file))
    *table, last = done.stdout.splitlines()
    found = json.loads(last)
    assert json.loads(file.read_text()) == found
    assert "Apex" not in done.stderr
    block = "\n".join(table[table.index("dep:") :])
    costs = yaml.safe_load(block)["dep"]
    measured = {
        "cost": found["cost"],
        "pass_cost": found["language_model"]["passes"],
        "update_cost": found["language_model"]["update"],
    }
    assert {n: {k: float(v) for k, v in of.items()} for n, of in costs.items()} == measured
    assert min(found["cost"].values()) >= 0 < sum(found["cost"].values())
    assert min(measured["pass_cost"].values()) > 0
    assert min(measured["update_cost"].values()) > 0
    assert found["language_model"]["experts"] == 4  # two ranks have four of the eight experts each
    preset = tmp_path / "pasted.yaml"
    preset.write_text(yaml.safe_dump(load_config("tiny_cpu").model_dump(mode="json") | {
        "dep": measured,
    }))  # fmt: skip
    forward, backward = pass_seconds(load_config(preset))
    one = measured["pass_cost"]
    assert forward[0] == one["embedding_forward"] + one["dense_forward"]
    assert backward[-1] == one["expert_backward"] + one["head_backward"]


def test_what_does_not_fit_into_the_time_is_one_line():
    done = calibrate("--max-seconds", "3", "data.seq_len=4096", code=2)
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert "--max-seconds" in line
    assert "dep:\n  cost:\n" in done.stdout  # earlier measurements are still printed
