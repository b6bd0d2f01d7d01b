"""Runs the code of the pages docs/alone/muonclip.md and docs/alone/assignment.md unchanged."""

import torch
import torch.distributed as dist

from tests import docs


def test_muonclip(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # Port 0 stands for any free port.
    for name, value in (("RANK", 0), ("WORLD_SIZE", 1), ("MASTER_PORT", 0)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    try:
        scope = docs.run("docs/alone/muonclip.md")
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    saved = torch.load("optimizer.pt", weights_only=True)
    assert {entry["step"].item() for entry in saved["state"].values()} == {3}
    assert saved["param_groups"][0]["lr"] < 2e-4
    assert scope["state"]["state"].keys() == saved["state"].keys()


def test_assignment():
    scope = docs.run("docs/alone/assignment.md")
    assert 1 <= scope["balance"] < 1.02

    assert scope["stays"] > 300  # a random assignment keeps about 25
    assert scope["stays"] + scope["inside_node"] > scope["across_nodes"]
    assert scope["parts"].max() > 1
