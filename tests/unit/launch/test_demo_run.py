"""Tests of the demo's decisions: comparison, summary, folders and GPU settings."""

import json
import os
import shlex
from pathlib import Path

import pytest

from kimi_pretrain.config import load_config
from launch.demo import result, run
from launch.demo.summary import compare_runs, summarise, verified_gradients

CONFIG = load_config("tiny_cpu")


def metrics_line(step: int, **changes) -> dict:
    return {
        "step": step,
        "loss": 5.0 / step,
        "grad_norm": 1.0 / step,
        "lr": 1e-3,
        "items": 10,
        "text_tokens": 100,
        "vision_tokens": 30,
        "skipped_samples": 0,
        "balance": {
            "naive": 2.0 + step,
            "naive_among_owners": 1.0 + step,
            "dep": 1.0,
            "round_robin": 1.5,
        },
        "predicted_seconds_per_rank": {
            "naive": [2.0 * step, 0.0],
            "dep": [1.0, 1.0],
            "round_robin": [3.0, 1.0],
        },
        "largest_tenth_of_items": 0.25 * step,
        "store": {"requests": 7 * step, "bytes": 1000 * step},
        "exposed_encoder_seconds": 0.1 * step,
        "exposed_encoder_share": 0.2 / step,
        "imbalance": {"predicted": 1.0 + step, "measured": 2.0 + step},
        "exchange_bytes": {
            "over": {"max": 30 * step, "rank": 1, "sum": 100 * step},
            "back": {"max": 40 * step, "rank": 0, "sum": 200 * step},
        },
        "split_items": step,
        "kept_patches": 10 * step,
        "peak_gib_step": {"max": 10.0 - step, "rank": step, "first_stage": float(step)},
        "mfu": 0.1 * step,
        "model_tflops_per_gpu": 40.0 * step,
        "peak_tflops_per_gpu": 400.0,
        "peak_source": "measured, float32",
        **changes,
    }


def write_run(folder: Path, lines: list[dict], **hashes) -> Path:
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    states = {"step": 4, "loader": "l", "per_tensor": {"head": "h", "optim.momentum.head": "o"}}
    (folder / "state_hashes.json").write_text(json.dumps(states | hashes))
    return folder


@pytest.fixture
def first(tmp_path) -> Path:
    return write_run(tmp_path / "first", [metrics_line(step) for step in (1, 2, 3, 4)])


def test_equal_runs_are_bitwise_equal(first, tmp_path):
    again = write_run(tmp_path / "again", [metrics_line(step) for step in (3, 4)])
    assert compare_runs(first, again) == {
        "bitwise": True,
        "steps": 2,
        "tensors": 2,
        "differences": [],
    }


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
def test_the_last_bit_of_a_number_is_seen(first, tmp_path, name):
    import math

    value = metrics_line(3)[name]
    lines = [metrics_line(3, **{name: math.nextafter(value, 9)}), metrics_line(4)]
    result = compare_runs(first, write_run(tmp_path / "again", lines))
    assert not result["bitwise"]
    told = f"step 3 is the first that differs: {name} is {lines[0][name]!r}, was {value!r}"
    assert result["differences"][0] == told
    assert result["differences"][1].startswith("this suggests: ")


OTHER = {
    "step": 5,
    "loader": "other",
    "per_tensor": {"head": "x", "optim.momentum.head": "o"},
}


@pytest.mark.parametrize("state", OTHER)
def test_every_state_counts(first, tmp_path, state):
    again = write_run(tmp_path / "again", [metrics_line(4)], **{state: OTHER[state]})
    assert not compare_runs(first, again)["bitwise"]


def test_a_run_that_did_nothing_proves_nothing(first, tmp_path):
    assert not compare_runs(first, write_run(tmp_path / "again", []))["bitwise"]
    beyond = write_run(tmp_path / "beyond", [metrics_line(5)])
    assert not compare_runs(first, beyond)["bitwise"]


