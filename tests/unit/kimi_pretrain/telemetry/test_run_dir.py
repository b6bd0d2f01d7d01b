"""Tests the records of a run: one line per step, and a trace that viewers can read."""

import hashlib
import json
import pickle
import re
import subprocess
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data_pipeline.plan.budget import BudgetEnd
from kimi_pretrain.config import load_config
from kimi_pretrain.reliability.anomaly_guard import Verdict
from kimi_pretrain.reliability.status import read_status
from kimi_pretrain.telemetry import run_dir
from kimi_pretrain.telemetry.console import StepDisplay, StepLines
from kimi_pretrain.telemetry.losses import LossSums, bins_of
from kimi_pretrain.telemetry.metrics import RankMetrics
from kimi_pretrain.telemetry.recorder import RankReport, Recorder
from kimi_pretrain.telemetry.run_dir import (
    MetricsWriter,
    git_state,
    note_beginning,
    scalars,
    tell_sources,
    with_earlier_heldout,
    write_trace,
)


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
    # Steps 5 to 8 took 2.5 + 3 + 3.5 + 4 s for 4,000 tokens; one step is left.
    assert told[8] == "step 8/9  loss 1.5000  308 tokens/s  ETA 0:00:03"
    assert told[9] == "step 9/9  loss 1.5000  222 tokens/s  ETA 0:00:00"


def test_output_that_is_no_terminal_gets_lines_and_no_bar(tmp_path, capfd):
    metrics = MetricsWriter(tmp_path, 0, StepDisplay(0, 5, 3))
    for step in range(1, 6):
        metrics.write({"step": step, "loss": float("nan"), "tokens": 64})
        told = capfd.readouterr()  # immediately, not at the end of the run
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
        told = f"{name} goes on after step 1; lines of another start, up to step 2, are in {kept}"
        assert told in caplog.text
    MetricsWriter(tmp_path, 0, history="none").close()  # from scratch: no line is left
    for name in names:
        assert (tmp_path / name).read_text() == ""
        kept = name.replace(".", ".abandoned.")
        assert (tmp_path / kept).read_text() == '{"step": 2}\n{"step": 1}\n'


HISTORIES = {
    # Step 40 is the checkpoint's step; with the same weights its validation stays.
    "own": ([20, 39, 40], [20, 40]),
    # Resumed from elsewhere, so the validation of this step had other weights.
    "other": ([20, 39, 40], [20]),
    # A stage that keeps the step count, after a start in this folder that saved no checkpoint.
    "none": ([], []),
}


@pytest.mark.parametrize("history", HISTORIES)
def test_the_lines_of_other_weights_are_set_aside(history, tmp_path):
    for name, steps in (("metrics", [20, 39, 40, 41]), ("heldout", [20, 40, 60])):
        lines = "".join(json.dumps({"step": step}) + "\n" for step in steps)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    MetricsWriter(tmp_path, 40, history=history).close()
    left = [
        [json.loads(line)["step"] for line in (tmp_path / f"{name}.jsonl").open()]
        for name in ("metrics", "heldout")
    ]
    assert tuple(left) == HISTORIES[history]


def source(name, use, content="a" * 64):
    return {"name": name, "use": use, "content_hash": content, "made_as": content}


def test_held_out_sources_of_earlier_starts_are_not_forgotten(tmp_path):
    """Validations have read their samples, and the data under their names must not change."""
    before = [source("words", "train"), source("held", "heldout")]
    tell_sources(tmp_path, before)
    tell_sources(tmp_path, [source("words", "train"), source("held", "heldout", "b" * 64)])
    assert json.loads((tmp_path / "sources.json").read_text()) == before  # it did no step
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    now = [source("words", "train"), source("other", "heldout"), source("held", "train")]
    tell_sources(tmp_path, now)
    assert with_earlier_heldout(tmp_path, now) == [*now, before[1]]
    with pytest.raises(ValueError, match="'held' is bbbbbbbbbbbb, .* validated with aaaaaaaaaaaa"):
        tell_sources(tmp_path, [source("held", "heldout", "b" * 64)])
    redacted = source("held", "heldout") | {"content_hash": "c" * 64}  # the same less one sample
    tell_sources(tmp_path, [redacted])


