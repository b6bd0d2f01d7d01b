"""Ranks as threads of one process, with enough of a mesh to save and find checkpoints."""

import hashlib
import json
import os
import pickle
import signal
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from kimi_pretrain.checkpoint.manifest import RunState
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.checkpoint.writer_client import WriterClient
from kimi_pretrain.config import load_config
from kimi_pretrain.parallel.errors import Outcome

TIMEOUT = 60.0


def strike(pid: int, number: int) -> None:
    """Send a signal to a child; for SIGSTOP, return once all its threads have stopped."""
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


def stop_before(saver: CheckpointSaver, job: str, monkeypatch) -> WriterClient:
    """Stop the writer (SIGSTOP) right before it gets a job of this kind."""
    writer = saver._writer
    assert writer is not None
    plain = writer.send

    def send(do: str, **values) -> None:
        if do == job:
            strike(writer.pid, signal.SIGSTOP)
        plain(do, **values)

    monkeypatch.setattr(writer, "send", send)
    return writer


class Threads:
    """State that the ranks of a test share."""

    def __init__(self, world_size: int):
        self.values: list[Any] = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=TIMEOUT)


class Mesh:
    """Mesh of one rank."""

    device = torch.device("cpu")

    def __init__(self, rank: int, threads: Threads):
        self.rank, self.world_size, self._threads = rank, len(threads.values), threads

    def all_gather_object(self, value: object) -> list[object]:
        self._threads.values[self.rank] = value
        self._threads.barrier.wait()
        values = list(self._threads.values)
        self._threads.barrier.wait()
        return values

    def broadcast_from_rank0(self, make: Callable[[], Any]) -> Any:
        outcome = Outcome.of(make) if self.rank == 0 else Outcome()
        sent: list[Any] = self.all_gather_object(pickle.dumps(outcome.sendable()))
        return (outcome if self.rank == 0 else pickle.loads(sent[0])).result()

    def index_in(self, group: str) -> tuple[int, int]:
        """Return the rank and the world size; every group holds all ranks."""
        return self.rank, self.world_size

    def broadcast_copies(self, group: str, tensors: Sequence[torch.Tensor]) -> None:
        for index, tensor in enumerate(tensors):
            everyone: list[Any] = self.all_gather_object(tensor)
            copied = everyone[index % self.world_size].clone()
            self.all_gather_object(None)  # all ranks must read before any rank writes
            tensor.copy_(copied)


def alone() -> Mesh:
    return Mesh(0, Threads(1))


def on_ranks(world_size: int, work: Callable[[Mesh], Any]) -> list[Any]:
    """Run `work` on each rank and return the results; an error on one rank stops all ranks."""
    threads = Threads(world_size)

    def one(rank: int) -> Any:
        try:
            return work(Mesh(rank, threads))
        except BaseException:
            threads.barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(one, rank) for rank in range(world_size)]
        errors = [error for f in futures if (error := f.exception(timeout=TIMEOUT))]
        for error in sorted(errors, key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]


def config(*overrides: str):
    return load_config("tiny_cpu", overrides)


def tensors(seed: int = 0, size: int = 64) -> dict[str, torch.Tensor]:
    """Return a small model's state, as one rank holds it."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "language_model.model.norm.weight": torch.randn(size, generator=draw),
        "language_model.lm_head.weight": torch.randn(size, 33, generator=draw).bfloat16(),
        "vision_tower.wo.weight": torch.randn(7, size, generator=draw),
        "optim.momentum.language_model.lm_head.weight": torch.randn(size, 33, generator=draw),
        "optim.step": torch.tensor(seed),
    }


def state(step: int, updates: int = 0) -> RunState:
    return RunState(step, updates, {"position": step * 8}, (1.5, 0.1))


def sealed(values: dict[str, Any]) -> str:
    """Return the text of a manifest.json with the hash of these values."""
    plain = {key: value for key, value in values.items() if key != "sha256"}
    told = hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()
    return json.dumps({**plain, "sha256": told})


def unsealed(values: dict[str, Any]) -> str:
    """Return the text of a manifest.json without a hash, as earlier versions wrote it."""
    return json.dumps(
        {key: value for key, value in values.items() if key != "sha256"} | {"schema": 2}
    )


def change_manifest(folder, change: Callable[[Any], object], text=sealed) -> None:
    """Change a checkpoint's manifest and write it back, by default with a matching hash."""
    values = json.loads((folder / "manifest.json").read_text())
    change(values)
    (folder / "manifest.json").write_text(text(values))


def save(folder, *steps: int, overrides: tuple[str, ...] = (), size: int = 64) -> None:
    """Write checkpoints of these steps from one rank; step n holds the values of seed n."""
    checkpoints = CheckpointSaver(open_place(folder), config(*overrides), alone())  # type: ignore
    try:
        for step in steps:
            checkpoints.begin(tensors(step, size), state(step, step))
            checkpoints.finish()
    finally:
        checkpoints.close()