def test_summary_has_the_promised_keys_and_numbers():
    lines = [metrics_line(1), metrics_line(2), metrics_line(3, items=0)]
    summary = summarise(
        CONFIG,
        lines,
        {"multimodal": [3.0, 2.0, 2.5], "text_only": [2.0, 1.0, 9.0]},
        {"bitwise": True, "steps": 1, "tensors": 9, "differences": []},
        {"accuracy": 0.9, "accuracy_swapped": 0.1},
        {"setup_data": 1.26, "train": 2.0, "resume": 3.0, "eval": 4.0},
    )
    assert summary["steps"] == 3
    assert (summary["loss_first"], summary["loss_last"]) == (5.0, 5.0 / 3)
    assert summary["heldout_digit_accuracy"] == 0.9
    assert summary["heldout_digit_accuracy_swapped"] == 0.1
    assert summary["resumed_bitwise"] is True
    assert summary["world"] == {"pp": 2, "vpp": 2, "ep": 2, "dp": 2}
    assert summary["media_items"] == 20
    assert summary["text_tokens"] == 300
    assert summary["vision_tokens"] == 90
    # A step without media does not count in the balance.
    assert summary["balance_max_over_mean"] == {
        "naive": 3.5,
        "naive_among_owners": 2.5,
        "round_robin": 1.5,
        "dep": 1.0,
    }
    assert summary["predicted_seconds_max_over_mean"] == {
        "naive": 2.0, "round_robin": 1.5, "dep": 1.0
    }  # fmt: skip
    assert summary["patches_in_largest_tenth_of_items"] == 0.375
    assert summary["encoder"] == {
        "exposed_encoder_seconds": pytest.approx(0.15),
        "exposed_encoder_share": pytest.approx(0.15),
        "imbalance": {"predicted": 2.5, "measured": 3.5},
        "exchange_bytes": {"over": {"sum": 150, "max": 45}, "back": {"sum": 300, "max": 60}},
        "bubble_seconds": None,
        "split_items": 3,
        "kept_patches": 30,
    }
    assert summary["peak_gib"] == {"worst_rank": 9.0, "rank": 1, "first_stage": 3.0}
    assert summary["speed"] == {
        "mfu": 0.2,
        "model_tflops_per_gpu": 80.0,
        "peak_tflops_per_gpu": 400.0,
        "peak_source": "measured, float32",
    }
    assert summary["step_seconds_median"] == {"multimodal": 2.5, "text_only": 2.0}
    assert summary["efficiency_vs_text_only"] == 0.8
    assert summary["s3"] == {"requests": 21, "bytes": 3000}
    assert summary["seconds"] == {"setup_data": 1.3, "train": 2.0, "resume": 3.0, "eval": 4.0}
    json.dumps(summary)


def summary_of(**changes) -> dict:
    return summarise(
        CONFIG,
        [metrics_line(step, **changes) for step in (1, 2, 3)],
        None,
        {"bitwise": True, "steps": 1, "tensors": 9, "differences": []},
        {"accuracy": 0.9, "accuracy_swapped": 0.1},
        {},
    )


def test_the_result_shows_what_was_measured():
    assert result.measured(summary_of()) == {
        "vision patches, max / mean": "4.00 on the rows' owners, 1.00 balanced",
        "their seconds, predicted": "2.00 on the rows' owners, 1.00 balanced",
        "encoder seconds, max / mean": "3.00 predicted, 4.00 measured",
        "exposed encoder time": "200 ms, 10.0% of a step",
        "exchanged a step": "0.0002 MB of embeddings, 0.0004 MB of their gradients",
        "peak memory": "9.00 GiB on rank 1, 3.00 GiB on the first stage",
        "model FLOPs utilisation": "20.0% of 400 TFLOP/s a process (measured, float32)",
    }


def test_the_result_leaves_out_what_was_not_measured():
    colocated = summary_of(
        exposed_encoder_seconds=None,
        exposed_encoder_share=None,
        imbalance={"predicted": 2.0, "measured": None},
        peak_gib_step={},
    )
    shown = result.measured(colocated)
    assert shown["encoder seconds, max / mean"] == "2.00 predicted"
    inside = "in the pipeline's bubbles"
    assert not {"exposed encoder time", "peak memory", inside} & set(shown)
    means = {"filled": 1.5, "wasted": 0.25, "overrun": 0.0}
    seconds = {kind: {"max": 9.0, "rank": 0, "mean": mean} for kind, mean in means.items()}
    shown = result.measured(summary_of(bubble_seconds=seconds, exposed_encoder_seconds=None))
    assert shown[inside] == "1.50 s filled, 0.25 s wasted, 0.00 s overrun"
    text_only = summary_of(items=0)
    assert text_only["encoder"] is None
    assert set(result.measured(text_only)) == {"peak memory", "model FLOPs utilisation"}