@pytest.mark.parametrize(
    ("lines", "step", "history", "kept"),
    [
        ([], 40, "none", 40),  # a stage that keeps the data order
        ([], 40, "other", 40),  # a run that resumes another run's checkpoint
        ([41, 42], 30, "other", 30),  # and again from an earlier checkpoint
        ([31, 40], 40, "own", 7),  # its own checkpoint: the beginning is already recorded
        ([1, 40], 40, "none", 40),  # those steps belong to a start that saved no checkpoint
        ([1, 2], 0, "none", None),
    ],
)
def test_where_the_data_of_a_folder_began_is_kept(tmp_path, lines, step, history, kept):
    (tmp_path / "data_began_at.json").write_text('{"step": 7}\n')
    text = "".join(json.dumps({"step": step}) + "\n" for step in lines)
    (tmp_path / "metrics.jsonl").write_text(text)
    note_beginning(tmp_path, {"step": step}, history)
    file = tmp_path / "data_began_at.json"
    assert (json.loads(file.read_text())["step"] if file.exists() else None) == kept


def test_two_starts_at_step_0_leave_one_validation_of_it(tmp_path):
    """The first start saved nothing, so the second one has other weights."""
    for loss in (5.0, 6.0):
        recorder = recorder_of(tmp_path, 0, history="none")
        assert recorder.to_validate(0, due=True)
        line = {"step": 0, "kind": "heldout", "loss": loss, "loss_by_source": {}, "seconds": 1.0}
        recorder.heldout(line)
        assert not recorder.to_validate(0, due=True)
        recorder.close()
    lines = [json.loads(line) for line in (tmp_path / "heldout.jsonl").open()]
    assert [(line["step"], line["loss"]) for line in lines] == [(0, 6.0)]


def test_a_stage_is_validated_at_its_first_step_whichever_it_is(tmp_path):
    """A resumed run validates its first step only if no run did; later steps when due."""
    recorder = recorder_of(tmp_path, 403, history="none")
    assert recorder.to_validate(403, due=False)
    (tmp_path / "heldout.jsonl").write_text('{"step": 403}\n')
    assert not recorder.to_validate(403, due=False)
    assert recorder.to_validate(420, due=True)
    recorder.close()


def recorder_of(folder, first_step: int, history: str, end: BudgetEnd | None = None) -> Recorder:
    config = load_config("tiny_cpu", ["train.steps=500", "train.peak_tflops=1.0"])
    alone = SimpleNamespace(rank=0, device=torch.device("cpu"))
    return Recorder(config, folder, alone, first_step, [], history, end)


@pytest.mark.parametrize(("exact", "steps"), [(True, 420), (False, 500)])
def test_a_budget_s_end_is_told_where_it_is_known(exact, steps, tmp_path, capfd):
    """An estimate is marked as such and is shown only to people."""
    end = BudgetEnd(420, exact, (9, 9), (0, 0), "it is used up")
    recorder = recorder_of(tmp_path, 0, "none", end)
    recorder.metrics.write({"step": 1, "loss": 1.0, "tokens": 64})
    recorder.status("running", 1, None)
    assert read_status(tmp_path).steps == steps
    recorder.status("finished", 420, None)
    assert read_status(tmp_path).steps == 420
    recorder.close()
    told = "step 1/420 .* ETA 0" if exact else "step 1/about 420 .* ETA about 0"
    assert re.match(told, capfd.readouterr().out)


def test_an_estimate_that_was_too_low_leaves_nothing_to_do():
    lines = StepLines(0, 9, 4, about=True)
    told = [lines.line(step, 1.5, 1000, 1.0) for step in range(1, 13)]
    assert told[-1] == "step 12/about 9  loss 1.5000  1,000 tokens/s  ETA about 0:00:00"


