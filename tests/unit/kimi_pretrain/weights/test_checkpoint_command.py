"""Tests `kimi-pretrain checkpoint ...` from the command line: its output and exit codes."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from kimi_pretrain.weights import hf_import
from kimi_pretrain.weights.compare import compare_numbers
from launch.cli.main import app
from tests.unit.kimi_pretrain.weights.weight_folders import (
    SMALL,
    language_alone,
    random_weights,
    small_config,
    write_folder,
)

CONFIG = small_config()
NORM = "language_model.model.norm.weight"


def run(*arguments):
    return CliRunner().invoke(app, ["checkpoint", *map(str, arguments)])


def last_json(result):
    return json.loads(result.stdout.splitlines()[-1])


@pytest.fixture
def checkpoint(tmp_path):
    folder = write_folder(tmp_path / "hf", random_weights(CONFIG), 2)
    return hf_import.write(hf_import.plan(folder, CONFIG), str(tmp_path / "run" / "checkpoints"))


def test_inspect_shows_parts_and_state(checkpoint, tmp_path):
    shown = run("inspect", tmp_path / "run")
    assert shown.exit_code == 0
    assert checkpoint in shown.stdout
    for piece in (
        "step 0, 0 updates",
        "weights alone",
        "float32",
        "vision_tower",
        "routing biases",
    ):
        assert piece in shown.stdout, piece
    found = last_json(run("inspect", checkpoint, "--json"))
    assert found["step"] == 0
    assert found["contents"] == "weights"
    assert found["parts"]["routed experts"]["numbers"] == 2 * 4 * 3 * 64 * 32
    total = sum(part["numbers"] for part in found["parts"].values())
    assert found["parameters"] == total - 2 * 4


def test_inspect_lists_tensors_with_norms(checkpoint, tmp_path):
    found = last_json(run("inspect", checkpoint, "--tensors", "*.model.norm.weight", "--json"))
    (one,) = found["listed"]
    norm = random_weights(CONFIG)[NORM]
    assert one["name"] == NORM
    assert one["norm"] == pytest.approx(float(norm.norm()), rel=1e-6)
    assert one["largest"] == pytest.approx(float(norm.abs().max()))
    shown = run("inspect", tmp_path / "hf", "--tensors", "*norm0*")
    assert shown.stdout.count("\n") == 1 + 4
    assert run("inspect", checkpoint, "--tensors", "nothing*").exit_code == 2


def test_verify_passes_fails_and_refuses(checkpoint, tmp_path):
    whole = run("verify", checkpoint)
    assert whole.exit_code == 0
    assert whole.stdout.startswith("PASS: ")
    file = next((tmp_path / "run").rglob("rank_*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    damaged = run("verify", checkpoint, "--json")
    assert damaged.exit_code == 1
    found = last_json(damaged)
    assert not found["passed"]
    assert str(file) in found["problems"][0]
    assert "FAIL" in run("verify", checkpoint).stdout
    manifest = Path(checkpoint) / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"optimizer_steps": 0', '"optimizer_steps": 8'))
    damaged = run("verify", checkpoint)
    assert damaged.exit_code == 1
    assert f"damaged: {manifest}: schema 3 with sha256" in damaged.stdout
    none = run("verify", tmp_path / "hf")
    assert none.exit_code == 2
    assert "no manifest.json" in none.output


def export_to(out, checkpoint):
    return run("export", checkpoint, out, "--as", "kimi_k25", "--max-positions", 64)


USES = {
    "export": lambda checkpoint, tmp_path: export_to(tmp_path / "out", checkpoint),
    "diff": lambda checkpoint, tmp_path: run("diff", tmp_path / "hf", checkpoint, "--weights"),
    "inspect": lambda checkpoint, tmp_path: run("inspect", checkpoint, "--tensors", "*norm*"),
    "import": lambda checkpoint, tmp_path: run(
        *("import", tmp_path / "alone", tmp_path / "place", "--config", "tiny_cpu"),
        *(*SMALL, "--vision", checkpoint),
    ),
}


@pytest.mark.parametrize(("use", "where"), [*((use, "tensor") for use in USES), ("diff", "header")])
def test_what_verify_calls_damaged_goes_nowhere(checkpoint, tmp_path, use, where):
    """After an export, import or comparison, a flipped bit would look like any other number."""
    write_folder(tmp_path / "alone", language_alone(random_weights(CONFIG)))
    file = next(Path(checkpoint).glob("rank_*.safetensors"))
    raw = bytearray(file.read_bytes())
    if where == "tensor":
        raw[-1] ^= 1
    else:
        assert b'"shape":[300,64]' in raw
        raw = raw.replace(b'"shape":[300,64]', b'"shape":[64,300]')
    file.write_bytes(raw)
    assert run("verify", checkpoint).exit_code == 1
    told = USES[use](checkpoint, tmp_path)
    assert told.exit_code == 2, told.output
    assert f"{file}: sha256" in told.output.replace("\n", "")
    assert not (tmp_path / "out").exists()
    assert not list((tmp_path / "place").glob("*"))


def test_diff_says_how_far_and_where(checkpoint, tmp_path):
    same = run("diff", checkpoint, tmp_path / "hf")
    assert (same.exit_code, same.stdout.splitlines()[-1]) == (0, "SAME: bit for bit")
    weights = random_weights(CONFIG)
    weights[NORM][[3, 9]] += torch.tensor([0.25, -0.5])
    bias = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    weights[bias] = weights[bias].double()
    del weights["vision_tower.patch_embed.proj.bias"]
    weights["language_model.lm_head.weight"] = torch.zeros(2, 2)
    other = write_folder(tmp_path / "other", weights)
    found = run("diff", checkpoint, other, "--json")
    assert found.exit_code == 1
    told = {one["name"]: one for one in last_json(found)["tensors"]}
    assert set(told) == {NORM, bias, "vision_tower.patch_embed.proj.bias",
                         "language_model.lm_head.weight"}  # fmt: skip
    norm = told[NORM]
    assert (norm["kind"], norm["count"], norm["total"]) == ("numbers", 2, 64)
    assert norm["largest"] == pytest.approx(0.5)
    assert norm["first"][0] == [3]
    assert told[bias]["kind"] == "dtype"
    assert told[bias]["count"] == 0
    assert told["vision_tower.patch_embed.proj.bias"]["kind"] == "only in A"
    assert told["language_model.lm_head.weight"]["kind"] == "shape"
    shown = run("diff", checkpoint, other, "--most", 1).stdout
    assert "... and 3 more" in shown
    assert "DIFFERENT: 4 tensors; largest difference 0.5" in shown


def test_diff_knows_moonlights_names(checkpoint, tmp_path):
    alone = write_folder(tmp_path / "alone", language_alone(random_weights(CONFIG)))
    told = last_json(run("diff", checkpoint, alone, "--json"))["tensors"]
    assert {one["kind"] for one in told} == {"only in A"}
    assert all(one["name"].startswith(("vision_tower", "mm_projector")) for one in told)


def test_numbers_are_compared_by_their_bits():
    x = torch.tensor([[0.0, torch.nan, torch.inf], [1.0, 2.0, 3.0]])
    assert compare_numbers("x", x, x.clone()) is None
    y = x.clone()
    y[0, 0] = -0.0
    found = compare_numbers("x", x, y)
    assert found is not None
    assert (found.count, found.largest, found.first[0]) == (1, 0.0, [0, 0])
    y[1, 2] = torch.nan
    found = compare_numbers("x", x, y)
    assert found is not None
    assert (found.count, found.largest) == (2, torch.inf)


def test_export_and_import_tell_what_they_did(checkpoint, tmp_path):
    out = tmp_path / "out"
    told = run("export", tmp_path / "run", out, "--as", "deepseek_v3", "--max-positions", 64)
    assert told.exit_code == 0, told.output
    assert "44 ... 299 for the special ids" in told.stdout
    place = tmp_path / "again"
    told = run("import", out, place, "--config", "tiny_cpu", *SMALL, "--vision", tmp_path / "hf")
    assert told.exit_code == 0, told.output
    assert run("diff", checkpoint, place).exit_code == 0
    assert run("export", checkpoint, tmp_path / "no", "--as", "llama").exit_code == 2
    there = run("export", checkpoint, out, "--as", "deepseek_v3", "--max-positions", 64)
    assert there.exit_code == 2
    assert "is there already" in there.output
    wrong = run("import", out, tmp_path / "no", "--config", "tiny_cpu")
    assert wrong.exit_code == 2
    assert "vocab_size is 300, model.language.vocab_size is 1792 (and" in wrong.output
    assert not (tmp_path / "no").exists()


def test_a_tokenizer_goes_along(checkpoint, tmp_path):
    from data_pipeline.text import train_ranks

    ranks = tmp_path / "small.tiktoken"
    ranks.write_bytes(train_ranks(["to be or not to be"] * 3, 260))
    out = tmp_path / "out"
    options = ("--as", "kimi_k25", "--max-positions", 64, "--tokenizer", ranks)
    assert run("export", checkpoint, out, *options).exit_code == 0
    assert (out / "tiktoken.model").read_bytes() == ranks.read_bytes()
    config = json.loads((out / "config.json").read_text())
    assert config["media_placeholder_token_id"] == 260 + 21
    assert config["text_config"]["bos_token_id"] == 260


def test_train_refuses_weights_that_are_not_there_before_it_starts_processes(tmp_path):
    start = f"train.start_from={tmp_path / 'none'}"
    arguments = ["train", "--config", "tiny_cpu", "--run-dir", str(tmp_path / "run"), start]
    told = CliRunner().invoke(app, arguments)
    assert told.exit_code == 2
    assert f"train.start_from: {tmp_path / 'none'}: no such folder" in told.output
