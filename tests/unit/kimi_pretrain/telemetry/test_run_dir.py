"""What a run writes down: one line a step, and a trace that viewers read."""

import json
import subprocess

import pytest

from kimi_pretrain.telemetry.console import StepDisplay, StepLines
from kimi_pretrain.telemetry.metrics import RankMetrics
from kimi_pretrain.telemetry.run_dir import MetricsWriter, git_state, scalars, write_trace


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path):
    metrics = MetricsWriter(tmp_path, 0)
    metrics.write({"step": 1, "loss": 2.5, "phase_seconds": {"4 backbone": {"max": 1.0}}})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.5
    metrics.close()
    assert list((tmp_path / "tensorboard").iterdir())


def test_every_nth_step_is_a_line_with_the_speed_since_the_line_before():
    lines = StepLines(3, 9, 4)
    told = {step: lines.line(step, 1.5, 1000, 0.5 * step) for step in range(4, 10)}
    assert {step for step, line in told.items() if line} == {4, 8, 9}
    # Steps 5 to 8 took 2.5 + 3 + 3.5 + 4 s for 4,000 tokens; one is left.
    assert told[8] == "step 8/9  loss 1.5000  308 tokens/s  ETA 0:00:03"
    assert told[9] == "step 9/9  loss 1.5000  222 tokens/s  ETA 0:00:00"


def test_output_that_is_no_terminal_gets_lines_and_no_bar(tmp_path, capfd):
    metrics = MetricsWriter(tmp_path, 0, StepDisplay(0, 5, 3))
    for step in range(1, 6):
        metrics.write({"step": step, "loss": float("nan"), "tokens": 64})
        told = capfd.readouterr()  # at once, not when the run ends
        assert (told.out.count("\n"), told.err) == (int(step in (1, 3, 5)), "")
        assert "\x1b" not in told.out
    metrics.close()
    assert capfd.readouterr().out == ""


def test_a_resumed_run_does_its_later_steps_again(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "lo')
    metrics = MetricsWriter(tmp_path, 2)
    metrics.write({"step": 3, "loss": 2.0})
    metrics.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in kept] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_what_is_not_finite_is_null_and_not_drawn(tmp_path):
    metrics = MetricsWriter(tmp_path, 0)
    metrics.write({"step": 1, "loss": float("nan"), "max_logits": [1.0, float("inf")]})
    metrics.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found == {"step": 1, "loss": None, "max_logits": [1.0, None]}
    assert scalars(found) == {"max_logits/layer_00": 1.0}


def test_all_records_of_later_steps_are_set_aside_and_told(tmp_path, caplog):
    names = ("metrics.jsonl", "quarantine.jsonl", "anomalies.jsonl")
    for name in names:
        (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n')
    MetricsWriter(tmp_path, 1).close()
    for name in names:
        assert (tmp_path / name).read_text() == '{"step": 1}\n'
        kept = name.replace(".", ".abandoned.")
        assert (tmp_path / kept).read_text() == '{"step": 2}\n'
        assert f"{name} goes on after step 1; lines of later steps, up to 2, are in {kept}" in (
            caplog.text
        )
    MetricsWriter(tmp_path, 0).close()  # from scratch: nothing is left of it
    for name in names:
        assert (tmp_path / name).read_text() == ""
        kept = name.replace(".", ".abandoned.")
        assert (tmp_path / kept).read_text() == '{"step": 2}\n{"step": 1}\n'


def git(checkout, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", "-C", str(checkout), *who, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path):
    folder = tmp_path / "checkout"
    folder.mkdir()
    git(folder, "init", "-q")
    (folder / "step.py").write_bytes(b"NAME = 1\n")
    (folder / ".gitignore").write_text("/runs/\n")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def test_what_ran_is_told_byte_for_byte(checkout):
    state, difference = git_state(checkout)
    commit = git(checkout, "rev-parse", "HEAD")
    assert (state, difference) == ({"commit": commit, "clean": True, "untracked": []}, b"")
    (checkout / "step.py").write_bytes(b"NAME = '\xe9t\xe9'\n")  # Latin-1
    state, difference = git_state(checkout)
    assert state == {"commit": commit, "clean": False, "untracked": []}
    assert b"+NAME = '\xe9t\xe9'\n" in difference
    git(checkout, "checkout", "-q", "step.py")
    (checkout / "diff.patch").write_bytes(difference)
    git(checkout, "apply", "diff.patch")
    assert (checkout / "step.py").read_bytes() == b"NAME = '\xe9t\xe9'\n"


def test_untracked_modules_ran_as_well(checkout):
    (checkout / "notes.txt").write_text("of no matter")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "mine.py").write_text("ignored")
    assert git_state(checkout)[0]["clean"] is True
    (checkout / "random.py").write_text("X = 1\n")
    state, _ = git_state(checkout)
    assert (state["clean"], state["untracked"]) == (False, ["random.py"])


def test_of_another_owner_s_checkout_nothing_is_claimed(checkout, monkeypatch, caplog):
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to test this
    state, difference = git_state(checkout)
    assert (state["commit"], state["clean"], difference) == (None, None, b"")
    assert "dubious ownership" in state["unknown"]
    assert "dubious ownership" in caplog.text
    monkeypatch.setenv("PATH", "/nowhere")
    state, _ = git_state(checkout)
    assert "git" in state["unknown"]
    assert state["clean"] is None


def record(spans: dict, peak_bytes: dict | None = None) -> RankMetrics:
    return RankMetrics(spans, peak_bytes or {}, {}, 0, True, 1.0, 0, 0)


def events_of(tmp_path, *everyone: RankMetrics) -> list[dict]:
    write_trace(tmp_path / "trace.json", list(everyone))
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_trace_starts_at_zero_and_counts_microseconds(tmp_path):
    spans = [{"4 backbone": (100.5, 101.0)}, {"4 backbone": (100.0, 102.0)}]
    events = events_of(tmp_path, *map(record, spans))
    timed = [(e["pid"], e["ts"], e["dur"]) for e in events if e["ph"] == "X"]
    assert timed == [(0, 5e5, 5e5), (1, 0.0, 2e6)]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} >= {"rank 0", "rank 1"}


def test_trace_holds_pieces_memory_and_what_is_exposed(tmp_path):
    spans = {
        "2 vision forward": (10.0, 11.0),
        "3 hand-over": (11.0, 11.5),
        "4 backbone": (11.5, 13.0),
        "other": (13.0, 14.0),
        "4 backbone#2": (14.0, 15.0),
    }
    events = events_of(tmp_path, record(spans, {"4 backbone": 3 << 29}))
    backbone = [e for e in events if e["name"] == "4 backbone"]
    assert [(e["ts"], e["dur"]) for e in backbone] == [(1.5e6, 1.5e6), (4e6, 1e6)]
    assert all(e["args"] == {"peak GiB": 1.5, "first stage": True} for e in backbone)
    assert "args" not in next(e for e in events if e["name"] == "other")
    (exposed,) = [e for e in events if e.get("cat") == "exposed"]
    assert (exposed["name"], exposed["pid"]) == ("exposed encoder, forward", 1)
    assert (exposed["ts"], exposed["dur"]) == (0.0, 1.5e6)
