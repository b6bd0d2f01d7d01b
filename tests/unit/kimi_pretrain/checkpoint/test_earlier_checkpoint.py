"""Tests that a checkpoint of 2026-11-22 still loads and is still written with the same bytes."""

from pathlib import Path

import torch

from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.manifest import RunState, parse_manifest
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_checkpoint, open_place
from tests.unit.kimi_pretrain.checkpoint import ranks

EARLIER = Path(__file__).parent / "earlier" / "step_00000003"
STATE = RunState(3, 2, {"step": 3, "position": 24}, (1.5, 0.25))


def held() -> dict[str, torch.Tensor]:
    return {
        "language_model.lm_head.weight": torch.arange(12).reshape(3, 4).bfloat16(),
        "vision_tower.patch_embed.proj.bias": torch.arange(5) / 8,
        "optim.momentum.language_model.lm_head.weight": -torch.arange(12).reshape(3, 4).float(),
        "optim.step": torch.tensor(2),
    }


def test_a_checkpoint_of_an_earlier_version_is_read():
    checkpoint = open_checkpoint(EARLIER)
    assert checkpoint.verify() == []
    found = {name: torch.zeros_like(tensor) for name, tensor in held().items()}
    assert load(checkpoint, found) == STATE
    assert all(torch.equal(found[name], tensor) for name, tensor in held().items())


def test_the_same_state_is_written_alike(tmp_path):
    saver = CheckpointSaver(open_place(tmp_path), ranks.config(), ranks.alone())  # type: ignore
    saver.begin(held(), STATE)
    saver.finish()
    saver.close()
    now = tmp_path / EARLIER.name
    assert sorted(file.name for file in now.iterdir()) == sorted(f.name for f in EARLIER.iterdir())
    for file in ("rank_00000_000.safetensors", "index.json"):
        assert (now / file).read_bytes() == (EARLIER / file).read_bytes()


def test_the_manifest_is_written_alike():
    text = (EARLIER / "manifest.json").read_text()
    assert parse_manifest(text, "there").text() == text