@pytest.mark.parametrize(
    ("gpus", "expected"),
    [
        (0, {}),
        (4, {}),
        (8, {}),
        (1, {"pp": 1, "vpp": 1, "dp": 1, "ep": 1}),
        (2, {"pp": 1, "vpp": 1, "dp": 2, "ep": 2}),
        (3, {"pp": 1, "vpp": 1, "dp": 2, "ep": 2}),
    ],
)
def test_fewer_gpus_than_processes_change_the_layout(gpus, expected):
    layout = load_config("tiny_cpu", run.gpu_overrides(gpus, CONFIG)).layout
    wanted = expected or {"pp": 2, "vpp": 2, "dp": 2, "ep": 2}
    assert {name: getattr(layout, name) for name in wanted} == wanted
    assert gpus == 0 or layout.world_size() <= gpus


def test_middle_checkpoint_is_complete_and_not_the_last(tmp_path):
    root = tmp_path / "checkpoints"
    for step in (100, 200, 300, 400):
        (root / f"step_{step:08d}").mkdir(parents=True)
        if step != 200:  # an incomplete checkpoint
            (root / f"step_{step:08d}" / "manifest.json").touch()
    assert run.middle_checkpoint(tmp_path, 400).name == "step_00000100"
    assert run.middle_checkpoint(tmp_path, 700).name == "step_00000300"
    with pytest.raises(run.DemoError, match="before step 100"):
        run.middle_checkpoint(tmp_path, 100)


def test_only_a_demo_s_own_folder_is_emptied(tmp_path):
    mine = tmp_path / "demo"
    run.prepare_folder(mine)
    (mine / "metrics.jsonl").touch()
    run.prepare_folder(mine)
    assert [f.name for f in mine.iterdir()] == [run.MARKER]
    other = tmp_path / "thesis"
    other.mkdir()
    (other / "chapter.tex").write_text("years")
    with pytest.raises(ValueError, match="not the folder of an earlier demo"):
        run.prepare_folder(other)
    assert (other / "chapter.tex").read_text() == "years"


def test_a_run_without_a_middle_checkpoint_is_refused():
    config = load_config("tiny_cpu", ["train.steps=10", "checkpoint.every=10"])
    with pytest.raises(ValueError, match="checkpoint.every=5"):
        run.check_lengths(config)


def test_environment_is_put_back(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://mine")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    values = {"AWS_ENDPOINT_URL": "http://127.0.0.1:1", "AWS_SECRET_ACCESS_KEY": "s"}

    def fail_inside():
        with run.environment(values):
            assert os.environ["AWS_SECRET_ACCESS_KEY"] == "s"
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert os.environ["AWS_ENDPOINT_URL"] == "https://mine"
    assert "AWS_SECRET_ACCESS_KEY" not in os.environ


@pytest.mark.parametrize("error", [3e-7, None])  # None: not finite
def test_verified_gradients_count_the_faults_that_could_be_planted(error):
    faults = {
        "one": {"found": True},
        "two": {"found": False},
        "three": {"obstacle": "there is one replica"},
    }
    groups = [{"error": 1e-7}, {"error": error}]
    told = {"passed": error is not None, "comparison": {"groups": groups}, "faults": faults}
    expected = {"passed": error is not None, "error": error, "planted": 2, "found": 1}
    assert verified_gradients(told) == expected


def test_the_corpus_is_registered_and_one_line_opens_the_page(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "command", lambda *words, what: asked.append(words))
    folder = tmp_path / "my demo"
    line = run.register(folder, "http://127.0.0.1:12345")
    assert [words[:4] for words in asked] == [
        ("data", "catalog", "rebuild", "s3://kimi-demo"),
        ("data", "catalog", "scan", str(folder)),
    ]
    assert {words[4:] for words in asked} == {("--catalog", str(folder / "catalog.sqlite"))}
    start, source, serve = (shlex.split(part) for part in line.split(" && "))
    assert start[:3] == ["kimi-pretrain", "s3", "start"]
    assert start[3:] == [
        *("--folder", f"{folder}/s3"),
        *("--bucket", "kimi-demo"),
        *("--port", "12345"),
    ]
    assert source == ["source", f"{folder}/s3/credentials.env"]
    assert serve[:4] == ["kimi-pretrain", "data", "serve", "s3://kimi-demo"]
    assert serve[4:] == ["--run", str(folder), "--catalog", f"{folder}/catalog.sqlite"]
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    assert "kimi-pretrain[platform]" in run.register(folder, "http://127.0.0.1:12345")
    assert len(asked) == 2
