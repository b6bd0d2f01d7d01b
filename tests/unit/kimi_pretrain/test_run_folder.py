"""What a run writes down: one line a step, and a trace that viewers read."""

import json

import pytest

from kimi_pretrain.run_folder import MetricsWriter, scalars, write_trace
from kimi_pretrain.telemetry.line import RankRecord


def test_metrics_are_on_disk_as_soon_as_they_are_written(tmp_path):
    metrics = MetricsWriter(tmp_path, 0, 3, show_bar=False)
    metrics.write({"step": 1, "loss": 2.5, "phase_seconds": {"4 backbone": {"max": 1.0}}})
    assert json.loads((tmp_path / "metrics.jsonl").read_text())["loss"] == 2.5
    metrics.close()
    assert list((tmp_path / "tensorboard").iterdir())


def test_a_resumed_run_does_its_later_steps_again(tmp_path):
    lines = [json.dumps({"step": step, "loss": 1.0}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + '{"step": 4, "lo')
    metrics = MetricsWriter(tmp_path, 2, 3, show_bar=False)
    metrics.write({"step": 3, "loss": 2.0})
    metrics.close()
    kept = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in kept] == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_what_is_not_finite_is_null_and_not_drawn(tmp_path):
    metrics = MetricsWriter(tmp_path, 0, 3, show_bar=False)
    metrics.write({"step": 1, "loss": float("nan"), "max_logits": [1.0, float("inf")]})
    metrics.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    found = json.loads(line, parse_constant=pytest.fail)
    assert found == {"step": 1, "loss": None, "max_logits": [1.0, None]}
    assert scalars(found) == {"max_logits/layer_00": 1.0}


def test_all_records_of_later_steps_are_forgotten_at_once(tmp_path):
    names = ("metrics.jsonl", "quarantine.jsonl", "anomalies.jsonl")
    for name in names:
        (tmp_path / name).write_text('{"step": 1}\n{"step": 2}\n')
    MetricsWriter(tmp_path, 1, 3, show_bar=False).close()
    for name in names:
        assert (tmp_path / name).read_text() == '{"step": 1}\n'


def record(spans: dict, peak_bytes: dict | None = None) -> RankRecord:
    return RankRecord(spans, peak_bytes or {}, {}, 0, True, 1.0, 0, 0)


def events_of(tmp_path, *everyone: RankRecord) -> list[dict]:
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
