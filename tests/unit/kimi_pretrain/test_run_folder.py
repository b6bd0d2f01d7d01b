"""What a run writes down: one line a step, and a trace that viewers read."""

import json

from kimi_pretrain.run_folder import MetricsWriter, write_trace


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


def test_trace_starts_at_zero_and_counts_microseconds(tmp_path):
    spans = [{"4 backbone": (100.5, 101.0)}, {"4 backbone": (100.0, 102.0)}]
    write_trace(tmp_path / "trace.json", spans)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(e["pid"], e["ts"], e["dur"]) for e in events] == [(0, 5e5, 5e5), (1, 0.0, 2e6)]
