"""Tests that rank 0 gathers a job's hashes in small pieces and that differing copies are found."""

import pickle
from typing import Any

import pytest
import torch

from kimi_pretrain.checkpoint import hashes
from kimi_pretrain.checkpoint.hashes import hash_tensor, hash_tensors
from kimi_pretrain.parallel.errors import Outcome
from tests.unit.kimi_pretrain.checkpoint.ranks import Mesh, on_ranks


def held(rank: int, stages: int = 2) -> dict[str, torch.Tensor]:
    """Return a rank's tensors: its stage's layers, the encoder, and state that only it holds."""
    own = [f"stage.{rank % stages}.{layer}" for layer in range(3)]
    own += ["encoder", f"optim.{rank}.a", f"optim.{rank}.b"]
    return {name: torch.tensor([hash_of(name), 1.0]) for name in own}


def hash_of(name: str) -> float:
    return float(sum(name.encode()))


def plain(world_size: int) -> dict[str, str]:
    """Return the hashes of all ranks' tensors, as the reference."""
    everything = {n: t for rank in range(world_size) for n, t in held(rank).items()}
    return {name: hash_tensor(tensor) for name, tensor in sorted(everything.items())}


@pytest.mark.parametrize("world_size", [1, 2, 5])
@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_rank_0_has_every_tensor_of_the_job(world_size, piece, monkeypatch):
    monkeypatch.setattr(hashes, "PIECE", piece)
    monkeypatch.setattr(hashes, "TOGETHER", 0)
    first, *others = on_ranks(world_size, lambda mesh: hash_tensors(held(mesh.rank), mesh))
    assert list(first.items()) == list(plain(world_size).items())  # in the same order
    assert others == [{}] * (world_size - 1)


@pytest.mark.parametrize("name", ["encoder", "stage.1.2"])
@pytest.mark.parametrize("rank", [1, 3])
def test_a_copy_that_differs_is_named_on_all_ranks(name, rank):
    def work(mesh: Mesh) -> str:
        mine = held(mesh.rank)
        if mesh.rank == rank:
            mine[name][1] += 1e-6
        with pytest.raises(RuntimeError) as told:
            hash_tensors(mine, mesh)
        return str(told.value)

    first = rank if (name, rank) != ("stage.1.2", 1) else 3  # rank 1 holds the first copy
    assert on_ranks(4, work) == [f"rank {first} holds another {name} than the ranks before it"] * 4


def test_copies_are_sent_once_and_in_bounded_pieces(monkeypatch):
    monkeypatch.setattr(hashes, "PIECE", 64)
    monkeypatch.setattr(hashes, "TOGETHER", 64 * 8)
    sent: dict[int, list[bytes]] = {rank: [] for rank in range(8)}

    class Counting(Mesh):
        def __init__(self, mesh: Mesh):
            super().__init__(mesh.rank, mesh._threads)
            self.broadcast_from_rank0 = mesh.broadcast_from_rank0  # its messages are not hashes

        def all_gather_object(self, value: Any) -> list[Any]:
            sent[self.rank].append(pickle.dumps(value))
            return super().all_gather_object(value)

    def work(mesh: Mesh) -> dict[str, str]:
        mine = {n: t for n, t in held(mesh.rank).items() if not n.startswith("optim")}
        return hash_tensors(mine, Counting(mesh))  # type: ignore[arg-type]

    found = on_ranks(8, work)[0]
    assert len(found) == 7
    done = len(pickle.dumps(pickle.dumps(Outcome())))  # as `broadcast_from_rank0` sends it
    most = max(len(pickle.dumps("0" * 64)) + 20, done)  # a digest, a piece of 64 bytes, or "done"
    assert max(len(one) for all_of_one in sent.values() for one in all_of_one) <= most
    told = [sum(len(one) for one in sent[rank]) for rank in range(8)]
    empty = len(pickle.dumps(b""))
    assert min(told[:2]) > 200  # four hashes
    assert max(told[2:]) <= most * 3 + empty * len(sent[2])  # ranks 2 to 7 hold copies