def test_a_rank_s_report_stays_small():
    """As its docstring says, it takes 24 bytes for each source and bin with a loss on the rank."""

    def size(cells: int) -> int:
        numbers = np.arange(cells)
        losses = LossSums(numbers, numbers.astype(np.float64), numbers.copy())
        metrics = RankMetrics({}, {}, {}, 0, True, 1.0, 0, 0, losses=losses)
        return len(pickle.dumps(RankReport(metrics, Verdict(None, "apply"))))

    assert size(0) < 2048
    assert size(2200) - size(0) == pytest.approx(24 * 2200, rel=0.01)
    assert 200 * len(bins_of(262_144)) == 2200


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
    about = {
        "sha256": hashlib.sha256(difference).hexdigest(), "bytes": len(difference),
        "masked_lines": 0, "left_out_bytes": 0,
    }  # fmt: skip
    assert state == {"commit": commit, "clean": False, "untracked": [], "diff": about}
    assert b"+NAME = '\xe9t\xe9'\n" in difference
    git(checkout, "checkout", "-q", "step.py")
    (checkout / "diff.patch").write_bytes(difference)
    git(checkout, "apply", "diff.patch")
    assert (checkout / "step.py").read_bytes() == b"NAME = '\xe9t\xe9'\n"


@pytest.mark.parametrize("keep", [True, False])
def test_of_a_secret_in_a_tracked_file_nothing_is_kept(checkout, monkeypatch, keep):
    monkeypatch.setenv("STORE_SECRET", "correct-horse-battery")
    (checkout / ".env").write_text("NAME=none\n")
    git(checkout, "add", "-A")
    git(checkout, "commit", "-qm", "second")
    (checkout / ".env").write_text("NAME=plain\n")
    added = "# correct-horse-battery\nNAME = 2  # password: Tr0ub4dor\nSTEPS = 40\n"
    (checkout / "step.py").write_text(added)
    state, kept = git_state(checkout, keep_diff=keep)
    for secret in (b"correct-horse", b"Tr0ub4dor", b"plain"):
        assert secret not in kept
    assert state["clean"] is False
    plain = git(checkout, "diff", "HEAD").encode() + b"\n"
    sha256 = hashlib.sha256(plain).hexdigest()
    assert (state["diff"]["sha256"], state["diff"]["bytes"]) == (sha256, len(plain))
    if not keep:
        assert (kept, state["diff"]["left_out_bytes"]) == (b"", len(plain))
        return
    assert b"+# [masked]\n+NAME = 2  # password: [masked]\n+STEPS = 40\n" in kept
    assert state["diff"]["masked_lines"] == 4


def test_a_difference_of_gigabytes_is_bounded(checkout, monkeypatch):
    monkeypatch.setattr(run_dir, "DIFF_BYTES", 1000)
    (checkout / "step.py").write_text("".join(f"LINE_{n} = {n}\n" for n in range(9000)))
    state, kept = git_state(checkout)
    assert 900 < len(kept) <= 1000
    assert kept.endswith(b"\n")
    assert state["diff"]["left_out_bytes"] == state["diff"]["bytes"] - len(kept) > 1e5


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


def test_trace_has_work_in_bubbles_inside_the_backbone(tmp_path):
    spans = {"prepare": (10.0, 11.0), "4 backbone": (11.0, 15.0), "7 update": (15.0, 16.0)}
    seconds = {"filled": 1.5, "wasted": 0.5, "overrun": 0.0}
    sections = [("2 vision forward", 11.5, 12.0), ("4 wait", 12.0, 12.5)]
    inside = replace(record(spans), bubble_seconds=seconds, bubble_sections=sections)
    events = events_of(tmp_path, record(spans), inside)
    found = [(e["pid"], e["name"], e["ts"], e["dur"]) for e in events if e.get("cat") == "bubble"]
    assert found == [(1, "2 vision forward", 1.5e6, 5e5), (1, "4 wait", 2e6, 5e5)]
    told = {(e["pid"], e["name"]): e["args"] for e in events if e["ph"] == "X" and "args" in e}
    assert told == {(1, "4 backbone"): seconds}


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
