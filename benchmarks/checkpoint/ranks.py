"""One process of the checkpoint benchmark: saves and loads, in turns with the baselines.

State is laid out as in ZeRO-1: each rank has private state, and all ranks have the same weights.
Each rank writes its private state and its part of the weights.
"""

import json
import math
import os
import shutil
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.checkpoint import disk
from kimi_pretrain.checkpoint.find import find
from kimi_pretrain.checkpoint.load import load
from kimi_pretrain.checkpoint.manifest import RunState
from kimi_pretrain.checkpoint.saver import CheckpointSaver
from kimi_pretrain.checkpoint.storage_read import open_place
from kimi_pretrain.config import load_config

MIB = 1 << 20
TENSOR_MIB = 16
OWN_SHARE = 0.75  # private share of the bytes that a rank writes
# A step multiplies such matrices, which takes most of a second on one core. That is short for a
# rank that writes a GiB; steps of real training are far longer.
STEP_SIDE, STEP_PRODUCTS = 1536, 6
STEPS = 4  # minimum number of steps without a save


class Mesh:
    """The part of the engine's mesh that a save uses."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def all_gather_object(self, value: object) -> list[Any]:
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value)
        return values

    def broadcast_from_rank0(self, make: Callable[[], Any]) -> Any:
        return self.all_gather_object(make() if self.rank == 0 else None)[0]


def held(rank: int, world_size: int, mib: int) -> dict[str, Tensor]:
    """Return tensors of which each rank writes `mib` MiB."""
    draw = torch.Generator().manual_seed(rank)
    count = max(1, round(mib * OWN_SHARE / TENSOR_MIB))
    both = max(1, round(mib * (1 - OWN_SHARE) / TENSOR_MIB)) * world_size
    shape = (TENSOR_MIB * MIB // 4 // 1024, 1024)
    own = {f"optim.momentum.{rank}.{n:03d}": torch.empty(shape) for n in range(count)}
    shared = {f"language_model.{n:03d}.weight": torch.empty(shape) for n in range(both)}
    for tensor in (*own.values(), *shared.values()):
        tensor.normal_(generator=draw)
    return own | shared


class Measured:
    """Measurements of the ranks, round by round."""

    def __init__(self, mesh: Mesh, root: Path, mib: int):
        self.mesh, self.root, self.mib = mesh, root, mib
        self.tensors = held(mesh.rank, mesh.world_size, mib)
        self.config = load_config("tiny_cpu", ("checkpoint.keep_last=1",))
        self.place = open_place(root / "checkpoints")
        self.saver = CheckpointSaver(self.place, self.config, mesh)  # type: ignore[arg-type]
        self.step = 0
        self.source = Path("/dev/shm") / f"bench_checkpoint_{os.getpid()}"
        with self.source.open("wb") as file:
            for _ in range(mib):
                file.write(os.urandom(MIB))
        self.matrix = torch.randn(STEP_SIDE, STEP_SIDE)

    def together(self, seconds: float) -> float:
        """Return the seconds of the slowest rank."""
        return max(self.mesh.all_gather_object(seconds))

    def state(self) -> RunState:
        self.step += 1
        return RunState(self.step, self.step)

    def round(self) -> dict[str, float]:
        """Measure everything once and return the seconds."""
        found: dict[str, float] = {}
        for way in disk.WAYS:
            self.mesh.all_gather_object(None)
            found[f"dd {way}"] = self.together(disk.write(self.source, self._file("dd"), way))
        self.mesh.all_gather_object(None)
        mine = dict(list(self.tensors.items())[: self._mine()])
        found["torch.save"] = self.together(disk.save_by_torch(mine, self._file("pt")))
        found |= self._save() | self._load(mine)
        self._file("pt").unlink()
        found |= self._background()
        return found

    def _mine(self) -> int:
        """Return the number of tensors with as many bytes as this rank writes."""
        return self.mib // TENSOR_MIB

    def _file(self, suffix: str) -> Path:
        return self.root / f"rank_{self.mesh.rank}.{suffix}"

    def _save(self) -> dict[str, float]:
        """Return the seconds of a synchronous save."""
        start = time.perf_counter()
        self.saver.begin(self.tensors, self.state())
        self.saver.finish()
        return {"save": self.together(time.perf_counter() - start)}

    def _load(self, mine: dict[str, Tensor]) -> dict[str, float]:
        folder = self.root / "checkpoints" / f"step_{self.step:08d}"
        files = sorted(folder.glob(f"rank_{self.mesh.rank:05d}_*"))
        self.mesh.all_gather_object(disk.forget([*files, self._file("pt")]))
        found = {"dd reads": self.together(disk.read(files))}
        self.mesh.all_gather_object(disk.forget([*files, self._file("pt")]))
        start = time.perf_counter()
        checkpoint = find("latest", self.place, self.config, self.mesh)  # type: ignore[arg-type]
        assert checkpoint is not None
        verified = time.perf_counter()
        load(checkpoint, self.tensors)
        found["verify"] = self.together(verified - start)
        found["load"] = self.together(time.perf_counter() - verified)
        found["torch.load"] = self.together(disk.load_by_torch(self._file("pt"), mine))
        return found

    def _background(self) -> dict[str, float]:
        """Return the stall of a background save, and the step time without a save and during it."""
        alone = self._steps(lambda: True)
        start = time.perf_counter()
        self.saver.begin(self.tensors, self.state(), lambda name: True)
        begun = time.perf_counter() - start
        self._compute()
        start = time.perf_counter()
        self.saver.wait_staged()  # the optimizer update would come here
        stall = self.together(begun + time.perf_counter() - start)
        during = self._steps(lambda: self.saver.under_way is None)
        alone = (alone + self._steps(lambda: True)) / 2
        return {"stall": stall, "step": alone, "step while saving": during}

    def _steps(self, over: Any) -> float:
        """Return the mean seconds of a step, over at least `STEPS` steps if no save is running."""
        least, count, start = (STEPS if self.saver.under_way is None else 1), 0, time.perf_counter()
        while True:
            self._compute()
            self.saver.advance(self.mesh.all_gather_object(self.saver.progress()))
            count += 1
            if count >= least and over():
                return self.together((time.perf_counter() - start) / count)

    def _compute(self) -> None:
        for _ in range(STEP_PRODUCTS):
            self.matrix @ self.matrix

    def close(self) -> None:
        self.saver.close()
        self.source.unlink()


def work(rank: int, world_size: int, folder: str, mib: int, rounds: int) -> None:
    """Run as one rank; rank 0 writes `rounds.json`."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size,
        timeout=timedelta(minutes=10),
    )  # fmt: skip
    measured = Measured(Mesh(), Path(folder), mib)
    try:
        first = measured._background()["stall"]  # allocates the staging memory
        found = [measured.round() for _ in range(rounds)]
        total = measured.mesh.world_size * mib * MIB
        if rank == 0:
            everything = {"bytes": total, "first_stall": first, "rounds": found}
            Path(folder, "rounds.json").write_text(json.dumps(everything))
    finally:
        measured.close()
        shutil.rmtree(Path(folder, "checkpoints"), ignore_errors=True)
    dist.barrier()
    dist.destroy_process_group()


def rate(size: int, seconds: float) -> float:
    """Return GiB per second."""
    return size / seconds / 2**30 if seconds else math.nan
