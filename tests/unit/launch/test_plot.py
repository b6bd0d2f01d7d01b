"""Tests of `kimi-pretrain plot` on a growing run, a run without media and a long run."""

import json

import pytest
from typer.testing import CliRunner

from kimi_pretrain.tools.run_plots import draw_at_the_end, read_steps
from launch.cli.evaluate import table_of
from launch.cli.main import app
from tests.unit.kimi_pretrain.tools.test_plots import lines, whole_step

OPTIMIZER = {"max_logits": [1.0, None], "clipped_heads": 0, "update_rms": {"muon": 0.2}}


def run_folder(folder, *, media: bool = True, tail: str = ""):
    steps = [line | OPTIMIZER | {"skipped_steps": 0} for line in lines(8, media)]
    steps[3]["loss"] = None  # a loss that was not finite
    text = "".join(json.dumps(step) + "\n" for step in steps)
    (folder / "metrics.jsonl").write_text(text + tail)
    return folder


def plot(*arguments):
    return CliRunner().invoke(app, ["plot", *map(str, arguments)])


def test_a_run_that_is_still_writing_is_drawn(tmp_path):
    run = run_folder(tmp_path, tail='{"step": 9, "lo')
    (run / "trace.json").write_text(json.dumps(whole_step()))
    out = tmp_path / "pictures"
    done = plot(run, "--out", out)
    assert done.exit_code == 0, done.output
    names = ["loss.png", "dep_balance.png", "muonclip.png", "timeline.png"]
    assert done.stdout.splitlines() == [f"wrote {out / name} (steps 1 to 8)" for name in names]
    assert all((out / name).read_bytes().startswith(b"\x89PNG") for name in names)


def test_what_cannot_be_drawn_is_told(tmp_path):
    done = plot(run_folder(tmp_path, media=False), "--json")
    found = json.loads(done.stdout)
    assert [file.rpartition("/")[2] for file in found["drawn"]] == ["loss.png", "muonclip.png"]
    assert "train.trace_step" in found["left_out"]["timeline.png"]
    assert "no balance" in found["left_out"]["dep_balance.png"]
    for name, reason in (("gone", "no such file"), ("empty", "has not finished a step yet")):
        (tmp_path / "empty").mkdir(exist_ok=True)
        (tmp_path / "empty" / "metrics.jsonl").write_text('{"step"')
        refused = plot(tmp_path / name)
        assert refused.exit_code == 2
        assert reason in refused.stderr


@pytest.mark.parametrize("steps", [1, 4, 5, 13])
def test_of_a_long_run_some_steps_are_read_the_last_among_them(tmp_path, steps):
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(json.dumps({"step": step}) + "\n" for step in range(1, steps + 1)))
    read = [line["step"] for line in read_steps(file, most=4)]
    assert len(read) <= 4
    assert read[-1] == steps
    assert len({b - a for a, b in zip(read, read[1:])}) <= 1


def test_pictures_at_the_end_fail_no_run(tmp_path, capsys):
    draw_at_the_end(tmp_path / "gone")
    assert "no pictures (ValueError" in capsys.readouterr().err


@pytest.mark.parametrize("given", [(), ("--source", "words", "--heldout")])
def test_eval_wants_one_source_or_the_held_out_ones(given, tmp_path):
    command = ["eval", "--config", "tiny_cpu", "--checkpoint", str(tmp_path), *given]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 2
    assert "give --source NAME, or --heldout" in done.stderr


def test_the_losses_of_a_validation_as_a_table():
    line = {"step": 4, "loss": 2.5, "loss_tokens": 1200}
    for what, name in (("source", "books"), ("position", "0-255")):
        line[f"loss_by_{what}"] = {name: 2.5, "none": None}
        line[f"loss_tokens_by_{what}"] = {name: 1200, "none": 0}
    told = table_of(line).splitlines()
    assert told[0] == "held-out loss after 4 steps, nats a token"
    cells = [row.split() for row in told[1:]]
    assert cells[0] == ["all", "2.5000", "1,200", "tokens"]
    assert cells[1] == ["books", "2.5000", "1,200", "tokens"]
    assert cells[2] == ["none", "-", "0", "tokens"]
