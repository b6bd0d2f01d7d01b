"""Tests that one rank reads each shared tensor and that an error on one rank reaches all."""

import threading

import pytest
import torch

from data_pipeline.store.open import AccessDenied
from kimi_pretrain.checkpoint.collective_read import on_all_ranks, tensors_to_read
from kimi_pretrain.checkpoint.errors import CheckpointError, CheckpointUnavailable
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.storage_read import Checkpoint, open_place
from tests.unit.kimi_pretrain.checkpoint import ranks

OWN = "optim.momentum.language_model.lm_head.weight"


@pytest.fixture
def saved(tmp_path):
    ranks.save(tmp_path, 3)
    return open_place(tmp_path)


def empty() -> dict[str, torch.Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in ranks.tensors().items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_each_copy_is_read_by_one_rank(saved, monkeypatch, world_size):
    read: list[str] = []
    plain, lock = Checkpoint.read_into, threading.Lock()

    def read_into(self, name: str, tensor: torch.Tensor) -> None:
        with lock:
            read.append(name)
        plain(self, name, tensor)

    monkeypatch.setattr(Checkpoint, "read_into", read_into)
    expected = ranks.tensors(3)
    copies = {name: "encoder" for name in expected if name != OWN}

    def work(mesh):
        tensors = empty()
        state = load(saved.checkpoint(3), tensors, mesh=mesh, copies=copies)
        return tensors, state

    for tensors, state in ranks.on_ranks(world_size, work):
        assert state == ranks.state(3, 3)
        assert all(torch.equal(tensors[name], value) for name, value in expected.items())
    assert {name: read.count(name) for name in expected if name != "optim.step"} == {
        name: world_size if name == OWN else 1 for name in expected if name != "optim.step"
    }


def test_turns_are_shared_out_within_a_group():
    names = ["b", "a", "d", "c", "own"]
    copies = {"a": "dense", "b": "dense", "c": "expert", "d": "dense", "other": "dense"}
    found = ranks.on_ranks(2, lambda mesh: tensors_to_read(names, copies, mesh))
    assert found == [["a", "c", "d", "own"], ["b", "own"]]
    assert tensors_to_read(names, copies, None) == sorted(names)


@pytest.mark.parametrize("broken", ["a shape", "a file"])
def test_what_fails_on_one_rank_fails_on_all(saved, monkeypatch, broken):
    """All ranks raise the same error; an error detected in advance changes no tensor."""
    copies = {name: "encoder" for name in ranks.tensors() if name != OWN}

    def work(mesh):
        tensors = empty()
        if mesh.rank == 1 and broken == "a shape":
            tensors[OWN] = torch.zeros(2)
        checkpoint = saved.checkpoint(3)
        if mesh.rank == 1 and broken == "a file":
            own = checkpoint._files
            monkeypatch.setattr(own, "read_into", _stale, raising=False)
        kind = CheckpointError if broken == "a shape" else CheckpointUnavailable
        with pytest.raises(kind) as told:
            load(checkpoint, tensors, mesh=mesh, copies=copies)
        changed = any(tensor.any() for tensor in tensors.values())
        return str(told.value), changed

    (first, changed), (second, _) = ranks.on_ranks(2, work)
    assert first == second
    if broken == "a shape":
        assert f"{OWN!r} is torch.float32" in first
        assert not changed
    else:
        assert "Stale file handle" in first


def _stale(*_: object) -> None:
    raise CheckpointUnavailable("a.safetensors: Stale file handle")


@pytest.mark.parametrize(
    "error",
    [
        OSError(116, "Stale file handle"),
        AccessDenied("s3://b: access denied"),
        RuntimeError("full"),
    ],
)
def test_whatever_the_error_no_rank_waits_for_the_one_that_met_it(error):
    def work(mesh):
        def fail() -> None:
            if mesh.rank == 2:
                raise error

        with pytest.raises(type(error), match=str(error.args[-1])):
            on_all_ranks(fail, mesh)

    ranks.on_ranks(3, work)
